//! Attention over a buffer of keys and values (Vaswani et al., 2017, <https://arxiv.org/abs/1706.03762>), with heads
//! that share keys (Ainslie et al., 2023, <https://arxiv.org/abs/2305.13245>).
//!
//! `softmax(scale · q kᵀ) v` over the positions that a query sees, for queries `[batch, heads, new, head_dim]` and
//! buffers `[batch, kv_heads, slots, head_dim]`. Where queries stand is known on the device only.
//!
//! Scores, softmax and sums are float32 whatever the type of the queries; the result is rounded to it once.

#[cfg(feature = "cpu")]
mod native;
pub(crate) mod packed;
#[cfg(feature = "cube")]
mod sharing;
#[cfg(feature = "cube")]
mod twin;
#[cfg(feature = "wgpu")]
mod wgsl;

#[cfg(feature = "cpu")]
pub(crate) use native::{native, native_packed};
#[cfg(feature = "cube")]
pub(crate) use sharing::LARGEST_HEAD;
#[cfg(feature = "cube")]
pub(crate) use twin::{cube, cube_packed};
#[cfg(feature = "wgpu")]
pub(crate) use wgsl::wgsl;

use burn::tensor::{DType, Int, Tensor, activation::softmax};
use kiln_core::view::DenseKv;

use crate::shader::{Lines, Shader};

/// Buffers of a chain at most: each makes a part at least, and as many can be combined.
pub(crate) const LONGEST_CHAIN: usize = 256;

/// What a query may see, and how scores are made.
///
/// A slot holds the latest of its positions that is not after the last query: what a ring has overwritten is not seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Scores are `scale * q·k`.
    pub scale: f64,
    /// `cap * tanh(score / cap)`, after scaling and before the mask (Gemma2).
    pub softcap: Option<f64>,
    /// Latest positions a query may see, itself included.
    pub window: Option<usize>,
    /// First position that the view holds.
    pub start: usize,
    /// The key of position p is in slot (p - origin) mod slots.
    pub origin: usize,
}

impl AttentionShape {
    fn limits(&self, slots: usize) -> Limits {
        Limits {
            scale: self.scale as f32,
            softcap: self.softcap.map(|cap| cap as f32),
            window: position(self.window.unwrap_or(usize::MAX)),
            start: position(self.start),
            origin: position(self.origin % slots),
            end: i32::MAX,
        }
    }
}

fn position(position: usize) -> i32 {
    i32::try_from(position).unwrap_or(i32::MAX)
}

/// Keys and values in one buffer each, of a chain of such.
pub(crate) struct Buffers {
    keys: Tensor<4>,
    values: Tensor<4>,
    shape: AttentionShape,
    /// The first position that they do not have, where the next of the chain begins.
    end: Option<usize>,
    /// `[1]`: the first position that they have, where only the device knows it.
    from: Option<Tensor<1, Int>>,
}

impl Buffers {
    pub(crate) fn new([keys, values]: [Tensor<4>; 2], shape: &AttentionShape) -> Self {
        Self { keys, values, shape: *shape, end: None, from: None }
    }

    /// Positions before `from` `[1]` are not in them.
    pub(crate) fn from(self, from: Tensor<1, Int>) -> Self {
        Self { from: Some(from), ..self }
    }

    /// All that buffers have which continue each other, each from its origin on.
    pub(crate) fn chain(chain: Vec<DenseKv>, shape: &AttentionShape) -> Vec<Self> {
        let ends: Vec<_> = chain.iter().skip(1).map(|next| Some(next.origin)).chain([None]).collect();
        let alone = chain.len() == 1;
        let buffers = chain.into_iter().zip(ends).map(|(DenseKv { keys, values, start, origin }, end)| {
            // A ring that is alone may have turned.
            let start = if alone { start } else { start.max(origin) };
            let shape = AttentionShape { start: start.max(shape.start), origin, ..*shape };
            Self { keys, values, shape, end, from: None }
        });
        buffers.collect()
    }

    fn limits(&self) -> Limits {
        let limits = self.shape.limits(self.keys.dims()[2]);
        Limits { end: self.end.map_or(i32::MAX, position), ..limits }
    }

    /// Casts them to the type of `q`.
    ///
    /// # Panics
    /// Where they do not fit it.
    pub(crate) fn for_queries(self, q: &Tensor<4>) -> Self {
        let ([batch, heads, _, head_dim], [_, kv_heads, slots, _]) = (q.dims(), self.keys.dims());
        let want = [batch, kv_heads, slots, head_dim];
        assert_eq!(self.keys.dims(), want, "attention: keys and q {:?}", q.dims());
        assert_eq!(self.values.dims(), want, "attention: values and keys");
        assert!(heads.is_multiple_of(kv_heads), "attention: {heads} heads share {kv_heads} of keys");
        if let Some(end) = self.end {
            let origin = self.shape.origin;
            assert!(
                (origin..=origin + slots).contains(&end),
                "attention: {slots} slots from {origin} on do not end at {end}"
            );
        }
        Self { keys: self.keys.cast(q.dtype()), values: self.values.cast(q.dtype()), ..self }
    }

    /// Whether there is nothing in them.
    pub(crate) fn are_empty(&self) -> bool {
        self.keys.shape().num_elements() == 0
    }
}

