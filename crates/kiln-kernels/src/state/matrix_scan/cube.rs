//! The `#[cube]` function. A workgroup scans some columns of a state; its lanes divide the rows of the state
//! among themselves, and keep them in registers.

use burn::backend::{Cube, cubecl::dtype_to_storage_type};
use cubecl::prelude::*;

use super::{COLUMNS, EPS, MatrixRule, MatrixScan, PARTS, ROWS};
use crate::{
    runtime::launch::{address_type, count, empty, in_order, primitive, to_write},
    state::functions::cube::{sigmoid, softplus},
};

/// Tokens whose vectors are in memory at the same time.
const STEP: usize = 8;

/// Lanes of a workgroup: one for each value of the tokens in memory, and [`PARTS`] for each of their keys and
/// queries.
const UNITS: usize = PARTS * COLUMNS;

#[cube(launch, address_type = "dynamic")]
fn matrix_scan<E: Float>(
    x: &Tensor<E>,
    steps: &Tensor<E>,
    of_heads: &Tensor<f32>,
    state: &mut Tensor<f32>,
    journal: &mut Tensor<E>,
    positions: &Tensor<i32>,
    y: &mut Tensor<E>,
    before: usize,
    after: usize,
    key_heads: usize,
    q_at: usize,
    k_at: usize,
    v_at: usize,
    columns: usize,
    workgroups: usize,
    #[comptime] numbers: usize,
    #[comptime] is_delta: bool,
    #[comptime] alternates: bool,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let (rows, tokens, channels) = (x.shape(0), x.shape(1), x.shape(2));
    let (heads, slots, values) = (of_heads.shape(1), journal.shape(2), state.shape(3));
    let keys = state.shape(1) / heads;
    let groups = heads * columns;
    let group = workgroup % groups;
    let row = workgroup / groups;
    let head = group / columns;
    let mut key_head = head * key_heads / heads;
    if comptime!(alternates) {
        key_head = head % key_heads;
    }
    let part = lane / COLUMNS;
    let column = group % columns * COLUMNS + lane % COLUMNS;
    let own = column < values;
    let first = positions[row];
    let visible_from = positions[rows + row];
    let all = before + tokens;
    let rate = of_heads[head * of_heads.stride(1)];
    let bias = of_heads[of_heads.stride(0) + head * of_heads.stride(1)];
    let d = of_heads[2 * of_heads.stride(0) + head * of_heads.stride(1)];

    let mut s = Array::<f32>::new(numbers);
    let state_at = row * state.stride(0) + column * state.stride(3);
    #[unroll]
    for i in 0..numbers {
        s[i] = f32::new(0.0);
        let key = comptime!(i * PARTS) + part;
        if own && key < keys {
            s[i] = state[state_at + (head * keys + key) * state.stride(1)];
        }
    }

    let mut of_keys = Shared::<[f32]>::new_slice(comptime!(STEP * PARTS * numbers));
    let mut queries = Shared::<[f32]>::new_slice(comptime!(STEP * PARTS * numbers));
    let mut of_values = Shared::<[f32]>::new_slice(UNITS);
    // Of each token: decay, gain, and factors of key and query.
    let mut factors = Shared::<[f32]>::new_slice(comptime!(4 * STEP));
    let mut sums = Shared::<[f32]>::new_slice(comptime!(2 * UNITS));

    let mut begin = 0usize;
    while begin < all {
        // All lanes have read the previous contents.
        sync_cube();
        let mut i = lane;
        while i < comptime!(STEP * PARTS * numbers) {
            let t = begin + i / comptime!(PARTS * numbers);
            let key = i % comptime!(PARTS * numbers);
            let mut k = f32::new(0.0);
            let mut q = f32::new(0.0);
            if t < all && key < keys {
                let of = key_head * keys + key;
                if t < before {
                    let slot = (first + t as i32 - before as i32) as usize % slots;
                    let at = row * journal.stride(0) + slot * journal.stride(2);
                    k = f32::cast_from(journal[at + (k_at + of) * journal.stride(3)]);
                    q = f32::cast_from(journal[at + (q_at + of) * journal.stride(3)]);
                } else {
                    let at = row * x.stride(0) + (t - before) * x.stride(1);
                    k = f32::cast_from(x[at + (k_at + of) * x.stride(2)]);
                    q = f32::cast_from(x[at + (q_at + of) * x.stride(2)]);
                }
            }
            of_keys[i] = k;
            queries[i] = q;
            i += UNITS;
        }
        let t = begin + lane / COLUMNS;
        let mut value = f32::new(0.0);
        if t < all && own {
            let of = v_at + head * values + column;
            if t < before {
                let slot = (first + t as i32 - before as i32) as usize % slots;
                let at = row * journal.stride(0) + slot * journal.stride(2);
                value = f32::cast_from(journal[at + of * journal.stride(3)]);
            } else {
                let at = row * x.stride(0) + (t - before) * x.stride(1);
                value = f32::cast_from(x[at + of * x.stride(2)]);
            }
        }
        of_values[lane] = value;
        if lane < STEP {
            let t = begin + lane;
            // Tokens in padding change nothing.
            let mut decay = f32::new(1.0);
            let mut gain = f32::new(0.0);
            if t < all && first + t as i32 - before as i32 >= visible_from {
                let mut step = bias;
                if t < before {
                    let slot = (first + t as i32 - before as i32) as usize % slots;
                    let at = row * journal.stride(0) + slot * journal.stride(2);
                    if comptime!(is_delta) {
                        gain = sigmoid(f32::cast_from(journal[at + (channels + head) * journal.stride(3)]));
                        let of = channels + heads + head;
                        step += f32::cast_from(journal[at + of * journal.stride(3)]);
                    } else {
                        step += f32::cast_from(journal[at + (channels + head) * journal.stride(3)]);
                    }
                } else {
                    let at = row * steps.stride(0) + (t - before) * steps.stride(1);
                    if comptime!(is_delta) {
                        gain = sigmoid(f32::cast_from(steps[at + head * steps.stride(2)]));
                        step += f32::cast_from(steps[at + (heads + head) * steps.stride(2)]);
                    } else {
                        step += f32::cast_from(steps[at + head * steps.stride(2)]);
                    }
                }
                step = softplus(step);
                decay = f32::exp(step * rate);
                if comptime!(!is_delta) {
                    gain = step;
                }
            }
            factors[4 * lane] = decay;
            factors[4 * lane + 1] = gain;
        }
        sync_cube();
        if comptime!(is_delta) {
            // The length of a vector is a sum of all lanes' parts of it: of keys, then of queries.
            let vector = lane / PARTS;
            let at = vector % STEP * comptime!(PARTS * numbers) + lane % PARTS;
            let mut sum = f32::new(0.0);
            #[unroll]
            for i in 0..numbers {
                let mut number = of_keys[at + comptime!(i * PARTS)];
                if vector >= STEP {
                    number = queries[at + comptime!(i * PARTS)];
                }
                sum += number * number;
            }
            sums[lane] = sum;
            sync_cube();
            if lane < comptime!(2 * STEP) {
                let mut sum = f32::new(0.0);
                #[unroll]
                for i in 0..PARTS {
                    sum += sums[lane * PARTS + i];
                }
                let mut factor = 1.0 / f32::sqrt(sum + EPS);
                if lane >= STEP {
                    factor /= f32::sqrt(f32::cast_from(keys as u32));
                }
                factors[4 * (lane % STEP) + 2 + lane / STEP] = factor;
            }
            sync_cube();
        }
        let end = min(begin + STEP, all);
        for t in begin..end {
            let token = t - begin;
            let decay = factors[4 * token];
            let gain = factors[4 * token + 1];
            let at = token * comptime!(PARTS * numbers) + part;
            let value = of_values[token * COLUMNS + lane % COLUMNS];
            let mut w = value;
            let mut factor = f32::new(1.0);
            // Neither array is written before all lanes have read it: there is a barrier in between.
            let mut place = t % 2 * UNITS;
            if comptime!(is_delta) {
                place = UNITS.runtime();
                let of_key = factors[4 * token + 2];
                factor = factors[4 * token + 3];
                let mut sum = f32::new(0.0);
                #[unroll]
                for i in 0..numbers {
                    sum += of_keys[at + comptime!(i * PARTS)] * s[i];
                }
                sums[lane] = sum;
                sync_cube();
                let mut known = f32::new(0.0);
                #[unroll]
                for i in 0..PARTS {
                    known += sums[lane % COLUMNS + comptime!(i * COLUMNS)];
                }
                w = (w - decay * of_key * known) * of_key;
            }
            w *= gain;
            let mut sum = f32::new(0.0);
            #[unroll]
            for i in 0..numbers {
                s[i] = decay * s[i] + of_keys[at + comptime!(i * PARTS)] * w;
                sum += queries[at + comptime!(i * PARTS)] * s[i];
            }
            sums[place + lane] = sum;
            sync_cube();
            if part == 0 && own && t >= before {
                let mut sum = f32::new(0.0);
                #[unroll]
                for i in 0..PARTS {
                    sum += sums[place + lane + comptime!(i * COLUMNS)];
                }
                let mut result = sum * factor;
                if comptime!(!is_delta) {
                    result += d * value;
                }
                if first + t as i32 - before as i32 >= visible_from {
                    y[((row * tokens + t - before) * heads + head) * values + column] = E::cast_from(result);
                } else {
                    y[((row * tokens + t - before) * heads + head) * values + column] = E::cast_from(0.0f32);
                }
            }
            if t + 1 + after == all {
                #[unroll]
                for i in 0..numbers {
                    let key = comptime!(i * PARTS) + part;
                    if own && key < keys {
                        let to = state_at + (head * keys + key) * state.stride(1);
                        state[to] = s[i];
                    }
                }
            }
        }
        begin += STEP;
    }

    // The workgroups of a row divide its entries among themselves. They are in slots that no workgroup reads.
    let width = journal.shape(3);
    let latest = min(tokens, slots);
    let mut i = group * UNITS + lane;
    while i < latest * width {
        let token = tokens - latest + i / width;
        let number = i % width;
        let slot = (first + token as i32) as usize % slots;
        let to = row * journal.stride(0) + slot * journal.stride(2) + number * journal.stride(3);
        if number < channels {
            journal[to] = x[row * x.stride(0) + token * x.stride(1) + number * x.stride(2)];
        } else {
            let at = row * steps.stride(0) + token * steps.stride(1);
            journal[to] = steps[at + (number - channels) * steps.stride(2)];
        }
        i += groups * UNITS;
    }
}

