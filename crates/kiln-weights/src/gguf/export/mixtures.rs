//! Models with mixtures of experts in some blocks.

use super::{
    architectures::{SILU, llama},
    config::{Folder, wrong},
};
use crate::{Error, gguf::Value};

/// Values of `expert_gating_func`.
const SOFTMAX: u64 = 1;
const SIGMOID: u64 = 2;

/// Defaults of the fields of experts.
struct Experts {
    experts: u64,
    chosen: u64,
    width: u64,
    shared: u64,
    scale: f64,
    groups: [u64; 2],
    dense: u64,
}

const GLM_4_5: Experts =
    Experts { experts: 128, chosen: 8, width: 1408, shared: 1, scale: 1.0, groups: [1, 1], dense: 1 };
const GLM_4_7_FLASH: Experts =
    Experts { experts: 64, chosen: 4, width: 1536, shared: 1, scale: 1.8, groups: [1, 1], dense: 1 };
const DEEPSEEK_V2: Experts =
    Experts { experts: 64, chosen: 6, width: 1407, shared: 2, scale: 1.0, groups: [1, 1], dense: 0 };
const DEEPSEEK_V3: Experts =
    Experts { experts: 256, chosen: 8, width: 2048, shared: 1, scale: 2.5, groups: [8, 4], dense: 3 };

pub(super) fn glm4_moe(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.decoder()?;
    folder.rope()?;
    folder.routed(&GLM_4_5)?;
    folder.grouped(&GLM_4_5)
}

/// Writes DeepSeek-V2, DeepSeek-V3 or GLM-4.7-Flash.
pub(super) fn deepseek(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    for (field, usual) in [("attention_bias", false), ("mlp_bias", false), ("rope_interleave", true)] {
        if folder.boolean(field)?.is_some_and(|value| value != usual) {
            return Err(wrong(format!("`{field}` is not {usual}, as in every GGUF file of this model")));
        }
    }
    let model_type = folder.architecture.model_type;
    let [query_rank, plain, value_dim] =
        if model_type == "glm4_moe_lite" { [768, 192, 256] } else { [1536, 128, 128] };
    let size = |field: &str, default| Ok::<_, Error>(folder.unsigned(field)?.unwrap_or(default));
    let query_rank = match folder.is_null("q_lora_rank") {
        true => None,
        false => Some(size("q_lora_rank", query_rank)?),
    };
    let (rank, rotated) = (size("kv_lora_rank", 512)?, size("qk_rope_head_dim", 64)?);
    let (plain, value_dim) = (size("qk_nope_head_dim", plain)?, size("v_head_dim", value_dim)?);
    for (key, number) in [
        ("block_count", folder.blocks()?),
        ("context_length", folder.positions()?),
        ("embedding_length", folder.needed("hidden_size")?),
        ("feed_forward_length", folder.needed("intermediate_size")?),
        ("attention.head_count", folder.needed("num_attention_heads")?),
        // A latent is the key of all heads.
        ("attention.head_count_kv", 1),
        ("attention.key_length", rank.saturating_add(rotated)),
        ("attention.value_length", rank),
        ("attention.key_length_mla", plain.saturating_add(rotated)),
        ("attention.value_length_mla", value_dim),
        ("attention.kv_lora_rank", rank),
        ("rope.dimension_count", rotated),
        ("vocab_size", folder.needed("vocab_size")?),
    ] {
        folder.count(key, number)?;
    }
    if let Some(rank) = query_rank {
        folder.count("attention.q_lora_rank", rank)?;
    }
    folder.rms_eps("rms_norm_eps")?;
    folder.rope_of(rotated)?;
    match model_type {
        "deepseek_v2" => {
            folder.routed(&DEEPSEEK_V2)?;
            folder.count("expert_gating_func", SOFTMAX)?;
            match folder.get("topk_method").and_then(|method| method.as_str()) {
                Some("group_limited_greedy") => folder.groups(DEEPSEEK_V2.groups),
                _ => Ok(()),
            }
        }
        "glm4_moe_lite" => {
            folder.routed(&GLM_4_7_FLASH)?;
            let dense = folder.dense_blocks(GLM_4_7_FLASH.dense)?;
            folder.count("leading_dense_block_count", dense)?;
            folder.grouped(&GLM_4_7_FLASH)
        }
        _ => {
            folder.routed(&DEEPSEEK_V3)?;
            folder.grouped(&DEEPSEEK_V3)
        }
    }
}

