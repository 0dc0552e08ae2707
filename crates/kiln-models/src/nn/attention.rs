//! Grouped-query attention, with rotary positions if the model has them.

use std::ops::Range;

use burn::tensor::{DType, Tensor, activation::sigmoid};
use kiln_core::{
    Error, Result,
    layer::{Kv, KvLayer, Positions},
    model_cache::{BlockKeys, RowPart, SharedRows},
    need::{AttentionNeed, LayerNeed, RotaryPairs, Stream},
    view::{DenseKv, KvView, PackedView},
};
use kiln_kernels::{
    AttentionAppend, AttentionPacked, AttentionShape, INVARIANT_UP_TO, Kernels, KvAppend, Rotary, Then,
    product,
};

use super::{
    linear::{Factors, Linear},
    norm::{Norm, NormKind, Normed},
    places::{Frame, Kept, Places, Tables},
    projections::Projections,
    rope::{RopeKind, Ropes},
};
use crate::{Part, Sizes, Weights};

/// Settings of the attention of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionConfig {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Width of queries and keys.
    pub(crate) head_dim: usize,
    /// Whether values are the projected keys, before their norm and rotation.
    pub(crate) values_are_keys: bool,
    /// Epsilon of the norm of values, which has no weights; `None` if there is none.
    pub(crate) value_norm: Option<f64>,
    /// Whether later blocks of the same [rotation](Self::rope) attend to the keys and values of this one.
    pub(crate) keeps: bool,
    pub(crate) value_dim: usize,
    pub(crate) reach: Reach,
    /// Whether a token sees later ones, too, as far as [`reach`](Self::reach) says. All tokens must be in one
    /// pass.
    pub(crate) bidirectional: bool,
    /// Rotation of queries and keys, one of the model's; `None` if they are not rotated.
    pub(crate) rope: Option<RopeKind>,
    /// Whether the block also attends to the output of an encoder, with heads, widths, biases, scale and cap
    /// as here.
    pub(crate) cross_attention: bool,
    pub(crate) qkv_bias: bool,
    /// Whether keys have a bias if queries and values have one.
    pub(crate) k_bias: bool,
    pub(crate) o_bias: bool,
    /// Name of the output projection.
    pub(crate) o_name: &'static str,
    /// Name of the one matrix in which the projections of queries, keys and values are stored, in this order;
    /// `None` if they are stored apart.
    pub(crate) fused: Option<&'static str>,
    /// Name of the projection to gates, whose sigmoids the results of attention are multiplied by; `None` if
    /// there is none.
    pub(crate) gate: Option<&'static str>,
    /// Norms of queries and keys before rotation.
    pub(crate) head_norms: Option<HeadNorms>,
    /// Epsilon of the norm of each head of queries and keys after rotation, which has no weights; `None` if
    /// there is none.
    pub(crate) rotated_norm: Option<f64>,
    /// Factors of hidden states, of queries, keys and values before rotation, and of the output.
    pub(crate) factors: Factors<3>,
    /// Factor that queries are multiplied by.
    pub(crate) scale: f64,
    /// Whether queries are also multiplied by the model's [`QueryTemperature`].
    pub(crate) tempered: bool,
    /// Whether each head has a [sink](kiln_kernels::Attention::sinks).
    pub(crate) sinks: bool,
    /// Soft cap of the scores: score `s` becomes `softcap · tanh(s / softcap)`.
    pub(crate) softcap: Option<f64>,
}

