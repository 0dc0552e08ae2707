//! Attention over a buffer of keys and values (Vaswani et al., 2017, <https://arxiv.org/abs/1706.03762>),
//! with heads that share keys (Ainslie et al., 2023, <https://arxiv.org/abs/2305.13245>).
//!
//! `softmax(scale · q kᵀ) v` over the positions that a query sees, for queries
//! `[batch, heads, new, head_dim]` and buffers `[batch, kv_heads, slots, width]`. Keys are as wide as
//! queries; values may have another width, which is that of the result. Only the device knows the positions
//! of the queries.
//!
//! Scores, softmax and sums are float32, whatever the type of the queries; the result is rounded to that type
//! once.

pub(crate) mod append;
mod cases;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cpu")]
mod native;
pub(crate) mod packed;
#[cfg(feature = "wgpu")]
mod pieces;
pub(crate) mod rotary;
#[cfg(feature = "cube")]
mod sharing;
#[cfg(feature = "wgpu")]
mod tiles;
#[cfg(feature = "wgpu")]
mod wgsl;

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, activation::softmax};
use kiln_core::{
    layer::{Positions, RowPosition},
    view::DenseKv,
};

use crate::{
    runtime::{
        kernel::{INVARIANT_UP_TO, Kernel, checked_positions},
        product::product,
        shader::{Binding, Lines, Shader, reads, updates, writes},
    },
    testing::{
        case::Case,
        checked::Checked,
        cut::{Extent, cut, cut_positions, cut_rows},
    },
};

/// The longest queries and keys that GPU kernels attend with: workgroup memory has room for them.
pub const LARGEST_HEAD: usize = 256;

/// The most buffers in a chain: each one is a launch.
const LONGEST_CHAIN: usize = 256;

/// `softmax(scale · q kᵀ) v` over the keys that each query sees: `[batch, heads, new, width of values]`.
///
/// Query `i` of row `b` stands at `first[b] + i` and sees the positions `p` with
/// `max(start, visible_from[b], first[b] + i - window + 1) <= p <= first[b] + i`, as far as slots still hold
/// them: a slot holds the latest of its positions that is not after the last query. A query that sees
/// nothing, such as a padded one, gives zeros. The positions stay on the device, so that a captured step can
/// advance them. Nothing as large as `new * slots` is held in memory.
///
/// Without [`causal`](AttentionShape::causal), all queries of a row stand at `first[b]`, which is the same in
/// all rows: the last position that exists, as in an encoder.
///
/// The GPU kernels take vectors of up to 256 numbers, and values as wide as keys.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `[batch, heads, new, head_dim]`
    pub q: Tensor<4>,
    /// Keys `[batch, kv_heads, slots, head_dim]` and values `[batch, kv_heads, slots, width]`, cast to the
    /// type of `q`; query head `h` sees key head `h / (heads / kv_heads)`. One buffer, or up to 256 that
    /// continue each other: each holds the positions from its origin to the origin of the next, in slots from
    /// 0 on, and may have further slots that do not count. Nothing is copied. Rows may share one buffer
    /// ([`DenseKv::shared`]): the slots of each row follow its base, and each buffer is that of all rows.
    pub chain: Vec<DenseKv>,
    /// Positions of `batch` rows.
    pub positions: Positions,
    pub shape: AttentionShape,
    /// `[heads]`, cast to float32: the score of a key whose value is 0, which every query of the head sees in
    /// addition (gpt-oss; Xiao et al., 2023, <https://arxiv.org/abs/2309.17453>). Neither scaled nor capped.
    pub sinks: Option<Tensor<1>>,
}

/// The formula of the scores, and the keys that a query may see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Scores are `scale * q·k`.
    pub scale: f64,
    /// `cap * tanh(score / cap)`, after scaling and before the mask (Gemma2).
    pub softcap: Option<f64>,
    /// Number of latest positions that a query may see, including its own.
    pub window: Option<usize>,
    /// Whether the queries of a pass stand one after the other, and none sees a later one. Otherwise all of
    /// them stand at the position of the first.
    pub causal: bool,
    /// First position without a key, if causal queries stand there or later: then a query sees keys after its
    /// own place in the text. `None` if each query stands at or before the last key.
    pub end: Option<usize>,
    /// Whether each key is followed by its value, so that queries are as wide as both: latent attention
    /// (DeepSeek-AI, 2024, <https://arxiv.org/abs/2405.04434>). The GPU kernels do not take it.
    pub latent: bool,
}

