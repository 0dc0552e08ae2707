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
}

const fn of(model_type: &'static str, text: &'static str, tied: bool) -> Multimodal {
    Multimodal { model_type, text, tied }
}

static MULTIMODAL: [Multimodal; 5] = [
    of("gemma3", "gemma3_text", true),
    of("llava", "llama", false),
    of("mistral3", "mistral", true),
    of("qwen2_5_vl", "qwen2_5_vl_text", false),
    of("qwen3_vl", "qwen3_vl_text", false),
];

/// Fields of the whole folder that its text model needs, too.
const OF_ALL: [&str; 5] =
    ["bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "compression_config"];

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
        _ => flat(json, model)?,
    };
    text.entry("model_type").or_insert_with(|| model.text.into());
    for name in OF_ALL {
        if let Some(value) = json.get(name).filter(|value| !value.is_null()) {
            text.entry(name).or_insert_with(|| value.clone());
        }
    }
    // Old versions wrote it into either part.
    let stated = |part: Option<&Value>| part.and_then(Value::as_bool);
    let whole = stated(json.get("tie_word_embeddings")).unwrap_or(model.tied);
    let is_tied =
        whole || model.model_type == "qwen2_5_vl" && stated(text.get("tie_word_embeddings")) == Some(true);
    text.insert("tie_word_embeddings".to_owned(), is_tied.into());
    Some(Value::Object(text))
}

/// The fields of a config without parts.
fn flat(json: &Value, model: &Multimodal) -> Option<Map<String, Value>> {
    let mut fields = json.as_object()?.clone();
    fields.insert("model_type".to_owned(), model.text.into());
    Some(fields)
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
