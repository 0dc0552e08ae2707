//! Models made up on the device, to measure speed without a download.

use std::ops::Range;

use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_core::{Result, budget::Claim, read_back};

use crate::{ConfigFile, HostMatrix, Part, Weights};

/// Sizes of a made-up Llama: `LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,VOCAB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomLlama {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub intermediate: usize,
    pub vocab: usize,
}

impl RandomLlama {
    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        let &Self { layers, hidden, heads, kv_heads, intermediate, vocab } = self;
        // As far as they can be counted: sizes are checked elsewhere.
        let product = |a: usize, b: usize| (a as u64).saturating_mul(b as u64);
        let key_values = product(hidden / heads.max(1), 2 * kv_heads);
        let matrices = [2 * hidden as u64, key_values, 3 * intermediate as u64, 2];
        let block =
            matrices.iter().fold(0u64, |sum, width| sum.saturating_add(width.saturating_mul(hidden as u64)));
        block
            .saturating_mul(layers as u64)
            .saturating_add(product(hidden, vocab.saturating_mul(2)))
            .saturating_add(hidden as u64)
    }

    /// The config that transformers would write for these sizes.
    pub fn config(&self) -> ConfigFile {
        ConfigFile::from_json(serde_json::json!({
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1 << 20,
        }))
    }
}

/// Sizes of a made-up Mamba: `LAYERS,HIDDEN,STATE,VOCAB`. The rest is as transformers has it by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomMamba {
    pub layers: usize,
    pub hidden: usize,
    /// Numbers of a channel's state.
    pub state: usize,
    pub vocab: usize,
}

impl RandomMamba {
    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        let [layers, hidden, state, vocab] =
            [self.layers, self.hidden, self.state, self.vocab].map(|n| n as u64);
        // As far as they can be counted: sizes are checked elsewhere. Twice as many channels, and four inputs of each.
        let channels = hidden.saturating_mul(2);
        let rank = hidden.div_ceil(16);
        let a_channel = [hidden, hidden, hidden, 2 * rank, state.saturating_mul(3), 4 + 1 + 1 + 1];
        let mixer = a_channel.into_iter().fold(0u64, u64::saturating_add).saturating_mul(channels);
        let blocks = mixer.saturating_add(hidden).saturating_mul(layers);
        blocks.saturating_add(hidden.saturating_mul(vocab)).saturating_add(hidden)
    }

    /// The config that transformers would write for these sizes.
    pub fn config(&self) -> ConfigFile {
        ConfigFile::from_json(serde_json::json!({
            "model_type": "mamba",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "state_size": self.state,
            "vocab_size": self.vocab,
        }))
    }
}

/// Sizes of a made-up Mixtral: `LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,EXPERTS,CHOSEN,VOCAB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomMixtral {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of each expert.
    pub intermediate: usize,
    pub experts: usize,
    /// Experts that a token goes to.
    pub chosen: usize,
    pub vocab: usize,
}

impl RandomMixtral {
    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        let &Self { layers, hidden, heads, kv_heads, intermediate, experts, vocab, .. } = self;
        let width = intermediate.saturating_mul(experts);
        // A Llama of that width, and routers.
        let dense = RandomLlama { layers, hidden, heads, kv_heads, intermediate: width, vocab };
        dense.parameters().saturating_add(elements(&[layers, hidden, experts]))
    }

    /// The config that transformers would write for these sizes.
    pub fn config(&self) -> ConfigFile {
        ConfigFile::from_json(serde_json::json!({
            "model_type": "mixtral",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1 << 20,
        }))
    }
}

/// Sizes of a made-up Jamba: `LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,EXPERTS,VOCAB`. The rest is as transformers has it by default: attention in block 4 of each
/// 8, 2 of the experts in every other block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomJamba {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of each expert.
    pub intermediate: usize,
    pub experts: usize,
    pub vocab: usize,
}

impl RandomJamba {
    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        let &Self { layers, hidden, heads, kv_heads, intermediate, experts, vocab } = self;
        let attending = (layers / 8).saturating_add(usize::from(layers % 8 > 4));
        let [mixing, mixtures] = [layers - attending.min(layers), layers / 2];
        // A Mamba of these blocks without a head of its own, whose norms are less than attention's are more.
        let (state, rank) = (16, hidden.div_ceil(16));
        let mamba = RandomMamba { layers: mixing, hidden, state, vocab }.parameters();
        let norms = elements(&[mixing, rank + 2 * state]);
        let heads = heads.saturating_add(kv_heads).saturating_mul(hidden / heads.max(1));
        let attention =
            elements(&[attending, hidden, 2, heads]).saturating_add(elements(&[attending, hidden]));
        let expert = elements(&[3, hidden, intermediate]);
        let dense = expert.saturating_mul((layers - mixtures) as u64);
        let mixture = expert.saturating_mul(experts as u64).saturating_add(elements(&[hidden, experts]));
        let feed_forward =
            mixture.saturating_mul(mixtures as u64).saturating_add(elements(&[layers, hidden]));
        [mamba, norms, attention, dense, feed_forward, elements(&[hidden, vocab])]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// The config that transformers would write for these sizes.
    pub fn config(&self) -> ConfigFile {
        ConfigFile::from_json(serde_json::json!({
            "model_type": "jamba",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "vocab_size": self.vocab,
        }))
    }
}

