//! Root mean square normalisation (Zhang and Sennrich, 2019, <https://arxiv.org/abs/1910.07467>).
//!
//! `y = x / sqrt(mean(x²) + eps) · w` over the last dimension of `[rows, tokens, hidden]`. Sums and the quotient are
//! float32 whatever the type of x; [`NormOrder`] says where the result is rounded to it.

use burn::tensor::{DType, Tensor};

use crate::shader::Shader;

/// When the normalised values are rounded to the type of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormOrder {
    /// Before they are multiplied by the weight: `LlamaRMSNorm` of transformers.
    CastThenScale,
    /// After they are multiplied by `1 + weight` in float32: `Gemma2RMSNorm`.
    ScaleThenCast,
}

pub(crate) fn definition(x: Tensor<3>, weight: Tensor<1>, eps: f64, order: NormOrder) -> Tensor<3> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let rms = (x.clone().square().mean_dim(2) + eps).sqrt();
    let normal = x / rms;
    let weight = weight.reshape([1, 1, -1]);
    match order {
        NormOrder::CastThenScale => normal.cast(dtype) * weight,
        NormOrder::ScaleThenCast => (normal * (weight.cast(DType::F32) + 1.0)).cast(dtype),
    }
}

pub(crate) const SHADER: Shader =
    Shader { name: "rms_norm", text: include_str!("../../../shaders/rms_norm.wgsl"), options: &[] };

#[cfg(feature = "wgpu")]
pub(crate) fn wgsl(x: Tensor<3>, weight: Tensor<1>, eps: f64, order: NormOrder) -> Tensor<3> {
    use burn::backend::Cube;

    use crate::launch::{Launch, empty_like, primitive, strides};

    let [rows, tokens, hidden] = x.dims();
    let (x, weight) = (primitive(x), primitive(weight));
    let y = empty_like(&x);
    let ([x0, x1, x2], [weight0]) = (strides(&x), strides(&weight));
    let vectors = rows * tokens;
    #[rustfmt::skip]
    let info = [
        vectors as u32, hidden as u32, tokens as u32, u32::from(order == NormOrder::ScaleThenCast),
        x0, x1, x2, (eps as f32).to_bits(),
        weight0,
    ];
    let launch = Launch::new(&SHADER, x.dtype, &y.client).reads(x).reads(weight).writes(&y);
    launch.run(vectors, &info);
    Tensor::from_primitive::<Cube>(y)
}

#[cfg(feature = "cube")]
pub(crate) use twin::launch as cube;

#[cfg(feature = "cube")]
mod twin {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::NormOrder;
    use crate::launch::{LANES, address_type, count, empty_like, primitive};

    #[cube(launch, address_type = "dynamic")]
    fn rms_norm<E: Float>(
        x: &Tensor<E>,
        weight: &Tensor<E>,
        y: &mut Tensor<E>,
        rows: usize,
        eps: f32,
        #[comptime] order: NormOrder,
        #[define(E)] _elem: ElemType,
    ) {
        let row = CUBE_POS;
        if row >= rows {
            terminate!();
        }
        let lane = UNIT_POS as usize;
        let (tokens, hidden) = (x.shape(1), x.shape(2));
        let x_row = row / tokens * x.stride(0) + row % tokens * x.stride(1);

        let mut sum = f32::new(0.0);
        let mut i = lane;
        while i < hidden {
            let value = f32::cast_from(x[x_row + i * x.stride(2)]);
            sum += value * value;
            i += LANES;
        }
        let mut sums = Shared::<[f32]>::new_slice(LANES);
        sums[lane] = sum;
        let mut left = CUBE_DIM as usize / 2;
        while left > 0 {
            sync_cube();
            if lane < left {
                sums[lane] += sums[lane + left];
            }
            left /= 2;
        }
        sync_cube();
        let rms = f32::sqrt(sums[0] / f32::cast_from(hidden) + eps);

        let y_row = row * hidden;
        let mut i = lane;
        while i < hidden {
            let normal = f32::cast_from(x[x_row + i * x.stride(2)]) / rms;
            let scale = weight[i * weight.stride(0)];
            if comptime!(order == NormOrder::ScaleThenCast) {
                y[y_row + i] = E::cast_from(normal * (f32::cast_from(scale) + 1.0));
            } else {
                y[y_row + i] = E::cast_from(normal) * scale;
            }
            i += LANES;
        }
    }

    pub(crate) fn launch(
        x: burn::tensor::Tensor<3>,
        weight: burn::tensor::Tensor<1>,
        eps: f64,
        order: NormOrder,
    ) -> burn::tensor::Tensor<3> {
        let [rows, tokens, _] = x.dims();
        let (x, weight) = (primitive(x), primitive(weight));
        let y = empty_like(&x);
        let elem = dtype_to_storage_type(x.dtype);
        rms_norm::launch(
            &y.client,
            count(rows * tokens),
            CubeDim::new_1d(LANES as u32),
            address_type([&x, &weight, &y]),
            x.into_tensor_arg(),
            weight.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            rows * tokens,
            eps as f32,
            order,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
