//! Architectures: config fields, blocks, and refused configs.

use kiln::{Model, Plan, device::Opened};
use kiln_testkit::conformance::Setup;
use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::{
    checkpoints::{copy_of, edit_config, edit_tensors, load, logits, refused, survives},
    support::{architectures, assert_close, batch, fixtures_of, forward, recorded, run_cases},
};

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

/// Returns the attention window of each block of `model`.
fn windows(model: &Model) -> Vec<Option<usize>> {
    model.causal().needs().into_iter().map(|need| need.attention.unwrap().window).collect()
}

/// Loads the recorded model `name` with an edited config.
fn edited(name: &str, edit: impl FnOnce(&mut Value)) -> Model {
    let folder = copy_of(name);
    edit_config(folder.path(), edit);
    load(folder.path()).unwrap()
}

#[test]
fn every_architecture_has_cases_that_pass() {
    let (_, device) = &kiln_testkit::devices::opened()[0];
    let setup = Setup::on(device);
    for name in architectures() {
        let filter = format!("{name}/");
        let summary = run_cases(&fixtures_of(name), &mut |name| name.contains(&filter), &setup, &mut |_| {});
        assert!(summary.passed >= 3 && summary.failed == 0, "{name}: {summary}");
    }
}

#[test]
fn a_prompt_fed_in_chunks_gives_the_logits_of_the_whole() {
    for opened in devices() {
        for name in architectures() {
            let model = recorded(name, opened);
            // Longer than the windows, which hold 8 tokens.
            let prompt: Vec<u32> = (0..21).map(|i| i * 7 % 97).collect();
            let fresh = || model.cache(&Plan::dynamic()).unwrap();
            let whole = forward(&model, &batch(&model, std::slice::from_ref(&prompt)), &mut fresh());
            for sizes in [vec![3, 9, 1, 1, 7], vec![12, 9]] {
                let (mut cache, mut start, mut got) = (fresh(), 0, Vec::new());
                for size in sizes {
                    let chunk = prompt[start..start + size].to_vec();
                    got.extend(forward(&model, &batch(&model, &[chunk]), &mut cache));
                    start += size;
                }
                assert_close(&got, &whole, &format!("{name} on {}", opened.info.name));
            }
        }
    }
}

#[test]
fn blocks_have_the_windows_of_their_config() {
    let (all, eight) = (None, Some(8));
    let model = |name| edited(name, |_| {});
    assert_eq!(windows(&model("llama")), [all; 3]);
    assert_eq!(windows(&model("mistral")), [eight; 3]);
    assert_eq!(windows(&model("qwen2")), [all; 3]);
    assert_eq!(windows(&model("phi3")), [all; 3]);
    assert_eq!(windows(&model("gemma2")), [eight, all, eight, all]);
    assert_eq!(windows(&model("gemma3_text")), [eight, eight, eight, eight, eight, all, eight]);

    let mistral = |window: Value| edited("mistral", |config| config["sliding_window"] = window);
    assert_eq!(windows(&mistral(Value::Null)), [all; 3]);
    let absent = edited("mistral", |config| _ = config.as_object_mut().unwrap().remove("sliding_window"));
    assert_eq!(windows(&absent), [Some(4096); 3]);
    let listed = json!(["full_attention", "sliding_attention", "full_attention"]);
    for model_type in ["mistral", "ministral"] {
        let model = edited("mistral", |config| {
            config["layer_types"] = listed.clone();
            config["model_type"] = json!(model_type);
        });
        assert_eq!(windows(&model), [all, eight, all], "{model_type}");
    }
    assert_eq!(windows(&edited("mistral", |config| config["model_type"] = json!("ministral"))), [eight; 3]);
    assert_eq!(windows(&edited("phi3", |config| config["sliding_window"] = json!(8))), [eight; 3]);

    for name in ["qwen2", "qwen3"] {
        let qwen = |edit: fn(&mut Value)| {
            let model = edited(name, |config| {
                config.as_object_mut().unwrap().remove("layer_types");
                config["sliding_window"] = json!(8);
                config["max_window_layers"] = json!(1);
                edit(config);
            });
            windows(&model)
        };
        assert_eq!(qwen(|config| config["use_sliding_window"] = json!(true)), [all, eight, eight]);
        assert_eq!(qwen(|config| config["use_sliding_window"] = json!(false)), [all; 3]);
        let listed = qwen(|config| {
            config["use_sliding_window"] = json!(true);
            config["layer_types"] = json!(["sliding_attention", "full_attention", "attention"]);
        });
        assert_eq!(listed, [eight, all, all], "a list says more than `max_window_layers`");
    }
}

