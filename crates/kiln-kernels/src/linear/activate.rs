//! The activation of a feed-forward block without a gate (Vaswani et al., 2017,
//! <https://arxiv.org/abs/1706.03762>).
//!
//! `y = act(x)`, element by element, for `[rows, tokens, width]`. The activation is float32, whatever the
//! type of x, and rounded to that type once.

#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Tensor};

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

/// `act(x)`, which a feed-forward block without a gate computes between its projections.
///
/// # Shapes
/// The result has the shape of x.
#[derive(Clone, Debug)]
pub struct Activate {
    /// `[rows, tokens, width]`
    pub x: Tensor<3>,
    pub activation: Activation,
}

impl Kernel for Activate {
    const NAME: &'static str = "activate";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        self
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<3> {
        let dtype = self.x.dtype();
        self.activation.of(self.x.cast(DType::F32)).cast(dtype)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<3>, Self> {
        native::activated(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, empty_like, primitive, strides},
            shaders::activate::Info,
        };

        let Self { x, activation } = self;
        let [_, tokens, width] = x.dims();
        let invocations = x.shape().num_elements();
        let x = primitive(x);
        let y = empty_like(&x);
        let info = Info {
            x_strides: strides(&x),
            tokens: tokens as u32,
            width: width as u32,
            invocations: invocations as u32,
        };
        let launch = Launch::new(&SHADER, x.dtype, &y.client).with(&[activation as usize]);
        launch.run(invocations.div_ceil(LANES), [&x, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for Activate {
    cut_into_tokens!(x);

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        // x is `times` times as large as the usual inputs.
        let case = |x: [usize; 3], layout: Layout, activation, times: f64| {
            let inputs = Case::new((x, layout, activation, times), move |numbers| Self {
                x: numbers.tensor(x, layout) * times,
                activation,
            });
            // As for `gated`.
            inputs.within(move |want, Rounding { single, ulp, .. }| {
                LARGEST * times * (16.0 * single + 2e-7) + want.abs() * 2.0 * ulp
            })
        };
        let mut cases = Vec::new();
        for activation in Activation::ALL {
            for x in [[1, 1, 1], [1, 1, 640], [3, 5, 257]] {
                let layouts = [Plain, Cut(2), Swapped(0, 1), Swapped(1, 2)];
                cases.extend(layouts.map(|layout| case(x, layout, activation, 1.0)));
            }
            // With exponentials larger than any number.
            cases.push(case([1, 1, 640], Plain, activation, 100.0));
            cases.push(case([1, 0, 640], Plain, activation, 1.0));
        }
        cases
    }
}

const SHADER: Shader = Shader {
    name: "activate",
    bindings: &[reads("x"), writes("y")],
    text: concat!(
        include_str!("../../../../shaders/activate.wgsl"),
        include_str!("../../../../shaders/activation.wgsl"),
    ),
    options: &[|| {
        &[
            "const ACTIVATION = 0u;",
            "const ACTIVATION = 1u;",
            "const ACTIVATION = 2u;",
            "const ACTIVATION = 3u;",
        ]
    }],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::Activate;
    use crate::{
        linear::activation::{Activation, cube::activated},
        runtime::launch::{LANES, address_type, count, empty_like, primitive},
    };

    #[cube(launch, address_type = "dynamic")]
    fn activate<E: Float>(
        x: &Tensor<E>,
        y: &mut Tensor<E>,
        invocations: usize,
        #[comptime] activation: Activation,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (tokens, width) = (x.shape(1), x.shape(2));
        let i = ABSOLUTE_POS % width;
        let token = ABSOLUTE_POS / width % tokens;
        let row = ABSOLUTE_POS / width / tokens;
        let value = f32::cast_from(x[row * x.stride(0) + token * x.stride(1) + i * x.stride(2)]);
        y[ABSOLUTE_POS] = E::cast_from(activated(value, activation));
    }

    pub(super) fn launch(Activate { x, activation }: Activate) -> burn::tensor::Tensor<3> {
        let invocations = x.shape().num_elements();
        let x = primitive(x);
        let y = empty_like(&x);
        let elem = dtype_to_storage_type(x.dtype);
        activate::launch(
            &y.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&x, &y]),
            x.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            invocations,
            activation,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