/// An [`AttentionShape`] in the numbers that kernels have. Positions are not negative, so nothing overflows.
#[derive(Clone, Copy, Debug)]
struct Limits {
    scale: f32,
    softcap: Option<f32>,
    window: i32,
    start: i32,
    /// Less than there are slots.
    origin: i32,
    /// The first position that is not here.
    end: i32,
}

/// Bytes of scores that the definition holds at a time, where one query has not more.
const SCORES: usize = 16 << 20;

/// Queries are computed in blocks, with scores for all slots; the heads that share keys are folded into rows.
pub(crate) fn definition(q: Tensor<4>, chain: Vec<Buffers>, positions: Tensor<2, Int>) -> Tensor<4> {
    let from = chain.first().and_then(|buffers| buffers.from.clone());
    let Some((keys, values, shape)) = joined(chain) else { return q.zeros_like() };
    let ([batch, heads, new, head_dim], [_, kv_heads, slots, _]) = (q.dims(), keys.dims());
    if q.shape().num_elements() * slots == 0 {
        return q.zeros_like();
    }
    let (dtype, device) = (q.dtype(), q.device());
    let Limits { scale, softcap, window, start, origin, .. } = shape.limits(slots);
    // Not `arange`: it uploads its numbers, which a captured step must not do.
    let count_to = |n: usize| Tensor::<1, Int>::ones([n], (&device, positions.dtype())).cumsum(0) - 1;
    let of_rows = |which| positions.clone().narrow(0, which, 1).reshape([batch, 1, 1, 1]);
    let (first, visible_from) = (of_rows(0), of_rows(1).clamp_min(start));
    let visible_from = match from {
        Some(from) => visible_from.max_pair(from.reshape([1, 1, 1, 1]).expand([batch, 1, 1, 1])),
        None => visible_from,
    };

    // The position that each slot of a row holds.
    let last = first.clone() + (new as i64 - 1);
    let age = last.clone() - origin - count_to(slots).reshape([1, 1, 1, slots]);
    let held = last - age.remainder_scalar(slots as i64);
    let visible =
        held.clone().greater_equal(visible_from).bool_and(held.clone().greater(first.clone() - window));
    // What no query sees may be anything, and not a number times 0 is not 0.
    let unused = visible.clone().bool_not().swap_dims(2, 3).expand([batch, kv_heads, slots, head_dim]);
    let values = values.cast(DType::F32).mask_fill(unused, 0.0);
    let keys = keys.cast(DType::F32).transpose();

    let block = (SCORES / 4 / (batch * heads * slots)).clamp(1, new);
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
        let scores = (q.matmul(keys.clone()) * scale).reshape([batch, heads, n, slots]);
        let scores = match softcap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        };
        // A query that sees nothing gets the same weight for all slots, and then none.
        let weights = softmax(scores.mask_fill(hidden.clone(), f32::MIN), 3).mask_fill(hidden, 0.0);
        weights.reshape(folded(slots)).matmul(values.clone()).reshape([batch, heads, n, head_dim])
    });
    Tensor::cat(blocks.collect(), 2).cast(dtype)
}

/// A chain as one buffer of keys and one of values.
fn joined(chain: Vec<Buffers>) -> Option<(Tensor<4>, Tensor<4>, AttentionShape)> {
    let first = chain.first()?.shape;
    if let [Buffers { keys, values, .. }] = &chain[..] {
        return Some((keys.clone(), values.clone(), first));
    }
    let (keys, values): (Vec<_>, Vec<_>) = chain
        .into_iter()
        .map(|Buffers { keys, values, shape, end, .. }| {
            let slots = end.map_or(keys.dims()[2], |end| end.saturating_sub(shape.origin));
            (keys.narrow(2, 0, slots), values.narrow(2, 0, slots))
        })
        .unzip();
    Some((Tensor::cat(keys, 2), Tensor::cat(values, 2), first))
}

/// The first two have the queries, many and few; the last puts together what workgroups made that shared the keys.
pub(crate) const SHADERS: [Shader; 4] = [PREFILL, DECODE, COMBINE, packed::SHADER];

/// How tensors are read: by fours where their layout allows.
const PACK: Lines = &["alias pack = vec4<elem>;\nconst WIDTH = 4u;", "alias pack = elem;\nconst WIDTH = 1u;"];

/// What is written: the result, or parts that are combined.
const MIXED: Lines =
    &["alias mixed = elem;\nconst SPLIT = false;", "alias mixed = f32;\nconst SPLIT = true;"];

const PREFILL: Shader = Shader {
    name: "attention_prefill",
    text: concat!(
        include_str!("../../../../shaders/attention_prefill.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_dense.wgsl"),
    ),
    options: &[PACK, MIXED, &["const PARTS = 4u;", "const PARTS = 2u;", "const PARTS = 1u;"]],
};

const DECODE: Shader = Shader {
    name: "attention_decode",
    text: concat!(
        include_str!("../../../../shaders/attention_decode.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_dense.wgsl"),
        include_str!("../../../../shaders/attention_few.wgsl"),
    ),
    options: &[PACK, MIXED, &["const FOURS = 1u;", "const FOURS = 2u;"]],
};

const COMBINE: Shader = Shader {
    name: "attention_combine",
    text: include_str!("../../../../shaders/attention_combine.wgsl"),
    options: &[],
};