type Scanned = (burn::tensor::Tensor<3>, [burn::tensor::Tensor<4>; 2]);

#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn launch(kernel: MatrixScan) -> Result<Scanned, MatrixScan> {
    let [heads, keys, values] = kernel.sizes();
    let Some(numbers) = ROWS.into_iter().find(|&most| keys <= most * PARTS) else { return Err(kernel) };
    let alternates = kernel.alternates;
    let MatrixScan {
        x, steps, heads: of_heads, state, journal, journaled, rule, key_heads, positions, ..
    } = kernel;
    let [rows, tokens, _] = x.dims();
    let [x, steps] = [x, steps].map(primitive);
    let of_heads = primitive(of_heads);
    let [state, journal] = [state, journal].map(|tensor| to_write(primitive(tensor)));
    let y = empty(&x, [rows, tokens, heads * values], x.dtype);
    let columns = values.div_ceil(COLUMNS);
    let workgroups = rows * heads * columns;
    let [q_at, k_at, v_at] = rule.places(key_heads * keys, heads * values);
    let elem = dtype_to_storage_type(x.dtype);
    matrix_scan::launch(
        &y.client,
        count(workgroups),
        CubeDim::new_1d(UNITS as u32),
        address_type([&x, &steps, &state, &journal, &y]),
        x.into_tensor_arg(),
        steps.into_tensor_arg(),
        of_heads.into_tensor_arg(),
        state.clone().into_tensor_arg(),
        journal.clone().into_tensor_arg(),
        in_order(positions.on_device).into_tensor_arg(),
        y.clone().into_tensor_arg(),
        journaled[0],
        journaled[1],
        key_heads,
        q_at,
        k_at,
        v_at,
        columns,
        workgroups,
        numbers,
        rule == MatrixRule::GatedDelta,
        alternates,
        elem,
    );
    let memory = [state, journal].map(burn::tensor::Tensor::from_primitive::<Cube>);
    Ok((burn::tensor::Tensor::from_primitive::<Cube>(y), memory))
}
