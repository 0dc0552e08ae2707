//! Scores of rows and keys, and the functions that make weights of them.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use pulp::Simd;

/// Vectors one after the other, each `stride` numbers after the one before.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    pub(super) numbers: &'a [f32],
    pub(super) stride: usize,
}

impl<'a> Vectors<'a> {
    #[inline(always)]
    fn some<const M: usize>(self, first: usize, dim: usize) -> [&'a [f32]; M] {
        let mut vectors = [&[][..]; M];
        for m in 0..M {
            vectors[m] = &self.numbers[(first + m) * self.stride..][..dim];
        }
        vectors
    }
}

/// Scores with vectors of rows: queries are `[dim, columns]`.
#[inline(always)]
pub(super) fn score_many<S: Simd>(
    simd: S,
    keys: Vectors<'_>,
    queries: &[f32],
    scores: &mut [f32],
    [n, dim, columns]: [usize; 3],
) {
    let queries = S::as_simd_f32s(queries).0;
    let scores = S::as_mut_simd_f32s(scores).0;
    let vectors = columns / S::F32_LANES;
    let mut c = 0;
    while c < vectors {
        let two = c + 2 <= vectors;
        let mut key = 0;
        while key < n {
            let place = [key, c, vectors];
            key += match (n - key, two) {
                (8.., true) if S::REGISTER_COUNT >= 32 => {
                    score_block::<S, 8, 2>(simd, keys.some(key, dim), queries, scores, place)
                }
                (8.., false) if S::REGISTER_COUNT >= 32 => {
                    score_block::<S, 8, 1>(simd, keys.some(key, dim), queries, scores, place)
                }
                (4.., true) => score_block::<S, 4, 2>(simd, keys.some(key, dim), queries, scores, place),
                (4.., false) => score_block::<S, 4, 1>(simd, keys.some(key, dim), queries, scores, place),
                (_, true) => score_block::<S, 1, 2>(simd, keys.some(key, dim), queries, scores, place),
                (_, false) => score_block::<S, 1, 1>(simd, keys.some(key, dim), queries, scores, place),
            };
        }
        c += 2;
    }
}

/// M keys, N vectors of rows from c on.
#[inline(always)]
fn score_block<S: Simd, const M: usize, const N: usize>(
    simd: S,
    keys: [&[f32]; M],
    queries: &[S::f32s],
    scores: &mut [S::f32s],
    [key, c, vectors]: [usize; 3],
) -> usize {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    let dim = keys[0].len();
    let mut cut = [&[][..]; M];
    for m in 0..M {
        cut[m] = &keys[m][..dim];
    }
    for d in 0..dim {
        let query = &queries[d * vectors + c..][..N];
        for m in 0..M {
            let key = simd.splat_f32s(cut[m][d]);
            for n in 0..N {
                sums[m][n] = simd.mul_add_e_f32s(key, query[n], sums[m][n]);
            }
        }
    }
    for m in 0..M {
        scores[(key + m) * vectors + c..][..N].copy_from_slice(&sums[m]);
    }
    M
}

/// Scores with vectors of dimensions: queries are `[rows, dim]`, in whole vectors.
#[inline(always)]
pub(super) fn score_few<S: Simd>(
    simd: S,
    keys: Vectors<'_>,
    queries: &[f32],
    scores: &mut [f32],
    [n, dim, rows, columns]: [usize; 4],
) {
    let width = queries.len() / rows;
    let queries = Vectors { numbers: queries, stride: width };
    // One key after the other, as they come from memory.
    for key in 0..n {
        let [vector] = keys.some(key, dim);
        let scores = &mut scores[key * columns..][..rows];
        let mut r = 0;
        while r < rows {
            r += match rows - r {
                4.. => dots::<S, 4, 2>(simd, queries.some(r, width), vector, &mut scores[r..]),
                2.. => dots::<S, 2, 4>(simd, queries.some(r, width), vector, &mut scores[r..]),
                _ => dots::<S, 1, 4>(simd, queries.some(r, width), vector, &mut scores[r..]),
            };
        }
    }
}

/// M rows times a key. K sums of each, because an addition waits for the one before it.
#[inline(always)]
fn dots<S: Simd, const M: usize, const K: usize>(
    simd: S,
    queries: [&[f32]; M],
    key: &[f32],
    scores: &mut [f32],
) -> usize {
    let mut sums = [[simd.splat_f32s(0.0); K]; M];
    let (key, rest) = S::as_simd_f32s(key);
    let whole = key.len();
    let (mut vectors, mut last) = ([&[][..]; M], [simd.splat_f32s(0.0); M]);
    for m in 0..M {
        let query = S::as_simd_f32s(queries[m]).0;
        vectors[m] = &query[..whole];
        if !rest.is_empty() {
            last[m] = query[whole];
        }
    }
    let mut i = 0;
    while i + K <= whole {
        for k in 0..K {
            for m in 0..M {
                sums[m][k] = simd.mul_add_e_f32s(key[i + k], vectors[m][i + k], sums[m][k]);
            }
        }
        i += K;
    }
    while i < whole {
        for m in 0..M {
            sums[m][0] = simd.mul_add_e_f32s(key[i], vectors[m][i], sums[m][0]);
        }
        i += 1;
    }
    let rest = if rest.is_empty() { simd.splat_f32s(0.0) } else { simd.partial_load_f32s(rest) };
    for m in 0..M {
        sums[m][0] = simd.mul_add_e_f32s(rest, last[m], sums[m][0]);
        for k in 1..K {
            sums[m][0] = simd.add_f32s(sums[m][0], sums[m][k]);
        }
        scores[m] = simd.reduce_sum_f32s(sums[m][0]);
    }
    M
}

/// What is subtracted from scores: not infinity, from which infinity cannot be subtracted.
#[inline(always)]
pub(super) fn finite(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// Of numbers up to 88, to within two roundings; 0 below -87. Without branches, so that it is done in vectors.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which the lowest bits then are.
    const ROUND: f32 = 12_582_912.0;
    /// The logarithm of 2 in few digits, so that products with it are exact.
    const LN_2: f32 = 355.0 / 512.0;
    /// What that is short of it.
    const LN_2_REST: f32 = -2.121_944_4e-4;

    let bound = if x < -87.0 { -87.0 } else { x };
    let rounded = bound * std::f32::consts::LOG2_E + ROUND;
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let whole = rounded - ROUND;
    // Between minus and plus half the logarithm of 2: the minimax polynomial of Cephes.
    let r = bound - whole * LN_2 - whole * LN_2_REST;
    let p = 1.987_569_2e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let y = p * f32::from_bits(power.wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { y }
}

#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}
