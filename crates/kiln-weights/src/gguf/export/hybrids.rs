//! Models with states in some blocks or in all.

use super::{
    architectures::{MAMBA_POSITIONS, SILU, llama},
    config::{Folder, wrong},
};
use crate::{
    Error,
    gguf::{Array, Value},
};

pub(super) fn qwen3_next(folder: &mut Folder<'_>) -> Result<(), Error> {
    let width = folder.needed("intermediate_size")?;
    delta_net(folder, width)?;
    if folder.boolean("norm_topk_prob")? == Some(false) {
        return Err(wrong("`norm_topk_prob` is false, and in GGUF files of this model it is true"));
    }
    qwen_experts(folder, [512, 10])
}

pub(super) fn qwen3_5(folder: &mut Folder<'_>) -> Result<(), Error> {
    let width = folder.needed("intermediate_size")?;
    delta_net(folder, width)?;
    sections(folder)
}

pub(super) fn qwen3_5_moe(folder: &mut Folder<'_>) -> Result<(), Error> {
    // There are no dense blocks, and a config may have no width for them.
    let width = folder.unsigned("intermediate_size")?.or(folder.unsigned("moe_intermediate_size")?);
    delta_net(folder, width.unwrap_or(512))?;
    sections(folder)?;
    qwen_experts(folder, [256, 8])
}

