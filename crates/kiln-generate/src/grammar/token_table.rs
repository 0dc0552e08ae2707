//! The tokenizer's vocabulary for grammars: the bytes of every token, as a trie.

use std::{fmt, sync::Arc};

use kiln_core::{Error, Result, model::TokenId};
use llguidance::{
    ParserFactory,
    toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv},
};

use super::{limits, mask::Mask};
use crate::{Tokenizer, contained::contained, tokenizer::Piece};

/// Maximum size in bytes of an allowed token: the trie has no room for longer ones.
const MOST_TOKEN: usize = 1000;
/// Maximum number of tokens in a vocabulary, which the trie counts in 24 bits.
const MOST_TOKENS: usize = (1 << 24) - 1;

/// The bytes of every token of a vocabulary, which all grammars share.
///
/// Building it takes 0.2 s for 50,000 tokens, so build it once per model and share it (`Arc`).
pub struct TokenTable {
    factory: ParserFactory,
    /// Tokens that the tokenizer has, and the end-of-text tokens. Ids that only pad the vocabulary are not
    /// included.
    known: Mask,
    end: Mask,
    eos: Vec<TokenId>,
}

impl fmt::Debug for TokenTable {
    // The vocabulary is too long to print.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenTable")
            .field("vocab", &self.vocab())
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl TokenTable {
    /// Builds the table of a tokenizer, for a model that scores `vocab` tokens, of which `eos` end a text.
    ///
    /// A model may score more tokens than the tokenizer has; those are never allowed.
    ///
    /// # Errors
    /// [`Error::Setting`] for a tokenizer whose tokens have no bytes of their own, and for an end-of-text
    /// token outside the vocabulary.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize, eos: &[TokenId]) -> Result<Self> {
        if let Some(id) = eos.iter().find(|id| **id as usize >= vocab) {
            let why = format!("token {id} is not in the vocabulary of {vocab} tokens");
            return Err(Error::Setting { name: "eos_token_id", why });
        }
        let made = contained(|| Self::made(tokenizer, vocab, eos)).and_then(|made| made);
        made.map_err(|why| {
            let why = format!("the tokenizer cannot be used with a grammar: {why}");
            Error::Setting { name: "grammar", why }
        })
    }

    fn made(tokenizer: Arc<Tokenizer>, vocab: usize, eos: &[TokenId]) -> Result<Self, String> {
        if vocab > MOST_TOKENS {
            return Err(format!("the vocabulary has {vocab} tokens, at most {MOST_TOKENS} are taken"));
        }
        let mut pieces = tokenizer.pieces(vocab)?;
        for id in eos {
            pieces.get_mut(*id as usize).into_iter().flatten().for_each(|piece| piece.special = true);
        }
        let words: Vec<Vec<u8>> = pieces.into_iter().map(word).collect();
        let known = (0..vocab as TokenId).filter(|id| words.get(*id as usize).is_some_and(|w| !w.is_empty()));
        let known = Mask::of(vocab, known.chain(eos.iter().copied()));

        let first = eos.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(vocab as u32, first), &words);
        if !eos.is_empty() {
            trie = trie.with_eos_tokens(eos);
        }
        // Some vocabularies of bytes lack the bytes of rare characters.
        let canonical = (b' '..=b'~').all(|byte| trie.token_id_at_bytes(&[byte]).is_some());
        let env: TokEnv = Arc::new(Env { trie, tokenizer, canonical });
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
        factory.quiet();
        *factory.limits_mut() = limits::parser();
        Ok(Self { factory, known, end: Mask::of(vocab, eos.iter().copied()), eos: eos.to_vec() })
    }

    /// Number of tokens that the model scores.
    pub fn vocab(&self) -> usize {
        self.known.vocab()
    }

    /// The tokens that end a text.
    pub fn eos(&self) -> &[TokenId] {
        &self.eos
    }

    /// The bytes that a token adds to a text; empty for special tokens and for ids without a token.
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        let bytes = self.factory.tok_env().tok_trie().token(id);
        if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) { &[] } else { bytes }
    }

    /// Whether text that must follow is tokenized as the tokenizer does it. Otherwise no token is forced, as
    /// for tokenizers that have no token for some ASCII character.
    pub fn forces(&self) -> bool {
        self.factory.tok_env().tokenize_is_canonical()
    }

    pub(super) fn factory(&self) -> &ParserFactory {
        &self.factory
    }

    pub(super) fn known(&self) -> &Mask {
        &self.known
    }

    pub(super) fn end(&self) -> &Mask {
        &self.end
    }
}

/// The entry of a token in the trie: special tokens begin with a byte that no text contains.
fn word(piece: Option<Piece>) -> Vec<u8> {
    let mark = TokTrie::SPECIAL_TOKEN_MARKER;
    match piece {
        Some(Piece { bytes, .. }) if bytes.len() > MOST_TOKEN => Vec::new(),
        Some(Piece { mut bytes, special: true }) => {
            bytes.insert(0, mark);
            bytes
        }
        Some(Piece { bytes, .. }) if !bytes.contains(&mark) => bytes,
        _ => Vec::new(),
    }
}

/// The tokenizer's interface for llguidance.
struct Env {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    canonical: bool,
}

/// A character that merges with no other. It precedes a text whose first token would get a space otherwise.
const MARK: char = '\u{2}';
/// Maximum number of tokens that the mark may become.
const MOST_MARKS: usize = 4;
/// Maximum number of bytes that are tokenized at once, and number of tokens at their end that may differ from
/// those of the whole text. llguidance looks at the last 4.
const MOST_BYTES: usize = 1024;
const CUT: usize = 8;

impl Env {
    /// The tokens of `text` in the middle of a longer one; `None` if they would not have its bytes.
    fn canonical(&self, text: &str) -> Option<Vec<TokenId>> {
        let ids = self.tokenizer.encode(text, false).ok()?;
        if self.spells(&ids, text) {
            return Some(ids);
        }
        let ids = self.tokenizer.encode(&format!("{MARK}{text}"), false).ok()?;
        let tails = (1..=MOST_MARKS).filter_map(|marks| ids.get(marks..));
        tails.into_iter().find(|tail| self.spells(tail, text)).map(<[TokenId]>::to_vec)
    }

    fn spells(&self, ids: &[TokenId], text: &str) -> bool {
        let mut rest = text.as_bytes();
        ids.iter().all(|id| {
            let bytes = self.trie.token(*id);
            let stripped = rest.strip_prefix(bytes).filter(|_| !bytes.is_empty());
            rest = stripped.unwrap_or(rest);
            stripped.is_some()
        }) && rest.is_empty()
    }
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Tokenizes bytes. For a long text, the tokens of its beginning are enough: llguidance asks for the
    /// others again.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let tokenized = |bytes: &[u8]| {
            let canonical = str::from_utf8(bytes).ok().and_then(|text| self.canonical(text));
            canonical.unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
        };
        if bytes.len() > MOST_BYTES {
            let end = (MOST_BYTES - 3..MOST_BYTES).find(|at| bytes[*at] & 0xC0 != 0x80).unwrap_or(MOST_BYTES);
            let mut ids = tokenized(&bytes[..end]);
            if ids.len() >= 2 * CUT {
                ids.truncate(ids.len() - CUT);
                return ids;
            }
        }
        tokenized(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
