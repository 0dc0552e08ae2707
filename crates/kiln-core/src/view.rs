//! The keys and values that attention reads.

use burn::tensor::Tensor;

use crate::{layer::KvSpan, packed::PackedKv};

/// Keys and values as a layer returns them.
///
/// Deliberately closed: attention has one fast path per variant.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "handed on at once, and never stored")]
pub enum KvView {
    Dense(DenseKv),
    /// Consecutive buffers: each holds the positions from its origin to that of the next, in slots from 0 on.
    /// Further slots of a buffer are ignored.
    Chained(Vec<DenseKv>),
    Packed(Box<PackedView>),
}

/// A buffer of keys and one of values, in which some slots are valid: position `p` is in slot
/// `(p - origin) mod slots`.
#[derive(Clone, Debug)]
pub struct DenseKv {
    /// Each `[batch, heads, slots, width]`
    pub keys: Tensor<4>,
    pub values: Tensor<4>,
    /// First valid position.
    pub start: usize,
    pub origin: usize,
    /// Largest number of slots of a row, if rows share the buffer and each uses slots from its
    /// [`base`](crate::layer::RowPosition::base) on; `None`: each row has all slots.
    pub shared: Option<usize>,
}

/// A quantized history, and recent tokens in full precision.
#[derive(Clone, Debug)]
pub struct PackedView {
    /// Keys and values of the positions before `end`.
    pub packed: Option<PackedKv>,
    pub end: usize,
    /// Keys and values of the positions from `end` on. The `start` is that of the whole view.
    pub recent: DenseKv,
    /// Matrices that keys and values were multiplied by, `[width, width]`, orthogonal and symmetric. Queries
    /// must be multiplied by that of the keys, and the result of attention by that of the values.
    pub rotation: Option<[Tensor<2>; 2]>,
}

impl KvView {
    /// Creates the view of a buffer whose slots are positions.
    pub fn from_zero(keys: Tensor<4>, values: Tensor<4>) -> Self {
        Self::Dense(DenseKv { keys, values, start: 0, origin: 0, shared: None })
    }
}

impl DenseKv {
    /// Expands a buffer that rows share to `rows` rows, without a copy.
    #[must_use]
    pub fn of_rows(self, rows: usize) -> Self {
        let of_rows = |tensor: Tensor<4>| {
            let [_, heads, slots, width] = tensor.dims();
            tensor.expand([rows, heads, slots, width])
        };
        match self.shared {
            Some(_) => Self { keys: of_rows(self.keys), values: of_rows(self.values), ..self },
            None => self,
        }
    }

    /// Largest number of slots of a row.
    pub fn slots(&self) -> usize {
        self.shared.unwrap_or_else(|| self.keys.dims()[2])
    }

    /// Returns the keys and values of `span`, one position after the other:
    /// each `[batch, heads, span.len, width]`.
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
