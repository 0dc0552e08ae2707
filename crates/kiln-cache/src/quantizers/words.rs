//! Packing of codes into 32-bit words: as many codes per word as fit, the first in the lowest bits.

use burn::tensor::{Int, Tensor};

/// Number of codes in a word: for example, ten codes of three bits.
pub(crate) fn codes_in_one(bits: usize) -> usize {
    32 / bits
}

/// Number of words for `codes` codes.
pub(crate) fn count(codes: usize, bits: usize) -> usize {
    codes.div_ceil(codes_in_one(bits))
}

/// Packs codes `[groups, group]` into `[words]`.
pub(crate) fn pack(codes: Tensor<2, Int>, bits: usize) -> Tensor<1, Int> {
    let (len, each) = (codes.shape().num_elements(), codes_in_one(bits));
    let words = count(len, bits);
    let codes: Tensor<1, Int> = codes.reshape([len]);
    let missing = words * each - len;
    let codes = match missing {
        0 => codes,
        _ => Tensor::cat(vec![codes.clone(), Tensor::zeros([missing], (&codes.device(), codes.dtype()))], 0),
    };
    let codes = codes.reshape([words, each]);
    let shifted = (0..each).map(|i| {
        let column = codes.clone().narrow(1, i, 1);
        if i == 0 { column } else { column.bitwise_left_shift_scalar((bits * i) as i32) }
    });
    let packed = shifted.reduce(Tensor::bitwise_or).unwrap_or(codes);
    packed.reshape([words])
}

/// Undoes [`pack`].
pub(crate) fn unpack(words: Tensor<1, Int>, bits: usize, [groups, group]: [usize; 2]) -> Tensor<2, Int> {
    let (count, each) = (words.dims()[0], codes_in_one(bits));
    let words = words.reshape([count, 1]);
    let mask = ((1u32 << bits) - 1) as i32;
    let columns = (0..each).map(|i| {
        let column = words.clone();
        let column = if i == 0 { column } else { column.bitwise_right_shift_scalar((bits * i) as i32) };
        column.bitwise_and_scalar(mask)
    });
    let codes: Tensor<2, Int> = Tensor::cat(columns.collect(), 1);
    codes.reshape([count * each]).narrow(0, 0, groups * group).reshape([groups, group])
}
