//! The gated activation of a feed-forward block (Shazeer, 2020, <https://arxiv.org/abs/2002.05202>).
//!
//! `y = act(gate) · up`, element by element, for `[rows, tokens, width]`. The activation is float32, whatever
//! the type of the gate, and rounded to that type once before the multiplication, as in the reference. A
//! [clamped](Gate::Clamped) gate is float32, and rounded once.

#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Tensor, activation::sigmoid};

use crate::{
    linear::activation::Activation,
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

/// The function of a gate and of the values that it lets through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// `act(gate) · up`
    Activated(Activation),
    /// `g / (1 + exp(-alpha · g)) · (u + 1)` for `g = min(gate, limit)` and `u = max(-limit, min(up, limit))`
    /// (`GptOssExperts` of transformers)
    Clamped { alpha: f32, limit: f32 },
}

impl From<Activation> for Gate {
    fn from(activation: Activation) -> Self {
        Self::Activated(activation)
    }
}

impl Gate {
    /// Index of the function among those of the shader, and its numbers.
    #[cfg(feature = "wgpu")]
    fn option(self) -> (usize, [f32; 2]) {
        match self {
            Self::Activated(activation) => (activation as usize, [0.0; 2]),
            Self::Clamped { alpha, limit } => (4, [alpha, limit]),
        }
    }
}

/// The gated values of a feed-forward block, between its projections.
///
/// # Shapes
/// The result has the shape of the gate.
#[derive(Clone, Debug)]
pub struct Gated {
    /// `[rows, tokens, width]`
    pub gate: Tensor<3>,
    /// The factors of the gate, in its shape; cast to its type.
    pub up: Tensor<3>,
    pub by: Gate,
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
        let Self { gate, up, by } = self;
        let dtype = gate.dtype();
        let gate = gate.cast(DType::F32);
        match by {
            Gate::Activated(activation) => activation.of(gate).cast(dtype) * up,
            Gate::Clamped { alpha, limit } => {
                let gate = gate.clamp_max(limit);
                let up = up.cast(DType::F32).clamp(-limit, limit);
                (gate.clone() * sigmoid(gate * alpha) * (up + 1.0)).cast(dtype)
            }
        }
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<3>, Self> {
        native::gated(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, empty_like, primitive, strides},
            shaders::gated::Info,
        };

        let Self { gate, up, by } = self;
        let (option, [alpha, limit]) = by.option();
        let [_, tokens, width] = gate.dims();
        let invocations = gate.shape().num_elements();
        let (gate, up) = (primitive(gate), primitive(up));
        let y = empty_like(&gate);
        let info = Info {
            gate_strides: strides(&gate),
            tokens: tokens as u32,
            up_strides: strides(&up),
            width: width as u32,
            invocations: invocations as u32,
            alpha,
            limit,
        };
        let launch = Launch::new(&SHADER, gate.dtype, &y.client).with(&[option]);
        launch.run(invocations.div_ceil(LANES), [&gate, &up, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for Gated {
    cut_into_tokens!(gate, up);

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        // The gate is `times` times as large as the usual inputs.
        let case_of = |gate: [usize; 3], layout: Layout, by: Gate, times: f64| {
            let inputs = Case::new((gate, layout, by, times), move |numbers| {
                let up = numbers.tensor(gate, Plain);
                Self { gate: numbers.tensor(gate, layout) * times, up, by }
            });
            // The error of the activation is a few roundings of its argument, the error of an approximation
            // of the normal distribution, and a rounding; it is then multiplied by at most LARGEST, and
            // rounded.
            inputs.within(move |want, Rounding { single, ulp, .. }| {
                let off = LARGEST * times * (16.0 * single + 2e-7);
                // A clamped gate lets through one more.
                (LARGEST + 1.0) * off + want.abs() * 2.0 * ulp
            })
        };
        let case =
            |gate, layout, activation: Activation, times| case_of(gate, layout, activation.into(), times);
        let mut cases = Vec::new();
        for (alpha, limit) in [(1.702, 7.0), (0.5, 0.25)] {
            let clamped = Gate::Clamped { alpha, limit };
            for layout in [Plain, Cut(2), Swapped(1, 2)] {
                cases.extend([1.0, 100.0].map(|times| case_of([3, 5, 257], layout, clamped, times)));
            }
        }
        for activation in Activation::ALL {
            for gate in [[1, 1, 1], [1, 1, 640], [3, 5, 257]] {
                let layouts = [Plain, Cut(2), Swapped(0, 1), Swapped(1, 2)];
                cases.extend(layouts.map(|layout| case(gate, layout, activation, 1.0)));
            }
            // With exponentials larger than any number.
            cases.push(case([1, 1, 640], Plain, activation, 100.0));
            cases.push(case([1, 0, 640], Plain, activation, 1.0));
        }
        cases
    }
}

const SHADER: Shader = Shader {
    name: "gated",
    bindings: &[reads("gate"), reads("up"), writes("y")],
    text: concat!(
        include_str!("../../../../shaders/gated.wgsl"),
        include_str!("../../../../shaders/activation.wgsl"),
    ),
    options: &[|| {
        &[
            "const ACTIVATION = 0u;",
            "const ACTIVATION = 1u;",
            "const ACTIVATION = 2u;",
            "const ACTIVATION = 3u;",
            "const ACTIVATION = 4u;",
        ]
    }],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::{Gate, Gated};
    use crate::{
        linear::activation::{
            Activation,
            cube::{activated, sigmoid},
        },
        runtime::launch::{LANES, address_type, count, empty_like, primitive},
    };

    #[cube(launch, address_type = "dynamic")]
    fn gated<E: Float>(
        gate: &Tensor<E>,
        up: &Tensor<E>,
        y: &mut Tensor<E>,
        invocations: usize,
        alpha: f32,
        limit: f32,
        // `None`: clamped
        #[comptime] activation: Option<Activation>,
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
        let up = up[row * up.stride(0) + token * up.stride(1) + i * up.stride(2)];
        if comptime!(activation.is_some()) {
            let activation = comptime!(activation.unwrap_or(Activation::Silu));
            y[ABSOLUTE_POS] = E::cast_from(activated(x, activation)) * up;
        } else {
            let gate = min(x, limit);
            let up = clamp(f32::cast_from(up), -limit, limit);
            y[ABSOLUTE_POS] = E::cast_from(gate * sigmoid(alpha * gate) * (up + 1.0));
        }
    }

    pub(super) fn launch(Gated { gate, up, by }: Gated) -> burn::tensor::Tensor<3> {
        let (activation, [alpha, limit]) = match by {
            Gate::Activated(activation) => (Some(activation), [0.0; 2]),
            Gate::Clamped { alpha, limit } => (None, [alpha, limit]),
        };
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
            alpha,
            limit,
            activation,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
