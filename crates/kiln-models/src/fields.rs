//! Fields of a config: those that are read, those without effect here, and those that must have a certain
//! value.
//!
//! Each field of the config classes of Transformers is in one of these lists. A test compares them with
//! `tests/data/config_fields.json`.

use kiln_core::Result;
use serde_json::Value;

use crate::ConfigFile;

/// The fields of one model type.
#[derive(Debug)]
struct Fields {
    model_type: &'static str,
    /// Fields that are read, in addition to those in `sets`.
    read: &'static [&'static str],
    sets: &'static [&'static [&'static str]],
    /// Fields without effect, in addition to those in [`IDLE`], even if they are in `sets`.
    idle: &'static [&'static str],
    /// Whether `layer_types` is accepted: the model has blocks with several kinds of attention, or no
    /// attention.
    has_layer_types: bool,
    is_encoder_decoder: bool,
}

/// Fields without effect in all models: facts about the folder, settings of training, and what Transformers
/// returns. Token ids and `use_cache` are generation settings, which are read elsewhere.
const IDLE: &[&str] = &[
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
];

/// Fields of models that consist of attention and feed-forwards.
const DECODER: &[&str] = &[
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "use_bidirectional_attention",
    "vocab_size",
];

const ROPE: &[&str] = &["rope_parameters"];

const LLAMA: &[&str] = &["attention_bias", "hidden_act", "mlp_bias"];

const NO_ROPE: &[&str] = &["layer_types", "no_rope_layer_interval", "no_rope_layers"];

const ROUTER: &[&str] = &["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"];

const QWEN: &[&str] = &["hidden_act", "sliding_window", "use_sliding_window"];

const LATENT: &[&str] = &[
    "attention_bias",
    "hidden_act",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
];

const SHORT_CONV: &[&str] = &["conv_L_cache", "conv_bias", "layer_types", "norm_eps"];

const DELTA_NET: &[&str] = &[
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
];

const QWEN_EXPERTS: &[&str] = &[
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
];

/// Experts of GLM and DeepSeek.
const SIGMOID_EXPERTS: &[&str] = &[
    "first_k_dense_replace",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_local_experts",
    "routed_scaling_factor",
    "topk_group",
];

const GEMMA_2: &[&str] = &[
    "attention_bias",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
];

const MAMBA: &[&str] = &[
    "conv_kernel",
    "expand",
    "hidden_act",
    "hidden_size",
    "layer_norm_epsilon",
    "num_hidden_layers",
    "residual_in_fp32",
    "state_size",
    "tie_word_embeddings",
    "time_step_rank",
    "use_bias",
    "use_conv_bias",
    "vocab_size",
];

/// Fields of Mamba-2 mixers in models that have other blocks, too.
const MAMBA_2: &[&str] = &[
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "time_step_limit",
];

/// Fields that say how weights are initialized and which kernels compute.
const MAMBA_IDLE: &[&str] = &[
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_associative_scan",
    "use_mambapy",
];

/// Creates the fields of a model whose blocks all have the same kind of attention.
const fn of(
    model_type: &'static str,
    sets: &'static [&'static [&'static str]],
    read: &'static [&'static str],
    idle: &'static [&'static str],
) -> Fields {
    Fields { model_type, read, sets, idle, has_layer_types: false, is_encoder_decoder: false }
}

impl Fields {
    const fn layer_types(self) -> Self {
        Self { has_layer_types: true, ..self }
    }

    const fn encoder_decoder(self) -> Self {
        Self { is_encoder_decoder: true, ..self }
    }

    fn reads(&self, field: &str) -> bool {
        let is_in_a_set = self.sets.iter().any(|set| set.contains(&field));
        self.read.contains(&field) || is_in_a_set && !self.idle.contains(&field)
    }

    fn ignores(&self, field: &str) -> bool {
        self.idle.contains(&field) || IDLE.contains(&field)
    }
}

