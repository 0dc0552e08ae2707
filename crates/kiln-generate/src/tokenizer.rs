//! A stranger's `tokenizer.json`, checked before the tokenizers crate reads it.
//!
//! The crate trusts its file: some files make it panic, produce unbounded text, or overflow the stack. Faults
//! that are visible in the file are rejected here. A panic that only some text triggers becomes an error.

use std::{collections::VecDeque, fmt};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};
use tokenizers::tokenizer::step_decode_stream;

use kiln_core::{Error, Result, model::TokenId};

mod beside;
mod pieces;

pub use beside::TokenizerConfig;
pub(crate) use pieces::Piece;

type Fields = Map<String, Value>;
type Checked<T> = Result<T, String>;

/// Parts of a file that may be lists of parts of the same kind, and the name of such a list.
const ROLES: [(&str, &str); 4] = [
    ("normalizer", "normalizers"),
    ("pre_tokenizer", "pretokenizers"),
    ("post_processor", "processors"),
    ("decoder", "decoders"),
];
/// Maximum nesting of lists, and maximum number of parts of a role in all of them.
const MOST_DEPTH: usize = 8;
const MOST_PARTS: usize = 64;
/// Maximum size in bytes of all patterns, which compile to far more: 1800 bytes of look-arounds to 0.6 GB.
/// Llama 3's takes about 120.
const MOST_PATTERN: usize = 2048;
/// Maximum number of bytes that one byte of text, or of tokens, may become. ALBERT's normalizer, with
/// SentencePiece's character map, counts as 242.
const MOST_GROWTH: f64 = 1024.0;
/// Maximum number of bytes that a text may become in the worst case. The crate takes about twenty times as
/// much memory for them.
const MOST_BYTES: f64 = (64 << 20) as f64;
/// Maximum size in bytes of a token, and of everything from which the crate builds a trie.
const MOST_TOKEN: usize = 16 << 10;
const MOST_ADDED: usize = 16 << 20;
/// Maximum size in bytes of a Unigram token. Unigram visits every token that may begin at a place in a text;
/// it builds a node of a trie per byte, and frees these by recursion.
const MOST_PIECE: usize = 256;
const MOST_PIECES: usize = 8 << 20;
/// Maximum length in characters of a word that WordPiece looks at, with cubic cost.
const MOST_WORD: u64 = 512;
/// Maximum number of tokens that a template may add.
const MOST_TEMPLATE: usize = 1024;
/// Maximum size in bytes of a character map: SentencePiece's own take a quarter of a mebibyte.
const MOST_CHARSMAP: usize = 4 << 20;

/// Converts text to tokens and back, as a `tokenizer.json` describes.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Maximum growth of a byte of text before the model sees it, and of a byte of tokens when decoded.
    encoded: f64,
    decoded: f64,
    /// Maximum number of bytes of text per token; `None` if parts of a text may be left out.
    longest: Option<usize>,
}

impl fmt::Debug for Tokenizer {
    // The vocabulary is too long to print.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Creates the tokenizer of a `tokenizer.json`, without its padding, truncation and dropout, which are
    /// for training.
    ///
    /// # Errors
    /// One sentence that names the faulty part of the file and the reason.
    pub fn load(file: &[u8]) -> Result<Self, String> {
        Self::from_json(serde_json::from_slice(file).map_err(|e| format!("it is not JSON: {e}"))?)
    }

