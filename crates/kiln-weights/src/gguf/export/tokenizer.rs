//! Conversion of a folder's tokenizer to `tokenizer.*` metadata: byte-level BPE as `gpt2`, SentencePiece's
//! BPE as `llama`.
//!
//! llama.cpp's converter recognises a pre-tokenizer by its effect on a text. Kiln recognises it by its
//! patterns, which are compared with those of [`PRE_TOKENIZERS`].

use std::collections::HashMap;

use serde_json::Value as Json;

use super::config::{text, wrong};
use crate::{
    Error,
    gguf::{
        Array, Metadata, Value, shown,
        tokenizer::{
            ENDS,
            pre_tokenizer::{self, PRE_TOKENIZERS},
        },
    },
};

/// Score of tokens that are never merged (`LlamaHfVocab` of gguf).
const NO_SCORE: f32 = -1000.0;

/// The files of a folder that describe its tokens. A missing file is null.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// `tokenizer.json`
    pub tokenizer: Json,
    /// `tokenizer_config.json`
    pub config: Json,
    /// `generation_config.json`
    pub generation: Json,
    /// `config.json`
    pub model: Json,
    /// `chat_template.jinja`
    pub chat_template: Option<String>,
}

/// Kinds of tokens (`llama_token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// Converts a tokenizer to metadata for a model with `vocab` rows of embeddings. Ids without a token get an
/// unused one.
///
/// # Errors
/// [`Error::Unconvertible`] for a tokenizer that GGUF has no name for, or that does not fit the model.
pub fn tokenizer_metadata(files: &TokenizerFiles, vocab: usize) -> Result<Metadata, Error> {
    let tokens = Tokens::read(&files.tokenizer, vocab)?;
    let mut metadata = Metadata::new();
    let mut set = |key: &str, value: Value| metadata.insert(format!("tokenizer.{key}"), value);
    let model = &files.tokenizer["model"];
    if model["byte_fallback"] == true {
        let prefix = adds_prefix(&files.tokenizer)?;
        set("ggml.model", text("llama"));
        set("ggml.pre", text("default"));
        set("ggml.scores", Value::Array(Array::F32(tokens.scores(&merges(model)?))));
        set("ggml.add_space_prefix", Value::Bool(prefix));
    } else {
        let name = pre_tokenizer_name(&files.tokenizer)?;
        let merges = merges(model)?.into_iter().map(|(left, right)| format!("{left} {right}"));
        set("ggml.model", text("gpt2"));
        set("ggml.pre", text(name));
        set("ggml.merges", Value::Array(Array::String(merges.collect())));
    }
    let kinds = tokens.kinds.iter().map(|kind| *kind as i32).collect();
    set("ggml.token_type", Value::Array(Array::I32(kinds)));
    set("ggml.tokens", Value::Array(Array::String(tokens.texts.clone())));
    for (name, added) in Template::read(&files.tokenizer)?.tokens() {
        set(&format!("ggml.add_{name}_token"), Value::Bool(added.is_some()));
    }
    for (key, id) in tokens.special(files)? {
        set(&format!("ggml.{key}_token_id"), Value::U32(id));
    }
    if let Some(ids) = files.generation["suppress_tokens"].as_array() {
        let ids = ids.iter().filter_map(Json::as_i64).filter_map(|id| i32::try_from(id).ok());
        set("ggml.suppress_tokens", Value::Array(Array::I32(ids.collect())));
    }
    for (key, template) in chat_templates(files) {
        set(&key, text(&template));
    }
    Ok(metadata)
}

/// Tokens by id.
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<Kind>,
    /// Ids by the texts of `tokenizer.json`.
    ids: HashMap<String, u32>,
}

