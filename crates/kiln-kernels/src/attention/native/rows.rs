//! Rows of queries that go over keys together, on one CPU thread (Milakov and Gimelshein, 2018,
//! <https://arxiv.org/abs/1805.02867>: the softmax of the keys so far, rescaled when a larger score comes).
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_products::functions::{exp, finite, tanh};
use pulp::{Simd, WithSimd};

use super::{
    Block, Given, KEYS, Storage, VALUES, combine,
    few::attend_few,
    scores::{Vectors, score},
};

/// Keys at a time. The keys, their values and their scores stay in the CPU caches. Blocks begin at multiples
/// of it, so the result of a row does not depend on which keys other rows see.
pub(super) const BLOCK: usize = 64;

/// Queries of the heads that share keys, and the range of keys that they go over.
pub(super) struct Rows<'a, E> {
    pub(super) given: &'a Given<'a, E>,
    pub(super) block: Block,
    /// Range of positions. Queries may see fewer, and no others.
    pub(super) keys: Range<i32>,
    pub(super) result: Mixed<'a, E>,
}

/// The destination of the result.
pub(super) enum Mixed<'a, E> {
    /// The whole result: for each head, the vectors of its queries.
    Whole(Vec<&'a mut [E]>),
    /// The result for some keys: for each row, ordered by head, the largest score, the sum of weights and the
    /// sums of values.
    Part(&'a mut [f32]),
}

// Loops throughout: a closure would not be compiled for the detected instruction set.
impl<E: Storage> WithSimd for Rows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { given, block, keys, result } = self;
        if given.is_for_few(given.group * block.queries.len()) {
            return result.write_few(given, &block, keys);
        }
        let Block { row, kv_head, queries: block } = block;
        let (limits, new, dim) = (given.limits(), block.len(), given.head_dim);
        let (rows, base) = (given.group * new, given.places.rows[row].base);
        // Scores are `[keys, columns]`, with a column for each row, padded to whole vectors.
        let columns = rows.next_multiple_of(S::F32_LANES);
        let width = given.width.next_multiple_of(S::F32_LANES);

        let mut queries = vec![0.0; dim * columns];
        let mut query = vec![0.0; dim];
        let (mut from, mut to) = (vec![i32::MIN; columns], vec![i32::MAX; columns]);
        for r in 0..rows {
            let (head, i) = (kv_head * given.group + r / new, block.start + r % new);
            (from[r], to[r]) = given.seen(row, i);
            given.q.read([row, head, i], &mut query);
            for d in 0..dim {
                queries[d * columns + r] = query[d] * limits.scale;
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
        let (mut packed_keys, mut packed_values, mut both) = (Vec::new(), Vec::new(), Vec::new());
        let key_dim = given.key_dim();
        let mut position = keys.start;
        while position < keys.end {
            let n = (BLOCK - position as usize % BLOCK).min((keys.end - position) as usize);
            let slot = given.slot(position);
            // A ring may wrap in the middle.
            let turn = n.min(given.slots - slot);
            let parts = [(slot, 0..turn), (0, turn..n)];
            let last = position + n as i32 - 1;
            let scores = &mut scores[..n * columns];

            for (slot, part) in &parts {
                let (n, at) = (part.len(), [row, kv_head, base + *slot]);
                if n == 0 {
                    continue;
                }
                let scores = &mut scores[part.start * columns..part.end * columns];
                let mut vectors = given.kv.vectors(KEYS, at, [n, key_dim, key_dim], &mut packed_keys);
                if given.latent {
                    let values =
                        given.kv.vectors(VALUES, at, [n, given.width, given.width], &mut packed_values);
                    both.resize(n * dim, 0.0);
                    for (i, both) in both.chunks_exact_mut(dim).enumerate() {
                        let (key, value) = both.split_at_mut(key_dim);
                        key.copy_from_slice(&vectors.numbers[i * vectors.stride..][..key_dim]);
                        value.copy_from_slice(&values.numbers[i * values.stride..][..given.width]);
                    }
                    vectors = Vectors { numbers: &both, stride: dim };
                }
                score(simd, vectors, &queries, scores, [n, dim, columns]);
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
            for (slot, part) in &parts {
                let (n, at) = (part.len(), [row, kv_head, base + *slot]);
                if n == 0 {
                    continue;
                }
                let weights = &scores[part.start * columns..part.end * columns];
                let values = given.kv.vectors(VALUES, at, [n, given.width, width], &mut packed_values);
                state.mix(simd, weights, values, [rows, columns, width]);
                state.shrunk.fill(1.0);
            }
            position += n as i32;
        }
        result.write(&state, [new, given.width, rows, width]);
    }
}

impl<E: Storage> Mixed<'_, E> {
    /// Writes the result of a block of few rows.
    fn write_few(self, given: &Given<'_, E>, block: &Block, keys: Range<i32>) {
        let (dim, new) = (given.width, block.queries.len());
        let heads = match self {
            Self::Part(part) => return attend_few(given, block, keys, part),
            Self::Whole(heads) => heads,
        };
        let mut whole = vec![0.0; given.group * new * (dim + 2)];
        attend_few(given, block, keys, &mut whole);
        combine(&[&whole], heads, None, dim);
    }

    #[inline(always)]
    fn write(self, state: &State, [new, dim, rows, width]: [usize; 4]) {
        match self {
            Self::Whole(mut heads) => {
                let mut vector = vec![0.0; dim];
                for r in 0..rows {
                    // A row that sees nothing gives 0.
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

/// The softmax state of each row after the keys so far.
struct State {
    /// The largest score; negative infinity before the first key.
    largest: Vec<f32>,
    /// The sum of `exp(score - largest)`.
    sums: Vec<f32>,
    /// The factor by which the current block has shrunk the sums.
    shrunk: Vec<f32>,
    /// The sum of values times `exp(score - largest)`: `[rows, width]`.
    mixed: Vec<f32>,
}

impl State {
    /// Turns scores into weights.
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
        let mut c = 0;
        while c < vectors {
            let sizes = [rows, columns, width];
            c += match vectors - c {
                2.. => self.mix_rows::<S, 2>(simd, weights, values, c, sizes),
                _ => self.mix_rows::<S, 1>(simd, weights, values, c, sizes),
            };
        }
    }

    /// All rows and N vectors of dimensions from c on, with as many rows at a time as there are registers
    /// for.
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

    /// M rows from r on, and N vectors of dimensions from c on.
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
