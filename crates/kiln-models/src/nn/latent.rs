//! Multi-head latent attention (DeepSeek-AI, 2024, <https://arxiv.org/abs/2405.04434>; transformers'
//! `DeepseekV3Attention`): keys and values of all heads are products of one small vector per token, the
//! latent, beside a rotated key that all heads share. The cache holds these two alone.
//!
//! Few queries attend to the latents themselves: the matrix that would make keys of them is applied to the
//! queries, and the one that would make values of them to the results. For the queries of a prompt, keys and
//! values are made, because these are narrower.

use burn::tensor::{Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    layer::Positions,
    model_cache::BlockKeys,
    need::{AttentionNeed, LayerNeed, Stream},
    view::{DenseKv, KvView},
};
use kiln_kernels::{AttentionShape, ExpertLinear, INVARIANT_UP_TO, Kernels, MatrixStack, Rotary};

use super::{
    attention::attend,
    linear::Linear,
    names::TRANSPOSED,
    norm::{Norm, NormKind, Normed},
    places::{Frame, Places},
    rope::{RopeKind, Ropes},
};
use crate::{Part, Weights};

/// Settings of latent attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentConfig {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    /// Numbers of the part of a key that is not rotated, and of the part that is.
    pub(crate) key_dim: usize,
    pub(crate) rotated_dim: usize,
    pub(crate) value_dim: usize,
    /// Numbers in a latent.
    pub(crate) rank: usize,
    /// Numbers in the vector that queries are products of; `None` if they are products of the hidden state.
    pub(crate) query_rank: Option<usize>,
    /// Whether the projections to latents, and the output projection, have biases.
    pub(crate) bias: bool,
    /// Whether prompts attend to keys and values that latents are expanded to. Otherwise all tokens attend to
    /// latents, and the projection of latents to keys is not needed.
    pub(crate) expands: bool,
    /// Factor of the scores.
    pub(crate) scale: f64,
}

/// Epsilon of the norms of latents, whatever the config says.
const EPS: f64 = 1e-6;

