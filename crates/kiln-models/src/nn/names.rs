//! Tensor names: differences between architectures, and between checkpoints of one architecture.

use std::fmt;

use super::{
    attention::AttentionConfig,
    block::{BlockConfig, FeedForwardConfig, MixerConfig, StateConfig},
    decoder::{DecoderConfig, PER_LAYER},
    experts::ExpertsConfig,
    mamba::MambaConfig,
};

/// Parts of folders of encoders, which embeddings do not use.
pub(crate) const HEADS: &str = "heads for tasks";

/// Names of modules in a checkpoint that differ between architectures, each without the dots around it. The
/// defaults are those of Llama.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// Module that contains all others except the head.
    pub(crate) model: &'static str,
    /// Name of the embeddings of tokens.
    pub(crate) embeddings: &'static str,
    /// Name of the table of learned positions.
    pub(crate) positions: &'static str,
    /// Module of the blocks.
    pub(crate) layers: &'static str,
    /// Name of the norm after the last block.
    pub(crate) norm: &'static str,
    /// Name of the matrix that turns hidden states into logits.
    pub(crate) head: &'static str,
    pub(crate) norms: NormNames,
    /// Name of a mixer that is attention.
    pub(crate) attention: &'static str,
    /// Name of a mixer that is a state-space model.
    pub(crate) state_space: &'static str,
    /// Name of a block's feed-forward.
    pub(crate) feed_forward: &'static str,
    /// Parts of names in checkpoints of other versions of Transformers, and their counterparts.
    pub(crate) aliases: &'static [(&'static str, &'static str)],
    /// Ends of the names of matrices that are stored as `[in, out]`.
    pub(crate) transposed: &'static [&'static str],
}

/// Names of the norms of a block; `None` for a norm that a block does not have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormNames {
    /// Norm before the mixer (attention, or a state-space model).
    pub(crate) before_mixer: Option<&'static str>,
    pub(crate) after_mixer: Option<&'static str>,
    /// Norm before the feed-forward. A parallel block without one feeds both its halves the same vectors.
    pub(crate) before_feed_forward: Option<&'static str>,
    pub(crate) after_feed_forward: Option<&'static str>,
}

impl NormNames {
    /// Names of norms before the mixer and before the feed-forward.
    pub(crate) const fn before(mixer: &'static str, feed_forward: &'static str) -> Self {
        Self {
            before_mixer: Some(mixer),
            after_mixer: None,
            before_feed_forward: Some(feed_forward),
            after_feed_forward: None,
        }
    }

    /// Names of norms before and after, as Gemma 2 has them.
    pub(crate) const AROUND: Self = Self {
        before_mixer: Some("input_layernorm"),
        after_mixer: Some("post_attention_layernorm"),
        before_feed_forward: Some("pre_feedforward_layernorm"),
        after_feed_forward: Some("post_feedforward_layernorm"),
    };

    /// Names of norms after mixer and feed-forward, as OLMo 2 has them.
    pub(crate) const AFTER: Self = Self { before_mixer: None, before_feed_forward: None, ..Self::AROUND };
}

impl Default for Names {
    fn default() -> Self {
        Self {
            model: "model",
            embeddings: "embed_tokens",
            positions: "embed_positions",
            layers: "layers",
            norm: "norm",
            head: "lm_head",
            norms: NormNames::before("input_layernorm", "post_attention_layernorm"),
            attention: "self_attn",
            state_space: "mamba",
            feed_forward: "mlp",
            aliases: &[],
            transposed: &[],
        }
    }
}

