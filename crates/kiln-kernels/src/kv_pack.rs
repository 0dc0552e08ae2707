//! Packs keys or values into few bits, and writes them into a ring of slots.
//!
//! For each group: `offset` is its smallest number, rounded down to float16, and `scale` is
//! `(largest - offset) / (2^bits - 1)`, rounded up, so that codes reach the largest number; 0 where that is less than
//! the smallest float16. This is the asymmetric quantization of KIVI (<https://arxiv.org/abs/2402.02750>).
//!
//! `code = clamp(round((x - offset) / scale), 0, 2^bits - 1)`, to the even one of two, where the difference is rounded to
//! float32 and the rest is exact: no quotient is rounded, for not every device rounds it the same. So the words are the
//! same on every device. No number is off by more than half a scale.
//!
//! Numbers beyond those of float16 count as the largest of them, and what is not a number as 0.

use burn::tensor::{DType, Int, Tensor};
use kiln_core::packed::{Along, PackedBuffer, Packing};

use crate::half::{self, Rounding, SMALLEST};

/// `given`: the scales and offsets instead of those that the numbers have.
pub(crate) fn definition(
    buffer: PackedBuffer,
    tokens: Tensor<4>,
    slot: usize,
    packing: Packing,
    given: Option<[Tensor<4>; 2]>,
) -> PackedBuffer {
    let dims = tokens.dims();
    if tokens.shape().num_elements() == 0 {
        return buffer;
    }
    let numbers = finite(tokens);
    let scales = match given {
        Some([scale, offset]) => {
            let scale = half::bits(finite(scale).clamp_min(0.0), Rounding::Nearest);
            words(scale, half::bits(finite(offset), Rounding::Nearest))
        }
        None => scales(&numbers, packing),
    };
    let scale = spread(half::numbers(scales.clone()), packing, dims);
    let offset = spread(half::numbers(scales.clone().bitwise_right_shift_scalar(16)), packing, dims);
    let codes = codes(numbers, scale, offset, packing);
    let slots = buffer.slots();
    let group = packing.slots_together();
    PackedBuffer {
        codes: write(buffer.codes, pack(codes, packing), slot % slots),
        scales: write(buffer.scales, scales, slot % slots / group),
    }
}

/// Float32 numbers that float16 has a neighbour for. Devices may take what is below the smallest normal number for 0.
fn finite(x: Tensor<4>) -> Tensor<4> {
    let x = x.cast(DType::F32);
    let x = x.clone().mask_fill(x.is_nan(), 0.0).clamp(-half::LARGEST, half::LARGEST);
    let small = x.clone().abs().lower_elem(f32::MIN_POSITIVE);
    x.mask_fill(small, 0.0)
}

/// A scale in the low half, an offset in the high half.
fn words(scale: Tensor<4, Int>, offset: Tensor<4, Int>) -> Tensor<4, Int> {
    offset.bitwise_left_shift_scalar(16).bitwise_or(scale)
}

fn scales(numbers: &Tensor<4>, packing: Packing) -> Tensor<4, Int> {
    let [batch, heads, n, dim] = numbers.dims();
    let group = packing.group();
    let (groups, axis): (Tensor<5>, usize) = match packing.along() {
        Along::Channels => {
            // The last number again, which changes neither the smallest nor the largest of its group.
            let count = dim.div_ceil(group);
            let mut whole = numbers.clone();
            if count * group > dim {
                let last = numbers.clone().narrow(3, dim - 1, 1);
                whole = Tensor::cat(vec![whole, last.expand([batch, heads, n, count * group - dim])], 3);
            }
            (whole.reshape([batch, heads, n, count, group]), 4)
        }
        Along::Tokens => (numbers.clone().reshape([batch, heads, n / group, group, dim]), 3),
    };
    let smallest: Tensor<4> = groups.clone().min_dim(axis).squeeze_dim(axis);
    let largest: Tensor<4> = groups.max_dim(axis).squeeze_dim(axis);
    let offset = half::bits(smallest, Rounding::Down);
    let range = largest - half::numbers(offset.clone());
    let none = range.clone().lower_elem(SMALLEST);
    let scale = half::bits(range * (1.0 / packing.largest() as f32), Rounding::Up);
    words(scale.mask_fill(none, 0), offset)
}

