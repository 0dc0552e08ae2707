//! Differences between the architectures: one function each, in the order of `LLM_ARCH_NAMES`. Models with
//! states are in [`hybrids`].

use serde_json::{Value, json};

use super::{FACTORS, Fields, File, fields, hybrids};
use crate::{Error, gguf::shown};

type Config = fn(&mut File<'_>) -> Result<Fields, Error>;

/// All supported architectures, by their GGUF names.
pub(super) static ARCHITECTURES: &[(&str, Config)] = &[
    ("llama", llama),
    ("qwen2", qwen2),
    ("qwen2moe", qwen2_moe),
    ("qwen3", qwen3),
    ("qwen3moe", qwen3_moe),
    // Models of text and images. Their text models are the ones without images.
    ("qwen2vl", qwen2),
    ("qwen3vl", qwen3),
    ("qwen3vlmoe", qwen3_moe),
    ("phi3", phi3),
    ("gemma", gemma),
    ("gemma2", gemma2),
    ("gemma3", gemma3),
    ("gemma4", gemma4),
    ("starcoder2", starcoder2),
    ("mamba", hybrids::mamba),
    ("jamba", hybrids::jamba),
    ("gpt2", gpt2),
    ("gptneox", gpt_neox),
    ("phi2", phi),
    ("olmo2", olmo2),
    ("cohere2", cohere2),
    ("glm4", glm4),
    ("glm4moe", glm4_moe),
    ("exaone4", exaone4),
    ("granite", granite),
    ("ernie4_5", ernie4_5),
    ("smollm3", smollm3),
    ("gpt-oss", gpt_oss),
    ("seed_oss", seed_oss),
    ("mistral3", mistral3),
    ("deepseek2", deepseek_2),
    ("llama4", llama4),
    ("qwen3next", hybrids::qwen3_next),
    ("qwen35", hybrids::qwen3_5),
    ("qwen35moe", hybrids::qwen3_5_moe),
    ("lfm2", hybrids::lfm2),
    ("lfm2moe", hybrids::lfm2_moe),
    ("mamba2", hybrids::mamba2),
    ("granitehybrid", hybrids::granite_hybrid),
    ("falcon-h1", hybrids::falcon_h1),
    ("nemotron_h", hybrids::nemotron_h),
    ("nemotron_h_moe", hybrids::nemotron_h),
    ("bert", bert),
];

/// Reads Llama, Mistral or Mixtral, which share one name.
fn llama(file: &mut File<'_>) -> Result<Fields, Error> {
    let window = file.window()?;
    let experts = file.unsigned("expert_count")?.filter(|experts| *experts > 0);
    let bias = file.has("blk.0.attn_output.bias");
    if bias != file.has("blk.0.attn_q.bias") {
        let why = "has biases in only some projections of attention, which `llama` in config.json cannot say";
        return Err(Error::Metadata { key: "general.architecture".to_owned(), why: why.to_owned() });
    }
    let mut config = file.decoder(match (experts, window) {
        (Some(_), _) => "mixtral",
        (None, Some(_)) => "mistral",
        (None, None) => "llama",
    })?;
    config.extend(file.rope()?);
    config.extend(window.map(|window| ("sliding_window".to_owned(), window.into())));
    let Some(experts) = experts else {
        config.extend(fields([
            ("attention_bias", bias.into()),
            ("mlp_bias", file.has("blk.0.ffn_gate.bias").into()),
        ]));
        return Ok(config);
    };
    if !file.has("blk.0.ffn_gate_exps.weight") {
        let why =
            "is not 0, and there is no `ffn_gate_exps`: files of 2023 have experts apart; convert again";
        return Err(file.wrong("expert_count", why));
    }
    let chosen = file.chosen_experts()?;
    config.extend(fields([("num_local_experts", experts.into()), ("num_experts_per_tok", chosen.into())]));
    Ok(config)
}

/// Reads BERT. Files of RoBERTa have the same name, and another tokenizer.
fn bert(file: &mut File<'_>) -> Result<Fields, Error> {
    const TYPES: &str = "token_types.weight";
    const TOKENIZER: &str = "tokenizer.ggml.model";
    let tokenizer = file.metadata.text(TOKENIZER)?;
    if let Some(other) = tokenizer.filter(|name| !matches!(*name, "bert" | "none" | "no_vocab")) {
        let why = format!("is {}, as in files of RoBERTa; of encoders only BERT is supported", shown(other));
        return Err(Error::Metadata { key: TOKENIZER.to_owned(), why });
    }
    let mut config = file.layer_normed("bert", "layer_norm_eps")?;
    config.remove("num_key_value_heads");
    config.remove("head_dim");
    let types = file.tensors.shape(TYPES).and_then(|shape| shape.first().copied());
    let types = types.ok_or_else(|| {
        Error::Damaged(format!(
            "the tensor `{TYPES}` is missing; DistilBERT, which has none, is not supported"
        ))
    })?;
    config.extend(fields([("type_vocab_size", types.into()), ("hidden_act", "gelu".into())]));
    Ok(config)
}

fn qwen2(file: &mut File<'_>) -> Result<Fields, Error> {
    // The converter drops the window, and the models' configs turn it off.
    let mut config = file.decoder("qwen2")?;
    config.extend(file.rope()?);
    Ok(config)
}

fn qwen2_moe(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("qwen2_moe")?;
    config.extend(file.rope()?);
    config.extend(file.qwen_experts(false)?);
    let shared = "expert_shared_feed_forward_length";
    let shared = file
        .unsigned(shared)?
        .or(file.uniform("feed_forward_length")?)
        .ok_or_else(|| file.missing(shared))?;
    config.extend(fields([
        ("shared_expert_intermediate_size", shared.into()),
        ("qkv_bias", file.has("blk.0.attn_q.bias").into()),
    ]));
    Ok(config)
}

fn qwen3(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("qwen3")?;
    config.extend(file.rope()?);
    config.insert("attention_bias".to_owned(), file.has("blk.0.attn_q.bias").into());
    Ok(config)
}

fn qwen3_moe(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = qwen3(file)?;
    config.insert("model_type".to_owned(), "qwen3_moe".into());
    config.extend(file.qwen_experts(true)?);
    Ok(config)
}

fn phi3(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("phi3")?;
    config.extend(file.rope()?);
    let trained = file.unsigned("rope.scaling.original_context_length")?.or(file.unsigned("context_length")?);
    config.extend(trained.map(|trained| ("original_max_position_embeddings".to_owned(), trained.into())));
    config.insert("sliding_window".to_owned(), file.window()?.into());
    Ok(config)
}

fn gemma(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("gemma")?;
    config.extend(file.rope()?);
    config.extend(fields([
        ("hidden_activation", "gelu_pytorch_tanh".into()),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
    ]));
    Ok(config)
}

fn gemma2(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = gemma(file)?;
    let cap = |key: &str, default: f64| Ok::<_, Error>(file.number(key)?.unwrap_or(default));
    config.extend(fields([
        ("model_type", "gemma2".into()),
        ("query_pre_attn_scalar", file.query_scalar(46)?.into()),
        ("attn_logit_softcapping", cap("attn_logit_softcapping", 50.0)?.into()),
        ("final_logit_softcapping", cap("final_logit_softcapping", 30.0)?.into()),
        ("sliding_window", file.window()?.unwrap_or(4096).into()),
        ("layer_types", file.layer_types(2)?),
    ]));
    Ok(config)
}

fn gemma3(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = gemma(file)?;
    let window = file.window()?;
    if file.attention()? != 1.0 {
        let why = "is not 1, which is not supported for an architecture with two kinds of rotary positions";
        return Err(file.wrong("rope.scaling.attn_factor", why));
    }
    config.extend(fields([
        ("model_type", "gemma3_text".into()),
        ("query_pre_attn_scalar", file.query_scalar(62)?.into()),
        ("final_logit_softcapping", file.number("final_logit_softcapping")?.filter(|cap| *cap != 0.0).into()),
        ("sliding_window", window.into()),
        ("layer_types", file.layer_types(if window.is_some() { 6 } else { 1 })?),
        // Blocks with a window are not stretched.
        ("rope_local_base_freq", file.number("rope.freq_base_swa")?.unwrap_or(1e4).into()),
    ]));
    Ok(config)
}

fn gemma4(file: &mut File<'_>) -> Result<Fields, Error> {
    const HEADS: &str = "attention.head_count";
    const PER_LAYER: &str = "embedding_length_per_layer_input";
    let layers = file.layers()?;
    let heads = file.uniform(HEADS)?.ok_or_else(|| file.missing(HEADS))?;
    let kv_heads = file.of_layers("attention.head_count_kv")?.unwrap_or_else(|| vec![heads; layers as usize]);
    let of_full = file.head_dim()?;
    let of_windows = file.needed("attention.key_length_swa")?;
    let stretched = file.number("rope.scaling.factor")?.or(file.number("rope.scale_linear")?);
    let kind = file.metadata.text(&file.key("rope.scaling.type"))?.unwrap_or("none");
    if stretched.is_some_and(|factor| factor != 0.0 && factor != 1.0)
        || !["none", "linear"].contains(&kind)
        || file.attention()? != 1.0
    {
        return Err(file.wrong("rope.scaling", "stretches positions, which is not supported for Gemma 4"));
    }
    if file.unsigned("rope.dimension_count")?.is_some_and(|rotated| rotated != of_full) {
        return Err(file.wrong("rope.dimension_count", format!("is not {of_full}, the size of heads")));
    }
    if file.unsigned("attention.value_length_swa")?.is_some_and(|values| values != of_windows) {
        return Err(file.wrong("attention.value_length_swa", "is not that of keys, which is not supported"));
    }
    let types = file.layer_types(6)?;
    let is_full: Vec<bool> = types
        .as_array()
        .map_or(Vec::new(), |types| types.iter().map(|kind| kind == "full_attention").collect());
    let of_window = kv_heads.iter().zip(&is_full).find_map(|(heads, full)| (!full).then_some(*heads));
    let of_window = of_window.unwrap_or(kv_heads[0]);
    let own = |i: usize| match kv_heads[i] == of_window {
        true => json!({ "head_dim": of_full }),
        false => json!({ "head_dim": of_full, "num_key_value_heads": kv_heads[i] }),
    };
    let full = (0..is_full.len()).filter(|i| is_full[*i]);
    let of_blocks: Fields = full.map(|i| (i.to_string(), own(i))).collect();

    // Blocks that attend to the keys of others may have feed-forwards of twice the width.
    let shared = file.unsigned("attention.shared_kv_layers")?.unwrap_or(0);
    let first = layers.checked_sub(shared).filter(|first| *first > 0);
    let first = first.ok_or_else(|| file.wrong("attention.shared_kv_layers", "leaves no block with keys"))?;
    let widths = file.of_layers("feed_forward_length")?.ok_or_else(|| file.missing("feed_forward_length"))?;
    let (before, after) = widths.split_at(first as usize);
    let width = before[0];
    let twice = width.saturating_mul(2);
    let doubled = after.first().is_some_and(|other| *other == twice);
    let wide = if doubled { twice } else { width };
    if before.iter().any(|other| *other != width) || after.iter().any(|other| *other != wide) {
        let why = "differs between blocks in another way than by sharing keys, which is not supported";
        return Err(file.wrong("feed_forward_length", why));
    }
    let values = file.blocks_with("attn_v.weight")?;
    let keys = file.blocks_with("attn_k.weight")?;
    let are_keys = |i: usize| keys.get(i) == Some(&true) && values.get(i) == Some(&false);
    if (0..first as usize).any(|i| !is_full[i] && are_keys(i)) {
        let why = "of a block with a window is missing, and only other blocks have values that are keys";
        return Err(Error::Damaged(format!("the tensor `attn_v` {why}")));
    }
    let per_layer = file.unsigned(PER_LAYER)?.unwrap_or(0);
    let table = file.tensors.shape("per_layer_token_embd.weight").and_then(|shape| shape.first().copied());
    let number = |key: &str| file.number(key);
    let bases = [number("rope.freq_base")?.unwrap_or(1e6), number("rope.freq_base_swa")?.unwrap_or(1e4)];
    let softcap = number("final_logit_softcapping")?.filter(|cap| *cap != 0.0);
    let rotated = match file.unsigned("rope.dimension_count_swa")? {
        Some(rotated) if rotated > of_windows => {
            return Err(file.wrong("rope.dimension_count_swa", format!("is more than {of_windows}")));
        }
        Some(rotated) if rotated < of_windows => Some(rotated as f64 / of_windows as f64),
        _ => None,
    };
    // The frequencies of pairs that are not rotated are divided by 1e30.
    let share = match file.has(FACTORS[0]) {
        false => 1.0,
        true => {
            let factors = file.tensors.numbers(FACTORS[0])?;
            let pairs = factors.iter().take_while(|factor| **factor == 1.0).count();
            let is_proportional = factors[pairs..].iter().all(|factor| *factor >= 1e20);
            if !is_proportional || factors.len() as u64 != of_full / 2 {
                return Err(Error::Damaged("the tensor `rope_freqs` is none of Gemma 4".to_owned()));
            }
            pairs as f64 / factors.len() as f64
        }
    };
    let mut sliding = json!({ "rope_type": "default", "rope_theta": bases[1] });
    if let Some(rotated) = rotated {
        sliding["partial_rotary_factor"] = rotated.into();
    }
    let mut config = file.model("gemma4_text")?;
    config.extend(fields([
        ("num_attention_heads", heads.into()),
        ("num_key_value_heads", of_window.into()),
        ("head_dim", of_windows.into()),
        ("per_layer_config", of_blocks.into()),
        ("intermediate_size", width.into()),
        ("use_double_wide_mlp", doubled.into()),
        ("rms_norm_eps", file.eps()?.into()),
        ("hidden_activation", "gelu_pytorch_tanh".into()),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
        ("attention_k_eq_v", (0..first as usize).any(are_keys).into()),
        ("num_kv_shared_layers", shared.into()),
        ("final_logit_softcapping", softcap.into()),
        ("sliding_window", file.needed("attention.sliding_window")?.into()),
        ("layer_types", types),
        ("hidden_size_per_layer_input", per_layer.into()),
        (
            "rope_parameters",
            json!({
                "sliding_attention": sliding,
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": bases[0],
                },
            }),
        ),
    ]));
    config.extend(table.map(|rows| ("vocab_size_per_layer_input".to_owned(), rows.into())));
    let positions = file.unsigned("context_length")?;
    config.extend(positions.map(|positions| ("max_position_embeddings".to_owned(), positions.into())));
    if let Some(experts) = file.unsigned("expert_count")?.filter(|experts| *experts > 0) {
        config.extend(fields([
            ("enable_moe_block", true.into()),
            ("num_experts", experts.into()),
            ("top_k_experts", file.chosen_experts()?.into()),
            ("moe_intermediate_size", file.needed("expert_feed_forward_length")?.into()),
        ]));
    }
    Ok(config)
}

