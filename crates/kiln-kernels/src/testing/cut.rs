//! Inputs and results cut to some rows and tokens.

use std::ops::Range;

use burn::tensor::{Tensor, kind::Basic};
use kiln_core::{
    layer::{Positions, RowPosition},
    packed::PackedBuffer,
};

/// A range of rows, and a range of tokens in each row.
pub type Extent = [Range<usize>; 2];

/// Cuts a tensor to these rows, in dimension 0, and tokens, in dimension `dim`.
pub(crate) fn cut<const D: usize, K: Basic>(
    tensor: Tensor<D, K>,
    [rows, tokens]: &Extent,
    dim: usize,
) -> Tensor<D, K> {
    cut_rows(tensor, rows).narrow(dim, tokens.start, tokens.len())
}

/// Cuts a tensor to these rows, in dimension 0.
pub(crate) fn cut_rows<const D: usize, K: Basic>(tensor: Tensor<D, K>, rows: &Range<usize>) -> Tensor<D, K> {
    tensor.narrow(0, rows.start, rows.len())
}

/// Cuts a packed buffer to these rows.
pub(crate) fn cut_buffer(buffer: PackedBuffer, rows: &Range<usize>) -> PackedBuffer {
    PackedBuffer { codes: cut_rows(buffer.codes, rows), scales: cut_rows(buffer.scales, rows) }
}

/// Returns the positions of these tokens. They see no more than they would beside `new` tokens in rings of
/// `slots` slots.
pub(crate) fn cut_positions(
    positions: &Positions,
    [rows, tokens]: &Extent,
    new: usize,
    slots: usize,
) -> Positions {
    let own = positions.on_host[rows.clone()].iter().map(|row| RowPosition {
        first: row.first + tokens.start,
        visible_from: row.visible_from.max((row.first + new).saturating_sub(slots)),
        ..*row
    });
    Positions::new(own.collect(), &positions.on_device.device())
}

/// Implements `extent`, `part` and `part_of` of a kernel with inputs `[rows, tokens, ..]` and a result of
/// that shape.
macro_rules! cut_into_tokens {
    ($first:ident $(, $others:ident)*) => {
        fn extent(&self) -> [usize; 2] {
            let [rows, tokens, ..] = self.$first.dims();
            [rows, tokens]
        }

        fn part(self, part: $crate::testing::cut::Extent) -> Self {
            let $first = $crate::testing::cut::cut(self.$first, &part, 1);
            $(let $others = $crate::testing::cut::cut(self.$others, &part, 1);)*
            Self { $first, $($others,)* ..self }
        }

        fn part_of(whole: Self::Output, part: $crate::testing::cut::Extent) -> Self::Output {
            $crate::testing::cut::cut(whole, &part, 1)
        }
    };
}
pub(crate) use cut_into_tokens;