/// Names of the tensors that a model is going to load, to match the tensors of a checkpoint with them.
#[derive(Clone, Debug)]
pub struct TensorNames {
    /// The module that contains all tensors except the head (`base_model_prefix` of transformers). The
    /// checkpoint of this module alone, such as one of `LlamaModel`, lacks this part of the names.
    pub(crate) base: &'static str,
    /// Modules directly in `base`.
    pub(crate) children: Vec<&'static str>,
    /// Name of the tensor of embeddings.
    pub(crate) embedding: String,
    /// Name of the head's module.
    pub(crate) head: &'static str,
    /// Prefixes of the names of blocks, such as `model.layers.`, and the number of blocks with each.
    pub(crate) blocks: Vec<(String, usize)>,
    /// Parts of names in other versions of Transformers, and their counterparts here.
    pub(crate) aliases: Vec<(&'static str, &'static str)>,
    /// Tensors of experts, if there are any.
    pub(crate) experts: Option<ExpertTensors>,
    /// Ends of the names of tensors that are stored in another order, after the name of their module.
    pub(crate) stored: Vec<(&'static str, StoredOrder)>,
    /// Beginnings of the names of tensors that may be there and are not read, with what they are.
    pub(crate) unread: Vec<(String, &'static str)>,
    /// Last parts of the names of modules that have no bias by the config. A bias of zeros in the checkpoint
    /// is ignored, any other is an error.
    pub(crate) without_bias: Vec<&'static str>,
}

/// Tensors of experts, and their order where one tensor holds those of all experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertTensors {
    /// Names of the matrices of an expert; those without a gate have two.
    pub(crate) gate: Option<&'static str>,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// Whether matrices are `[experts, in, out]`.
    pub(crate) transposed: bool,
    /// Whether rows of gate and up alternate, instead of following each other.
    pub(crate) interleaved: bool,
}

/// The order of the numbers of a stored tensor.
#[derive(Clone, Debug)]
pub(crate) enum StoredOrder {
    /// A matrix `[in, out]`.
    Transposed,
    /// Rows of all parts of the first head, then those of the second, and so on; the parts become tensors of
    /// their own.
    ByHead(ByHead),
}

/// The parts of a matrix whose rows are sorted by head.
#[derive(Clone, Debug)]
pub(crate) struct ByHead {
    pub(crate) heads: usize,
    /// Names of the parts, and the numbers of their rows per head.
    pub(crate) parts: Vec<(&'static str, usize)>,
    /// A part that is needed a second time, with the matrix of each head transposed. [`TRANSPOSED`] is
    /// appended to its name.
    pub(crate) transposed: Option<&'static str>,
}

/// End of the names of modules whose matrices are second, transposed copies.
pub(crate) const TRANSPOSED: &str = "_transposed";

/// Whether a tensor is a transposed copy of another one, and so no parameter of its own.
pub(crate) fn is_second(name: &str) -> bool {
    name.strip_suffix(".weight").is_some_and(|module| module.ends_with(TRANSPOSED))
}

impl ByHead {
    pub(crate) fn new(heads: usize, parts: impl Into<Vec<(&'static str, usize)>>) -> Self {
        Self { heads, parts: parts.into(), transposed: None }
    }
}

impl fmt::Display for StoredOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transposed => f.write_str("a transposed matrix"),
            Self::ByHead(ByHead { heads, parts, .. }) => {
                let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
                write!(f, "a matrix of {heads} heads with {rows} rows each")
            }
        }
    }
}

impl TensorNames {
    /// Returns the model's name for a tensor that a checkpoint calls `name`: adds a missing `base`, removes
    /// one before the head, and replaces aliases. Other names are returned as they are.
    pub(crate) fn known(&self, name: &str) -> String {
        let (first, rest) = name.split_once('.').unwrap_or((name, ""));
        let known = match rest.split_once('.') {
            Some((second, _)) if first == self.base && second == self.head => rest.to_owned(),
            _ if self.children.contains(&first) => format!("{}.{name}", self.base),
            _ => name.to_owned(),
        };
        self.aliases.iter().fold(known, |name, (from, to)| name.replacen(from, to, 1))
    }

    /// Name of the tensor of the head.
    pub(crate) fn head_weight(&self) -> String {
        format!("{}.weight", self.head)
    }
}

impl DecoderConfig {
    /// Returns the names of the decoder's tensors.
    pub(crate) fn tensor_names(&self) -> TensorNames {
        let Names { model, embeddings, positions, layers, norm, head, aliases, .. } = self.names;
        let (base, mut children) = match model.split_once('.') {
            Some((base, child)) => (base, vec![child]),
            None => (model, vec![embeddings, positions, layers, norm]),
        };
        // A name may be a path.
        children.iter_mut().for_each(|name| *name = name.split_once('.').map_or(*name, |(first, _)| first));
        if base == model && self.per_layer.is_some() {
            children.extend(PER_LAYER);
        }
        let of_experts = |block: &BlockConfig| match block.feed_forward {
            Some(FeedForwardConfig::Experts(experts) | FeedForwardConfig::Beside(experts, _)) => {
                Some(experts)
            }
            _ => None,
        };
        let experts = self.blocks.iter().find_map(of_experts);
        TensorNames {
            base,
            children,
            embedding: format!("{model}.{embeddings}.weight"),
            head,
            blocks: vec![(format!("{model}.{layers}."), self.blocks.len())],
            aliases: aliases.to_vec(),
            experts: experts.map(|experts| experts.names).map(|names| ExpertTensors {
                gate: names.gate,
                up: names.up,
                down: names.down,
                transposed: names.transposed,
                interleaved: names.interleaved,
            }),
            stored: self.stored_orders(),
            unread: [self.unread(&format!("{model}.{layers}.")), self.heads_of_encoder()].concat(),
            without_bias: self.without_bias(experts),
        }
    }

    /// Returns the tensors of keys and values of blocks that attend to those of others.
    fn unread(&self, blocks: &str) -> Vec<(String, &'static str)> {
        const SHARED: &str = "keys and values of blocks that use those of others";
        let shares = |(i, block): (usize, &BlockConfig)| {
            matches!(block.mixer, MixerConfig::SharedAttention(_)).then_some(i)
        };
        let shared = self.blocks.iter().enumerate().filter_map(shares);
        let parts = |i| ["k_proj", "v_proj", "k_norm", "v_norm"].map(|part| (i, part));
        let attention = self.names.attention;
        let name = |(i, part)| (format!("{blocks}{i}.{attention}.{part}."), SHARED);
        shared.flat_map(parts).map(name).collect()
    }