fn smollm3(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("smollm3")?;
    config.extend(file.rope()?);
    // llama.cpp hard-codes the period.
    config.extend(fields([
        ("no_rope_layer_interval", 4.into()),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
        ("mlp_bias", file.has("blk.0.ffn_gate.bias").into()),
    ]));
    Ok(config)
}

/// Reads OLMo 2 or OLMo 3, which share one name; the latter has windows.
fn olmo2(file: &mut File<'_>) -> Result<Fields, Error> {
    let window = file.window()?;
    let mut config = file.decoder(if window.is_some() { "olmo3" } else { "olmo2" })?;
    let mut rope = file.rope()?;
    config.insert("attention_bias".to_owned(), file.has("blk.0.attn_q.bias").into());
    let Some(window) = window else {
        config.extend(rope);
        return Ok(config);
    };
    let theta = rope.remove("rope_theta").unwrap_or_default();
    let mut full = match rope.remove("rope_scaling") {
        Some(Value::Object(scaling)) => scaling,
        _ => fields([("rope_type", "default".into())]),
    };
    full.insert("rope_theta".to_owned(), theta.clone());
    // Blocks with a window are not stretched.
    let local = file.number("rope.freq_base_swa")?.map_or(theta, Value::from);
    let sliding = fields([("rope_type", "default".into()), ("rope_theta", local)]);
    config.extend(fields([
        ("sliding_window", window.into()),
        ("layer_types", file.layer_types(4)?),
        (
            "rope_parameters",
            fields([("full_attention", full.into()), ("sliding_attention", sliding.into())]).into(),
        ),
    ]));
    Ok(config)
}

