//! Transcripts: recordings in progress, and their finished segments.

use std::{collections::VecDeque, iter::FusedIterator, time::Duration};

use futures_util::stream::{self, Stream};
use kiln_core::{Result, model::TokenId, model_cache::ModelCache, read_back};

use super::{
    Segment, Transcriber, Word, languages,
    recording::{FRAME_RATE, Recording},
    segments,
    window::{Decoded, Unheard},
    words,
};

/// A recording in progress.
#[derive(Debug)]
pub(super) struct Track {
    pub(super) recording: Recording,
    /// Number of frames that are done.
    pub(super) seek: usize,
    /// Tokens of all segments so far.
    pub(super) tokens: Vec<TokenId>,
    /// Whether the next window is conditioned on them.
    pub(super) is_conditioned: bool,
    pub(super) language: Option<(TokenId, &'static str)>,
}

impl Track {
    fn is_over(&self) -> bool {
        self.seek >= self.recording.heard.min(self.recording.frames)
    }
}

/// The transcript of a recording, segment by segment.
///
/// As an iterator, it blocks; [`next_segment`](Self::next_segment) and [`into_stream`](Self::into_stream)
/// do not.
#[derive(Debug)]
#[must_use = "nothing is transcribed before segments are asked for"]
pub struct Transcript {
    pub(super) all: Transcripts,
}

impl Transcript {
    /// The next segment; `None` after the last, and after an error.
    ///
    /// A future that is dropped in the middle of a window loses no segment: the next one decodes the window
    /// again.
    pub async fn next_segment(&mut self) -> Option<Result<Segment>> {
        Some(self.all.next_segment().await?.map(|(_, segment)| segment))
    }

    /// The segments as a [`Stream`] for async programs. It blocks its thread for one step at most.
    pub fn into_stream(self) -> impl Stream<Item = Result<Segment>> + Send + Unpin {
        Box::pin(stream::unfold(self, async |mut transcript| {
            let segment = transcript.next_segment().await?;
            Some((segment, transcript))
        }))
    }

    /// The transcribed duration, and the duration of the recording.
    pub fn progress(&self) -> (Duration, Duration) {
        self.all.progress(0)
    }

    /// The code of the language that was detected or given; `None` before the first segment, and if the model
    /// knows only one language.
    pub fn language(&self) -> Option<&str> {
        self.all.language(0)
    }
}

/// Blocks until the next segment is there. Native only.
impl Iterator for Transcript {
    type Item = Result<Segment>;

    fn next(&mut self) -> Option<Self::Item> {
        read_back::wait(async { self.next_segment().await.transpose() }).transpose()
    }
}

impl FusedIterator for Transcript {}

/// The transcripts of several recordings, segment by segment as they are done.
///
/// As an iterator, it blocks; [`next_segment`](Self::next_segment) and [`into_stream`](Self::into_stream)
/// do not.
#[derive(Debug)]
#[must_use = "nothing is transcribed before segments are asked for"]
pub struct Transcripts {
    pub(super) transcriber: Transcriber,
    pub(super) tracks: Vec<Track>,
    pub(super) cache: ModelCache,
    pub(super) ready: VecDeque<(usize, Segment)>,
    pub(super) is_over: bool,
}

impl Transcripts {
    /// The next segment and the index of its recording; `None` after the last, and after an error.
    ///
    /// A future that is dropped in the middle of a window loses no segment: the next one decodes the window
    /// again.
    pub async fn next_segment(&mut self) -> Option<Result<(usize, Segment)>> {
        while !self.is_over {
            if let Some(ready) = self.ready.pop_front() {
                return Some(Ok(ready));
            }
            if self.tracks.iter().all(Track::is_over) {
                break;
            }
            if let Err(error) = self.decode_next_windows().await {
                self.is_over = true;
                return Some(Err(error));
            }
        }
        None
    }

    /// The segments as a [`Stream`] for async programs. It blocks its thread for one step at most.
    pub fn into_stream(self) -> impl Stream<Item = Result<(usize, Segment)>> + Send + Unpin {
        Box::pin(stream::unfold(self, async |mut transcripts| {
            let segment = transcripts.next_segment().await?;
            Some((segment, transcripts))
        }))
    }

    /// The transcribed duration of a recording, and its total duration.
    pub fn progress(&self, recording: usize) -> (Duration, Duration) {
        let track = self.tracks.get(recording);
        let heard = track.map_or(0, |track| track.recording.heard);
        let time = |frames: usize| Duration::from_secs_f64(frames as f64 / FRAME_RATE as f64);
        (time(track.map_or(0, |track| track.seek.min(heard))), time(heard))
    }

    /// Damaged or missing data in a recording: a sentence that describes it.
    pub fn damage(&self, recording: usize) -> Option<String> {
        self.tracks.get(recording)?.recording.damage()
    }

    /// The code of the language of a recording, once it is known; `None` if the model knows only one
    /// language.
    pub fn language(&self, recording: usize) -> Option<&str> {
        self.tracks.get(recording)?.language.map(|(_, code)| code)
    }

