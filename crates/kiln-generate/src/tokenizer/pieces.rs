//! The bytes that each token adds to a text.

use kiln_core::model::TokenId;
use tokenizers::{Decoder, DecoderWrapper};

use super::{Checked, Tokenizer, contained};

/// The text of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The bytes that the token adds in the middle of a text. They need not be whole characters.
    pub(crate) bytes: Vec<u8>,
    /// Whether the token is special: it has a name and no text.
    pub(crate) special: bool,
}

impl Tokenizer {
    /// The pieces of the tokens 0 to `vocab - 1`; `None` if there is no such token, or it has no text.
    ///
    /// The bytes are those that decoders give in the middle of a text. Some decoders remove a space at the
    /// start of a text.
    ///
    /// # Errors
    /// A decoder whose tokens have no bytes of their own.
    pub(crate) fn pieces(&self, vocab: usize) -> Checked<Vec<Option<Piece>>> {
        contained(|| {
            let spelling = Spelling::of(self.inner.get_decoder())?;
            let added = self.inner.get_added_vocabulary();
            let piece = |id| {
                let token: String = self.inner.id_to_token(id)?;
                let special = added.is_special_token(&token);
                let bytes = if special { Some(token.into_bytes()) } else { spelling.bytes(&token) };
                bytes.filter(|bytes| !bytes.is_empty()).map(|bytes| Piece { bytes, special })
            };
            Ok((0..vocab as u32).map(piece).collect())
        })?
    }

    /// The bytes of a token in the middle of a text, or the name of a special token; `None` if there is no
    /// such token, or it has no bytes of its own.
    pub fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        let token = self.inner.id_to_token(id)?;
        if self.inner.get_added_vocabulary().is_special_token(&token) {
            return Some(token.into());
        }
        contained(|| Spelling::of(self.inner.get_decoder()).map(|spelling| spelling.bytes(&token)))
            .ok()?
            .ok()?
    }

    /// The special token of this name, which no text contains.
    pub fn special_token(&self, name: &str) -> Option<TokenId> {
        let is_special = self.inner.get_added_vocabulary().is_special_token(name);
        self.inner.token_to_id(name).filter(|_| is_special)
    }

    /// The text of a special token between two others, if it is not left out; `None` for any other token.
    pub(crate) fn special_text(&self, id: TokenId) -> Option<String> {
        let token = self.inner.id_to_token(id)?;
        if !self.inner.get_added_vocabulary().is_special_token(&token) {
            return None;
        }
        let spelled = contained(|| {
            let spelling = Spelling::of(self.inner.get_decoder())?;
            Ok::<_, String>(spelling.bytes(&token).and_then(|bytes| String::from_utf8(bytes).ok()))
        });
        Some(spelled.ok().and_then(Result::ok).flatten().unwrap_or(token))
    }
}

/// The way in which a decoder turns tokens into bytes.
enum Spelling<'a> {
    /// Each byte is a character of GPT-2's alphabet.
    Alphabet,
    /// The bytes that a token adds between two others. Without a decoder, tokens are joined by spaces.
    Between { decoder: Option<&'a DecoderWrapper>, byte_fallback: bool, head: String, tail: String },
}

/// Precedes and follows a token whose bytes are determined.
const NEIGHBOUR: &str = "a";

impl<'a> Spelling<'a> {
    fn of(decoder: Option<&'a DecoderWrapper>) -> Checked<Self> {
        let mut parts = Vec::new();
        decoder.into_iter().for_each(|decoder| flatten(decoder, &mut parts));
        if parts.iter().any(|part| matches!(part, DecoderWrapper::CTC(_))) {
            return Err("its decoder CTC drops repeated tokens, so a token has no text of its own".into());
        }
        if parts.iter().any(|part| matches!(part, DecoderWrapper::ByteLevel(_))) {
            let changes = |part: &&DecoderWrapper| {
                !matches!(part, DecoderWrapper::ByteLevel(_) | DecoderWrapper::Fuse(_))
            };
            return match parts.iter().any(changes) {
                true => {
                    Err("its decoder combines ByteLevel with others, so a token has no bytes of its own"
                        .into())
                }
                false => Ok(Self::Alphabet),
            };
        }
        let byte_fallback = parts.iter().any(|part| matches!(part, DecoderWrapper::ByteFallback(_)));
        let head = decoded(decoder, &[NEIGHBOUR]).unwrap_or_default();
        let both = decoded(decoder, &[NEIGHBOUR, NEIGHBOUR]).unwrap_or_default();
        let tail = both.strip_prefix(&head).unwrap_or_default().to_owned();
        Ok(Self::Between { decoder, byte_fallback, head, tail })
    }

    fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        match self {
            // A token with a character outside the alphabet stands for its own text, as in the decoder.
            Self::Alphabet => token.chars().map(byte).collect::<Option<_>>().or_else(|| Some(token.into())),
            Self::Between { byte_fallback: true, .. } if fallback(token).is_some() => {
                fallback(token).map(|byte| vec![byte])
            }
            Self::Between { decoder, head, tail, .. } => {
                let text = decoded(*decoder, &[NEIGHBOUR, token, NEIGHBOUR])?;
                Some(text.strip_prefix(head)?.strip_suffix(tail)?.into())
            }
        }
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, parts: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().for_each(|part| flatten(part, parts));
        }
        part => parts.push(part),
    }
}

fn decoded(decoder: Option<&DecoderWrapper>, tokens: &[&str]) -> Option<String> {
    match decoder {
        Some(decoder) => decoder.decode(tokens.iter().map(|token| (*token).to_owned()).collect()).ok(),
        None => Some(tokens.join(" ")),
    }
}

/// The byte of a token `<0xNN>`.
fn fallback(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// The byte that a character of GPT-2's alphabet stands for (`bytes_to_unicode`): printable bytes are
/// themselves, and the others follow from U+0100 on.
fn byte(character: char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u8::try_from(u32::from(character)) {
        Ok(byte) => Some(byte).filter(printable),
        Err(_) => {
            let nth = u32::from(character).checked_sub(0x100)? as usize;
            (0..=u8::MAX).filter(|byte| !printable(byte)).nth(nth)
        }
    }
}
