//! `y = x Wᵀ + b + r` for `[rows, tokens, in]` and weights `[out, in]`, as checkpoints store them.
//!
//! Decoding multiplies each weight by a handful of vectors, once a token: it takes as long as reading the weights does.
//! The native code reads each weight once, on all threads. Since both factors are stored along the sum, it rearranges
//! neither, which is what a general product spends its time on where there are few rows. So do the GPU kernels for few
//! rows. Prefill has many: matrix units multiply them, where wgpu offers them (`tiles.rs`).

#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "cpu")]
mod native;
#[cfg(feature = "wgpu")]
mod tiles;
#[cfg(feature = "cube")]
mod unpacked;
#[cfg(feature = "wgpu")]
pub(crate) mod wgsl;

#[cfg(feature = "cube")]
pub(crate) use cube::{
    Four, add_products_of_pair, add_up, added_up, dot, four, four_at, four_or_zero, numbers_of_pair,
    read_half, sum_of,
};
#[cfg(feature = "cpu")]
pub(crate) use native::{Group, products_of_groups};

use burn::tensor::{DType, Device, Tensor};

use kiln_weights::{Format, streams::Order};

use crate::{
    Arithmetic, Kernel, Matrix, PackedLayout, Path,
    cases::{Case, Cut, LARGEST, Layout, Plain, Rounding, SUBNORMAL_SCALES, Swapped},
    invariance::{Extent, cut},
    kernel::INVARIANT_UP_TO,
    packed_lines, product,
    shader::{Lines, Shader},
};
#[cfg(feature = "cube")]
use crate::{
    NormOrder, Unpack,
    launch::enough,
    normed_linear::{NormedLinear, Then},
};

/// `y = x Wᵀ + b + r`: `[rows, tokens, out]`.
///
/// The GPU kernels take up to 16 rows of tokens ([`INVARIANT_UP_TO`]). For more, the reference runs: Burn's matrix products
/// are faster there. But in float16, on wgpu devices that have matrix units, a shader that uses them takes more rows, too.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[rows, tokens, in]`
    pub x: Tensor<3>,
    /// `[out, in]`, as checkpoints store it
    pub weight: Matrix,
    /// `[out]`
    pub bias: Option<Tensor<1>>,
    /// `[rows, tokens, out]`
    pub residual: Option<Tensor<3>>,
}

impl Kernel for Linear {
    const NAME: &'static str = "linear";
    type Output = Tensor<3>;

