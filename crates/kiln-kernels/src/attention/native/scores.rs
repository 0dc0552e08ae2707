//! Scores of rows against keys.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use pulp::Simd;

/// Consecutive vectors, each `stride` numbers after the previous one.
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

/// Computes scores with SIMD vectors of rows: queries are `[dim, columns]`.
#[inline(always)]
pub(super) fn score<S: Simd>(
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

/// M keys, and N vectors of rows from c on.
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
