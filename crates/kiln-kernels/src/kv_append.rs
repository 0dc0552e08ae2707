//! Writes the keys and values of new tokens into rings of slots, at positions that the device knows.
//!
//! `buffer[b, .., (first[b] - origin + i) mod capacity, ..] = new[b, .., i, ..]` for
//! `[batch, kv_heads, capacity, head_dim]` and `[batch, kv_heads, n, head_dim]`, for keys and for values. Where the capacity is never reached, that is `StaticCache.update` of transformers.

use burn::tensor::{Int, Tensor};

use crate::shader::Shader;

/// Keys and values.
type Both = [Tensor<4>; 2];

/// Never in place, and moves the whole buffer: it is here to say what the others do.
pub(crate) fn definition(buffers: Both, new: Both, positions: Tensor<2, Int>, origin: i32) -> Both {
    let firsts = positions.narrow(0, 0, 1).transpose() - origin;
    let ([keys, values], [new_keys, new_values]) = (buffers, new);
    [written(keys, new_keys, firsts.clone()), written(values, new_values, firsts)]
}

/// `firsts`: `[batch, 1]`
fn written(buffer: Tensor<4>, new: Tensor<4>, firsts: Tensor<2, Int>) -> Tensor<4> {
    let [batch, heads, capacity, dim] = buffer.dims();
    let [_, _, n, _] = new.dims();
    if n == 0 {
        return buffer;
    }
    // Not `arange`: it uploads its numbers, which a captured step must not do.
    let slots = Tensor::<1, Int>::ones([capacity], (&buffer.device(), firsts.dtype())).cumsum(0) - 1;
    // Which new token a slot would get, if there are that many.
    let token = (slots.unsqueeze() - firsts).remainder_scalar(capacity as i64);
    let token = token.reshape([batch, 1, capacity, 1]).expand([batch, heads, capacity, dim]);
    let last = n as i64 - 1;
    let is_new = token.clone().lower_equal_elem(last);
    buffer.mask_where(is_new, new.gather(2, token.clamp_max(last)))
}

/// Copies vectors of a head. In place where a buffer has one owner, as are the launches below.
#[cfg(feature = "cpu")]
pub(crate) fn native(buffers: Both, new: Both, positions: Tensor<2, Int>, origin: i32) -> Both {
    let positions = crate::native::primitive(positions).into_data();
    let firsts: Vec<i64> = positions.iter::<i64>().map(|first| first - i64::from(origin)).collect();
    let ([keys, values], [new_keys, new_values]) = (buffers, new);
    [copied(keys, new_keys, &firsts), copied(values, new_values, &firsts)]
}

/// `firsts`: where the tokens of each row go.
#[cfg(feature = "cpu")]
fn copied(buffer: Tensor<4>, new: Tensor<4>, firsts: &[i64]) -> Tensor<4> {
    use burn::{
        backend::{Flex, flex::FlexTensor},
        tensor::TensorData,
    };

    use crate::native::primitive;

    let [_, heads, capacity, _] = buffer.dims();
    let [batch, _, n, dim] = new.dims();
    let vector = dim * new.dtype().size();
    // The very memory of the buffer where it has one owner, else a copy.
    let (mut slots, shape, dtype) = primitive(buffer).into_data().into_parts();
    let new = primitive(new);
    let new = if dim <= 1 || new.layout().strides()[3] == 1 { new } else { new.to_contiguous() };

    let (start, strides) = (new.layout().start_offset() as isize, new.layout().strides());
    for row in 0..batch * heads {
        for token in 0..n {
            let slot = (firsts[row / heads] + token as i64).rem_euclid(capacity as i64) as usize;
            let [batch, head, token] = [row / heads, row % heads, token].map(|i| i as isize);
            let from = (start + batch * strides[0] + head * strides[1] + token * strides[2]) as usize;
            let from = from * dtype.size();
            let to = (row * capacity + slot) * vector;
            slots[to..to + vector].copy_from_slice(&new.bytes()[from..from + vector]);
        }
    }
    let buffer = FlexTensor::from_data(TensorData::from_bytes(slots, shape, dtype));
    Tensor::from_primitive::<Flex>(buffer)
}

pub(crate) const SHADER: Shader =
    Shader { name: "kv_append", text: include_str!("../../../shaders/kv_append.wgsl"), options: &[] };