fn exaone4(file: &mut File<'_>) -> Result<Fields, Error> {
    let window = file.window()?;
    let mut config = file.decoder("exaone4")?;
    config.extend(file.rope()?);
    let types = file.layer_types(if window.is_some() { 4 } else { 1 })?;
    config.extend(fields([("sliding_window", window.into()), ("layer_types", types)]));
    Ok(config)
}

fn granite(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("granite")?;
    config.extend(file.rope()?);
    config.extend(file.granite_factors()?);
    config.extend(fields([
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
        ("mlp_bias", file.has("blk.0.ffn_gate.bias").into()),
    ]));
    Ok(config)
}

fn cohere2(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.layer_normed("cohere2", "layer_norm_eps")?;
    config.extend(file.rope()?);
    config.extend(fields([
        ("logit_scale", file.number("logit_scale")?.unwrap_or(1.0).into()),
        ("sliding_window", file.window()?.into()),
        ("layer_types", file.layer_types(4)?),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
    ]));
    Ok(config)
}

fn glm4(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("glm4")?;
    config.extend(whole_share(file.rope()?));
    config.insert("attention_bias".to_owned(), file.has("blk.0.attn_q.bias").into());
    Ok(config)
}

fn glm4_moe(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("glm4_moe")?;
    config.extend(whole_share(file.rope()?));
    file.read_layers(&mut config)?;
    file.only_sigmoid()?;
    config.extend(fields([
        ("n_routed_experts", file.needed("expert_count")?.into()),
        ("num_experts_per_tok", file.experts_a_token()?.into()),
        ("n_group", file.unsigned("expert_group_count")?.unwrap_or(1).into()),
        ("topk_group", file.unsigned("expert_group_used_count")?.unwrap_or(1).into()),
        ("moe_intermediate_size", file.needed("expert_feed_forward_length")?.into()),
        ("n_shared_experts", file.unsigned("expert_shared_count")?.unwrap_or(0).into()),
        ("first_k_dense_replace", file.unsigned("leading_dense_block_count")?.unwrap_or(0).into()),
        (
            "routed_scaling_factor",
            file.number("expert_weights_scale")?.filter(|s| *s != 0.0).unwrap_or(1.0).into(),
        ),
        ("norm_topk_prob", file.metadata.boolean(&file.key("expert_weights_norm"))?.unwrap_or(false).into()),
        ("use_qk_norm", file.has("blk.0.attn_q_norm.weight").into()),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
    ]));
    Ok(config)
}

