//! Tokens in files other than `tokenizer.json`, which are added to it as Transformers adds them.
//!
//! Rules: `_from_pretrained` in Transformers' `tokenization_utils_base.py`, and `__init__` in
//! `tokenization_utils_tokenizers.py`.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Map, Value, json};

type Fields = Map<String, Value>;

/// Names of special tokens that every tokenizer of Transformers knows, in the order in which it adds them.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
/// An older name of [`EXTRA`].
const ADDITIONAL: &str = "additional_special_tokens";
const DECODER: &str = "added_tokens_decoder";

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const ADDED_TOKENS: &str = "added_tokens.json";

/// A file of the folder, and one sentence about its fault.
type Wrong = (&'static str, String);

/// The settings of a folder's tokenizer in files other than `tokenizer.json`.
///
/// Tokens come from `tokenizer_config.json`: `added_tokens_decoder`, `extra_special_tokens` (or
/// `additional_special_tokens`), and keys that end in `_token`. Without `added_tokens_decoder`,
/// `special_tokens_map.json` and `added_tokens.json` count, too.
#[derive(Clone, Debug, Default)]
pub struct TokenizerConfig {
    /// Special tokens with a name.
    named: Vec<(String, Token)>,
    /// Special tokens without a name.
    extra: Vec<Token>,
    /// Tokens by their id in the folder.
    listed: BTreeMap<u64, Token>,
    /// Whether the tokens of `tokenizer.json` count as listed: true without `added_tokens_decoder`.
    lists_all: bool,
    splits_special_tokens: bool,
}

impl TokenizerConfig {
    /// Reads the files. Files that the folder does not have are null.
    ///
    /// # Errors
    /// The file that differs from what Transformers writes, and one sentence about it.
    pub fn new(config: &Value, special_tokens_map: &Value, added_tokens: &Value) -> Result<Self, Wrong> {
        let mut fields = object(config, CONFIG)?;
        let is_empty = |value: Option<&Value>| match value {
            None | Some(Value::Null) => true,
            Some(value) => {
                value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
            }
        };
        if is_empty(fields.get(EXTRA))
            && let Some(additional) = fields.remove(ADDITIONAL)
        {
            fields.insert(EXTRA.to_owned(), additional);
        }
        let mut specific = take_own(&mut fields);
        specific.extend(take_extra(&mut fields));

        let mut listed = BTreeMap::new();
        let lists_all = !fields.contains_key(DECODER);
        if lists_all {
            for (name, value) in object(special_tokens_map, SPECIAL_TOKENS_MAP)? {
                let value = special(value);
                let known = fields.get(EXTRA).and_then(Value::as_array).filter(|_| name == EXTRA);
                let value = match (known, value) {
                    (Some(known), Value::Array(more)) => {
                        let new = more.into_iter().filter(|token| !known.contains(token));
                        known.iter().cloned().chain(new).collect()
                    }
                    (_, value) => value,
                };
                fields.insert(name, value);
            }
            specific.extend(take_extra(&mut fields));
            let extra = fields.get(EXTRA).and_then(Value::as_array).into_iter().flatten();
            let named = NAMES.iter().filter_map(|name| fields.get(*name));
            let special: HashSet<&str> = named.chain(extra).filter_map(content).collect();
            for (content, id) in object(added_tokens, ADDED_TOKENS)? {
                let id = id.as_u64().ok_or_else(|| {
                    (ADDED_TOKENS, format!("gives the token {content:?} {id}, which is no id"))
                })?;
                let special = special.contains(&*content);
                listed.insert(id, Token { normalized: !special, ..Token::new(content, special) });
            }
        } else {
            let wrong = |what: &str| (CONFIG, format!("has `{DECODER}` with {what}"));
            let decoder = fields.get(DECODER).and_then(Value::as_object);
            for (id, token) in decoder.ok_or_else(|| wrong("something other than an object"))? {
                let id = id.parse().map_err(|_| wrong(&format!("the key {id:?}, which is no id")))?;
                let token = Token::read(token).filter(|_| token.is_object());
                listed.insert(id, token.ok_or_else(|| wrong(&format!("the id {id} of no token")))?);
            }
        }

        let mut named = Vec::new();
        let mut name = |name: &str, token: &Value| {
            let token = Token::read(token)
                .ok_or_else(|| (CONFIG, format!("has `{name}`, which is no token: {token}")))?;
            match named.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) => *known = token,
                None => named.push((name.to_owned(), token)),
            }
            Ok::<(), Wrong>(())
        };
        for standard in NAMES {
            fields
                .get(standard)
                .filter(|token| !token.is_null())
                .map_or(Ok(()), |token| name(standard, token))?;
        }
        let own = fields.iter().filter(|(key, value)| is_own(key) && content(value).is_some());
        let specific = specific.iter().map(|(key, value)| (key, value));
        own.chain(specific).try_for_each(|(key, token)| name(key, token))?;

        let extra = match fields.get(EXTRA).or(fields.get(ADDITIONAL)) {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(tokens)) => {
                tokens.iter().map(Token::read).collect::<Option<_>>().ok_or_else(|| {
                    (CONFIG, format!("has `{EXTRA}` or `{ADDITIONAL}` with something that is no token"))
                })?
            }
            Some(_) => return Err((CONFIG, format!("has `{EXTRA}` that is neither a list nor an object"))),
        };
        let splits_special_tokens = fields.get("split_special_tokens") == Some(&Value::Bool(true));
        Ok(Self { named, extra, listed, lists_all, splits_special_tokens })
    }

    /// The special tokens that a chat template may name. (`special_tokens_map`)
    pub fn names(&self) -> BTreeMap<String, String> {
        self.named.iter().map(|(name, token)| (name.clone(), token.content.clone())).collect()
    }

    /// Whether special tokens in a text are ordinary text.
    pub fn splits_special_tokens(&self) -> bool {
        self.splits_special_tokens
    }

    /// Adds the tokens to `tokenizer`, a `tokenizer.json`.
    ///
    /// A token that is not in the vocabulary gets the first free id, whatever id the folder gives it, as in
    /// Transformers.
    pub fn complete(&self, tokenizer: &mut Value) {
        let Some(root) = tokenizer.as_object_mut() else { return };
        let mut added = match root.remove("added_tokens") {
            Some(Value::Array(added)) => added,
            None | Some(Value::Null) => Vec::new(),
            // An error is reported when the file is read.
            Some(other) => {
                root.insert("added_tokens".to_owned(), other);
                return;
            }
        };
        self.add_to(&mut added, &mut Ids::of(root.get("model").and_then(|model| model.get("vocab"))));
        root.insert("added_tokens".to_owned(), added.into());
    }

    fn add_to(&self, added: &mut Vec<Value>, ids: &mut Ids<'_>) {
        let mut listed = self.listed.clone();
        let mut places = HashMap::new();
        for (place, token) in added.iter().enumerate() {
            let Some(known) = Token::read(token).filter(|_| token.is_object()) else { continue };
            ids.of_token(&known.content);
            places.insert(known.content.clone(), place);
            if let Some(id) = token.get("id").and_then(Value::as_u64).filter(|_| self.lists_all) {
                listed.insert(id, known);
            }
        }
        let mut known: HashSet<String> = places.keys().cloned().collect();
        known.extend(listed.values().map(|token| token.content.clone()));
        let special = self.named.iter().map(|(_, token)| token).chain(&self.extra);
        let special = special.filter(|token| known.insert(token.content.clone()));
        let unlisted: Vec<_> = special.map(|token| (None, token.clone())).collect();
        let listed = listed.into_iter().map(|(id, token)| (Some(id), token));

        let named: HashSet<&str> = self.named.iter().map(|(_, token)| &*token.content).collect();
        for (said, mut token) in listed.chain(unlisted).filter(|(_, token)| !token.content.is_empty()) {
            token.special |= named.contains(&*token.content);
            let id = ids.of_token(&token.content);
            if let Some(said) = said.filter(|said| *said != id) {
                let token = &token.content;
                tracing::warn!(
                    token,
                    said,
                    id,
                    "a token gets another id than its folder says, as in Transformers"
                );
            }
            match places.get(&token.content).and_then(|place| added.get_mut(*place)) {
                Some(known) => {
                    // A special token stays special.
                    token.special |= known.get("special") == Some(&Value::Bool(true));
                    *known = token.json(known.get("id").cloned().unwrap_or_default());
                }
                None => {
                    places.insert(token.content.clone(), added.len());
                    added.push(token.json(id.into()));
                }
            }
        }
    }
}

