//! Root mean square normalisation (Zhang and Sennrich, 2019, <https://arxiv.org/abs/1910.07467>).
//!
//! `y = x / sqrt(mean(x²) + eps) · w` over the last dimension of `[rows, tokens, hidden]`. Sums and the
//! quotient are float32, whatever the type of x; [`NormOrder`] says where the result is rounded to that type.

#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Tensor};

use crate::{
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::{Case, Rounding},
        checked::Checked,
        cut::cut_into_tokens,
        numbers::{Cut, Layout, Plain, Swapped},
    },
};

/// `x / sqrt(mean(x²) + eps)` times the weight, over the last dimension.
///
/// # Shapes
/// The result has the shape of x.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// `[rows, tokens, hidden]`
    pub x: Tensor<3>,
    /// `[hidden]`, cast to the type of x
    pub weight: Tensor<1>,
    pub eps: f64,
    pub order: NormOrder,
}

/// When the normalised values are rounded to the type of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormOrder {
    /// Before the multiplication by the weight: `LlamaRMSNorm` of transformers.
    CastThenScale,
    /// After the multiplication by `1 + weight` in float32: `Gemma2RMSNorm`.
    ScaleThenCast,
}

impl Kernel for RmsNorm {
    const NAME: &'static str = "rms_norm";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        assert_eq!(self.weight.dims(), [self.x.dims()[2]], "rms_norm: weight and x {:?}", self.x.dims());
        Self { weight: self.weight.cast(self.x.dtype()), ..self }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<3> {
        let Self { x, weight, eps, order } = self;
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

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<3>, Self> {
        native::normed(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{Launch, empty_like, primitive, strides},
            shaders::rms_norm::Info,
        };

        let Self { x, weight, eps, order } = self;
        let [rows, tokens, hidden] = x.dims();
        let (x, weight) = (primitive(x), primitive(weight));
        let y = empty_like(&x);
        let ([w_stride], vectors) = (strides(&weight), rows * tokens);
        let info = Info {
            rows: vectors as u32,
            hidden: hidden as u32,
            tokens: tokens as u32,
            scale_then_cast: u32::from(order == NormOrder::ScaleThenCast),
            x_strides: strides(&x),
            eps: eps as f32,
            w_stride,
        };
        Launch::new(&SHADER, x.dtype, &y.client).run(vectors, [&x, &weight, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for RmsNorm {
    cut_into_tokens!(x);

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |x: [usize; 3], layout: Layout, order| {
            let inputs = Case::new((x, layout, order), move |numbers| {
                let weight = numbers.tensor([x[2]], Plain);
                Self { x: numbers.tensor(x, layout), weight, eps: 0.01, order }
            });
            // The error of a sum of n squares in another order is sqrt(n) roundings; that of the square root,
            // the quotient and the products is a few, because a GPU does not round them to the nearest.
            let roundings = if order == NormOrder::CastThenScale { 2.0 } else { 1.0 };
            let n = x[2] as f64;
            inputs.within(move |want, Rounding { single, ulp, .. }| {
                want.abs() * (single * (n.sqrt() + 8.0) + ulp * roundings)
            })
        };
        let mut cases = Vec::new();
        for order in [NormOrder::CastThenScale, NormOrder::ScaleThenCast] {
            for hidden in [1, 7, 80, 96, 257, 4096] {
                cases.extend([[1, 1, hidden], [3, 5, hidden]].map(|x| case(x, Plain, order)));
            }
            cases
                .extend([Swapped(0, 1), Swapped(1, 2), Cut(1)].map(|layout| case([3, 5, 80], layout, order)));
            cases.push(case([1, 0, 8], Plain, order));
        }
        // More rows than workgroups along one axis.
        cases.push(case([3, 22_000, 2], Plain, NormOrder::CastThenScale));
        cases
    }
}

const SHADER: Shader = Shader {
    name: "rms_norm",
    bindings: &[reads("x"), reads("w"), writes("y")],
    text: include_str!("../../../../shaders/rms_norm.wgsl"),
    options: &[],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::{NormOrder, RmsNorm};
    use crate::runtime::launch::{LANES, address_type, count, empty_like, primitive};

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

    pub(super) fn launch(RmsNorm { x, weight, eps, order }: RmsNorm) -> burn::tensor::Tensor<3> {
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
