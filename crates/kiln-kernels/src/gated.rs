//! What is between the projections of a gated feed-forward block (Shazeer, 2020, <https://arxiv.org/abs/2002.05202>).
//!
//! `y = act(gate) · up`, element by element, for `[rows, tokens, width]`. The activation is float32 whatever the type of
//! the gate, and rounded to it once before it is multiplied, as in the reference.

#[cfg(feature = "cpu")]
mod native;

use std::f64::consts::PI;

use burn::tensor::{
    DType, Tensor,
    activation::{gelu, silu},
};

use crate::{
    Kernel,
    cases::{Case, Cut, LARGEST, Layout, Plain, Rounding, Swapped},
    invariance::{Extent, cut},
    shader::Shader,
};

/// `act(gate) · up`, which a gated feed-forward block computes between its projections.
///
/// # Shapes
/// The result has the shape of the gate.
#[derive(Clone, Debug)]
pub struct Gated {
    /// `[rows, tokens, width]`
    pub gate: Tensor<3>,
    /// As the gate, and cast to its type.
    pub up: Tensor<3>,
    pub activation: Activation,
}

/// The function between the projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// `x Φ(x)` (Hendrycks and Gimpel, 2016)
    Gelu,
    /// Its approximation, `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`
    GeluTanh,
}

impl Activation {
    /// The function of each element, in plain tensor operations.
    pub(crate) fn of(self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Silu => silu(x),
            Self::Gelu => gelu(x),
            Self::GeluTanh => {
                // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)): fewer operations, and no tanh of large numbers.
                let u = (x.clone().square() * 0.044715 + 1.0) * x.clone() * (2.0 / PI).sqrt();
                x / ((u * -2.0).exp() + 1.0)
            }
        }
    }
}

impl Kernel for Gated {
    const NAME: &'static str = "gated";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        assert_eq!(self.gate.dims(), self.up.dims(), "gated: gate and up");
        Self { up: self.up.cast(self.gate.dtype()), ..self }
    }

    fn shape(&self) -> Vec<usize> {
        self.gate.dims().into()
    }

    fn reference(self) -> Tensor<3> {
        let Self { gate, up, activation } = self;
        let dtype = gate.dtype();
        activation.of(gate.cast(DType::F32)).cast(dtype) * up
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<3>, Self> {
        native::gated(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        use burn::backend::Cube;

        use crate::launch::{LANES, Launch, empty_like, primitive, strides};

        let Self { gate, up, activation } = self;
        let [_, tokens, width] = gate.dims();
        let invocations = gate.shape().num_elements();
        let (gate, up) = (primitive(gate), primitive(up));
        let y = empty_like(&gate);
        let [[gate0, gate1, gate2], [up0, up1, up2]] = [strides(&gate), strides(&up)];
        #[rustfmt::skip]
        let info = [
            gate0, gate1, gate2, tokens as u32,
            up0, up1, up2, width as u32,
            invocations as u32,
        ];
        let launch = Launch::new(&SHADER, gate.dtype, &y.client).with(&[activation as usize]);
        launch.reads(gate).reads(up).writes(&y).run(invocations.div_ceil(LANES), &info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        Ok(cube::launch(self))
    }

    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, _] = self.gate.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        Self { gate: cut(self.gate, &part, 1), up: cut(self.up, &part, 1), ..self }
    }

    fn part_of(whole: Tensor<3>, part: Extent) -> Tensor<3> {
        cut(whole, &part, 1)
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        // The gate is `times` times as large as other numbers are.
        let case = |gate: [usize; 3], layout: Layout, activation, times: f64| {
            let inputs = Case::new((gate, layout, activation, times), move |numbers| {
                let up = numbers.tensor(gate, Plain);
                Self { gate: numbers.tensor(gate, layout) * times, up, activation }
            });
            // The activation is off by a few roundings of its argument, and by the error of an approximation of the normal
            // distribution, and rounded; then multiplied by at most LARGEST, and rounded.
            inputs.within(move |want, Rounding { single, ulp, .. }| {
                let off = LARGEST * times * (16.0 * single + 2e-7);
                LARGEST * off + want.abs() * 2.0 * ulp
            })
        };
        let mut cases = Vec::new();
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            for gate in [[1, 1, 1], [1, 1, 640], [3, 5, 257]] {
                let layouts = [Plain, Cut(2), Swapped(0, 1), Swapped(1, 2)];
                cases.extend(layouts.map(|layout| case(gate, layout, activation, 1.0)));
            }
            // Where exponentials are larger than any number.
            cases.push(case([1, 1, 640], Plain, activation, 100.0));
            cases.push(case([1, 0, 640], Plain, activation, 1.0));
        }
        cases
    }
}

const SHADER: Shader = Shader {
    name: "gated",
    text: concat!(
        include_str!("../../../shaders/gated.wgsl"),
        include_str!("../../../shaders/activation.wgsl"),
    ),
    options: &[&["const ACTIVATION = 0u;", "const ACTIVATION = 1u;", "const ACTIVATION = 2u;"]],
};

#[cfg(feature = "cube")]
pub(crate) mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::{Activation, Gated};
    use crate::launch::{LANES, address_type, count, empty_like, primitive};

    const ROOT_OF_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;

    /// √(2/π)
    const ROOT: f32 = 0.797_884_6;

    /// `1 / (1 + exp(-x))`. Some GPUs make no number of `exp(100)`.
    #[cube]
    fn sigmoid(x: f32) -> f32 {
        1.0 / (1.0 + f32::exp(min(-x, 80.0)))
    }

    /// The activation of a number.
    #[cube]
    pub(crate) fn activated(x: f32, #[comptime] activation: Activation) -> f32 {
        if comptime!(activation == Activation::Silu) {
            x * sigmoid(x)
        } else if comptime!(activation == Activation::Gelu) {
            x * 0.5 * (1.0 + cubecl::frontend::Erf::erf(x * ROOT_OF_HALF))
        } else {
            x * sigmoid(2.0 * (x * x * 0.044715 + 1.0) * x * ROOT)
        }
    }

    #[cube(launch, address_type = "dynamic")]
    fn gated<E: Float>(
        gate: &Tensor<E>,
        up: &Tensor<E>,
        y: &mut Tensor<E>,
        invocations: usize,
        #[comptime] activation: Activation,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (tokens, width) = (gate.shape(1), gate.shape(2));
        let i = ABSOLUTE_POS % width;
        let token = ABSOLUTE_POS / width % tokens;
        let row = ABSOLUTE_POS / width / tokens;
        let x = f32::cast_from(gate[row * gate.stride(0) + token * gate.stride(1) + i * gate.stride(2)]);
        y[ABSOLUTE_POS] = E::cast_from(activated(x, activation))
            * up[row * up.stride(0) + token * up.stride(1) + i * up.stride(2)];
    }

    pub(super) fn launch(Gated { gate, up, activation }: Gated) -> burn::tensor::Tensor<3> {
        let invocations = gate.shape().num_elements();
        let (gate, up) = (primitive(gate), primitive(up));
        let y = empty_like(&gate);
        let elem = dtype_to_storage_type(gate.dtype);
        gated::launch(
            &y.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&gate, &up, &y]),
            gate.into_tensor_arg(),
            up.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            invocations,
            activation,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