    fn checked(self) -> Self {
        let [rows, tokens, input] = self.x.dims();
        let result = [rows, tokens, self.weight.rows()];
        assert_eq!(self.weight.columns(), input, "linear: columns of the weight and x");
        let fits = self.residual.as_ref().is_none_or(|residual| residual.dims() == result);
        assert!(fits, "linear: the residual and the result");
        self
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn work(&self) -> u64 {
        let [rows, tokens, input] = self.x.dims();
        work_of(rows * tokens, input, self.weight.rows())
    }

    fn reference(self) -> Tensor<3> {
        let Self { x, weight, bias, residual } = self;
        let [rows, tokens, input] = x.dims();
        let weight = weight.numbers().cast(x.dtype());
        let [output, _] = weight.dims();
        // One product of two matrices, which the CPU backend computes in parallel; one product a row it would not.
        let y = products_of_rows(x.reshape([rows * tokens, input]), weight, rows * tokens <= INVARIANT_UP_TO);
        finished(y.reshape([rows, tokens, output]), bias, residual)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<3>, Self> {
        native::products_of(&self).ok_or(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<3>, Self> {
        if self.is_for_few_rows() {
            return Ok(wgsl::launch(self.into()));
        }
        match &self.weight {
            Matrix::Dense(_) => tiles::launch(self),
            Matrix::Packed(_) => unpacked::product_of(self, Unpack::wgsl, tiles::launch),
        }
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        match &self.weight {
            _ if self.is_for_few_rows() => Ok(cube::launch(self.into())),
            Matrix::Dense(_) => Err(self),
            Matrix::Packed(_) => unpacked::product_of(self, Unpack::cube, Err),
        }
    }

    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, _] = self.x.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        let residual = self.residual.map(|residual| cut(residual, &part, 1));
        Self { x: cut(self.x, &part, 1), residual, ..self }
    }

    fn part_of(whole: Tensor<3>, part: Extent) -> Tensor<3> {
        cut(whole, &part, 1)
    }

    fn shaders() -> &'static [Shader] {
        #[cfg(feature = "wgpu")]
        return &[SHADER, PACKED, tiles::SHADER];
        #[cfg(not(feature = "wgpu"))]
        &[SHADER, PACKED]
    }

    fn cases() -> Vec<Case<Self>> {
        // Sums of n products in another order, some devices' in the type itself; they are rounded before a residual is
        // added, or only then.
        let within = |case: Case<Self>, input: usize| {
            case.within(move |want, Rounding { single, ulp, .. }| {
                let n = input as f64;
                LARGEST * LARGEST * (n.sqrt() + 1.0) * n.sqrt() * single.max(ulp) + want.abs() * ulp
            })
        };
        let case = |x: [usize; 3], layout: Layout, output: usize, bias: bool, residual: bool| {
            let inputs = Case::new((x, layout, output, bias, residual), move |numbers| {
                let weight = Matrix::Dense(numbers.tensor([output, x[2]], Plain));
                let bias = bias.then(|| numbers.tensor([output], Plain));
                let residual = residual.then(|| numbers.tensor([x[0], x[1], output], Cut(2)));
                Self { x: numbers.tensor(x, layout), weight, bias, residual }
            });
            let lacks = move |path, dtype, device: &Device| {
                let few = x[0] * x[1] <= INVARIANT_UP_TO;
                path != Path::Native && !few && !takes_many_rows(path, dtype, device)
            };
            within(inputs.without_on(lacks), x[2])
        };
        let packed_times =
            |factor: f32, packing: PackedLayout, arithmetic, x: [usize; 3], layout: Layout, output: usize| {
                let name =
                    ("packed", packing.format.name(), packing.order, arithmetic, x, layout, output, factor);
                let inputs = Case::new(name, move |numbers| {
                    let weight = numbers.packed_matrix_times(factor, [output, x[2]], packing, arithmetic);
                    let weight = Matrix::Packed(weight);
                    let bias = output.is_multiple_of(2).then(|| numbers.tensor([output], Plain));
                    let residual =
                        output.is_multiple_of(5).then(|| numbers.tensor([x[0], x[1], output], Cut(2)));
                    Self { x: numbers.tensor(x, layout), weight, bias, residual }
                });
                let lacks = move |path, _| !takes_packed(path, packing);
                // Vectors that are rounded to bytes are off by up to half a step, evenly: the sum has a standard deviation, and no
                // result is six of them off.
                let (step, largest) = (LARGEST / 127.0, LARGEST * f64::from(factor));
                let rounded = 6.0 * (x[2] as f64).sqrt() * largest * step / 12f64.sqrt();
                let rounded = if arithmetic == Arithmetic::Integers { rounded } else { 0.0 };
                inputs.of_format(packing.format).without(lacks).within(
                    move |want, Rounding { single, ulp, .. }| {
                        let n = x[2] as f64;
                        let exact = LARGEST * largest * (n.sqrt() + 1.0) * n.sqrt() * single.max(ulp);
                        exact + want.abs() * ulp + rounded
                    },
                )
            };
        let packed = |packing, arithmetic, x, layout, output| {
            packed_times(1.0, packing, arithmetic, x, layout, output)
        };
        let mut cases = Vec::new();
        for (rows, tokens) in [(1, 1), (2, 1), (1, 3), (2, 2), (1, 5), (4, 4), (2, 16)] {
            for (input, output) in
                [(1, 1), (7, 3), (80, 96), (257, 300), (1024, 70), (1030, 41), (1032, 40), (520, 258)]
            {
                let (bias, residual) = (output % 2 == 0, output % 3 == 0);
                cases.push(case([rows, tokens, input], Plain, output, bias, residual));
            }
            cases.push(case([rows, tokens, 96], Swapped(0, 1), 7, true, false));
            cases.push(case([rows, tokens, 96], Swapped(1, 2), 7, true, true));
        }
        // Long rows, which many lanes go along, and an odd number of fours.
        for tokens in [1, 5] {
            cases.push(case([1, tokens, 4096], Plain, 9, false, true));
            cases.push(case([1, tokens, 4100], Plain, 6, true, false));
            cases.push(case([1, tokens, 4103], Plain, 2, false, false));
        }
        // Rows that lie apart, by a number that four divides and by one that it does not.
        cases.push(case([2, 2, 96], Cut(1), 70, true, false));
        cases.push(case([2, 2, 96], Cut(2), 70, false, true));
        // Many rows, which matrix units multiply in tiles of 64 rows: whole ones and parts, whole steps along the sum and parts.
        for x in [[1, 17, 32], [3, 43, 48], [1, 64, 40], [3, 43, 7], [1, 65, 257], [2, 65, 1040]] {
            // An odd number of them: tests of float16 take every second case.
            let outputs = [
                (66, true, true),
                (64, false, false),
                (1, true, false),
                (130, false, true),
                (65, true, true),
            ];
            cases.extend(outputs.map(|(output, bias, residual)| case(x, Plain, output, bias, residual)));
        }
        for layout in [Swapped(0, 1), Swapped(1, 2), Cut(1), Cut(2)] {
            cases.push(case([3, 43, 96], layout, 70, true, false));
            cases.push(case([3, 43, 96], layout, 70, false, true));
        }
        // Packed weights.
        for format in Format::ALL {
            let block = format.block().max(32);
            for (order, arithmetic) in [
                (Order::Rows, Arithmetic::Floats),
                (Order::Sixteens, Arithmetic::Floats),
                (Order::Sixteens, Arithmetic::Integers),
            ] {
                let packing = PackedLayout { format, order };
                // There are many formats, and compilers of shaders take their time.
                let batches = match order {
                    Order::Rows => &[(1, 5), (2, 16)][..],
                    Order::Sixteens => &[(1, 1), (1, 5), (2, 16), (2, 1), (1, 3), (4, 4)],
                };
                for (i, &(rows, tokens)) in batches.iter().enumerate() {
                    let (blocks, output) = [(1, 1), (3, 96), (4, 41), (16, 9)][(i + format as usize) % 4];
                    cases.push(packed(packing, arithmetic, [rows, tokens, blocks * block], Plain, output));
                }
                // No bias or residual hides a scale that is taken for 0.
                let x = [1, 3, 2 * block];
                cases.push(packed_times(SUBNORMAL_SCALES, packing, arithmetic, x, Plain, 11));
                if order == Order::Sixteens || format == Format::Q4_0 {
                    cases.push(packed(packing, arithmetic, [2, 2, 2 * block], Swapped(1, 2), 70));
                    cases.push(packed(packing, arithmetic, [2, 2, 2 * block], Cut(2), 70));
                }
            }
        }
        // Enough for the larger tiles.
        cases.push(case([2, 520, 48], Plain, 1930, true, false).probed());
        cases.push(case([2, 520, 24], Plain, 1930, true, false));
        cases.push(case([1, 65, 48], Plain, 66, true, true).probed());
        cases
    }
}

/// [`Kernel::work`] of a product.
fn work_of(rows: usize, input: usize, output: usize) -> u64 {
    // Few rows take as long as reading the weights, and their steps may be recorded.
    if rows > INVARIANT_UP_TO { rows as u64 * input as u64 * output as u64 } else { 0 }
}

/// Whether an implementation for GPUs takes more than a few rows.
#[cfg(feature = "wgpu")]
fn takes_many_rows(path: Path, dtype: DType, device: &Device) -> bool {
    path == Path::Wgsl && tiles::takes(dtype, device)
}

#[cfg(not(feature = "wgpu"))]
fn takes_many_rows(_: Path, _: DType, _: &Device) -> bool {
    false
}

/// A product with its bias and residual.
fn finished(y: Tensor<3>, bias: Option<Tensor<1>>, residual: Option<Tensor<3>>) -> Tensor<3> {
    let y = match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    };
    match residual {
        Some(residual) => y + residual,
        None => y,
    }
}

