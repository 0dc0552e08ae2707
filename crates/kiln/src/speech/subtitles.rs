//! Transcripts as subtitles.

use std::fmt::Write;

use super::Segment;

/// A format of subtitles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SubtitleFormat {
    /// SubRip
    Srt,
    /// WebVTT
    Vtt,
}

/// Writes segments as subtitles, one after the other.
///
/// A segment with [words](crate::Transcriber::word_times) becomes one cue per word.
#[derive(Clone, Debug)]
pub struct Subtitles {
    format: SubtitleFormat,
    /// Number of cues so far.
    cues: usize,
}

impl Subtitles {
    pub fn new(format: SubtitleFormat) -> Self {
        Self { format, cues: 0 }
    }

    /// Text before the first segment.
    pub fn head(&self) -> &'static str {
        match self.format {
            SubtitleFormat::Srt => "",
            SubtitleFormat::Vtt => "WEBVTT\n\n",
        }
    }

    /// The cues of a segment.
    pub fn segment(&mut self, segment: &Segment) -> String {
        let mut text = String::new();
        if segment.words.is_empty() {
            self.cue(&mut text, segment.start, segment.end, &segment.text);
        }
        for word in &segment.words {
            self.cue(&mut text, word.start, word.end, &word.text);
        }
        text
    }

    fn cue(&mut self, text: &mut String, start: f64, end: f64, words: &str) {
        self.cues += 1;
        if self.format == SubtitleFormat::Srt {
            _ = writeln!(text, "{}", self.cues);
        }
        let (start, end) = (self.time(start), self.time(end));
        _ = write!(text, "{start} --> {end}\n{}\n\n", words.trim());
    }

    /// A time such as `01:02:03,450`, or with a point for WebVTT.
    fn time(&self, seconds: f64) -> String {
        let all = (seconds.max(0.0) * 1000.0).round() as u64;
        let (hours, minutes, seconds, millis) =
            (all / 3_600_000, all / 60_000 % 60, all / 1000 % 60, all % 1000);
        let mark = if self.format == SubtitleFormat::Srt { ',' } else { '.' };
        format!("{hours:02}:{minutes:02}:{seconds:02}{mark}{millis:03}")
    }
}
