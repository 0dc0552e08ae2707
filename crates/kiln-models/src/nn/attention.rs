//! Grouped attention with rotary positions, and where its tokens stand.

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation::softmax};
use kiln_core::{
    Result,
    batch::Batch,
    layer::{KvLayer, KvSpan},
};
use kiln_kernels::Kernels;

use super::{
    linear::Linear,
    norm::{NormKind, RmsNorm},
    rope::Ropes,
};
use crate::{Rows, Sizes, Weights};

/// What architectures say of an attention block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionConfig {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) qkv_bias: bool,
    pub(crate) o_bias: bool,
    /// Whether the projections of queries, keys and values are one matrix, `qkv_proj`.
    pub(crate) fused: bool,
    /// Whether each head of queries and keys is normed before it is rotated.
    pub(crate) head_norms: bool,
    /// Queries are multiplied by it.
    pub(crate) scale: f64,
    /// Scores `s` become `softcap · tanh(s / softcap)`.
    pub(crate) softcap: Option<f64>,
}

impl AttentionConfig {
    /// Three projections, no biases, no norms, scaled by the root of the head's size.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, heads, kv_heads, head_dim, .. } = sizes;
        let scale = (head_dim as f64).powf(-0.5);
        let (qkv_bias, o_bias, fused, head_norms) = (false, false, false, false);
        let softcap = None;
        Self { hidden, heads, kv_heads, head_dim, qkv_bias, o_bias, fused, head_norms, scale, softcap }
    }
}

#[derive(Debug)]
enum Projections {
    Three { q_proj: Linear, k_proj: Linear, v_proj: Linear },
    One { qkv_proj: Rows },
}

#[derive(Debug)]
pub(crate) struct Attention {
    projections: Projections,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    config: AttentionConfig,
    /// Latest tokens a query may see, itself included.
    window: Option<usize>,
}

impl Attention {
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: &AttentionConfig,
        norm: NormKind,
        window: Option<usize>,
    ) -> Result<Self> {
        let &AttentionConfig { hidden, heads, kv_heads, head_dim, qkv_bias, o_bias, .. } = config;
        let linear = |weights: &mut dyn Weights, part: &str, shape, bias| {
            Linear::load(weights, &format!("{name}.{part}"), shape, bias)
        };
        let head_norm = |weights: &mut dyn Weights, part: &str| match config.head_norms {
            true => RmsNorm::load(weights, &format!("{name}.{part}"), head_dim, norm).map(Some),
            false => Ok(None),
        };
        let projections = match config.fused {
            false => Projections::Three {
                q_proj: linear(weights, "q_proj", [hidden, heads * head_dim], qkv_bias)?,
                k_proj: linear(weights, "k_proj", [hidden, kv_heads * head_dim], qkv_bias)?,
                v_proj: linear(weights, "v_proj", [hidden, kv_heads * head_dim], qkv_bias)?,
            },
            true => {
                let shape = [(heads + 2 * kv_heads) * head_dim, hidden];
                Projections::One { qkv_proj: weights.rows(&format!("{name}.qkv_proj.weight"), shape)? }
            }
        };
        Ok(Self {
            projections,
            o_proj: linear(weights, "o_proj", [heads * head_dim, hidden], o_bias)?,
            q_norm: head_norm(weights, "q_norm")?,
            k_norm: head_norm(weights, "k_norm")?,
            config: *config,
            window,
        })
    }

    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        places: &mut Places<'_>,
        layer: &mut dyn KvLayer,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let [batch, tokens, _] = x.dims();
        let AttentionConfig { heads, head_dim, scale, softcap, .. } = self.config;
        let norm = |x: Tensor<4>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward_heads(x, kernels),
            None => x,
        };
        let place = places.of(layer.span(tokens), self.window);

        let [queries, keys, values] = self.projections.forward(x, &self.config, kernels);
        let queries = norm(queries, &self.q_norm).swap_dims(1, 2);
        let keys = norm(keys, &self.k_norm).swap_dims(1, 2);
        let values = values.swap_dims(1, 2);
        let queries = kernels.rotary(queries, place.cos.clone(), place.sin.clone());
        let keys = kernels.rotary(keys, place.cos.clone(), place.sin.clone());

        let (keys, values) = layer.update(keys, values)?.into_dense();
        let mixed = attend(queries * scale, keys, values, softcap, place.hidden.clone());
        let merged = mixed.swap_dims(1, 2).reshape([batch, tokens, heads * head_dim]);
        Ok(self.o_proj.forward(merged, kernels))
    }
}

impl Projections {
    /// Queries, keys and values of `x` `[batch, tokens, hidden]`, each `[batch, tokens, heads, head_dim]`.
    fn forward(&self, x: Tensor<3>, config: &AttentionConfig, kernels: &Kernels) -> [Tensor<4>; 3] {
        let [batch, tokens, _] = x.dims();
        let &AttentionConfig { heads, kv_heads, head_dim, .. } = config;
        let split = |x: Tensor<3>, heads| x.reshape([batch, tokens, heads, head_dim]);
        match self {
            Self::Three { q_proj, k_proj, v_proj } => [
                split(q_proj.forward(x.clone(), kernels), heads),
                split(k_proj.forward(x.clone(), kernels), kv_heads),
                split(v_proj.forward(x, kernels), kv_heads),
            ],
            Self::One { qkv_proj } => {
                let all = split(qkv_proj.project(x, kernels), heads + 2 * kv_heads);
                [
                    all.clone().narrow(2, 0, heads),
                    all.clone().narrow(2, heads, kv_heads),
                    all.narrow(2, heads + kv_heads, kv_heads),
                ]
            }
        }
    }
}

