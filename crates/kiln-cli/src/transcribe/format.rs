//! Transcripts as text, subtitles and JSON.

use kiln::{Segment, SubtitleFormat, Subtitles};
use serde::Serialize;

use super::args::Format;

/// Writes the segments of a recording one by one.
#[derive(Debug)]
pub(super) struct Writer {
    format: Format,
    subtitles: Subtitles,
    /// Segments that are written together at the end.
    kept: Vec<Segment>,
}

impl Writer {
    pub(super) fn new(format: Format) -> Self {
        let subtitles = match format {
            Format::Vtt => SubtitleFormat::Vtt,
            _ => SubtitleFormat::Srt,
        };
        Self { format, subtitles: Subtitles::new(subtitles), kept: Vec::new() }
    }

    /// Text before the first segment.
    pub(super) fn head(&self) -> &'static str {
        self.subtitles.head()
    }

    /// Formats a segment; empty if segments are written at the end.
    pub(super) fn segment(&mut self, segment: Segment) -> String {
        match self.format {
            Format::Text => format!("{}\n", segment.text.trim()),
            Format::Json => {
                self.kept.push(segment);
                String::new()
            }
            Format::Srt | Format::Vtt => self.subtitles.segment(&segment),
        }
    }

    /// Text after the last segment of the recording `file`, which is `duration` seconds long.
    pub(super) fn tail(self, file: &str, language: Option<&str>, duration: f64) -> String {
        if self.format != Format::Json {
            return String::new();
        }
        let text = self.kept.iter().map(|segment| segment.text.as_str()).collect();
        let segments = self.kept.iter().enumerate().map(|(id, segment)| JsonSegment::of(id, segment));
        let transcript = JsonTranscript {
            file,
            language,
            duration: rounded(duration),
            text,
            segments: segments.collect(),
        };
        // Strings and finite numbers are always valid JSON.
        serde_json::to_string_pretty(&transcript).map_or_else(|_| String::new(), |json| json + "\n")
    }
}

/// A transcript, with the field names of OpenAI's `verbose_json`.
#[derive(Debug, Serialize)]
struct JsonTranscript<'a> {
    file: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<&'a str>,
    duration: f64,
    text: String,
    segments: Vec<JsonSegment<'a>>,
}

#[derive(Debug, Serialize)]
struct JsonSegment<'a> {
    id: usize,
    start: f64,
    end: f64,
    text: &'a str,
    tokens: &'a [u32],
    temperature: f32,
    avg_logprob: f32,
    compression_ratio: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_speech_prob: Option<f32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    words: Vec<JsonWord<'a>>,
}

#[derive(Debug, Serialize)]
struct JsonWord<'a> {
    word: &'a str,
    start: f64,
    end: f64,
}

impl<'a> JsonSegment<'a> {
    fn of(id: usize, segment: &'a Segment) -> Self {
        let word = |word: &'a kiln::Word| JsonWord {
            word: &word.text,
            start: rounded(word.start),
            end: rounded(word.end),
        };
        Self {
            id,
            start: rounded(segment.start),
            end: rounded(segment.end),
            text: &segment.text,
            tokens: &segment.tokens,
            temperature: segment.temperature,
            avg_logprob: segment.avg_logprob,
            compression_ratio: segment.compression_ratio,
            no_speech_prob: segment.no_speech_prob,
            words: segment.words.iter().map(word).collect(),
        }
    }
}

/// Rounds to milliseconds, the resolution of the times.
fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}