#[cfg(feature = "wgpu")]
pub(crate) fn wgsl(buffers: Both, new: Both, positions: Tensor<2, Int>, origin: i32) -> Both {
    use burn::backend::Cube;

    use crate::launch::{LANES, Launch, in_order, primitive, strides, to_write};

    let [_, heads, capacity, _] = buffers[0].dims();
    let [_, _, tokens, head_dim] = new[0].dims();
    let invocations = new[0].shape().num_elements();
    let [keys, values] = buffers.map(|buffer| to_write(primitive(buffer)));
    let [new_keys, new_values] = new.map(primitive);
    let [[key0, key1, key2, key3], [value0, value1, value2, value3]] = [strides(&keys), strides(&values)];
    let [[new_key0, new_key1, new_key2, new_key3], [new_value0, new_value1, new_value2, new_value3]] =
        [strides(&new_keys), strides(&new_values)];
    #[rustfmt::skip]
    let info = [
        key0, key1, key2, key3,
        value0, value1, value2, value3,
        new_key0, new_key1, new_key2, new_key3,
        new_value0, new_value1, new_value2, new_value3,
        heads as u32, capacity as u32, tokens as u32, head_dim as u32,
        invocations as u32, origin as u32,
    ];
    let launch = Launch::new(&SHADER, keys.dtype, &keys.client).updates(&keys).updates(&values);
    let launch = launch.reads(new_keys).reads(new_values).reads(in_order(positions));
    launch.run(invocations.div_ceil(LANES), &info);
    [keys, values].map(Tensor::from_primitive::<Cube>)
}

#[cfg(feature = "cube")]
pub(crate) use twin::launch as cube;

#[cfg(feature = "cube")]
mod twin {
    use burn::{
        backend::{Cube, cubecl::dtype_to_storage_type},
        tensor::Int as IntKind,
    };
    use cubecl::prelude::*;

    use crate::launch::{LANES, address_type, count, in_order, primitive, to_write};

    #[cube(launch, address_type = "dynamic")]
    fn kv_append<E: Numeric>(
        keys: &mut Tensor<E>,
        values: &mut Tensor<E>,
        new_keys: &Tensor<E>,
        new_values: &Tensor<E>,
        positions: &Tensor<i32>,
        invocations: usize,
        origin: i32,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (heads, tokens, head_dim) = (new_keys.shape(1), new_keys.shape(2), new_keys.shape(3));
        let i = ABSOLUTE_POS % head_dim;
        let token = ABSOLUTE_POS / head_dim % tokens;
        let head = ABSOLUTE_POS / head_dim / tokens % heads;
        let batch = ABSOLUTE_POS / head_dim / tokens / heads;

        let capacity = i32::cast_from(keys.shape(2));
        let slot = ((positions[batch] - origin + i32::cast_from(token)) % capacity + capacity) % capacity;
        let slot = usize::cast_from(slot);
        let to = batch * keys.stride(0) + head * keys.stride(1) + slot * keys.stride(2) + i * keys.stride(3);
        keys[to] = new_keys[batch * new_keys.stride(0)
            + head * new_keys.stride(1)
            + token * new_keys.stride(2)
            + i * new_keys.stride(3)];
        let to = batch * values.stride(0)
            + head * values.stride(1)
            + slot * values.stride(2)
            + i * values.stride(3);
        values[to] = new_values[batch * new_values.stride(0)
            + head * new_values.stride(1)
            + token * new_values.stride(2)
            + i * new_values.stride(3)];
    }

    pub(crate) fn launch(
        buffers: super::Both,
        new: super::Both,
        positions: burn::tensor::Tensor<2, IntKind>,
        origin: i32,
    ) -> super::Both {
        let invocations = new[0].shape().num_elements();
        let [keys, values] = buffers.map(|buffer| to_write(primitive(buffer)));
        let [new_keys, new_values] = new.map(primitive);
        let elem = dtype_to_storage_type(keys.dtype);
        kv_append::launch(
            &keys.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&keys, &values, &new_keys, &new_values]),
            keys.clone().into_tensor_arg(),
            values.clone().into_tensor_arg(),
            new_keys.into_tensor_arg(),
            new_values.into_tensor_arg(),
            in_order(positions).into_tensor_arg(),
            invocations,
            origin,
            elem,
        );
        [keys, values].map(burn::tensor::Tensor::from_primitive::<Cube>)
    }
}