impl Tokens {
    fn read(tokenizer: &Json, vocab: usize) -> Result<Self, Error> {
        let model = &tokenizer["model"];
        if model["type"] != "BPE" {
            let kind = model["type"].as_str().unwrap_or_default();
            return Err(wrong(format!("the model of tokenizer.json is {}; known: BPE", shown(kind))));
        }
        for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
                return Err(wrong(format!("the model of tokenizer.json has a `{affix}`, and GGUF has none")));
            }
        }
        let mut tokens = Self {
            texts: (0..vocab).map(|id| format!("[PAD{id}]")).collect(),
            kinds: vec![Kind::Unused; vocab],
            ids: HashMap::new(),
        };
        let has_bytes = model["byte_fallback"] == true;
        let unknown = model["unk_token"].as_str();
        for (token, id) in model["vocab"].as_object().into_iter().flatten() {
            let kind = match token {
                token if has_bytes && Some(&**token) == unknown => Kind::Unknown,
                token if has_bytes && is_byte(token) => Kind::Byte,
                _ => Kind::Normal,
            };
            tokens.put(id, token, token.clone(), kind)?;
        }
        for added in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let token = added["content"].as_str().unwrap_or_default();
            let (written, kind) = match token {
                token if has_bytes && Some(token) == unknown => (token.to_owned(), Kind::Unknown),
                token if added["special"] == true || looks_special(token) => {
                    (token.to_owned(), Kind::Control)
                }
                // llama.cpp searches for it in the raw text.
                token => (token.replace('▁', " "), Kind::UserDefined),
            };
            tokens.put(&added["id"], token, written, kind)?;
        }
        Ok(tokens)
    }

    fn put(&mut self, id: &Json, token: &str, written: String, kind: Kind) -> Result<(), Error> {
        let vocab = self.texts.len();
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| wrong(format!("token {} has no id in tokenizer.json", shown(token))))?;
        let place = self.texts.get_mut(id as usize).zip(self.kinds.get_mut(id as usize));
        let (text, own) = place.ok_or_else(|| {
            wrong(format!("token {} has the id {id}, and the model has {vocab} embeddings", shown(token)))
        })?;
        *text = written;
        *own = kind;
        self.ids.insert(token.to_owned(), id);
        Ok(())
    }

    /// Returns scores for SentencePiece: the token of an earlier merge has a higher score.
    fn scores(&self, merges: &[(&str, &str)]) -> Vec<f32> {
        let mut scores = vec![NO_SCORE; self.texts.len()];
        for (kind, score) in self.kinds.iter().zip(&mut scores) {
            if *kind == Kind::Normal {
                *score = -(merges.len() as f32);
            }
        }
        // In reverse, so that the first merge that yields a token determines its score.
        for (rank, (left, right)) in merges.iter().enumerate().rev() {
            let merged = self.ids.get(&format!("{left}{right}")).map(|id| *id as usize);
            let normal = merged.filter(|id| self.kinds.get(*id) == Some(&Kind::Normal));
            if let Some(score) = normal.and_then(|id| scores.get_mut(id)) {
                *score = -(rank as f32);
            }
        }
        scores
    }

    /// Returns the keys and ids of tokens with a special role.
    fn special(&self, files: &TokenizerFiles) -> Result<Vec<(&'static str, u32)>, Error> {
        let id_of = |text: &str| self.ids.get(text).copied();
        let named = |name: &str| {
            let token = &files.config[name];
            token.as_str().or(token["content"].as_str()).and_then(id_of)
        };
        let in_range = |id: &Json| {
            id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < self.texts.len())
        };
        let stated = |name: &str| in_range(&files.generation[name]).or(in_range(&files.model[name]));
        let template = Template::read(&files.tokenizer)?;
        let mut found = Vec::new();
        let bos = template.bos.as_deref().and_then(id_of).or(named("bos_token"));
        found.extend(bos.or(stated("bos_token_id")).map(|id| ("bos", id)));
        let unknown = files.tokenizer["model"]["unk_token"].as_str().and_then(id_of);
        found.extend(unknown.or(named("unk_token")).map(|id| ("unknown", id)));
        found.extend(named("pad_token").or(stated("pad_token_id")).map(|id| ("padding", id)));

        // All tokens that end a text: one, or a list.
        let all = |json: &Json| match json {
            Json::Array(ids) => ids.iter().filter_map(in_range).collect(),
            one => in_range(one).into_iter().collect::<Vec<u32>>(),
        };
        let key = "eos_token_id";
        let stated = if files.generation[key].is_null() { &files.model[key] } else { &files.generation[key] };
        let stated = all(stated);
        let named = template.eos.as_deref().and_then(id_of).or(named("eos_token"));
        let first = named.filter(|id| stated.is_empty() || stated.contains(id) || template.eos.is_some());
        let first = first.or(stated.first().copied());
        found.extend(first.map(|id| ("eos", id)));
        // llama.cpp and Kiln know the common ones by their texts.
        let is_known = |id: &u32| self.texts.get(*id as usize).is_some_and(|text| ENDS.contains(&&**text));
        let rest: Vec<u32> = stated.into_iter().filter(|id| Some(*id) != first && !is_known(id)).collect();
        if rest.len() > 2 {
            return Err(wrong(format!("{} tokens end a text, and a GGUF file names three", rest.len() + 1)));
        }
        found.extend(["eot", "eom"].into_iter().zip(rest));
        Ok(found)
    }
}

