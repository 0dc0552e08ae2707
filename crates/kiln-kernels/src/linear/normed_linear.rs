//! A product fused with the operations around it in a decoder: a norm before it, and a gate or rotary
//! positions after it.
//!
//! Decoding a token this way launches few kernels, each of which reads its weights once. The root mean square
//! divides the product, and nothing is rounded between the steps. Tensor cores are given x times the scales,
//! rounded once. So results differ by a few roundings from those of separate steps.

use burn::tensor::{DType, Device, Tensor};
use kiln_core::need::RotaryPairs;
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order},
};

use crate::{
    attention::rotary::Rotary,
    linear::{
        Linear, activation::Activation, are_few_of_one_type, around::Then, gated::Gated, matrix::Matrix,
        most_rows, packed::PackedLayout, packed_lines,
    },
    norm::rms_norm::{NormOrder, RmsNorm},
    runtime::{
        choice::Implementation,
        kernel::{INVARIANT_UP_TO, Kernel},
        kernels::Kernels,
        shader::Shader,
    },
    testing::{
        case::{Case, LARGEST, Rounding, SUBNORMAL_SCALES},
        checked::Checked,
        cut::{Extent, cut},
        numbers::Plain,
    },
};

#[cfg(feature = "cube")]
use crate::{
    linear::around::{self, Around, Scales},
    runtime::launch::prefers_few_groups,
};

/// `then(norm(x) Wᵀ + b)`.
///
/// The GPU kernels take up to 16 rows of tokens ([`INVARIANT_UP_TO`](crate::INVARIANT_UP_TO)), or 64 where
/// CUDA multiplies with tensor cores. For more, run the steps: [`RmsNorm`], [`Linear`],
/// [`Gated`] or [`Rotary`]. [`is_fused`](Self::is_fused) tells which applies.
#[derive(Clone, Debug)]
pub struct NormedLinear {
    /// `[rows, tokens, in]`
    pub x: Tensor<3>,
    /// `[in]`: the weight of the norm
    pub scale: Tensor<1>,
    pub eps: f64,
    pub order: NormOrder,
    /// `[out, in]`
    pub weight: Matrix,
    /// `[out]`
    pub bias: Option<Tensor<1>>,
    pub then: Then,
}

impl Kernel for NormedLinear {
    const NAME: &'static str = "normed_linear";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        let [rows, tokens, input] = self.x.dims();
        assert_eq!(self.weight.columns(), input, "normed_linear: columns of the weight and x");
        assert_eq!(self.scale.dims(), [input], "normed_linear: scales and x");
        match &self.then {
            Then::Nothing => {}
            Then::Gate(_) => assert!(self.weight.rows().is_multiple_of(2), "normed_linear: halves"),
            Then::Rotate { cos, sin, heads, head_dim } => {
                let [tables, of_tokens, pairs] = cos.dims();
                let fits = (tables == 1 || tables == rows) && of_tokens == tokens && 2 * pairs <= *head_dim;
                assert!(fits && sin.dims() == cos.dims(), "normed_linear: cos {:?}", cos.dims());
                assert!(heads * head_dim <= self.weight.rows(), "normed_linear: {heads} heads");
            }
        }
        Self { scale: self.scale.cast(self.x.dtype()), ..self }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<3> {
        let Self { x, scale, eps, order, weight, bias, then } = self;
        let x = RmsNorm { x, weight: scale, eps, order }.reference();
        let y = Linear { x, weight, bias, residual: None }.reference();
        let [rows, tokens, output] = y.dims();
        match then {
            Then::Nothing => y,
            Then::Gate(activation) => {
                let (gate, up) = (y.clone().narrow(2, 0, output / 2), y.narrow(2, output / 2, output / 2));
                Gated { gate, up, by: activation.into() }.reference()
            }
            Then::Rotate { cos, sin, heads, head_dim } => {
                let len = heads * head_dim;
                let x = y.clone().narrow(2, 0, len).reshape([rows, tokens, heads, head_dim]).swap_dims(1, 2);
                let rotated =
                    Rotary { x, cos, sin, pairs: RotaryPairs::Halves }.checked().reference().swap_dims(1, 2);
                let rotated = rotated.reshape([rows, tokens, len]);
                match output - len {
                    0 => rotated,
                    left => Tensor::cat(vec![rotated, y.narrow(2, len, left)], 2),
                }
            }
        }
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        if self.is_for_few_rows() { Ok(around::wgsl::launch(self.into())) } else { Err(self) }
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        if self.is_for_few_rows() { Ok(around::cube::launch(Self::NAME, self.into())) } else { Err(self) }
    }
}

