//! Rotary positions (Su et al., 2021, <https://arxiv.org/abs/2104.09864>).
//!
//! `y₁ = x₁ cos − x₂ sin` and `y₂ = x₂ cos + x₁ sin` for the pairs of every head of
//! `[batch, heads, tokens, head_dim]`; dimensions from `rotary_dim` on are copied. A pair is
//! `(i, i + rotary_dim / 2)`, or `(2 i, 2 i + 1)`.
//!
//! Cosines and sines are rounded to the type of x, as in the reference. The products and their sum are
//! float32 and rounded once. The reference rounds each of the three; GPUs would not agree with it or with
//! each other, since they are free to contract a product and a sum.

#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, FloatDType, Tensor};
use kiln_core::need::RotaryPairs;

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

/// Rotates the first dimensions of every head in pairs, and copies the others.
///
/// # Shapes
/// The result has the shape of x.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// `[batch, heads, tokens, head_dim]`
    pub x: Tensor<4>,
    /// `[batch or 1, tokens, rotary_dim / 2]`, float32; rounded to the type of x before use
    pub cos: Tensor<3>,
    /// Like `cos`.
    pub sin: Tensor<3>,
    pub pairs: RotaryPairs,
}

impl Kernel for Rotary {
    const NAME: &'static str = "rotary";
    type Output = Tensor<4>;

