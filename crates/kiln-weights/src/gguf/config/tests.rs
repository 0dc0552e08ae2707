//! Configs of all architectures, from metadata as `convert_hf_to_gguf.py` of llama.cpp writes it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::{hybrids::every, *};
use crate::gguf::{Array, Value as Stored};

mod converter;
mod hostile;

/// Tensors by name: shapes, and numbers for some.
#[derive(Debug, Default)]
struct Few(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

impl Tensors for Few {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.get(name).map(|(shape, _)| shape.clone())
    }

    fn numbers(&mut self, name: &str) -> Result<Vec<f32>, Error> {
        self.0
            .get(name)
            .map(|(_, numbers)| numbers.clone())
            .ok_or_else(|| Error::Damaged(format!("no tensor `{name}`")))
    }
}

#[derive(Debug)]
struct Model {
    architecture: &'static str,
    metadata: Metadata,
    tensors: Few,
}

impl Model {
    fn new(architecture: &'static str) -> Self {
        let name = ("general.architecture", Stored::String(architecture.to_owned()));
        Self { architecture, metadata: [name].into_iter().collect(), tensors: Few::default() }
            .tensor("token_embd.weight", &[1000, 64])
    }

    /// Creates a model with two blocks of attention and feed-forwards.
    fn decoder(architecture: &'static str) -> Self {
        Self::new(architecture)
            .sizes(&[
                ("block_count", 2),
                ("context_length", 8192),
                ("embedding_length", 64),
                ("feed_forward_length", 160),
                ("attention.head_count", 4),
                ("attention.head_count_kv", 2),
            ])
            .number("attention.layer_norm_rms_epsilon", 0.5)
            .number("rope.freq_base", 500_000.0)
    }

    fn set(mut self, key: &str, value: Stored) -> Self {
        self.metadata.insert(format!("{}.{key}", self.architecture), value);
        self
    }

    fn sizes(self, sizes: &[(&str, u32)]) -> Self {
        sizes.iter().fold(self, |model, (key, size)| model.set(key, Stored::U32(*size)))
    }

    fn number(self, key: &str, number: f32) -> Self {
        self.set(key, Stored::F32(number))
    }

    fn text(self, key: &str, text: &str) -> Self {
        self.set(key, Stored::String(text.to_owned()))
    }

    fn list(self, key: &str, list: &[i32]) -> Self {
        self.set(key, Stored::Array(Array::I32(list.to_vec())))
    }

    fn tensor(mut self, name: &str, shape: &[usize]) -> Self {
        self.tensors.0.insert(name.to_owned(), (shape.to_vec(), Vec::new()));
        self
    }

    fn vector(mut self, name: &str, numbers: Vec<f32>) -> Self {
        self.tensors.0.insert(name.to_owned(), (vec![numbers.len()], numbers));
        self
    }

    fn config(mut self) -> Json {
        config_json(&self.metadata, &mut self.tensors).unwrap()
    }