    /// Creates the tokenizer from the JSON of a `tokenizer.json`, as [`load`](Self::load) does.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub fn from_json(mut file: Value) -> Result<Self, String> {
        let root = file.as_object_mut().ok_or("it is not a JSON object")?;
        let [normalized, split, _, decoded] = check(root)?;
        root.insert("padding".into(), Value::Null);
        root.insert("truncation".into(), Value::Null);
        // Reads the value that was checked, since the file may contain a key twice.
        let longest = longest_token(root);
        let inner = contained(|| serde_json::from_value(file))?.map_err(|e| e.to_string())?;
        Ok(Self { inner, encoded: normalized * split, decoded, longest })
    }

    /// Treats special tokens in a text as ordinary text, if `splits`. (`split_special_tokens`)
    pub fn split_special_tokens(mut self, splits: bool) -> Self {
        self.inner.set_encode_special_tokens(splits);
        self
    }

    /// Lower bound of the number of tokens in a text of `bytes` bytes: far fewer than it will have, but known
    /// without looking at it.
    pub fn fewest_tokens(&self, bytes: usize) -> usize {
        self.longest.map_or(0, |longest| bytes.div_ceil(longest.max(1)))
    }

    /// Tokenizes `text`.
    ///
    /// # Errors
    /// A text that is too long, or that the tokenizer has no tokens for.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>> {
        self.encoded(text, add_special_tokens).map_err(|why| Error::Prompt { why })
    }

    fn encoded(&self, text: &str, add_special_tokens: bool) -> Checked<Vec<TokenId>> {
        bounded(text.len(), self.encoded, "the text")?;
        // Without the position of each token in the text, which is not needed and takes time.
        let encoding = contained(|| self.inner.encode_fast(text, add_special_tokens))?;
        Ok(encoding.map_err(|e| e.to_string())?.get_ids().to_vec())
    }

    /// Decodes `ids`.
    ///
    /// # Errors
    /// Tokens whose text is too long, or that the tokenizer cannot decode.
    pub fn decode(&self, ids: &[TokenId], skip_special_tokens: bool) -> Result<String> {
        let decoded = || {
            self.decodes(ids)?;
            contained(|| self.inner.decode(ids, skip_special_tokens))?.map_err(|e| e.to_string())
        };
        decoded().map_err(undecodable)
    }

    /// The text that `id` completes after `ids`, by the crate's incremental decoding; the other arguments are
    /// its state.
    ///
    /// # Errors
    /// The errors of [`decode`](Self::decode), and a decoder that retracts text that it returned.
    pub(crate) fn step(
        &self,
        id: TokenId,
        ids: &mut Vec<TokenId>,
        prefix: &mut String,
        prefix_index: &mut usize,
    ) -> Result<Option<String>> {
        let mut step = || {
            self.decodes(ids)?;
            contained(|| step_decode_stream(&self.inner, vec![id], true, ids, prefix, prefix_index))?
                .map_err(|e| e.to_string())
        };
        step().map_err(undecodable)
    }

    /// The text of `ids` with the text of special tokens, which [`decode`](Self::decode) leaves out.
    pub(crate) fn searched_text(&self, ids: &[TokenId]) -> Result<String> {
        let (mut text, mut given) = (String::new(), 0);
        let mut go_on = |plain: &str| {
            let new = plain.get(given..).unwrap_or_default().to_owned();
            given = plain.len();
            new
        };
        for (at, id) in ids.iter().enumerate() {
            if let Some(name) = self.special_text(*id) {
                text.push_str(&go_on(&self.decode(ids.get(..at).unwrap_or_default(), true)?));
                text.push_str(&name);
            }
        }
        text.push_str(&go_on(&self.decode(ids, true)?));
        Ok(text)
    }

    /// Whether both have the same tokens, as far as a sample of a thousand shows.
    pub fn has_vocabulary_of(&self, other: &Self) -> bool {
        let (own, other) = (&self.inner, &other.inner);
        let size = own.get_vocab_size(true);
        let mut ids = (0..size as TokenId).step_by((size / 1000).max(1));
        size == other.get_vocab_size(true) && ids.all(|id| own.id_to_token(id) == other.id_to_token(id))
    }

    /// Whether both have a text token in common.
    pub fn shares_tokens_with(&self, other: &Self) -> bool {
        let ids = 0..self.inner.get_vocab_size(true) as TokenId;
        ids.filter(|id| !self.is_special(*id))
            .filter_map(|id| self.inner.id_to_token(id))
            .any(|token| other.inner.token_to_id(&token).is_some_and(|id| !other.is_special(id)))
    }

    /// The token with this text; for special tokens, with this name.
    pub fn id_of(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    /// Whether a token is not text, such as one that ends a text.
    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        let added = self.inner.get_added_vocabulary();
        self.inner.id_to_token(id).is_none_or(|token| added.is_special_token(&token))
    }

    #[cfg(test)]
    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    fn decodes(&self, ids: &[TokenId]) -> Checked<()> {
        let bytes = |id: &TokenId| self.inner.id_to_token(*id).map_or(0, |token| token.len() + 1);
        bounded(ids.iter().map(bytes).sum(), self.decoded, "the text of the tokens")
    }
}

