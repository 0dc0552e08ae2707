//! Layer normalisation (Ba et al., 2016, <https://arxiv.org/abs/1607.06450>).
//!
//! `y = (x - mean(x)) / sqrt(var(x) + eps) · w + b` over the last dimension of `[rows, tokens, hidden]`.
//! Everything is float32, whatever the type of x; the result is rounded to that type once, as in PyTorch.

#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Tensor};

use crate::{
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::{Case, LARGEST, Rounding},
        checked::Checked,
        cut::cut_into_tokens,
        numbers::{Cut, Layout, Plain, Swapped},
    },
};

/// `(x - mean(x)) / sqrt(var(x) + eps)` times the weight, plus the bias, over the last dimension. The
/// variance is the population variance: the sum of squares is divided by the count.
///
/// # Shapes
/// The result has the shape of x.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// `[rows, tokens, hidden]`
    pub x: Tensor<3>,
    /// `[hidden]`, cast to the type of x
    pub weight: Tensor<1>,
    /// `[hidden]`, cast to the type of x
    pub bias: Tensor<1>,
    pub eps: f64,
}

impl Kernel for LayerNorm {
    const NAME: &'static str = "layer_norm";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        let (dims, dtype) = (self.x.dims(), self.x.dtype());
        assert_eq!(self.weight.dims(), [dims[2]], "layer_norm: weight and x {dims:?}");
        assert_eq!(self.bias.dims(), [dims[2]], "layer_norm: bias and x {dims:?}");
        Self { weight: self.weight.cast(dtype), bias: self.bias.cast(dtype), ..self }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<3> {
        let Self { x, weight, bias, eps } = self;
        let dtype = x.dtype();
        let x = x.cast(DType::F32);
        let centred = x.clone() - x.mean_dim(2);
        let deviation = (centred.clone().square().mean_dim(2) + eps).sqrt();
        let wide = |vector: Tensor<1>| vector.cast(DType::F32).reshape([1, 1, -1]);
        (centred / deviation * wide(weight) + wide(bias)).cast(dtype)
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
            shaders::layer_norm::Info,
        };

        let Self { x, weight, bias, eps } = self;
        let [rows, tokens, hidden] = x.dims();
        let (x, weight, bias) = (primitive(x), primitive(weight), primitive(bias));
        let y = empty_like(&x);
        let ([w_stride], [b_stride], vectors) = (strides(&weight), strides(&bias), rows * tokens);
        let info = Info {
            x_strides: strides(&x),
            eps: eps as f32,
            rows: vectors as u32,
            hidden: hidden as u32,
            tokens: tokens as u32,
            w_stride,
            b_stride,
        };
        Launch::new(&SHADER, x.dtype, &y.client).run(vectors, [&x, &weight, &bias, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for LayerNorm {
    cut_into_tokens!(x);

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        // `offset` is the mean, in units of the largest number.
        let case = |x: [usize; 3], layout: Layout, offset: f64| {
            let inputs = Case::new((x, layout, offset), move |numbers| {
                let [weight, bias] = [(); 2].map(|()| numbers.tensor([x[2]], Plain));
                Self { x: numbers.tensor(x, layout) + offset * LARGEST, weight, bias, eps: 0.01 }
            });
            // The error of the mean is sqrt(n) roundings of the largest number, magnified by the deviation,
            // which is at least 0.1; the rest is as for `rms_norm`.
            let n = x[2] as f64;
            inputs.within(move |want, Rounding { single, ulp, .. }| {
                let mean = LARGEST * (1.0 + offset) * (n.sqrt() + 4.0) * single;
                LARGEST * mean / 0.1 + (want.abs() + LARGEST) * (n.sqrt() + 16.0) * single + want.abs() * ulp
            })
        };
        let mut cases = Vec::new();
        for hidden in [1, 7, 80, 96, 257, 384, 4096] {
            cases.extend([[1, 1, hidden], [3, 5, hidden]].map(|x| case(x, Plain, 0.0)));
        }
        // A mean that is far from 0: its square is not the difference of two large numbers.
        cases.push(case([2, 3, 384], Plain, 3.0));
        cases.extend([Swapped(0, 1), Swapped(1, 2), Cut(1)].map(|layout| case([3, 5, 80], layout, 0.0)));
        cases.push(case([1, 0, 8], Plain, 0.0));
        // More rows than workgroups along one axis, and more than one thread takes.
        cases.push(case([3, 22_000, 2], Plain, 0.0));
        cases.push(case([1, 1500, 384], Plain, 0.0));
        cases
    }
}

const SHADER: Shader = Shader {
    name: "layer_norm",
    bindings: &[reads("x"), reads("w"), reads("b"), writes("y")],
    text: include_str!("../../../../shaders/layer_norm.wgsl"),
    options: &[],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::LayerNorm;
    use crate::runtime::launch::{LANES, address_type, count, empty_like, primitive};

    /// Reduces the sums of all lanes into the first element.
    #[cube]
    fn sum_of_lanes(sums: &mut Shared<[f32]>, lane: usize) {
        let mut left = CUBE_DIM as usize / 2;
        while left > 0 {
            sync_cube();
            if lane < left {
                sums[lane] += sums[lane + left];
            }
            left /= 2;
        }
        sync_cube();
    }

    #[cube(launch, address_type = "dynamic")]
    fn layer_norm<E: Float>(
        x: &Tensor<E>,
        weight: &Tensor<E>,
        bias: &Tensor<E>,
        y: &mut Tensor<E>,
        rows: usize,
        eps: f32,
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
            sum += f32::cast_from(x[x_row + i * x.stride(2)]);
            i += LANES;
        }
        let mut sums = Shared::<[f32]>::new_slice(LANES);
        sums[lane] = sum;
        sum_of_lanes(&mut sums, lane);
        let mean = sums[0] / f32::cast_from(hidden);
        sync_cube();

        let mut sum = f32::new(0.0);
        let mut i = lane;
        while i < hidden {
            let value = f32::cast_from(x[x_row + i * x.stride(2)]) - mean;
            sum += value * value;
            i += LANES;
        }
        sums[lane] = sum;
        sum_of_lanes(&mut sums, lane);
        let deviation = f32::sqrt(sums[0] / f32::cast_from(hidden) + eps);

        let y_row = row * hidden;
        let mut i = lane;
        while i < hidden {
            let normal = (f32::cast_from(x[x_row + i * x.stride(2)]) - mean) / deviation;
            let scaled = normal * f32::cast_from(weight[i * weight.stride(0)]);
            y[y_row + i] = E::cast_from(scaled + f32::cast_from(bias[i * bias.stride(0)]));
            i += LANES;
        }
    }

    pub(super) fn launch(LayerNorm { x, weight, bias, eps }: LayerNorm) -> burn::tensor::Tensor<3> {
        let [rows, tokens, _] = x.dims();
        let (x, weight, bias) = (primitive(x), primitive(weight), primitive(bias));
        let y = empty_like(&x);
        let elem = dtype_to_storage_type(x.dtype);
        layer_norm::launch(
            &y.client,
            count(rows * tokens),
            CubeDim::new_1d(LANES as u32),
            address_type([&x, &weight, &bias, &y]),
            x.into_tensor_arg(),
            weight.into_tensor_arg(),
            bias.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            rows * tokens,
            eps as f32,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
