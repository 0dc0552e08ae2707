//! The scan on the CPU: values go through the lanes of vectors, and some columns of a state stay in the L1
//! cache.
#![allow(clippy::needless_range_loop, reason = "several arrays share each index")]

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};
use kiln_products::functions::exp;
use pulp::{Simd, WithSimd};

use super::{EPS, MatrixRule, MatrixScan};
use crate::{
    runtime::native::{Storage, Vectors, by_storage, numbers, primitive, sum_of_squares, work},
    state::functions::native::softplus,
};

/// Columns of a state that are scanned together, in vectors.
type Columns<S> = [<S as Simd>::f32s; 2];

/// Number of sums that grow by turns, so that an addition does not have to wait for the one before it.
const TURNS: usize = 4;

/// Computes the scan.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn scanned(kernel: MatrixScan) -> Result<(Tensor<3>, [Tensor<4>; 2]), MatrixScan> {
    by_storage!(kernel.x.dtype(), E => Ok(scanned_in::<E>(kernel)), else Err(kernel))
}

fn scanned_in<E: Storage>(kernel: MatrixScan) -> (Tensor<3>, [Tensor<4>; 2]) {
    let [heads, keys, values] = kernel.sizes();
    let alternates = kernel.alternates;
    let MatrixScan {
        x, steps, heads: of_heads, state, journal, journaled, rule, key_heads, positions, ..
    } = kernel;
    let ([rows, tokens, channels], [_, _, slots, width]) = (x.dims(), journal.dims());
    let positions: Vec<i64> = primitive(positions.on_device).into_data().iter().collect();
    let [x, steps] = [x, steps].map(primitive);
    let of_heads = primitive(of_heads).into_data();
    // The memory of the state and the journal themselves if they have one owner, and copies otherwise.
    let mut state = primitive(state).into_data();
    let mut journal = primitive(journal).into_data();
    let mut y = vec![0.0; rows * tokens * heads * values];
    let mut widened: [Vec<f32>; 3] = Default::default();
    let [x_widened, steps_widened, journal_widened] = &mut widened;
    let (x, steps) = (Vectors::of::<E>(&x, x_widened), Vectors::of::<E>(&steps, steps_widened));
    {
        let shared = Shared {
            x: &x,
            steps: &steps,
            heads: numbers(&of_heads),
            journal: match journaled[0] {
                0 => &[],
                _ => E::in_floats(numbers(&journal), journal_widened),
            },
            rule,
            alternates,
            sizes: [tokens, heads, key_heads, keys, values],
            slots,
            journaled,
        };
        let all = tokens + journaled[0];
        let products = 4 * rows * all * heads * keys * values;
        let mut pieces = Vec::with_capacity(rows * heads);
        let states: &mut [f32] = state.as_mut_slice().expect("the type was looked at");
        let mut results = y.chunks_mut(values);
        let mut of_rows: Vec<Vec<Vec<&mut [f32]>>> = Vec::with_capacity(rows);
        for _ in 0..rows {
            let mut own: Vec<Vec<_>> = (0..heads).map(|_| Vec::with_capacity(tokens)).collect();
            for _ in 0..tokens {
                own.iter_mut().zip(results.by_ref()).for_each(|(head, result)| head.push(result));
            }
            of_rows.push(own);
        }
        let mut states = states.chunks_mut(keys * values);
        for (row, own) in of_rows.into_iter().enumerate() {
            for (head, (y, state)) in own.into_iter().zip(states.by_ref()).enumerate() {
                let place = [positions[row], positions[rows + row]];
                pieces.push(Head { shared: &shared, row, head, place, state, y });
            }
        }
        work(products, pieces);
    }

    let entries: &mut [E] = journal.as_mut_slice().expect("the type was looked at");
    for row in 0..rows {
        for token in tokens.saturating_sub(slots)..tokens {
            let slot = (positions[row] + token as i64).rem_euclid(slots as i64) as usize;
            let to = &mut entries[(row * slots + slot) * width..][..width];
            let (of_x, of_steps) = to.split_at_mut(channels);
            // The inputs had this type, so this rounds nothing.
            E::narrow(&x.at(row, token)[..channels], of_x);
            E::narrow(&steps.at(row, token)[..width - channels], of_steps);
        }
    }
    let y = FlexTensor::from_data(TensorData::new(E::of_floats(y), [rows, tokens, heads * values]));
    let memory = [state, journal].map(|data| Tensor::from_primitive::<Flex>(FlexTensor::from_data(data)));
    (Tensor::from_primitive::<Flex>(y), memory)
}