impl LatentConfig {
    /// Memory of a token: the rotated key, and the latent in place of a value.
    pub(crate) fn need(&self, ropes: Option<&Ropes>) -> LayerNeed {
        LayerNeed::from(AttentionNeed {
            keys: Stream { heads: 1, width: self.rotated_dim },
            values: Stream { heads: 1, width: self.rank },
            window: None,
            rotary: ropes.map(|ropes| ropes.of(RopeKind::Full).need()),
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct LatentAttention {
    /// Projections to queries, or to the vectors that they are products of, and to the latent and the rotated
    /// key, stacked.
    in_proj: Linear,
    /// Norm and projection of the vectors that queries are products of.
    queries: Option<(Norm, Linear)>,
    latent_norm: Norm,
    /// `[heads, rank, key_dim]`: takes queries to the latents.
    into_latents: MatrixStack,
    /// `[heads, value_dim, rank]`: makes values of latents.
    values: MatrixStack,
    /// Projection of latents to the keys of all heads, to [expand](LatentConfig::expands) them.
    key_proj: Option<Linear>,
    o_proj: Linear,
    /// Numbers of the heads, `[1, 1, heads]`.
    numbers: Tensor<3, Int>,
    config: LatentConfig,
}

impl LatentAttention {
    pub(crate) fn load(weights: &mut dyn Weights, name: &str, config: LatentConfig) -> Result<Self> {
        let LatentConfig { hidden, heads, key_dim, rotated_dim, value_dim, rank, query_rank, bias, .. } =
            config;
        let part = |part: &str| format!("{name}.{part}");
        let norm = NormKind::rms(EPS);
        let queries = heads * (key_dim + rotated_dim);
        let (of_queries, width) = match query_rank {
            Some(rank) => (part("q_a_proj"), rank),
            None => (part("q_proj"), queries),
        };
        let parts = [(&*of_queries, width), (&*part("kv_a_proj_with_mqa"), rank + rotated_dim)];
        let has_bias = |name: &str| bias && (query_rank.is_some() || name != of_queries);
        let in_proj = Linear::stacked_where(weights, &parts, hidden, has_bias)?;
        let queries = match query_rank {
            Some(rank) => Some((
                Norm::load(weights, &part("q_a_layernorm"), rank, norm)?,
                Linear::load(weights, &part("q_b_proj"), [rank, queries], false)?,
            )),
            None => None,
        };
        let latent_norm = Norm::load(weights, &part("kv_a_layernorm"), rank, norm)?;
        let of = |name: &str, rows| Part::new(part(name), rows);
        let into_latents = weights
            .stack(&[of(&format!("k_b_proj{TRANSPOSED}.weight"), heads * rank)], [heads, rank, key_dim])?;
        let values = weights.stack(&[of("v_b_proj.weight", heads * value_dim)], [heads, value_dim, rank])?;
        let numbers = TensorData::new((0..heads as i32).collect(), [1, 1, heads]);
        Ok(Self {
            numbers: Tensor::from_data(numbers, &latent_norm.device()),
            in_proj,
            queries,
            latent_norm,
            into_latents,
            values,
            key_proj: match config.expands {
                true => Some(Linear::load(weights, &part("k_b_proj"), [rank, heads * key_dim], false)?),
                false => None,
            },
            o_proj: Linear::load(weights, &part("o_proj"), [heads * value_dim, hidden], bias)?,
            config,
        })
    }

    /// The projections that an adapter may change. Those of latents to keys and values are none: they are
    /// part of queries and outputs.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        let queries = self.queries.as_mut().map(|(_, linear)| linear);
        [&mut self.in_proj, &mut self.o_proj].into_iter().chain(queries).collect()
    }

    pub(crate) fn bytes(&self) -> usize {
        let of_queries = self.queries.as_ref().map_or(0, |(norm, linear)| norm.bytes() + linear.bytes());
        let linears = [&self.in_proj, &self.o_proj].into_iter().chain(&self.key_proj);
        let stacks = [&self.into_latents, &self.values];
        linears.map(Linear::bytes).sum::<usize>()
            + stacks.into_iter().map(MatrixStack::bytes).sum::<usize>()
            + of_queries
            + self.latent_norm.bytes()
    }

    /// Applies attention to vectors that are not normed yet, and adds `residual` if there is one.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`, or `[1, tokens, hidden]` in a flat pass.
    pub(crate) fn forward(
        &self,
        residual: Option<Tensor<3>>,
        normed: Normed<'_>,
        places: &mut Places<'_>,
        keys: BlockKeys<'_>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let LatentConfig { heads, key_dim, rotated_dim, rank, query_rank, .. } = self.config;
        let BlockKeys::Apart(parts) = keys else {
            return Err(Error::Execution("latents are in a buffer that rows share".to_owned()));
        };
        let frames: Vec<Frame> = parts.iter().map(|part| places.frame(part)).collect();
        let tables = places.rotary(&frames, Some(RopeKind::Full));
        let pairs = places.pairs(Some(RopeKind::Full));

        let [batch, tokens, _] = normed.x.dims();
        let all = self.in_proj.forward(normed.compute(kernels), kernels);
        let width = query_rank.unwrap_or(heads * (key_dim + rotated_dim));
        let of_queries = all.clone().narrow(2, 0, width);
        let queries = match &self.queries {
            Some((norm, linear)) => linear.forward(norm.forward(of_queries, kernels), kernels),
            None => of_queries,
        };
        let latents = self.latent_norm.forward(all.clone().narrow(2, width, rank), kernels);
        let latents = latents.reshape([batch, 1, tokens, rank]);
        let keys = all.narrow(2, width + rank, rotated_dim).reshape([batch, 1, tokens, rotated_dim]);
        let queries = queries.reshape([batch, tokens, heads, key_dim + rotated_dim]).swap_dims(1, 2);
        let rotate = |x: Tensor<4>| match &tables {
            Some((cos, sin)) => kernels.run(Rotary { x, cos: cos.clone(), sin: sin.clone(), pairs }),
            None => x,
        };
        let rotated = rotate(queries.clone().narrow(3, key_dim, rotated_dim));
        let queries = queries.narrow(3, 0, key_dim);
        let keys = rotate(keys);

        let mut mixed = Vec::with_capacity(parts.len());
        for (part, frame) in parts.into_iter().zip(&frames) {
            if frame.new_tokens() == 0 {
                continue;
            }
            let positions = places.positions(std::slice::from_ref(frame));
            let [queries, rotated, keys, latents] =
                [&queries, &rotated, &keys, &latents].map(|x| frame.own_heads(x));
            let view = part.layer.update(keys, latents, &positions)?;
            mixed.push(self.attend([queries, rotated], view, positions, kernels));
        }
        Ok(self.o_proj.forward_onto(residual, places.joined_heads(mixed), kernels))
    }

    /// Attends with queries, of which the second part is rotated, to the keys and latents of a view.
    ///
    /// # Shapes
    /// `[batch, heads, tokens, width]`
    fn attend(
        &self,
        [queries, rotated]: [Tensor<4>; 2],
        view: KvView,
        positions: Positions,
        kernels: &Kernels,
    ) -> Tensor<4> {
        let shape = AttentionShape {
            scale: self.config.scale,
            softcap: None,
            window: None,
            causal: true,
            end: None,
            latent: false,
        };
        let chain = match view {
            KvView::Dense(kv) => vec![kv],
            KvView::Chained(chain) => chain,
            // Packed latents are unpacked where they are used.
            packed => return self.attend_latents([queries, rotated], packed, positions, shape, kernels),
        };
        let Some(key_proj) = self.key_proj.as_ref().filter(|_| queries.dims()[2] > INVARIANT_UP_TO) else {
            let view = KvView::Chained(chain);
            return self.attend_latents([queries, rotated], view, positions, shape, kernels);
        };
        let end = positions.on_host.iter().map(|row| row.first + queries.dims()[2]).max().unwrap_or(0);
        // A single buffer may begin in the middle of its slots; those of a chain begin at their first ones.
        let alone = chain.len() == 1;
        let is_ring = |kv: &DenseKv| alone && (kv.start < kv.origin || end > kv.origin + kv.slots());
        let expanded = |kv| {
            let is_ring = is_ring(&kv);
            self.expanded(kv, key_proj, if is_ring { None } else { Some(end) }, kernels)
        };
        let chain = chain.into_iter().map(expanded).collect();
        let queries = Tensor::cat(vec![rotated, queries], 3);
        attend(queries, KvView::Chained(chain), positions, shape, None, kernels)
    }

    /// Attends to latents themselves.
    fn attend_latents(
        &self,
        [queries, rotated]: [Tensor<4>; 2],
        view: KvView,
        positions: Positions,
        shape: AttentionShape,
        kernels: &Kernels,
    ) -> Tensor<4> {
        let queries = self.by_head(queries, &self.into_latents, kernels);
        let queries = Tensor::cat(vec![rotated, queries], 3);
        let shape = AttentionShape { latent: true, ..shape };
        let mixed = attend(queries, view, positions, shape, None, kernels);
        self.by_head(mixed, &self.values, kernels)
    }

    /// Multiplies the vectors of each head, `[batch, heads or 1, tokens, in]`, by the matrix of the head.
    fn by_head(&self, x: Tensor<4>, weight: &MatrixStack, kernels: &Kernels) -> Tensor<4> {
        let [batch, _, tokens, _] = x.dims();
        let experts = self.numbers.clone().expand([batch, tokens, self.config.heads]);
        let y = kernels.run(ExpertLinear { x: x.swap_dims(1, 2), weight: weight.clone(), experts });
        y.swap_dims(1, 2)
    }

    /// Makes keys and values of rotated keys and latents. Slots of positions from `end` on are left out; it
    /// is `None` if the positions go round in a ring.
    fn expanded(&self, kv: DenseKv, key_proj: &Linear, end: Option<usize>, kernels: &Kernels) -> DenseKv {
        let LatentConfig { heads, key_dim, rank, rotated_dim, .. } = self.config;
        let all = kv.keys.dims()[2];
        let used = end.map_or(all, |end| end.saturating_sub(kv.origin).min(all));
        let (rotated, latents) = (kv.keys.narrow(2, 0, used), kv.values.narrow(2, 0, used));
        let batch = latents.dims()[0];
        let keys = key_proj.forward(latents.clone().reshape([batch, used, rank]), kernels);
        let keys = keys.reshape([batch, used, heads, key_dim]).swap_dims(1, 2);
        let rotated = rotated.cast(keys.dtype()).expand([batch, heads, used, rotated_dim]);
        let values = self.by_head(latents, &self.values, kernels);
        DenseKv { keys: Tensor::cat(vec![rotated, keys], 3), values, ..kv }
    }
}
