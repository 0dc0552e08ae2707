//! The scan on the CPU: channels go through the lanes of vectors, and states stay in the L1 cache.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over lanes become vectors; several arrays share each index"
)]

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};
use kiln_products::functions::exp;
use pulp::{Simd, WithSimd};

use super::SelectiveScan;
use crate::{
    runtime::native::{Storage, Vectors, by_storage, numbers, pieces, primitive, silu, work},
    state::functions::native::softplus,
};

/// Channels that are scanned together.
const LANES: usize = 32;

/// Computes the scan.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn scanned(kernel: SelectiveScan) -> Result<(Tensor<3>, Tensor<4>), SelectiveScan> {
    by_storage!(kernel.x.dtype(), E => Ok(scanned_in::<E>(kernel)), else Err(kernel))
}

fn scanned_in<E: Storage>(kernel: SelectiveScan) -> (Tensor<3>, Tensor<4>) {
    let SelectiveScan { x, dt, bc, gate, ad, ring, positions } = kernel;
    let ([rows, tokens, channels], [_, states, slots, _]) = (x.dims(), ring.dims());
    if rows * tokens * channels == 0 {
        return (x, ring);
    }
    let positions: Vec<i64> = primitive(positions.on_device).into_data().iter().collect();
    let [x, dt, bc, gate] = [x, dt, bc, gate].map(primitive);
    let ad = primitive(ad).into_data();
    // The memory of the ring itself if it has one owner, and a copy otherwise.
    let mut ring = primitive(ring).into_data();

    let mut y = vec![0.0; rows * tokens * channels];
    let products = rows * tokens * channels * states;
    // Channels per piece.
    let each = channels.div_ceil(pieces(products).div_ceil(rows)).next_multiple_of(LANES);
    let kept = tokens.min(slots);
    let mut latest = vec![0.0; rows * kept * states * channels];
    {
        let mut widened: [Vec<f32>; 4] = Default::default();
        let [x_widened, dt_widened, bc_widened, gate_widened] = &mut widened;
        let shared = Shared {
            x: Vectors::of::<E>(&x, x_widened),
            dt: Vectors::of::<E>(&dt, dt_widened),
            bc: Vectors::of::<E>(&bc, bc_widened),
            gate: Vectors::of::<E>(&gate, gate_widened),
            ad: numbers(&ad),
            ring: numbers(&ring),
            sizes: [tokens, channels, states, slots],
        };
        let mut all = Vec::new();
        let rows_of = y.chunks_mut(tokens * channels).zip(latest.chunks_mut(kept * states * channels));
        for (row, (y, latest)) in rows_of.enumerate() {
            let piece = |i| Channels {
                shared: &shared,
                row,
                position: positions[row],
                first: i * each,
                y: Vec::with_capacity(tokens),
                latest: Vec::with_capacity(kept * states),
            };
            let mut own: Vec<_> = (0..channels.div_ceil(each)).map(piece).collect();
            for y in y.chunks_mut(channels) {
                own.iter_mut().zip(y.chunks_mut(each)).for_each(|(piece, part)| piece.y.push(part));
            }
            for state in latest.chunks_mut(channels) {
                own.iter_mut().zip(state.chunks_mut(each)).for_each(|(piece, part)| piece.latest.push(part));
            }
            all.extend(own);
        }
        work(products, all);
    }

    let places: &mut [f32] = ring.as_mut_slice().expect("the type was looked at");
    for (i, state_numbers) in latest.chunks(channels).enumerate() {
        let (row, token, state) = (i / states / kept, i / states % kept, i % states);
        let behind = positions[row] + (tokens - kept + token + 1) as i64;
        let slot = behind.rem_euclid(slots as i64) as usize;
        places[((row * states + state) * slots + slot) * channels..][..channels]
            .copy_from_slice(state_numbers);
    }
    let y = FlexTensor::from_data(TensorData::new(E::of_floats(y), [rows, tokens, channels]));
    (Tensor::from_primitive::<Flex>(y), Tensor::from_primitive::<Flex>(FlexTensor::from_data(ring)))
}

/// Inputs that all pieces share.
struct Shared<'a> {
    x: Vectors<'a>,
    dt: Vectors<'a>,
    bc: Vectors<'a>,
    gate: Vectors<'a>,
    ad: &'a [f32],
    ring: &'a [f32],
    /// Number of tokens, channels, numbers in a state, and slots.
    sizes: [usize; 4],
}

/// Some channels of a row, from `first` on.
struct Channels<'a> {
    shared: &'a Shared<'a>,
    row: usize,
    /// Position of the first token.
    position: i64,
    first: usize,
    /// The result of each token.
    y: Vec<&'a mut [f32]>,
    /// The numbers of the latest states, `[tokens, states]`.
    latest: Vec<&'a mut [f32]>,
}

impl WithSimd for Channels<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { shared, row, position, first, mut y, mut latest } = self;
        let [tokens, channels, states, slots] = shared.sizes;
        let own = y.first().map_or(0, |y| y.len());
        let kept = latest.len() / states;
        let slot = position.rem_euclid(slots as i64) as usize;
        let mut h = vec![[0.0; LANES]; states];
        let mut a = vec![[0.0; LANES]; states];
        let mut begin = 0;
        while begin < own {
            let n = LANES.min(own - begin);
            let channel = first + begin;
            for state in 0..states {
                a[state] = some(&shared.ad[state * channels + channel..], n);
                h[state] = match position {
                    0 => [0.0; LANES],
                    _ => {
                        some(&shared.ring[((row * states + state) * slots + slot) * channels + channel..], n)
                    }
                };
            }
            let d = some(&shared.ad[states * channels + channel..], n);
            for token in 0..tokens {
                let x = some(&shared.x.at(row, token)[channel..], n);
                let mut dt = some(&shared.dt.at(row, token)[channel..], n);
                let mut gate = some(&shared.gate.at(row, token)[channel..], n);
                let bc = &shared.bc.at(row, token)[..2 * states];
                let (b, c) = bc.split_at(states);
                let (mut gain, mut sum) = ([0.0; LANES], [0.0; LANES]);
                for i in 0..LANES {
                    dt[i] = softplus(dt[i]);
                    gain[i] = dt[i] * x[i];
                    gate[i] = silu(gate[i]);
                }
                for state in 0..states {
                    let (h, a, b, c) = (&mut h[state], &a[state], b[state], c[state]);
                    for i in 0..LANES {
                        h[i] = exp(dt[i] * a[i]) * h[i] + gain[i] * b;
                        sum[i] += h[i] * c;
                    }
                }
                for i in 0..LANES {
                    sum[i] = (sum[i] + x[i] * d[i]) * gate[i];
                }
                y[token][begin..begin + n].copy_from_slice(&sum[..n]);
                if token + kept >= tokens {
                    let at = (token + kept - tokens) * states;
                    for (state, h) in latest[at..at + states].iter_mut().zip(&h) {
                        state[begin..begin + n].copy_from_slice(&h[..n]);
                    }
                }
            }
            begin += n;
        }
    }
}

/// Returns the first `n` numbers, followed by zeros.
#[inline(always)]
fn some(numbers: &[f32], n: usize) -> [f32; LANES] {
    match numbers.first_chunk() {
        Some(whole) if n == LANES => *whole,
        _ => {
            let mut lanes = [0.0; LANES];
            lanes[..n].copy_from_slice(&numbers[..n]);
            lanes
        }
    }
}
