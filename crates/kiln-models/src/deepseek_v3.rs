//! DeepSeek-V3 and R1 (DeepSeek-AI, 2024, <https://arxiv.org/abs/2412.19437>; transformers'
//! `DeepseekV3ForCausalLM`): latent attention, and mixtures of experts that are chosen by the sigmoid of
//! their logits and a bias, from the best groups, beside one that all tokens use.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    glm4_moe::{ExpertDefaults, SigmoidExperts},
    nn::{
        block::MixerConfig, decoder::DecoderConfig, latent::LatentConfig, mlp, names::ByHead,
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct DeepseekV3;

/// Fields of latent attention.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    kv_lora_rank: Option<usize>,
    q_lora_rank: Option<usize>,
    qk_nope_head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    v_head_dim: Option<usize>,
    rope_interleave: Option<bool>,
    /// Whether the projection of latents to keys is stored only in the form that queries are multiplied by,
    /// as in GGUF files.
    absorbs_keys: bool,
}

/// Sizes that a config leaves out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentDefaults {
    pub(crate) common: Defaults,
    pub(crate) query_rank: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
}

/// Returns the settings of a decoder with latent attention and dense feed-forwards.
pub(crate) fn latent(config: &ConfigFile, defaults: LatentDefaults) -> Result<DecoderConfig> {
    let fields: Fields = config.parse()?;
    let key_dim = fields.qk_nope_head_dim.unwrap_or(defaults.key_dim);
    let rotated_dim = fields.qk_rope_head_dim.unwrap_or(64);
    let value_dim = fields.v_head_dim.unwrap_or(defaults.value_dim);
    let rank = fields.kv_lora_rank.unwrap_or(512);
    let query_rank = config.unless_null("q_lora_rank", fields.q_lora_rank, Some(defaults.query_rank));
    for (name, size) in [
        ("qk_nope_head_dim", key_dim),
        ("qk_rope_head_dim", rotated_dim),
        ("v_head_dim", value_dim),
        ("kv_lora_rank", rank),
        ("q_lora_rank", query_rank.unwrap_or(1)),
    ] {
        config.check(name, size, 1 << 16)?;
    }
    let whole = key_dim + rotated_dim;
    let common = Common::read(&config.with("head_dim", whole.into()), defaults.common)?;
    let sizes = &common.sizes;
    if sizes.kv_heads != sizes.heads {
        let why = format!(
            "`num_key_value_heads` is {}, and latents give keys to each of {} heads",
            sizes.kv_heads, sizes.heads
        );
        return Err(config.error(&why));
    }
    let parameters = RopeParameters::read(config)?.or(1e4, 1.0);
    let rope = Rope::new(config, &parameters, rotated_dim, sizes.positions)?;
    let rope = if fields.rope_interleave.unwrap_or(true) { rope.adjacent() } else { rope };
    let attention = LatentConfig {
        hidden: sizes.hidden,
        heads: sizes.heads,
        key_dim,
        rotated_dim,
        value_dim,
        rank,
        query_rank,
        bias: fields.attention_bias,
        expands: !fields.absorbs_keys,
        scale: (whole as f64).powf(-0.5) * parameters.score_factor(),
    };
    let mut decoder = DecoderConfig::new(common, rope.into());
    decoder.blocks.iter_mut().for_each(|block| block.mixer = MixerConfig::Latent(attention));
    let parts = [("k_b_proj", key_dim), ("v_b_proj", value_dim)];
    let by_head = ByHead { transposed: Some("k_b_proj"), ..ByHead::new(attention.heads, parts) };
    decoder.by_head.push(("kv_b_proj.weight", by_head));
    decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
    Ok(decoder)
}

const DEFAULTS: LatentDefaults = LatentDefaults {
    common: Defaults { kv_heads: None, head_dim: None, positions: 4096, eps: 1e-6, tied: false },
    query_rank: 1536,
    key_dim: 128,
    value_dim: 128,
};

impl Architecture for DeepseekV3 {
    fn model_type(&self) -> &'static str {
        "deepseek_v3"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let experts: SigmoidExperts = config.parse()?;
        let mut decoder = latent(config, DEFAULTS)?;
        let defaults =
            ExpertDefaults { experts: 256, chosen: 8, width: 2048, scale: 2.5, groups: [8, 4], dense: 3 };
        experts.apply(config, &mut decoder, defaults, None)?;
        Ok(Box::new(decoder))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use kiln_core::need::AttentionNeed;
    use serde_json::json;

    use crate::{ConfigFile, configure};

    #[test]
    fn latents_take_a_71st_of_the_bytes_of_keys_and_values() {
        let config = json!({
            "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
            "num_hidden_layers": 61, "num_attention_heads": 128,
        });
        let needs = configure(&ConfigFile::from_json(config)).unwrap().needs();
        let held: usize =
            needs.iter().filter_map(|need| need.attention.as_ref()).map(|need| need.token_bytes(2)).sum();
        let values = AttentionNeed::alike(128, 128);
        let keys = AttentionNeed::alike(128, 192);
        let expanded = 61 * (keys.token_bytes(2) + values.token_bytes(2)) / 2;
        assert_eq!((held, expanded, expanded / held), (70_272, 4_997_120, 71));
    }
}
