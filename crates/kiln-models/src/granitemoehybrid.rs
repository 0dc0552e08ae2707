//! Granite 4 (IBM, 2025; transformers' `GraniteMoeHybridForCausalLM`): Mamba-2 mixers, attention with or
//! without positions in some blocks, a feed-forward beside a mixture of experts or alone, and the factors of
//! Granite.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    bamba::MixerFields,
    config::{Common, Defaults},
    granite::Factors,
    nn::{
        block::StateConfig,
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
        mlp,
        names::Names,
    },
};

#[derive(Debug)]
pub(crate) struct GraniteMoeHybrid;

/// Fields of `config.json` in addition to those of Granite and of the mixers.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    position_embedding_type: Option<String>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    shared_intermediate_size: Option<usize>,
    /// Whether gate and values of the dense feed-forward are two matrices, as in GGUF files.
    shared_mlp_apart: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-6, tied: false };

impl Architecture for GraniteMoeHybrid {
    fn model_type(&self) -> &'static str {
        "granitemoehybrid"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let config = config.with_aliases(&[("layers_block_type", "layer_types")])?;
        let fields: Fields = config.parse()?;
        let factors: Factors = config.parse()?;
        let mixer: MixerFields = config.parse()?;
        let common = Common::read(&config, DEFAULTS)?;
        let mamba = mixer.mixer(&config, &common, None)?;
        let rope = Rope::read(&config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = match fields.position_embedding_type.as_deref() {
            Some("rope") => DecoderConfig::new(common, rope.into()),
            None | Some("nope") => DecoderConfig::without_positions(common),
            Some(other) => {
                let why = format!("`position_embedding_type` is `{other}`; known: rope, nope");
                return Err(config.error(&why));
            }
        };
        decoder.set_attention_bias(fields.attention_bias);
        factors.apply(&config, &mut decoder)?;
        decoder.mlp.activation = mlp::activation(&config, "hidden_act", fields.hidden_act.as_deref())?;
        decoder.mlp.fused = !fields.shared_mlp_apart;
        let width = fields.shared_intermediate_size.unwrap_or(1024);
        config.check("shared_intermediate_size", width, 1 << 24)?;
        let experts = fields.num_local_experts.unwrap_or(8);
        if experts == 0 {
            (decoder.mlp.intermediate, decoder.sizes.intermediate) = (width, width);
            decoder.names = Names { feed_forward: "shared_mlp", aliases: DENSE, ..decoder.names };
        } else {
            let experts = ExpertsConfig {
                experts,
                chosen: fields.num_experts_per_tok.unwrap_or(2),
                intermediate: decoder.sizes.intermediate,
                shared: Some(SharedConfig { width, name: "shared_mlp", gated: false }),
                // The softmax of the chosen logits.
                router: RouterConfig::softmax(true),
                names: ExpertNames::new("router"),
                ..ExpertsConfig::default()
            };
            experts.check(&config, "num_local_experts")?;
            decoder.set_experts(experts, |_| true);
            decoder.names = Names { feed_forward: "block_sparse_moe", aliases: MIXTURE, ..decoder.names };
        }
        let layers = decoder.blocks.len();
        let attends = config.marks("layer_types", layers, ["full_attention", "linear_attention"])?;
        let attends = attends.unwrap_or_else(|| vec![false; layers]);
        decoder.set_states(StateConfig::Mamba2(mamba), mamba.channels(), &attends);
        Ok(Box::new(decoder))
    }
}

/// Names in folders without experts.
const DENSE: &[(&str, &str)] = &[
    (".shared_mlp.input_linear.", ".shared_mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".shared_mlp.down_proj."),
];

/// Names in folders with experts.
const MIXTURE: &[(&str, &str)] = &[
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
    (".shared_mlp.input_linear.", ".block_sparse_moe.shared_mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".block_sparse_moe.shared_mlp.down_proj."),
];
