//! Rotary positions (Su et al., 2021, <https://arxiv.org/abs/2104.09864>), in the half-split layout of transformers.
//!
//! `y₁ = x₁ cos − x₂ sin` and `y₂ = x₂ cos + x₁ sin` for the pairs `(i, i + rotary_dim / 2)` of every head of
//! `[batch, heads, tokens, head_dim]`; dimensions from `rotary_dim` on are copied.
//!
//! Cosines and sines are rounded to the type of x, as in the reference. The products and their sum are float32 and
//! rounded once. The reference rounds each of the three; GPUs would not agree with it or with each other, since they
//! are free to contract a product and a sum.

use burn::tensor::{DType, Tensor};

use crate::shader::Shader;

pub(crate) fn definition(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<4> {
    let dtype = x.dtype();
    let [_, _, _, dim] = x.dims();
    let [_, _, pairs] = cos.dims();
    let table = |table: Tensor<3>| table.cast(dtype).cast(DType::F32).unsqueeze_dim::<4>(1);
    let (cos, sin) = (table(cos), table(sin));
    let first = x.clone().narrow(3, 0, pairs).cast(DType::F32);
    let second = x.clone().narrow(3, pairs, pairs).cast(DType::F32);

    let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let rotated_second = second * cos + first * sin;
    let mut parts = vec![rotated_first.cast(dtype), rotated_second.cast(dtype)];
    if 2 * pairs < dim {
        parts.push(x.narrow(3, 2 * pairs, dim - 2 * pairs));
    }
    Tensor::cat(parts, 3)
}

pub(crate) const SHADER: Shader =
    Shader { name: "rotary", text: include_str!("../../../shaders/rotary.wgsl"), options: &[] };

#[cfg(feature = "wgpu")]
pub(crate) fn wgsl(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<4> {
    use burn::backend::Cube;

    use crate::launch::{LANES, Launch, empty_like, primitive, strides};

    let [batch, heads, tokens, head_dim] = x.dims();
    let [tables, _, pairs] = cos.dims();
    let (x, cos, sin) = (primitive(x), primitive(cos), primitive(sin));
    let y = empty_like(&x);
    let [x0, x1, x2, x3] = strides(&x);
    let [[cos0, cos1, cos2], [sin0, sin1, sin2]] = [strides(&cos), strides(&sin)];
    let each = u32::from(tables > 1);
    let invocations = batch * heads * tokens * (head_dim - pairs);
    #[rustfmt::skip]
    let info = [
        x0, x1, x2, x3,
        cos0 * each, cos1, cos2, heads as u32,
        sin0 * each, sin1, sin2, tokens as u32,
        head_dim as u32, pairs as u32, invocations as u32,
    ];
    let launch = Launch::new(&SHADER, x.dtype, &y.client).reads(x).reads(cos).reads(sin).writes(&y);
    launch.run(invocations.div_ceil(LANES), &info);
    Tensor::from_primitive::<Cube>(y)
}

#[cfg(feature = "cube")]
pub(crate) use twin::launch as cube;

#[cfg(feature = "cube")]
mod twin {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use crate::launch::{LANES, address_type, count, empty_like, primitive};

    #[cube(launch, address_type = "dynamic")]
    fn rotary<E: Float>(
        x: &Tensor<E>,
        cos: &Tensor<f32>,
        sin: &Tensor<f32>,
        y: &mut Tensor<E>,
        // 0 where all sequences share their angles.
        each: usize,
        invocations: usize,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (heads, tokens, head_dim, pairs) = (x.shape(1), x.shape(2), x.shape(3), cos.shape(2));
        let places = head_dim - pairs;
        let place = ABSOLUTE_POS % places;
        let vector = ABSOLUTE_POS / places;
        let token = vector % tokens;
        let head = vector / tokens % heads;
        let batch = vector / tokens / heads;
        let x_vector = batch * x.stride(0) + head * x.stride(1) + token * x.stride(2);
        let y_vector = vector * head_dim;

        if place >= pairs {
            let i = place + pairs;
            y[y_vector + i] = x[x_vector + i * x.stride(3)];
        } else {
            let table = batch * each;
            let cosine = cos[table * cos.stride(0) + token * cos.stride(1) + place * cos.stride(2)];
            let sine = sin[table * sin.stride(0) + token * sin.stride(1) + place * sin.stride(2)];
            // The tables are rounded to the type of x, the result once.
            let c = f32::cast_from(E::cast_from(cosine));
            let s = f32::cast_from(E::cast_from(sine));
            let first = f32::cast_from(x[x_vector + place * x.stride(3)]);
            let second = f32::cast_from(x[x_vector + (place + pairs) * x.stride(3)]);
            y[y_vector + place] = E::cast_from(first * c - second * s);
            y[y_vector + place + pairs] = E::cast_from(second * c + first * s);
        }
    }

    pub(crate) fn launch(
        x: burn::tensor::Tensor<4>,
        cos: burn::tensor::Tensor<3>,
        sin: burn::tensor::Tensor<3>,
    ) -> burn::tensor::Tensor<4> {
        let [batch, heads, tokens, head_dim] = x.dims();
        let [tables, _, pairs] = cos.dims();
        let (x, cos, sin) = (primitive(x), primitive(cos), primitive(sin));
        let y = empty_like(&x);
        let invocations = batch * heads * tokens * (head_dim - pairs);
        let elem = dtype_to_storage_type(x.dtype);
        rotary::launch(
            &y.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&x, &cos, &sin, &y]),
            x.into_tensor_arg(),
            cos.into_tensor_arg(),
            sin.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            usize::from(tables > 1),
            invocations,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