fn undecodable(why: String) -> Error {
    Error::Prompt { why: format!("the tokenizer cannot turn the tokens into text: {why}") }
}

fn bounded(bytes: usize, growth: f64, what: &str) -> Checked<()> {
    match bytes as f64 * growth <= MOST_BYTES {
        true => Ok(()),
        false => Err(format!(
            "{what} is too long: the tokenizer may turn its {bytes} bytes into {growth:.0} times as many; cut it into \
             shorter texts"
        )),
    }
}

/// Runs `work`. A panic of the tokenizers crate becomes an error that is not printed.
fn contained<T>(work: impl FnOnce() -> T) -> Checked<T> {
    crate::contained::contained(work).map_err(|text| format!("the tokenizers crate panicked: {text}"))
}

/// Checks a file. Returns the growth of each of its [`ROLES`].
fn check(root: &mut Fields) -> Checked<[f64; 4]> {
    let (mut growth, mut pattern) = ([1.0; 4], 0);
    for ((role, list), growth) in ROLES.into_iter().zip(&mut growth) {
        let mut parts = Vec::new();
        if let Some(part) = root.get_mut(role).filter(|part| !part.is_null()) {
            flatten(part, list, MOST_DEPTH, &mut parts).map_err(|why| format!("the {role} {why}"))?;
        }
        let templates = parts.iter().filter(|part| part.contains_key("single")).count();
        for part in parts {
            let kind = text(part, "type");
            let wrong = |why| format!("the {role} {kind} {why}");
            *growth *= growth_of(role, kind, part).map_err(wrong)?;
            pattern += part.get("pattern").map_or(0, |pattern| pattern.to_string().len());
        }
        if templates > 1 {
            return Err(format!(
                "the {role} has {templates} templates, one of which would fill in the other"
            ));
        }
        if *growth > MOST_GROWTH {
            return Err(format!(
                "the {role} may make a text {growth:.0} times as long, at most {MOST_GROWTH} is taken"
            ));
        }
    }
    if pattern > MOST_PATTERN {
        return Err(format!("the patterns have {pattern} bytes, at most {MOST_PATTERN} are taken"));
    }
    added_tokens(root.get("added_tokens"), growth[0])?;
    let model = root.get_mut("model").and_then(Value::as_object_mut).ok_or("it has no model")?;
    let kind = named(model);
    match check_model(&kind, model) {
        Ok(()) => Ok(growth),
        Err(why) => Err(format!("the model {kind} {why}")),
    }
}

/// The parts of a tree of sequences, in order.
fn flatten<'a>(part: &'a mut Value, list: &str, depth: usize, parts: &mut Vec<&'a Fields>) -> Checked<()> {
    let part = part.as_object_mut().ok_or("holds something other than an object")?;
    if text(part, "type") == "Sequence" {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(format!("has sequences more than {MOST_DEPTH} deep"));
        };
        let within = part.get_mut(list).and_then(Value::as_array_mut);
        let within = within.ok_or_else(|| format!("has a sequence without its list of {list}"))?;
        return within.iter_mut().try_for_each(|part| flatten(part, list, depth, parts));
    }
    if parts.len() == MOST_PARTS {
        return Err(format!("has more than {MOST_PARTS} parts"));
    }
    // The crate guesses the type of this one by its fields, unless it has the name that the crate looks for.
    if text(part, "type") == "BertNormalizer" {
        part.insert("type".into(), "Bert".into());
    }
    parts.push(part);
    Ok(())
}

