//! Text from a generation, piece by piece.

mod token;

use std::{iter::FusedIterator, sync::Arc};

use futures_util::stream::{self, Stream};
use kiln_core::{Error, Result, model::TokenId, model_cache::ModelCache, read_back};
use kiln_generate::{
    Completion, Generating, Generation, Logprobs, Stats, Step, StopReason, StoppedText, TextStream, Tokenizer,
};

pub use self::token::{GeneratedToken, Piece};
use crate::{
    chat::Answer,
    sequence::{Reuse, Steps},
};

/// The text of a generation, piece by piece. No piece ends inside a character.
///
/// The iterator blocks; [`into_stream`](Self::into_stream) does not.
#[derive(Debug)]
pub struct GeneratedText<'a> {
    steps: Steps<'a>,
    text: StoppedText,
    ended: Option<StopReason>,
    /// For beam search: number of tokens that were taken from the common beginning of all beams.
    agreed: usize,
    /// The tokens that were not taken yet.
    tokens: Vec<GeneratedToken>,
    /// Number of the likeliest tokens whose log-probabilities are told; `None`: none are.
    logprobs: Option<usize>,
    /// The answer of a conversation that the text is added to.
    answer: Option<Answer<'a>>,
}

impl<'a> GeneratedText<'a> {
    pub(crate) fn new(
        steps: Steps<'a>,
        stream: TextStream,
        answer: Option<Answer<'a>>,
        logprobs: Option<usize>,
    ) -> Result<Self> {
        let text = StoppedText::new(stream, steps.settings().stop_strings().to_vec())?;
        Ok(Self { steps, text, ended: None, agreed: 0, tokens: Vec::new(), logprobs, answer })
    }

    pub(crate) fn with_special_tokens(self, told: bool) -> Self {
        Self { text: self.text.with_special_tokens(told), ..self }
    }

    /// Takes the tokens of the text since the last call. They may be ahead of the pieces: a piece ends with a
    /// whole character.
    pub fn take_tokens(&mut self) -> Vec<GeneratedToken> {
        std::mem::take(&mut self.tokens)
    }

    /// Takes the tokens of the prompt, if [`Request::prompt_logprobs`](crate::Request::prompt_logprobs) asked
    /// for their log-probabilities. They are there after the first step, once; the first token has none.
    pub fn take_prompt_tokens(&mut self) -> Vec<GeneratedToken> {
        let logprobs = self.steps.take_prompt_logprobs();
        let ids = self.steps.tokens(0).unwrap_or_default();
        ids.iter().zip(logprobs).map(|(&id, logprobs)| GeneratedToken { id, logprobs }).collect()
    }

    /// Generates the next piece; `None` after the last, and after an error.
    ///
    /// Dropping the future in the middle of a step ends the text.
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
            // The text before the error is the answer.
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

    /// Counts and times so far.
    pub fn stats(&self) -> Stats {
        self.steps.stats()
    }

    /// The settings that the device has no kernel for, so that the scores of each step are read back. Always
    /// empty on the CPU.
    pub fn processed_on_host(&self) -> Vec<&'static str> {
        self.steps.processed_on_host()
    }

    /// How much of the prompt was reused from the cache.
    pub fn reuse(&self) -> Reuse {
        self.steps.reuse()
    }

    /// The cache, read-only. It may be a step ahead.
    pub fn cache(&self) -> &ModelCache {
        self.steps.cache()
    }

    /// The reason for which the text ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.ended
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.text.found()
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
        // The token that ends a text is not part of it.
        if reason == Some(StopReason::EndOfText) {
            tokens.pop();
        }
        let logits = step.logits.iter().flatten().next().filter(|_| step.parents.is_none());
        for &id in &tokens {
            let logprobs = self.logprobs.zip(logits).map(|(top, logits)| Logprobs::of(logits, id, top));
            self.tokens.push(GeneratedToken { id, logprobs });
        }
        let piece = match self.push(&tokens) {
            Ok(piece) => piece,
            Err(error) => return self.failed(error),
        };
        if reason == Some(StopReason::EndOfText) && self.text.found().is_none() {
            return match self.end(StopReason::EndOfText) {
                Some(Ok(rest)) => Some(Ok(piece + &rest)),
                None if !piece.is_empty() => Some(Ok(piece)),
                end => end,
            };
        }
        if self.text.found().is_some() {
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

    /// Appends tokens. Returns their text, up to an incomplete character or a possible stop string.
    fn push(&mut self, tokens: &[TokenId]) -> Result<String> {
        tokens.iter().map(|&token| self.text.push(token)).collect()
    }

    /// The new tokens that all beams agree on; at the end the rest of the best sequence, and the reason for
    /// which it ended.
    fn newly_agreed(&mut self, is_over: bool) -> (Vec<TokenId>, Option<StopReason>) {
        let (mut agreed, reason) = match self.steps.best().filter(|_| is_over) {
            Some(best) => (best.tokens, best.stop_reason),
            None => (self.steps.agreed(), None),
        };
        let new = agreed.split_off(self.agreed.min(agreed.len()));
        self.agreed += new.len();
        (new, reason)
    }

    /// A piece with the tokens since the one before.
    fn piece(&mut self, text: String) -> Piece {
        Piece { text, prompt: self.take_prompt_tokens(), tokens: self.take_tokens() }
    }

    fn end(&mut self, reason: StopReason) -> Option<Result<String>> {
        self.ended = Some(reason);
        let rest = match self.text.finish() {
            Ok(rest) => rest,
            Err(error) => return Some(Err(error)),
        };
        if self.text.found().is_some() {
            self.ended = Some(StopReason::StopString);
        }
        (!rest.is_empty()).then_some(Ok(rest))
    }
}

/// The text of a request in an engine: a piece after each step that adds one.
impl Generating for GeneratedText<'static> {
    type Output = Piece;

    fn generation(&mut self) -> &mut Generation<'static> {
        self.steps.generation()
    }

    fn take(&mut self, step: Step) -> Result<Option<Piece>> {
        self.steps.hold_chosen(&step);
        let piece = self.text_of(step);
        if piece.is_some() {
            self.answer_with(piece.as_ref());
        }
        Ok(piece.transpose()?.map(|text| self.piece(text)))
    }

    fn is_over(&self) -> bool {
        self.ended.is_some()
    }

    fn end(&mut self) -> Result<Option<Piece>> {
        let rest = if self.ended.is_some() { None } else { self.rest() };
        if rest.is_some() {
            self.answer_with(rest.as_ref());
        }
        self.answer_with(None);
        let rest = rest.transpose()?;
        let is_more = rest.is_some();
        let piece = self.piece(rest.unwrap_or_default());
        let is_more = is_more || !piece.tokens.is_empty() || !piece.prompt.is_empty();
        Ok(is_more.then_some(piece))
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
        read_back::wait(async { self.next_piece().await.transpose() }).transpose()
    }
}

impl FusedIterator for GeneratedText<'_> {}
