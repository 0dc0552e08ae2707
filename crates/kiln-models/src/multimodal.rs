//! The text model of a multimodal folder: the part `text_config` of its config, and the tensors of that part.
//!
//! Towers for images and sounds are passed over. For text, all parts of a multimodal rotary position are
//! equal, so it is a plain one.
//!
//! Source: `PreTrainedConfig.get_text_config` and `conversion_mapping.py` of Transformers.

use serde_json::{Map, Value};

/// A multimodal model whose text is computed by a text model alone.
struct Multimodal {
    model_type: &'static str,
    /// `model_type` of its text model where the config does not say it.
    text: &'static str,
    /// Whether the head uses the weights of the embeddings where the config does not say it.
    tied: bool,
    /// [`SIZES`] of its text model where the config does not say them.
    sizes: [u64; 5],
}

const fn of(model_type: &'static str, text: &'static str, tied: bool, sizes: [u64; 5]) -> Multimodal {
    Multimodal { model_type, text, tied, sizes }
}

static MULTIMODAL: [Multimodal; 10] = [
    of("gemma3", "gemma3_text", true, [262_208, 2304, 9216, 26, 8]),
    of("gemma4", "gemma4_text", true, [262_144, 2304, 9216, 30, 8]),
    of("gemma4_unified", "gemma4_unified_text", true, [262_144, 2304, 9216, 30, 8]),
    of("llama4", "llama4_text", false, [202_048, 5120, 8192, 48, 40]),
    of("llava", "llama", false, [32_000, 4096, 11_008, 32, 32]),
    of("mistral3", "mistral", true, [32_000, 4096, 14_336, 32, 32]),
    of("qwen2_5_vl", "qwen2_5_vl_text", false, [152_064, 8192, 29_568, 80, 64]),
    of("qwen3_5", "qwen3_5_text", false, [248_320, 4096, 12_288, 32, 16]),
    of("qwen3_5_moe", "qwen3_5_moe_text", false, [248_320, 2048, 512, 40, 16]),
    of("qwen3_vl", "qwen3_vl_text", false, [151_936, 4096, 22_016, 32, 32]),
];

/// Fields that the configs of text models always have, and that their parts of multimodal configs leave out
/// if they equal the defaults.
const SIZES: [&str; 5] =
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];