/// Norms of queries and keys, with their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadNorms {
    /// One norm for each head.
    PerHead([&'static str; 2]),
    /// One norm for all heads together.
    Whole([&'static str; 2]),
}

/// Most common names of the norms of queries and keys.
pub(crate) const QK_NORMS: [&str; 2] = ["q_norm", "k_norm"];

/// Positions that a token sees: its own and earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    All,
    /// This number of latest tokens, including its own.
    Window(usize),
    /// The tokens of the same chunk. Chunks of this number of tokens are counted from the first token that is
    /// not padding.
    Chunk(usize),
}

impl Reach {
    /// Returns the largest number of tokens that a token sees, which are the latest; `None` for all.
    pub(crate) fn window(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Window(window) | Self::Chunk(window) => Some(window),
        }
    }
}

impl AttentionConfig {
    /// Creates settings with three projections, values as wide as keys, no rotation, no window, no biases, no
    /// norms, and scores divided by the square root of the head size.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, heads, kv_heads, head_dim, .. } = sizes;
        let scale = (head_dim as f64).powf(-0.5);
        let (qkv_bias, o_bias) = (false, false);
        Self {
            hidden,
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            values_are_keys: false,
            value_norm: None,
            keeps: false,
            reach: Reach::All,
            bidirectional: false,
            rope: None,
            cross_attention: false,
            qkv_bias,
            k_bias: true,
            o_bias,
            o_name: "o_proj",
            fused: None,
            gate: None,
            head_norms: None,
            rotated_norm: None,
            factors: Factors::NONE,
            scale,
            tempered: false,
            sinks: false,
            softcap: None,
        }
    }

    /// Memory that the block needs, with these rotations.
    pub(crate) fn need(&self, ropes: Option<&Ropes>) -> LayerNeed {
        let &Self { kv_heads, head_dim, value_dim, reach, rope, cross_attention, .. } = self;
        let need = AttentionNeed {
            keys: Stream { heads: kv_heads, width: head_dim },
            values: Stream { heads: kv_heads, width: value_dim },
            window: reach.window(),
            rotary: ropes.zip(rope).map(|(ropes, rope)| ropes.of(rope).need()),
        };
        LayerNeed { encoder: cross_attention, ..need.into() }
    }

    pub(super) fn shape(&self) -> AttentionShape {
        let &Self { scale, softcap, reach, .. } = self;
        AttentionShape { scale, softcap, window: reach.window(), causal: true, end: None, latent: false }
    }

    /// Checks that the settings can be computed, with these rotations.
    ///
    /// # Errors
    /// [`Error::Setting`] for heads that cannot share keys evenly, nothing in sight, and a rotation that the
    /// model lacks or that is wider than keys.
    pub(crate) fn check(&self, ropes: Option<&Ropes>) -> Result<()> {
        let &Self { heads, kv_heads, head_dim, value_dim, reach, rope, .. } = self;
        let wrong = |why: String| Err(Error::Setting { name: "config", why });
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || head_dim * value_dim == 0 {
            return wrong(format!(
                "has {heads} heads of {head_dim} and {value_dim} numbers, which cannot share {kv_heads}"
            ));
        }
        if reach.window() == Some(0) {
            return wrong("has a window of no tokens".to_owned());
        }
        let Some(kind) = rope else { return Ok(()) };
        let Some(ropes) = ropes else { return wrong("rotates keys, and has no rotation".to_owned()) };
        match 2 * ropes.of(kind).need().frequencies.len() {
            rotated if rotated > head_dim => {
                wrong(format!("rotates {rotated} numbers of keys that have {head_dim}"))
            }
            _ => Ok(()),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Attention {
    /// `q_proj`, `k_proj`, `v_proj` and the projection to gates, stacked.
    qkv_proj: Linear,
    o_proj: Linear,
    /// Norms of queries and keys.
    head_norms: Option<[Norm; 2]>,
    rotated_norm: Option<Norm>,
    value_norm: Option<Norm>,
    /// Sink of each head, in float32.
    sinks: Option<Tensor<1>>,
    config: AttentionConfig,
}

impl Attention {
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: &AttentionConfig,
        norm: NormKind,
    ) -> Result<Self> {
        let &AttentionConfig { hidden, heads, kv_heads, head_dim, value_dim, o_bias, o_name, .. } = config;
        let part = |part: &str| format!("{name}.{part}");
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(part);
        let all = config.fused.map(part);
        let [queries, keys] = [heads, kv_heads].map(|heads| heads * head_dim);
        let [mixed, values] = [heads, kv_heads].map(|heads| heads * value_dim);
        let mut parts: Vec<(&str, usize)> = match &all {
            None if config.values_are_keys => vec![(&q, queries), (&k, keys)],
            None => vec![(&q, queries), (&k, keys), (&v, values)],
            Some(all) => vec![(all, queries + keys + values)],
        };
        let gate = config.gate.map(part);
        parts.extend(gate.as_deref().map(|gate| (gate, mixed)));
        let has_bias = |part: &str| config.qkv_bias && (config.k_bias || part != k);
        let Factors { input, parts: [of_queries, of_keys, of_values], output } = config.factors;
        let gates = config.gate.map_or(0, |_| mixed);
        let values = if config.values_are_keys { 0 } else { values };
        let factors = [(of_queries, queries), (of_keys, keys), (of_values, values), (1.0, gates)];
        let qkv_proj = Linear::stacked_where(weights, &parts, hidden, has_bias)?.times(input, &factors);
        let o_proj = Linear::load(weights, &part(o_name), [mixed, hidden], o_bias)?;
        let o_proj = o_proj.times(1.0, &[(output, hidden)]);
        let mut head_norm = |name: &str, len| Norm::load(weights, &part(name), len, norm);
        let head_norms = match config.head_norms {
            None => None,
            Some(HeadNorms::PerHead([q, k])) => Some([head_norm(q, head_dim)?, head_norm(k, head_dim)?]),
            Some(HeadNorms::Whole([q, k])) => Some([head_norm(q, queries)?, head_norm(k, keys)?]),
        };
        let sinks = config.sinks.then(|| weights.vector(&[Part::new(part("sinks"), heads)])).transpose()?;
        let sinks = sinks.map(|sinks| sinks.cast(DType::F32));
        let plain = |len, eps: Option<f64>| {
            let (eps, device) = eps.zip(qkv_proj.device())?;
            Some(Norm::plain(len, eps, (&device, qkv_proj.dtype())))
        };
        let rotated_norm = plain(head_dim, config.rotated_norm);
        let value_norm = plain(value_dim, config.value_norm);
        Ok(Self { qkv_proj, o_proj, head_norms, rotated_norm, value_norm, sinks, config: *config })
    }

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.qkv_proj, &mut self.o_proj].into()
    }

    pub(crate) fn bytes(&self) -> usize {
        let norms = self.head_norms.iter().flatten().map(Norm::bytes).sum::<usize>();
        let sinks = self.sinks.as_ref().map_or(0, |_| self.config.heads * size_of::<f32>());
        self.qkv_proj.bytes() + self.o_proj.bytes() + norms + sinks
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
        let frames: Vec<Frame> = match &keys {
            BlockKeys::Apart(parts) => parts.iter().map(|part| places.frame(part)).collect(),
            BlockKeys::Shared(shared) => shared.parts.iter().map(|part| places.shared_frame(part)).collect(),
        };
        let tables = places.rotary(&frames, self.config.rope);
        let pairs = places.pairs(self.config.rope);
        let ([queries, new_keys, values], gate) = self.projected(normed, tables, pairs, kernels);
        let queries = if self.config.tempered { places.tempered(queries) } else { queries };
        let new = [queries, new_keys, values];
        let mixed = match keys {
            BlockKeys::Apart(parts) => self.attend_apart(new, parts, &frames, places, kernels)?,
            BlockKeys::Shared(shared) => self.attend_shared(new, shared, &frames, places, kernels)?,
        };
        let mixed = places.joined_heads(mixed);
        let mixed = match gate {
            Some(gate) => mixed * sigmoid(gate),
            None => mixed,
        };
        Ok(self.o_proj.forward_onto(residual, mixed, kernels))
    }

    /// Attends with one launch for the rows of each length.
    fn attend_apart(
        &self,
        [queries, keys, values]: [Tensor<4>; 3],
        parts: Vec<RowPart<'_, dyn KvLayer>>,
        frames: &[Frame],
        places: &mut Places<'_>,
        kernels: &Kernels,
    ) -> Result<Vec<Tensor<4>>> {
        let mut mixed = Vec::with_capacity(parts.len());
        for (part, frame) in parts.into_iter().zip(frames) {
            if frame.new_tokens() == 0 {
                continue;
            }
            let positions = places.positions(std::slice::from_ref(frame));
            let [queries, keys, values] = [&queries, &keys, &values].map(|x| frame.own_heads(x));
            let frames = std::slice::from_ref(frame);
            let is_step = frame.new_tokens() == 1 && !self.config.bidirectional;
            let lent = if is_step { part.layer.lend_to_write(&keys, &positions)? } else { None };
            if let Some(lent) = lent {
                let new = [queries, keys, values];
                let (own, kv) = self.append(new, lent, (frames, positions), places, kernels);
                part.layer.take_back(kv);
                part.layer.stored(1);
                mixed.push(own);
                continue;
            }
            let view = part.layer.update(keys, values, &positions)?;
            self.keep(frames, &view, &positions, places);
            if self.config.bidirectional {
                let (positions, shape) = self.see_later(frame, places);
                mixed.push(attend(queries, view, positions, shape, self.sinks.as_ref(), kernels));
            } else {
                mixed.push(self.attend(queries, view, (frames, positions), places, kernels));
            }
        }
        Ok(mixed)
    }

    /// Returns positions from which queries see the keys before and after their own, and the shape for that.
    fn see_later(&self, frame: &Frame, places: &mut Places<'_>) -> (Positions, AttentionShape) {
        let (shape, new) = (self.shape(), frame.new_tokens());
        let (ahead, shape) = match self.config.reach {
            Reach::All => (new.saturating_sub(1), AttentionShape { causal: false, ..shape }),
            // A window of w tokens before and w - 1 after is one of 2 w - 1 that ends w - 1 later.
            Reach::Window(window) | Reach::Chunk(window) => {
                let ahead = (window - 1).min(new);
                let window = window.saturating_add(ahead);
                (ahead, AttentionShape { window: Some(window), end: Some(new), ..shape })
            }
        };
        (places.positions(&[frame.ahead(ahead)]), shape)
    }

    /// Keeps keys and values for later blocks, until the pass ends.
    fn keep(&self, frames: &[Frame], view: &KvView, positions: &Positions, places: &mut Places<'_>) {
        if let (true, Some(rope)) = (self.config.keeps, self.config.rope) {
            let (view, positions) = (view.clone(), positions.clone());
            places.keep(rope, Kept { frames: frames.to_vec(), view, positions });
        }
    }

    /// Attends with one launch per run of adjacent rows that store equally many tokens, in the buffer that
    /// the rows share.
    fn attend_shared(
        &self,
        [queries, keys, values]: [Tensor<4>; 3],
        SharedRows { buffers, mut parts }: SharedRows<'_>,
        frames: &[Frame],
        places: &mut Places<'_>,
        kernels: &Kernels,
    ) -> Result<Vec<Tensor<4>>> {
        // Longer inputs are prompts: the division of their keys among workgroups depends on the rows beside
        // them.
        let go_together =
            |a: &Frame, b: &Frame| a.new_tokens() == b.new_tokens() && a.new_tokens() <= INVARIANT_UP_TO;
        let mut mixed = Vec::new();
        let mut parts = parts.iter_mut();
        for frames in frames.chunk_by(go_together) {
            let (Some(frame), slots) = (Frame::around(frames), Frame::most_slots(frames)) else { continue };
            if frame.new_tokens() == 0 {
                parts.by_ref().take(frames.len()).for_each(drop);
                continue;
            }
            let positions = places.positions(frames);
            let [queries, keys, values] = [&queries, &keys, &values].map(|x| frame.own_heads(x));
            let lost = || Error::Execution("a buffer that rows share was lost".to_owned());
            let (held_keys, held_values) = buffers.take().ok_or_else(lost)?;
            let held =
                DenseKv { keys: held_keys, values: held_values, start: 0, origin: 0, shared: Some(slots) };
            let new = [queries, keys, values];
            let (own, kv) = self.append(new, held, (frames, positions), places, kernels);
            *buffers = Some(kv);
            mixed.push(own);
            parts.by_ref().take(frames.len()).for_each(|part| part.layer.stored(frame.new_tokens()));
        }
        Ok(mixed)
    }

    /// Writes new keys and values into buffers, and attends to all that are there.
    fn append(
        &self,
        [q, new_keys, new_values]: [Tensor<4>; 3],
        held: DenseKv,
        (frames, positions): (&[Frame], Positions),
        places: &mut Places<'_>,
        kernels: &Kernels,
    ) -> (Tensor<4>, Kv) {
        let (rows, DenseKv { keys, values, start, origin, shared }) = (q.dims()[0], held);
        let append = KvAppend {
            buffers: [keys, values],
            new: [new_keys, new_values],
            positions: positions.clone(),
            origin,
        };
        let view = |kv: &Kv| {
            let (keys, values) = kv.clone();
            KvView::Dense(DenseKv { keys, values, start, origin, shared }.of_rows(rows))
        };
        if let Reach::Chunk(_) = self.config.reach {
            let kv = kernels.run(append).into();
            if self.config.keeps {
                self.keep(frames, &view(&kv), &positions, places);
            }
            return (self.attend(q, view(&kv), (frames, positions), places, kernels), kv);
        }
        let (shape, sinks) = (self.shape(), self.sinks.clone());
        let [mixed, keys, values] = AttentionAppend { q, append, start, shared, shape, sinks }.run(kernels);
        let kv = (keys, values);
        if self.config.keeps {
            self.keep(frames, &view(&kv), &positions, places);
        }
        (mixed, kv)
    }

    /// Attends with the queries of adjacent frames, at these positions.
    fn attend(
        &self,
        queries: Tensor<4>,
        view: KvView,
        (frames, positions): (&[Frame], Positions),
        places: &mut Places<'_>,
        kernels: &Kernels,
    ) -> Tensor<4> {
        let run = |queries, view, positions| {
            attend(queries, view, positions, self.shape(), self.sinks.as_ref(), kernels)
        };
        let Reach::Chunk(len) = self.config.reach else { return run(queries, view, positions) };
        let chunks = places.chunks(frames, len).into_iter();
        let mixed = chunks.map(|(tokens, positions)| {
            run(queries.clone().narrow(2, tokens.start, tokens.len()), view.clone(), positions)
        });
        let mut mixed: Vec<_> = mixed.collect();
        if mixed.len() == 1 { mixed.remove(0) } else { Tensor::cat(mixed, 2) }
    }

    fn shape(&self) -> AttentionShape {
        self.config.shape()
    }

    /// Returns queries, keys and values of all heads, rotated by `tables` if given, and the gates of results.
    ///
    /// # Shapes
    /// `[batch, tokens, hidden]` to `[batch, heads, tokens, width]`, and `[batch, tokens, heads · width]`.
    fn projected(
        &self,
        normed: Normed<'_>,
        tables: Option<Tables>,
        pairs: RotaryPairs,
        kernels: &Kernels,
    ) -> ([Tensor<4>; 3], Option<Tensor<3>>) {
        let [batch, tokens, _] = normed.x.dims();
        let AttentionConfig { heads, kv_heads, head_dim, value_dim, .. } = self.config;
        let (both, of_keys) = (heads + kv_heads, heads * head_dim);
        // Rotation of halves is fused with the product, unless heads are normed in between.
        let in_product = self.head_norms.is_none() && pairs == RotaryPairs::Halves;
        let then = |results: Range<usize>| {
            let Some((cos, sin)) = tables.as_ref().filter(|_| in_product) else { return Some(Then::Nothing) };
            let own = results.end.min(both * head_dim).saturating_sub(results.start);
            let whole = results.start.is_multiple_of(head_dim) && own.is_multiple_of(head_dim);
            match own / head_dim {
                _ if own > 0 && !whole => None,
                0 => Some(Then::Nothing),
                heads => Some(Then::Rotate { cos: cos.clone(), sin: sin.clone(), heads, head_dim }),
            }
        };
        let (all, is_rotated): (Projections, bool) = match self.qkv_proj.fused_blocks(&normed, then, kernels)
        {
            Some(blocks) => (blocks.into(), in_product),
            None => (self.qkv_proj.forward(normed.compute(kernels), kernels).into(), false),
        };
        let gates = both * head_dim + kv_heads * value_dim;
        let gate = self.config.gate.map(|_| all.numbers(gates..gates + heads * value_dim));
        let of_values = if self.config.values_are_keys { of_keys } else { both * head_dim };
        let values = match &self.value_norm {
            Some(norm) => {
                let vectors = all.vectors(of_values, kv_heads, value_dim);
                norm.forward(vectors, kernels).reshape([batch, tokens, kv_heads, value_dim])
            }
            None => all.heads(of_values, kv_heads, value_dim),
        };
        let values = values.swap_dims(1, 2);
        let rotate = |x: Tensor<4>| match &tables {
            Some((cos, sin)) if !is_rotated => {
                kernels.run(Rotary { x, cos: cos.clone(), sin: sin.clone(), pairs })
            }
            _ => x,
        };
        let own = [(0, heads), (of_keys, kv_heads)];
        let [queries, keys] = match (&self.head_norms, &self.rotated_norm) {
            (None, None) if is_rotated || tables.is_none() => {
                own.map(|(first, heads)| all.heads(first, heads, head_dim).swap_dims(1, 2))
            }
            (None, rotated_norm) => {
                let together = rotate(all.heads(0, both, head_dim).swap_dims(1, 2));
                let together = match rotated_norm {
                    Some(norm) => {
                        let vectors = together.reshape([batch * both, tokens, head_dim]);
                        norm.forward(vectors, kernels).reshape([batch, both, tokens, head_dim])
                    }
                    None => together,
                };
                [together.clone().narrow(1, 0, heads), together.narrow(1, heads, kv_heads)]
            }
            // No model norms heads both before and after.
            (Some([q_norm, k_norm]), _) => {
                let is_whole = matches!(self.config.head_norms, Some(HeadNorms::Whole(_)));
                let of_heads = |norm: &Norm, (first, heads): (usize, usize)| {
                    let own = match is_whole {
                        true => all.numbers(first..first + heads * head_dim),
                        false => all.vectors(first, heads, head_dim),
                    };
                    let x = norm.forward(own, kernels);
                    rotate(x.reshape([batch, tokens, heads, head_dim]).swap_dims(1, 2))
                };
                [of_heads(q_norm, own[0]), of_heads(k_norm, own[1])]
            }
        };
        ([queries, keys, values], gate)
    }

    /// Applies attention in which every token sees all others, and adds `residual`. Keys and values are not
    /// kept.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    pub(crate) fn encode(&self, residual: Tensor<3>, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let [batch, tokens, _] = x.dims();
        let AttentionConfig { heads, kv_heads, head_dim, value_dim, scale, softcap, .. } = self.config;
        let both = heads + kv_heads;
        let all = Projections::from(self.qkv_proj.forward(x, kernels));
        let [q, keys, values] = [
            (0, heads, head_dim),
            (heads * head_dim, kv_heads, head_dim),
            (both * head_dim, kv_heads, value_dim),
        ]
        .map(|(first, heads, width)| all.heads(first, heads, width).swap_dims(1, 2));
        let positions = Positions::all_at(tokens.saturating_sub(1), batch, &q.device());
        let shape = AttentionShape { scale, softcap, window: None, causal: false, end: None, latent: false };
        let mixed = attend(q, KvView::from_zero(keys, values), positions, shape, None, kernels);
        let merged = mixed.swap_dims(1, 2).reshape([batch, tokens, heads * value_dim]);
        self.o_proj.forward_onto(Some(residual), merged, kernels)
    }
}