    /// Decodes the next window of each recording that is not finished.
    async fn decode_next_windows(&mut self) -> Result<()> {
        let transcriber = &self.transcriber;
        let mut unheard = Vec::new();
        for (number, track) in self.tracks.iter_mut().enumerate().filter(|(_, track)| !track.is_over()) {
            let window = track.recording.window(track.seek)?;
            // A silent window needs no pass.
            if window.is_silent {
                track.seek += transcriber.window;
                continue;
            }
            unheard.push(Unheard {
                recording: number,
                features: window.features,
                frames: transcriber.window.min(track.recording.frames - track.seek),
                heard: track.recording.heard.saturating_sub(track.seek),
                before: transcriber.before(track),
                language: track.language,
            });
        }
        if unheard.is_empty() {
            return Ok(());
        }
        for decoded in transcriber.decode(&unheard, &mut self.cache).await? {
            let track = &mut self.tracks[decoded.recording];
            track.language = decoded.language;
            let offset = track.seek as f64 / FRAME_RATE as f64;
            let (segments, next) = transcriber.segments(&decoded, offset)?;
            // A window that did not advance would be decoded forever.
            track.seek += if next == 0 { decoded.frames } else { next };
            track.is_conditioned = transcriber.condition_on_prev_tokens && decoded.temperature < 0.5;
            for segment in &segments {
                let doubled = match &segment.tokens[..] {
                    [.., last_but_one, _] if *last_but_one >= transcriber.tokens.first_timestamp() => 1,
                    _ => 0,
                };
                let kept = segment.tokens.len() - if segment.tokens.len() > 2 { doubled } else { 0 };
                track.tokens.extend(&segment.tokens[..kept]);
            }
            self.ready.extend(segments.into_iter().map(|segment| (decoded.recording, segment)));
        }
        Ok(())
    }
}

/// Blocks until the next segment is there. Native only.
impl Iterator for Transcripts {
    type Item = Result<(usize, Segment)>;

    fn next(&mut self) -> Option<Self::Item> {
        read_back::wait(async { self.next_segment().await.transpose() }).transpose()
    }
}

impl FusedIterator for Transcripts {}

impl Transcriber {
    /// The tokens before those of a window: a prompt, or the previous text.
    fn before(&self, track: &Track) -> Vec<TokenId> {
        let Some(previous) = self.tokens.previous else { return Vec::new() };
        let said: &[TokenId] = match track.is_conditioned {
            true => &track.tokens,
            false => &[],
        };
        let all: Vec<TokenId> = self.prompt.iter().chain(said).copied().collect();
        if all.is_empty() {
            return Vec::new();
        }
        // Half of the positions are reserved for new tokens.
        let most = (self.model.sizes().positions / 2).saturating_sub(1);
        [&[previous], &all[all.len().saturating_sub(most)..]].concat()
    }

    /// The text of tokens, without timestamps.
    pub(super) fn text(&self, tokens: &[TokenId]) -> Result<String> {
        let text: Vec<TokenId> = tokens.iter().copied().filter(|&id| id < self.tokens.eos).collect();
        self.model.decode(&text)
    }

    /// The segments of a window that begins `offset` seconds into its recording, and the number of frames to
    /// the next window.
    fn segments(&self, decoded: &Decoded, offset: f64) -> Result<(Vec<Segment>, usize)> {
        if decoded.is_unspoken {
            return Ok((Vec::new(), decoded.frames));
        }
        let first = self.tokens.first_timestamp();
        let (parts, next) = segments::parts(&decoded.tokens, first, decoded.frames);
        let seconds = |frame: usize| offset + frame as f64 / FRAME_RATE as f64;
        let mut all = Vec::with_capacity(parts.len());
        for part in parts {
            let tokens = decoded.tokens[part.tokens.clone()].to_vec();
            let own = |beginnings: &Vec<usize>| {
                self.words(&tokens, &beginnings[part.tokens.clone()], decoded, seconds)
            };
            all.push(Segment {
                start: seconds(part.start),
                // Segments end no later than the recording.
                end: seconds(part.end.min(decoded.heard.max(part.start))),
                text: self.text(&tokens)?,
                words: decoded.beginnings.as_ref().map_or_else(|| Ok(Vec::new()), own)?,
                tokens,
                language: decoded.language.map(|(_, code)| code.to_owned()),
                temperature: decoded.temperature,
                avg_logprob: decoded.avg_logprob,
                compression_ratio: decoded.compression_ratio,
                no_speech_prob: decoded.no_speech_prob,
            });
        }
        Ok((all, next))
    }

    /// The words of a segment, given the frames at which its tokens begin.
    fn words(
        &self,
        tokens: &[TokenId],
        beginnings: &[usize],
        decoded: &Decoded,
        seconds: impl Fn(usize) -> f64,
    ) -> Result<Vec<Word>> {
        let of_text = |(at, &id): (usize, &TokenId)| (id < self.tokens.eos).then_some((at, id));
        let (places, text): (Vec<usize>, Vec<TokenId>) =
            tokens.iter().enumerate().filter_map(of_text).unzip();
        let without_spaces = decoded.language.is_some_and(|(_, code)| languages::is_without_spaces(code));
        let words = words::words(&text, without_spaces, |tokens| self.model.decode(tokens))?;
        let word = |(text, range): (String, std::ops::Range<usize>)| {
            let begin = beginnings[places[range.start]];
            // The word ends where the next token begins, or at the end of the recorded frames.
            let behind = places[range.end - 1] + 1;
            let end = beginnings.get(behind).copied().unwrap_or(decoded.heard).max(begin);
            Word { text, start: seconds(begin), end: seconds(end) }
        };
        Ok(words.into_iter().map(word).collect())
    }
}