impl Kernel for Attention {
    const NAME: &'static str = "attention";
    type Output = Tensor<4>;

    fn checked(self) -> Self {
        let Self { q, chain, positions, shape, sinks } = self;
        assert!(
            (1..=LONGEST_CHAIN).contains(&chain.len()),
            "attention: {} buffers, not 1 to {LONGEST_CHAIN}",
            chain.len()
        );
        let [batch, heads, _, head_dim] = q.dims();
        let positions = checked_places(positions, batch, &shape, Self::NAME);
        let width = chain[0].values.dims()[3];
        let checked = |kv: DenseKv| {
            let [_, kv_heads, slots, _] = kv.keys.dims();
            let want = |width| [batch, kv_heads, slots, width];
            let of_keys = shape.key_width(head_dim, width);
            assert_eq!(kv.keys.dims(), want(of_keys), "attention: keys and q {:?}", q.dims());
            assert_eq!(kv.values.dims(), want(width), "attention: values and keys");
            assert!(heads.is_multiple_of(kv_heads), "attention: {heads} heads share {kv_heads} of keys");
            DenseKv { keys: kv.keys.cast(q.dtype()), values: kv.values.cast(q.dtype()), ..kv }
        };
        let chain: Vec<_> = chain.into_iter().map(checked).collect();
        for pair in chain.windows(2) {
            let (origin, slots, end) = (pair[0].origin, pair[0].keys.dims()[2], pair[1].origin);
            assert!(
                (origin..=origin + slots).contains(&end),
                "attention: {slots} slots from {origin} on do not end at {end}"
            );
        }
        let sinks = checked_sinks(sinks, heads, Self::NAME);
        Self { q, chain, positions, shape, sinks }
    }

    fn shape(&self) -> Vec<usize> {
        self.q.dims().into()
    }

    fn work(&self) -> u64 {
        let [rows, heads, new, head_dim] = self.q.dims();
        let slots: usize = self.chain.iter().map(DenseKv::slots).sum();
        let width = self.chain.first().map_or(0, |kv| kv.values.dims()[3]);
        // Operations for the scores and for the sums of values.
        let work = (rows * heads * new) as u64 * (slots * (head_dim + width)) as u64;
        if new > INVARIANT_UP_TO { work } else { 0 }
    }

