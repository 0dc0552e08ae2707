//! Text from a generation, piece by piece.

use std::{iter::FusedIterator, sync::Arc};

use futures_util::stream::{self, Stream};
use kiln_core::{Error, Result, model::TokenId, model_cache::ModelCache, read_back};
use kiln_generate::{
    Completion, Generating, Generation, Stats, Step, StopReason, StoppedText, TextStream, Tokenizer,
};

use crate::{
    chat::Answer,
    sequence::{Reuse, Steps},
};

/// The text of a generation, piece by piece. No piece ends inside a character.
///
/// It is an iterator that blocks; [`into_stream`](Self::into_stream) does not.
#[derive(Debug)]
pub struct GeneratedText<'a> {
    steps: Steps<'a>,
    text: StoppedText,
    ended: Option<StopReason>,
    /// Of a beam search: tokens that were taken from what its beams agree on.
    agreed: usize,
    /// The answer that the text is in a conversation.
    answer: Option<Answer<'a>>,
}

impl<'a> GeneratedText<'a> {
    pub(crate) fn new(steps: Steps<'a>, stream: TextStream, answer: Option<Answer<'a>>) -> Result<Self> {
        let text = StoppedText::new(stream, steps.settings().stop_strings().to_vec())?;
        Ok(Self { steps, text, ended: None, agreed: 0, answer })
    }

    /// The next piece; `None` after the last, and after an error.
    ///
    /// A future that is dropped in the middle of a step ends the text.
    pub async fn next_piece(&mut self) -> Option<Result<String>> {
        let piece = self.generate_piece().await;
        self.answer_with(piece.as_ref());
        piece
    }

    /// Adds a piece to the conversation, or, after the last, the whole answer.
    fn answer_with(&mut self, piece: Option<&Result<String>>) {
        match (piece, &mut self.answer) {
            (Some(Ok(piece)), Some(answer)) => answer.push(piece),
            (None, Some(answer)) => answer.complete(),
            // What was said until then is the answer.
            (Some(Err(_)), _) => self.answer = None,
            (_, None) => {}
        }
    }

