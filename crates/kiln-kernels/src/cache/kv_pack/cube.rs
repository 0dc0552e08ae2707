//! The `#[cube]` functions, which take the same steps as the shaders.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Tensor as BurnTensor},
};
use cubecl::prelude::*;
use kiln_core::packed::{Along, PackedBuffer};

use super::KvPack;
use crate::runtime::{
    half::{DOWN, NEAREST, SMALLEST, UP, finite, half_bits, half_number},
    launch::{LANES, address_type, count, primitive, to_write},
};

#[cube(launch, address_type = "dynamic")]
#[allow(unused_assignments, reason = "both branches assign")]
fn kv_scales<E: Numeric>(
    tokens: &Tensor<E>,
    scales: &mut Tensor<u32>,
    rows: usize,
    row: usize,
    group: usize,
    reciprocal: f32,
    invocations: usize,
    #[comptime] along_tokens: bool,
    #[comptime] given: bool,
    #[define(E)] _elem: ElemType,
) {
    if ABSOLUTE_POS >= invocations {
        terminate!();
    }
    let (heads, columns) = (scales.shape(1), scales.shape(3));
    let column = ABSOLUTE_POS % columns;
    let new_row = ABSOLUTE_POS / columns % rows;
    let head = ABSOLUTE_POS / columns / rows % heads;
    let batch = ABSOLUTE_POS / columns / rows / heads;
    let vectors = batch * tokens.stride(0) + head * tokens.stride(1);

    let mut scale = 0u32;
    let mut offset = 0u32;
    if comptime!(given) {
        let at = vectors + new_row * tokens.stride(2);
        let given = finite::<E>(tokens[at + column * tokens.stride(3)]);
        scale = half_bits(max(given, 0.0), NEAREST);
        offset = half_bits(finite::<E>(tokens[at + (columns + column) * tokens.stride(3)]), NEAREST);
    } else {
        let mut token = new_row;
        let mut channel = column * group;
        let mut step = tokens.stride(3);
        let mut number = min(group, tokens.shape(3) - min(channel, tokens.shape(3)));
        if comptime!(along_tokens) {
            token = new_row * group;
            channel = column;
            step = tokens.stride(2);
            number = group;
        }
        let at = vectors + token * tokens.stride(2) + channel * tokens.stride(3);
        let mut least = finite::<E>(tokens[at]);
        let mut most = least;
        for i in 1..number {
            let x = finite::<E>(tokens[at + i * step]);
            least = min(least, x);
            most = max(most, x);
        }
        offset = half_bits(least, DOWN);
        let range = most - half_number(offset);
        if range >= SMALLEST {
            scale = half_bits(range * reciprocal, UP);
        }
    }
    let to = batch * scales.stride(0)
        + head * scales.stride(1)
        + (row + new_row) % scales.shape(2) * scales.stride(2)
        + column * scales.stride(3);
    scales[to] = scale | (offset << 16u32);
}

/// Returns the nearest code, computed as in the shader.
#[cube]
fn code_of(x: f32, scale: f32, offset: f32, #[comptime] most: u32) -> u32 {
    let mut code = 0u32;
    if scale != 0.0 {
        let difference = max(x - offset, 0.0);
        let bits = u32::reinterpret(difference);
        code = u32::cast_from(min(difference / scale, f32::cast_from(most)) + 0.5);
        let odd = (code & 1u32) == 1u32;
        let above = u32::reinterpret(f32::cast_from(2u32 * code + 1u32) * (scale * 0.5));
        let below = u32::reinterpret(f32::cast_from(max(2u32 * code, 1u32) - 1u32) * (scale * 0.5));
        if bits > above || (odd && bits == above) {
            code += 1u32;
        } else if code > 0u32 && (bits < below || (odd && bits == below)) {
            code -= 1u32;
        }
    }
    min(code, most)
}