    fn reference(self) -> Tensor<4> {
        let chain = Buffers::chain(self.chain, &self.shape, &self.positions);
        reference(self.q, chain, &self.positions, self.sinks)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<4>, Self> {
        let chain = Buffers::chain(self.chain.clone(), &self.shape, &self.positions);
        native::dense(&self.q, &chain, &self.positions.on_device, self.sinks.as_ref()).ok_or(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<4>, Self> {
        if !self.is_for_gpus() {
            return Err(self);
        }
        let most = pieces::most(&self.q.device());
        Ok(self.wgsl_within(most))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<4>, Self> {
        if !self.is_for_gpus() {
            return Err(self);
        }
        let chain = Buffers::chain(self.chain, &self.shape, &self.positions);
        Ok(cube::dense(self.q, chain, self.positions.on_device, self.sinks))
    }
}

impl Checked for Attention {
    fn extent(&self) -> [usize; 2] {
        let [rows, _, tokens, _] = self.q.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        let Self { q, chain, positions, shape, sinks } = self;
        let slots = match &chain[..] {
            [alone] => alone.slots(),
            _ => usize::MAX,
        };
        let positions = shape.cut(&positions, &part, q.dims()[2], slots);
        let chain = chain.into_iter().map(|kv| cut_dense(kv, &part[0])).collect();
        Self { q: cut(q, &part, 2), chain, positions, shape, sinks }
    }

    fn part_of(whole: Tensor<4>, part: Extent) -> Tensor<4> {
        cut(whole, &part, 2)
    }

    /// The first two take many and few queries; the third combines the parts of workgroups that shared the
    /// keys. The last takes many queries and multiplies with matrix units.
    fn shaders() -> &'static [Shader] {
        #[cfg(feature = "wgpu")]
        return &[PREFILL, DECODE, COMBINE, tiles::SHADER];
        #[cfg(not(feature = "wgpu"))]
        &[PREFILL, DECODE, COMBINE]
    }

    fn cases() -> Vec<Case<Self>> {
        cases::dense::cases()
    }
}

#[cfg(feature = "wgpu")]
impl Attention {
    /// Runs the shaders. No tensor that they write has more than `most` bytes, except the result.
    fn wgsl_within(self, most: usize) -> Tensor<4> {
        let (q, kv_heads) = (self.q.dims(), self.chain[0].keys.dims()[1]);
        let device = self.q.device();
        let share = |kv: &DenseKv| {
            let [rows, kv_heads, _, dim] = kv.keys.dims();
            sharing::Sharing::new(q, [rows, kv_heads, kv.slots(), dim], &self.shape, &device)
        };
        let sharings: Vec<_> = self.chain.iter().map(share).collect();
        let splits = pieces::splits(&sharings, self.sinks.is_some());
        pieces::in_pieces(q, kv_heads, splits, most, |piece| {
            let Self { q, chain, positions, shape, sinks } = match piece {
                Some(piece) => self.piece(&piece, q[1] / kv_heads),
                None => self.clone(),
            };
            wgsl::dense(q, Buffers::chain(chain, &shape, &positions), positions.on_device, sinks)
        })
    }

    /// Cuts out the rows and the key heads in `piece`, with the `each` query heads of every key head.
    fn piece(&self, piece: &pieces::Piece, each: usize) -> Self {
        let Self { q, chain, positions, shape, sinks } = self.clone();
        let cut = |kv: DenseKv| DenseKv {
            keys: pieces::cut_heads(kv.keys, piece, 1),
            values: pieces::cut_heads(kv.values, piece, 1),
            ..kv
        };
        Self {
            q: pieces::cut_heads(q, piece, each),
            chain: chain.into_iter().map(cut).collect(),
            positions: positions.narrow(piece[0].clone()),
            shape,
            sinks: pieces::cut_sinks(sinks, piece, each),
        }
    }
}

#[cfg(feature = "cube")]
impl Attention {
    fn is_for_gpus(&self) -> bool {
        let is_empty = |kv: &DenseKv| kv.keys.shape().num_elements() == 0;
        self.q.dims()[3] <= LARGEST_HEAD
            && !self.shape.latent
            && self.chain.iter().all(|kv| kv.keys.dims() == kv.values.dims())
            && self.q.shape().num_elements() > 0
            && !self.chain.iter().any(is_empty)
    }
}

/// One link of a chain: one buffer of keys and one of values.
struct Buffers {
    keys: Tensor<4>,
    values: Tensor<4>,
    shape: AttentionShape,
    /// The first position that counts.
    start: usize,
    /// The key of position p is in slot (p - origin) mod slots.
    origin: usize,
    /// The first position after the buffer, where the next one in the chain begins.
    end: Option<usize>,
    /// `[1]`: the first position in the buffer, if only the device knows it.
    from: Option<Tensor<1, Int>>,
    /// See [`DenseKv::shared`].
    shared: Option<usize>,
}

impl Buffers {
    fn new(DenseKv { keys, values, start, origin, shared }: DenseKv, shape: &AttentionShape) -> Self {
        Self { keys, values, shape: *shape, start, origin, end: None, from: None, shared }
    }

    /// Hides positions before `from` `[1]`.
    fn from(self, from: Tensor<1, Int>) -> Self {
        Self { from: Some(from), ..self }
    }

    /// Ends the last buffer. Non-causal ones end after the position of the first query, because every query
    /// sees what that one sees.
    fn seen_at(self, positions: &Positions) -> Self {
        let end = match self.shape.causal {
            true => self.shape.end,
            false => positions.on_host.first().map(|row| row.first + 1),
        };
        Self { end, ..self }
    }

    /// Returns the links of a chain, in which each buffer continues the previous one from its own origin on.
    fn chain(chain: Vec<DenseKv>, shape: &AttentionShape, positions: &Positions) -> Vec<Self> {
        let ends: Vec<_> = chain.iter().skip(1).map(|next| Some(next.origin)).chain([None]).collect();
        let (alone, oldest) = (chain.len() == 1, chain.first().map_or(0, |oldest| oldest.start));
        let buffers = chain.into_iter().zip(ends).map(|(kv, end)| {
            // Only a single buffer can be a ring that has wrapped.
            let start = if alone { kv.start } else { kv.start.max(kv.origin).max(oldest) };
            match end {
                Some(_) => Self { end, start, ..Self::new(kv, shape) },
                None => Self { start, ..Self::new(kv, shape) }.seen_at(positions),
            }
        });
        buffers.collect()
    }

    fn limits(&self) -> Limits {
        let limits = self.shape.limits(self.start, self.origin, self.slots());
        Limits { end: self.end.map_or(i32::MAX, position), ..limits }
    }

    /// The largest number of slots per row.
    fn slots(&self) -> usize {
        self.shared.unwrap_or_else(|| self.keys.dims()[2])
    }

    /// Whether the buffers are empty.
    #[cfg(feature = "cpu")]
    fn are_empty(&self) -> bool {
        self.keys.shape().num_elements() * self.values.dims()[3] == 0
    }
}

/// Cuts keys and values to `rows`.
fn cut_dense(kv: DenseKv, rows: &Range<usize>) -> DenseKv {
    DenseKv { keys: cut_rows(kv.keys, rows), values: cut_rows(kv.values, rows), ..kv }
}

/// The visible part of a buffer, in the types that kernels take. Positions are not negative, so nothing
/// overflows.
#[derive(Clone, Copy, Debug)]
struct Limits {
    scale: f32,
    softcap: Option<f32>,
    window: i32,
    start: i32,
    /// Less than the number of slots.
    origin: i32,
    /// The first position that is not in the buffer.
    end: i32,
}

impl AttentionShape {
    /// Width of keys, for queries and values of these widths.
    fn key_width(&self, queries: usize, values: usize) -> usize {
        if self.latent { queries.saturating_sub(values) } else { queries }
    }

    fn limits(&self, start: usize, origin: usize, slots: usize) -> Limits {
        Limits {
            scale: self.scale as f32,
            softcap: self.softcap.map(|cap| cap as f32),
            window: position(self.window.unwrap_or(usize::MAX)),
            start: position(start),
            origin: position(origin % slots.max(1)),
            end: i32::MAX,
        }
    }
}

impl AttentionShape {
    /// The positions of the queries in a part, of `new` queries in all; see [`cut_positions`].
    fn cut(&self, positions: &Positions, part: &Extent, new: usize, slots: usize) -> Positions {
        match self.causal {
            // Keys that end do not wrap.
            true if self.end.is_some() => cut_positions(positions, part, new, usize::MAX),
            true => cut_positions(positions, part, new, slots),
            false => positions.narrow(part[0].clone()),
        }
    }
}

/// Checks the positions of queries; see [`checked_positions`].
///
/// # Panics
/// Also if `shape` is not causal and rows stand at different positions.
fn checked_places(positions: Positions, rows: usize, shape: &AttentionShape, kernel: &str) -> Positions {
    let is_even = positions.on_host.windows(2).all(|pair| pair[0].first == pair[1].first);
    assert!(shape.causal || is_even, "{kernel}: rows that are not causal stand at different positions");
    checked_positions(positions, rows, kernel)
}

/// Checks the sinks of `heads` heads.
fn checked_sinks(sinks: Option<Tensor<1>>, heads: usize, kernel: &str) -> Option<Tensor<1>> {
    sinks.map(|sinks| {
        assert_eq!(sinks.dims(), [heads], "{kernel}: sinks");
        sinks.cast(DType::F32)
    })
}

fn position(position: usize) -> i32 {
    i32::try_from(position).unwrap_or(i32::MAX)
}

/// Most bytes of scores that the reference holds at a time, unless a single query has more.
const SCORES: usize = 16 << 20;

/// Computes queries in blocks, with scores for all slots. The heads that share keys are folded into rows.
fn reference(
    q: Tensor<4>,
    chain: Vec<Buffers>,
    positions: &Positions,
    sinks: Option<Tensor<1>>,
) -> Tensor<4> {
    if chain.iter().any(|buffers| buffers.shared.is_some()) {
        return row_by_row(q, &chain, positions, sinks.as_ref());
    }
    let positions = positions.on_device.clone();
    let from = chain.first().and_then(|buffers| buffers.from.clone());
    let Some(Buffers { keys, values, shape, start, origin, .. }) = joined(chain) else {
        return q.zeros_like();
    };
    let ([batch, heads, new, head_dim], [_, kv_heads, slots, width]) = (q.dims(), values.dims());
    if q.shape().num_elements() * slots * width == 0 {
        return Tensor::zeros([batch, heads, new, width], (&q.device(), q.dtype()));
    }
    let (dtype, device) = (q.dtype(), q.device());
    let Limits { scale, softcap, window, start, origin, .. } = shape.limits(start, origin, slots);
    // Not `arange`: it uploads its numbers, which a captured step must not do.
    let count_to = |n: usize| Tensor::<1, Int>::ones([n], (&device, positions.dtype())).cumsum(0) - 1;
    let of_rows = |which| positions.clone().narrow(0, which, 1).reshape([batch, 1, 1, 1]);
    let (first, visible_from) = (of_rows(0), of_rows(1).clamp_min(start));
    let visible_from = match from {
        Some(from) => visible_from.max_pair(from.reshape([1, 1, 1, 1]).expand([batch, 1, 1, 1])),
        None => visible_from,
    };

    // The position that each slot of a row holds.
    let last = first.clone() + if shape.causal { new as i64 - 1 } else { 0 };
    let last = match shape.end {
        Some(end) => last.clamp_max(end as i64 - 1),
        None => last,
    };
    let age = last.clone() - origin - count_to(slots).reshape([1, 1, 1, slots]);
    let held = last - age.remainder_scalar(slots as i64);
    let visible =
        held.clone().greater_equal(visible_from).bool_and(held.clone().greater(first.clone() - window));
    // Values that no query sees may be anything, and NaN times 0 is not 0.
    let unused = visible.clone().bool_not().swap_dims(2, 3).expand([batch, kv_heads, slots, width]);
    let values = values.cast(DType::F32).mask_fill(unused, 0.0);
    let keys = keys.cast(DType::F32);
    let keys = if shape.latent { Tensor::cat(vec![keys, values.clone()], 3) } else { keys }.transpose();

    // The order in which a backend sums depends on the number of queries.
    let block = match new <= INVARIANT_UP_TO {
        true => 1,
        false => (SCORES / 4 / (batch * heads * slots)).clamp(1, new),
    };
    let blocks = (0..new).step_by(block).map(|i| {
        let n = block.min(new - i);
        let queries = first.clone() + count_to(n).reshape([1, 1, n, 1]) + i as i64;
        let visible = visible
            .clone()
            .bool_and(held.clone().lower_equal(queries.clone()))
            .bool_and(held.clone().greater(queries - window));
        let hidden = visible.bool_not().expand([batch, heads, n, slots]);

        let folded = |width| [batch, kv_heads, heads / kv_heads * n, width];
        let q = q.clone().narrow(2, i, n).cast(DType::F32).reshape(folded(head_dim));
        let scores = (product(q, keys.clone()) * scale).reshape([batch, heads, n, slots]);
        let scores = match softcap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        };
        // A query that sees nothing gets equal weights for all slots, which are then masked to 0.
        let scores = scores.mask_fill(hidden.clone(), f32::MIN);
        let weights = match &sinks {
            Some(sinks) => {
                let sinks = sinks.clone().reshape([1, heads, 1, 1]).expand([batch, heads, n, 1]);
                softmax(Tensor::cat(vec![scores, sinks], 3), 3).narrow(3, 0, slots)
            }
            None => softmax(scores, 3),
        };
        let weights = weights.mask_fill(hidden, 0.0);
        product(weights.reshape(folded(slots)), values.clone()).reshape([batch, heads, n, width])
    });
    Tensor::cat(blocks.collect(), 2).cast(dtype)
}

/// Runs [`reference`] for each row, with the slots that follow its base.
fn row_by_row(
    q: Tensor<4>,
    chain: &[Buffers],
    positions: &Positions,
    sinks: Option<&Tensor<1>>,
) -> Tensor<4> {
    let rows = positions.on_host.iter().enumerate().map(|(row, &RowPosition { base, .. })| {
        let own = chain.iter().map(|buffers| {
            let slots = buffers.slots().min(buffers.keys.dims()[2].saturating_sub(base));
            let own = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1).narrow(2, base, slots);
            let (keys, values) = (own(&buffers.keys), own(&buffers.values));
            let Buffers { shape, start, origin, end, from, .. } = buffers;
            let (shape, start, origin, end, from) = (*shape, *start, *origin, *end, from.clone());
            Buffers { keys, values, shape, start, origin, end, from, shared: None }
        });
        let (q, positions) = (q.clone().narrow(0, row, 1), positions.narrow(row..row + 1));
        reference(q, own.collect(), &positions, sinks.cloned())
    });
    Tensor::cat(rows.collect(), 0)
}

/// Joins a chain into one buffer of keys and one of values.
fn joined(mut chain: Vec<Buffers>) -> Option<Buffers> {
    if chain.len() == 1 {
        return chain.pop();
    }
    let Buffers { shape, start, origin, .. } = *chain.first()?;
    let (keys, values): (Vec<_>, Vec<_>) = chain
        .into_iter()
        .map(|Buffers { keys, values, origin, end, .. }| {
            let slots = end.map_or(keys.dims()[2], |end| end.saturating_sub(origin)).min(keys.dims()[2]);
            (keys.narrow(2, 0, slots), values.narrow(2, 0, slots))
        })
        .unzip();
    let (keys, values) = (Tensor::cat(keys, 2), Tensor::cat(values, 2));
    Some(Buffers { keys, values, shape, start, origin, end: None, from: None, shared: None })
}

/// How the shader reads tensors: by fours where their layout allows it.
const PACK: Lines =
    || &["alias pack = vec4<elem>;\nconst WIDTH = 4u;", "alias pack = elem;\nconst WIDTH = 1u;"];

/// The output of the shader: the result, or parts that are combined later.
const MIXED: Lines =
    || &["alias mixed = elem;\nconst SPLIT = false;", "alias mixed = f32;\nconst SPLIT = true;"];

/// How the shader for few queries divides its rows.
const FOURS: Lines = || &["const FOURS = 1u;", "const FOURS = 2u;"];

/// The tensors of the shaders for dense keys.
const BINDINGS: &[Binding] =
    &[reads("q"), reads("keys"), reads("values"), reads("positions"), reads("bound"), writes("y")];

const PREFILL: Shader = Shader {
    name: "attention_prefill",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/attention_prefill.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_dense.wgsl"),
        include_str!("../../../../shaders/attention_many.wgsl"),
    ),
    options: &[PACK, MIXED, || &["const PARTS = 4u;", "const PARTS = 2u;", "const PARTS = 1u;"]],
};

const DECODE: Shader = Shader {
    name: "attention_decode",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/attention_decode.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_dense.wgsl"),
        include_str!("../../../../shaders/attention_few.wgsl"),
        include_str!("../../../../shaders/attention_stored.wgsl"),
    ),
    options: &[PACK, MIXED, FOURS],
};

const APPEND: Shader = Shader {
    name: "attention_append",
    bindings: &[
        reads("q"),
        updates("keys"),
        updates("values"),
        reads("positions"),
        reads("bound"),
        writes("y"),
        reads("new_keys"),
        reads("new_values"),
    ],
    text: concat!(
        include_str!("../../../../shaders/attention_decode.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_dense.wgsl"),
        include_str!("../../../../shaders/attention_few.wgsl"),
        include_str!("../../../../shaders/attention_append.wgsl"),
    ),
    options: &[PACK, MIXED, FOURS],
};

const COMBINE: Shader = Shader {
    name: "attention_combine",
    bindings: &[reads("parts"), reads("sinks"), writes("y")],
    text: include_str!("../../../../shaders/attention_combine.wgsl"),
    options: &[|| &["const SINKS = false;", "const SINKS = true;"]],
};
