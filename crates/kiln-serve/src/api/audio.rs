//! `/v1/audio/transcriptions` and `/v1/audio/translations`

use std::{convert::Infallible, sync::Arc};

use axum::{
    Json,
    extract::{Multipart, State, multipart::MultipartRejection},
    http::header,
    response::{IntoResponse, Response, Sse, sse::Event},
};
use futures_util::stream;
use kiln::{
    AudioReader, Error, Result, Segment, SubtitleFormat, Subtitles, Task, Transcriber, Transcript, Word,
};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::{Server, body::in_time};
use crate::{
    error::ApiError,
    fields as known,
    models::{Models, Served},
    worker::Turns,
};

/// Largest recording, in bytes.
pub(super) const LARGEST_RECORDING: usize = 64 << 20;

/// Most fields of a form beside the file, the bytes of one, and the characters of a name.
const MOST_FIELDS: usize = 64;
const LONGEST_TEXT: usize = 64 << 10;
const LONGEST_NAME: usize = 200;

/// Number of segments that a reader may be behind.
const BEHIND: usize = 64;

/// A step of a transcription.
enum Told {
    Segment(Segment),
    Ended(Ended),
    Failed(ApiError),
}

/// The properties of a whole recording.
#[derive(Default)]
struct Ended {
    language: Option<String>,
    /// Seconds of sound.
    duration: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Json,
    Verbose,
    Text,
    Subtitles(SubtitleFormat),
}

/// A request, as its form has it.
#[derive(Default)]
struct Upload {
    /// The name and the contents of the file.
    file: Option<(String, Vec<u8>)>,
    fields: Map<String, Value>,
}