fn starcoder2(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.layer_normed("starcoder2", "norm_epsilon")?;
    config.extend(file.rope()?);
    // The converter drops the window.
    config.insert("use_bias".to_owned(), file.has("blk.0.attn_q.bias").into());
    Ok(config)
}

fn phi(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.layer_normed("phi", "layer_norm_eps")?;
    config.extend(whole_share(file.rope()?));
    config.insert("qk_layernorm".to_owned(), file.has("blk.0.attn_q_norm.weight").into());
    Ok(config)
}

fn gpt2(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.layer_normed("gpt2", "layer_norm_epsilon")?;
    let inner = config.remove("intermediate_size").unwrap_or_default();
    config.retain(|name, _| !matches!(&**name, "num_key_value_heads" | "head_dim"));
    config.extend(fields([("n_inner", inner), ("activation_function", "gelu_new".into())]));
    Ok(config)
}

fn gpt_neox(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.layer_normed("gpt_neox", "layer_norm_eps")?;
    config.extend(whole_share(file.rope()?));
    config.retain(|name, _| !matches!(&**name, "num_key_value_heads" | "head_dim"));
    let parallel = file.metadata.boolean(&file.key("use_parallel_residual"))?.unwrap_or(true);
    config.extend(fields([
        ("use_parallel_residual", parallel.into()),
        ("attention_bias", file.has("blk.0.attn_qkv.bias").into()),
    ]));
    Ok(config)
}