/// `softmax(softcapped(q kᵀ)) v`, softmax in float32. Scaled queries `[batch, heads, new, head_dim]`, keys and values
/// `[batch, kv_heads, all, head_dim]`; `hidden` `[1 or batch, 1, new, all]` is true where a query may not look.
///
/// Queries of the heads that share keys are folded into rows, so that keys are never repeated.
fn attend(
    queries: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    softcap: Option<f64>,
    hidden: Option<Tensor<4, Bool>>,
) -> Tensor<4> {
    let [batch, heads, new, dim] = queries.dims();
    let [_, kv_heads, all, _] = keys.dims();
    let dtype = queries.dtype();
    let folded = [batch, kv_heads, heads / kv_heads * new];

    let scores = queries.reshape([folded[0], folded[1], folded[2], dim]).matmul(keys.transpose());
    let scores = softcapped(scores.cast(DType::F32), softcap).reshape([batch, heads, new, all]);
    let scores = match hidden {
        // Finite, as in the reference: a padded query sees nothing, and must not become NaN.
        Some(hidden) => scores.mask_fill(hidden.expand([batch, heads, new, all]), f32::MIN),
        None => scores,
    };
    let weights = softmax(scores, 3).cast(dtype).reshape([folded[0], folded[1], folded[2], all]);
    weights.matmul(values).reshape([batch, heads, new, dim])
}

/// `cap · tanh(x / cap)`: hardly changes what is small, and lets nothing beyond `cap`.
pub(crate) fn softcapped<const D: usize>(x: Tensor<D>, cap: Option<f64>) -> Tensor<D> {
    match cap {
        Some(cap) => (x / cap).tanh() * cap,
        None => x,
    }
}

/// Where the tokens of one forward pass stand: rotary tables and masks, made once for all blocks with the same span.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    batch: &'a Batch,
    ropes: &'a Ropes,
    device: Device,
    made: Vec<(KvSpan, Option<usize>, Place)>,
}

#[derive(Clone, Debug)]
struct Place {
    /// `[1 or batch, new, rotated / 2]`
    cos: Tensor<3>,
    sin: Tensor<3>,
    /// `[1 or batch, 1, new, all]`; `None` where every query sees every key.
    hidden: Option<Tensor<4, Bool>>,
}

impl<'a> Places<'a> {
    pub(crate) fn new(batch: &'a Batch, ropes: &'a Ropes) -> Self {
        Self { batch, ropes, device: batch.tokens.device(), made: Vec::new() }
    }

    fn of(&mut self, span: KvSpan, window: Option<usize>) -> Place {
        if let Some((_, _, place)) = self.made.iter().find(|(s, w, _)| (*s, *w) == (span, window)) {
            return place.clone();
        }
        let place = self.make(span, window);
        self.made.push((span, window, place.clone()));
        place
    }

    fn make(&self, span: KvSpan, window: Option<usize>) -> Place {
        let new = self.batch.len();
        let first = span.query(new);
        // Slots count padding, rotary positions do not.
        let positions = |pad: usize| (first..first + new).map(|slot| slot.saturating_sub(pad)).collect();
        let padded = self.batch.left_pad.iter().any(|&pad| pad > 0);
        let pads: &[usize] = if padded { &self.batch.left_pad } else { &[0] };
        let positions: Vec<Vec<usize>> = pads.iter().map(|&pad| positions(pad)).collect();
        let reached = positions.iter().filter_map(|row| row.last()).max().map_or(0, |last| last + 1);
        let shortest = pads.iter().min().copied().unwrap_or(0);
        let len = reached.max(self.batch.horizon.saturating_sub(shortest));
        let (cos, sin) = self.ropes.of(window).tables(&positions, len, &self.device);
        Place { cos, sin, hidden: self.hidden(span, first, window, padded) }
    }

    fn hidden(
        &self,
        span: KvSpan,
        first: usize,
        window: Option<usize>,
        padded: bool,
    ) -> Option<Tensor<4, Bool>> {
        let (new, all) = (self.batch.len(), span.len);
        let slots = |start: usize, len: usize| {
            Tensor::<1, Int>::arange(start as i64..(start + len) as i64, &self.device)
        };
        let queries = || slots(first, new).reshape([1, 1, new, 1]).expand([1, 1, new, all]);
        let keys = || slots(span.start, all).reshape([1, 1, 1, all]).expand([1, 1, new, all]);

        let future = (new > 1).then(|| keys().greater(queries()));
        let past =
            window.filter(|&window| all > window).map(|window| keys().lower_equal(queries() - window as i64));
        let padding = padded.then(|| {
            let rows = self.batch.rows();
            let pads: Vec<i32> = self.batch.left_pad.iter().map(|&pad| pad as i32).collect();
            let pads = Tensor::<4, Int>::from_data(TensorData::new(pads, [rows, 1, 1, 1]), &self.device);
            keys().expand([rows, 1, new, all]).lower(pads.expand([rows, 1, new, all]))
        });
        [future, past, padding].into_iter().flatten().reduce(|a, b| {
            let rows = a.dims()[0].max(b.dims()[0]);
            a.expand([rows, 1, new, all]).bool_or(b.expand([rows, 1, new, all]))
        })
    }
}