    fn checked(self) -> Self {
        let Self { x, cos, sin, pairs: of } = self;
        let ([batch, _, tokens, head_dim], [tables, _, pairs]) = (x.dims(), cos.dims());
        let tables_fit = (tables == 1 || tables == batch) && 2 * pairs <= head_dim;
        assert!(
            tables_fit && cos.dims() == [tables, tokens, pairs],
            "rotary: cos {:?} and x {:?}",
            cos.dims(),
            x.dims()
        );
        assert_eq!(sin.dims(), cos.dims(), "rotary: sin and cos");
        Self { x, cos: cos.cast(FloatDType::F32), sin: sin.cast(FloatDType::F32), pairs: of }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<4> {
        let Self { x, cos, sin, pairs: of } = self;
        let dtype = x.dtype();
        let [batch, heads, tokens, dim] = x.dims();
        let [_, _, pairs] = cos.dims();
        let table = |table: Tensor<3>| table.cast(dtype).cast(DType::F32).unsqueeze_dim::<4>(1);
        let (cos, sin) = (table(cos), table(sin));
        // The axis of both numbers of a pair.
        let (shape, axis) = match of {
            RotaryPairs::Halves => ([batch, heads, tokens, 2, pairs], 3),
            RotaryPairs::Adjacent => ([batch, heads, tokens, pairs, 2], 4),
        };
        let both = x.clone().narrow(3, 0, 2 * pairs).cast(DType::F32).reshape(shape);
        let number = |which| both.clone().narrow(axis, which, 1).reshape([batch, heads, tokens, pairs]);
        let [first, second] = [0, 1].map(number);

        let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
        let rotated_second = second * cos + first * sin;
        let rotated = Tensor::stack::<5>(vec![rotated_first, rotated_second], axis);
        let mut parts = vec![rotated.reshape([batch, heads, tokens, 2 * pairs]).cast(dtype)];
        if 2 * pairs < dim {
            parts.push(x.narrow(3, 2 * pairs, dim - 2 * pairs));
        }
        Tensor::cat(parts, 3)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<4>, Self> {
        native::rotated(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<4>, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, empty_like, primitive, strides},
            shaders::rotary::Info,
        };

        let Self { x, cos, sin, pairs: of } = self;
        let [batch, heads, tokens, head_dim] = x.dims();
        let [tables, _, pairs] = cos.dims();
        let [pair_stride, pair_width] = of.strides(pairs).map(|stride| stride as u32);
        let (x, cos, sin) = (primitive(x), primitive(cos), primitive(sin));
        let y = empty_like(&x);
        let [[cos0, cos1, cos2], [sin0, sin1, sin2]] = [strides(&cos), strides(&sin)];
        let each = u32::from(tables > 1);
        let invocations = batch * heads * tokens * (head_dim - pairs);
        let info = Info {
            x_strides: strides(&x),
            cos_strides: [cos0 * each, cos1, cos2],
            heads: heads as u32,
            sin_strides: [sin0 * each, sin1, sin2],
            tokens: tokens as u32,
            head_dim: head_dim as u32,
            pairs: pairs as u32,
            pair_stride,
            pair_width,
            invocations: invocations as u32,
        };
        let launch = Launch::new(&SHADER, x.dtype, &y.client);
        launch.run(invocations.div_ceil(LANES), [&x, &cos, &sin, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<4>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for Rotary {
    fn extent(&self) -> [usize; 2] {
        let [rows, _, tokens, _] = self.x.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        let [_, tokens] = part.clone();
        let table = |table: Tensor<3>| match table.dims()[0] {
            1 => table.narrow(1, tokens.start, tokens.len()),
            _ => cut(table, &part, 1),
        };
        Self { x: cut(self.x, &part, 2), cos: table(self.cos), sin: table(self.sin), pairs: self.pairs }
    }

    fn part_of(whole: Tensor<4>, part: Extent) -> Tensor<4> {
        cut(whole, &part, 2)
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let case_of = |pairs: RotaryPairs, x: [usize; 4], layout: Layout, rotated: usize, tables: usize| {
            let inputs = Case::new((pairs, x, layout, rotated, tables), move |numbers| {
                let mut table = || numbers.float32([tables, x[2], rotated / 2]);
                let (cos, sin) = (table(), table());
                Self { x: numbers.tensor(x, layout), cos, sin, pairs }
            });
            // Two products of at most LARGEST / 2 by LARGEST, with one factor rounded, and their sum.
            inputs.within(|want, Rounding { single, ulp, .. }| {
                LARGEST * LARGEST * (2.0 * single + ulp) + want.abs() * ulp
            })
        };
        let case = |x, layout, rotated, tables| case_of(RotaryPairs::Halves, x, layout, rotated, tables);
        let mut cases = Vec::new();
        for (head_dim, rotated) in [(2, 2), (12, 2), (80, 32), (128, 128)] {
            let adjacent = |x, layout, tables| case_of(RotaryPairs::Adjacent, x, layout, rotated, tables);
            cases.push(adjacent([1, 8, 1, head_dim], Plain, 1));
            cases.push(adjacent([3, 2, 5, head_dim], Swapped(1, 2), 3));
        }
        for (head_dim, rotated) in
            [(8, 8), (12, 12), (12, 2), (64, 64), (80, 32), (80, 80), (96, 96), (128, 64), (256, 256)]
        {
            for (batch, heads, tokens) in [(1, 1, 1), (1, 8, 1), (3, 2, 5)] {
                let x = [batch, heads, tokens, head_dim];
                cases.push(case(x, Plain, rotated, batch));
                cases.push(case(x, Swapped(1, 2), rotated, 1));
            }
        }
        cases.push(case([3, 2, 5, 12], Cut(2), 8, 3));
        cases.push(case([3, 2, 5, 12], Swapped(2, 3), 12, 3));
        cases
    }
}

const SHADER: Shader = Shader {
    name: "rotary",
    bindings: &[reads("x"), reads("cosines"), reads("sines"), writes("y")],
    text: include_str!("../../../../shaders/rotary.wgsl"),
    options: &[],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::Rotary;
    use crate::runtime::launch::{LANES, address_type, count, empty_like, primitive};

    #[cube(launch, address_type = "dynamic")]
    fn rotary<E: Float>(
        x: &Tensor<E>,
        cos: &Tensor<f32>,
        sin: &Tensor<f32>,
        y: &mut Tensor<E>,
        // 0 if all sequences share their angles.
        each: usize,
        pair_stride: usize,
        pair_width: usize,
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
            let i = place * pair_stride;
            let first = f32::cast_from(x[x_vector + i * x.stride(3)]);
            let second = f32::cast_from(x[x_vector + (i + pair_width) * x.stride(3)]);
            y[y_vector + i] = E::cast_from(first * c - second * s);
            y[y_vector + i + pair_width] = E::cast_from(second * c + first * s);
        }
    }

    pub(super) fn launch(Rotary { x, cos, sin, pairs: of }: Rotary) -> burn::tensor::Tensor<4> {
        let [batch, heads, tokens, head_dim] = x.dims();
        let [tables, _, pairs] = cos.dims();
        let (x, cos, sin) = (primitive(x), primitive(cos), primitive(sin));
        let y = empty_like(&x);
        let invocations = batch * heads * tokens * (head_dim - pairs);
        let [pair_stride, pair_width] = of.strides(pairs);
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
            pair_stride,
            pair_width,
            invocations,
            elem,
        );
        burn::tensor::Tensor::from_primitive::<Cube>(y)
    }
}