/// `x Wᵀ` for `[rows, in]` and `[out, in]`, in Burn operations: row by row, or all at once.
pub(crate) fn products_of_rows(x: Tensor<2>, weight: Tensor<2>, row_by_row: bool) -> Tensor<2> {
    let weight = weight.transpose();
    match x.dims()[0] {
        // How a backend adds up depends on the number of rows.
        n @ 2.. if row_by_row => {
            let row = |row| product(x.clone().narrow(0, row, 1), weight.clone());
            Tensor::cat((0..n).map(row).collect(), 0)
        }
        _ => product(x, weight),
    }
}

#[cfg(feature = "cube")]
impl Linear {
    /// Whether the GPU kernels take it.
    fn is_for_few_rows(&self) -> bool {
        let others = self.bias.iter().map(Tensor::dtype).chain(self.residual.iter().map(Tensor::dtype));
        are_few_of_one_type(&self.x, &self.weight, others)
    }
}

/// Whether an implementation computes with packed weights.
pub(crate) fn takes_packed(path: Path, PackedLayout { format, order }: PackedLayout) -> bool {
    match path {
        Path::Reference => true,
        Path::Native => order == Order::Sixteens,
        Path::Wgsl | Path::Cube => order == Order::Rows && packed_lines::pick(format).is_some(),
    }
}

