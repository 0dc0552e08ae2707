//! Attention of a decoder to the output of an encoder (Vaswani et al., 2017).

use burn::tensor::{DType, Tensor, activation::softmax};
use kiln_core::{
    Error, Result,
    layer::{CrossLayer, Kv},
    model_cache::RowPart,
    view::KvView,
};
use kiln_kernels::{AttentionShape, Kernels, product};

use super::{
    attention::{AttentionConfig, attend},
    linear::Linear,
    places::Places,
};
use crate::Weights;

/// Cross-attention in which every token sees all encoded positions. Keys and values are computed once and
/// kept.
#[derive(Clone, Debug)]
pub(crate) struct CrossAttention {
    q_proj: Linear,
    /// `k_proj` and `v_proj`, stacked.
    kv_proj: Linear,
    o_proj: Linear,
    config: AttentionConfig,
}

impl CrossAttention {
    pub(crate) fn load(weights: &mut dyn Weights, name: &str, config: &AttentionConfig) -> Result<Self> {
        let &AttentionConfig { hidden, heads, kv_heads, head_dim, value_dim, .. } = config;
        let &AttentionConfig { qkv_bias, k_bias, o_bias, o_name, .. } = config;
        let part = |part: &str| format!("{name}.{part}");
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(part);
        let [queries, keys] = [heads, kv_heads].map(|heads| heads * head_dim);
        let [mixed, values] = [heads, kv_heads].map(|heads| heads * value_dim);
        let has_bias = |part: &str| qkv_bias && (k_bias || part != k);
        Ok(Self {
            q_proj: Linear::load(weights, &q, [hidden, queries], qkv_bias)?,
            kv_proj: Linear::stacked_where(weights, &[(&k, keys), (&v, values)], hidden, has_bias)?,
            o_proj: Linear::load(weights, &part(o_name), [mixed, hidden], o_bias)?,
            config: *config,
        })
    }

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.q_proj, &mut self.kv_proj, &mut self.o_proj].into()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.q_proj.bytes() + self.kv_proj.bytes() + self.o_proj.bytes()
    }

    /// Computes keys and values `[rows, kv_heads, positions, width]` from `encoded`
    /// `[rows, positions, hidden]`.
    pub(crate) fn keys_values(&self, encoded: Tensor<3>, kernels: &Kernels) -> Kv {
        let [rows, positions, _] = encoded.dims();
        let AttentionConfig { kv_heads, head_dim, value_dim, .. } = self.config;
        let both = self.kv_proj.forward(encoded, kernels);
        if value_dim == head_dim {
            // Nothing is copied.
            let both = both.reshape([rows, positions, 2 * kv_heads, head_dim]).swap_dims(1, 2);
            return (both.clone().narrow(1, 0, kv_heads), both.narrow(1, kv_heads, kv_heads));
        }
        let part = |from, width| {
            let own = both.clone().narrow(2, from, kv_heads * width);
            own.reshape([rows, positions, kv_heads, width]).swap_dims(1, 2)
        };
        (part(0, head_dim), part(kv_heads * head_dim, value_dim))
    }

    /// Applies cross-attention to `x`, and adds `residual`. `layer` is the number of the block.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        residual: Tensor<3>,
        x: Tensor<3>,
        layer: usize,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn CrossLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let [batch, tokens, _] = x.dims();
        let AttentionConfig { heads, head_dim, scale, softcap, .. } = self.config;
        let shape = AttentionShape { scale, softcap, window: None, causal: false, end: None, latent: false };
        let queries =
            self.q_proj.forward(x, kernels).reshape([batch, tokens, heads, head_dim]).swap_dims(1, 2);
        let wanted = places.aligned.iter().filter(|(of, _)| *of == layer);
        let wanted: Vec<usize> = wanted.map(|(_, head)| *head).collect();
        let (mut mixed, mut aligned) = (Vec::with_capacity(parts.len()), Vec::new());
        for part in parts {
            let frame = places.encoder_frame(&part);
            if frame.new_tokens() == 0 {
                continue;
            }
            let keys = part.layer.seq_len();
            let view = part.layer.view()?.ok_or_else(|| {
                Error::Execution("attention to an encoder that was given nothing".to_owned())
            })?;
            let queries = frame.own_heads(&queries);
            if !wanted.is_empty() {
                aligned.push(weights(&queries, &view, &wanted, scale)?);
            }
            mixed.push(attend(queries, view, places.behind(part.rows.len(), keys), shape, None, kernels));
        }
        places.align(aligned);
        Ok(self.o_proj.forward_onto(Some(residual), places.joined_heads(mixed), kernels))
    }
}

/// Returns the attention weights of `queries` `[rows, heads, tokens, head_dim]` over all keys, for the heads
/// in `heads`: `[rows, heads, tokens, positions]` in float32.
fn weights(queries: &Tensor<4>, view: &KvView, heads: &[usize], scale: f64) -> Result<Tensor<4>> {
    let KvView::Dense(kv) = view else {
        return Err(Error::Execution("attention to packed keys has no weights".to_owned()));
    };
    let of_head = |head: usize| {
        let [q, k] = [queries, &kv.keys].map(|x| x.clone().narrow(1, head, 1).cast(DType::F32));
        softmax(product(q, k.transpose()) * scale, 3)
    };
    Ok(Tensor::cat(heads.iter().map(|&head| of_head(head)).collect(), 1))
}