/// A token that is searched for in a text before it is split into words. (`AddedToken`)
#[derive(Clone, Debug, PartialEq)]
struct Token {
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

impl Token {
    fn new(content: String, special: bool) -> Self {
        Self { content, single_word: false, lstrip: false, rstrip: false, normalized: !special, special }
    }

    /// Reads a text, which is a special token, or an object with the fields of a token.
    fn read(value: &Value) -> Option<Self> {
        if let Value::String(content) = value {
            return Some(Self::new(content.clone(), true));
        }
        let flag = |name: &str| value.get(name).and_then(Value::as_bool);
        let plain = Self::new(content(value)?.to_owned(), flag("special").unwrap_or(false));
        Some(Self {
            single_word: flag("single_word").unwrap_or(false),
            lstrip: flag("lstrip").unwrap_or(false),
            rstrip: flag("rstrip").unwrap_or(false),
            normalized: flag("normalized").unwrap_or(plain.normalized),
            ..plain
        })
    }

    fn json(&self, id: Value) -> Value {
        json!({
            "id": id,
            "content": self.content,
            "single_word": self.single_word,
            "lstrip": self.lstrip,
            "rstrip": self.rstrip,
            "normalized": self.normalized,
            "special": self.special,
        })
    }
}

/// The ids that the tokenizers crate assigns to added tokens.
struct Ids<'a> {
    vocab: HashMap<&'a str, u64>,
    given: HashMap<String, u64>,
    next: u64,
}