/// Maximum growth of a byte by the part, after checking that the part cannot make the crate panic.
fn growth_of(role: &str, kind: &str, part: &Fields) -> Checked<f64> {
    let bytes = |field| text(part, field).len() as f64;
    if part.contains_key("single") {
        // The crate takes everything with the fields of a template for one.
        return template(part).map(|()| 1.0);
    }
    Ok(match (role, kind) {
        ("normalizer" | "decoder", "Replace") => replaced(part.get("pattern"), bytes("content"))?,
        ("normalizer", "Prepend") => 1.0 + bytes("prepend"),
        ("normalizer", "Precompiled") => charsmap(text(part, "precompiled_charsmap"))?,
        // The growth in UTF-8 that Unicode states for its normal forms.
        ("normalizer", "NFC" | "NFD") => 3.0,
        ("normalizer", "NFKC" | "NFKD") => 11.0,
        ("normalizer", "Lowercase" | "ByteLevel") => 2.0,
        // Spaces around an ideogram, then NFD, then lower case.
        ("normalizer", "Bert") => 2.0 * 3.0 * 2.0,
        ("normalizer", "Nmt" | "Strip" | "StripAccents") => 1.0,

        // A character for each byte, after a space before each piece.
        ("pre_tokenizer", "ByteLevel") if part.get("add_prefix_space") == Some(&json!(true)) => 4.0,
        ("pre_tokenizer", "ByteLevel") => 2.0,
        ("pre_tokenizer", "Metaspace") => 1.0 + bytes("replacement"),
        ("pre_tokenizer", "FixedLength") if part.get("length") == Some(&json!(0)) => {
            return Err("cuts a text into pieces of length 0".into());
        }
        (
            "pre_tokenizer",
            "BertPreTokenizer" | "CharDelimiterSplit" | "Delimiter" | "Digits" | "FixedLength"
            | "Punctuation" | "Split" | "UnicodeScripts" | "Whitespace" | "WhitespaceSplit",
        ) => 1.0,

        ("post_processor", "BertProcessing" | "ByteLevel" | "RobertaProcessing") => 1.0,

        ("decoder", "Strip") if part.get("stop") != Some(&json!(0)) => {
            return Err(
                "strips the end of a token, which panics where a token is shorter; only its start may be"
                    .into(),
            );
        }
        ("decoder", "ByteLevel" | "WordPiece") => 2.0,
        // Between all characters if it is empty.
        ("decoder", "BPEDecoder") if text(part, "suffix").is_empty() => 3.0,
        ("decoder", "CTC") if text(part, "word_delimiter_token").is_empty() => 3.0,
        ("decoder", "BPEDecoder" | "ByteFallback" | "CTC" | "Fuse" | "Metaspace" | "Strip") => 1.0,
        _ => return Err("is of a kind that is not known".into()),
    })
}

fn replaced(pattern: Option<&Value>, content: f64) -> Checked<f64> {
    let of = |kind| pattern.and_then(|pattern| pattern.get(kind)?.as_str());
    let least = match (of("String"), of("Regex")) {
        (Some(pattern), None) => pattern.len(),
        // Characters, classes and counts, each of which takes a byte or more.
        (None, Some(pattern)) if !pattern.contains(['^', '$', '\\', '?', '*', '|', '(']) => {
            usize::from(!pattern.is_empty() && !pattern.contains("{0") && !pattern.contains("{,"))
        }
        // An anchor or a look-around may match between all characters. One that always does makes the crate
        // panic.
        (None, Some(pattern)) if !matches_nothing(pattern)? => return Ok(1.0 + 2.0 * content),
        (None, Some(_)) => 0,
        _ => return Err("has no pattern, or two".into()),
    };
    match least {
        0 => Err("replaces nothing: its pattern has to match a character or more".into()),
        least => Ok((content / least as f64).max(1.0)),
    }
}

fn matches_nothing(pattern: &str) -> Checked<bool> {
    contained(|| tokenizers::utils::SysRegex::new(pattern).map(|regex| regex.find_iter("").next().is_some()))?
        .map_err(|e| format!("has a pattern that is no regular expression: {e}"))
}

/// Checks a template, which may add known tokens to one text, and name that text once at most.
fn template(part: &Fields) -> Checked<()> {
    let pieces = part.get("single").and_then(Value::as_array).ok_or("has no list of pieces")?;
    let (mut texts, mut added) = (0, 0);
    for piece in pieces {
        match (piece.pointer("/Sequence/id"), piece.pointer("/SpecialToken/id")) {
            (Some(id), None) if id == "A" => texts += 1,
            (Some(_), None) => return Err("names a second text for a single one".into()),
            (None, Some(Value::String(id))) => {
                let token =
                    part.get("special_tokens").and_then(|tokens| tokens.get(id)?.get("ids")?.as_array());
                added +=
                    token.ok_or_else(|| format!("names the token {id:?}, which it does not define"))?.len();
            }
            _ => return Err("has a piece that is neither a text nor a token".into()),
        }
    }
    match texts <= 1 && added.max(pieces.len()) <= MOST_TEMPLATE {
        true => Ok(()),
        false => Err(format!("repeats its text, or adds more than {MOST_TEMPLATE} tokens")),
    }
}