static FIELDS: &[Fields] = &[
    of("llama", &[DECODER, ROPE, LLAMA], &[], &["pretraining_tp"]),
    of("mistral", &[DECODER, ROPE], &["hidden_act", "layer_types", "sliding_window"], &[]).layer_types(),
    of("ministral3", &[DECODER, ROPE], &["hidden_act", "sliding_window"], &[]),
    of(
        "mixtral",
        &[DECODER, ROPE],
        &["hidden_act", "num_experts", "num_experts_per_tok", "num_local_experts", "sliding_window"],
        ROUTER,
    ),
    of("qwen2", &[DECODER, ROPE, QWEN], &["layer_types", "max_window_layers"], &[]).layer_types(),
    of("qwen3", &[DECODER, ROPE, QWEN], &["attention_bias", "layer_types", "max_window_layers"], &[])
        .layer_types(),
    of(
        "qwen2_moe",
        &[DECODER, ROPE, QWEN, QWEN_EXPERTS],
        &["layer_types", "max_window_layers", "qkv_bias", "shared_expert_intermediate_size"],
        ROUTER,
    )
    .layer_types(),
    of("qwen2_5_vl_text", &[DECODER, ROPE, QWEN], &["layer_types", "max_window_layers"], &[]).layer_types(),
    of("qwen3_vl_text", &[DECODER, ROPE], &["attention_bias", "hidden_act"], &[]),
    of("qwen3_moe", &[DECODER, ROPE, QWEN, QWEN_EXPERTS], &["attention_bias", "num_local_experts"], ROUTER),
    of(
        "phi3",
        &[DECODER, ROPE],
        &["hidden_act", "original_max_position_embeddings", "sliding_window"],
        &["embd_pdrop", "resid_pdrop"],
    ),
    of("gemma", &[DECODER, ROPE], &["attention_bias", "hidden_act", "hidden_activation"], &[]),
    of("gemma2", &[DECODER, ROPE, GEMMA_2], &["attn_logit_softcapping"], &[]).layer_types(),
    // Its attention has no cap, whatever the config says.
    of("gemma3_text", &[DECODER, ROPE, GEMMA_2], &[], &["attn_logit_softcapping"]).layer_types(),
    of("smollm3", &[DECODER, ROPE, LLAMA, NO_ROPE], &["sliding_window", "use_sliding_window"], &[])
        .layer_types(),
    of("olmo2", &[DECODER, ROPE], &["attention_bias", "hidden_act"], &[]),
    of("olmo3", &[DECODER, ROPE], &["attention_bias", "hidden_act", "layer_types", "sliding_window"], &[])
        .layer_types(),
    of(
        "exaone4",
        &[DECODER, ROPE],
        &["hidden_act", "layer_types", "sliding_window", "sliding_window_pattern"],
        &[],
    )
    .layer_types(),
    of(
        "granite",
        &[DECODER, ROPE, LLAMA],
        &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"],
        &[],
    ),
    of(
        "cohere2",
        &[DECODER, ROPE],
        &["attention_bias", "hidden_act", "layer_norm_eps", "layer_types", "logit_scale", "sliding_window"],
        &[],
    )
    .layer_types(),
    of("glm4", &[DECODER, ROPE], &["attention_bias", "hidden_act"], &[]),
    of(
        "starcoder2",
        &[DECODER, ROPE],
        &["hidden_act", "norm_epsilon", "sliding_window", "use_bias"],
        &["embedding_dropout", "residual_dropout"],
    ),
    of(
        "bert",
        &[],
        &[
            "add_cross_attention",
            "hidden_act",
            "hidden_size",
            "intermediate_size",
            "is_decoder",
            "layer_norm_eps",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "position_embedding_type",
            "tie_word_embeddings",
            "type_vocab_size",
            "vocab_size",
        ],
        &["attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"],
    ),
    of(
        "gpt2",
        &[],
        &[
            "activation_function",
            "add_cross_attention",
            "hidden_size",
            "layer_norm_epsilon",
            "max_position_embeddings",
            "n_embd",
            "n_head",
            "n_inner",
            "n_layer",
            "n_positions",
            "num_attention_heads",
            "num_hidden_layers",
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_weights",
            "tie_word_embeddings",
            "vocab_size",
        ],
        // Whether scores are computed in float32, which they are here.
        &[
            "attn_pdrop",
            "embd_pdrop",
            "reorder_and_upcast_attn",
            "resid_pdrop",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
    ),
    of(
        "gpt_neox",
        &[DECODER, ROPE],
        &["attention_bias", "hidden_act", "layer_norm_eps", "use_parallel_residual"],
        &["classifier_dropout", "hidden_dropout", "is_decoder"],
    ),
    of(
        "phi",
        &[DECODER, ROPE],
        &["hidden_act", "layer_norm_eps", "qk_layernorm"],
        &["embd_pdrop", "resid_pdrop"],
    ),
    of("seed_oss", &[DECODER, ROPE, LLAMA], &["attention_out_bias"], &["pretraining_tp", "residual_dropout"]),
    of("ernie4_5", &[DECODER, ROPE], &["hidden_act", "use_bias"], &[]),
    of(
        "gemma4_text",
        &[DECODER, ROPE],
        &[
            "attention_bias",
            "attention_k_eq_v",
            "enable_moe_block",
            "final_logit_softcapping",
            "hidden_activation",
            "hidden_size_per_layer_input",
            "layer_types",
            "moe_intermediate_size",
            "num_experts",
            "num_kv_shared_layers",
            "per_layer_config",
            "sliding_window",
            "top_k_experts",
            "use_double_wide_mlp",
            "vocab_size_per_layer_input",
        ],
        &[],
    )
    .layer_types(),
    of(
        "gemma4_unified_text",
        &[DECODER, ROPE],
        &[
            "attention_bias",
            "attention_k_eq_v",
            "final_logit_softcapping",
            "hidden_activation",
            "layer_types",
            "num_kv_shared_layers",
            "per_layer_config",
            "sliding_window",
            "use_double_wide_mlp",
        ],
        &[],
    )
    .layer_types(),
    of("mamba", &[MAMBA], &[], MAMBA_IDLE).layer_types(),
    of("falcon_mamba", &[MAMBA], &["mixer_rms_eps"], MAMBA_IDLE).layer_types(),
    of(
        "mamba2",
        &[MAMBA],
        &["head_dim", "n_groups", "num_heads", "time_step_limit"],
        // Rounding aside, results do not depend on the chunks in which Transformers scans.
        &[
            "chunk_size",
            "rescale_prenorm_residual",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        ],
    )
    .layer_types(),
    of(
        "bamba",
        &[DECODER, ROPE, LLAMA, MAMBA_2],
        &["attn_layer_indices", "layer_types", "layers_block_type"],
        &["mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"],
    )
    .layer_types(),
    of(
        "granitemoehybrid",
        &[DECODER, ROPE, MAMBA_2],
        &[
            "attention_bias",
            "attention_multiplier",
            "embedding_multiplier",
            "hidden_act",
            "layer_types",
            "layers_block_type",
            "logits_scaling",
            "num_experts_per_tok",
            "num_local_experts",
            "position_embedding_type",
            "residual_multiplier",
            "shared_intermediate_size",
        ],
        &["mamba_chunk_size", "output_router_logits", "router_aux_loss_coef"],
    )
    .layer_types(),
    of(
        "falcon_h1",
        &[DECODER, ROPE, LLAMA, MAMBA_2],
        &[
            "attention_in_multiplier",
            "attention_out_multiplier",
            "embedding_multiplier",
            "key_multiplier",
            "lm_head_multiplier",
            "mamba_d_ssm",
            "mamba_norm_before_gate",
            "mamba_rms_norm",
            "mlp_multipliers",
            "projectors_bias",
            "ssm_in_multiplier",
            "ssm_multipliers",
            "ssm_out_multiplier",
        ],
        // All blocks are of one kind.
        &["layer_types", "mamba_chunk_size", "num_logits_to_keep"],
    )
    .layer_types(),
    of(
        "nemotron_h",
        &[DECODER],
        &[
            "conv_kernel",
            "hybrid_override_pattern",
            "layer_norm_epsilon",
            "layer_types",
            "layers_block_type",
            "mamba_head_dim",
            "mamba_hidden_act",
            "mamba_num_heads",
            "mlp_bias",
            "mlp_hidden_act",
            "moe_intermediate_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "n_group",
            "n_groups",
            "n_routed_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_local_experts",
            "routed_scaling_factor",
            "ssm_state_size",
            "time_step_min",
            "topk_group",
            "use_bias",
            "use_conv_bias",
        ],
        // The model of Transformers reads none of these. Blocks that predict further tokens are not read.
        &[
            "attention_bias",
            "chunk_size",
            "expand",
            "hidden_dropout",
            "mamba_proj_bias",
            "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap",
            "mtp_layers_block_type",
            "n_shared_experts",
            "num_logits_to_keep",
            "num_nextn_predict_layers",
            "output_router_logits",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "sliding_window",
            "time_step_floor",
            "time_step_limit",
            "time_step_max",
            "use_mamba_kernels",
        ],
    )
    .layer_types(),
    of(
        "gpt_oss",
        &[DECODER, ROPE],
        &[
            "attention_bias",
            "layer_types",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
            "swiglu_alpha",
            "swiglu_limit",
        ],
        // Experts have clamped gates, whatever the config says.
        &["hidden_act", "output_router_logits", "router_aux_loss_coef"],
    )
    .layer_types(),
    of(
        "llama4_text",
        &[DECODER, ROPE, NO_ROPE],
        &[
            "attention_bias",
            "attention_chunk_size",
            "attn_scale",
            "attn_temperature_tuning",
            "floor_scale",
            "hidden_act",
            "interleave_moe_layer_step",
            "intermediate_size_mlp",
            "moe_layers",
            "num_experts_per_tok",
            "num_local_experts",
            "use_qk_norm",
        ],
        &["for_llm_compressor", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"],
    )
    .layer_types(),
    of(
        "glm4_moe",
        &[DECODER, ROPE, SIGMOID_EXPERTS],
        &["attention_bias", "hidden_act", "use_qk_norm"],
        // Blocks that predict further tokens are not read.
        &["num_mtp_layers", "num_nextn_predict_layers", "output_router_logits"],
    ),
    of(
        "glm4_moe_lite",
        &[DECODER, ROPE, SIGMOID_EXPERTS, LATENT],
        &["mlp_layer_types", "rope_interleave"],
        // Blocks that predict further tokens are not read.
        &["num_mtp_layers", "num_nextn_predict_layers", "output_router_logits", "pretraining_tp"],
    ),
    of(
        "deepseek_v2",
        &[DECODER, ROPE, LATENT],
        &[
            "first_k_dense_replace",
            "mlp_bias",
            "moe_intermediate_size",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "num_experts",
            "num_experts_per_tok",
            "routed_scaling_factor",
            "topk_group",
            "topk_method",
        ],
        &["head_dim", "norm_topk_prob", "output_router_logits", "pretraining_tp"],
    ),
    of(
        "deepseek_v3",
        &[DECODER, ROPE, SIGMOID_EXPERTS, LATENT],
        &["rope_interleave"],
        // Blocks that predict further tokens are not read.
        &["num_mtp_layers", "num_nextn_predict_layers", "output_router_logits", "pretraining_tp"],
    ),
    of(
        "lfm2",
        &[DECODER, ROPE, SHORT_CONV],
        &["block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs"],
        &[],
    )
    .layer_types(),
    of(
        "lfm2_moe",
        &[DECODER, ROPE, SHORT_CONV],
        &[
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_dense_layers",
            "num_experts",
            "num_experts_per_tok",
            "routed_scaling_factor",
            "use_expert_bias",
        ],
        &["output_router_logits"],
    )
    .layer_types(),
    of("qwen3_5_text", &[DECODER, ROPE, DELTA_NET], &["attention_bias", "hidden_act"], &[]).layer_types(),
    of(
        "qwen3_5_moe_text",
        &[DECODER, ROPE, DELTA_NET],
        &[
            "attention_bias",
            "hidden_act",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "shared_expert_intermediate_size",
        ],
        &["output_router_logits", "router_aux_loss_coef"],
    )
    .layer_types(),
    of(
        "qwen3_next",
        &[DECODER, ROPE, DELTA_NET, QWEN_EXPERTS],
        &["attention_bias", "hidden_act", "shared_expert_intermediate_size"],
        &["output_router_logits", "router_aux_loss_coef"],
    )
    .layer_types(),
    of(
        "jamba",
        &[DECODER],
        &[
            "attn_layer_offset",
            "attn_layer_period",
            "expert_layer_offset",
            "expert_layer_period",
            "hidden_act",
            "mamba_conv_bias",
            "mamba_d_conv",
            "mamba_d_state",
            "mamba_dt_rank",
            "mamba_expand",
            "mamba_proj_bias",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
        ],
        &[
            "output_router_logits",
            "router_aux_loss_coef",
            "use_associative_scan",
            "use_mamba_kernels",
            "use_mambapy",
        ],
    )
    .layer_types(),
    of(
        "whisper",
        &[],
        &[
            "activation_function",
            "d_model",
            "decoder_attention_heads",
            "decoder_ffn_dim",
            "decoder_layers",
            "encoder_attention_heads",
            "encoder_ffn_dim",
            "encoder_layers",
            "hidden_size",
            "max_source_positions",
            "max_target_positions",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "num_mel_bins",
            "scale_embedding",
            "tie_word_embeddings",
            "vocab_size",
        ],
        // Settings of training, of classifiers and of transcription.
        &[
            "activation_dropout",
            "apply_spec_augment",
            "begin_suppress_tokens",
            "classifier_proj_size",
            "decoder_layerdrop",
            "decoder_start_token_id",
            "dropout",
            "encoder_layerdrop",
            "init_std",
            "mask_feature_length",
            "mask_feature_min_masks",
            "mask_feature_prob",
            "mask_time_length",
            "mask_time_min_masks",
            "mask_time_prob",
            "median_filter_width",
            "suppress_tokens",
            "use_weighted_layer_sum",
        ],
    )
    .encoder_decoder(),
];

/// Refuses settings of a config that its architecture does not read and that would change the model.
///
/// # Errors
/// [`Error::File`](kiln_core::Error::File) naming the field.
pub(crate) fn check(config: &ConfigFile, model_type: &str) -> Result<()> {
    let Some(fields) = FIELDS.iter().find(|fields| fields.model_type == model_type) else { return Ok(()) };
    let own = fields.is_encoder_decoder;
    if config.get("is_encoder_decoder").is_some_and(|stated| *stated != Value::Bool(own)) {
        return Err(config.error(&format!("`is_encoder_decoder` is not {own}, as it is in `{model_type}`")));
    }
    let is_empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
    let of_blocks = config.get("per_layer_config").filter(|_| !fields.reads("per_layer_config"));
    if of_blocks.is_some_and(|value| !is_empty(value)) {
        return Err(config.error("has a `per_layer_config`; blocks with settings of their own are not read"));
    }
    // Transformers 5 makes its cache according to the list.
    let sees_all = |kind: &Value| matches!(kind.as_str(), Some("full_attention" | "attention"));
    let kinds = config.get("layer_types").filter(|_| !fields.has_layer_types).and_then(Value::as_array);
    if let Some(kind) = kinds.into_iter().flatten().find(|kind| !sees_all(kind)) {
        let why =
            format!("`layer_types` has {kind}, and all blocks of `{model_type}` see alike; leave it out");
        return Err(config.error(&why));
    }
    let unknown: Vec<_> =
        config.fields().filter(|name| !fields.reads(name) && !fields.ignores(name)).collect();
    tracing::debug!(target: "kiln::config", ?unknown, "fields of config.json that Transformers does not know");
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

    use serde_json::{Map, json};

    use super::*;
    use crate::configure;

    /// Returns the fields and aliases of each Transformers class, as `tools/config_fields.py` records them:
    /// by `model_type`, with the defaults of the fields.
    fn recorded() -> Vec<(String, Map<String, Value>, Vec<String>)> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/config_fields.json");
        let record: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let of_all = record["of_all"].as_object().unwrap();
        let class = |(model_type, class): (&String, &Value)| {
            let own = class["fields"].as_object().unwrap().clone();
            let mut fields: Map<String, Value> = of_all.clone().into_iter().chain(own).collect();
            match &**model_type {
                // The hidden size of the class is no multiple of its number of heads.
                "glm4_moe" => drop(fields.insert("head_dim".to_owned(), json!(128))),
                // The class has none, and cannot do without.
                "deepseek_v2" => drop(fields.insert("num_experts_per_tok".to_owned(), json!(6))),
                _ => {}
            }
            let aliases = class["aliases"].as_object().unwrap().keys().cloned().collect();
            (model_type.clone(), fields, aliases)
        };
        record["models"].as_object().unwrap().iter().map(class).collect()
    }

    fn table(model_type: &str) -> &'static Fields {
        let known = if model_type == "ministral" { "mistral" } else { model_type };
        FIELDS.iter().find(|fields| fields.model_type == known).unwrap()
    }

    /// Returns everything that is derived from a config, or the error.
    fn outcome(model_type: &str, fields: &Map<String, Value>) -> std::result::Result<String, String> {
        let mut config = Value::Object(fields.clone());
        config["model_type"] = model_type.into();
        let configured = configure(&ConfigFile::from_json(config));
        configured.map(|configured| format!("{configured:?}")).map_err(|error| error.to_string())
    }

    /// Returns another value of the same type as `value`.
    fn other(value: &Value) -> Value {
        match value {
            Value::Bool(yes) => json!(!yes),
            Value::Number(number) => json!(number.as_f64().unwrap() + 1.0),
            Value::String(_) => json!("other"),
            Value::Array(_) => json!([1]),
            Value::Null | Value::Object(_) => json!(1),
        }
    }

    #[test]
    fn every_field_of_transformers_is_in_one_list() {
        for (model_type, fields, aliases) in recorded() {
            let table = table(&model_type);
            for name in fields.keys().chain(&aliases).filter(|name| *name != "is_encoder_decoder") {
                let lists = [table.reads(name), table.ignores(name)];
                assert_eq!(lists.iter().filter(|is_in| **is_in).count(), 1, "{model_type}: `{name}`");
            }
        }
    }

    #[test]
    fn fields_are_read_or_have_no_effect_as_the_lists_say() {
        for (model_type, fields, aliases) in recorded() {
            let usual = outcome(&model_type, &fields).unwrap();
            let with = |name: &str, value: Value| {
                let mut fields = fields.clone();
                fields.insert(name.to_owned(), value);
                outcome(&model_type, &fields)
            };
            for name in fields.keys().chain(&aliases) {
                if table(&model_type).ignores(name) {
                    let changed = with(name, other(fields.get(name).unwrap_or(&Value::Null)));
                    assert_eq!(changed.as_ref(), Ok(&usual), "{model_type}: `{name}`");
                } else {
                    // No field has this type.
                    assert_ne!(with(name, json!([[]])).as_ref(), Ok(&usual), "{model_type}: `{name}`");
                }
            }
        }
    }

    #[test]
    fn missing_fields_have_the_defaults_of_transformers() {
        for (model_type, fields, _) in recorded() {
            let usual = outcome(&model_type, &fields).unwrap();
            for name in fields.keys() {
                let mut without = fields.clone();
                without.remove(name);
                match outcome(&model_type, &without) {
                    Ok(found) => assert_eq!(found, usual, "{model_type}: `{name}`"),
                    // Sizes that no model leaves out.
                    Err(error) => assert!(error.contains(&format!("`{name}` is missing")), "{error}"),
                }
            }
        }
    }

    #[test]
    fn unsupported_fields_are_errors_that_name_them() {
        for (model_type, fields, _) in recorded() {
            let refused = |name: &str, value: Value| {
                let mut fields = fields.clone();
                fields.insert(name.to_owned(), value);
                let error = outcome(&model_type, &fields).unwrap_err();
                assert!(error.contains(&format!("`{name}`")), "{model_type}: {error}");
            };
            refused("is_encoder_decoder", json!(model_type != "whisper"));
            if !table(&model_type).reads("per_layer_config") {
                refused("per_layer_config", json!({ "0": { "hidden_act": "gelu" } }));
            }
            if !table(&model_type).has_layer_types {
                refused("layer_types", json!(["full_attention", "sliding_attention"]));
            }
        }
    }
}
