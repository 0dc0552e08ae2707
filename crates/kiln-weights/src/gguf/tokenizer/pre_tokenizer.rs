//! The pre-tokenizers of byte-level BPE, which cut a text into words, by their names in `tokenizer.ggml.pre`.
//!
//! Patterns come from the models' own `tokenizer.json`, or from `llama-vocab.cpp` of llama.cpp if that is not
//! known. Each pattern cuts the pieces that earlier patterns left whole; its matches are words, and so are
//! the pieces between them.

use serde_json::{Value, json};

use super::wrong;
use crate::{
    Error,
    gguf::{Metadata, shown},
};

/// GPT-2 (Radford et al., 2019).
pub(in crate::gguf) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// GPT-4 (`cl100k_base` of tiktoken).
const GPT4: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// GPT-4, with single digits.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Qwen2, with combining marks as letters.
const QWEN3_5: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// GPT-4o (`o200k_base` of tiktoken).
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Mistral NeMo.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// DeepSeek-V3.
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Seed-Coder.
const SEED: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// BLOOM.
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// DeepSeek LLM: letters that have a case, or had one when the list was made.
const CASED: &str = "\\s?[\
    A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ\
    ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ\
    Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
pub(in crate::gguf) const DIGIT: &str = r"\p{N}";
const LINE: &str = r"[\r\n]";
const CJK: &str = r"[一-龥ࠀ-一가-퟿]+";

/// The way that texts are cut into words, and the other settings that a name implies.
#[derive(Debug)]
pub(in crate::gguf) struct PreTokenizer {
    pub(in crate::gguf) names: &'static [&'static str],
    pub(in crate::gguf) patterns: &'static [&'static str],
    /// Whether letters and their accents are composed into single characters (NFC) first.
    pub(in crate::gguf) composes: bool,
    /// Whether a word that is a token is used directly, without merging its bytes.
    pub(in crate::gguf) ignores_merges: bool,
    /// Whether texts begin with the token `bos` by default.
    pub(super) adds_bos: bool,
}

impl PreTokenizer {
    const fn new(names: &'static [&'static str], patterns: &'static [&'static str]) -> Self {
        Self { names, patterns, composes: false, ignores_merges: false, adds_bos: false }
    }

    const fn composes(self) -> Self {
        Self { composes: true, ..self }
    }

    const fn ignores_merges(self) -> Self {
        Self { ignores_merges: true, ..self }
    }

    const fn adds_bos(self) -> Self {
        Self { adds_bos: true, ..self }
    }

    /// Returns the pre-tokenizer that `tokenizer.ggml.pre` names. Files older than this key have one only if
    /// all models of their architecture share it.
    ///
    /// # Errors
    /// An unknown or missing name.
    pub(super) fn of(metadata: &Metadata) -> Result<&'static Self, Error> {
        let name = match metadata.text("tokenizer.ggml.pre")? {
            Some(name) => name,
            None => match metadata.text("general.architecture")? {
                Some("qwen2" | "qwen2moe" | "qwen3" | "qwen3moe") => "qwen2",
                Some("gpt2") => "gpt-2",
                Some("gptneox" | "mamba") => "olmo",
                _ => {
                    return Err(wrong(
                        "pre",
                        "is missing, so the tokenizer is not known; convert the model again",
                    ));
                }
            },
        };
        let known =
            || PRE_TOKENIZERS.iter().flat_map(|one| one.names).copied().collect::<Vec<_>>().join(", ");
        let found = PRE_TOKENIZERS.iter().find(|one| one.names.contains(&name));
        found.ok_or_else(|| wrong("pre", format!("is {}, which is unknown; known: {}", shown(name), known())))
    }

    /// Returns the field `pre_tokenizer` of `tokenizer.json`.
    pub(in crate::gguf) fn json(&self) -> Value {
        let split = |pattern: &&str| {
            let pattern = json!({ "Regex": pattern });
            json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false })
        };
        let parts: Vec<Value> = self.patterns.iter().map(split).chain([bytes()]).collect();
        json!({ "type": "Sequence", "pretokenizers": parts })
    }
}

/// Returns the step that writes each byte of a word as a letter. As a decoder, it turns letters into bytes.
pub(super) fn bytes() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })
}

/// All known pre-tokenizers.
pub(in crate::gguf) static PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer::new(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
    PreTokenizer::new(
        &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "modern-bert",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    // GPT-NeoX's tokenizer, which Mamba also uses.
    PreTokenizer::new(&["olmo", "mpt"], &[GPT2]).composes(),
    PreTokenizer::new(
        &["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[DIGIT, GPT2],
    ),
    PreTokenizer::new(&["command-r"], &[DIGIT, GPT2]).composes(),
    PreTokenizer::new(
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        &[GPT4],
    )
    .ignores_merges()
    .adds_bos(),
    PreTokenizer::new(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[GPT4]),
    PreTokenizer::new(&["glm4"], &[GPT4]).ignores_merges(),
    PreTokenizer::new(&["qwen2"], &[QWEN2]).composes(),
    PreTokenizer::new(&["deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2", "kormo"], &[QWEN2]),
    PreTokenizer::new(&["qwen35"], &[QWEN3_5]).composes(),
    PreTokenizer::new(&["gpt-4o", "llama4", "kanana2"], &[GPT4O]),
    PreTokenizer::new(&["tekken"], &[TEKKEN]).ignores_merges().adds_bos(),
    PreTokenizer::new(&["seed-coder"], &[SEED]),
    PreTokenizer::new(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
    PreTokenizer::new(
        &["deepseek-llm"],
        &[LINE, CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, DIGIT],
    ),
    PreTokenizer::new(&["deepseek-coder"], &[LINE, r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT]),
    PreTokenizer::new(&["deepseek-v3"], &[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
    PreTokenizer::new(&["poro-chat", "bloom", "gpt3-finnish"], &[BLOOM]),
    PreTokenizer::new(&["viking"], &[BLOOM, DIGIT]),
];
