//! Models whose mixers have states: state-space models, delta nets and short convolutions, alone or beside
//! attention.

use serde_json::Value;

use super::{Fields, File, architectures::whole_share, fields};
use crate::Error;

/// Reads Mamba or Falcon Mamba, which share one name. The latter norms time steps and the vectors that lead
/// into and out of the state.
pub(super) fn mamba(file: &mut File<'_>) -> Result<Fields, Error> {
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

pub(super) fn jamba(file: &mut File<'_>) -> Result<Fields, Error> {
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

pub(super) fn qwen3_next(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = qwen3_5_moe(file)?;
    config.remove("linear_heads_alternate");
    config.extend(fields([
        ("model_type", "qwen3_next".into()),
        // The converter takes the projection apart.
        ("linear_gates_apart", true.into()),
    ]));
    Ok(config)
}

pub(super) fn qwen3_5(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("qwen3_5_text")?;
    config.extend(whole_share(file.rope_with(&["rope.dimension_sections"])?));
    let layers = file.read_layers(&mut config)?;
    let [heads, value_dim] = file.state_heads()?;
    let attends = (0..layers).map(|i| file.has(&format!("blk.{i}.attn_q.weight")));
    let name = |attends: bool| if attends { "full_attention" } else { "linear_attention" };
    config.extend(fields([
        ("layer_types", attends.map(name).collect()),
        ("attention_bias", file.blocks_with("attn_q.bias")?.contains(&true).into()),
        ("linear_conv_kernel_dim", file.needed("ssm.conv_kernel")?.into()),
        ("linear_key_head_dim", file.needed("ssm.state_size")?.into()),
        ("linear_num_key_heads", file.needed("ssm.group_count")?.into()),
        ("linear_num_value_heads", heads.into()),
        ("linear_value_head_dim", value_dim.into()),
        // The converter sorts heads of values so.
        ("linear_heads_alternate", true.into()),
    ]));
    Ok(config)
}

pub(super) fn qwen3_5_moe(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = qwen3_5(file)?;
    let width = "expert_shared_feed_forward_length";
    config.extend(fields([
        ("model_type", "qwen3_5_moe_text".into()),
        ("num_experts", file.needed("expert_count")?.into()),
        ("num_experts_per_tok", file.chosen_experts()?.into()),
        ("moe_intermediate_size", file.needed("expert_feed_forward_length")?.into()),
        ("shared_expert_intermediate_size", file.needed(width)?.into()),
    ]));
    Ok(config)
}

pub(super) fn lfm2(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.some_attention("lfm2")?;
    config.extend(file.rope()?);
    let layers = file.layers()?;
    let attends = (0..layers).map(|i| file.has(&format!("blk.{i}.attn_q.weight")));
    config.extend(fields([
        ("norm_eps", file.eps()?.into()),
        ("conv_L_cache", file.needed("shortconv.l_cache")?.into()),
        ("conv_bias", file.blocks_with("shortconv.conv.bias")?.contains(&true).into()),
        ("layer_types", attends.map(|attends| if attends { "full_attention" } else { "conv" }).collect()),
        // The width is the one that the converter computed.
        ("block_auto_adjust_ff_dim", false.into()),
    ]));
    Ok(config)
}

pub(super) fn lfm2_moe(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = lfm2(file)?;
    config.remove("block_auto_adjust_ff_dim");
    file.only_sigmoid()?;
    config.extend(fields([
        ("model_type", "lfm2_moe".into()),
        ("num_experts", file.needed("expert_count")?.into()),
        ("num_experts_per_tok", file.chosen_experts()?.into()),
        ("moe_intermediate_size", file.needed("expert_feed_forward_length")?.into()),
        ("num_dense_layers", file.unsigned("leading_dense_block_count")?.unwrap_or(0).into()),
        ("use_expert_bias", file.blocks_with("exp_probs_b.bias")?.contains(&true).into()),
    ]));
    Ok(config)
}

pub(super) fn mamba2(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.model("mamba2")?;
    let [heads, head_dim] = file.state_heads()?;
    let biases = |part: &str| Ok::<_, Error>(Value::from(file.blocks_with(part)?.contains(&true)));
    config.extend(fields([
        ("state_size", file.needed("ssm.state_size")?.into()),
        ("conv_kernel", file.needed("ssm.conv_kernel")?.into()),
        ("n_groups", file.needed("ssm.group_count")?.into()),
        ("num_heads", heads.into()),
        ("head_dim", head_dim.into()),
        ("expand", file.expansion()?.into()),
        ("layer_norm_epsilon", file.eps()?.into()),
        ("use_bias", biases("ssm_in.bias")?),
        ("use_conv_bias", biases("ssm_conv1d.bias")?),
    ]));
    Ok(config)
}

pub(super) fn granite_hybrid(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.some_attention("granitemoehybrid")?;
    config.extend(file.rope_with(&["rope.scaling.finetuned"])?);
    config.extend(file.granite_factors()?);
    config.extend(file.mixers()?);
    let attends = file.blocks_with("attn_q.weight")?;
    let name = |attends: &bool| if *attends { "full_attention" } else { "linear_attention" };
    let rotates = file.metadata.boolean(&file.key("rope.scaling.finetuned"))?.unwrap_or(true);
    let experts = file.unsigned("expert_count")?.unwrap_or(0);
    let width = match file.unsigned("expert_shared_feed_forward_length")?.filter(|width| *width > 0) {
        Some(width) => width,
        None => file.uniform("feed_forward_length")?.ok_or_else(|| file.missing("feed_forward_length"))?,
    };
    config.extend(fields([
        ("rms_norm_eps", file.eps()?.into()),
        ("layer_types", attends.iter().map(name).collect()),
        ("position_embedding_type", if rotates { "rope" } else { "nope" }.into()),
        ("attention_bias", file.blocks_with("attn_q.bias")?.contains(&true).into()),
        ("num_local_experts", experts.into()),
        ("num_experts_per_tok", if experts > 0 { file.chosen_experts()? } else { 0 }.into()),
        ("shared_intermediate_size", width.into()),
        ("shared_mlp_apart", true.into()),
    ]));
    Ok(config)
}

/// Reads Falcon-H1. The converter multiplies weights by the factors of the model.
pub(super) fn falcon_h1(file: &mut File<'_>) -> Result<Fields, Error> {
    let mut config = file.decoder("falcon_h1")?;
    config.extend(file.rope()?);
    config.extend(file.mixers()?);
    let has_norm = file.has("blk.0.ssm_norm.weight");
    config.extend(fields([
        ("mamba_d_ssm", file.needed("ssm.inner_size")?.into()),
        ("mamba_rms_norm", has_norm.into()),
        // llama.cpp hard-codes the order.
        ("mamba_norm_before_gate", false.into()),
        ("projectors_bias", file.has("blk.0.ssm_out.bias").into()),
        ("attention_bias", file.has("blk.0.attn_q.bias").into()),
        ("mlp_bias", file.has("blk.0.ffn_gate.bias").into()),
    ]));
    Ok(config)
}

pub(super) fn nemotron_h(file: &mut File<'_>) -> Result<Fields, Error> {
    const EPS: &str = "attention.layer_norm_epsilon";
    let mut config = file.some_attention("nemotron_h")?;
    let layers = file.read_layers(&mut config)?;
    let [heads, head_dim] = file.state_heads()?;
    let parts = ["ssm_in.weight", "attn_q.weight", "ffn_gate_inp.weight", "ffn_up.weight"];
    let names = ["linear_attention", "full_attention", "moe", "mlp"];
    let blocks = parts.map(|part| file.blocks_with(part));
    let mut types = Vec::new();
    let kinds: Vec<_> = blocks.into_iter().collect::<Result<_, _>>()?;
    for i in 0..layers as usize {
        let kind =
            kinds.iter().zip(names).find_map(|(has, name)| (has.get(i) == Some(&true)).then_some(name));
        types.push(
            kind.ok_or_else(|| file.wrong("block_count", format!("is beyond block {i}, which is empty")))?,
        );
    }
    let biases = |part: &str| Ok::<_, Error>(Value::from(file.blocks_with(part)?.contains(&true)));
    // The widths in the metadata are those of experts alone.
    let first = types.iter().position(|kind| *kind == "mlp");
    let width = first.and_then(|i| file.tensors.shape(&format!("blk.{i}.ffn_up.weight")));
    let width = width.and_then(|shape| shape.first().copied());
    config.extend(width.map(|width| ("intermediate_size".to_owned(), width.into())));
    config.extend(fields([
        ("layer_norm_epsilon", file.number(EPS)?.ok_or_else(|| file.missing(EPS))?.into()),
        ("layers_block_type", types.into()),
        ("ssm_state_size", file.needed("ssm.state_size")?.into()),
        ("mamba_num_heads", heads.into()),
        ("mamba_head_dim", head_dim.into()),
        ("n_groups", file.needed("ssm.group_count")?.into()),
        ("conv_kernel", file.needed("ssm.conv_kernel")?.into()),
        ("use_conv_bias", biases("ssm_conv1d.bias")?),
        ("use_bias", biases("ssm_in.bias")?),
        ("mlp_bias", biases("ffn_up.bias")?),
        // Steps have no limits in llama.cpp. The key is Kiln's own.
        ("time_step_min", file.number("ssm.time_step_min")?.unwrap_or(0.0).into()),
    ]));
    let Some(experts) = file.unsigned("expert_count")?.filter(|experts| *experts > 0) else {
        return Ok(config);
    };
    let scale = file.number("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0);
    config.extend(fields([
        ("n_routed_experts", experts.into()),
        ("num_experts_per_tok", file.experts_a_token()?.into()),
        ("n_group", file.unsigned("expert_group_count")?.unwrap_or(1).into()),
        ("topk_group", file.unsigned("expert_group_used_count")?.unwrap_or(1).into()),
        ("moe_intermediate_size", file.needed("expert_feed_forward_length")?.into()),
        ("moe_shared_expert_intermediate_size", file.needed("expert_shared_feed_forward_length")?.into()),
        ("moe_latent_size", file.unsigned("moe_latent_size")?.into()),
        ("routed_scaling_factor", scale.into()),
        ("norm_topk_prob", file.metadata.boolean(&file.key("expert_weights_norm"))?.unwrap_or(false).into()),
    ]));
    Ok(config)
}

impl File<'_> {
    /// Returns the fields of a model with attention in some of its blocks.
    fn some_attention(&self, model_type: &str) -> Result<Fields, Error> {
        const HEADS: &str = "attention.head_count";
        let heads = self.of_layers(HEADS)?.unwrap_or_default().into_iter().max();
        let heads = heads.filter(|heads| *heads > 0).ok_or_else(|| self.missing(HEADS))?;
        let kv_heads = self.of_layers("attention.head_count_kv")?.unwrap_or_default().into_iter().max();
        let head_dim = self.head_dim()?;
        // Some files say 0, and have keys.
        let keys = (0..self.layers()?).find_map(|i| self.tensors.shape(&format!("blk.{i}.attn_k.weight")));
        let of_keys = keys.and_then(|shape| (*shape.first()? as u64).checked_div(head_dim));
        let kv_heads = kv_heads.filter(|heads| *heads > 0).or(of_keys.filter(|heads| *heads > 0));
        let mut config = self.model(model_type)?;
        config.extend(fields([
            ("num_attention_heads", heads.into()),
            // A model may have no attention at all.
            ("num_key_value_heads", kv_heads.unwrap_or(heads).into()),
            ("head_dim", head_dim.into()),
        ]));
        let width = self.of_layers("feed_forward_length")?.unwrap_or_default().into_iter().max();
        let sizes =
            [("intermediate_size", width), ("max_position_embeddings", self.unsigned("context_length")?)];
        config.extend(sizes.into_iter().filter_map(|(name, size)| Some((name.to_owned(), size?.into()))));
        Ok(config)
    }

    /// Returns the number of heads of mixers with matrix states, and the width of their values.
    fn state_heads(&self) -> Result<[u64; 2], Error> {
        const INNER: &str = "ssm.inner_size";
        let (heads, inner) = (self.needed("ssm.time_step_rank")?, self.needed(INNER)?);
        let width = inner.checked_div(heads).filter(|width| width.checked_mul(heads) == Some(inner));
        let wrong = || self.wrong(INNER, format!("is {inner}, which is no multiple of {heads} heads"));
        Ok([heads, width.ok_or_else(wrong)?])
    }

    /// Returns the fields of Mamba-2 mixers in models that have other blocks, too.
    fn mixers(&self) -> Result<Fields, Error> {
        let [heads, head_dim] = self.state_heads()?;
        let biases = |part: &str| Ok::<_, Error>(Value::from(self.blocks_with(part)?.contains(&true)));
        Ok(fields([
            ("mamba_n_heads", heads.into()),
            ("mamba_d_head", head_dim.into()),
            ("mamba_n_groups", self.needed("ssm.group_count")?.into()),
            ("mamba_d_state", self.needed("ssm.state_size")?.into()),
            ("mamba_d_conv", self.needed("ssm.conv_kernel")?.into()),
            ("mamba_expand", self.expansion().unwrap_or(2).into()),
            ("mamba_conv_bias", biases("ssm_conv1d.bias")?),
            ("mamba_proj_bias", biases("ssm_in.bias")?),
        ]))
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
