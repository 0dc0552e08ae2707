//! What attention reads.

use burn::tensor::Tensor;

use crate::{layer::KvSpan, packed::PackedKv};

/// Keys and values as a layer hands them out.
///
/// Closed on purpose: attention has one fast path per variant.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "handed on at once, and never stored")]
pub enum KvView {
    Dense(DenseKv),
    /// Buffers that continue each other: each holds the positions from its origin to that of the next, in slots from 0 on.
    /// It may have slots besides, which do not count.
    Chained(Vec<DenseKv>),
    Packed(Box<PackedView>),
}

/// A buffer of keys and one of values, of which some slots count: position `p` is in slot `(p - origin) mod slots`.
#[derive(Clone, Debug)]
pub struct DenseKv {
    /// `[batch, kv_heads, slots, head_dim]`
    pub keys: Tensor<4>,
    pub values: Tensor<4>,
    /// The first position that counts.
    pub start: usize,
    pub origin: usize,
    /// The most slots of a row, where rows share the buffer and each has its own of them, from its
    /// [`base`](crate::layer::RowPosition::base) on; `None`: each row has all.
    pub shared: Option<usize>,
}

/// History in few bits, and recent tokens as they are.
#[derive(Clone, Debug)]
pub struct PackedView {
    /// Positions before `end`.
    pub packed: Option<PackedKv>,
    pub end: usize,
    /// Positions from `end` on. Its `start` is that of the whole view.
    pub recent: DenseKv,
    /// `[head_dim, head_dim]`, orthogonal and symmetric: what keys and values were multiplied by. Queries are to be
    /// multiplied by it too, and the result once more.
    pub rotation: Option<Tensor<2>>,
}

impl KvView {
    /// A buffer whose slots are positions.
    pub fn from_zero(keys: Tensor<4>, values: Tensor<4>) -> Self {
        Self::Dense(DenseKv { keys, values, start: 0, origin: 0, shared: None })
    }
}

impl DenseKv {
    /// The most slots of a row.
    pub fn slots(&self) -> usize {
        self.shared.unwrap_or_else(|| self.keys.dims()[2])
    }

    /// The keys and values of `span`, one position after the other: `[batch, kv_heads, span.len, head_dim]`.
    pub fn in_order(self, span: KvSpan) -> (Tensor<4>, Tensor<4>) {
        let Self { keys, values, origin, .. } = self;
        let slots = keys.dims()[2].max(1);
        let first = span.start.saturating_sub(origin) % slots;
        let straight = span.len.min(slots - first);
        let order = |tensor: Tensor<4>| match span.len - straight {
            0 => tensor.narrow(2, first, straight),
            wrapped => {
                Tensor::cat(vec![tensor.clone().narrow(2, first, straight), tensor.narrow(2, 0, wrapped)], 2)
            }
        };
        (order(keys), order(values))
    }
}