impl Checked for NormedLinear {
    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, _] = self.x.dims();
        [rows, tokens]
    }

    fn cube_is_invariant_up_to(&self) -> usize {
        most_rows(Self::NAME, &self.weight)
    }

    fn part(self, part: Extent) -> Self {
        let then = match self.then {
            Then::Rotate { cos, sin, heads, head_dim } => {
                let [_, tokens] = part.clone();
                let table = |table: Tensor<3>| match table.dims()[0] {
                    1 => table.narrow(1, tokens.start, tokens.len()),
                    _ => cut(table, &part, 1),
                };
                Then::Rotate { cos: table(cos), sin: table(sin), heads, head_dim }
            }
            then => then,
        };
        Self { x: cut(self.x, &part, 1), then, ..self }
    }

    fn part_of(whole: Tensor<3>, part: Extent) -> Tensor<3> {
        cut(whole, &part, 1)
    }

    fn cases() -> Vec<Case<Self>> {
        let of_weight_times = |factor: f32,
                               packed: Option<(Format, Arithmetic)>,
                               x: [usize; 3],
                               output: usize,
                               given: Given,
                               order: NormOrder| {
            let name = packed.map(|(format, arithmetic)| (format.name(), arithmetic));
            let inputs = Case::new((name, x, output, given, order, factor), move |numbers| {
                let then = match given {
                    Given::Nothing => Then::Nothing,
                    Given::Gate(activation) => Then::Gate(activation),
                    Given::Rotate { heads, head_dim, pairs, tables } => {
                        let mut table = || numbers.float32([tables, x[1], pairs]);
                        let (cos, sin) = (table(), table());
                        Then::Rotate { cos, sin, heads, head_dim }
                    }
                };
                Self {
                    x: numbers.tensor(x, Plain),
                    scale: numbers.tensor([x[2]], Plain),
                    eps: 0.5,
                    order,
                    weight: match packed {
                        Some((format, arithmetic)) => {
                            let layout = PackedLayout { format, order: Order::Rows };
                            let shape = [output, x[2]];
                            Matrix::Packed(numbers.packed_matrix_times(factor, shape, layout, arithmetic))
                        }
                        None => Matrix::Dense(numbers.tensor([output, x[2]], Plain)),
                    },
                    bias: output.is_multiple_of(3).then(|| numbers.tensor([output], Plain)),
                    then,
                }
            });
            let lacks = move |path: Implementation, dtype, device: &Device| {
                let takes = packed.is_none() || path.is_on_gpu();
                let few = x[0] * x[1] <= INVARIANT_UP_TO
                    || takes_many_rows(path, x, packed.is_some(), dtype, device);
                !takes || !few || given.lacks(path)
            };
            // Products of n numbers, with a mean square of 1, with scales of up to 1 + LARGEST. The reference
            // rounds the numbers twice, and the product; then it multiplies that by another product, or two
            // of them by sines.
            let case = match packed {
                Some((format, arithmetic)) => inputs.of_format(format, arithmetic),
                None => inputs,
            };
            let in_bytes = matches!(packed, Some((_, Arithmetic::Integers)));
            case.without_on(lacks).within(move |want, Rounding { single, ulp, .. }| {
                let n = x[2] as f64;
                let product = f64::from(factor) * LARGEST * (1.0 + LARGEST) * n.sqrt();
                // As in `linear`: rounding to bytes is off by half a step, of which the sum has six standard
                // deviations at most. Numbers of a mean square of 1 are 2 at most here, before their scales.
                let rounded = if in_bytes { product * 2.0 * 6.0 / (127.0 * 12f64.sqrt()) } else { 0.0 };
                let off = product * (single * (n.sqrt() + 16.0) + 4.0 * ulp) + rounded;
                match given {
                    Given::Nothing => off + want.abs() * ulp,
                    Given::Gate(_) => (product + LARGEST) * (2.0 * off + 4e-7) + want.abs() * 3.0 * ulp,
                    Given::Rotate { .. } => 2.0 * LARGEST * (off + product * ulp) + off + want.abs() * ulp,
                }
            })
        };
        let of_weight =
            |packed, x, output, given, order| of_weight_times(1.0, packed, x, output, given, order);
        let case = |x, output, given, order| of_weight(None, x, output, given, order);
        let floats = |format| Some((format, Arithmetic::Floats));
        let mut cases = Vec::new();
        let rotate = |heads, head_dim, pairs, tables| Given::Rotate { heads, head_dim, pairs, tables };
        let [order, other] = [NormOrder::CastThenScale, NormOrder::ScaleThenCast];
        for (rows, tokens) in [(1, 1), (2, 1), (1, 3), (4, 4), (2, 16)] {
            for (input, output, order) in [(7, 3, other), (80, 96, order), (1030, 42, other)] {
                cases.push(case([rows, tokens, input], output, Given::Nothing, order));
            }
            for (input, output) in [(257, 2), (1024, 42)] {
                cases.push(case([rows, tokens, input], output, Given::Gate(Activation::Silu), other));
            }
            for (output, given) in [
                (3 * 80, rotate(2, 80, 40, rows)),
                (4 * 20, rotate(3, 20, 4, 1)),
                // Not divisible by four.
                (3 * 10, rotate(2, 10, 5, 1)),
            ] {
                cases.push(case([rows, tokens, 96], output, given, order));
            }
        }
        for activation in Activation::ALL {
            cases.push(case([1, 3, 80], 96, Given::Gate(activation), order));
        }
        cases.push(case([1, 1, 4096], 16, rotate(1, 8, 4, 1), NormOrder::CastThenScale));
        cases.push(case([1, 5, 4100], 18, Given::Gate(Activation::Silu), NormOrder::CastThenScale));
        for (input, output, given) in [
            (80, 42, Given::Nothing),
            (1032, 42, Given::Gate(Activation::GeluTanh)),
            (96, 3 * 80, rotate(2, 80, 40, 1)),
        ] {
            cases.push(of_weight(
                floats(Format::Bf16),
                [1, 3, input],
                output,
                given,
                NormOrder::ScaleThenCast,
            ));
        }
        // Models launch it in every format.
        for format in Format::ALL.into_iter().filter(|format| packed_lines::pick(*format).is_some()) {
            let input = 2 * format.block().max(32);
            cases.push(of_weight(floats(format), [1, 3, input], 20, Given::Gate(Activation::Silu), order));
            // A number not divisible by 3: no bias hides a scale that is flushed to 0.
            let (x, given) = ([1, 1, input], Given::Nothing);
            cases.push(of_weight_times(SUBNORMAL_SCALES, floats(format), x, 8, given, order));
        }
        // On CUDA, tensor cores multiply up to 32 rows at once: whole and partial turns.
        cases.push(case([2, 12, 128], 20, Given::Gate(Activation::Silu), order).probed());
        for (x, output, given, order) in [
            ([1, 33, 40], 42, Given::Nothing, other),
            ([1, 64, 192], 3 * 80, rotate(2, 80, 40, 1), other),
            ([3, 13, 1032], 8170, Given::Nothing, order),
        ] {
            cases.push(case(x, output, given, order));
        }
        for (format, x, output, given, order) in [
            (Format::Q4_0, [2, 9, 96], 20, Given::Gate(Activation::Silu), order),
            (Format::Q4K, [1, 33, 512], 3 * 80, rotate(2, 80, 40, 1), other),
            (Format::Q6K, [1, 64, 256], 42, Given::Nothing, order),
            (Format::Q8_0, [3, 13, 1024], 8170, Given::Nothing, other),
        ] {
            cases.push(of_weight(floats(format), x, output, given, order));
        }
        // Tables share memory with sums, and zero points with scales.
        for (format, given) in [
            (Format::Nf4, Given::Gate(Activation::Silu)),
            (Format::Fp4, rotate(1, 8, 4, 1)),
            (Format::Int4In64, Given::Gate(Activation::Silu)),
            (Format::Int4In128, Given::Nothing),
            (Format::Int8, rotate(1, 8, 4, 1)),
        ] {
            cases.push(of_weight(floats(format), [1, 5, 384], 16, given, order));
        }
        // Vectors in bytes on wgpu, in each operation, and more than eight of them.
        for (format, x, output, given, order) in [
            (Format::Q4_0, [1, 1, 4096], 16, rotate(1, 8, 4, 1), order),
            (Format::Q8_0, [2, 1, 96], 3 * 80, rotate(2, 80, 40, 2), other),
            (Format::Q6K, [3, 5, 512], 42, Given::Nothing, other),
            (Format::Q4K, [4, 4, 256], 42, Given::Gate(Activation::GeluTanh), other),
        ] {
            cases.push(of_weight(Some((format, Arithmetic::Integers)), x, output, given, order));
        }
        for format in Format::ALL.into_iter().filter(|format| packed_lines::has_bytes(*format)) {
            let (in_bytes, input) = (Some((format, Arithmetic::Integers)), 2 * format.block().max(32));
            cases.push(of_weight(in_bytes, [1, 3, input], 20, Given::Gate(Activation::Silu), order));
        }
        cases
    }

    fn shaders() -> &'static [Shader] {
        // Uses the shaders of `linear`.
        &[]
    }
}

