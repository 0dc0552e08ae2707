//! The `#[cube]` function, which takes the same steps as the shader.

use burn::backend::{Cube, cubecl::dtype_to_storage_type};
use cubecl::prelude::*;

use super::{BLOCK, CausalConv};
use crate::{
    runtime::launch::{LANES, address_type, count, empty, empty_like, in_order, primitive, to_write},
    state::functions::cube::sigmoid,
};

#[cube(launch, address_type = "dynamic")]
fn causal_conv<E: Float>(
    x: &Tensor<E>,
    weight: &Tensor<E>,
    bias: &Tensor<E>,
    ring: &mut Tensor<E>,
    positions: &Tensor<i32>,
    y: &mut Tensor<E>,
    blocks: usize,
    invocations: usize,
    #[comptime] width: usize,
    #[comptime] biased: bool,
    #[comptime] activated: bool,
    #[define(E)] _elem: ElemType,
) {
    if ABSOLUTE_POS >= invocations {
        terminate!();
    }
    let (rows, tokens, channels, slots) = (x.shape(0), x.shape(1), x.shape(2), ring.shape(2));
    let channel = ABSOLUTE_POS % channels;
    let block = ABSOLUTE_POS / channels % blocks;
    let row = ABSOLUTE_POS / channels / blocks;
    let first = positions[row];
    let visible_from = positions[rows + row];
    let x_row = row * x.stride(0) + channel * x.stride(2);
    let ring_row = row * ring.stride(0) + channel * ring.stride(3);

    let mut weights = Array::<f32>::new(width);
    #[unroll]
    for k in 0..width {
        weights[k] = f32::cast_from(weight[channel * weight.stride(0) + k * weight.stride(1)]);
    }
    let mut start = f32::new(0.0);
    if comptime!(biased) {
        start = f32::cast_from(bias[channel * bias.stride(0)]);
    }
    let begin = block * BLOCK;
    let end = min(begin + BLOCK, tokens);
    // The latest inputs; the last one is the input of the token itself.
    let mut inputs = Array::<f32>::new(width);
    #[unroll]
    for k in 0..width {
        let back = comptime!(width - k) as i32;
        let token = begin as i32 - back;
        let position = first + token;
        inputs[k] = f32::new(0.0);
        if position >= max(visible_from, 0) {
            if token >= 0 {
                inputs[k] = f32::cast_from(x[x_row + token as usize * x.stride(1)]);
            } else if comptime!(k > 0) {
                inputs[k] = f32::cast_from(ring[ring_row + position as usize % slots * ring.stride(2)]);
            }
        }
    }
    for token in begin..end {
        let seen = first + token as i32 >= visible_from;
        #[unroll]
        for k in 1..width {
            inputs[comptime!(k - 1)] = inputs[k];
        }
        let mut input = f32::new(0.0);
        if seen {
            input = f32::cast_from(x[x_row + token * x.stride(1)]);
        }
        inputs[comptime!(width - 1)] = input;
        let mut sum = start;
        #[unroll]
        for k in 0..width {
            sum += inputs[k] * weights[k];
        }
        let mut result = f32::new(0.0);
        if seen {
            result = sum;
            if comptime!(activated) {
                result = sum * sigmoid(sum);
            }
        }
        y[(row * tokens + token) * channels + channel] = E::cast_from(result);
    }
    if block == 0 {
        let kept = min(tokens, slots);
        for token in tokens - kept..tokens {
            let position = first + token as i32;
            let mut input = E::cast_from(0.0f32);
            if position >= visible_from {
                input = x[x_row + token * x.stride(1)];
            }
            let to = ring_row + position as usize % slots * ring.stride(2);
            ring[to] = input;
        }
    }
}

pub(super) fn launch(kernel: CausalConv) -> (burn::tensor::Tensor<3>, burn::tensor::Tensor<4>) {
    let CausalConv { x, weight, bias, silu, ring, positions } = kernel;
    let ([rows, tokens, channels], [_, width]) = (x.dims(), weight.dims());
    let (x, weight, ring) = (primitive(x), primitive(weight), to_write(primitive(ring)));
    let biased = bias.is_some();
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let y = empty_like(&x);
    let blocks = tokens.div_ceil(BLOCK);
    let invocations = rows * blocks * channels;
    let elem = dtype_to_storage_type(x.dtype);
    causal_conv::launch(
        &y.client,
        count(invocations.div_ceil(LANES)),
        CubeDim::new_1d(LANES as u32),
        address_type([&x, &weight, &ring, &y]),
        x.into_tensor_arg(),
        weight.into_tensor_arg(),
        bias.into_tensor_arg(),
        ring.clone().into_tensor_arg(),
        in_order(positions.on_device).into_tensor_arg(),
        y.clone().into_tensor_arg(),
        blocks,
        invocations,
        width,
        biased,
        silu,
        elem,
    );
    let (y, ring) =
        (burn::tensor::Tensor::from_primitive::<Cube>(y), burn::tensor::Tensor::from_primitive::<Cube>(ring));
    (y, ring)
}
