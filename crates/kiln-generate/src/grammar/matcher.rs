//! The progress of a row in its grammar.

use std::{fmt, sync::Arc};

use kiln_core::{Error, Result, model::TokenId};
use llguidance::CancellationHandle;

use super::{mask::Mask, sentence, token_table::TokenTable};

/// The progress of the text of one row in its grammar, and the tokens that may follow.
///
/// A clone continues independently, as beams do. It copies the parser state, and shares the states of the
/// lexer. An operation that returns `Err` has changed nothing, unless the grammar became too complex: then
/// every later operation returns the error again.
#[derive(Clone)]
pub struct Matcher {
    inner: llguidance::Matcher,
    table: Arc<TokenTable>,
    /// The name of the grammar's setting.
    name: &'static str,
    /// Whether tokens can be rewound.
    rewinds: bool,
    accepted: usize,
    /// Whether an end-of-text token was accepted.
    ended: bool,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher")
            .field("name", &self.name)
            .field("accepted", &self.accepted)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

/// The tokens that may follow the text of a row.
#[derive(Clone, Debug)]
pub struct Next {
    /// The tokens that may follow. They include end-of-text tokens exactly where the text may end.
    pub mask: Mask,
    /// Tokens that must follow, which can be fed at once. Empty if there is a choice of the next token.
    pub forced: Vec<TokenId>,
    /// Whether the text is complete at this point.
    pub may_end: bool,
    /// Whether only the end of the text may follow.
    pub must_end: bool,
}

impl Matcher {
    pub(super) fn new(parser: llguidance::TokenParser, table: Arc<TokenTable>, name: &'static str) -> Self {
        let rewinds = parser.parser.grammar().lexer_spec().can_rollback();
        let mut inner = llguidance::Matcher::new(Ok(parser)).into_cancellable();
        // Detects a grammar that only the empty text matches. An error is kept, and returned by the first
        // operation.
        let _ = inner.consume_tokens(&[]);
        Self { inner, table, name, rewinds, accepted: 0, ended: false }
    }

    /// The name of the grammar's setting: `json_schema`, `regex` or `grammar`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Number of tokens that were accepted, including an end-of-text token.
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// The tokens that may follow.
    ///
    /// # Errors
    /// [`Error::Setting`] if the grammar takes too much work at this point, or if the vocabulary has no token
    /// that may follow.
    pub fn peek(&mut self) -> Result<Next> {
        // Forced tokens come first, because the mask is derived from them.
        let forced = self.forced()?;
        let mask = self.mask()?;
        let may_end = self.may_end()?;
        let must_end = self.must_end() || (may_end && mask == *self.table.end());
        Ok(Next { mask, forced, may_end, must_end })
    }

    /// The tokens that may follow. After the end of the text these are the end-of-text tokens.
    ///
    /// If tokens are forced, only the first of them is allowed.
    ///
    /// # Errors
    /// The errors of [`peek`](Self::peek).
    pub fn mask(&mut self) -> Result<Mask> {
        if self.must_end() {
            return Ok(self.table.end().clone());
        }
        let words = self.inner.compute_mask().map_err(|e| self.failed(&e))?;
        let mask = self.table.known().and(words.as_slice());
        match mask.count() {
            0 => Err(Error::Setting { name: self.name, why: sentence::NO_TOKEN.into() }),
            _ => Ok(mask),
        }
    }

    /// Tokens that must follow, split as the tokenizer splits them. They are not accepted yet.
    ///
    /// # Errors
    /// [`Error::Setting`] if the grammar takes too much work at this point.
    pub fn forced(&mut self) -> Result<Vec<TokenId>> {
        if self.must_end() {
            return Ok(Vec::new());
        }
        let forced = self.inner.compute_ff_tokens();
        match self.inner.get_error() {
            None => Ok(forced),
            Some(e) => Err(self.failed(&e)),
        }
    }

    /// Advances by `token`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a token that may not follow.
    pub fn accept(&mut self, token: TokenId) -> Result<()> {
        let ends = self.table.eos().contains(&token);
        if ends && !self.ended && self.may_end()? {
            self.ended = true;
        } else if self.must_end() || !self.takes(token)? {
            let why = format!("token {token} may not follow after {} tokens of a text", self.accepted);
            return Err(Error::Setting { name: self.name, why });
        }
        self.accepted += 1;
        Ok(())
    }

    /// Rewinds the last `count` tokens, as speculative decoding does with tokens that the model does not
    /// choose.
    ///
    /// # Errors
    /// [`Error::Setting`] for more tokens than were accepted, and for a Lark grammar with `stop=` or
    /// `max_tokens=`, which cannot be rewound.
    pub fn rewind(&mut self, count: usize) -> Result<()> {
        let wrong = |why| Err(Error::Setting { name: self.name, why });
        if count > self.accepted {
            return wrong(format!("{count} tokens are taken back and {} were accepted", self.accepted));
        }
        if count == 0 {
            return Ok(());
        }
        if !self.can_rewind() {
            return wrong("a grammar with `stop=` or `max_tokens=` cannot take back tokens".into());
        }
        let parsed = count - usize::from(self.ended);
        self.inner.rollback(parsed).map_err(|e| self.failed(&e))?;
        self.ended = false;
        self.accepted -= count;
        Ok(())
    }

    /// Whether tokens can be rewound: not with a Lark grammar that uses `stop=` or `max_tokens=`.
    pub fn can_rewind(&self) -> bool {
        self.rewinds
    }

    /// Whether the text is complete at this point: whether an end-of-text token may follow.
    ///
    /// # Errors
    /// [`Error::Setting`] if the grammar takes too much work at this point.
    pub fn may_end(&mut self) -> Result<bool> {
        if self.must_end() {
            return Ok(true);
        }
        self.inner.is_accepting().map_err(|e| self.failed(&e))
    }

    /// Whether only the end of the text may follow. A model without end-of-text tokens has to be stopped
    /// here.
    pub fn must_end(&self) -> bool {
        self.ended || (!self.inner.is_error() && self.inner.is_stopped())
    }

    /// A handle that ends an operation on another thread, and every later one, with an error.
    pub(super) fn cancellation(&self) -> Option<CancellationHandle> {
        self.inner.cancellation_handle()
    }

    fn takes(&mut self, token: TokenId) -> Result<bool> {
        if !self.table.known().allows(token) {
            return Ok(false);
        }
        self.inner.try_consume_tokens(&[token]).map(|taken| taken == 1).map_err(|e| self.failed(&e))
    }

    fn failed(&self, error: &impl fmt::Display) -> Error {
        Error::Setting { name: self.name, why: sentence::of(&error.to_string()) }
    }
}
