//! Beam cases: sequences, scores and parents equal the recorded ones.

use kiln::{Completion, StopReason, TokenId};
use serde_json::Value;

use super::{Folder, Mismatch, case::Case};

/// Tolerance of the score of a sequence; relative if the score is above 1.
const TOLERANCE: f32 = 2e-4;

pub(super) fn check(folder: &Folder, completions: &[Vec<Completion>], case: &Case) -> Result<(), Mismatch> {
    let returned: Vec<(usize, &Completion)> = completions
        .iter()
        .enumerate()
        .flat_map(|(prompt, completions)| completions.iter().map(move |completion| (prompt, completion)))
        .collect();
    if returned.len() != case.sequences.len() {
        let (got, want) = (returned.len(), case.sequences.len());
        return Err(Mismatch::new(format!("{got} sequences, {want} were recorded")));
    }
    for (i, ((prompt, completion), want)) in returned.into_iter().zip(&case.sequences).enumerate() {
        let wrong = |why: String| Mismatch::new(format!("sequence {i}: {why}"));
        let want = want.get(case.input_ids[prompt].len()..).unwrap_or_default();
        let got = written(folder, completion, case);
        let (generated, filled) = want.split_at(got.len().min(want.len()));
        let ended = completion.stop_reason == Some(StopReason::EndOfText);
        if got != generated || !(filled.is_empty() || ended) {
            return Err(wrong(format!("{got:?}, {want:?} was recorded")));
        }
        if let Some(&score) = case.sequences_scores.get(i) {
            let got = completion.score.unwrap_or(f32::NAN);
            let difference = (got - score).abs();
            if difference.is_nan() || difference > TOLERANCE * score.abs().max(1.0) {
                return Err(wrong(format!("the score is {got}, {score} was recorded")));
            }
        }
        if let Some(want) = case.beam_indices.get(i) {
            check_parents(folder, case, completion, want).map_err(wrong)?;
        }
    }
    Ok(())
}

/// Returns the tokens of a completion as the reference writes them: 4.47 replaces any end token by the first
/// one.
fn written(folder: &Folder, completion: &Completion, case: &Case) -> Vec<TokenId> {
    let mut tokens = completion.tokens.clone();
    if folder.is_4_47()
        && completion.stop_reason == Some(StopReason::EndOfText)
        && let (Some(last), Some(&first)) = (tokens.last_mut(), case.eos().first())
    {
        *last = first;
    }
    tokens
}

/// Checks that the tokens of a completion continue the recorded rows.
fn check_parents(
    folder: &Folder,
    case: &Case,
    completion: &Completion,
    recorded: &[i64],
) -> Result<(), String> {
    let number = |name: &str| case.kwargs.get(name).and_then(Value::as_u64).unwrap_or(1) as usize;
    let groups = number("num_beam_groups");
    let in_groups = folder.is_4_47() && groups > 1;
    if in_groups && (case.input_ids.len() > 1 || completion.stop_reason == Some(StopReason::EndOfText)) {
        // 4.47 mixes up the rows if there are several prompts, and the rows of sequences that end before the
        // others.
        return Ok(());
    }
    // 4.47 counts the beams of each group from 0.
    let of_group = if in_groups { number("num_beams") / groups } else { usize::MAX };
    let got: Vec<usize> = completion.beam_indices.iter().map(|row| row % of_group).collect();
    let want: Vec<usize> = recorded.iter().map_while(|&row| usize::try_from(row).ok()).collect();
    match got == want {
        true => Ok(()),
        false => Err(format!("its tokens continue rows {got:?}, {want:?} was recorded")),
    }
}
