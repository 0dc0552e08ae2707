//! Makes numbers of packed keys or values again: `code * scale + offset`, in float32, then rounded to the type.

use std::ops::Range;

use burn::tensor::{DType, FloatDType, Int, Tensor};
use kiln_core::packed::{PackedBuffer, Packing};

use crate::{half, kv_pack::spread};

pub(crate) fn definition(
    buffer: &PackedBuffer,
    packing: Packing,
    head_dim: usize,
    slots: Range<usize>,
    dtype: FloatDType,
) -> Tensor<4> {
    let [batch, heads, _, words] = buffer.codes.dims();
    let shape = [batch, heads, slots.len(), head_dim];
    if shape.contains(&0) {
        return Tensor::<4>::zeros(shape, &buffer.codes.device()).cast(dtype);
    }
    // Whole groups, then what is asked for of them.
    let together = packing.slots_together();
    let groups = slots.start / together..slots.end.div_ceil(together);
    let n = groups.len() * together;
    let codes = buffer.codes.clone().narrow(2, groups.start * together, n);
    let scales = buffer.scales.clone().narrow(2, groups.start, groups.len());

    let (channels, each) = (packing.channels_together(head_dim), packing.codes_a_word());
    let parts = (0..each).map(|i| {
        let code = codes.clone().bitwise_right_shift_scalar((i * packing.bits()) as i32);
        code.bitwise_and_scalar(packing.largest() as i32).unsqueeze_dim::<5>(4)
    });
    let all: Tensor<4, Int> = Tensor::cat(parts.collect(), 4).reshape([
        batch,
        heads,
        n * head_dim.div_ceil(channels),
        packing.words_together(head_dim) * each,
    ]);
    let codes: Tensor<4, Int> = all.narrow(3, 0, channels).reshape([
        batch,
        heads,
        n,
        words / packing.words_together(head_dim) * channels,
    ]);
    let codes = codes.narrow(3, 0, head_dim).float().cast(DType::F32);

    let dims = [batch, heads, n, head_dim];
    let scale = spread(half::numbers(scales.clone()), packing, dims);
    let offset = spread(half::numbers(scales.bitwise_right_shift_scalar(16)), packing, dims);
    let numbers = codes * scale + offset;
    numbers.narrow(2, slots.start - groups.start * together, slots.len()).cast(dtype)
}
