//! Differences between the architectures: one function each, in the order of `LLM_ARCH_NAMES`.

use serde_json::Value;

use super::{Fields, File, fields};
use crate::Error;

type Config = fn(&mut File<'_>) -> Result<Fields, Error>;

/// All supported architectures, by their GGUF names.
pub(super) static ARCHITECTURES: &[(&str, Config)] = &[
    ("llama", llama),
    ("qwen2", qwen2),
    ("qwen2moe", qwen2_moe),
    ("qwen3", qwen3),
    ("qwen3moe", qwen3_moe),
    ("phi3", phi3),
    ("gemma", gemma),
    ("gemma2", gemma2),
    ("gemma3", gemma3),
    ("mamba", mamba),
    ("jamba", jamba),
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

/// Reads Mamba or Falcon Mamba, which share one name. The latter norms time steps and the vectors that lead
/// into and out of the state.
fn mamba(file: &mut File<'_>) -> Result<Fields, Error> {
    let normed = file.metadata.boolean(&file.key("ssm.dt_b_c_rms"))?.unwrap_or(false);
    let mut config = file.model(if normed { "falcon_mamba" } else { "mamba" })?;
    config.extend(fields([
        ("state_size", file.needed("ssm.state_size")?.into()),
        ("conv_kernel", file.needed("ssm.conv_kernel")?.into()),
        ("time_step_rank", file.needed("ssm.time_step_rank")?.into()),
        ("expand", file.expansion()?.into()),
        ("layer_norm_epsilon", file.eps()?.into()),
        ("use_bias", file.has("blk.0.ssm_in.bias").into()),
        ("use_conv_bias", file.has("blk.0.ssm_conv1d.bias").into()),
    ]));
    if normed {
        // The converter drops this value; all existing models have it.
        config.insert("mixer_rms_eps".to_owned(), 1e-6.into());
    }
    Ok(config)
}

fn jamba(file: &mut File<'_>) -> Result<Fields, Error> {
    let heads = "attention.head_count_kv";
    let kv_heads = file.of_layers(heads)?.ok_or_else(|| file.missing(heads))?;
    let attends: Vec<bool> = kv_heads.iter().map(|heads| *heads > 0).collect();
    let most = kv_heads.iter().copied().max().unwrap_or(0);
    if kv_heads.iter().any(|heads| *heads != 0 && *heads != most) {
        return Err(file.wrong(heads, "differs between blocks of attention, which is not supported"));
    }
    let mixes = file.blocks_with("ffn_gate_inp.weight")?;
    let experts = file.unsigned("expert_count")?.filter(|_| mixes.contains(&true)).unwrap_or(1);
    let mut config = file.model("jamba")?;
    let needed = |key: &str| file.uniform(key)?.ok_or_else(|| file.missing(key));
    config.extend(fields([
        ("num_attention_heads", needed("attention.head_count")?.into()),
        ("num_key_value_heads", most.max(1).into()),
        ("head_dim", file.head_dim()?.into()),
        ("intermediate_size", needed("feed_forward_length")?.into()),
        ("max_position_embeddings", file.needed("context_length")?.into()),
        ("rms_norm_eps", file.eps()?.into()),
        ("num_experts", experts.into()),
        ("num_experts_per_tok", if experts > 1 { file.chosen_experts()? } else { 1 }.into()),
        ("mamba_d_state", file.needed("ssm.state_size")?.into()),
        ("mamba_d_conv", file.needed("ssm.conv_kernel")?.into()),
        ("mamba_dt_rank", file.needed("ssm.time_step_rank")?.into()),
        ("mamba_expand", file.expansion()?.into()),
    ]));
    let first_mixer = attends.iter().position(|attends| !attends).unwrap_or(0);
    for (field, part) in [("mamba_conv_bias", "ssm_conv1d.bias"), ("mamba_proj_bias", "ssm_in.bias")] {
        config.insert(field.to_owned(), file.has(&format!("blk.{first_mixer}.{part}")).into());
    }
    for (name, of) in [("attn_layer", &attends), ("expert_layer", &mixes)] {
        let (period, offset) = every(of).ok_or_else(|| {
            file.wrong(
                "block_count",
                format!("has blocks that no `{name}_period` and `{name}_offset` describe"),
            )
        })?;
        config.extend([(format!("{name}_period"), period.into()), (format!("{name}_offset"), offset.into())]);
    }
    Ok(config)
}

impl File<'_> {
    fn chosen_experts(&self) -> Result<u64, Error> {
        const GROUPS: &str = "expert_group_count";
        if self.unsigned(GROUPS)?.is_some_and(|groups| groups > 1) {
            return Err(
                self.wrong(GROUPS, "asks that groups of experts are chosen first, which is not supported")
            );
        }
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

    /// Returns the ratio of a state-space mixer's channels to the hidden size.
    fn expansion(&self) -> Result<u64, Error> {
        let (inner, hidden) = (self.needed("ssm.inner_size")?, self.needed("embedding_length")?);
        let times = inner.checked_div(hidden).filter(|times| times.checked_mul(hidden) == Some(inner));
        times.ok_or_else(|| {
            self.wrong(
                "ssm.inner_size",
                format!("is {inner}, which is no multiple of `embedding_length` {hidden}"),
            )
        })
    }
}

/// Returns the period and the offset of the blocks for which `of` is true; `None` if they are not periodic.
pub(super) fn every(of: &[bool]) -> Option<(usize, usize)> {
    let mut places = (0..of.len()).filter(|i| of.get(*i) == Some(&true));
    let (period, offset) = match (places.next(), places.next()) {
        (None, _) => (of.len() + 1, of.len()),
        (Some(first), None) => (of.len(), first),
        (Some(first), Some(second)) => (second - first, first),
    };
    of.iter().enumerate().all(|(i, is)| (i % period == offset) == *is).then_some((period, offset))
}
