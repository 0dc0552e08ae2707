//! `y = x Wᵀ + b + r` for `[rows, tokens, in]` and weights `[out, in]`, as checkpoints store them.
//!
//! Decoding multiplies each weight by a handful of vectors per token, so it takes as long as reading the
//! weights. The native code reads each weight once, on all threads. Both factors are stored along the sum, so
//! it rearranges neither; a general product spends most of its time on that if there are few rows. The GPU
//! kernels for few rows work the same way. Batches and prefill have many rows: matrix units multiply them, if
//! the device offers them (`tiles`), or other lanes do (`many.rs`).

pub(crate) mod activate;
pub(crate) mod activation;
pub(crate) mod around;
#[cfg(feature = "cube")]
pub(crate) mod fours;
pub(crate) mod gated;
mod integers;
mod layout;
#[cfg(feature = "wgpu")]
mod many;
pub(crate) mod matrix;
#[cfg(feature = "cpu")]
mod native;
pub(crate) mod normed_linear;
pub(crate) mod packed;
pub(crate) mod packed_lines;
#[cfg(feature = "cube")]
pub(crate) mod packed_reader;
#[cfg(feature = "wgpu")]
mod tiles;
pub(crate) mod unpack;
#[cfg(feature = "cube")]
mod unpacked;

#[cfg(feature = "cpu")]
pub(crate) use native::{Group, products_of_groups};

use burn::tensor::{DType, Device, Tensor};

use kiln_weights::{
    Format,
    streams::{Arithmetic, Order},
};

#[cfg(feature = "cube")]
use crate::linear::{
    around::{Around, Then},
    unpack::Unpack,
};
#[cfg(feature = "wgpu")]
use crate::runtime::device::opened;
use crate::{
    linear::{
        matrix::Matrix,
        packed::{PackedLayout, takes_packed},
    },
    runtime::{
        choice::Implementation,
        kernel::{INVARIANT_UP_TO, Kernel},
        kernels::Kernels,
        product::product,
        shader::Shader,
    },
    testing::{
        case::{Case, LARGEST, Rounding, SUBNORMAL_SCALES},
        checked::Checked,
        cut::{Extent, cut},
        numbers::{Cut, Layout, Plain, Swapped},
    },
};

/// `y = x Wᵀ + b + r`: `[rows, tokens, out]`.
///
/// The GPU kernels for few rows take up to 16 rows of tokens ([`INVARIANT_UP_TO`]), and twice as many in two
/// passes where weights are packed and would have to be unpacked. For more, wgpu has one that uses matrix
/// units, for float16 where there are any, and one for other GPUs; packed weights are unpacked first where
/// that takes less time. CUDA has kernels for up to 64 rows that use tensor cores. Other products are
/// cubek's there, in the reference.
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
        // One product of two matrices, which the CPU backend computes in parallel; it would not with one
        // product per row.
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
            return Ok(around::wgsl::launch(self.into()));
        }
        let device = self.x.device();
        let most = opened::largest_binding(&device).unwrap_or(usize::MAX);
        match &self.weight {
            Matrix::Packed(_) if tiles::are_better_unpacked(&self) => {
                let multiply = |dense| tiles::launch(dense).unwrap_or_else(Self::reference);
                unpacked::product_of(self, most, Unpack::wgsl, multiply)
            }
            _ if tiles::takes(self.x.dtype(), &device) => tiles::launch(self),
            _ if many::is_faster(&device) => many::launch(self),
            Matrix::Dense(_) => Err(self),
            Matrix::Packed(_) if self.is_for_two_passes() => {
                Ok(self.in_two_passes(|part| around::wgsl::launch(part.into())))
            }
            Matrix::Packed(_) => unpacked::product_of(self, most, Unpack::wgsl, Self::reference),
        }
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<3>, Self> {
        if self.is_for_few_rows() {
            return Ok(around::cube::launch(Self::NAME, self.into()));
        }
        match &self.weight {
            Matrix::Dense(_) => Err(self),
            Matrix::Packed(_) if self.is_for_two_passes() => {
                Ok(self.in_two_passes(|part| around::cube::launch(Self::NAME, part.into())))
            }
            Matrix::Packed(_) => unpacked::product_of(self, usize::MAX, Unpack::cube, Self::reference),
        }
    }
}

