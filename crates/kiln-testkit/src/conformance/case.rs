//! A recorded case, and whether Kiln supports what it needs.

use kiln::{
    TokenId,
    expert::{ConfigFile, cache_text, models::ARCHITECTURES, processors},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Folder, embeddings, processors::BESIDE, transcribe};

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Case {
    pub(super) model: String,
    pub(super) case: String,
    #[serde(default)]
    pub(super) input_ids: Vec<Vec<TokenId>>,
    #[serde(default)]
    pub(super) attention_mask: Vec<Vec<u8>>,
    #[serde(default)]
    pub(super) max_new_tokens: usize,
    #[serde(default)]
    pub(super) kwargs: Map<String, Value>,
    #[serde(default)]
    pub(super) sequences: Vec<Vec<TokenId>>,
    #[serde(default)]
    pub(super) sequences_scores: Vec<f32>,
    #[serde(default)]
    pub(super) beam_indices: Vec<Vec<i64>>,
    #[serde(default)]
    pub(super) chunks: Vec<Vec<Vec<TokenId>>>,
    pub(super) logits: Option<String>,
    pub(super) scores: Option<String>,
    pub(super) out: Option<String>,
    /// For embeddings: the hidden states of all rows, one after the other, and the vector of each row.
    pub(super) hidden: Option<String>,
    pub(super) embeddings: Option<String>,
    /// Duration in seconds to which audio features are padded.
    pub(super) chunk_length: Option<usize>,
    pub(super) attention_scaling: Option<f64>,
    #[serde(flatten)]
    pub(super) quantized: Option<Quantized>,
    /// For an encoder-decoder: the tokens that were fed at once; `tokens` has all tokens, including those fed
    /// one by one.
    #[serde(default)]
    pub(super) prompt: Vec<TokenId>,
    #[serde(default)]
    pub(super) tokens: Vec<TokenId>,
    pub(super) self_len: Option<usize>,
    pub(super) cross_len: Option<usize>,
    /// For speech: the recording at 16 kHz; then the start and end of each segment, and the time of each
    /// token, in seconds.
    pub(super) wave: Option<String>,
    #[serde(default)]
    pub(super) segments: Vec<(f64, f64)>,
    #[serde(default)]
    pub(super) token_times: Vec<f64>,
    /// The error of the reference itself, if it failed.
    error: Option<String>,
}

/// A tensor that was quantized with one of transformers' formats.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Quantized {
    pub(super) backend: String,
    pub(super) nbits: usize,
    pub(super) axis: i64,
    pub(super) group: usize,
    pub(super) scale: String,
    /// Shift that quanto adds before scaling.
    pub(super) shift: Option<String>,
    /// Zero point that HQQ adds after scaling.
    pub(super) zero: Option<String>,
    pub(super) packed: String,
    pub(super) dequantized: String,
}

impl Case {
    /// Returns the first feature that this case needs and Kiln does not support yet.
    pub(super) fn not_yet(&self, folder: &Folder) -> Option<String> {
        if self.error.is_some() {
            return Some("the reference itself fails here".to_owned());
        }
        match &*self.model {
            "quant" | "mel" => return None,
            "proc" => {
                let is_known =
                    |name: &&str| BESIDE.contains(name) || processors::names().any(|known| known == *name);
                let name = self.kwargs.keys().map(String::as_str).find(|name| !is_known(name))?;
                return Some(format!("the processor `{name}` is not implemented yet"));
            }
            _ => {}
        }
        // An unreadable folder is not skipped: loading it reports the error.
        let model_type =
            ConfigFile::from_source(&*folder.model(&self.model)).and_then(|config| config.model_type());
        if let Ok(model_type) = model_type
            && !ARCHITECTURES.iter().any(|known| known.model_type() == model_type)
        {
            return Some(format!("the architecture `{model_type}` is not implemented yet"));
        }
        if self.embeddings.is_some() {
            return self.kwargs.keys().find_map(|name| embeddings::not_yet(name));
        }
        if self.wave.is_some() {
            return self.kwargs.keys().find_map(|name| transcribe::not_yet(name));
        }
        self.kwargs.iter().find_map(|(name, value)| argument_not_yet(name, value))
    }

    /// Returns the cache that the case asks for, in the syntax of the command line.
    pub(super) fn cache(&self, folder: &Folder) -> String {
        let number = |key: &str| self.kwargs.get(key).and_then(Value::as_u64);
        let cache = ["past_key_values", "cache_implementation"]
            .iter()
            .find_map(|key| self.kwargs.get(*key).and_then(Value::as_str));
        match (self.kwargs.get("use_cache"), cache) {
            (Some(Value::Bool(false)), _) => "none".to_owned(),
            (_, Some("SinkCache")) => {
                let (window, sinks) = (number("window_length"), number("num_sink_tokens"));
                format!("sink:window={},sinks={},compat=4.47", window.unwrap_or(0), sinks.unwrap_or(0))
            }
            (_, Some("quantized")) => {
                let text = cache_text("quantized", self.kwargs.get("cache_config"));
                // This format has one rule.
                if text.contains("fp8") {
                    return text;
                }
                let version = if folder.is_4_47() { ",compat=4.47,optimize=off" } else { "" };
                format!("{text},flush=requantize{version}")
            }
            (_, cache) => match number("max_cache_len") {
                Some(len) => format!("static:len={len}"),
                None => known(cache.unwrap_or("dynamic")).unwrap_or("dynamic").to_owned(),
            },
        }
    }