/// Fields of the whole folder that its text model needs, too.
const OF_ALL: [&str; 5] =
    ["bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "compression_config"];

/// Models whose `tie_word_embeddings` may be in either part.
const READS_BOTH: [&str; 2] = ["llava", "qwen2_5_vl"];

/// Beginnings of the names of the text model's tensors in the folders of all versions, and their
/// counterparts in a folder of the text model alone.
const PREFIXES: [(&str, &str); 6] = [
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.lm_head.", "lm_head."),
];

/// Returns the config of the text model in the config of a multimodal model; `None` for other configs.
pub(crate) fn text_config(json: &Value) -> Option<Value> {
    let named = json.get("model_type").and_then(Value::as_str)?;
    let model = MULTIMODAL.iter().find(|model| model.model_type == named)?;
    let mut text = match json.get("text_config") {
        Some(Value::Object(text)) => text.clone(),
        // Older folders of Qwen have the fields of the text model among those of the whole.
        _ if named == "qwen2_5_vl" => {
            let mut whole = json.as_object()?.clone();
            whole.remove("model_type");
            whole
        }
        _ => Map::new(),
    };
    let text_type = text.entry("model_type").or_insert_with(|| model.text.into());
    if text_type == model.text {
        for (name, size) in SIZES.into_iter().zip(model.sizes) {
            text.entry(name).or_insert_with(|| size.into());
        }
    }
    for name in OF_ALL {
        if let Some(value) = json.get(name).filter(|value| !value.is_null()) {
            text.entry(name).or_insert_with(|| value.clone());
        }
    }
    // Old versions wrote it into either part.
    let stated = |part: Option<&Value>| part.and_then(Value::as_bool);
    let whole = stated(json.get("tie_word_embeddings")).unwrap_or(model.tied);
    let is_tied =
        whole || READS_BOTH.contains(&named) && stated(text.get("tie_word_embeddings")) == Some(true);
    text.insert("tie_word_embeddings".to_owned(), is_tied.into());
    Some(Value::Object(text))
}

/// Returns the name in a folder of the text model alone for a tensor of a multimodal folder.
pub(crate) fn text_name(name: &str) -> String {
    let renamed = PREFIXES.iter().find_map(|(from, to)| Some(format!("{to}{}", name.strip_prefix(from)?)));
    renamed.unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_text_model_is_a_part_of_the_config() {
        let config = json!({
            "model_type": "mistral3",
            "quantization_config": { "quant_method": "fp8" },
            "text_config": { "hidden_size": 64, "tie_word_embeddings": true },
            "tie_word_embeddings": false,
            "vision_config": { "hidden_size": 8 },
        });
        let want = json!({
            "model_type": "mistral",
            "quantization_config": { "quant_method": "fp8" },
            "hidden_size": 64,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "tie_word_embeddings": false,
        });
        assert_eq!(text_config(&config).unwrap(), want);
    }

    #[test]
    fn a_text_model_is_found_among_the_fields_of_old_folders() {
        let config = json!({ "model_type": "qwen2_5_vl", "hidden_size": 64, "vision_config": {} });
        let text = text_config(&config).unwrap();
        assert_eq!((&text["model_type"], &text["hidden_size"]), (&json!("qwen2_5_vl_text"), &json!(64)));
        assert_eq!(text["tie_word_embeddings"], json!(false));
    }

    #[test]
    fn sizes_are_those_of_the_config_or_the_defaults() {
        let config = json!({
            "model_type": "gemma3",
            "hidden_size": 1,
            "text_config": { "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34 },
        });
        let text = text_config(&config).unwrap();
        assert_eq!(SIZES.map(|name| text[name].as_u64().unwrap()), [262_208, 2560, 9216, 34, 8]);
        let text = text_config(&json!({ "model_type": "llava", "hidden_size": 1 })).unwrap();
        assert_eq!(SIZES.map(|name| text[name].as_u64().unwrap()), [32_000, 4096, 11_008, 32, 32]);
        // The sizes of another text model have other defaults.
        let other = json!({ "model_type": "mistral3", "text_config": { "model_type": "ministral3" } });
        assert_eq!(text_config(&other).unwrap().get("vocab_size"), None);
    }

    #[test]
    fn either_part_of_a_llava_may_tie_the_head() {
        let tied = |model_type: &str| {
            let text = json!({ "model_type": "llama", "tie_word_embeddings": true });
            let config = json!({ "model_type": model_type, "text_config": text });
            text_config(&config).unwrap()["tie_word_embeddings"].clone()
        };
        assert_eq!([tied("llava"), tied("qwen3_vl")], [true, false]);
    }

    #[test]
    fn configs_of_text_models_and_of_unknown_ones_stay_as_they_are() {
        assert_eq!(text_config(&json!({ "model_type": "llama", "text_config": {} })), None);
        assert_eq!(text_config(&json!({ "model_type": "paligemma", "text_config": {} })), None);
    }

    #[test]
    fn tensors_of_the_text_model_have_one_name_in_all_folders() {
        let layer = "layers.0.mlp.up_proj.weight";
        for prefix in
            ["model.language_model.", "language_model.model.", "model.language_model.model.", "model."]
        {
            assert_eq!(text_name(&format!("{prefix}{layer}")), format!("model.{layer}"));
        }
        for head in ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"] {
            assert_eq!(text_name(head), "lm_head.weight");
        }
        assert_eq!(text_name("vision_tower.blocks.0.weight"), "vision_tower.blocks.0.weight");
    }
}