impl Checked for Linear {
    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, _] = self.x.dims();
        [rows, tokens]
    }

    fn cube_is_invariant_up_to(&self) -> usize {
        most_rows(Self::NAME, &self.weight)
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
        return &[
            around::SHADER,
            around::PACKED,
            around::BYTES,
            around::ROWS_IN_BYTES,
            tiles::SHADER,
            tiles::PACKED,
            many::SHADER,
            many::PACKED,
        ];
        #[cfg(not(feature = "wgpu"))]
        &[around::SHADER, around::PACKED]
    }

    fn cases() -> Vec<Case<Self>> {
        // Sums of n products in another order, on some devices in the type itself; they are rounded before a
        // residual is added, or only afterwards.
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
                path != Implementation::Native && !few && !takes_many_rows(path, x, dtype, device)
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
                // Vectors that are rounded to bytes have a uniform error of up to half a step. The tolerance
                // is six standard deviations of the sum, which no result exceeds.
                let (step, largest) = (LARGEST / 127.0, LARGEST * f64::from(factor));
                let rounded = 6.0 * (x[2] as f64).sqrt() * largest * step / 12f64.sqrt();
                let rounded = if arithmetic == Arithmetic::Integers { rounded } else { 0.0 };
                inputs.of_format(packing.format, arithmetic).without(lacks).within(
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
        // Long rows, which many lanes share, and an odd number of fours.
        for tokens in [1, 5] {
            cases.push(case([1, tokens, 4096], Plain, 9, false, true));
            cases.push(case([1, tokens, 4100], Plain, 6, true, false));
            cases.push(case([1, tokens, 4103], Plain, 2, false, false));
        }
        // Rows with gaps between them, of a length divisible by four and of one that is not.
        cases.push(case([2, 2, 96], Cut(1), 70, true, false));
        cases.push(case([2, 2, 96], Cut(2), 70, false, true));
        // Many rows, which matrix units multiply in tiles of 32 or 64 rows: whole and partial tiles,
        // whole and partial steps along the sum.
        for x in [[1, 17, 64], [3, 43, 48], [1, 64, 40], [3, 43, 7], [1, 65, 257], [2, 65, 1040]] {
            // An odd number of cases, because tests of float16 take every second one.
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
                // There are many formats, and shader compilers are slow.
                let larger = matches!(format, Format::Q4_0 | Format::Q6K | Format::Bf16);
                let batches = match order {
                    Order::Rows if larger => &[(1, 5), (2, 16), (2, 65)][..],
                    Order::Rows => &[(1, 5), (3, 11)],
                    Order::Sixteens => &[(1, 1), (1, 5), (2, 16), (2, 1), (1, 3), (4, 4)],
                };
                for (i, &(rows, tokens)) in batches.iter().enumerate() {
                    let (blocks, output) = [(1, 1), (3, 95), (4, 41), (16, 10)][(i + format as usize) % 4];
                    cases.push(packed(packing, arithmetic, [rows, tokens, blocks * block], Plain, output));
                }
                // Of each two, tests of float16 take one: parts of tiles, and of steps along the sum.
                if order == Order::Rows {
                    let part = if format == Format::Bf16 { 4 } else { 0 };
                    cases.push(packed(packing, arithmetic, [1, 20, 3 * block + part], Plain, 70));
                    cases.push(packed(packing, arithmetic, [1, 39, 5 * block + part], Plain, 95));
                }
                // Without bias and residual, which would hide a scale that is flushed to 0.
                let x = [1, 3, 2 * block];
                cases.push(packed_times(SUBNORMAL_SCALES, packing, arithmetic, x, Plain, 11));
                if order == Order::Sixteens || format == Format::Q4_0 {
                    cases.push(packed(packing, arithmetic, [2, 2, 2 * block], Swapped(1, 2), 70));
                    cases.push(packed(packing, arithmetic, [2, 2, 2 * block], Cut(2), 70));
                }
                if order == Order::Rows && format == Format::Q4_0 {
                    cases.push(packed(packing, arithmetic, [2, 10, 2 * block], Swapped(0, 1), 70));
                    cases.push(packed(packing, arithmetic, [2, 16, 2 * block], Cut(1), 70));
                }
            }
        }
        // Each tile, in whole steps and in others. Tests of float16 take every second case.
        for (x, output) in [([2, 520, 48], 1930), ([1, 65, 48], 66), ([1, 33, 128], 66)] {
            cases.extend([case(x, Plain, output, true, false), case(x, Plain, output, true, true).probed()]);
        }
        cases.extend([[2, 520, 24], [2, 520, 40]].map(|x| case(x, Plain, 1930, true, false)));
        let rows = PackedLayout { format: Format::Q4_0, order: Order::Rows };
        let large = [([2, 250, 64], 3990), ([2, 250, 96], 3990), ([2, 520, 64], 1930), ([2, 520, 96], 1930)];
        cases.extend(large.map(|(x, output)| packed(rows, Arithmetic::Floats, x, Plain, output)));
        // Many rows of the weight, and of x. On CUDA, warps take a turn or several, whole or in part.
        for x in [[1, 33, 64], [1, 17, 1280], [2, 20, 424], [1, 20, 288], [1, 40, 8], [1, 21, 24]] {
            cases.push(case(x, Plain, 8170, x[1] == 17, x[1] == 20));
        }
        for (format, x) in [
            (Format::Q4_0, [1, 33, 64]),
            (Format::Q6K, [1, 17, 1280]),
            (Format::Q8_0, [1, 39, 416]),
            (Format::Mxfp4, [1, 20, 288]),
        ] {
            let rows = PackedLayout { format, order: Order::Rows };
            cases.push(packed(rows, Arithmetic::Floats, x, Plain, 8170));
        }
        // Vectors in bytes on wgpu. Those of many rows are multiplied in floats.
        for format in Format::ALL.into_iter().filter(|format| packed_lines::has_bytes(*format)) {
            let (block, packing) = (format.block().max(32), PackedLayout { format, order: Order::Rows });
            let in_bytes = |x, output| packed(packing, Arithmetic::Integers, x, Plain, output);
            cases.push(in_bytes([1, 1, 16 * block], 10));
            cases.push(in_bytes([1, 5, 3 * block], 95));
            cases.push(in_bytes([3, 5, block], 41));
            let (factor, x) = (SUBNORMAL_SCALES, [1, 3, 2 * block]);
            cases.push(packed_times(factor, packing, Arithmetic::Integers, x, Plain, 11));
        }
        let rows = PackedLayout { format: Format::Q4_0, order: Order::Rows };
        cases.push(packed(rows, Arithmetic::Integers, [2, 2, 64], Swapped(1, 2), 70));
        cases.push(packed(rows, Arithmetic::Integers, [2, 2, 64], Cut(2), 70));
        cases
    }
}

