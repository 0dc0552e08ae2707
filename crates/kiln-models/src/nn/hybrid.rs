//! Attention and a mixer with states side by side (transformers' `FalconH1DecoderLayer`): both see the same
//! vectors, and their outputs are added up.

use burn::tensor::{DType, Tensor};
use kiln_core::{Result, model_cache::Pass, need::LayerNeed};
use kiln_kernels::Kernels;

use super::{
    attention::{Attention, AttentionConfig},
    linear::Linear,
    mamba2::{Mamba2, Mamba2Config},
    norm::{NormKind, Normed},
    places::Places,
    rope::Ropes,
    states::StateMixer,
};
use crate::Weights;

/// Settings of both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HybridConfig {
    pub(crate) attention: AttentionConfig,
    pub(crate) mamba: Mamba2Config,
}

impl HybridConfig {
    pub(crate) fn need(&self, ropes: Option<&Ropes>) -> LayerNeed {
        LayerNeed { recurrent: Some(self.mamba.need()), ..self.attention.need(ropes) }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Hybrid {
    attention: Attention,
    mamba: Mamba2,
}

impl Hybrid {
    /// Reads the weights of both, by the names of their modules. `dtype` is the type of most weights.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        [attention, mamba]: [&str; 2],
        config: &HybridConfig,
        norm: NormKind,
        dtype: DType,
    ) -> Result<Self> {
        Ok(Self {
            attention: Attention::load(weights, attention, &config.attention, norm)?,
            mamba: Mamba2::load(weights, mamba, config.mamba, dtype)?,
        })
    }

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        self.attention.linears().into_iter().chain(self.mamba.linears()).collect()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.attention.bytes() + self.mamba.bytes()
    }

    /// Applies both to vectors that are not normed yet, and adds `residual` if there is one. `layer` is the
    /// number of the block.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        residual: Option<Tensor<3>>,
        normed: Normed<'_>,
        layer: usize,
        places: &mut Places<'_>,
        pass: &mut Pass<'_>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let x = normed.compute(kernels);
        let mixed = self.mamba.forward(residual, x.clone(), places, pass.recurrent(layer)?, kernels)?;
        let normed = Normed { norm: None, x };
        self.attention.forward(Some(mixed), normed, places, pass.keys(layer)?, kernels)
    }
}