/// Returns pairs of tokens, in the order of merging.
fn merges(model: &Json) -> Result<Vec<(&str, &str)>, Error> {
    let all = model["merges"].as_array().into_iter().flatten();
    all.map(|merge| {
        pair(merge).ok_or_else(|| {
            let merge = shown(&merge.to_string());
            wrong(format!("{merge} in tokenizer.json is no pair of tokens without spaces"))
        })
    })
    .collect()
}

/// Parses a merge: one text in files from old versions of tokenizers, and two texts in others.
fn pair(merge: &Json) -> Option<(&str, &str)> {
    let pair = match merge {
        Json::String(pair) => pair.split_once(' '),
        pair => pair[0].as_str().zip(pair[1].as_str()),
    };
    pair.filter(|(left, right)| !left.contains(' ') && !right.contains(' '))
}

/// Whether SentencePiece's tokenizer adds a space to the beginning of a text.
///
/// # Errors
/// Steps before the model that `llama` in llama.cpp does not have.
fn adds_prefix(tokenizer: &Json) -> Result<bool, Error> {
    let mut prefix = false;
    for step in steps(&tokenizer["normalizer"], "normalizers")
        .chain(steps(&tokenizer["pre_tokenizer"], "pretokenizers"))
    {
        match step["type"].as_str().unwrap_or_default() {
            "Prepend" if step["prepend"] == "▁" => prefix = true,
            "Replace" if step["pattern"]["String"] == " " && step["content"] == "▁" => {}
            // Splits at spaces, none of which are left.
            "Split" if step["pattern"]["String"] == " " => {}
            "Metaspace" if step["replacement"] == "▁" => {
                let scheme = step["prepend_scheme"].as_str();
                let old = || if step["add_prefix_space"] == false { "never" } else { "always" };
                match scheme.unwrap_or_else(old) {
                    "never" => {}
                    scheme => {
                        return Err(wrong(format!(
                            "the step Metaspace of tokenizer.json writes a space before a text that begins with none \
                             (prepend_scheme is {}), and llama.cpp's SentencePiece before every text or none",
                            shown(scheme)
                        )));
                    }
                }
            }
            other => {
                return Err(wrong(format!(
                    "the step {} of tokenizer.json is unknown to llama.cpp's SentencePiece",
                    shown(other)
                )));
            }
        }
    }
    Ok(prefix)
}