/// [`Kernel::work`] for a product.
fn work_of(rows: usize, input: usize, output: usize) -> u64 {
    // Few rows take as long as reading the weights, and their steps may be recorded.
    if rows > INVARIANT_UP_TO { rows as u64 * input as u64 * output as u64 } else { 0 }
}

/// Whether a GPU implementation takes these vectors, which are more than a few, and a dense weight.
#[cfg(feature = "cube")]
fn takes_many_rows(path: Implementation, x: [usize; 3], dtype: DType, device: &Device) -> bool {
    match path {
        #[cfg(feature = "wgpu")]
        Implementation::Wgsl => tiles::takes(dtype, device) || many::is_faster(device),
        Implementation::Cube => around::cube::has_tiles(Linear::NAME, x, false, dtype, device),
        _ => false,
    }
}

#[cfg(not(feature = "cube"))]
fn takes_many_rows(_: Implementation, _: [usize; 3], _: DType, _: &Device) -> bool {
    false
}

/// Adds the bias and the residual to a product.
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
        // The order in which a backend sums depends on the number of rows.
        n @ 2.. if row_by_row => {
            let row = |row| product(x.clone().narrow(0, row, 1), weight.clone());
            Tensor::cat((0..n).map(row).collect(), 0)
        }
        _ => product(x, weight),
    }
}

#[cfg(feature = "cube")]
impl Linear {
    /// Whether the GPU kernels for few rows take the inputs.
    fn is_for_few_rows(&self) -> bool {
        are_few_of_one_type(Self::NAME, &self.x, &self.weight, self.others())
    }