/// Whether a GPU implementation takes these vectors, which are more than a few.
#[cfg(feature = "cube")]
fn takes_many_rows(
    path: Implementation,
    x: [usize; 3],
    is_packed: bool,
    dtype: DType,
    device: &Device,
) -> bool {
    path == Implementation::Cube && around::cube::has_tiles(NormedLinear::NAME, x, is_packed, dtype, device)
}

#[cfg(not(feature = "cube"))]
fn takes_many_rows(_: Implementation, _: [usize; 3], _: bool, _: DType, _: &Device) -> bool {
    false
}

/// The operation after the product in a case.
#[derive(Clone, Copy, Debug)]
enum Given {
    Nothing,
    Gate(Activation),
    Rotate { heads: usize, head_dim: usize, pairs: usize, tables: usize },
}

impl Given {
    fn lacks(self, path: Implementation) -> bool {
        let by_fours = match self {
            Self::Rotate { head_dim, pairs, .. } => head_dim % 4 == 0 && pairs % 2 == 0,
            _ => true,
        };
        path == Implementation::Native || !by_fours
    }
}

impl NormedLinear {
    /// Whether [`Kernels::run`] computes this in one launch, or two, faster than separate steps. False for
    /// software GPUs: a launch costs little there, and every workgroup computes the norm.
    pub fn is_fused(&self, kernels: &Kernels) -> bool {
        #[cfg(feature = "cube")]
        let takes_launches = !prefers_few_groups(kernels.device());
        #[cfg(not(feature = "cube"))]
        let takes_launches = false;
        takes_launches && kernels.implementation_of::<Self>().is_on_gpu() && self.is_for_few_rows()
    }

    /// Whether the GPU kernels take the inputs.
    fn is_for_few_rows(&self) -> bool {
        let by_fours = match &self.then {
            // Pairs are combined within four neighbouring places.
            Then::Rotate { cos, head_dim, .. } => {
                head_dim.is_multiple_of(4) && cos.dims()[2].is_multiple_of(2)
            }
            _ => true,
        };
        by_fours
            && are_few_of_one_type(Self::NAME, &self.x, &self.weight, self.bias.iter().map(Tensor::dtype))
    }
}

#[cfg(feature = "cube")]
impl From<NormedLinear> for Around {
    fn from(NormedLinear { x, scale, eps, order, weight, bias, then }: NormedLinear) -> Self {
        Self { x, weight, bias, residual: None, norm: Some(Scales { scale, eps, order }), then }
    }
}
