//! Grouped attention with rotary positions, and where its tokens stand.

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Result,
    batch::{Batch, Steps},
    layer::{KvLayer, KvSpan, Place},
    view::{DenseKv, KvView},
};
use kiln_kernels::{AttentionShape, Kernels};

use super::{
    linear::Linear,
    norm::{NormKind, RmsNorm},
    rope::Rope,
};
use crate::{Sizes, Weights};

/// What architectures say of an attention block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionConfig {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) qkv_bias: bool,
    pub(crate) o_bias: bool,
    /// Whether each head of queries and keys is normed before it is rotated.
    pub(crate) head_norms: bool,
    /// Queries are multiplied by it.
    pub(crate) scale: f64,
}

impl AttentionConfig {
    /// No biases, no norms, scaled by the root of the head's size.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, heads, kv_heads, head_dim, .. } = sizes;
        let scale = (head_dim as f64).powf(-0.5);
        let (qkv_bias, o_bias, head_norms) = (false, false, false);
        Self { hidden, heads, kv_heads, head_dim, qkv_bias, o_bias, head_norms, scale }
    }
}

#[derive(Debug)]
pub(crate) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
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
        let mut linear =
            |part: &str, shape, bias| Linear::load(weights, &format!("{name}.{part}"), shape, bias);
        let head_norm = |weights: &mut dyn Weights, part: &str| match config.head_norms {
            true => RmsNorm::load(weights, &format!("{name}.{part}"), head_dim, norm).map(Some),
            false => Ok(None),
        };
        Ok(Self {
            q_proj: linear("q_proj", [hidden, heads * head_dim], qkv_bias)?,
            k_proj: linear("k_proj", [hidden, kv_heads * head_dim], qkv_bias)?,
            v_proj: linear("v_proj", [hidden, kv_heads * head_dim], qkv_bias)?,
            o_proj: linear("o_proj", [heads * head_dim, hidden], o_bias)?,
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
        let AttentionConfig { heads, kv_heads, head_dim, scale, .. } = self.config;
        let split = |x: Tensor<3>, heads, norm: Option<&RmsNorm>| {
            let x = match norm {
                Some(norm) => norm.forward(x.reshape([batch, tokens * heads, head_dim]), kernels),
                None => x,
            };
            x.reshape([batch, tokens, heads, head_dim]).swap_dims(1, 2)
        };
        let span = layer.span(tokens);
        let place = places.place(span);
        let (cos, sin) = places.rotary(span);

        let queries = split(self.q_proj.forward(x.clone(), kernels), heads, self.q_norm.as_ref());
        let keys = split(self.k_proj.forward(x.clone(), kernels), kv_heads, self.k_norm.as_ref());
        let values = split(self.v_proj.forward(x, kernels), kv_heads, None);
        let queries = kernels.rotary(queries, cos.clone(), sin.clone());
        let keys = kernels.rotary(keys, cos, sin);

        let KvView::Dense(DenseKv { keys, values, start, origin }) = layer.update(keys, values, &place)?;
        let shape = AttentionShape { scale, softcap: None, window: self.window, start, origin };
        let mixed = kernels.attention(queries, keys, values, place.on_device, place.left_pad, &shape);
        let merged = mixed.swap_dims(1, 2).reshape([batch, tokens, heads * head_dim]);
        Ok(self.o_proj.forward(merged, kernels))
    }
}

/// Where the tokens of one forward pass stand: made once for all blocks that count positions alike.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    batch: &'a Batch,
    rope: &'a Rope,
    device: Device,
    places: Vec<Place>,
    /// By the position of the first token.
    tables: Vec<(usize, Tables)>,
}

/// Cosines and sines, `[1 or batch, new, rotated / 2]`.
type Tables = (Tensor<3>, Tensor<3>);

impl<'a> Places<'a> {
    pub(crate) fn new(batch: &'a Batch, rope: &'a Rope) -> Self {
        let device = batch.tokens.device();
        Self { batch, rope, device, places: Vec::new(), tables: Vec::new() }
    }

    /// The place of the new tokens in a view of this span.
    pub(crate) fn place(&mut self, span: KvSpan) -> Place {
        let first = span.query(self.batch.len());
        if let Some(steps) = self.steps(first) {
            let (on_device, left_pad) = (steps.position.clone(), steps.left_pad.clone());
            return Place { first, on_device, left_pad };
        }
        if let Some(place) = self.places.iter().find(|place| place.first == first) {
            return place.clone();
        }
        let place = Place::new(first, &self.batch.left_pad, &self.device);
        self.places.push(place.clone());
        place
    }

    /// The rotary tables of the new tokens.
    pub(crate) fn rotary(&mut self, span: KvSpan) -> Tables {
        let first = span.query(self.batch.len());
        if let Some((_, tables)) = self.tables.iter().find(|(at, _)| *at == first) {
            return tables.clone();
        }
        let prepared = self.steps(first).and_then(|steps| {
            let (cos, sin) = steps.tables.first()?;
            let row = steps.position.clone() - steps.slots.start as i64;
            Some((cos.clone().select(1, row.clone()), sin.clone().select(1, row)))
        });
        let tables = prepared.unwrap_or_else(|| self.upload(first));
        self.tables.push((first, tables.clone()));
        tables
    }

    /// What is on the device already, if it is for this pass.
    fn steps(&self, first: usize) -> Option<&'a Steps> {
        self.batch.steps.as_ref().filter(|steps| self.batch.len() == 1 && steps.next == first)
    }

    fn upload(&self, first: usize) -> Tables {
        let new = self.batch.len();
        // Slots count padding, rotary positions do not.
        let positions = |pad: usize| (first..first + new).map(|slot| slot.saturating_sub(pad)).collect();
        let padded = self.batch.left_pad.iter().any(|&pad| pad > 0);
        let pads: &[usize] = if padded { &self.batch.left_pad } else { &[0] };
        let positions: Vec<Vec<usize>> = pads.iter().map(|&pad| positions(pad)).collect();
        let reached = positions.iter().filter_map(|row| row.last()).max().map_or(0, |last| last + 1);
        let shortest = pads.iter().min().copied().unwrap_or(0);
        let len = reached.max(self.batch.horizon.saturating_sub(shortest));
        self.rope.tables(&positions, len, &self.device)
    }
}