    /// Whether packed weights are read twice, each time for a few rows. To unpack them moves more bytes: the
    /// numbers are written and read.
    fn is_for_two_passes(&self) -> bool {
        let [rows, tokens, _] = self.x.dims();
        rows * tokens <= 2 * INVARIANT_UP_TO && are_of_one_type(&self.x, &self.weight, self.others())
    }

    /// Computes the product by `launch`, a few rows at a time.
    fn in_two_passes(self, launch: impl Fn(Self) -> Tensor<3>) -> Tensor<3> {
        let [rows, tokens, input] = self.x.dims();
        let (all, output) = (rows * tokens, self.weight.rows());
        let x = self.x.reshape([1, all, input]);
        let residual = self.residual.map(|residual| residual.reshape([1, all, output]));
        let part = |first: usize| {
            let len = INVARIANT_UP_TO.min(all - first);
            launch(Self {
                x: x.clone().narrow(1, first, len),
                weight: self.weight.clone(),
                bias: self.bias.clone(),
                residual: residual.clone().map(|residual| residual.narrow(1, first, len)),
            })
        };
        let parts = (0..all).step_by(INVARIANT_UP_TO).map(part).collect();
        Tensor::cat(parts, 1).reshape([rows, tokens, output])
    }

    /// The types of the bias and the residual.
    fn others(&self) -> impl Iterator<Item = DType> {
        self.bias.iter().map(Tensor::dtype).chain(self.residual.iter().map(Tensor::dtype))
    }
}

/// Whether the GPU kernels for few rows take vectors `[rows, tokens, in]` and a weight in `kernel`, with
/// tensors of the types `others`.
pub(crate) fn are_few_of_one_type(
    kernel: &str,
    x: &Tensor<3>,
    weight: &Matrix,
    others: impl Iterator<Item = DType>,
) -> bool {
    let [rows, tokens, _] = x.dims();
    are_of_one_type(x, weight, others)
        && (rows * tokens <= INVARIANT_UP_TO || rows * tokens <= most_rows(kernel, weight))
}

/// The most rows that the GPU kernels for few rows take.
#[cfg(feature = "cube")]
pub(crate) fn most_rows(kernel: &str, weight: &Matrix) -> usize {
    match around::cube::tile_for(kernel, weight) {
        Some(_) => around::cube::MOST_ROWS,
        None => INVARIANT_UP_TO,
    }
}

#[cfg(not(feature = "cube"))]
pub(crate) fn most_rows(_: &str, _: &Matrix) -> usize {
    INVARIANT_UP_TO
}

impl Kernels {
    /// The most rows of which each, in a pass with one token of every row, has the product with `weight` that
    /// it has alone, bit for bit. Norms before the product count as part of it.
    pub fn exact_rows(&self, weight: &Matrix) -> usize {
        match self.implementation_of::<Linear>() {
            #[cfg(feature = "cpu")]
            Implementation::Native => native::most_exact_rows(weight),
            #[cfg(not(feature = "cpu"))]
            Implementation::Native => INVARIANT_UP_TO,
            Implementation::Cube => [Linear::NAME, normed_linear::NormedLinear::NAME]
                .map(|kernel| most_rows(kernel, weight))
                .into_iter()
                .fold(usize::MAX, usize::min),
            Implementation::Reference | Implementation::Wgsl => INVARIANT_UP_TO,
        }
    }
}

/// Whether a GPU kernel reads the weight, there is something to multiply, and all numbers have one type.
fn are_of_one_type(x: &Tensor<3>, weight: &Matrix, others: impl Iterator<Item = DType>) -> bool {
    let ([rows, tokens, input], output) = (x.dims(), weight.rows());
    let of_one_type = others.chain([weight.dtype()]).all(|dtype| dtype == x.dtype());
    let is_read = match weight {
        Matrix::Dense(_) => true,
        Matrix::Packed(packed) => takes_packed(Implementation::Wgsl, packed.layout),
    };
    is_read && of_one_type && rows * tokens * input * output > 0
}

#[cfg(feature = "cube")]
impl From<Linear> for Around {
    fn from(Linear { x, weight, bias, residual }: Linear) -> Self {
        Self { x, weight, bias, residual, norm: None, then: Then::Nothing }
    }
}
