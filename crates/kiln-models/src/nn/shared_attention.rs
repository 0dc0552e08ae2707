//! Attention to the keys and values of an earlier block (transformers' `Gemma4TextAttention` of blocks after
//! `num_kv_shared_layers`): the block has queries alone, and nothing to remember.

use burn::tensor::Tensor;
use kiln_core::{Error, Result};
use kiln_kernels::{Kernels, Rotary};

use super::{
    attention::{AttentionConfig, HeadNorms, attend},
    linear::Linear,
    norm::{Norm, NormKind, Normed},
    places::{Frame, Kept, Places},
};
use crate::Weights;

#[derive(Clone, Debug)]
pub(crate) struct SharedAttention {
    q_proj: Linear,
    q_norm: Option<Norm>,
    o_proj: Linear,
    config: AttentionConfig,
}

impl SharedAttention {
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: &AttentionConfig,
        norm: NormKind,
    ) -> Result<Self> {
        let &AttentionConfig { hidden, heads, head_dim, value_dim, qkv_bias, o_bias, o_name, .. } = config;
        let part = |part: &str| format!("{name}.{part}");
        let q_proj = Linear::load(weights, &part("q_proj"), [hidden, heads * head_dim], qkv_bias)?;
        let q_norm = match config.head_norms {
            Some(HeadNorms::PerHead([q, _])) => Some(Norm::load(weights, &part(q), head_dim, norm)?),
            Some(HeadNorms::Whole([q, _])) => Some(Norm::load(weights, &part(q), heads * head_dim, norm)?),
            None => None,
        };
        let o_proj = Linear::load(weights, &part(o_name), [heads * value_dim, hidden], o_bias)?;
        Ok(Self { q_proj, q_norm, o_proj, config: *config })
    }

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.q_proj, &mut self.o_proj].into()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.q_proj.bytes() + self.q_norm.as_ref().map_or(0, Norm::bytes) + self.o_proj.bytes()
    }

    /// Applies attention to vectors that are not normed yet, and adds `residual` if there is one.
    ///
    /// # Errors
    /// [`Error::Execution`] if no block before this one kept its keys.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`, or `[1, tokens, hidden]` in a flat pass.
    pub(crate) fn forward(
        &self,
        residual: Option<Tensor<3>>,
        normed: Normed<'_>,
        places: &mut Places<'_>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let AttentionConfig { heads, head_dim, rope, head_norms, .. } = self.config;
        let [batch, tokens, _] = normed.x.dims();
        let all = rope.map(|rope| places.kept(rope)).unwrap_or_default();
        if all.is_empty() {
            return Err(Error::Execution("no earlier block kept its keys and values".to_owned()));
        }
        let frames: Vec<Frame> = all.iter().flat_map(|kept| kept.frames.iter().cloned()).collect();
        let (tables, pairs) = (places.rotary(&frames, rope), places.pairs(rope));
        let queries = self.q_proj.forward(normed.compute(kernels), kernels);
        let queries = match &self.q_norm {
            Some(norm) if matches!(head_norms, Some(HeadNorms::PerHead(_))) => {
                norm.forward(queries.reshape([batch * tokens, heads, head_dim]), kernels)
            }
            Some(norm) => norm.forward(queries, kernels),
            None => queries,
        };
        let x = queries.reshape([batch, tokens, heads, head_dim]).swap_dims(1, 2);
        let queries = match tables {
            Some((cos, sin)) => kernels.run(Rotary { x, cos, sin, pairs }),
            None => x,
        };
        let mut mixed = Vec::with_capacity(all.len());
        for Kept { frames, view, positions } in all {
            let Some(frame) = Frame::around(&frames) else { continue };
            mixed.push(attend(
                frame.own_heads(&queries),
                view,
                positions,
                self.config.shape(),
                None,
                kernels,
            ));
        }
        Ok(self.o_proj.forward_onto(residual, places.joined_heads(mixed), kernels))
    }
}