    /// The pieces as a [`Stream`] for async programs. It blocks its thread for one step at most.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use futures_util::StreamExt;
    ///
    /// # kiln::expert::read_back::block_on(async {
    /// let model = kiln::Model::load(folder)?;
    /// let mut pieces = model.generate("ROMEO:").max_new_tokens(9).stream()?.into_stream();
    /// while let Some(piece) = pieces.next().await {
    ///     print!("{}", piece?);
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// # })?;
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn into_stream(self) -> impl Stream<Item = Result<String>> + Send + Unpin + use<'a> {
        Box::pin(stream::unfold(self, async |mut text| {
            let piece = text.next_piece().await?;
            Some((piece, text))
        }))
    }

    /// Times and counts so far.
    pub fn stats(&self) -> Stats {
        self.steps.stats()
    }

    /// Settings that the device has no kernel for: their scores are read back at each step. Always empty on the CPU.
    pub fn processed_on_host(&self) -> Vec<&'static str> {
        self.steps.processed_on_host()
    }

    /// What of the prompt was in the cache already.
    pub fn reuse(&self) -> Reuse {
        self.steps.reuse()
    }

    /// The cache, for questions about it. It may be a step ahead.
    pub fn cache(&self) -> &ModelCache {
        self.steps.cache()
    }

    /// Why it ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.ended
    }

    async fn generate_piece(&mut self) -> Option<Result<String>> {
        while self.ended.is_none() {
            let piece = match self.steps.next_step().await {
                Some(Ok(step)) => self.text_of(step),
                Some(Err(error)) => self.failed(error),
                None => self.rest(),
            };
            if piece.is_some() {
                return piece;
            }
        }
        None
    }

    /// The text that a step adds; `None`: none yet.
    fn text_of(&mut self, step: Step) -> Option<Result<String>> {
        let (mut tokens, reason) = match step.parents {
            None => (step.tokens.first().copied().flatten().into_iter().collect(), self.steps.stop_reason(0)),
            Some(_) => self.newly_agreed(step.finished.iter().all(|&finished| finished)),
        };
        // The token that ends a text is no part of it.
        if reason == Some(StopReason::EndOfText) {
            tokens.pop();
        }
        let piece = match self.push(&tokens) {
            Ok(piece) => piece,
            Err(error) => return self.failed(error),
        };
        if reason == Some(StopReason::EndOfText) && !self.text.found() {
            return match self.end(StopReason::EndOfText) {
                Some(Ok(rest)) => Some(Ok(piece + &rest)),
                None if !piece.is_empty() => Some(Ok(piece)),
                end => end,
            };
        }
        if self.text.found() {
            self.ended = Some(StopReason::StopString);
        }
        (!piece.is_empty()).then_some(Ok(piece))
    }

    /// The text that is left after the last step.
    fn rest(&mut self) -> Option<Result<String>> {
        self.end(self.steps.stop_reason(0).unwrap_or(StopReason::Length))
    }

    fn failed(&mut self, error: Error) -> Option<Result<String>> {
        self.ended = Some(StopReason::Length);
        Some(Err(error))
    }

    /// The text of tokens, as far as it is known not to end in the middle of a character or a stop string.
    fn push(&mut self, tokens: &[TokenId]) -> Result<String> {
        tokens.iter().map(|&token| self.text.push(token)).collect()
    }

    /// Tokens that all beams have come to agree on; at the end all that is left of the best, and why it ended.
    fn newly_agreed(&mut self, is_over: bool) -> (Vec<TokenId>, Option<StopReason>) {
        let (mut agreed, reason) = match self.steps.best().filter(|_| is_over) {
            Some(best) => (best.tokens, best.stop_reason),
            None => (self.steps.agreed(), None),
        };
        let new = agreed.split_off(self.agreed.min(agreed.len()));
        self.agreed += new.len();
        (new, reason)
    }

    fn end(&mut self, reason: StopReason) -> Option<Result<String>> {
        self.ended = Some(reason);
        let rest = match self.text.finish() {
            Ok(rest) => rest,
            Err(error) => return Some(Err(error)),
        };
        if self.text.found() {
            self.ended = Some(StopReason::StopString);
        }
        (!rest.is_empty()).then_some(Ok(rest))
    }
}

/// Text of a request among others: a piece after each step that adds one.
impl Generating for GeneratedText<'static> {
    type Output = String;

    fn generation(&mut self) -> &mut Generation<'static> {
        self.steps.generation()
    }

    fn take(&mut self, step: Step) -> Result<Option<String>> {
        self.steps.hold_chosen(&step);
        let piece = self.text_of(step);
        if piece.is_some() {
            self.answer_with(piece.as_ref());
        }
        piece.transpose()
    }

    fn is_over(&self) -> bool {
        self.ended.is_some()
    }

    fn end(&mut self) -> Result<Option<String>> {
        let rest = if self.ended.is_some() { None } else { self.rest() };
        if rest.is_some() {
            self.answer_with(rest.as_ref());
        }
        self.answer_with(None);
        rest.transpose()
    }
}

/// The text of a completion that follows `prompt`, up to the first of these stop strings.
pub(crate) fn of_completion(
    tokenizer: &Arc<Tokenizer>,
    prompt: &[TokenId],
    completion: &Completion,
    stop_strings: &[String],
) -> Result<String> {
    let mut text = StoppedText::new(TextStream::after(tokenizer.clone(), prompt)?, stop_strings.to_vec())?;
    let tokens = match (completion.stop_reason, completion.tokens.split_last()) {
        (Some(StopReason::EndOfText), Some((_, tokens))) => tokens,
        _ => &completion.tokens,
    };
    let mut whole = tokens.iter().map(|&token| text.push(token)).collect::<Result<String>>()?;
    whole.push_str(&text.finish()?);
    Ok(whole)
}

/// Blocks until the next piece is there. Native only.
impl Iterator for GeneratedText<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        read_back::block_on(self.next_piece())
    }
}

impl FusedIterator for GeneratedText<'_> {}