/// The product, as far as it can be counted: sizes are checked elsewhere.
fn elements(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1, |product, &size| product.saturating_mul(size as u64))
}

/// A made-up model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomModel {
    Llama(RandomLlama),
    Mamba(RandomMamba),
    Mixtral(RandomMixtral),
    Jamba(RandomJamba),
}

impl RandomModel {
    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        match self {
            Self::Llama(sizes) => sizes.parameters(),
            Self::Mamba(sizes) => sizes.parameters(),
            Self::Mixtral(sizes) => sizes.parameters(),
            Self::Jamba(sizes) => sizes.parameters(),
        }
    }

    /// The config that transformers would write for these sizes.
    pub fn config(&self) -> ConfigFile {
        match self {
            Self::Llama(sizes) => sizes.config(),
            Self::Mamba(sizes) => sizes.config(),
            Self::Mixtral(sizes) => sizes.config(),
            Self::Jamba(sizes) => sizes.config(),
        }
    }
}

impl From<&RandomLlama> for RandomModel {
    fn from(sizes: &RandomLlama) -> Self {
        Self::Llama(*sizes)
    }
}

impl From<&RandomMamba> for RandomModel {
    fn from(sizes: &RandomMamba) -> Self {
        Self::Mamba(*sizes)
    }
}

impl From<&RandomMixtral> for RandomModel {
    fn from(sizes: &RandomMixtral) -> Self {
        Self::Mixtral(*sizes)
    }
}

impl From<&RandomJamba> for RandomModel {
    fn from(sizes: &RandomJamba) -> Self {
        Self::Jamba(*sizes)
    }
}

/// Normal noise of the size that transformers initialises with.
#[derive(Debug)]
pub struct RandomWeights {
    pub device: Device,
    pub dtype: DType,
    pub largest_binding: usize,
    /// How many experts of each block stay on the device, where the others are to be in host memory.
    pub resident_experts: Option<usize>,
    /// To the memory of those made so far.
    pub claim: Claim,
    /// Elements of all of them, wherever they are.
    pub elements: u64,
}

impl RandomWeights {
    fn noise<const D: usize>(&mut self, shape: [usize; D]) -> Result<Tensor<D>> {
        let elements = shape.iter().product::<usize>();
        let bytes = elements * self.dtype.size();
        self.elements += elements as u64;
        self.claim.resize(self.claim.bytes() + bytes as u64)?;
        Ok(Tensor::random(shape, Distribution::Normal(0.0, 0.02), (&self.device, self.dtype)))
    }
}

impl Weights for RandomWeights {
    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        Ok(self.noise([parts.iter().map(|part| part.rows).sum()])? + 1.0)
    }

    fn dense_matrix(&mut self, _parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        self.noise([range.len(), width])
    }

    fn host_matrix(&mut self, _parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        let shape = [range.len(), width];
        self.elements += shape.iter().product::<usize>() as u64;
        let options = (&self.device, self.dtype);
        let numbers = Tensor::<2>::random(shape, Distribution::Normal(0.0, 0.02), options);
        read_back::read(numbers).map(HostMatrix::dense)
    }

    fn resident_experts(&self) -> Option<usize> {
        self.resident_experts
    }

    fn float32(&mut self, _name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let others = std::mem::replace(&mut self.dtype, DType::F32);
        let numbers = self.noise([shape.iter().product()]);
        self.dtype = others;
        numbers
    }

    fn largest_binding(&self) -> usize {
        self.largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameters_of_a_mamba_are_those_that_transformers_counts() {
        // mamba-130m, whose vocabulary is filled up to 50,280.
        let sizes = RandomMamba { layers: 24, hidden: 768, state: 16, vocab: 50_280 };
        assert_eq!(sizes.parameters(), 129_135_360);
    }

    #[test]
    fn the_parameters_of_mixtures_are_those_that_transformers_counts() {
        let mixtral = RandomMixtral {
            layers: 4,
            hidden: 512,
            heads: 8,
            kv_heads: 2,
            intermediate: 700,
            experts: 5,
            chosen: 2,
            vocab: 1000,
        };
        assert_eq!(mixtral.parameters(), 25_164_288);
        let jamba = RandomJamba {
            layers: 12,
            hidden: 512,
            heads: 8,
            kv_heads: 2,
            intermediate: 700,
            experts: 5,
            vocab: 1000,
        };
        assert_eq!(jamba.parameters(), 59_057_344);
    }
}