/// Whether the GPU kernels take vectors `[rows, tokens, in]` and a weight, with tensors of the types `others`.
pub(crate) fn are_few_of_one_type(
    x: &Tensor<3>,
    weight: &Matrix,
    others: impl Iterator<Item = DType>,
) -> bool {
    let ([rows, tokens, input], output) = (x.dims(), weight.rows());
    let of_one_type = others.chain([weight.dtype()]).all(|dtype| dtype == x.dtype());
    let is_read = match weight {
        Matrix::Dense(_) => true,
        Matrix::Packed(packed) => takes_packed(Path::Wgsl, packed.layout),
    };
    is_read && of_one_type && rows * tokens <= INVARIANT_UP_TO && rows * tokens * input * output > 0
}

/// A product with what is around it, for the GPU kernels.
#[cfg(feature = "cube")]
#[derive(Debug)]
pub(crate) struct Around {
    x: Tensor<3>,
    weight: Matrix,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<3>>,
    norm: Option<Scales>,
    then: Then,
}

/// What normed numbers are multiplied by.
#[cfg(feature = "cube")]
#[derive(Debug)]
pub(crate) struct Scales {
    scale: Tensor<1>,
    eps: f64,
    order: NormOrder,
}

#[cfg(feature = "cube")]
impl From<Linear> for Around {
    fn from(Linear { x, weight, bias, residual }: Linear) -> Self {
        Self { x, weight, bias, residual, norm: None, then: Then::Nothing }
    }
}

#[cfg(feature = "cube")]
impl From<NormedLinear> for Around {
    fn from(NormedLinear { x, scale, eps, order, weight, bias, then }: NormedLinear) -> Self {
        Self { x, weight, bias, residual: None, norm: Some(Scales { scale, eps, order }), then }
    }
}

#[cfg(feature = "cube")]
impl Then {
    /// Places in the order of work: rows of the weight that meet are in one four.
    fn places(&self, output: usize) -> usize {
        match self {
            Self::Gate(_) => (output / 2).div_ceil(2) * 4,
            Self::Nothing | Self::Rotate { .. } => output,
        }
    }

