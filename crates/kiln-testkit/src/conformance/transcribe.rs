//! Speech cases: a recording, and the segments that were transcribed from it.

use kiln::{Audio, Model, Plan, Segment, Task, TokenId, Transcriber};
use serde_json::Value;

use super::{Folder, Mismatch, case::Case};

/// Tolerance of a time in seconds. Times are multiples of 20 ms.
const CLOSE: f64 = 0.005;

/// Returns the feature that an argument of `generate()` asks for, if Kiln does not support it.
pub(super) fn not_yet(name: &str) -> Option<String> {
    let known = [
        "language",
        "task",
        "condition_on_prev_tokens",
        "prompt_ids",
        "temperature",
        "logprob_threshold",
        "no_speech_threshold",
        "compression_ratio_threshold",
        "num_beams",
        "return_token_timestamps",
    ];
    (!known.contains(&name)).then(|| format!("the argument `{name}` is not implemented yet"))
}

pub(super) async fn run(folder: &Folder, case: &Case, model: &Model, plan: &Plan) -> Result<f64, Mismatch> {
    let (_, samples) = folder.tensor(case.wave.as_deref().unwrap_or_default())?;
    let transcriber = transcriber(case, model, plan)?;
    let mut transcript = transcriber.transcribe(Audio::Samples(samples))?;
    let mut segments: Vec<Segment> = Vec::new();
    while let Some(segment) = transcript.next_segment().await {
        segments.push(segment?);
    }
    let tokens: Vec<TokenId> = segments.iter().flat_map(|segment| segment.tokens.clone()).collect();
    if tokens != case.tokens {
        return Err(Mismatch::new(format!("heard {tokens:?}, {:?} was recorded", case.tokens)));
    }
    if segments.len() != case.segments.len() {
        let (got, want) = (segments.len(), case.segments.len());
        return Err(Mismatch::new(format!("{got} segments, {want} were recorded")));
    }
    for (got, &(start, end)) in segments.iter().zip(&case.segments) {
        // A segment ends with the recording at the latest.
        if (got.start - start).abs() > CLOSE || got.end - end > CLOSE {
            let why = format!("a segment from {} to {}, {start} to {end} was recorded", got.start, got.end);
            return Err(Mismatch::new(why));
        }
    }
    if case.token_times.is_empty() {
        return Ok(0.0);
    }
    // Each text token is one word.
    let timestamps = segments.iter().flat_map(|segment| &segment.tokens).zip(&case.token_times);
    let eos = model.generation_config().eos_token_id.clone().unwrap_or_default();
    let want = timestamps.filter(|(token, _)| eos.iter().all(|eos| *token < eos)).map(|(_, time)| *time);
    let want: Vec<f64> = want.collect();
    let got: Vec<f64> = segments.iter().flat_map(|segment| &segment.words).map(|word| word.start).collect();
    let close =
        got.len() == want.len() && got.iter().zip(&want).all(|(got, want)| (got - want).abs() < CLOSE);
    match close {
        true => Ok(0.0),
        false => Err(Mismatch::new(format!("words begin at {got:?}, {want:?} was recorded"))),
    }
}

/// Creates a transcriber with the arguments of the case and no others.
fn transcriber(case: &Case, model: &Model, plan: &Plan) -> Result<Transcriber, Mismatch> {
    let number = |key: &str| case.kwargs.get(key).and_then(Value::as_f64).map(|number| number as f32);
    let text = |key: &str| case.kwargs.get(key).and_then(Value::as_str);
    let is = |key: &str| case.kwargs.get(key).and_then(Value::as_bool).unwrap_or(false);
    let mut transcriber = Transcriber::new(model)?
        .plan(plan.clone())?
        .temperatures(vec![number("temperature").unwrap_or(0.0)])?
        .logprob_threshold(number("logprob_threshold"))
        .no_speech_threshold(number("no_speech_threshold"))
        .compression_ratio_threshold(number("compression_ratio_threshold"))
        .condition_on_prev_tokens(is("condition_on_prev_tokens"))
        .num_beams(number("num_beams").map_or(1, |beams| beams as usize))?
        .word_times(is("return_token_timestamps"))?;
    if let Some(language) = text("language") {
        transcriber = transcriber.language(language)?;
    }
    if text("task") == Some("translate") {
        transcriber = transcriber.task(Task::Translate)?;
    }
    if let Some(Value::Array(ids)) = case.kwargs.get("prompt_ids") {
        // The first token marks the beginning of the previous text.
        let ids: Vec<TokenId> =
            ids.iter().skip(1).filter_map(Value::as_u64).map(|id| id as TokenId).collect();
        transcriber = transcriber.initial_prompt(&model.decode(&ids)?)?;
    }
    Ok(transcriber)
}
