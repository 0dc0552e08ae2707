//! Rows of queries that go over keys together, on one CPU thread (Milakov and Gimelshein, 2018,
//! <https://arxiv.org/abs/1805.02867>: the softmax of what was seen so far, put right when a larger score comes).
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::native::{Block, Given, Storage};

/// Keys at a time. They, their values and their scores stay in the caches.
const BLOCK: usize = 64;

/// Queries of the heads that share keys, and the keys that they go over.
pub(super) struct Rows<'a, E> {
    pub(super) given: &'a Given<'a, E>,
    pub(super) block: Block,
    /// Positions. Queries may see fewer, and no others.
    pub(super) keys: Range<i32>,
    pub(super) result: Mixed<'a, E>,
}

/// Where the result goes.
pub(super) enum Mixed<'a, E> {
    /// All of it: for each head, vectors of its queries.
    Whole(Vec<&'a mut [E]>),
    /// That of some keys: for each row, ordered by head, the largest score, the sum of weights and the sums of values.
    Part(&'a mut [f32]),
}

// Loops throughout: what a closure computes would not be compiled for the instructions that were found.
impl<E: Storage> WithSimd for Rows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { given, block: Block { row, kv_head, queries: block }, keys, result } = self;
        let (limits, new, dim) = (given.limits(), block.len(), given.head_dim);
        let rows = given.group * new;
        // Scores are `[keys, columns]`, with a column for each row and as many more as fill a vector.
        let (columns, width) = (rows.next_multiple_of(S::F32_LANES), dim.next_multiple_of(S::F32_LANES));
        // Few rows would leave vectors of them empty; vectors of dimensions are full.
        let few = 2 * rows <= S::F32_LANES;

        let mut queries = vec![0.0; if few { rows * width } else { dim * columns }];
        let mut query = vec![0.0; dim];
        let (mut from, mut to) = (vec![i32::MIN; columns], vec![i32::MAX; columns]);
        for r in 0..rows {
            let (head, i) = (kv_head * given.group + r / new, block.start + r % new);
            (from[r], to[r]) = given.seen(row, i);
            given.q.read([row, head, i], &mut query);
            for d in 0..dim {
                queries[if few { r * width + d } else { d * columns + r }] = query[d] * limits.scale;
            }
        }
        let all_see = given.seen(row, block.end - 1).0..=given.seen(row, block.start).1;

        let mut state = State {
            largest: vec![f32::NEG_INFINITY; columns],
            sums: vec![0.0; columns],
            shrunk: vec![0.0; columns],
            mixed: vec![0.0; rows * width],
        };
        let mut scores = vec![0.0; BLOCK * columns];
        let (mut packed_keys, mut packed_values) = (Vec::new(), Vec::new());
        let mut position = keys.start;
        while position < keys.end {
            let slot = given.slot(position);
            let n = BLOCK.min((keys.end - position) as usize).min(given.slots - slot);
            let last = position + n as i32 - 1;
            let scores = &mut scores[..n * columns];
            let at = [row, kv_head, slot];

            let vectors = given.keys.vectors(at, [n, dim, dim], &mut packed_keys);
            if few {
                score_few(simd, vectors, &queries, scores, [n, dim, rows, columns]);
            } else {
                score_many(simd, vectors, &queries, scores, [n, dim, columns]);
            }
            if let Some(cap) = limits.softcap {
                for score in scores.iter_mut() {
                    *score = tanh(*score / cap) * cap;
                }
            }
            if !(all_see.contains(&position) && all_see.contains(&last)) {
                for (key, scores) in (position..).zip(scores.chunks_exact_mut(columns)) {
                    for ((score, from), to) in scores.iter_mut().zip(&from).zip(&to) {
                        *score = if *from <= key && key <= *to { *score } else { f32::NEG_INFINITY };
                    }
                }
            }
            state.weigh(scores, columns);
            let values = given.values.vectors(at, [n, dim, width], &mut packed_values);
            state.mix(simd, scores, values, [rows, columns, width]);
            position += n as i32;
        }
        result.write(&state, [new, dim, rows, width]);
    }
}

impl<E: Storage> Mixed<'_, E> {
    #[inline(always)]
    fn write(self, state: &State, [new, dim, rows, width]: [usize; 4]) {
        match self {
            Self::Whole(mut heads) => {
                let mut vector = vec![0.0; dim];
                for r in 0..rows {
                    // What sees nothing is 0.
                    let scale = if state.sums[r] == 0.0 { 0.0 } else { 1.0 / state.sums[r] };
                    for d in 0..dim {
                        vector[d] = state.mixed[r * width + d] * scale;
                    }
                    E::narrow(&vector, &mut heads[r / new][r % new * dim..][..dim]);
                }
            }
            Self::Part(part) => {
                for (r, part) in (0..rows).zip(part.chunks_exact_mut(dim + 2)) {
                    (part[0], part[1]) = (state.largest[r], state.sums[r]);
                    part[2..].copy_from_slice(&state.mixed[r * width..][..dim]);
                }
            }
        }
    }
}