fn ernie4_5(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("ernie4_5")?;
    config.extend(file.rope()?);
    config.insert("use_bias".to_owned(), file.has("blk.0.attn_q.bias").into());
    Ok(config)
}

fn gpt_oss(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("gpt_oss")?;
    let mut rope = file.rope()?;
    if let Some(Value::Object(scaling)) = rope.get_mut("rope_scaling") {
        // All published models round no limits of frequencies, and GGUF has no key for it.
        scaling.insert("truncate".to_owned(), false.into());
    }
    config.extend(rope);
    config.extend(fields([
        ("intermediate_size", file.needed("expert_feed_forward_length")?.into()),
        ("num_local_experts", file.needed("expert_count")?.into()),
        ("num_experts_per_tok", file.chosen_experts()?.into()),
        ("sliding_window", file.window()?.into()),
        ("layer_types", file.layer_types(2)?),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
    ]));
    Ok(config)
}

fn seed_oss(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("seed_oss")?;
    config.extend(file.rope()?);
    config.extend(fields([
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
        ("attention_out_bias", file.has("blk.0.attn_output.bias").into()),
        ("mlp_bias", file.has("blk.0.ffn_gate.bias").into()),
    ]));
    Ok(config)
}

/// Reads Mistral Small 3 or Ministral 3, which share one name; the queries of the latter grow with their
/// position.
fn mistral3(file: &mut File<'_>) -> Result<Fields, Error> {
    const GROWTH: &str = "attention.temperature_scale";
    let growth = file.number(GROWTH)?.filter(|growth| *growth != 0.0);
    let mut config = file.decoder(if growth.is_some() { "ministral3" } else { "mistral" })?;
    config.extend(file.rope_with(&["rope.scaling.yarn_log_multiplier"])?);
    config.insert("sliding_window".to_owned(), file.window()?.into());
    let Some(growth) = growth else { return Ok(config) };
    let theta = config.remove("rope_theta").unwrap_or_default();
    let Some(Value::Object(scaling)) = config.get_mut("rope_scaling") else {
        return Err(file.wrong(GROWTH, "is there, and positions are not stretched by YaRN"));
    };
    let multiplier = file.number("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
    scaling.extend(fields([
        ("rope_theta", theta),
        ("llama_4_scaling_beta", growth.into()),
        ("mscale", 1.0.into()),
        ("mscale_all_dim", multiplier.into()),
    ]));
    Ok(config)
}

/// Reads DeepSeek-V2, V3 or GLM-4.7-Flash, which share one name. Experts of the first are chosen by softmax,
/// and without a correction.
fn deepseek_2(file: &mut File<'_>) -> Result<Fields, Error> {
    const LOG: &str = "rope.scaling.yarn_log_multiplier";
    const GATING: &str = "expert_gating_func";
    const HEADS: &str = "attention.head_count";
    const KV_HEADS: &str = "attention.head_count_kv";
    if file.uniform(KV_HEADS)?.is_some_and(|heads| heads != 1) {
        let why = "is not 1: files of before 2025 have the keys of all heads; convert again";
        return Err(file.wrong(KV_HEADS, why));
    }
    let is_softmax = match file.unsigned(GATING)? {
        None => !file.blocks_with("exp_probs_b.bias")?.contains(&true),
        Some(1) => true,
        Some(2) => false,
        Some(other) => {
            return Err(file.wrong(GATING, format!("is {other}; known: 1, the softmax, and 2, the sigmoid")));
        }
    };
    let heads = file.uniform(HEADS)?.ok_or_else(|| file.missing(HEADS))?;
    let [whole, rotated] = [file.needed("attention.key_length_mla")?, file.needed("rope.dimension_count")?];
    let plain = whole.checked_sub(rotated).filter(|plain| *plain > 0);
    let plain =
        plain.ok_or_else(|| file.wrong("rope.dimension_count", format!("is not less than {whole}")))?;
    let mut config = file.model(if is_softmax { "deepseek_v2" } else { "deepseek_v3" })?;
    config.extend(file.rope_of(rotated, &[LOG])?);
    if let Some(Value::Object(scaling)) = config.get_mut("rope_scaling")
        && let Some(multiplier) = file.number(LOG)?
    {
        // The converter writes a tenth of the number, in float32.
        let magnitude = (multiplier * 1e7).round() / 1e6;
        scaling.extend(fields([("mscale", magnitude.into()), ("mscale_all_dim", magnitude.into())]));
    }
    let layers = file.read_layers(&mut config)? as usize;
    let mixes = file.blocks_with("ffn_gate_inp.weight")?;
    let dense = mixes.iter().take_while(|mixes| !**mixes).count();
    if mixes.iter().take(layers).skip(dense).any(|mixes| !mixes) {
        let why = "leaves blocks without experts after others, which is not supported";
        return Err(file.wrong("leading_dense_block_count", why));
    }
    let [groups, chosen] = ["expert_group_count", "expert_group_used_count"].map(|key| file.unsigned(key));
    let (groups, chosen) = (groups?.unwrap_or(1), chosen?.unwrap_or(1));
    let scale = file.number("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0);
    let normalised = file.metadata.boolean(&file.key("expert_weights_norm"))?.unwrap_or(false);
    config.extend(fields([
        ("num_attention_heads", heads.into()),
        ("num_key_value_heads", heads.into()),
        ("intermediate_size", file.uniform("feed_forward_length")?.into()),
        ("rms_norm_eps", file.eps()?.into()),
        ("q_lora_rank", file.unsigned("attention.q_lora_rank")?.filter(|rank| *rank > 0).into()),
        ("kv_lora_rank", file.needed("attention.kv_lora_rank")?.into()),
        ("qk_nope_head_dim", plain.into()),
        ("qk_rope_head_dim", rotated.into()),
        ("v_head_dim", file.needed("attention.value_length_mla")?.into()),
        // The converter transposes the projection to keys.
        ("absorbs_keys", true.into()),
        ("n_routed_experts", file.needed("expert_count")?.into()),
        ("num_experts_per_tok", file.experts_a_token()?.into()),
        ("moe_intermediate_size", file.uniform("expert_feed_forward_length")?.into()),
        ("n_shared_experts", file.unsigned("expert_shared_count")?.unwrap_or(0).into()),
        ("first_k_dense_replace", dense.into()),
        ("routed_scaling_factor", scale.into()),
    ]));
    let positions = file.unsigned("context_length")?;
    config.extend(positions.map(|positions| ("max_position_embeddings".to_owned(), positions.into())));
    match is_softmax {
        true if normalised => {
            Err(file.wrong("expert_weights_norm", "is true, which DeepSeek-V2 does not have"))
        }
        true if groups > 1 => {
            config.extend(fields([
                ("topk_method", "group_limited_greedy".into()),
                ("n_group", groups.into()),
                ("topk_group", chosen.into()),
            ]));
            Ok(config)
        }
        true => Ok(config),
        false => {
            config.extend(fields([
                ("n_group", groups.into()),
                ("topk_group", chosen.into()),
                ("norm_topk_prob", normalised.into()),
            ]));
            Ok(config)
        }
    }
}

fn llama4(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("llama4_text")?;
    config.extend(file.rope()?);
    let layers = file.layers()?;
    let experts = file.needed("expert_count")?;
    // A window of 0 stands for blocks that see and rotate everything. Otherwise llama.cpp hard-codes the
    // period and the lengths.
    let is_plain = file.unsigned("attention.sliding_window")? == Some(0);
    let rotates = |i: u64| is_plain || !(i + 1).is_multiple_of(4);
    let kind = |i| if rotates(i) && !is_plain { "chunked_attention" } else { "full_attention" };
    let rotating: Vec<u8> = (0..layers).map(|i| rotates(i).into()).collect();
    let dense = config.remove("intermediate_size").unwrap_or_default();
    config.extend(fields([
        ("intermediate_size_mlp", dense),
        ("intermediate_size", file.uniform("expert_feed_forward_length")?.into()),
        ("num_local_experts", experts.into()),
        ("num_experts_per_tok", file.chosen_experts()?.into()),
        ("interleave_moe_layer_step", file.needed("interleave_moe_layer_step")?.into()),
        ("layer_types", (0..layers).map(kind).collect()),
        ("no_rope_layers", rotating.into()),
        ("attention_chunk_size", 8192.into()),
        ("floor_scale", 8192.into()),
        ("attn_scale", 0.1.into()),
        // As llama.cpp tells Scout from Maverick.
        ("use_qk_norm", (experts != 128).into()),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
    ]));
    Ok(config)
}

/// States that all of each head is rotated, for models whose configs say otherwise by default.
pub(super) fn whole_share(mut rope: Fields) -> Fields {
    rope.entry("partial_rotary_factor").or_insert(1.0.into());
    rope
}

impl File<'_> {
    /// Returns the number of blocks that are read, and stores it in `config`. The last blocks may predict
    /// further tokens, and are not read.
    pub(super) fn read_layers(&self, config: &mut Fields) -> Result<u64, Error> {
        const KEY: &str = "nextn_predict_layers";
        let further = self.unsigned(KEY)?.unwrap_or(0);
        let layers = self.layers()?.checked_sub(further).filter(|layers| *layers > 0);
        let layers = layers.ok_or_else(|| self.wrong(KEY, "leaves no block"))?;
        config.insert("num_hidden_layers".to_owned(), layers.into());
        if further > 0 {
            config.insert("num_nextn_predict_layers".to_owned(), further.into());
        }
        Ok(layers)
    }

    /// Checks that experts are chosen by the sigmoids of their logits.
    pub(super) fn only_sigmoid(&self) -> Result<(), Error> {
        const KEY: &str = "expert_gating_func";
        match self.unsigned(KEY)? {
            None | Some(2) => Ok(()),
            Some(other) => Err(self.wrong(KEY, format!("is {other}, and only 2, the sigmoid, is supported"))),
        }
    }

    /// Returns the factors of Granite.
    pub(super) fn granite_factors(&self) -> Result<Fields, Error> {
        let factor =
            |key: &str| Ok::<_, Error>(self.number(key)?.filter(|factor| *factor != 0.0).unwrap_or(1.0));
        let usual = (self.head_dim()? as f64).powf(-0.5);
        let attention = self.number("attention.scale")?.filter(|scale| *scale != 0.0).unwrap_or(usual);
        Ok(fields([
            ("attention_multiplier", attention.into()),
            ("embedding_multiplier", factor("embedding_scale")?.into()),
            ("residual_multiplier", factor("residual_scale")?.into()),
            ("logits_scaling", factor("logit_scale")?.into()),
        ]))
    }

    /// Returns the number of experts per token of a model without groups of experts.
    pub(super) fn chosen_experts(&self) -> Result<u64, Error> {
        const GROUPS: &str = "expert_group_count";
        if self.unsigned(GROUPS)?.is_some_and(|groups| groups > 1) {
            return Err(
                self.wrong(GROUPS, "asks that groups of experts are chosen first, which is not supported")
            );
        }
        self.experts_a_token()
    }

    pub(super) fn experts_a_token(&self) -> Result<u64, Error> {
        self.uniform("expert_used_count")?.ok_or_else(|| self.missing("expert_used_count"))
    }

    /// Returns the fields of Qwen's experts. `normalised` is what llama.cpp hard-codes for the architecture.
    fn qwen_experts(&self, normalised: bool) -> Result<Fields, Error> {
        let chosen = self.chosen_experts()?;
        let width = "expert_feed_forward_length";
        let of_all =
            || Ok::<_, Error>(self.uniform("feed_forward_length")?.and_then(|all| all.checked_div(chosen)));
        let intermediate = self.uniform(width)?.or(of_all()?).ok_or_else(|| self.missing(width))?;
        let mixes = self.blocks_with("ffn_gate_inp.weight")?;
        let dense: Vec<usize> = (0..mixes.len()).filter(|i| mixes.get(*i) == Some(&false)).collect();
        Ok(fields([
            ("num_experts", self.needed("expert_count")?.into()),
            ("num_experts_per_tok", chosen.into()),
            ("moe_intermediate_size", intermediate.into()),
            ("norm_topk_prob", normalised.into()),
            ("decoder_sparse_step", 1.into()),
            ("mlp_only_layers", dense.into()),
        ]))
    }

    /// Returns the kind of attention of each block. If the file does not say, every block except each
    /// `period`-th has a window.
    fn layer_types(&self, period: u64) -> Result<Value, Error> {
        const KEY: &str = "attention.sliding_window_pattern";
        let layers = self.layers()?;
        let stated = self.metadata.get(&self.key(KEY));
        let slides = match stated.and_then(|value| value.as_array()) {
            Some(crate::gguf::Array::Bool(list)) if list.len() as u64 >= layers => list.clone(),
            Some(_) => {
                return Err(self.wrong(
                    KEY,
                    format!("is a list, and must have a truth value for each of {layers} blocks"),
                ));
            }
            None => {
                let period = self.unsigned(KEY)?.unwrap_or(period).max(1);
                (0..layers).map(|i| (i + 1) % period != 0).collect()
            }
        };
        let kind = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
        Ok(slides.iter().take(layers as usize).map(kind).collect())
    }

    /// Returns the number whose square root divides queries. The model with `largest` blocks, 27B, has a
    /// special value, which no key states.
    fn query_scalar(&self, largest: u64) -> Result<u64, Error> {
        let (hidden, heads) = (self.needed("embedding_length")?, self.uniform("attention.head_count")?);
        let own = heads
            .and_then(|heads| hidden.checked_div(heads))
            .filter(|_| self.layers().is_ok_and(|layers| layers == largest));
        own.map_or_else(|| self.head_dim(), Ok)
    }
}