/// Inputs that all pieces share.
struct Shared<'a> {
    x: &'a Vectors<'a>,
    steps: &'a Vectors<'a>,
    /// `[3, heads]`
    heads: &'a [f32],
    /// Empty if nothing is read from it.
    journal: &'a [f32],
    rule: MatrixRule,
    alternates: bool,
    /// Number of tokens, heads, heads of keys, keys and values.
    sizes: [usize; 5],
    slots: usize,
    journaled: [usize; 2],
}

/// One head of a row.
struct Head<'a> {
    shared: &'a Shared<'a>,
    row: usize,
    head: usize,
    /// The position of the row's first token, and the first position that is not padding.
    place: [i64; 2],
    /// `[keys, values]`
    state: &'a mut [f32],
    /// The result of each token.
    y: Vec<&'a mut [f32]>,
}

/// A token of a head.
struct Token<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    decay: f32,
    gain: f32,
    /// Factors of query and key.
    factors: [f32; 2],
}

impl WithSimd for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { shared, row, head, place: [first, visible_from], state, mut y } = self;
        let Shared { x, steps, heads: of_heads, journal, rule, slots, journaled: [before, after], .. } =
            *shared;
        let [tokens, heads, key_heads, keys, values] = shared.sizes;
        let all = before + tokens;
        let channels = 2 * key_heads * keys + heads * values;
        let width = channels + rule.steps() * heads;
        let places = rule.places(key_heads * keys, heads * values);
        let key_head = if shared.alternates { head % key_heads } else { head * key_heads / heads };
        let [rate, bias, d] = [0, 1, 2].map(|i| of_heads[i * heads + head]);
        let is_delta = rule == MatrixRule::GatedDelta;

        let mut seen = Vec::with_capacity(all);
        for t in 0..all {
            let position = first + t as i64 - before as i64;
            if position < visible_from {
                seen.push(None);
                continue;
            }
            let (x, steps) = match t.checked_sub(before) {
                Some(token) => (x.at(row, token), steps.at(row, token)),
                None => {
                    let slot = position.rem_euclid(slots as i64) as usize;
                    journal[(row * slots + slot) * width..][..width].split_at(channels)
                }
            };
            let [query, key] = [places[0], places[1]].map(|at| &x[at + key_head * keys..][..keys]);
            let value = &x[places[2] + head * values..][..values];
            let step = softplus(steps[(rule.steps() - 1) * heads + head] + bias);
            let factor = |vector| 1.0 / (sum_of_squares(vector, 0.0) + EPS).sqrt();
            let (gain, factors) = match rule {
                MatrixRule::GatedDelta => {
                    let gain = 1.0 / (1.0 + exp(-steps[head].clamp(-80.0, 80.0)));
                    (gain, [factor(query) / (keys as f32).sqrt(), factor(key)])
                }
                MatrixRule::Mamba2 => (step, [1.0; 2]),
            };
            seen.push(Some(Token { query, key, value, decay: exp(step * rate), gain, factors }));
        }

        let each = 2 * S::F32_LANES;
        let mut s: Vec<Columns<S>> = vec![[simd.splat_f32s(0.0); 2]; keys];
        let mut begin = 0;
        while begin < values {
            let end = values.min(begin + each);
            for (s, state) in s.iter_mut().zip(state.chunks(values)) {
                *s = load(simd, &state[begin..end]);
            }
            for (t, token) in seen.iter().enumerate() {
                if let Some(token) = token {
                    let value = load(simd, &token.value[begin..end]);
                    let result = step(simd, &mut s, value, token, is_delta, d);
                    if let Some(token) = t.checked_sub(before) {
                        store(simd, result, &mut y[token][begin..end]);
                    }
                }
                if t + 1 + after == all {
                    for (s, state) in s.iter().zip(state.chunks_mut(values)) {
                        store(simd, *s, &mut state[begin..end]);
                    }
                }
            }
            begin = end;
        }
    }
}