pub(super) async fn transcribe(
    State(models): Server,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Response, ApiError> {
    answer(models, Task::Transcribe, form).await
}

pub(super) async fn translate(
    State(models): Server,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Response, ApiError> {
    answer(models, Task::Translate, form).await
}

async fn answer(
    models: Arc<Models>,
    task: Task,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Response, ApiError> {
    let multipart = form.map_err(|error| ApiError::new(error.status(), error.body_text()))?;
    let mut upload = in_time(Upload::read(multipart)).await?;
    known::check(&mut upload.fields, &[known::AUDIO])?;
    let Some((name, bytes)) = upload.file.take() else { return Err(ApiError::field("file", "is missing")) };
    let Some(model) = upload.text("model") else { return Err(ApiError::field("model", "is missing")) };
    let format = upload.format()?;
    let streams = match upload.text("stream") {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(ApiError::field("stream", "must be true or false")),
    };
    let served = models.get(Some(model)).await?;
    let Some(transcriber) = &served.transcriber else {
        let why = format!("`{model}` takes text and no sound; ask for a Whisper model");
        return Err(ApiError::field("model", why));
    };
    let transcriber = upload.settings(transcriber.clone(), task)?;
    let (told, mut steps) = mpsc::channel(BEHIND);
    // A model is not unloaded while it transcribes, though the client may have left.
    let own = served.clone();
    let compute = async move |turns: Turns| {
        transcribe_all(&transcriber, &name, bytes, &turns, &told).await;
        drop(own);
    };
    served.worker.run(compute)?;
    if streams {
        return Ok(stream_of(steps));
    }
    let (mut segments, mut ended) = (Vec::new(), Ended::default());
    while let Some(step) = steps.recv().await {
        match step {
            Told::Segment(segment) => segments.push(segment),
            Told::Ended(own) => ended = own,
            Told::Failed(error) => return Err(error),
        }
    }
    Ok(whole(&served, task, format, upload.words()?, &segments, &ended))
}

impl Upload {
    async fn read(mut multipart: Multipart) -> Result<Self, ApiError> {
        let wrong = |error: axum::extract::multipart::MultipartError| {
            ApiError::new(error.status(), format!("the form cannot be read: {}", error.body_text()))
        };
        let mut upload = Self::default();
        while let Some(field) = multipart.next_field().await.map_err(wrong)? {
            // Lists have brackets after their name.
            let name = field.name().unwrap_or_default();
            let is_list = name.ends_with("[]");
            let name: String = name.trim_end_matches("[]").chars().take(LONGEST_NAME).collect();
            if name == "file" {
                let file = field.file_name().unwrap_or("the recording").chars().take(LONGEST_NAME).collect();
                upload.file = Some((file, field.bytes().await.map_err(wrong)?.to_vec()));
                continue;
            }
            let text = field.text().await.map_err(wrong)?;
            if text.len() > LONGEST_TEXT || upload.fields.len() >= MOST_FIELDS {
                let why = format!("a form has {MOST_FIELDS} fields, each of {LONGEST_TEXT} bytes");
                return Err(ApiError::field(&name, why));
            }
            let place = upload.fields.entry(name.clone());
            match place.or_insert_with(|| if is_list { json!([]) } else { Value::Null }) {
                Value::Array(list) if list.len() < MOST_FIELDS => list.push(text.into()),
                empty @ Value::Null => *empty = text.into(),
                _ => return Err(ApiError::field(&name, "is given too often")),
            }
        }
        Ok(upload)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.fields.get(name)?.as_str().filter(|text| !text.is_empty())
    }

    fn format(&self) -> Result<Format, ApiError> {
        Ok(match self.text("response_format").unwrap_or("json") {
            "json" => Format::Json,
            "verbose_json" => Format::Verbose,
            "text" => Format::Text,
            "srt" => Format::Subtitles(SubtitleFormat::Srt),
            "vtt" => Format::Subtitles(SubtitleFormat::Vtt),
            other => {
                let why = format!("is `{other}`, must be json, text, srt, verbose_json or vtt");
                return Err(ApiError::field("response_format", why));
            }
        })
    }

    /// Whether the times of words are asked for.
    fn words(&self) -> Result<bool, ApiError> {
        let all = match self.fields.get("timestamp_granularities") {
            Some(Value::Array(list)) => list.clone(),
            Some(one) => vec![one.clone()],
            None => Vec::new(),
        };
        if let Some(other) = all.iter().find(|one| !["word", "segment"].iter().any(|known| one == known)) {
            let why = format!("{other} is none; there are `word` and `segment`");
            return Err(ApiError::field("timestamp_granularities", why));
        }
        Ok(all.iter().any(|one| one == "word"))
    }

    /// Applies the settings of the request.
    fn settings(&self, transcriber: Transcriber, task: Task) -> Result<Transcriber, ApiError> {
        let of = |name: &'static str| {
            move |error: Error| ApiError::field(name, kiln::expert::plain(&error.to_string()))
        };
        let mut transcriber = transcriber;
        if let Some(language) = self.text("language") {
            transcriber = transcriber.language(language).map_err(of("language"))?;
        }
        if task == Task::Translate {
            transcriber = transcriber.task(task).map_err(of("model"))?;
        }
        if let Some(prompt) = self.text("prompt") {
            transcriber = transcriber.initial_prompt(prompt).map_err(of("prompt"))?;
        }
        if self.words()? {
            transcriber = transcriber.word_times(true).map_err(of("timestamp_granularities"))?;
        }
        if let Some(text) = self.text("temperature") {
            let temperature = text.parse::<f32>().ok().filter(|t| (0.0..=1.0).contains(t));
            let temperature =
                temperature.ok_or_else(|| ApiError::field("temperature", "must be a number from 0 to 1"))?;
            // 0 begins with the likeliest text, and raises the temperature where it is unlikely.
            if temperature > 0.0 {
                transcriber = transcriber.temperatures([temperature]).map_err(of("temperature"))?;
            }
        }
        Ok(transcriber)
    }
}

/// Transcribes a recording, and tells its segments. Other models compute between two of them.
async fn transcribe_all(
    transcriber: &Transcriber,
    name: &str,
    bytes: Vec<u8>,
    turns: &Turns,
    told: &mpsc::Sender<Told>,
) {
    let begin = || -> Result<Transcript> { transcriber.transcribe(AudioReader::from_bytes(name, bytes)?) };
    let mut transcript = match begin() {
        Ok(transcript) => transcript,
        Err(error) => {
            let why = kiln::expert::plain(&error.to_string());
            _ = told.send(Told::Failed(ApiError::field("file", why))).await;
            return;
        }
    };
    loop {
        let step = {
            let _turn = turns.lock().await;
            transcript.next_segment().await
        };
        let (step, is_last) = match step {
            Some(Ok(segment)) => (Told::Segment(segment), false),
            Some(Err(error)) => (Told::Failed(error.into()), true),
            None => {
                let duration = transcript.progress().1.as_secs_f64();
                (Told::Ended(Ended { language: transcript.language().map(str::to_owned), duration }), true)
            }
        };
        // Nobody waits any more for one that was cancelled.
        if told.send(step).await.is_err() || is_last {
            return;
        }
    }
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

fn whole(
    served: &Served,
    task: Task,
    format: Format,
    words: bool,
    segments: &[Segment],
    ended: &Ended,
) -> Response {
    let text: String = segments.iter().map(|segment| segment.text.as_str()).collect();
    let text = text.trim();
    let usage = json!({ "type": "duration", "seconds": ended.duration.ceil() as u64 });
    match format {
        Format::Json => Json(json!({ "text": text, "usage": usage })).into_response(),
        Format::Text => plain("text/plain; charset=utf-8", format!("{text}\n")),
        Format::Subtitles(format) => {
            let mut subtitles = Subtitles::new(format);
            let mut all = subtitles.head().to_owned();
            segments.iter().for_each(|segment| all.push_str(&subtitles.segment(segment)));
            let kind = match format {
                SubtitleFormat::Srt => "application/x-subrip; charset=utf-8",
                SubtitleFormat::Vtt => "text/vtt; charset=utf-8",
            };
            plain(kind, all)
        }
        Format::Verbose => {
            let segment = |(id, own): (usize, &Segment)| {
                json!({
                    "id": id,
                    "seek": (own.start * 100.0) as u64,
                    "start": rounded(own.start),
                    "end": rounded(own.end),
                    "text": own.text,
                    "tokens": own.tokens,
                    "temperature": own.temperature,
                    "avg_logprob": own.avg_logprob,
                    "compression_ratio": own.compression_ratio,
                    "no_speech_prob": own.no_speech_prob.unwrap_or_default(),
                })
            };
            let word = |own: &Word| json!({ "word": own.text.trim(), "start": rounded(own.start), "end": rounded(own.end) });
            let mut verbose = json!({
                "task": if task == Task::Translate { "translate" } else { "transcribe" },
                "language": ended.language.as_deref().unwrap_or("en"),
                "duration": rounded(ended.duration),
                "text": text,
                "segments": segments.iter().enumerate().map(segment).collect::<Vec<_>>(),
                "usage": usage,
                "model": served.name,
            });
            if words {
                verbose["words"] = segments.iter().flat_map(|segment| &segment.words).map(word).collect();
            }
            Json(verbose).into_response()
        }
    }
}

fn plain(kind: &'static str, text: String) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Sends the text of segments as they come. An error is the last event.
fn stream_of(steps: mpsc::Receiver<Told>) -> Response {
    let state = (Some(steps), String::new());
    let events = stream::unfold(state, async |(steps, mut text)| {
        let mut steps = steps?;
        let event = |value: Value| Event::default().data(value.to_string());
        match steps.recv().await? {
            Told::Segment(segment) => {
                let delta = if text.is_empty() { segment.text.trim_start() } else { &segment.text };
                let delta = json!({ "type": "transcript.text.delta", "delta": delta });
                text.push_str(&segment.text);
                Some((event(delta), (Some(steps), text)))
            }
            Told::Ended(Ended { duration, .. }) => {
                let usage = json!({ "type": "duration", "seconds": duration.ceil() as u64 });
                let done = json!({ "type": "transcript.text.done", "text": text.trim(), "usage": usage });
                Some((event(done), (None, text)))
            }
            Told::Failed(error) => Some((event(json!({ "error": error.object() })), (None, text))),
        }
    });
    Sse::new(futures_util::StreamExt::map(events, Ok::<_, Infallible>)).into_response()
}