/// The growth of SentencePiece's character map: the size of a trie of bytes (Darts), the trie, and the texts
/// that its leaves point to, each up to a zero byte.
fn charsmap(text: &str) -> Checked<f64> {
    let blob = STANDARD
        .decode(text)
        .ok()
        .filter(|blob| blob.len() <= MOST_CHARSMAP)
        .ok_or("is no character map, or too large")?;
    let (size, rest) = blob.split_first_chunk().ok_or("is empty")?;
    let trie = rest.split_at_checked(u32::from_le_bytes(*size) as usize / 4 * 4);
    let (trie, texts) = trie.ok_or("is cut off")?;
    let texts = str::from_utf8(texts).map_err(|_| "maps to something other than text")?;
    let units: Vec<u32> = trie.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let at = |place: u32| units.get(place as usize).copied().ok_or("points outside of itself");
    let offset = |unit: u32| (unit >> 10) << ((unit & (1 << 9)) >> 6);

    let (mut growth, mut seen) = (1.0_f64, vec![false; units.len()]);
    let mut open = VecDeque::from([(offset(at(0)?), 1)]);
    while let Some((base, depth)) = open.pop_front() {
        // Any next byte in a text is looked up.
        for byte in 1..=0xFF {
            let place = base ^ byte;
            let unit = at(place)?;
            if unit & (1 << 31 | 0xFF) != byte || std::mem::replace(&mut seen[place as usize], true) {
                continue;
            }
            let next = place ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let text =
                    texts.get((at(next)? & !(1 << 31)) as usize..).ok_or("points outside of its texts")?;
                let text = text.split('\0').next().unwrap_or_default();
                growth = growth.max(text.len() as f64 / f64::from(depth));
            }
            open.push_back((next, depth + 1));
        }
    }
    Ok(growth)
}

/// Checks the added tokens, some of which the crate normalizes when it reads them.
fn added_tokens(tokens: Option<&Value>, growth: f64) -> Checked<()> {
    let mut bytes = 0;
    for token in tokens.and_then(Value::as_array).into_iter().flatten() {
        let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
        bytes += content.len();
        if content.len() > MOST_TOKEN || bytes > MOST_ADDED {
            let most = format!("at most {MOST_TOKEN}, and {MOST_ADDED} in all, are taken");
            return Err(format!("the added tokens hold one of {} bytes: {most}", content.len()));
        }
        // Spaces after one token may then belong to two.
        if token.get("lstrip") == Some(&json!(true)) && content.trim().is_empty() {
            return Err(format!(
                "the added token {content:?} is all space and takes the space before it, too"
            ));
        }
    }
    bounded(bytes, growth, "the list of added tokens")
}

/// The type of a model. Old files leave it out; then it is guessed and added to the file.
fn named(model: &mut Fields) -> String {
    let guess = match () {
        () if model.contains_key("merges") => "BPE",
        () if model.get("vocab").is_some_and(Value::is_array) => "Unigram",
        () if model.contains_key("continuing_subword_prefix") => "WordPiece",
        () => "WordLevel",
    };
    let kind = model.entry("type").or_insert_with(|| guess.into());
    kind.as_str().unwrap_or_default().to_owned()
}