    /// Returns the tensors of the tasks that an encoder was trained for.
    fn heads_of_encoder(&self) -> Vec<(String, &'static str)> {
        let model = self.names.model;
        let heads = [format!("{model}.pooler."), "pooler.".to_owned(), "cls.".to_owned()];
        let heads = |_| heads.map(|name| (name, HEADS));
        self.text_encoder.map(heads).into_iter().flatten().collect()
    }

    /// Returns the tensors that are stored in another order, by the ends of their names.
    fn stored_orders(&self) -> Vec<(&'static str, StoredOrder)> {
        let transposed = self.names.transposed.iter().map(|end| (*end, StoredOrder::Transposed));
        let by_head = self.by_head.iter().map(|(end, by_head)| (*end, StoredOrder::ByHead(by_head.clone())));
        transposed.chain(by_head).collect()
    }

    /// Returns the modules without a bias, by the last part of their names.
    fn without_bias(&self, experts: Option<ExpertsConfig>) -> Vec<&'static str> {
        const FEED_FORWARD: [&str; 8] =
            ["gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "shared_expert_gate"];

        let any = |has_bias: fn(&AttentionConfig) -> bool| self.attention().any(has_bias);
        let o_name = self.attention().next().map_or("o_proj", |attention| attention.o_name);
        let fused = self.attention().find_map(|attention| attention.fused).unwrap_or("qkv_proj");
        let plain = self.blocks.iter().find_map(|block| match block.feed_forward {
            Some(FeedForwardConfig::Plain(names)) => Some(names),
            _ => None,
        });
        let plain = plain.unwrap_or(["fc1", "fc2"]).map(|name| name.rsplit('.').next().unwrap_or(name));
        let latent = |block: &BlockConfig| match block.mixer {
            MixerConfig::Latent(latent) => Some(latent.bias),
            _ => None,
        };
        let latent = self.blocks.iter().find_map(latent).unwrap_or(false);
        let convolves = |block: &super::block::BlockConfig| match block.mixer {
            MixerConfig::State(StateConfig::ShortConv(conv)) => conv.bias,
            _ => false,
        };
        let convolves = self.blocks.iter().any(convolves);
        let biased = self.mlp.bias || experts.is_some_and(|experts| experts.bias);
        let router = experts.filter(|experts| !experts.bias).map(|experts| experts.names.router);
        let mut modules: Vec<&'static str> = router.into_iter().collect();
        for (has_bias, without) in [
            (self.head_bias, &[self.names.head][..]),
            (any(|attention| attention.qkv_bias), &["q_proj", "v_proj", fused]),
            (any(|attention| attention.qkv_bias && attention.k_bias), &["k_proj"]),
            // Mixers of all kinds may call their output projection so.
            (any(|attention| attention.o_bias) || latent || convolves, &[o_name]),
            (latent, &["q_a_proj", "kv_a_proj_with_mqa"]),
            (biased, &FEED_FORWARD),
            (self.mlp.bias, &plain),
        ] {
            if !has_bias {
                modules.extend(without);
            }
        }
        for block in &self.blocks {
            if let MixerConfig::State(StateConfig::Mamba(MambaConfig { bias: false, .. })) = block.mixer {
                modules.extend(["in_proj", "x_proj", "out_proj"]);
                break;
            }
        }
        modules
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use serde_json::json;

    use crate::{ConfigFile, configure};

    #[track_caller]
    fn check(config: serde_json::Value, spellings: &[(&str, &str)]) {
        let names = configure(&ConfigFile::from_json(config)).unwrap().tensor_names();
        for (stored, known) in spellings {
            assert_eq!(names.known(stored), *known);
            assert_eq!(names.known(known), *known);
        }
    }

    #[test]
    fn checkpoints_of_the_base_model_have_the_same_names() {
        let sizes = json!({
            "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
            "vocab_size": 97, "num_key_value_heads": 4,
        });
        let of = |model_type: &str| {
            let mut config = sizes.clone();
            config["model_type"] = model_type.into();
            config
        };
        let decoder = [
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
            ("norm.weight", "model.norm.weight"),
            ("model.lm_head.weight", "lm_head.weight"),
            ("score.weight", "score.weight"),
        ];
        check(of("llama"), &decoder);
        check(of("gemma2"), &decoder);
        check(of("jamba"), &[("final_layernorm.weight", "model.final_layernorm.weight")]);
        check(
            of("mamba"),
            &[
                ("embeddings.weight", "backbone.embeddings.weight"),
                ("layers.0.mixer.D", "backbone.layers.0.mixer.D"),
                ("norm_f.weight", "backbone.norm_f.weight"),
            ],
        );
        check(
            of("mixtral"),
            &[
                ("layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
                ("model.layers.0.mlp.experts.down_proj", "model.layers.0.block_sparse_moe.experts.down_proj"),
            ],
        );
        check(
            json!({ "model_type": "whisper" }),
            &[
                ("decoder.layers.0.fc1.bias", "model.decoder.layers.0.fc1.bias"),
                ("encoder.conv1.weight", "model.encoder.conv1.weight"),
                ("model.proj_out.weight", "proj_out.weight"),
            ],
        );
    }
}