pub(super) fn llama4(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    let dense = folder.unsigned("intermediate_size_mlp")?.unwrap_or(16_384);
    folder.count("feed_forward_length", dense)?;
    folder.experts(16, 1)?;
    let (width, blocks) = (folder.needed("intermediate_size")?, folder.blocks()?);
    folder.count("expert_feed_forward_length", width)?;
    let step = folder.unsigned("interleave_moe_layer_step")?.unwrap_or(1).max(1);
    folder.count("interleave_moe_layer_step", step)?;
    let mixtures = (0..blocks).filter(|i| (i + 1).is_multiple_of(step));
    let list = folder.get("moe_layers").and_then(|list| list.as_array());
    if list.is_some_and(|list| !list.iter().filter_map(|i| i.as_u64()).eq(mixtures)) {
        let why = format!("`moe_layers` is not every block whose number is a multiple of {step}");
        return Err(wrong(why));
    }
    if folder.get("attn_temperature_tuning").is_some_and(|tunes| tunes == false || tunes == 0) {
        return Err(wrong("`attn_temperature_tuning` is false, and in GGUF files of this model it is true"));
    }
    // The chunks of others are those of llama.cpp.
    let chunked = folder.blocks_of("chunked_attention", |_| true)?;
    if !chunked.contains(&true) {
        folder.count("attention.sliding_window", 0)?;
    }
    Ok(())
}

pub(super) fn gpt_oss(folder: &mut Folder<'_>) -> Result<(), Error> {
    for (field, usual) in [("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)] {
        if folder.number(field)?.is_some_and(|value| value != usual) {
            return Err(wrong(format!("`{field}` is not {usual}, as in every GGUF file of this model")));
        }
    }
    if ["rope_parameters", "rope_scaling"].iter().all(|field| folder.get(field).is_none()) {
        return Err(wrong("`rope_parameters` is missing in config.json"));
    }
    folder.decoder()?;
    folder.rope()?;
    folder.experts(128, 4)?;
    let width = folder.needed("intermediate_size")?;
    folder.count("expert_feed_forward_length", width)?;
    let window = folder.unsigned("sliding_window")?.unwrap_or(128);
    folder.count("attention.sliding_window", window)
}

impl Folder<'_> {
    /// Writes the number and the width of experts.
    fn routed(&mut self, defaults: &Experts) -> Result<(), Error> {
        let number = |field: &str| self.unsigned(field);
        // `num_local_experts` is another name of `n_routed_experts`.
        let experts =
            number("num_local_experts")?.or(number("n_routed_experts")?).unwrap_or(defaults.experts);
        let keys = [
            ("expert_count", experts),
            ("expert_used_count", number("num_experts_per_tok")?.unwrap_or(defaults.chosen)),
            ("expert_feed_forward_length", number("moe_intermediate_size")?.unwrap_or(defaults.width)),
            ("expert_shared_count", number("n_shared_experts")?.unwrap_or(defaults.shared)),
            ("leading_dense_block_count", number("first_k_dense_replace")?.unwrap_or(defaults.dense)),
        ];
        let scale = self.number("routed_scaling_factor")?.unwrap_or(defaults.scale);
        keys.into_iter().try_for_each(|(key, number)| self.count(key, number))?;
        self.real("expert_weights_scale", scale);
        Ok(())
    }

    /// Writes that experts are chosen by sigmoids, from the best groups.
    fn grouped(&mut self, defaults: &Experts) -> Result<(), Error> {
        let normalised = self.boolean("norm_topk_prob")?.unwrap_or(true);
        self.count("expert_gating_func", SIGMOID)?;
        self.set("expert_weights_norm", Value::Bool(normalised));
        self.groups(defaults.groups)
    }

    fn groups(&mut self, [groups, chosen]: [u64; 2]) -> Result<(), Error> {
        let groups = self.unsigned("n_group")?.unwrap_or(groups);
        let chosen = self.unsigned("topk_group")?.unwrap_or(chosen);
        self.count("expert_group_count", groups)?;
        self.count("expert_group_used_count", chosen)
    }

    /// Returns the number of first blocks without experts, as `mlp_layer_types` says.
    fn dense_blocks(&self, default: u64) -> Result<u64, Error> {
        let Some(types) = self.get("mlp_layer_types").and_then(|types| types.as_array()) else {
            return Ok(default);
        };
        let dense = types.iter().take_while(|kind| *kind == "dense").count();
        match types.iter().skip(dense).any(|kind| kind == "dense") {
            true => Err(wrong("`mlp_layer_types` has dense blocks after others, which GGUF cannot say")),
            false => Ok(dense as u64),
        }
    }

    /// Writes that experts are chosen by sigmoids, and which blocks have none.
    pub(super) fn sigmoid_after(&mut self, dense: u64) -> Result<(), Error> {
        self.count("expert_gating_func", SIGMOID)?;
        self.count("leading_dense_block_count", dense)
    }
}