/// Loads columns of a row; those that it has not are 0.
#[inline(always)]
fn load<S: Simd>(simd: S, from: &[f32]) -> Columns<S> {
    let (first, second) = from.split_at(from.len().min(S::F32_LANES));
    [simd.partial_load_f32s(first), simd.partial_load_f32s(second)]
}

#[inline(always)]
fn store<S: Simd>(simd: S, columns: Columns<S>, to: &mut [f32]) {
    let (first, second) = to.split_at_mut(to.len().min(S::F32_LANES));
    simd.partial_store_f32s(first, columns[0]);
    simd.partial_store_f32s(second, columns[1]);
}

/// Changes columns of a state by a token with the values `value`. Returns its result.
///
/// Loops count, and nothing is a closure: iterators and closures are functions of their own, which do not
/// have the instructions of `simd`.
#[inline(always)]
fn step<S: Simd>(
    simd: S,
    s: &mut [Columns<S>],
    value: Columns<S>,
    token: &Token<'_>,
    is_delta: bool,
    d: f32,
) -> Columns<S> {
    let &Token { query, key, decay, gain, factors: [of_query, of_key], .. } = token;
    let (keys, other_keys) = key.as_chunks::<TURNS>();
    let (queries, other_queries) = query.as_chunks::<TURNS>();
    let (groups, rest) = s.as_chunks_mut::<TURNS>();
    let zeros = [[simd.splat_f32s(0.0); 2]; TURNS];
    let mut w = value;
    if is_delta {
        let mut sums = zeros;
        for g in 0..groups.len().min(keys.len()) {
            for i in 0..TURNS {
                sums[i] = plus(simd, sums[i], keys[g][i], groups[g][i]);
            }
        }
        for i in 0..rest.len().min(other_keys.len()) {
            sums[0] = plus(simd, sums[0], other_keys[i], rest[i]);
        }
        w = plus(simd, w, -decay * of_key, total(simd, sums));
    }
    w = times(simd, gain * of_key, w);
    let mut sums = zeros;
    for g in 0..groups.len().min(keys.len()).min(queries.len()) {
        for i in 0..TURNS {
            groups[g][i] = plus(simd, times(simd, decay, groups[g][i]), keys[g][i], w);
            sums[i] = plus(simd, sums[i], queries[g][i], groups[g][i]);
        }
    }
    for i in 0..rest.len().min(other_keys.len()).min(other_queries.len()) {
        rest[i] = plus(simd, times(simd, decay, rest[i]), other_keys[i], w);
        sums[0] = plus(simd, sums[0], other_queries[i], rest[i]);
    }
    let result = times(simd, of_query, total(simd, sums));
    if is_delta { result } else { plus(simd, result, d, value) }
}

/// Adds `factor · x` to `sum`.
#[inline(always)]
fn plus<S: Simd>(simd: S, sum: Columns<S>, factor: f32, x: Columns<S>) -> Columns<S> {
    let factor = simd.splat_f32s(factor);
    [simd.mul_add_e_f32s(factor, x[0], sum[0]), simd.mul_add_e_f32s(factor, x[1], sum[1])]
}

#[inline(always)]
fn times<S: Simd>(simd: S, factor: f32, x: Columns<S>) -> Columns<S> {
    let factor = simd.splat_f32s(factor);
    [simd.mul_f32s(factor, x[0]), simd.mul_f32s(factor, x[1])]
}

#[inline(always)]
fn total<S: Simd>(simd: S, [a, b, c, d]: [Columns<S>; TURNS]) -> Columns<S> {
    plus(simd, plus(simd, a, 1.0, b), 1.0, plus(simd, c, 1.0, d))
}