    /// Numbers of a result.
    fn width(&self, output: usize) -> usize {
        match self {
            Self::Gate(_) => output / 2,
            Self::Nothing | Self::Rotate { .. } => output,
        }
    }

    /// Which of [`FUSED`] it is.
    #[cfg(feature = "wgpu")]
    fn option(&self, normed: bool) -> usize {
        match self {
            Self::Nothing => usize::from(normed),
            Self::Gate(activation) => 2 + *activation as usize,
            Self::Rotate { .. } => 5,
        }
    }
}

/// Which workgroup has what. Shapes alone say it: a captured step is replayed.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharing {
    /// Eight lanes times this number go along a row of the weight: a power of 2, up to 32. It does not depend on the rows of x, so that sums
    /// are the same for any number of them.
    pub(crate) splits: usize,
    /// Rows of x that a workgroup has: 1, 2, 4 or 8.
    together: usize,
    pub(crate) workgroups: usize,
}

#[cfg(feature = "cube")]
impl Sharing {
    pub(crate) fn new(rows: usize, input: usize, output: usize, device: &Device) -> Self {
        /// Numbers of a row of the result that a workgroup makes, where eight lanes go along a row of the weight.
        const OUTPUTS: usize = crate::launch::LANES / 8 * 4;
        /// Numbers along which eight lanes are worth having.
        const WORTH: usize = 128;
        /// All lanes of a workgroup.
        const MOST_SPLITS: usize = crate::launch::LANES / 8;
        /// Rows that there are registers for.
        const MOST: usize = 8;

        let most = (input / WORTH).min(enough(device, 1024) * OUTPUTS / output);
        let splits = 1 << most.clamp(1, MOST_SPLITS).ilog2();
        let together = rows.next_power_of_two().min(MOST);
        let workgroups = output.div_ceil(OUTPUTS / splits) * rows.div_ceil(together);
        Self { splits, together, workgroups }
    }
}

/// How tensors are read: by fours where their layout allows.
pub(crate) const PACK: Lines =
    &["alias pack = vec4<elem>;\nconst WIDTH = 4u;", "alias pack = elem;\nconst WIDTH = 1u;"];

/// How many times eight lanes go along a row of the weight.
pub(crate) const SPLITS: Lines = &[
    "const SPLITS = 1u;",
    "const SPLITS = 2u;",
    "const SPLITS = 4u;",
    "const SPLITS = 8u;",
    "const SPLITS = 16u;",
    "const SPLITS = 32u;",
];

/// What is done around a product.
const FUSED: Lines = &[
    "const NORMED = false;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
    "const NORMED = true;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
    "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 0u;",
    "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 1u;",
    "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 2u;",
    "const NORMED = true;\nconst THEN = ROTATED;\nconst ACTIVATION = 0u;",
];

/// Rows of x that a workgroup has.
const ROWS: Lines = &["const ROWS = 1u;", "const ROWS = 2u;", "const ROWS = 4u;", "const ROWS = 8u;"];

const SHADER: Shader = Shader {
    name: "linear",
    text: concat!(
        include_str!("../../../../shaders/linear.wgsl"),
        include_str!("../../../../shaders/linear_dense.wgsl"),
        include_str!("../../../../shaders/weights_dense.wgsl"),
        include_str!("../../../../shaders/row_products.wgsl"),
        include_str!("../../../../shaders/activation.wgsl")
    ),
    options: &[PACK, ROWS, SPLITS, FUSED],
};

/// For packed weights.
const PACKED: Shader = Shader {
    name: "linear_packed",
    text: concat!(
        include_str!("../../../../shaders/linear.wgsl"),
        include_str!("../../../../shaders/linear_packed.wgsl"),
        include_str!("../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../shaders/halves.wgsl"),
        include_str!("../../../../shaders/row_products.wgsl"),
        include_str!("../../../../shaders/activation.wgsl")
    ),
    options: &[packed_lines::FORMATS, ROWS, SPLITS, FUSED],
};
