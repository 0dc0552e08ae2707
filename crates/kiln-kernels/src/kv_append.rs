//! Writes the keys or values of new tokens into a ring of slots, at a position that the device knows.
//!
//! `buffer[.., (position + i) mod capacity, ..] = new[.., i, ..]` for `[batch, kv_heads, capacity, head_dim]` and
//! `[batch, kv_heads, n, head_dim]`. Where the capacity is never reached, that is `StaticCache.update` of transformers.

use burn::tensor::{Int, Tensor};

use crate::shader::Shader;

/// Never in place, and moves the whole buffer: it is here to say what the others do.
pub(crate) fn definition(buffer: Tensor<4>, new: Tensor<4>, position: Tensor<1, Int>) -> Tensor<4> {
    let [batch, heads, capacity, dim] = buffer.dims();
    let [_, _, n, _] = new.dims();
    if n == 0 {
        return buffer;
    }
    // Not `arange`: it uploads its numbers, which a captured step must not do.
    let slots = Tensor::<1, Int>::ones([capacity], (&buffer.device(), position.dtype())).cumsum(0) - 1;
    // Which new token a slot would get, if there are that many.
    let token = (slots - position).remainder_scalar(capacity as i64);
    let last = n as i64 - 1;
    let written = token.clone().lower_equal_elem(last);
    let written = written.reshape([1, 1, capacity, 1]).expand([batch, heads, capacity, dim]);
    buffer.mask_where(written, new.select(2, token.clamp_max(last)))
}

/// Copies vectors of a head. In place where the buffer has one owner, as are the launches below.
#[cfg(feature = "cpu")]
pub(crate) fn native(buffer: Tensor<4>, new: Tensor<4>, position: Tensor<1, Int>) -> Tensor<4> {
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
    let position = primitive(position).into_data().iter::<i64>().next().unwrap_or(0);

    let (start, strides) = (new.layout().start_offset() as isize, new.layout().strides());
    for row in 0..batch * heads {
        for token in 0..n {
            let slot = (position + token as i64).rem_euclid(capacity as i64) as usize;
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
pub(crate) fn wgsl(buffer: Tensor<4>, new: Tensor<4>, position: Tensor<1, Int>) -> Tensor<4> {
    use burn::backend::Cube;

    use crate::launch::{LANES, Launch, primitive, strides, to_write};

    let [_, heads, capacity, _] = buffer.dims();
    let [_, _, tokens, head_dim] = new.dims();
    let invocations = new.shape().num_elements();
    let (buffer, new, position) = (to_write(primitive(buffer)), primitive(new), primitive(position));
    let [buffer0, buffer1, buffer2, buffer3] = strides(&buffer);
    let [new0, new1, new2, new3] = strides(&new);
    #[rustfmt::skip]
    let info = [
        buffer0, buffer1, buffer2, buffer3,
        new0, new1, new2, new3,
        heads as u32, capacity as u32, tokens as u32, head_dim as u32,
        invocations as u32,
    ];
    let launch =
        Launch::new(&SHADER, buffer.dtype, &buffer.client).updates(&buffer).reads(new).reads(position);
    launch.run(invocations.div_ceil(LANES), &info);
    Tensor::from_primitive::<Cube>(buffer)
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

    use crate::launch::{LANES, address_type, count, primitive, to_write};

    #[cube(launch, address_type = "dynamic")]
    fn kv_append<E: Numeric>(
        buffer: &mut Tensor<E>,
        new: &Tensor<E>,
        position: &Tensor<i32>,
        invocations: usize,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (heads, tokens, head_dim) = (new.shape(1), new.shape(2), new.shape(3));
        let i = ABSOLUTE_POS % head_dim;
        let token = ABSOLUTE_POS / head_dim % tokens;
        let head = ABSOLUTE_POS / head_dim / tokens % heads;
        let batch = ABSOLUTE_POS / head_dim / tokens / heads;

        let capacity = i32::cast_from(buffer.shape(2));
        let slot = ((position[0] + i32::cast_from(token)) % capacity + capacity) % capacity;
        let to = batch * buffer.stride(0)
            + head * buffer.stride(1)
            + usize::cast_from(slot) * buffer.stride(2)
            + i * buffer.stride(3);
        buffer[to] =
            new[batch * new.stride(0) + head * new.stride(1) + token * new.stride(2) + i * new.stride(3)];
    }

    pub(crate) fn launch(
        buffer: burn::tensor::Tensor<4>,
        new: burn::tensor::Tensor<4>,
        position: burn::tensor::Tensor<1, IntKind>,
    ) -> burn::tensor::Tensor<4> {
        let invocations = new.shape().num_elements();
        let (buffer, new, position) = (to_write(primitive(buffer)), primitive(new), primitive(position));
        let elem = dtype_to_storage_type(buffer.dtype);
        kv_append::launch(
            &buffer.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&buffer, &new]),
            buffer.clone().into_tensor_arg(),
            new.into_tensor_arg(),
            position.into_tensor_arg(),
            invocations,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(buffer)
    }
}