    fn refused(mut self, why: &str) {
        let error = config_json(&self.metadata, &mut self.tensors).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// Returns the fields of [`Model::decoder`], extended by `more`.
fn expected(model_type: &str, more: Json) -> Json {
    let mut config = json!({
        "model_type": model_type, "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 1000,
        "tie_word_embeddings": true,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 0.5, "rope_theta": 500_000.0,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

#[test]
fn the_llama_architecture_becomes_llama_mistral_or_mixtral() {
    let plain = json!({ "attention_bias": false, "mlp_bias": false });
    assert_eq!(Model::decoder("llama").config(), expected("llama", plain));

    let model =
        Model::decoder("llama").tensor("output.weight", &[1000, 64]).tensor("blk.0.attn_q.bias", &[64]);
    let biased = json!({ "tie_word_embeddings": false, "attention_bias": true, "mlp_bias": true });
    let model = model.tensor("blk.0.attn_output.bias", &[64]).tensor("blk.0.ffn_gate.bias", &[160]);
    assert_eq!(model.config(), expected("llama", biased));
    Model::decoder("llama").tensor("blk.0.attn_q.bias", &[64]).refused("biases in only some projections");

    let model = Model::decoder("llama").sizes(&[("attention.sliding_window", 128)]);
    assert_eq!(
        model.config(),
        expected("mistral", json!({ "sliding_window": 128, "attention_bias": false, "mlp_bias": false }))
    );

    let experts = || Model::decoder("llama").sizes(&[("expert_count", 8), ("expert_used_count", 2)]);
    let model = experts().tensor("blk.0.ffn_gate_exps.weight", &[8, 160, 64]);
    assert_eq!(
        model.config(),
        expected("mixtral", json!({ "num_local_experts": 8, "num_experts_per_tok": 2 }))
    );
    experts().refused("`llama.expert_count` is not 0, and there is no `ffn_gate_exps`");
    let grouped =
        experts().tensor("blk.0.ffn_gate_exps.weight", &[8, 160, 64]).sizes(&[("expert_group_count", 4)]);
    grouped.refused("`llama.expert_group_count` asks that groups of experts are chosen first");
}

#[test]
fn sizes_may_be_lists_and_heads_may_have_their_own_size() {
    let model =
        Model::decoder("llama").list("attention.head_count", &[4, 4]).sizes(&[("attention.key_length", 32)]);
    let config = model.config();
    assert_eq!([&config["num_attention_heads"], &config["head_dim"]], [4, 32]);
    let model = || Model::decoder("llama");
    model()
        .list("feed_forward_length", &[160, 320])
        .refused("`llama.feed_forward_length` differs between blocks");
    model().list("feed_forward_length", &[160]).refused("has 1 entries for 2 blocks");
    model().sizes(&[("attention.value_length", 32)]).refused("is 32, and keys have 16");
    model().sizes(&[("attention.head_count", 5)]).refused("`llama.attention.key_length` is missing");
    model().sizes(&[("attention.head_count", 0)]).refused("`llama.attention.key_length` is missing");
    model().sizes(&[("block_count", 0)]).refused("is 0, must be between 1 and 4096");
    model().sizes(&[("block_count", u32::MAX)]).refused("must be between 1 and 4096");
    model().set("attention.causal", Stored::Bool(false)).refused("`llama.attention.causal` is false");
    let bert = || Model::decoder("bert").number("attention.layer_norm_epsilon", 1e-6);
    let encoder = || bert().set("attention.causal", Stored::Bool(false));
    bert().refused("`bert.attention.causal` is not false");
    encoder().refused("the tensor `token_types.weight` is missing; DistilBERT");
    let mut roberta = encoder();
    roberta.metadata.insert("tokenizer.ggml.model", Stored::String("gpt2".to_owned()));
    roberta.refused("`tokenizer.ggml.model` is `gpt2`, as in files of RoBERTa");
    assert_eq!(encoder().tensor("token_types.weight", &[3, 64]).config()["type_vocab_size"], 3);
    Model::new("llama").refused("`llama.block_count` is missing");
    model().number("rope.freq_base", f32::NAN).refused("`llama.rope.freq_base` is NaN, must be finite");
    let mut without = model();
    without.tensors = Few::default();
    without.refused("the tensor `token_embd.weight` is missing");
    Model::decoder("rwkv6")
        .refused("`general.architecture` is `rwkv6`, which is not supported; known: llama, qwen2, qwen2moe,");
}

#[test]
fn scaling_of_rotary_positions_is_converted() {
    let scaling = |model: Model| model.config()["rope_scaling"].clone();
    let linear = || Model::decoder("llama").number("rope.scaling.factor", 4.0);
    let expected = json!({ "rope_type": "linear", "factor": 4.0 });
    assert_eq!(scaling(linear()), expected);
    assert_eq!(scaling(linear().text("rope.scaling.type", "linear")), expected);
    assert_eq!(scaling(Model::decoder("llama").number("rope.scale_linear", 4.0)), expected);
    assert_eq!(scaling(linear().text("rope.scaling.type", "none")), Json::Null);
    assert_eq!(scaling(Model::decoder("llama").number("rope.scaling.factor", 0.0)), Json::Null);

    let yarn = || {
        linear().text("rope.scaling.type", "yarn").sizes(&[("rope.scaling.original_context_length", 2048)])
    };
    let expected = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
    "beta_fast": 16.0 });
    assert_eq!(scaling(yarn().number("rope.scaling.yarn_beta_fast", 16.0)), expected);
    // Both attention factors are multiplied, and a missing one has the paper's value.
    let attention =
        |model: Model| scaling(model.number("rope.scaling.attn_factor", 0.5))["attention_factor"].clone();
    assert_eq!(attention(yarn().number("rope.scaling.yarn_attn_factor", 3.0)), json!(1.5));
    let usual = attention(yarn()).as_f64().unwrap();
    assert!((usual - 0.5 * (0.1 * 4f64.ln() + 1.0)).abs() < 1e-9, "{usual}");
    // Other types express it as frequency factors.
    for (model, factor) in [(Model::decoder("llama"), 1.0), (linear(), 4.0)] {
        let expected = json!({
            "rope_type": "longrope", "short_factor": ([factor; 8]), "long_factor": ([factor; 8]),
            "original_max_position_embeddings": 8192, "attention_factor": 0.5,
        });
        assert_eq!(scaling(model.number("rope.scaling.attn_factor", 0.5)), expected);
    }
    assert_eq!(
        scaling(linear().number("rope.scaling.attn_factor", 1.0)),
        json!({ "rope_type": "linear", "factor": 4.0 })
    );
    linear().number("rope.scaling.attn_factor", 0.0).refused("is 0, must be positive");
    yarn().number("rope.scaling.yarn_ext_factor", 0.5).refused("is 0.5, and only 1 is supported");
    Model::decoder("llama")
        .text("rope.scaling.type", "yarn")
        .refused("`llama.rope.scaling.factor` is missing");
    linear()
        .text("rope.scaling.type", "ntk")
        .refused("is `ntk`, which is unknown; known: none, linear, yarn, longrope");
    Model::decoder("llama")
        .text("rope.scaling.type", "longrope")
        .refused("is `longrope`, which does not fit the factors that the file has: none");
    linear()
        .vector("rope_freqs.weight", vec![1.0; 8])
        .refused("does not fit the factors that the file has: rope_freqs.weight");
    yarn().vector("rope_factors_long.weight", vec![1.0; 8]).refused("does not fit");
}

#[test]
fn partial_rotary_factors_give_back_the_number_of_dimensions() {
    // For each fraction, the model computes the original number of dimensions again.
    for (size, rotated) in (1..=256).flat_map(|size| (1..size).map(move |rotated| (size, rotated))) {
        let model = Model::decoder("phi3")
            .sizes(&[("attention.key_length", size), ("rope.dimension_count", rotated)]);
        let share = model.config()["partial_rotary_factor"].as_f64().unwrap();
        assert_eq!((f64::from(size) * share) as u32, rotated, "{rotated} of {size}");
    }
    assert_eq!(
        Model::decoder("phi3").sizes(&[("rope.dimension_count", 16)]).config().get("partial_rotary_factor"),
        None
    );
    Model::decoder("phi3")
        .sizes(&[("rope.dimension_count", 32)])
        .refused("is 32, must be between 1 and the 16 dimensions");
}

/// The factors of Llama 3.1, as the converter computes them: in float32, with a head of 16 dimensions and
/// base 500,000.
const LLAMA_3_1: [f32; 8] = [1.0, 1.0, 1.0, 1.0, 2.69453, 8.0, 8.0, 8.0];

#[test]
fn rotary_factors_of_llama_3_are_recognised_in_a_tensor() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let scaling = |factors: &[f32]| {
        Model::decoder("llama").vector("rope_freqs.weight", factors.to_vec()).config()["rope_scaling"].clone()
    };
    assert_eq!(scaling(&LLAMA_3_1), llama3);

    // A head of 128 dimensions has some intermediate factors.
    let size = 128;
    let factors: Vec<f32> = (0..size / 2)
        .map(|i| {
            let frequency = 1.0 / 500_000_f32.powf((2 * i) as f32 / size as f32);
            let wavelength = 2.0 * std::f32::consts::PI / frequency;
            match wavelength {
                short if short < 8192.0 / 4.0 => 1.0,
                long if long > 8192.0 => 32.0,
                _ => {
                    let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
                    1.0 / ((1.0 - smooth) / 32.0 + smooth)
                }
            }
        })
        .collect();
    assert!(factors.iter().any(|factor| *factor > 1.0 && *factor < 32.0));
    let wide =
        Model::decoder("llama").sizes(&[("attention.key_length", 128)]).vector("rope_freqs.weight", factors);
    assert_eq!(wide.config()["rope_scaling"]["factor"], 32.0);

    // Other factors are passed on unchanged.
    let mut other = LLAMA_3_1;
    other[4] = 1.5;
    let factors = other.map(f64::from);
    let long = json!({
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.0,
    });
    assert_eq!(scaling(&other), long);
    for factors in [vec![1.0; 7], vec![0.0; 8], vec![f32::NAN; 8]] {
        Model::decoder("llama")
            .vector("rope_freqs.weight", factors)
            .refused("the tensor `rope_freqs.weight` must have 8 positive numbers");
    }
}

#[test]
fn configs_of_qwen_models_are_converted() {
    assert_eq!(Model::decoder("qwen2").config(), expected("qwen2", json!({})));
    assert_eq!(Model::decoder("qwen3").config(), expected("qwen3", json!({ "attention_bias": false })));

    let experts = |architecture| {
        Model::decoder(architecture)
            .sizes(&[("expert_count", 8), ("expert_used_count", 2), ("expert_feed_forward_length", 48)])
            .tensor("blk.0.ffn_gate_inp.weight", &[8, 64])
            .tensor("blk.0.attn_q.bias", &[64])
    };
    let both = json!({
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    });
    let with = |more: Json| {
        let mut both = both.clone();
        both.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        both
    };
    let model = experts("qwen2moe").sizes(&[("expert_shared_feed_forward_length", 96)]);
    let more =
        with(json!({ "norm_topk_prob": false, "shared_expert_intermediate_size": 96, "qkv_bias": true }));
    assert_eq!(model.config(), expected("qwen2_moe", more));
    let more = with(json!({ "norm_topk_prob": true, "attention_bias": true }));
    assert_eq!(experts("qwen3moe").config(), expected("qwen3_moe", more));
    Model::decoder("qwen3moe").refused("`qwen3moe.expert_used_count` is missing");
}

#[test]
fn long_and_short_factors_of_phi_3_are_converted() {
    let plain = json!({ "original_max_position_embeddings": 8192, "sliding_window": null });
    assert_eq!(
        Model::decoder("phi3").sizes(&[("attention.sliding_window", 0)]).config(),
        expected("phi3", plain)
    );
    let model = Model::decoder("phi3")
        .sizes(&[("attention.sliding_window", 2047), ("rope.scaling.original_context_length", 4096)])
        .number("rope.scaling.attn_factor", 1.25)
        .vector("rope_factors_short.weight", vec![1.0; 8])
        .vector("rope_factors_long.weight", vec![2.0; 8]);
    let long = json!({
        "original_max_position_embeddings": 4096,
        "sliding_window": 2047,
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": ([1.0; 8]), "long_factor": ([2.0; 8]),
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
        },
    });
    assert_eq!(model.config(), expected("phi3", long));
}

#[test]
fn configs_of_gemma_models_are_converted() {
    let both = json!({ "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false });
    assert_eq!(Model::decoder("gemma").config(), expected("gemma", both.clone()));

    let more = json!({
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 25.0, "sliding_window": 4096, "layer_types": ["sliding_attention",
        "full_attention"],
    });
    assert_eq!(
        Model::decoder("gemma2").number("final_logit_softcapping", 25.0).config(),
        expected("gemma2", more)
    );
    // 27B divides by the square root of `hidden_size / heads`, whatever the head size.
    let largest =
        Model::decoder("gemma2").sizes(&[("block_count", 46), ("attention.key_length", 32)]).config();
    assert_eq!([&largest["query_pre_attn_scalar"], &largest["head_dim"]], [16, 32]);

    let model = || Model::decoder("gemma3").sizes(&[("block_count", 7)]);
    let config =
        model().sizes(&[("attention.sliding_window", 512)]).number("rope.scaling.factor", 8.0).config();
    let [sliding, full] = ["sliding_attention", "full_attention"];
    assert_eq!(config["layer_types"], json!([sliding, sliding, sliding, sliding, sliding, full, sliding]));
    assert_eq!(
        [&config["rope_theta"], &config["rope_local_base_freq"], &config["rope_scaling"]["factor"]],
        [5e5, 1e4, 8.0]
    );
    assert_eq!(
        [&config["model_type"], &config["final_logit_softcapping"]],
        [&json!("gemma3_text"), &Json::Null]
    );
    assert_eq!(model().config()["layer_types"], json!(vec![full; 7]));

    let listed = |list: Vec<bool>| {
        Model::decoder("gemma3").set("attention.sliding_window_pattern", Stored::Array(Array::Bool(list)))
    };
    assert_eq!(listed(vec![false, true]).config()["layer_types"], json!([full, sliding]));
    listed(vec![true]).refused("must have a truth value for each of 2 blocks");
}

fn mixers(architecture: &'static str) -> Model {
    Model::decoder(architecture)
        .sizes(&[
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", 128),
            ("ssm.state_size", 16),
            ("ssm.time_step_rank", 6),
        ])
        .tensor("blk.0.ssm_conv1d.bias", &[128])
}

#[test]
fn configs_of_mamba_models_are_converted() {
    let mut config = json!({
        "model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 1000,
        "tie_word_embeddings": true,
        "state_size": 16, "conv_kernel": 4, "time_step_rank": 6, "expand": 2, "layer_norm_epsilon": 0.5,
        "use_bias": false, "use_conv_bias": true,
    });
    assert_eq!(mixers("mamba").config(), config);
    config["model_type"] = "falcon_mamba".into();
    config["mixer_rms_eps"] = 1e-6.into();
    assert_eq!(mixers("mamba").set("ssm.dt_b_c_rms", Stored::Bool(true)).config(), config);
    mixers("mamba")
        .sizes(&[("ssm.inner_size", 100)])
        .refused("is 100, which is no multiple of `embedding_length` 64");
}

#[test]
fn periods_of_jamba_blocks_are_converted() {
    let model = |heads: &[i32]| {
        let model =
            mixers("jamba").sizes(&[("block_count", 5), ("expert_count", 8), ("expert_used_count", 2)]);
        model.list("attention.head_count_kv", heads)
    };
    let mixing = model(&[0, 0, 2, 0, 0])
        .tensor("blk.1.ffn_gate_inp.weight", &[8, 64])
        .tensor("blk.3.ffn_gate_inp.weight", &[8, 64]);
    let config = json!({
        "model_type": "jamba", "num_hidden_layers": 5, "hidden_size": 64, "vocab_size": 1000,
        "tie_word_embeddings": true,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 0.5, "num_experts": 8, "num_experts_per_tok": 2, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_dt_rank": 6,
        "mamba_expand": 2, "mamba_conv_bias": true, "mamba_proj_bias": false, "attn_layer_period": 5,
        "attn_layer_offset": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    });
    assert_eq!(mixing.config(), config);
    assert_eq!(model(&[0; 5]).config()["num_experts"], 1);
    model(&[2, 0, 2, 2, 0]).refused("no `attn_layer_period` and `attn_layer_offset` describe");
    model(&[2, 0, 1, 0, 2]).refused("differs between blocks of attention");
}

#[test]
fn a_period_is_found_only_if_it_describes_all_blocks() {
    let flags = |text: &str| text.chars().map(|c| c == 'x').collect::<Vec<_>>();
    for (text, expected) in [
        ("..", Some((3, 2))),
        ("x", Some((1, 0))),
        ("xx", Some((1, 0))),
        (".x.", Some((3, 1))),
        (".x..x.", Some((3, 1))),
        ("x..x..x", Some((3, 0))),
        ("..xx", None),
        ("x.xx", None),
        (".x..", Some((4, 1))),
    ] {
        assert_eq!(every(&flags(text)), expected, "{text}");
    }
}
