//! Conversion of tokens to text, a piece at a time.

use std::{fmt, ops::Range, sync::Arc};

use kiln_core::{Error, Result, model::TokenId};

use crate::Tokenizer;

/// Turns tokens into pieces of text. No piece ends inside a character. Special tokens have no text.
///
/// Together the pieces equal the text of all tokens decoded at once: tokenizers' own incremental decoding
/// keeps the tokens that the next one may need before it, for a leading space or the other bytes of a
/// character. (transformers' `TextIteratorStreamer` holds back whole words instead.)
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    /// The latest tokens, the part of their text that was returned, and the number of tokens that it came
    /// from.
    ids: Vec<TokenId>,
    prefix: String,
    prefix_index: usize,
}

impl fmt::Debug for TextStream {
    // A tokenizer prints its vocabulary.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextStream")
            .field("ids", &self.ids)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl TextStream {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, ids: Vec::new(), prefix: String::new(), prefix_index: 0 }
    }

    /// Creates a stream that continues `prompt`: decoders treat the first word of a text differently, and the
    /// first generated word is not the first.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the tokenizer cannot decode.
    pub fn after(tokenizer: Arc<Tokenizer>, prompt: &[TokenId]) -> Result<Self> {
        /// Number of tokens that any decoder needs as context, few enough to decode again with each token.
        const CONTEXT: usize = 8;

        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let prefix = tokenizer.decode(&ids, true)?;
        // A prompt that ends inside a character leaves it to the first piece.
        if prefix.ends_with('\u{FFFD}') {
            return Ok(Self::new(tokenizer));
        }
        Ok(Self { tokenizer, prefix_index: ids.len(), ids, prefix })
    }

    /// Returns the text that `id` completes, if any.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the tokenizer cannot decode, or changes text that was returned.
    pub fn push(&mut self, id: TokenId) -> Result<Option<String>> {
        /// Number of tokens without a complete character after which none will be completed: a character has
        /// four bytes at most.
        const MOST_HELD: usize = 64;

        if self.ids.len() >= MOST_HELD {
            let held = self.finish()?;
            let piece = self.tokenizer.step(id, &mut self.ids, &mut self.prefix, &mut self.prefix_index)?;
            return Ok(match (held, piece) {
                (None, piece) => piece,
                (Some(held), piece) => Some(held + &piece.unwrap_or_default()),
            });
        }
        self.tokenizer.step(id, &mut self.ids, &mut self.prefix, &mut self.prefix_index)
    }

    /// Returns the text that was held back, incomplete characters as U+FFFD. The next token begins a new
    /// text.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push).
    pub fn finish(&mut self) -> Result<Option<String>> {
        let text = self.tokenizer.decode(&self.ids, true)?;
        let held = text.strip_prefix(&self.prefix).filter(|held| !held.is_empty()).map(str::to_owned);
        *self = Self::new(self.tokenizer.clone());
        Ok(held)
    }
}

/// The text of a generation up to the first stop string.
///
/// Stop strings are searched for in the text with the written special tokens, as in Transformers
/// (`StopStringCriteria`): a turn that ends with `<|im_end|>` ends there, though that token has no text.
#[derive(Debug)]
pub struct StoppedText {
    stream: TextStream,
    stops: StopStrings,
    /// Whether the names of special tokens are part of the text.
    names: bool,
}

impl StoppedText {
    /// # Errors
    /// [`Error::Setting`] for an empty stop string.
    pub fn new(stream: TextStream, stops: Vec<String>) -> Result<Self> {
        Ok(Self { stream, stops: StopStrings::new(stops)?, names: false })
    }

    /// Makes the names of special tokens part of the text.
    #[must_use]
    pub fn with_special_tokens(self, names: bool) -> Self {
        Self { names, ..self }
    }

    /// Appends `id`. Returns the text that certainly comes before any stop string; empty after the first stop
    /// string.
    ///
    /// # Errors
    /// The errors of [`TextStream::push`].
    pub fn push(&mut self, id: TokenId) -> Result<String> {
        if self.stops.found().is_some() {
            return Ok(String::new());
        }
        let text = self.stream.push(id)?.unwrap_or_default();
        let mut certain = self.stops.push(&text);
        if let Some(name) = self.stream.tokenizer.special_text(id) {
            certain.push_str(&match self.names {
                true => self.stops.push(&name),
                false => self.stops.push_hidden(&name),
            });
        }
        Ok(certain)
    }

    /// Returns the text that was held back in case a stop string began in it. Nothing may be pushed
    /// afterwards.
    ///
    /// # Errors
    /// The errors of [`TextStream::finish`].
    pub fn finish(&mut self) -> Result<String> {
        let tail = self.stream.finish()?.unwrap_or_default();
        let mut rest = self.stops.push(&tail);
        rest.push_str(&self.stops.finish());
        Ok(rest)
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.stops.found()
    }
}

/// Ends a text at the first stop string, regardless of the borders of pieces.
///
/// The first stop string is the one that is complete first; the text ends before it. If several are complete
/// at the same character, the longest counts.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Byte ranges of `held` that are searched and not returned.
    hidden: Vec<Range<usize>>,
    found: Option<String>,
}

impl StopStrings {
    /// # Errors
    /// [`Error::Setting`] for an empty stop string.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if stops.iter().any(String::is_empty) {
            let why = "one of them is empty, so every text would end at once".into();
            return Err(Error::Setting { name: "stop_strings", why });
        }
        Ok(Self { stops, ..Self::default() })
    }

    /// Appends a piece. Returns the text that certainly comes before any stop string; empty after the first
    /// stop string.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let places = self.stops.iter().filter_map(|stop| Some((self.held.find(stop)?, stop)));
        let first = places.map(|(at, stop)| (at + stop.len(), at, stop)).min();
        self.found = first.map(|(_, _, stop)| stop.clone());
        let certain = first.map_or_else(|| self.certain(), |(_, start, _)| start);
        let given = self.take(certain);
        if self.found.is_some() {
            (self.held, self.hidden) = Default::default();
        }
        given
    }

    /// Appends text that is searched like any other and never returned, such as that of a special token.
    pub fn push_hidden(&mut self, piece: &str) -> String {
        if self.found.is_none() {
            let start = self.held.len();
            self.hidden.push(start..start + piece.len());
        }
        self.push(piece)
    }

    /// Returns the text that was held back in case a stop string began in it. Nothing may be pushed
    /// afterwards.
    pub fn finish(&mut self) -> String {
        self.take(self.held.len())
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.found.as_deref()
    }

    /// Removes the first `bytes` bytes of the held text, and returns the part that is not hidden.
    fn take(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        let taken = std::mem::replace(&mut self.held, rest);
        let (mut given, mut at) = (String::new(), 0);
        for place in &self.hidden {
            given.push_str(taken.get(at..place.start.min(bytes)).unwrap_or_default());
            at = place.end.min(bytes);
        }
        given.push_str(taken.get(at..).unwrap_or_default());
        self.hidden.retain(|place| place.end > bytes);
        for place in &mut self.hidden {
            *place = place.start.saturating_sub(bytes)..place.end - bytes;
        }
        given
    }

    /// Number of bytes of the held text before the first place where a stop string may begin.
    fn certain(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let mut places = self.held.char_indices().map(|(at, _)| at).skip_while(|&at| at < from);
        let may_begin = |tail: &str| self.stops.iter().any(|stop| stop.starts_with(tail));
        places.find(|&at| self.held.get(at..).is_some_and(may_begin)).unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests;