/// Returns the name of a byte-level pre-tokenizer in `tokenizer.ggml.pre`.
///
/// # Errors
/// Steps that no known pre-tokenizer has.
fn pre_tokenizer_name(tokenizer: &Json) -> Result<&'static str, Error> {
    let unknown = |what: String| wrong(format!("its tokenizer {what}, and GGUF has no name for it"));
    let mut patterns = Vec::new();
    let mut writes_bytes = false;
    for step in steps(&tokenizer["pre_tokenizer"], "pretokenizers") {
        match step["type"].as_str().unwrap_or_default() {
            "Split" => {
                let pattern = step["pattern"]["Regex"].as_str().or(step["pattern"]["String"].as_str());
                // `Removed` with `invert` keeps the matches and drops the rest, and these patterns leave no
                // rest.
                let cuts =
                    step["behavior"] == "Isolated" || step["behavior"] == "Removed" && step["invert"] == true;
                let pattern = pattern.filter(|_| cuts);
                patterns
                    .push(pattern.ok_or_else(|| unknown(format!("cuts with {}", shown(&step.to_string()))))?);
            }
            "Digits" if step["individual_digits"] == true => patterns.push(pre_tokenizer::DIGIT),
            "ByteLevel" if step["add_prefix_space"] != true => {
                writes_bytes = true;
                if step["use_regex"] != false {
                    patterns.push(pre_tokenizer::GPT2);
                }
            }
            _ => return Err(unknown(format!("has the step {}", shown(&step.to_string())))),
        }
    }
    let normalizers: Vec<_> =
        steps(&tokenizer["normalizer"], "normalizers").map(|step| step["type"].as_str()).collect();
    let composes = match &*normalizers {
        [] => false,
        [Some("NFC")] => true,
        _ => return Err(unknown("normalizes letters".to_owned())),
    };
    let ignores_merges = tokenizer["model"]["ignore_merges"] == true;
    let found = PRE_TOKENIZERS.iter().find(|one| {
        one.patterns == patterns && one.composes == composes && one.ignores_merges == ignores_merges
    });
    let name = found.filter(|_| writes_bytes).and_then(|one| one.names.first().copied());
    name.ok_or_else(|| unknown(format!("cuts texts with {}", shown(&patterns.join(" ")))))
}

/// Returns a single step, or the steps of a sequence.
fn steps<'a>(json: &'a Json, list: &str) -> impl Iterator<Item = &'a Json> {
    let all = match json {
        sequence if sequence["type"] == "Sequence" => {
            sequence[list].as_array().map(Vec::as_slice).unwrap_or_default()
        }
        Json::Null => &[],
        one => std::slice::from_ref(one),
    };
    all.iter()
}

/// The texts of the tokens that are added to the beginning and the end of a text.
#[derive(Default)]
struct Template {
    bos: Option<String>,
    eos: Option<String>,
}

impl Template {
    /// # Errors
    /// A template that adds something else.
    fn read(tokenizer: &Json) -> Result<Self, Error> {
        let mut template = Self::default();
        for step in steps(&tokenizer["post_processor"], "processors") {
            match step["type"].as_str().unwrap_or_default() {
                // Only changes the offsets of tokens.
                "ByteLevel" => {}
                "TemplateProcessing" => {
                    let mut behind = false;
                    for piece in step["single"].as_array().into_iter().flatten() {
                        let id = piece["SpecialToken"]["id"].as_str().map(str::to_owned);
                        let place = if behind { &mut template.eos } else { &mut template.bos };
                        match id {
                            None => behind = true,
                            Some(_) if place.is_some() => {
                                return Err(wrong(
                                    "its tokenizer adds two tokens at one end of a text, and llama.cpp one",
                                ));
                            }
                            id => *place = id,
                        }
                    }
                }
                other => {
                    return Err(wrong(format!(
                        "the step {} behind its tokenizer is unknown to llama.cpp",
                        shown(other)
                    )));
                }
            }
        }
        Ok(template)
    }

    fn tokens(&self) -> [(&'static str, Option<&str>); 2] {
        [("bos", self.bos.as_deref()), ("eos", self.eos.as_deref())]
    }
}

/// Returns keys below `tokenizer.` with their templates: one, or several by name.
fn chat_templates(files: &TokenizerFiles) -> Vec<(String, String)> {
    const KEY: &str = "chat_template";
    let template = |json: &Json| {
        let key = match json["name"].as_str()? {
            "default" => KEY.to_owned(),
            name => format!("{KEY}.{name}"),
        };
        Some((key, json["template"].as_str()?.to_owned()))
    };
    match &files.config[KEY] {
        Json::String(text) => vec![(KEY.to_owned(), text.clone())],
        Json::Array(named) => named.iter().filter_map(template).collect(),
        _ => files.chat_template.iter().map(|text| (KEY.to_owned(), text.clone())).collect(),
    }
}

/// Whether a token stands for a byte, such as `<0x0A>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Whether a token is not text, even if its file does not mark it as special (`does_token_look_special` of
/// the converter).
fn looks_special(token: &str) -> bool {
    let between = |start: &str, end: &str| token.starts_with(start) && token.ends_with(end);
    matches!(token, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}