/// Writes the keys of attention, of feed-forwards of this width, and of gated delta nets.
fn delta_net(folder: &mut Folder<'_>, width: u64) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.sizes(width)?;
    folder.rms_eps("rms_norm_eps")?;
    folder.rope()?;
    let size = |field: &str, default| Ok::<_, Error>(folder.unsigned(field)?.unwrap_or(default));
    let heads = size("linear_num_value_heads", 32)?;
    let inner = size("linear_value_head_dim", 128)?.saturating_mul(heads);
    let period = size("full_attention_interval", 4)?;
    let keys = [
        ("ssm.conv_kernel", size("linear_conv_kernel_dim", 4)?),
        ("ssm.state_size", size("linear_key_head_dim", 128)?),
        ("ssm.group_count", size("linear_num_key_heads", 16)?),
        ("ssm.time_step_rank", heads),
        ("ssm.inner_size", inner),
        ("full_attention_interval", period),
    ];
    let recurrent = folder.blocks_of("linear_attention", |i| !(i + 1).is_multiple_of(period.max(1)))?;
    keys.into_iter().try_for_each(|(key, number)| folder.count(key, number))?;
    folder.set("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
    Ok(())
}

/// Writes the dimensions of multimodal rotary positions, which are equal in texts.
fn sections(folder: &mut Folder<'_>) -> Result<(), Error> {
    let rope = folder.get("rope_parameters").or(folder.get("rope_scaling"));
    let stated = rope.and_then(|rope| rope.get("mrope_section")).and_then(|section| section.as_array());
    let stated = stated.map(|list| list.iter().filter_map(|n| n.as_i64()).map(|n| n as i32).collect());
    let mut sections: Vec<i32> = stated.unwrap_or_else(|| vec![11, 11, 10]);
    sections.resize(4, 0);
    folder.set("rope.dimension_sections", Value::Array(Array::I32(sections)));
    Ok(())
}

fn qwen_experts(folder: &mut Folder<'_>, [experts, chosen]: [u64; 2]) -> Result<(), Error> {
    let dense = folder.get("mlp_only_layers").and_then(|list| list.as_array());
    if dense.is_some_and(|list| !list.is_empty())
        || folder.unsigned("decoder_sparse_step")?.is_some_and(|step| step != 1)
    {
        return Err(wrong("some blocks have no experts, and in GGUF files of this model all have"));
    }
    folder.experts(experts, chosen)?;
    for (field, key) in [
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ] {
        let width = folder.unsigned(field)?.unwrap_or(512);
        folder.count(key, width)?;
    }
    Ok(())
}

pub(super) fn lfm2(folder: &mut Folder<'_>) -> Result<(), Error> {
    let number = |field: &str| folder.unsigned(field);
    let stated = number("block_ff_dim")?.or(number("intermediate_size")?);
    let stated = stated.ok_or_else(|| wrong("`intermediate_size` is missing in config.json"))?;
    let width = match folder.boolean("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        false => stated,
        true => {
            let times = folder.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
            let multiple = number("block_multiple_of")?.unwrap_or(256).max(1);
            let width = ((stated.saturating_mul(2) / 3) as f64 * times) as u64;
            if folder.is_null("block_ffn_dim_multiplier") { width } else { width.next_multiple_of(multiple) }
        }
    };
    short_convs(folder, width)
}

pub(super) fn lfm2_moe(folder: &mut Folder<'_>) -> Result<(), Error> {
    let width = folder.needed("intermediate_size")?;
    short_convs(folder, width)?;
    if folder.boolean("norm_topk_prob")? == Some(false)
        || folder.number("routed_scaling_factor")?.is_some_and(|scale| scale != 1.0)
    {
        let why =
            "`norm_topk_prob` is not true, or `routed_scaling_factor` not 1, as in GGUF files of this model";
        return Err(wrong(why));
    }
    folder.experts(32, 4)?;
    let width = folder.unsigned("moe_intermediate_size")?.unwrap_or(1792);
    folder.count("expert_feed_forward_length", width)?;
    let dense = folder.unsigned("num_dense_layers")?.unwrap_or(2);
    folder.sigmoid_after(dense)
}

/// Writes the keys of attention and of short convolutions.
fn short_convs(folder: &mut Folder<'_>, width: u64) -> Result<(), Error> {
    folder.sizes(width)?;
    folder.rms_eps("norm_eps")?;
    folder.rope()?;
    let numbers = folder.get("full_attn_idxs").and_then(|list| list.as_array()).cloned();
    let attends = |i: u64| numbers.as_ref().is_none_or(|numbers| numbers.iter().any(|number| *number == i));
    let attends = folder.blocks_of("full_attention", attends)?;
    kv_heads_of(folder, &attends)?;
    let (vocab, conv) = (folder.needed("vocab_size")?, folder.unsigned("conv_L_cache")?.unwrap_or(3));
    folder.count("vocab_size", vocab)?;
    folder.count("shortconv.l_cache", conv)
}

pub(super) fn mamba2(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    let hidden = folder.needed("hidden_size")?;
    let size = |field: &str, default| Ok::<_, Error>(folder.unsigned(field)?.unwrap_or(default));
    let heads = size("num_heads", 128)?;
    let inner = size("head_dim", 64)?.saturating_mul(heads);
    if inner != size("expand", 2)?.saturating_mul(hidden) {
        return Err(wrong("`num_heads` times `head_dim` is not `expand` times `hidden_size`"));
    }
    for (key, number) in [
        ("block_count", folder.blocks()?),
        ("context_length", MAMBA_POSITIONS),
        ("embedding_length", hidden),
        // There is no feed-forward and no attention, but llama.cpp needs the keys.
        ("feed_forward_length", 0),
        ("attention.head_count", 0),
        ("ssm.conv_kernel", size("conv_kernel", 4)?),
        ("ssm.inner_size", inner),
        ("ssm.state_size", size("state_size", 128)?),
        ("ssm.time_step_rank", heads),
        ("ssm.group_count", size("n_groups", 8)?),
    ] {
        folder.count(key, number)?;
    }
    folder.rms_eps("layer_norm_epsilon")
}

/// Writes the number of heads of keys of each block; blocks without attention have none.
fn kv_heads_of(folder: &mut Folder<'_>, attends: &[bool]) -> Result<(), Error> {
    let kv_heads =
        i32::try_from(folder.kv_heads()?).map_err(|_| wrong("`num_key_value_heads` is too large"))?;
    let heads = attends.iter().map(|attends| if *attends { kv_heads } else { 0 }).collect();
    folder.set("attention.head_count_kv", Value::Array(Array::I32(heads)));
    Ok(())
}

/// Writes Granite 4 H.
pub(super) fn granite(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    folder.granite_factors()?;
    let attends = folder.blocks_of("full_attention", |_| false)?;
    if !attends.contains(&false) {
        return Err(wrong("no block has states, and a GGUF file of such a model has another architecture"));
    }
    if folder.get("position_embedding_type").is_some_and(|kind| kind != "nope") {
        return Err(wrong("`position_embedding_type` is not nope, as in every GGUF file of this model"));
    }
    kv_heads_of(folder, &attends)?;
    folder.count("context_length", MAMBA_POSITIONS)?;
    folder.set("rope.scaling.finetuned", Value::Bool(false));
    let size = |field: &str, default| Ok::<_, Error>(folder.unsigned(field)?.unwrap_or(default));
    let (heads, hidden) = (size("mamba_n_heads", 128)?, folder.needed("hidden_size")?);
    let inner = size("mamba_expand", 2)?.saturating_mul(hidden);
    let keys = [
        ("expert_shared_feed_forward_length", size("shared_intermediate_size", 1024)?),
        ("ssm.conv_kernel", size("mamba_d_conv", 4)?),
        ("ssm.state_size", size("mamba_d_state", 256)?),
        ("ssm.group_count", size("mamba_n_groups", 1)?),
        ("ssm.inner_size", inner),
        ("ssm.time_step_rank", heads),
    ];
    keys.into_iter().try_for_each(|(key, number)| folder.count(key, number))?;
    match folder.unsigned("num_local_experts")? {
        // A dense model has one feed-forward, which is the shared one.
        Some(0) => {
            let width = folder.unsigned("shared_intermediate_size")?.unwrap_or(1024);
            folder.count("feed_forward_length", width)
        }
        _ => folder.experts(8, 2),
    }
}

pub(super) fn nemotron_h(folder: &mut Folder<'_>) -> Result<(), Error> {
    let kinds = folder.get("layers_block_type").or(folder.get("layer_types"));
    let kinds: Vec<String> = kinds
        .and_then(|kinds| kinds.as_array())
        .ok_or_else(|| wrong("`layers_block_type` is missing in config.json"))?
        .iter()
        .filter_map(|kind| kind.as_str().map(str::to_owned))
        .collect();
    if folder.get("mlp_hidden_act").is_some_and(|name| name != "relu2")
        || folder.get("moe_latent_size").is_some()
    {
        return Err(wrong(
            "`mlp_hidden_act` is not relu2, or `moe_latent_size` is set, which GGUF cannot say",
        ));
    }
    let size = |field: &str, default| Ok::<_, Error>(folder.unsigned(field)?.unwrap_or(default));
    let is_of = |names: &[&str]| kinds.iter().map(|kind| names.contains(&&**kind)).collect::<Vec<bool>>();
    let (attends, mixes) = (is_of(&["full_attention", "attention"]), is_of(&["moe"]));
    let has_experts = mixes.contains(&true);
    let (heads, width) = (size("mamba_num_heads", 128)?, size("moe_intermediate_size", 7688)?);
    let inner = size("mamba_head_dim", 64)?.saturating_mul(heads);
    let head_dim = folder.head_dim()?;
    let keys = [
        ("block_count", kinds.len() as u64),
        ("context_length", MAMBA_POSITIONS),
        ("embedding_length", folder.needed("hidden_size")?),
        ("attention.head_count", size("num_attention_heads", 32)?),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("expert_group_count", size("n_group", 1)?),
        ("expert_group_used_count", size("topk_group", 1)?),
        ("vocab_size", folder.needed("vocab_size")?),
        ("rope.dimension_count", head_dim),
        ("ssm.conv_kernel", size("conv_kernel", 4)?),
        ("ssm.state_size", size("ssm_state_size", 128)?),
        ("ssm.group_count", size("n_groups", 8)?),
        ("ssm.inner_size", inner),
        ("ssm.time_step_rank", heads),
    ];
    let of_experts = [
        ("expert_count", size("n_routed_experts", 8)?),
        ("expert_used_count", size("num_experts_per_tok", 2)?),
        ("expert_feed_forward_length", width),
        ("expert_shared_feed_forward_length", size("moe_shared_expert_intermediate_size", 7688)?),
        ("expert_shared_count", size("n_shared_experts", 1)?),
    ];
    let eps = folder.number("layer_norm_epsilon")?.unwrap_or(folder.architecture.defaults.eps);
    let scale = folder.number("routed_scaling_factor")?.unwrap_or(1.0);
    let normalised = folder.boolean("norm_topk_prob")?.unwrap_or(true);
    let shortest = folder.number("time_step_min")?.unwrap_or(0.001);
    if has_experts {
        // Models with experts have a name of their own.
        folder.rename("nemotron_h_moe");
    }
    keys.into_iter().try_for_each(|(key, number)| folder.count(key, number))?;
    kv_heads_of(folder, &attends)?;
    let wide = i32::try_from(width).map_err(|_| wrong("`moe_intermediate_size` is too large"))?;
    let widths = mixes.iter().map(|mixes| if *mixes { wide } else { 0 }).collect();
    folder.set("feed_forward_length", Value::Array(Array::I32(widths)));
    folder.real("attention.layer_norm_epsilon", eps);
    // llama.cpp has no key for it, and no limit.
    folder.real("ssm.time_step_min", shortest);
    folder.set("rope.scaling.finetuned", Value::Bool(false));
    if has_experts {
        of_experts.into_iter().try_for_each(|(key, number)| folder.count(key, number))?;
        folder.set("expert_weights_norm", Value::Bool(normalised));
        folder.real("expert_weights_scale", scale);
    }
    Ok(())
}
