//! The weighted sum of the results of a token's experts.
//!
//! `y[b, t] = residual[b, t] + Σ_slot weights[b, t, slot] · x[b, t, slot]` for
//! `[rows, tokens, slots, width]`, summed in float32 in the order of the slots and rounded once.

use burn::tensor::{DType, Tensor};

use crate::{
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::{Case, LARGEST, Rounding},
        checked::Checked,
        cut::{Extent, cut},
        numbers::{Cut, Layout, Plain, Swapped},
    },
};

/// `Σ weights · x + residual`, over the slots of each token: `[rows, tokens, width]`.
#[derive(Clone, Debug)]
pub struct WeightedSum {
    /// `[rows, tokens, slots, width]`
    pub x: Tensor<4>,
    /// `[rows, tokens, slots]`, cast to float32
    pub weights: Tensor<3>,
    /// `[rows, tokens, width]`, cast to the type of x
    pub residual: Option<Tensor<3>>,
}

impl Kernel for WeightedSum {
    const NAME: &'static str = "weighted_sum";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        let Self { x, weights, residual } = self;
        let [rows, tokens, slots, width] = x.dims();
        assert_eq!(weights.dims(), [rows, tokens, slots], "weighted_sum: weights and x {:?}", x.dims());
        let residual = residual.map(|residual| {
            assert_eq!(residual.dims(), [rows, tokens, width], "weighted_sum: residual and x {:?}", x.dims());
            residual.cast(x.dtype())
        });
        Self { weights: weights.cast(DType::F32), residual, x }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<3> {
        let Self { x, weights, residual } = self;
        let ([rows, tokens, slots, width], dtype) = (x.dims(), x.dtype());
        let shape = [rows, tokens, width];
        let mut sum = Tensor::zeros(shape, (&x.device(), DType::F32));
        for slot in 0..slots {
            let x = x.clone().narrow(2, slot, 1).reshape(shape).cast(DType::F32);
            sum = sum + x * weights.clone().narrow(2, slot, 1);
        }
        match residual {
            Some(residual) => sum + residual.cast(DType::F32),
            None => sum,
        }
        .cast(dtype)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<3>, Self> {
        native::sum(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, empty, primitive, strides},
            shaders::weighted_sum::Info,
        };

        let Self { x, weights, residual } = self;
        let [rows, tokens, slots, width] = x.dims();
        let invocations = rows * tokens * width;
        let added = residual.is_some();
        let (x, weights) = (primitive(x), primitive(weights));
        let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
        let y = empty(&x, [rows, tokens, width], x.dtype);
        let info = Info {
            x_strides: strides(&x),
            weights_strides: strides(&weights),
            tokens: tokens as u32,
            residual_strides: strides(&residual),
            width: width as u32,
            slots: slots as u32,
            added: u32::from(added),
            invocations: invocations as u32,
        };
        let launch = Launch::new(&SHADER, x.dtype, &y.client);
        launch.run(invocations.div_ceil(LANES), [&x, &weights, &residual, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for WeightedSum {
    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, ..] = self.x.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        let residual = self.residual.map(|residual| cut(residual, &part, 1));
        Self { x: cut(self.x, &part, 1), weights: cut(self.weights, &part, 1), residual }
    }

    fn part_of(whole: Tensor<3>, part: Extent) -> Tensor<3> {
        cut(whole, &part, 1)
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |x: [usize; 4], layout: Layout, added: bool| {
            let case = Case::new((x, layout, added), move |numbers| {
                let weights = numbers.float32([x[0], x[1], x[2]]);
                let residual = added.then(|| numbers.tensor([x[0], x[1], x[3]], Cut(2)));
                Self { x: numbers.tensor(x, layout), weights, residual }
            });
            // A sum of a few terms, each up to LARGEST, which may be fused with its products.
            case.within(move |want, Rounding { single, ulp, .. }| {
                LARGEST * (x[2] + 1) as f64 * single * 2.0 + want.abs() * ulp
            })
        };
        let mut cases = vec![case([1, 1, 1, 1], Plain, false), case([2, 70, 3, 300], Plain, true)];
        for added in [false, true] {
            cases.push(case([1, 1, 2, 640], Plain, added));
            cases.push(case([3, 5, 8, 37], Swapped(0, 1), added));
            cases.push(case([4, 4, 3, 64], Cut(3), added));
            cases.push(case([2, 3, 2, 65], Swapped(2, 3), added));
        }
        cases
    }
}

const SHADER: Shader = Shader {
    name: "weighted_sum",
    bindings: &[reads("x"), reads("weights"), reads("residual"), writes("y")],
    text: include_str!("../../../../shaders/weighted_sum.wgsl"),
    options: &[],
};

#[cfg(feature = "cpu")]
mod native {
    use burn::{
        backend::{Flex, flex::FlexTensor},
        tensor::{Tensor, TensorData},
    };

    use super::WeightedSum;
    use crate::runtime::native::{Storage, by_storage, primitive};

    /// Computes the sum on the CPU.
    ///
    /// # Errors
    /// Returns the inputs, for types without an implementation.
    #[allow(clippy::result_large_err, reason = "the inputs are given back")]
    pub(super) fn sum(kernel: WeightedSum) -> Result<Tensor<3>, WeightedSum> {
        by_storage!(kernel.x.dtype(), E => sum_in::<E>(&kernel), else None).ok_or(kernel)
    }

    fn sum_in<E: Storage>(WeightedSum { x, weights, residual }: &WeightedSum) -> Option<Tensor<3>> {
        let [rows, tokens, slots, width] = x.dims();
        if x.shape().num_elements() == 0 {
            return None;
        }
        let (x, weights) = (primitive(x.clone()).to_contiguous(), primitive(weights.clone()).to_contiguous());
        let mut widened = Vec::new();
        let x = E::in_floats(x.as_slice()?, &mut widened);
        let weights: &[f32] = weights.as_slice()?;
        let mut y = vec![0.0; rows * tokens * width];
        let tokens_of_all = y.chunks_mut(width).zip(x.chunks(slots * width)).zip(weights.chunks(slots));
        for ((y, x), weights) in tokens_of_all {
            for (x, weight) in x.chunks(width).zip(weights) {
                y.iter_mut().zip(x).for_each(|(y, x)| *y += weight * x);
            }
        }
        if let Some(residual) = residual {
            let residual = primitive(residual.clone()).to_contiguous();
            let mut widened = Vec::new();
            let residual = E::in_floats(residual.as_slice()?, &mut widened);
            y.iter_mut().zip(residual).for_each(|(y, residual)| *y += residual);
        }
        let y = FlexTensor::from_data(TensorData::new(E::of_floats(y), [rows, tokens, width]));
        Some(Tensor::from_primitive::<Flex>(y))
    }
}

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::WeightedSum;
    use crate::runtime::launch::{LANES, address_type, count, empty, primitive};

    #[cube(launch, address_type = "dynamic")]
    fn weighted_sum<E: Float>(
        x: &Tensor<E>,
        weights: &Tensor<f32>,
        residual: &Tensor<E>,
        y: &mut Tensor<E>,
        invocations: usize,
        #[comptime] added: bool,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (tokens, width) = (x.shape(1), x.shape(3));
        let i = ABSOLUTE_POS % width;
        let token = ABSOLUTE_POS / width % tokens;
        let row = ABSOLUTE_POS / width / tokens;
        let mut sum = f32::new(0.0);
        for slot in 0..x.shape(2) {
            let weight =
                weights[row * weights.stride(0) + token * weights.stride(1) + slot * weights.stride(2)];
            let at = row * x.stride(0) + token * x.stride(1) + slot * x.stride(2) + i * x.stride(3);
            sum += weight * f32::cast_from(x[at]);
        }
        if comptime!(added) {
            let at = row * residual.stride(0) + token * residual.stride(1) + i * residual.stride(2);
            sum += f32::cast_from(residual[at]);
        }
        y[ABSOLUTE_POS] = E::cast_from(sum);
    }

    pub(super) fn launch(WeightedSum { x, weights, residual }: WeightedSum) -> burn::tensor::Tensor<3> {
        let [rows, tokens, _, width] = x.dims();
        let invocations = rows * tokens * width;
        let added = residual.is_some();
        let (x, weights) = (primitive(x), primitive(weights));
        let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
        let y = empty(&x, [rows, tokens, width], x.dtype);
        let elem = dtype_to_storage_type(x.dtype);
        weighted_sum::launch(
            &y.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&x, &weights, &residual, &y]),
            x.into_tensor_arg(),
            weights.into_tensor_arg(),
            residual.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            invocations,
            added,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