fn check_model(kind: &str, model: &mut Fields) -> Checked<()> {
    let most = if kind == "Unigram" { (MOST_PIECE, MOST_PIECES) } else { (MOST_TOKEN, usize::MAX) };
    let vocab = model.get("vocab").ok_or("has no vocabulary")?;
    let (words, scored) = (vocab.as_object().into_iter().flatten(), vocab.as_array().into_iter().flatten());
    let scored = scored.filter_map(|scored| scored.get(0)?.as_str());
    let lengths = words.map(|(token, _)| token.len()).chain(scored.map(str::len));
    let (longest, all) = lengths.fold((0, 0), |(longest, all), len| (len.max(longest), len + all));
    if longest > most.0 || all > most.1 {
        return Err(format!(
            "has a token of {longest} bytes, and {all} in all; {} and {} are taken",
            most.0, most.1
        ));
    }
    match kind {
        "BPE" => {
            merges(model)?;
            model.remove("dropout");
            Ok(())
        }
        "WordPiece" if model.get("max_input_chars_per_word").and_then(Value::as_u64) > Some(MOST_WORD) => {
            Err(format!("looks at words of more than {MOST_WORD} characters"))
        }
        "WordPiece" | "WordLevel" | "Unigram" => Ok(()),
        _ => Err("is of a kind that is not known".into()),
    }
}

/// Checks that each merge gives a token: the crate looks it up in a buffer as long as the longest of them,
/// without regard to character boundaries.
fn merges(model: &Fields) -> Checked<()> {
    let vocab = model.get("vocab").and_then(Value::as_object).ok_or("has no vocabulary")?;
    let prefix = text(model, "continuing_subword_prefix").len();
    let mut token = String::new();
    for merge in model.get("merges").and_then(Value::as_array).into_iter().flatten() {
        let pair = match merge {
            Value::String(line) if line.starts_with("#version") => continue,
            Value::String(line) => line.split_once(' '),
            merge => merge.get(0).and_then(Value::as_str).zip(merge.get(1).and_then(Value::as_str)),
        };
        token.clear();
        let known = pair.and_then(|(left, right)| {
            token.extend([left, right.get(prefix..)?]);
            vocab.get(&token)
        });
        if known.is_none() {
            return Err(format!("has the merge {merge}, which gives no token of its vocabulary"));
        }
    }
    Ok(())
}

/// Maximum number of bytes of text per token; `None` if parts of a text may be left out, or many characters
/// become one token for unknown text.
fn longest_token(root: &Fields) -> Option<usize> {
    let model = root.get("model")?.as_object()?;
    let keeps_all = text(model, "type") == "BPE"
        && model.get("unk_token").is_none_or(Value::is_null)
        && root.get("normalizer").is_none_or(Value::is_null)
        && is_byte_level(root.get("pre_tokenizer")?);
    // A character stands for each byte, so tokens have as many characters as bytes.
    let vocab = model.get("vocab")?.as_object()?;
    // Bytes without a letter are left out.
    if !byte_letters().all(|letter| vocab.contains_key(&letter.to_string())) {
        return None;
    }
    let vocab = vocab.keys().map(|token| token.chars().count());
    let added = root.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    // Added tokens may take the white space around them, too.
    let strips =
        |token: &Value| ["lstrip", "rstrip"].iter().any(|side| token.get(side) == Some(&json!(true)));
    if !keeps_all || added.clone().any(strips) {
        return None;
    }
    let added = added.filter_map(|token| token.get("content")?.as_str()).map(str::len);
    vocab.chain(added).max()
}

/// The characters that stand for bytes (GPT-2's): printable ones for themselves, and as many others.
fn byte_letters() -> impl Iterator<Item = char> {
    let printable = (33..=126).chain(161..=172).chain(174..=255);
    let others = 256..256 + (256 - printable.clone().count() as u32);
    printable.chain(others).filter_map(char::from_u32)
}

/// Whether a pre-tokenizer turns every byte of a text into a character.
fn is_byte_level(part: &Value) -> bool {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    match kind {
        "ByteLevel" => true,
        "Sequence" => {
            let parts = part.get("pretokenizers").and_then(Value::as_array);
            let parts = parts.map_or(&[][..], Vec::as_slice);
            let removes = |part: &Value| part.get("behavior").is_some_and(|behavior| behavior == "Removed");
            parts.last().is_some_and(is_byte_level)
                && !parts.iter().any(removes)
                && parts.iter().all(|part| {
                    ["Split", "Digits", "ByteLevel"].iter().any(|kind| part.get("type") == Some(&json!(kind)))
                })
        }
        _ => false,
    }
}

fn text<'a>(fields: &'a Fields, field: &str) -> &'a str {
    fields.get(field).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests;
