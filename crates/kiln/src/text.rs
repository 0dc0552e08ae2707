//! Text from a generation, piece by piece.

use kiln_core::Result;
use kiln_generate::{Stats, StopStrings, TextStream};

use crate::{
    OnOutOfMemory,
    sequence::{Continuation, Reuse},
};

/// How a generation is run; what it says is in its `GenerationConfig`.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Prompt tokens a forward pass; `None`: as many as activations of 32 MiB allow
    pub prefill_chunk: Option<usize>,
    /// Whether each step carries its raw logits.
    pub keep_logits: bool,
    /// Whether each step carries its scores after the processors.
    pub keep_scores: bool,
    /// Whether the decode step is captured once and replayed, where the device can and as long as the cache's buffers do
    /// not grow; `None`: it is
    pub compile: Option<bool>,
    /// What is done when memory runs out.
    pub on_oom: OnOutOfMemory,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A token that ends the text.
    EndOfText,
    /// A stop string.
    StopString,
    /// As many tokens as were asked for.
    Length,
}

/// Iterator over pieces of text. No piece ends inside a character.
#[derive(Debug)]
pub struct GeneratedText<'a> {
    steps: Continuation<'a>,
    stream: TextStream<'a>,
    stops: StopStrings,
    ended: Option<StopReason>,
}

impl<'a> GeneratedText<'a> {
    pub(crate) fn new(steps: Continuation<'a>, stream: TextStream<'a>) -> Result<Self> {
        let stops = StopStrings::new(steps.settings().stop_strings.clone())?;
        Ok(Self { steps, stream, stops, ended: None })
    }

    /// Times and counts so far.
    pub fn stats(&self) -> Stats {
        self.steps.stats()
    }

    /// What of the prompt was in the cache already.
    pub fn reuse(&self) -> Reuse {
        self.steps.reuse()
    }

    /// Why it ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.ended
    }

    fn end(&mut self, reason: StopReason) -> Option<Result<String>> {
        self.ended = Some(reason);
        let tail = match self.stream.finish() {
            Ok(tail) => tail.unwrap_or_default(),
            Err(error) => return Some(Err(error)),
        };
        let mut rest = self.stops.push(&tail);
        rest.push_str(&self.stops.finish());
        if self.stops.found() {
            self.ended = Some(StopReason::StopString);
        }
        (!rest.is_empty()).then_some(Ok(rest))
    }
}

impl Iterator for GeneratedText<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ended.is_none() {
            let step = match self.steps.next() {
                Some(Ok(step)) => step,
                Some(Err(error)) => {
                    self.ended = Some(StopReason::Length);
                    return Some(Err(error));
                }
                None => return self.end(StopReason::Length),
            };
            let Some(&Some(token)) = step.tokens.first() else { return self.end(StopReason::EndOfText) };
            if self.steps.settings().eos_token_id.contains(&token) {
                return self.end(StopReason::EndOfText);
            }
            let piece = match self.stream.push(token) {
                Ok(piece) => self.stops.push(&piece.unwrap_or_default()),
                Err(error) => {
                    self.ended = Some(StopReason::Length);
                    return Some(Err(error));
                }
            };
            if self.stops.found() {
                self.ended = Some(StopReason::StopString);
            }
            if !piece.is_empty() {
                return Some(Ok(piece));
            }
        }
        None
    }
}