#[cube(launch, address_type = "dynamic")]
fn kv_pack<E: Numeric>(
    tokens: &Tensor<E>,
    codes: &mut Tensor<u32>,
    scales: &Tensor<u32>,
    group: usize,
    channels_together: usize,
    words_together: usize,
    slot: usize,
    invocations: usize,
    #[comptime] along_tokens: bool,
    #[comptime] bits: u32,
    #[define(E)] _elem: ElemType,
) {
    if ABSOLUTE_POS >= invocations {
        terminate!();
    }
    let (heads, n, words) = (tokens.shape(1), tokens.shape(2), codes.shape(3));
    let word = ABSOLUTE_POS % words;
    let token = ABSOLUTE_POS / words % n;
    let head = ABSOLUTE_POS / words / n % heads;
    let batch = ABSOLUTE_POS / words / n / heads;
    let to = (slot + token) % codes.shape(2);

    let together = word / words_together;
    let each = comptime!((32 / bits) as usize);
    let first = together * channels_together + word % words_together * each;
    let end = min(min((together + 1) * channels_together, tokens.shape(3)), first + each);
    let vector = batch * tokens.stride(0) + head * tokens.stride(1) + token * tokens.stride(2);
    let groups = batch * scales.stride(0) + head * scales.stride(1);
    let mut packed = 0u32;
    for channel in first..end {
        let mut at = groups + to * scales.stride(2) + together * scales.stride(3);
        if comptime!(along_tokens) {
            at = groups + to / group * scales.stride(2) + channel * scales.stride(3);
        }
        let scale = scales[at];
        let x = finite::<E>(tokens[vector + channel * tokens.stride(3)]);
        let most = comptime!((1u32 << bits) - 1);
        let code = code_of(x, half_number(scale & 0xffffu32), half_number(scale >> 16u32), most);
        packed |= code << (u32::cast_from(channel - first) * bits);
    }
    let at = batch * codes.stride(0) + head * codes.stride(1) + to * codes.stride(2) + word * codes.stride(3);
    codes[at] = packed;
}

pub(super) fn launch(KvPack { buffer, tokens, slot, packing, given }: KvPack) -> PackedBuffer {
    let [batch, heads, n, dim] = tokens.dims();
    if tokens.shape().num_elements() == 0 {
        return buffer;
    }
    let slots = buffer.slots();
    let columns = buffer.scales.dims()[3];
    let rows = n / packing.slots_together();
    let along_tokens = packing.along() == Along::Tokens;
    let is_given = given.is_some();
    let measured =
        given.map_or_else(|| tokens.clone(), |given| BurnTensor::cat(given.to_vec(), 3).cast(DType::F32));
    let (tokens, measured) = (primitive(tokens), primitive(measured));
    let (codes, scales) = (to_write(primitive(buffer.codes)), to_write(primitive(buffer.scales)));
    let (client, lanes) = (codes.client.clone(), CubeDim::new_1d(LANES as u32));

    let invocations = batch * heads * rows * columns;
    let elem = dtype_to_storage_type(measured.dtype);
    kv_scales::launch(
        &client,
        count(invocations.div_ceil(LANES)),
        lanes,
        address_type([&measured, &scales]),
        measured.into_tensor_arg(),
        scales.clone().into_tensor_arg(),
        rows,
        slot % slots / packing.slots_together(),
        packing.group(),
        1.0 / packing.largest() as f32,
        invocations,
        along_tokens,
        is_given,
        elem,
    );
    let invocations = batch * heads * n * packing.words(dim);
    let elem = dtype_to_storage_type(tokens.dtype);
    kv_pack::launch(
        &client,
        count(invocations.div_ceil(LANES)),
        lanes,
        address_type([&tokens, &codes, &scales]),
        tokens.into_tensor_arg(),
        codes.clone().into_tensor_arg(),
        scales.clone().into_tensor_arg(),
        packing.group(),
        packing.channels_together(dim),
        packing.words_together(dim),
        slot % slots,
        invocations,
        along_tokens,
        packing.bits() as u32,
        elem,
    );
    PackedBuffer {
        codes: BurnTensor::from_primitive::<Cube>(codes),
        scales: BurnTensor::from_primitive::<Cube>(scales),
    }
}