#[test]
fn old_configs_mean_the_same_as_new_ones() {
    let remove = |config: &mut Value, keys: &[&str]| {
        keys.iter().for_each(|key| _ = config.as_object_mut().unwrap().remove(*key));
    };
    for (name, old) in [
        ("gemma", json!({"rope_theta": 10000.0, "hidden_act": "gelu", "hidden_activation": null})),
        ("gemma2", json!({"rope_theta": 10000.0, "hidden_act": "gelu"})),
        ("gemma3_text", json!({"sliding_window_pattern": 6})),
        (
            "gemma3_text",
            json!({"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": null}),
        ),
        ("qwen2", json!({"rope_theta": 10000.0, "sliding_window": 4096})),
        ("phi3", json!({"rope_theta": 10000.0, "rope_scaling": null})),
    ] {
        let model = edited(name, |config| {
            remove(
                config,
                &["rope_parameters", "layer_types", "tie_word_embeddings", "_sliding_window_pattern"],
            );
            if !name.starts_with("gemma") {
                config["tie_word_embeddings"] = json!(false);
            }
            config.as_object_mut().unwrap().extend(old.as_object().unwrap().clone());
        });
        let new = edited(name, |_| {});
        assert_eq!((logits(&model), windows(&model)), (logits(&new), windows(&new)), "{name}: {old}");
    }

    // Only blocks without a window are stretched.
    let scaled = |edit: fn(&mut Value)| {
        let model = edited("gemma3_text", edit);
        (logits(&model), model.sizes().positions)
    };
    let new = scaled(|config| {
        config["rope_parameters"]["full_attention"] =
            json!({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6});
    });
    let old = scaled(|config| {
        config.as_object_mut().unwrap().remove("rope_parameters");
        config["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
    });
    assert_eq!(new, old);
    assert_eq!(new.1, 128, "its config says how far it reaches");
    assert_ne!(new.0, scaled(|_| {}).0);
}

#[test]
fn old_names_of_longrope_mean_longrope() {
    let longrope = |edit: fn(&mut Value)| {
        let model = edited("phi3", |config| {
            config["rope_parameters"] = json!({
                "rope_type": "longrope",
                "short_factor": [1.0, 1.25, 1.5, 1.75],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            });
            config["original_max_position_embeddings"] = json!(4);
            edit(config);
        });
        logits(&model)
    };
    let want = longrope(|_| {});
    assert_eq!(longrope(|config| config["rope_parameters"]["rope_type"] = json!("su")), want);
    assert_eq!(longrope(|config| config["rope_parameters"]["rope_type"] = json!("yarn")), want);
    // Five tokens exceed a trained length of 4, but not the default of 4096.
    let short = longrope(|config| {
        config.as_object_mut().unwrap().remove("original_max_position_embeddings");
        config["rope_parameters"]["original_max_position_embeddings"] = json!(4);
        config["max_position_embeddings"] = json!(8192);
    });
    assert_ne!(short, want);
}

#[test]
fn unsupported_configs_are_errors() {
    let list = |names: &[&str]| json!(names);
    let cases: Vec<(&str, &str, Value, &str)> = vec![
        ("mistral", "sliding_window", json!(0), "`sliding_window` is 0"),
        ("mistral", "sliding_window", json!(-1), "sliding_window"),
        ("mistral", "sliding_window", json!(u64::MAX), "sliding_window"),
        // `null` means as many as there are heads: 4 heads of dimension 8.
        ("mistral", "num_key_value_heads", Value::Null, "[32, 32]"),
        ("mistral", "hidden_act", json!("relu6"), "known: silu"),
        ("mistral", "is_causal", json!(false), "see later ones"),
        ("mistral", "layer_types", list(&["full_attention"]), "`layer_types` has 1 entries"),
        ("llama", "layer_types", list(&["sliding_attention"; 3]), "all blocks of `llama` see alike"),
        ("llama", "is_encoder_decoder", json!(true), "`is_encoder_decoder` is not false"),
        ("phi3", "sliding_window", json!(0), "`sliding_window` is 0"),
        ("phi3", "original_max_position_embeddings", json!(0), "original_max_position_embeddings"),
        ("phi3", "original_max_position_embeddings", json!(-4), "original_max_position_embeddings"),
        ("phi3", "partial_rotary_factor", json!(0.5), ""),
        ("phi3", "rope_parameters", json!({"partial_rotary_factor": 0.01}), "rotated in pairs"),
        ("phi3", "rope_parameters", json!({"partial_rotary_factor": 1.5}), "rotated in pairs"),
        ("phi3", "rope_parameters", json!({"rope_type": "su"}), "short_factor"),
        ("qwen2", "layer_types", list(&["full_attention"]), "`layer_types` has 1 entries"),
        ("qwen2", "layer_types", json!([]), "`layer_types` has 0 entries"),
        ("qwen2", "layer_types", json!("full_attention"), "layer_types"),
        ("qwen2", "layer_types", json!([1, 2, 3]), "layer_types"),
        ("qwen2", "layer_types", list(&["full_attention"; 2]), "`layer_types` has 2 entries"),
        ("qwen2", "layer_types", list(&["chunked_attention"; 3]), "known: full_attention"),
        ("qwen2", "layer_types", list(&["sliding_attention"; 3]), "`sliding_window` is missing"),
        ("qwen2", "num_key_value_heads", json!(3), "attention heads"),
        ("qwen2", "max_window_layers", json!(-1), "max_window_layers"),
        ("qwen3", "layer_types", list(&["conv"; 3]), "`conv`"),
        ("qwen3", "attention_bias", json!("yes"), "attention_bias"),
        ("qwen3", "attention_bias", json!(true), "q_proj.bias"),
        ("qwen3", "head_dim", json!(16), "[64, 32]"),
        ("gemma", "hidden_act", json!("relu"), "known: silu"),
        ("gemma", "hidden_activation", json!("gelu"), "means another"),
        ("gemma", "hidden_activation", json!("relu"), "known: silu"),
        ("gemma", "use_bidirectional_attention", json!(true), "see later ones"),
        ("gemma2", "sliding_window", json!(0), "`sliding_window` is 0"),
        ("gemma2", "sliding_window", Value::Null, "`sliding_window` is missing"),
        ("gemma2", "attn_logit_softcapping", json!(-50.0), "`attn_logit_softcapping` is -50"),
        ("gemma2", "attn_logit_softcapping", json!(0), "`attn_logit_softcapping` is 0"),
        ("gemma2", "attn_logit_softcapping", json!("NaN"), "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping", json!(-1), "`final_logit_softcapping` is -1"),
        ("gemma2", "final_logit_softcapping", json!(1e300), "`final_logit_softcapping` is 1"),
        ("gemma2", "final_logit_softcapping", json!(1e-300), "must be a positive float32"),
        ("gemma2", "query_pre_attn_scalar", json!(0), "`query_pre_attn_scalar` is 0"),
        ("gemma2", "query_pre_attn_scalar", json!(-16), "`query_pre_attn_scalar` is -16"),
        ("gemma2", "layer_types", list(&["sliding_attention"; 5]), "`layer_types` has 5 entries"),
        ("gemma2", "rope_parameters", json!({"full_attention": {"rope_type": "default"}}), "only one"),
        ("gemma2", "hidden_activation", json!("tanh"), "known: silu"),
        ("gemma2", "use_bidirectional_attention", json!(true), "see later ones"),
        ("gemma3_text", "sliding_window_pattern", json!(0), "`sliding_window_pattern` is 0"),
        ("gemma3_text", "sliding_window_pattern", json!(-6), "sliding_window_pattern"),
        ("gemma3_text", "final_logit_softcapping", json!(-30.0), "final_logit_softcapping"),
        ("bert", "is_decoder", json!(true), "BERT is an encoder"),
        ("bert", "add_cross_attention", json!(true), "BERT is an encoder"),
        ("bert", "position_embedding_type", json!("relative_key"), "can only be `absolute`"),
        ("bert", "type_vocab_size", json!(0), "`type_vocab_size` is 0"),
        ("bert", "hidden_act", json!("relu6"), "known: silu"),
        ("gemma3_text", "rope_local_base_freq", json!(-1.0), ""),
        ("gemma3_text", "rope_parameters", json!({"sliding_attention": {"rope_theta": 0.0}}), "rope_theta"),
        (
            "gemma3_text",
            "rope_parameters",
            json!({"sliding_attention": {"rope_type": "x"}}),
            "known: default",
        ),
        ("gemma3_text", "rope_parameters", json!({"full_attention": {"rope_theta": "x"}}), "not understood"),
        ("gemma3_text", "rope_parameters", json!({"full_attention": 3}), "rope_parameters"),
        ("gemma3_text", "rope_scaling", json!(8.0), "rope_scaling"),
        ("gemma3_text", "rope_scaling", json!({"rope_type": "linear"}), "`factor` is missing"),
        ("gemma3_text", "layer_types", list(&["full_attention"]), "`layer_types` has 1 entries"),
        ("falcon_mamba", "mixer_rms_eps", json!(-1.0), "`mixer_rms_eps` is -1"),
        ("mamba", "hidden_act", json!("gelu"), "known: silu"),
        ("mamba", "time_step_rank", json!("many"), "neither `auto` nor a number"),
        ("mamba", "time_step_rank", json!(0), "`time_step_rank` is 0"),
        ("mamba", "time_step_rank", json!(5), "config.json asks for"),
        ("mamba", "state_size", json!(0), "`state_size` is 0"),
        ("mamba", "state_size", json!(7), "config.json asks for"),
        ("mamba", "conv_kernel", json!(1000), "`conv_kernel` is 1000"),
        ("mamba", "conv_kernel", json!(3), "`backbone.layers.0.mixer.conv1d.weight` has shape"),
        ("mamba", "expand", json!(3), "config.json asks for"),
        ("mamba", "use_bias", json!(true), "no tensor `backbone.layers.0.mixer.in_proj.bias`"),
        ("mamba", "use_conv_bias", json!(false), "no place for"),
        ("mamba", "layer_norm_epsilon", json!(0), "must be a positive float32"),
        (
            "llama",
            "model_type",
            json!("lama"),
            "unknown architecture (model_type in config.json) `lama`; known: llama,",
        ),
        ("mixtral", "num_local_experts", json!(0), "`num_local_experts` is 0"),
        ("mixtral", "num_local_experts", json!(5), "block_sparse_moe.gate.weight` has shape [4, 32]"),
        ("mixtral", "num_local_experts", json!(3), "block_sparse_moe.gate.weight` has shape [4, 32]"),
        ("mixtral", "num_experts", json!(3), "block_sparse_moe.gate.weight` has shape [4, 32]"),
        ("mixtral", "num_local_experts", json!(1u64 << 40), "`num_local_experts` is 1099511627776"),
        ("mixtral", "num_experts_per_tok", json!(0), "`num_experts_per_tok` is 0"),
        ("mixtral", "num_experts_per_tok", json!(5), "`num_experts_per_tok` is 5, must be between 1 and 4"),
        ("mixtral", "intermediate_size", json!(47), "experts.0.w1.weight` has shape [48, 32]"),
        ("mixtral", "sliding_window", json!(0), "`sliding_window` is 0"),
        ("mixtral", "hidden_act", json!("relu6"), "known: silu"),
        ("qwen3_moe", "num_local_experts", json!(7), "mlp.gate.weight` has shape [6, 32]"),
        // The other name takes precedence.
        ("qwen3_moe", "num_experts", json!(7), ""),
        ("qwen3_moe", "num_local_experts", json!(0), "no tensor `model.layers.0.mlp.gate_proj.weight`"),
        ("qwen3_moe", "num_experts_per_tok", json!(7), "`num_experts_per_tok` is 7"),
        ("qwen3_moe", "moe_intermediate_size", json!(0), "`moe_intermediate_size` is 0"),
        ("qwen3_moe", "moe_intermediate_size", json!(25), "experts.0.gate_proj.weight` has shape [24, 32]"),
        ("qwen3_moe", "decoder_sparse_step", json!(0), "`decoder_sparse_step` is 0"),
        ("qwen3_moe", "mlp_only_layers", json!([0]), "no tensor `model.layers.0.mlp.gate_proj.weight`"),
        ("qwen3_moe", "mlp_only_layers", json!(1), "mlp_only_layers"),
        ("qwen3_moe", "attention_bias", json!(true), "q_proj.bias"),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(0), "`shared_expert_intermediate_size` is 0"),
        (
            "qwen2_moe",
            "shared_expert_intermediate_size",
            json!(35),
            "shared_expert.gate_proj.weight` has shape [36, 32]",
        ),
        ("qwen2_moe", "num_experts", json!(0), "no tensor `model.layers.0.mlp.gate_proj.weight`"),
        ("qwen2_moe", "mlp_only_layers", json!(null), "no tensor `model.layers.1.mlp.gate.weight`"),
        ("qwen2_moe", "sliding_window", json!(null), "`sliding_window` is missing"),
        ("jamba", "num_experts", json!(0), "`num_experts` is 0"),
        ("jamba", "num_experts", json!(1), "no tensor `model.layers.1.feed_forward.gate_proj.weight`"),
        ("jamba", "num_experts_per_tok", json!(9), "`num_experts_per_tok` is 9"),
        ("jamba", "expert_layer_period", json!(0), "`expert_layer_period` is 0"),
        ("jamba", "expert_layer_offset", json!(2), "must be below `expert_layer_period`, which is 2"),
        ("jamba", "attn_layer_offset", json!(2), "must be below `attn_layer_period`, which is 2"),
        ("jamba", "attn_layer_period", json!(3), "no tensor `model.layers.3.mamba.in_proj.weight`"),
        ("jamba", "mamba_dt_rank", json!("many"), "`mamba_dt_rank` is neither `auto` nor a number"),
        ("jamba", "mamba_d_conv", json!(3), "conv1d.weight` has shape"),
        ("jamba", "mamba_expand", json!(0), "`mamba_expand` is 0"),
        ("jamba", "mamba_proj_bias", json!(true), "no tensor `model.layers.0.mamba.in_proj.bias`"),
        ("jamba", "hidden_act", json!("gelu"), "known: silu"),
        ("ministral3", "rope_parameters", json!({"rope_type": "default"}), "llama_4_scaling_beta"),
        ("smollm3", "no_rope_layer_interval", json!(0), "`no_rope_layer_interval` is 0"),
        ("smollm3", "no_rope_layers", json!([1, 0]), "`no_rope_layers` has 2 entries"),
        ("smollm3", "no_rope_layers", json!("1, 0"), "no_rope_layers"),
        ("olmo2", "attention_bias", json!(true), "no tensor `model.layers.0.self_attn.q_proj.bias`"),
        ("olmo2", "num_key_value_heads", json!(4), "has shape [16, 32]"),
        ("olmo3", "layer_types", list(&["chunked_attention"; 4]), "known: full_attention"),
        ("olmo3", "sliding_window", Value::Null, "`sliding_window` is missing"),
        ("granite", "residual_multiplier", json!(0), "`residual_multiplier` is 0"),
        ("granite", "logits_scaling", json!(1e-60), "must be a positive float32"),
        ("granite", "embedding_multiplier", json!("much"), "embedding_multiplier"),
        ("cohere2", "logit_scale", json!(-1), "`logit_scale` is -1"),
        ("cohere2", "layer_norm_eps", json!(0), "`layer_norm_eps` is 0"),
        ("glm4", "rope_parameters", json!({"partial_rotary_factor": 0.3}), "rotated in pairs"),
        ("starcoder2", "use_bias", json!(false), "is a bias that config.json has no place for"),
        ("starcoder2", "hidden_act", json!("relu"), "known: silu"),
        ("phi", "qk_layernorm", json!(true), "no tensor `model.layers.0.self_attn.q_layernorm.weight`"),
        ("gpt2", "hidden_size", json!(64), "`n_embd` 32 and `hidden_size` 64, which are the same field"),
        ("gpt2", "n_inner", json!(100), "`transformer.h.0.mlp.c_fc.weight` has shape [128, 32]"),
        ("gpt2", "n_positions", json!(65), "`transformer.wpe.weight` has shape [128, 32]"),
        ("gpt2", "add_cross_attention", json!(true), "`add_cross_attention` asks for an encoder"),
        ("gpt_neox", "num_attention_heads", json!(5), "is not a multiple of 5 heads"),
        ("gpt_neox", "attention_bias", json!(false), "is a bias that config.json has no place for"),
        ("gpt_oss", "num_local_experts", json!(4), "mlp.router.weight` has shape [5, 32]"),
        ("gpt_oss", "intermediate_size", json!(39), "experts.0.gate_proj.bias` has shape [40]"),
        ("gpt_oss", "swiglu_limit", json!(0), "`swiglu_limit` is 0"),
        ("gpt_oss", "num_experts_per_tok", json!(6), "`num_experts_per_tok` is 6"),
        ("lfm2", "conv_L_cache", json!(4), "conv.conv.weight` has shape [32, 1, 3]"),
        ("lfm2", "layer_types", json!(["conv", "mamba", "conv", "conv"]), "known: full_attention, conv"),
        ("lfm2", "block_multiple_of", json!(0), "`block_multiple_of` is 0"),
        ("lfm2", "block_ffn_dim_multiplier", json!(1e30), "`intermediate_size` is"),
        ("bamba", "hidden_act", json!("gelu"), "known: silu, swish"),
        ("lfm2_moe", "num_dense_layers", json!(0), "no tensor `model.layers.0.feed_forward.gate.weight`"),
        ("gemma4_text", "num_kv_shared_layers", json!(6), "leaves no block with keys"),
        ("gemma4_text", "num_kv_shared_layers", json!(5), "leaves blocks without keys of their kind"),
        ("gemma4_text", "use_bidirectional_attention", json!("all"), "tokens see later ones"),
        ("gemma4_text", "per_layer_config", json!({ "1": { "rope_theta": 1 } }), "rope_theta"),
        ("gemma4_text", "per_layer_config", json!({ "1": { "head_dim": 12 } }), "have several sizes"),
        ("gemma4_text", "enable_moe_block", json!(true), "`num_experts` is missing"),
        ("gemma4_text", "vocab_size_per_layer_input", json!(7), "tokens would have no row"),
        (
            "gemma4_text",
            "hidden_size_per_layer_input",
            json!(8),
            "per_layer_model_projection.weight` has shape",
        ),
        ("mamba2", "num_heads", json!(5), "`num_heads` 5 is no multiple of `n_groups` 2"),
        ("mamba2", "head_dim", json!(9), "`num_heads` 4 times `head_dim` 9 is not `expand` times"),
        ("mamba2", "time_step_limit", json!([1.0, 0.5]), "must be two ascending numbers from 0"),
        ("mamba2", "hidden_act", json!("gelu"), "known: silu, swish"),
        ("bamba", "mamba_d_head", json!("wide"), "`mamba_d_head` is neither `auto` nor a number"),
        ("bamba", "mamba_expand", json!(3), "is not the width of the mixer, 96"),
        ("bamba", "attn_layer_indices", json!([0]), "no tensor `model.layers.0.self_attn.q_proj.weight`"),
        ("granitemoehybrid", "position_embedding_type", json!("learned"), "known: rope, nope"),
        ("granitemoehybrid", "num_local_experts", json!(4), "router.weight` has shape [5, 32]"),
        ("falcon_h1", "mamba_d_ssm", json!(60), "is not the width of the mixer, 60"),
        ("falcon_h1", "ssm_multipliers", json!([1, 1, 0, 1, 1]), "`ssm_multipliers` is 0"),
        ("falcon_h1", "mlp_multipliers", json!([1]), "`mlp_multipliers`"),
        ("nemotron_h", "layers_block_type", json!(["mlp", "conv"]), "known: linear_attention"),
        ("nemotron_h", "layers_block_type", json!([]), "`num_hidden_layers` is 0"),
        ("nemotron_h", "mlp_hidden_act", json!("relu"), "`mlp_hidden_act` is `relu`; known"),
        ("nemotron_h", "moe_latent_size", json!(12), "fc1_latent_proj.weight"),
        ("nemotron_h", "time_step_min", json!(-1.0), "`time_step_min` is -1"),
        ("deepseek_v3", "kv_lora_rank", json!(19), "kv_a_proj_with_mqa.weight` has shape [28, 32]"),
        ("deepseek_v3", "v_head_dim", json!(9), "which a matrix of 4 heads with 21 rows each has not"),
        ("deepseek_v3", "num_key_value_heads", json!(2), "`num_key_value_heads` is 2"),
        ("glm4_moe_lite", "head_dim", json!(20), "`head_dim` is 20"),
        ("deepseek_v3", "qk_rope_head_dim", json!(0), "`qk_rope_head_dim` is 0"),
        ("deepseek_v2", "topk_method", json!("noaux_tc"), "known: greedy, group_limited_greedy"),
        ("deepseek_v2", "topk_method", json!("group_limited_greedy"), "`n_group` or `topk_group` is missing"),
        ("deepseek_v2", "num_experts_per_tok", json!(null), "`num_experts_per_tok` is missing"),
        ("glm4_moe_lite", "mlp_layer_types", json!(["sparse"]), "`mlp_layer_types` has 1 entries"),
        ("glm4_moe_lite", "mlp_layer_types", json!(["sparse", "moe", "dense"]), "known: sparse, dense"),
        ("qwen3_5_text", "linear_num_value_heads", json!(3), "no multiple of `linear_num_key_heads` 2"),
        ("qwen3_5_text", "linear_key_head_dim", json!(0), "`linear_key_head_dim` is 0"),
        ("qwen3_5_text", "linear_conv_kernel_dim", json!(3), "conv1d.weight` has shape [80, 1, 4]"),
        (
            "qwen3_5_text",
            "head_dim",
            json!(8),
            "q_proj.weight` has shape [128, 32], which a matrix of 4 heads",
        ),
        (
            "qwen3_5_text",
            "layer_types",
            json!(["mamba", "mamba", "mamba", "conv"]),
            "known: full_attention, linear_attention",
        ),
        ("qwen3_next", "linear_num_value_heads", json!(6), "in_proj_qkvz.weight` has shape [128, 32]"),
        ("qwen3_next", "hidden_act", json!("gelu"), "known: silu, swish"),
        ("llama4_text", "attention_chunk_size", json!(0), "`attention_chunk_size` is 0"),
        ("llama4_text", "attention_chunk_size", json!(null), "`attention_chunk_size` is missing"),
        (
            "llama4_text",
            "layer_types",
            json!(["full_attention", "full_attention", "full_attention", "sliding_attention"]),
            "known: full_attention, chunked_attention",
        ),
        ("llama4_text", "layer_types", json!(["full_attention"]), "`layer_types` has 1 entries"),
        ("llama4_text", "no_rope_layers", json!([1]), "`no_rope_layers` has 1 entries"),
        ("llama4_text", "floor_scale", json!(0), "`floor_scale` is 0"),
        ("llama4_text", "attn_temperature_tuning", json!("yes"), "neither true nor false"),
        ("llama4_text", "interleave_moe_layer_step", json!(0), "`interleave_moe_layer_step` is 0"),
        ("llama4_text", "moe_layers", json!([0]), "no tensor `model.layers.0.feed_forward.router.weight`"),
        (
            "llama4_text",
            "intermediate_size_mlp",
            json!(55),
            "feed_forward.gate_proj.weight` has shape [56, 32]",
        ),
        ("llama4_text", "num_experts_per_tok", json!(6), "`num_experts_per_tok` is 6"),
        ("glm4_moe", "n_group", json!(4), "6 experts in 4 groups"),
        ("glm4_moe", "n_group", json!(0), "`n_group` is 0"),
        ("glm4_moe", "topk_group", json!(2), "`topk_group` is 2"),
        ("glm4_moe", "routed_scaling_factor", json!(-2), "`routed_scaling_factor` is -2"),
        ("glm4_moe", "first_k_dense_replace", json!(0), "no tensor `model.layers.0.mlp.gate.weight`"),
    ];
    for (name, key, value, expected) in cases {
        let folder = copy_of(name);
        edit_config(folder.path(), |config| config[key] = value.clone());
        if expected.is_empty() {
            // Another field for the same setting takes precedence.
            assert!(load(folder.path()).is_ok(), "{name}: {key} = {value}");
            continue;
        }
        let error = refused(folder.path());
        assert!(error.contains(expected), "{name}: {key} = {value}: {error}");
    }

    let folder = copy_of("gemma2");
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let not_finite = "`attn_logit_softcapping`: invalid type: an object, infinity or NaN, expected a number";
    for (number, why) in [("NaN", not_finite), ("Infinity", not_finite), ("1e999", "not valid JSON")] {
        std::fs::write(
            &path,
            text.replace(
                "\"attn_logit_softcapping\": 50.0",
                &format!("\"attn_logit_softcapping\": {number}"),
            ),
        )
        .unwrap();
        let refused = refused(folder.path());
        assert!(refused.contains(why), "{number}: {refused}");
    }
}