    /// Returns the name of the adapter, a folder in `adapters`.
    pub(super) fn adapter(&self) -> Option<&str> {
        self.kwargs.get("adapter").and_then(Value::as_str)
    }

    /// Returns the name of the draft model.
    pub(super) fn draft(&self) -> Option<&str> {
        self.kwargs.get("assistant_model").and_then(Value::as_str)
    }

    /// Returns the reason why this recording is known to be wrong; called for cases that can run.
    pub(super) fn known_to_differ(&self, folder: &Folder) -> Option<String> {
        if !folder.is_4_47() {
            return None;
        }
        let config = ConfigFile::from_source(&*folder.model(&self.model)).ok()?;
        if matches!(&*config.model_type().ok()?, "mamba" | "falcon_mamba") {
            let width = config.get("conv_kernel")?.as_u64()? as usize;
            // The first token after the prompt is written at the index of its position, which should be the
            // last index of the width. The two are equal if the prompt is one token shorter than the width.
            let is_short = self.input_ids.first()?.len() + 1 < width && self.cache(folder) != "none";
            let reason =
                "4.47 loses inputs of the convolution after a prompt that is two or more shorter than it";
            return (is_short && self.max_new_tokens > 1).then(|| reason.to_owned());
        }
        let slides = self.cache(folder) == "sliding" || config.model_type().ok()? == "gemma2";
        let window = config.get("sliding_window")?.as_u64()? as usize;
        let prompt = self.input_ids.first()?.len();
        let fed = prompt + self.max_new_tokens - 1;
        // A buffer is no longer than the sequence.
        let slots = window.min(prompt + self.max_new_tokens);
        let fills_up = prompt < slots && fed >= slots;
        let padded = self.left_pad()?.iter().any(|&pad| pad > 0) && fed >= slots;
        (slides && (fills_up || padded)).then(|| match padded {
            true => "4.47's sliding mask of gemma2 ignores where the padding ends".to_owned(),
            false => "4.47's sliding cache drops the oldest token a step too early".to_owned(),
        })
    }

    /// Returns the tokens that end a row.
    pub(super) fn eos(&self) -> Vec<TokenId> {
        let id = |value: &Value| value.as_u64().map(|id| id as TokenId);
        match self.kwargs.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the padding at the start of each row; `None` if the mask is not of that form.
    pub(super) fn left_pad(&self) -> Option<Vec<usize>> {
        let pad = |mask: &Vec<u8>| {
            let pad = mask.iter().take_while(|&&seen| seen == 0).count();
            mask.iter().skip(pad).all(|&seen| seen == 1).then_some(pad)
        };
        self.attention_mask.iter().map(pad).collect()
    }
}

/// Returns Kiln's name for a cache of transformers.
fn known(cache: &str) -> Option<&'static str> {
    Some(match cache {
        "DynamicCache" | "dynamic" => "dynamic",
        "StaticCache" | "static" => "static",
        "SlidingWindowCache" | "sliding_window" => "sliding",
        "HybridCache" | "hybrid" => "hybrid",
        "SinkCache" => "sink",
        "OffloadedCache" | "offloaded" => "offloaded",
        "OffloadedStaticCache" | "offloaded_static" => "offloaded_static",
        "quantized" => "quantized",
        _ => return None,
    })
}

/// Returns the feature that an argument of `generate()` asks for, if Kiln does not support it yet.
fn argument_not_yet(name: &str, value: &Value) -> Option<String> {
    match (name, value.as_str()) {
        (
            "adapter" | "use_cache" | "eos_token_id" | "prefix" | "max_cache_len" | "window_length"
            | "num_sink_tokens",
            _,
        ) => None,
        (
            "num_beams"
            | "num_beam_groups"
            | "num_return_sequences"
            | "diversity_penalty"
            | "length_penalty"
            | "early_stopping"
            | "force_words_ids"
            | "guidance_scale"
            | "dola_layers"
            | "penalty_alpha",
            _,
        ) => None,
        (
            "prompt_lookup_num_tokens"
            | "max_matching_ngram_size"
            | "num_assistant_tokens"
            | "assistant_model",
            _,
        ) => None,
        (name, _) if processors::names().any(|known| known == name) => None,
        ("cache_config", None) if value.is_object() => None,
        ("past_key_values" | "cache_implementation", Some(cache)) if known(cache).is_some() => None,
        ("past_key_values" | "cache_implementation", Some(cache)) => {
            Some(format!("the cache `{cache}` is not implemented yet"))
        }
        _ => Some(format!("the argument `{name}` is not implemented yet")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::{path::Path, sync::Arc};

    use kiln::expert::files::FolderSource;
    use serde_json::json;

    use super::*;

    #[test]
    fn short_mamba_prompts_are_known_to_differ_with_the_old_cache() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/transformers-4.47.1");
        let folder = Folder::open(Arc::new(FolderSource::new(&path))).unwrap();
        let differs = |prompt: usize, new: usize, use_cache: bool| {
            let case: Case = serde_json::from_value(json!({
                "model": "mamba", "case": "short", "input_ids": [vec![5; prompt]], "attention_mask": [vec![1; prompt]],
                "max_new_tokens": new, "kwargs": if use_cache { json!({}) } else { json!({ "use_cache": false }) },
            }))
            .unwrap();
            case.known_to_differ(&folder).is_some()
        };
        // The convolution of this model has width 4.
        assert_eq!([1, 2, 3, 4, 5].map(|prompt| differs(prompt, 4, true)), [true, true, false, false, false]);
        assert!(!differs(2, 1, true), "the cache is not read");
        assert!(!differs(2, 4, false));
    }
}