impl<'a> Ids<'a> {
    fn of(vocab: Option<&'a Value>) -> Self {
        let vocab: HashMap<&str, u64> = match vocab {
            Some(Value::Object(vocab)) => {
                vocab.iter().filter_map(|(token, id)| Some((&**token, id.as_u64()?))).collect()
            }
            // Unigram: pairs of a token and its score.
            Some(Value::Array(vocab)) => {
                (0..).zip(vocab).filter_map(|(id, pair)| Some((pair.get(0)?.as_str()?, id))).collect()
            }
            _ => HashMap::new(),
        };
        Self { next: vocab.len() as u64, vocab, given: HashMap::new() }
    }

    fn of_token(&mut self, content: &str) -> u64 {
        if let Some(id) = self.vocab.get(content).or(self.given.get(content)) {
            return *id;
        }
        let id = self.next;
        self.next += 1;
        self.given.insert(content.to_owned(), id);
        id
    }
}

fn object(value: &Value, file: &'static str) -> Result<Fields, Wrong> {
    match value {
        Value::Null => Ok(Fields::new()),
        Value::Object(fields) => Ok(fields.clone()),
        _ => Err((file, "is not a JSON object".to_owned())),
    }
}

/// The text of a token, which is a string or an object that contains it.
fn content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// Whether a key names a token that not every tokenizer has.
fn is_own(key: &str) -> bool {
    key.ends_with("_token") && !NAMES.contains(&key)
}

/// Removes and returns the tokens with names of their own: texts of keys that end in `_token`.
fn take_own(fields: &mut Fields) -> Vec<(String, Value)> {
    let takes = |key: &str, value: &Value| is_own(key) && value.is_string();
    let taken = fields.iter().filter(|(key, value)| takes(key, value));
    let taken = taken.map(|(key, value)| (key.clone(), value.clone())).collect();
    fields.retain(|key, value| !takes(key, value));
    taken
}

/// Removes and returns `extra_special_tokens`, if it gives its tokens names.
fn take_extra(fields: &mut Fields) -> Fields {
    match fields.remove(EXTRA) {
        Some(Value::Object(extra)) => extra,
        Some(other) => {
            fields.insert(EXTRA.to_owned(), other);
            Fields::new()
        }
        None => Fields::new(),
    }
}

/// A token of `special_tokens_map.json`, all of which are special.
fn special(mut value: Value) -> Value {
    match &mut value {
        Value::Object(token) if token.contains_key("content") => {
            token.insert("special".to_owned(), true.into());
        }
        Value::Array(tokens) => *tokens = std::mem::take(tokens).into_iter().map(special).collect(),
        _ => (),
    }
    value
}

#[cfg(test)]
mod tests;