#[test]
fn fused_matrices_must_fit_the_config() {
    for (part, rows) in [("self_attn.qkv_proj", 64), ("mlp.gate_up_proj", 96)] {
        let name = format!("model.layers.1.{part}.weight");
        for shape in
            [vec![rows / 2, 32], vec![rows - 1, 32], vec![32, rows], vec![rows * 32], vec![rows, 2, 16]]
        {
            let folder = copy_of("phi3");
            edit_tensors(folder.path(), |tensors| {
                let len = shape.iter().product::<usize>() * 4;
                tensors.insert(name.clone(), (Dtype::F32, shape.clone(), vec![0; len]));
            });
            let error = refused(folder.path());
            assert!(error.contains(&name) && error.contains(&format!("[{rows}, 32]")), "{shape:?}: {error}");
        }
        let folder = copy_of("phi3");
        edit_tensors(folder.path(), |tensors| _ = tensors.remove(&name));
        assert!(refused(folder.path()).contains(&format!("no tensor `{name}`")));
    }
    // Three projections where one fused projection is expected.
    let folder = copy_of("llama");
    edit_config(folder.path(), |config| config["model_type"] = json!("phi3"));
    assert!(refused(folder.path()).contains("qkv_proj"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_configs_never_panic(
        name in prop::sample::select(architectures().collect::<Vec<_>>()),
        key in prop::sample::select(vec![
            "sliding_window", "layer_types", "max_window_layers", "use_sliding_window", "sliding_window_pattern",
            "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act",
            "hidden_activation", "rope_parameters", "rope_scaling", "rope_local_base_freq", "rope_theta",
            "partial_rotary_factor", "original_max_position_embeddings", "head_dim", "num_key_value_heads",
            "attention_bias", "use_bidirectional_attention", "model_type", "state_size", "time_step_rank",
            "conv_kernel", "expand", "residual_in_fp32", "num_experts", "num_local_experts", "num_experts_per_tok",
            "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "attn_layer_period", "attn_layer_offset",
            "no_rope_layers", "no_rope_layer_interval", "residual_multiplier", "logit_scale", "use_parallel_residual",
            "n_inner", "n_embd", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "swiglu_limit",
            "shared_expert_intermediate_size", "expert_layer_period", "expert_layer_offset", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank",
        ]),
        value in prop_oneof![
            any::<i64>().prop_map(|n| json!(n)),
            (0i64..40).prop_map(|n| json!(n)),
            any::<f64>().prop_map(|n| json!(n)),
            any::<bool>().prop_map(|b| json!(b)),
            Just(Value::Null),
            Just(json!([])),
            prop::sample::select(architectures().collect::<Vec<_>>()).prop_map(|name| json!(name)),
            prop::collection::vec("(full|sliding)_attention", 1..8).prop_map(|names| json!(names)),
            (any::<f64>(), any::<u32>()).prop_map(|(f, n)| json!({
                "full_attention": {"rope_type": "linear", "factor": f}, "sliding_attention": {"rope_theta": n},
            })),
            (any::<f64>(), any::<u32>()).prop_map(|(f, n)| json!({
                "rope_type": "longrope", "short_factor": [f, 1, 1, 1], "long_factor": [1, 1, n, 1], "factor": n,
            })),
        ],
    ) {
        let folder = copy_of(name);
        edit_config(folder.path(), |config| config[key] = value);
        survives(folder.path());
    }
}