/// For each number the one of its group.
pub(crate) fn spread(groups: Tensor<4>, packing: Packing, dims: [usize; 4]) -> Tensor<4> {
    let ([batch, heads, n, dim], [_, _, rows, columns]) = (dims, groups.dims());
    let group = packing.group();
    match packing.along() {
        Along::Channels => {
            let all = groups.unsqueeze_dim::<5>(4).expand([batch, heads, n, columns, group]);
            all.reshape([batch, heads, n, columns * group]).narrow(3, 0, dim)
        }
        Along::Tokens => {
            let all = groups.unsqueeze_dim::<5>(3).expand([batch, heads, rows, group, dim]);
            all.reshape([batch, heads, n, dim])
        }
    }
}

fn codes(x: Tensor<4>, scale: Tensor<4>, offset: Tensor<4>, packing: Packing) -> Tensor<4, Int> {
    let most = packing.largest() as f32;
    let difference = (x - offset).clamp_min(0.0);
    let constant = scale.clone().equal_elem(0.0);
    let estimate =
        (difference.clone() / scale.clone().mask_fill(constant.clone(), 1.0)).clamp_max(most).round();
    // The middles between a code and its neighbours are exact: odd numbers times halves of scales.
    let odd = (estimate.clone() * 0.5).floor() * 2.0;
    let odd = odd.not_equal(estimate.clone());
    let middle = |add: f32| (estimate.clone() * 2.0 + add) * (scale.clone() * 0.5);
    let at = |middle: Tensor<4>| difference.clone().equal(middle).bool_and(odd.clone());
    let above = difference.clone().greater(middle(1.0)).bool_or(at(middle(1.0)));
    let below = difference.clone().lower(middle(-1.0)).bool_or(at(middle(-1.0)));
    let code = estimate.clone().mask_where(above, estimate.clone() + 1.0);
    let code = code.mask_where(below, estimate - 1.0).clamp(0.0, most);
    code.mask_fill(constant, 0.0).int().cast(DType::I32)
}

/// `[.., dim]` to `[.., words]`.
fn pack(codes: Tensor<4, Int>, packing: Packing) -> Tensor<4, Int> {
    let [batch, heads, n, dim] = codes.dims();
    let (channels, count) = (packing.channels_together(dim), packing.words_together(dim));
    let (groups, each) = (dim.div_ceil(channels), packing.codes_a_word());
    let device = codes.device();
    let zeros = |shape| Tensor::<4, Int>::zeros(shape, (&device, DType::I32));
    let mut codes = codes;
    if groups * channels > dim {
        codes = Tensor::cat(vec![codes, zeros([batch, heads, n, groups * channels - dim])], 3);
    }
    let mut codes: Tensor<4, Int> = codes.reshape([batch, heads, n * groups, channels]);
    if count * each > channels {
        codes = Tensor::cat(vec![codes, zeros([batch, heads, n * groups, count * each - channels])], 3);
    }
    let codes: Tensor<5, Int> = codes.reshape([batch, heads, n, groups * count, each]);
    let mut words = zeros([batch, heads, n, groups * count]);
    for i in 0..each {
        let code: Tensor<4, Int> = codes.clone().narrow(4, i, 1).squeeze_dim(4);
        words = words.bitwise_or(code.bitwise_left_shift_scalar((i * packing.bits()) as i32));
    }
    words
}

/// Writes rows from `row` on, and from the first after the last.
fn write(buffer: Tensor<4, Int>, rows: Tensor<4, Int>, row: usize) -> Tensor<4, Int> {
    let [batch, heads, slots, width] = buffer.dims();
    let n = rows.dims()[2];
    let straight = n.min(slots - row);
    let buffer = buffer.slice_assign(
        [0..batch, 0..heads, row..row + straight, 0..width],
        rows.clone().narrow(2, 0, straight),
    );
    if straight == n {
        return buffer;
    }
    buffer
        .slice_assign([0..batch, 0..heads, 0..n - straight, 0..width], rows.narrow(2, straight, n - straight))
}
