//! The `#[cube]` function, which takes the same steps as the shader.

use burn::backend::{Cube, cubecl::dtype_to_storage_type};
use cubecl::prelude::*;

use super::{FOURS, SCAN_LANES, SelectiveScan};
use crate::{
    runtime::launch::{address_type, count, empty_like, in_order, primitive, to_write},
    state::functions::cube::{sigmoid, softplus},
};

/// Tokens whose vectors are in memory at the same time.
const STEP: usize = 8;

#[cube(launch, address_type = "dynamic")]
fn selective_scan<E: Float>(
    x: &Tensor<E>,
    dt: &Tensor<E>,
    bc: &Tensor<E>,
    gate: &Tensor<E>,
    ad: &Tensor<f32>,
    ring: &mut Tensor<f32>,
    positions: &Tensor<i32>,
    y: &mut Tensor<E>,
    groups: usize,
    workgroups: usize,
    #[comptime] numbers: usize,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let (tokens, channels) = (x.shape(1), x.shape(2));
    let (states, slots) = (ring.shape(1), ring.shape(2));
    let row = workgroup / groups;
    let channel = workgroup % groups * SCAN_LANES + lane;
    let own = channel < channels;
    let first = positions[row] as usize;

    let mut a = Array::<f32>::new(numbers);
    let mut h = Array::<f32>::new(numbers);
    let ring_at = row * ring.stride(0) + channel * ring.stride(3);
    let from = ring_at + first % slots * ring.stride(2);
    #[unroll]
    for state in 0..numbers {
        a[state] = f32::new(0.0);
        h[state] = f32::new(0.0);
        if own && state < states {
            a[state] = ad[state * ad.stride(0) + channel * ad.stride(1)];
            if first != 0 {
                h[state] = ring[from + state * ring.stride(1)];
            }
        }
    }
    let mut d = f32::new(0.0);
    if own {
        d = ad[states * ad.stride(0) + channel * ad.stride(1)];
    }

    // For each token, how it enters the state, and how it reads it.
    let mut vectors = Shared::<[f32]>::new_slice(comptime!(2 * STEP * numbers));
    let mut begin = 0usize;
    while begin < tokens {
        // All lanes have read the previous contents.
        sync_cube();
        let mut i = lane;
        while i < comptime!(2 * STEP * numbers) {
            let token = begin + i / comptime!(2 * numbers);
            let which = i / numbers % 2;
            let state = i % numbers;
            let mut number = f32::new(0.0);
            if token < tokens && state < states {
                let at = row * bc.stride(0) + token * bc.stride(1) + (which * states + state) * bc.stride(2);
                number = f32::cast_from(bc[at]);
            }
            vectors[i] = number;
            i += SCAN_LANES;
        }
        sync_cube();
        if own {
            let end = min(begin + STEP, tokens);
            for token in begin..end {
                let input =
                    f32::cast_from(x[row * x.stride(0) + token * x.stride(1) + channel * x.stride(2)]);
                let step = softplus(f32::cast_from(
                    dt[row * dt.stride(0) + token * dt.stride(1) + channel * dt.stride(2)],
                ));
                let gain = step * input;
                let at = (token - begin) * comptime!(2 * numbers);
                // Four sums, as in the shader.
                let mut sums = Array::<f32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    sums[i] = f32::new(0.0);
                }
                #[unroll]
                for state in 0..numbers {
                    h[state] = f32::exp(step * a[state]) * h[state] + gain * vectors[at + state];
                    sums[comptime!(state % 4)] += h[state] * vectors[at + numbers + state];
                }
                let mixed = sums[0] + sums[1] + sums[2] + sums[3] + d * input;
                let gated = f32::cast_from(
                    gate[row * gate.stride(0) + token * gate.stride(1) + channel * gate.stride(2)],
                );
                y[(row * tokens + token) * channels + channel] = E::cast_from(mixed * gated * sigmoid(gated));
                if token + slots >= tokens {
                    let to = ring_at + (first + token + 1) % slots * ring.stride(2);
                    #[unroll]
                    for state in 0..numbers {
                        if state < states {
                            let place = to + state * ring.stride(1);
                            ring[place] = h[state];
                        }
                    }
                }
            }
        }
        begin += STEP;
    }
}

#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn launch(
    kernel: SelectiveScan,
) -> Result<(burn::tensor::Tensor<3>, burn::tensor::Tensor<4>), SelectiveScan> {
    let ([rows, _, channels], [_, states, ..]) = (kernel.x.dims(), kernel.ring.dims());
    let fours = FOURS.into_iter().filter(|&most| states.div_ceil(4) <= most).min();
    let Some(fours) = fours else { return Err(kernel) };
    let SelectiveScan { x, dt, bc, gate, ad, ring, positions } = kernel;
    let [x, dt, bc, gate] = [x, dt, bc, gate].map(primitive);
    let (ad, ring) = (primitive(ad), to_write(primitive(ring)));
    let y = empty_like(&x);
    let groups = channels.div_ceil(SCAN_LANES);
    let elem = dtype_to_storage_type(x.dtype);
    selective_scan::launch(
        &y.client,
        count(rows * groups),
        CubeDim::new_1d(SCAN_LANES as u32),
        address_type([&x, &dt, &bc, &gate, &ad, &ring, &y]),
        x.into_tensor_arg(),
        dt.into_tensor_arg(),
        bc.into_tensor_arg(),
        gate.into_tensor_arg(),
        ad.into_tensor_arg(),
        ring.clone().into_tensor_arg(),
        in_order(positions.on_device).into_tensor_arg(),
        y.clone().into_tensor_arg(),
        groups,
        rows * groups,
        4 * fours,
        elem,
    );
    Ok((burn::tensor::Tensor::from_primitive::<Cube>(y), burn::tensor::Tensor::from_primitive::<Cube>(ring)))
}
