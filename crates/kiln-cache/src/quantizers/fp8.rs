//! fp8: 8-bit floats with 4 bits of exponent and 3 of mantissa (`torch.float8_e4m3fn`; Micikevicius et al.,
//! 2022, <https://arxiv.org/abs/2209.05433>), times one scale for all numbers (`Fp8QuantizedLayer` of
//! transformers).

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{CacheFormat, Grouping, Optimizer, rounding::half_to_even};

pub(crate) static FP8: CacheFormat = CacheFormat {
    name: "fp8",
    summary: "floats of 8 bits; one scale for all keys of a block and one for all values, from the first pass",
    bits: &[8],
    axes: &[(0, Grouping::Neighbours)],
    default_axes: [0, 0],
    optimizers: &[Optimizer::Off],
    backend: None,
    refined: |_, _| None,
};

/// The largest number.
const LARGEST: f32 = 448.0;

/// Smallest exponent of a number with a leading one; smaller numbers are multiples of 2^-9.
const LOWEST: i32 = -6;

/// Exponents from [`LOWEST`] to that of [`LARGEST`].
const EXPONENTS: usize = 15;

/// Number of codes in a word.
const CODES: usize = 4;

/// Number of words for `numbers` codes.
pub(crate) fn words(numbers: usize) -> usize {
    numbers.div_ceil(CODES)
}

/// Returns the scale by which the largest element of `x` becomes [`LARGEST`], `[rows, 1]`, the same for all
/// rows.
pub(crate) fn scales(x: &Tensor<4>) -> Tensor<2> {
    let rows = x.dims()[0];
    let largest = x.clone().abs().max().cast(DType::F32) / LARGEST;
    largest.clamp_min(f32::MIN_POSITIVE).reshape([1, 1]).expand([rows, 1])
}

/// Rounds `x` `[rows, heads, tokens, width]`, divided by `scales` `[rows, 1]`, to codes, in words
/// `[rows, heads, tokens, words]`. Numbers beyond the largest become the largest.
pub(crate) fn encode(x: Tensor<4>, scales: &Tensor<2>) -> Tensor<4, Int> {
    let [rows, heads, tokens, width] = x.dims();
    let device = x.device();
    let x = x.cast(DType::F32) / scales.clone().reshape([rows, 1, 1, 1]);
    let is_negative = x.clone().lower_elem(0.0).int();
    let codes = magnitudes(x.abs().clamp_max(LARGEST)) + is_negative * 128;
    let codes = match words(width) * CODES - width {
        0 => codes,
        missing => {
            let zeros = Tensor::zeros([rows, heads, tokens, missing], (&device, codes.dtype()));
            Tensor::cat(vec![codes, zeros], 3)
        }
    };
    let codes: Tensor<5, Int> = codes.reshape([rows, heads, tokens, words(width), CODES]);
    let part = |i: usize| codes.clone().narrow(4, i, 1).bitwise_left_shift_scalar(8 * i as i32);
    let packed = (1..CODES).fold(codes.clone().narrow(4, 0, 1), |word, i| word.bitwise_or(part(i)));
    packed.reshape([rows, heads, tokens, words(width)])
}

/// Rounds numbers from 0 to [`LARGEST`] to codes, ties to even.
fn magnitudes(x: Tensor<4>) -> Tensor<4, Int> {
    let (shape, device) = (x.dims(), x.device());
    let powers: Vec<f32> = (0..EXPONENTS as i32).map(|i| f32::powi(2.0, LOWEST + i)).collect();
    let powers = Tensor::<1>::from_data(TensorData::new(powers, [EXPONENTS]), (&device, DType::F32));
    let power = |exponent: &Tensor<4, Int>| {
        powers.clone().select(0, exponent.clone().reshape([shape.iter().product::<usize>()])).reshape(shape)
    };
    let least = x.clone().clamp_min(f32::powi(2.0, LOWEST));
    let guess = (least.clone().log() / std::f32::consts::LN_2).floor() - LOWEST as f32;
    let guess = guess.clamp(0.0, (EXPONENTS - 1) as f32).int();
    // The logarithm of a number beside a power of two may be rounded to the other side.
    let near = power(&guess);
    let above = least.clone().greater_equal(near.clone() * 2.0).int();
    let exponent = guess + above - least.lower(near).int();
    // Steps are an eighth of the power. A number that is rounded up to the next power gets its code.
    let steps = half_to_even(x * 8.0 / power(&exponent)).int();
    exponent * 8 + steps
}
