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

/// Computes scores with SIMD vectors of dimensions: queries are `[rows, dim]`, in whole vectors. The order in
/// which a score is summed depends neither on the number of rows nor on the number of keys.
#[inline(always)]
pub(super) fn score_few<S: Simd>(
    simd: S,
    keys: Vectors<'_>,
    queries: &[f32],
    scores: &mut [f32],
    [n, dim, rows, columns]: [usize; 4],
) {
    let queries = Vectors { numbers: queries, stride: queries.len() / rows };
    let mut key = 0;
    while key < n {
        let scores = &mut scores[key * columns..];
        let sizes = [rows, columns];
        key += match n - key {
            4.. => score_keys::<S, 4>(simd, keys.some(key, dim), queries, scores, sizes),
            _ => score_keys::<S, 1>(simd, keys.some(key, dim), queries, scores, sizes),
        };
    }
}

/// All rows, and N keys.
#[inline(always)]
fn score_keys<S: Simd, const N: usize>(
    simd: S,
    keys: [&[f32]; N],
    queries: Vectors<'_>,
    scores: &mut [f32],
    [rows, columns]: [usize; 2],
) -> usize {
    let width = queries.stride;
    let mut r = 0;
    while r < rows {
        r += match rows - r {
            2.. => dots::<S, 2, N>(simd, queries.some(r, width), keys, &mut scores[r..], columns),
            _ => dots::<S, 1, N>(simd, queries.some(r, width), keys, &mut scores[r..], columns),
        };
    }
    N
}

/// M rows times N keys: one sum of vectors for each pair, in the same order for every M and N.
#[inline(always)]
fn dots<S: Simd, const M: usize, const N: usize>(
    simd: S,
    queries: [&[f32]; M],
    keys: [&[f32]; N],
    scores: &mut [f32],
    columns: usize,
) -> usize {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    let whole = S::as_simd_f32s(keys[0]).0.len();
    let (mut q_vectors, mut k_vectors) = ([&[][..]; M], [&[][..]; N]);
    for m in 0..M {
        q_vectors[m] = S::as_simd_f32s(queries[m]).0;
    }
    for n in 0..N {
        k_vectors[n] = &S::as_simd_f32s(keys[n]).0[..whole];
    }
    for i in 0..whole {
        for m in 0..M {
            let query = q_vectors[m][i];
            for n in 0..N {
                sums[m][n] = simd.mul_add_e_f32s(k_vectors[n][i], query, sums[m][n]);
            }
        }
    }
    for n in 0..N {
        let rest = S::as_simd_f32s(keys[n]).1;
        if !rest.is_empty() {
            let rest = simd.partial_load_f32s(rest);
            for m in 0..M {
                sums[m][n] = simd.mul_add_e_f32s(rest, q_vectors[m][whole], sums[m][n]);
            }
        }
        for m in 0..M {
            scores[n * columns + m] = simd.reduce_sum_f32s(sums[m][n]);
        }
    }
    M
}