/// Attends with the queries at `positions` to all keys that they see.
pub(super) fn attend(
    q: Tensor<4>,
    view: KvView,
    positions: Positions,
    shape: AttentionShape,
    sinks: Option<&Tensor<1>>,
    kernels: &Kernels,
) -> Tensor<4> {
    let sinks = sinks.cloned();
    let PackedView { packed, recent, rotation, .. } = match view {
        KvView::Dense(kv) => {
            return kernels.run(kiln_kernels::Attention { q, chain: vec![kv], positions, shape, sinks });
        }
        KvView::Chained(chain) => {
            return kernels.run(kiln_kernels::Attention { q, chain, positions, shape, sinks });
        }
        KvView::Packed(view) => *view,
    };
    let rotate = |x: Tensor<4>, matrix: Option<Tensor<2>>| match matrix {
        Some(matrix) => product(x, matrix.unsqueeze()),
        None => x,
    };
    let [of_keys, of_values] = rotation.map_or([None, None], |matrices| matrices.map(Some));
    let q = rotate(q, of_keys);
    let mixed = match packed {
        None => kernels.run(kiln_kernels::Attention { q, chain: vec![recent], positions, shape, sinks }),
        Some(packed) => kernels.run(AttentionPacked { q, packed, recent, positions, shape, sinks }),
    };
    rotate(mixed, of_values)
}