/// What has come of the keys so far, for each row.
struct State {
    /// The largest score, negative infinity before the first.
    largest: Vec<f32>,
    /// The sum of `exp(score - largest)`.
    sums: Vec<f32>,
    /// What the block in work has shrunk the sums by.
    shrunk: Vec<f32>,
    /// The sum of values times that: `[rows, width]`.
    mixed: Vec<f32>,
}

impl State {
    /// Makes weights of scores.
    #[inline(always)]
    fn weigh(&mut self, scores: &mut [f32], columns: usize) {
        let Self { largest, sums, shrunk, .. } = self;
        shrunk.copy_from_slice(largest);
        for scores in scores.chunks_exact(columns) {
            for (largest, score) in largest.iter_mut().zip(scores) {
                *largest = if *score > *largest { *score } else { *largest };
            }
        }
        for ((shrunk, largest), sum) in shrunk.iter_mut().zip(largest.iter()).zip(sums.iter_mut()) {
            *shrunk = exp(*shrunk - finite(*largest));
            *sum *= *shrunk;
        }
        for scores in scores.chunks_exact_mut(columns) {
            for ((score, largest), sum) in scores.iter_mut().zip(largest.iter()).zip(sums.iter_mut()) {
                *score = exp(*score - finite(*largest));
                *sum += *score;
            }
        }
    }

    /// Adds values times weights.
    #[inline(always)]
    fn mix<S: Simd>(
        &mut self,
        simd: S,
        weights: &[f32],
        values: Vectors<'_>,
        [rows, columns, width]: [usize; 3],
    ) {
        let vectors = width / S::F32_LANES;
        // Few rows take as long as memory does, which likes to be read in long pieces.
        let long = rows <= 4;
        let mut c = 0;
        while c < vectors {
            let sizes = [rows, columns, width];
            c += match vectors - c {
                8.. if long => self.mix_rows::<S, 8>(simd, weights, values, c, sizes),
                4.. if long => self.mix_rows::<S, 4>(simd, weights, values, c, sizes),
                2.. => self.mix_rows::<S, 2>(simd, weights, values, c, sizes),
                _ => self.mix_rows::<S, 1>(simd, weights, values, c, sizes),
            };
        }
    }

    /// All rows, N vectors of dimensions from c on; with as many rows at a time as there are registers for.
    #[inline(always)]
    fn mix_rows<S: Simd, const N: usize>(
        &mut self,
        simd: S,
        weights: &[f32],
        values: Vectors<'_>,
        c: usize,
        [rows, columns, width]: [usize; 3],
    ) -> usize {
        let most = S::REGISTER_COUNT / 2 / N;
        let mut r = 0;
        while r < rows {
            let place = [r, c, columns, width];
            r += match most.min(rows - r) {
                8.. => self.mix_block::<S, 8, N>(simd, weights, values, place),
                4.. => self.mix_block::<S, 4, N>(simd, weights, values, place),
                2.. => self.mix_block::<S, 2, N>(simd, weights, values, place),
                _ => self.mix_block::<S, 1, N>(simd, weights, values, place),
            };
        }
        N
    }

    /// M rows from r on, N vectors of dimensions from c on.
    #[inline(always)]
    fn mix_block<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        weights: &[f32],
        values: Vectors<'_>,
        [r, c, columns, width]: [usize; 4],
    ) -> usize {
        let mut sums = [[simd.splat_f32s(0.0); N]; M];
        for m in 0..M {
            let shrunk = simd.splat_f32s(self.shrunk[r + m]);
            let mixed = S::as_simd_f32s(&self.mixed[(r + m) * width..][..width]).0;
            for n in 0..N {
                sums[m][n] = simd.mul_f32s(mixed[c + n], shrunk);
            }
        }
        for (key, weights) in weights.chunks_exact(columns).enumerate() {
            let weights = &weights[r..][..M];
            let value = &values.numbers[key * values.stride + c * S::F32_LANES..][..N * S::F32_LANES];
            let value = S::as_simd_f32s(value).0;
            for m in 0..M {
                let weight = simd.splat_f32s(weights[m]);
                for n in 0..N {
                    sums[m][n] = simd.mul_add_e_f32s(weight, value[n], sums[m][n]);
                }
            }
        }
        for m in 0..M {
            let mixed = S::as_mut_simd_f32s(&mut self.mixed[(r + m) * width..][..width]).0;
            mixed[c..c + N].copy_from_slice(&sums[m]);
        }
        M
    }
}

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
fn score_many<S: Simd>(
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
        let scores = &mut scores[(key + m) * vectors + c..][..N];
        scores[..N].copy_from_slice(&sums[m]);
    }
    M
}

/// Scores with vectors of dimensions: queries are `[rows, dim]`, in whole vectors.
#[inline(always)]
fn score_few<S: Simd>(
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
fn finite(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// Of numbers up to 88, to within two roundings; 0 below -87. Without branches, so that it is done in vectors.
#[inline(always)]
fn exp(x: f32) -> f32 {
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
fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}
