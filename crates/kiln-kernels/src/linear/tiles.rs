//! The shader: float16 factors, float32 sums.

use burn::{
    backend::Cube,
    tensor::{DType, Device, Tensor},
};

use crate::{
    linear::{Linear, are_of_one_type, matrix::Matrix, packed_lines},
    runtime::{
        device::info::MatrixUnits,
        kernel::{INVARIANT_UP_TO, Kernel},
        launch::{Launch, comes_in, empty, in_order, primitive, strides},
        matrix_units::{cells, matrices, units_for},
        shader::{Binding, Lines, Shader, reads, writes},
    },
    shaders::linear_tiles::Info,
};

/// A division of y into tiles. A workgroup has a tile, and a subgroup a part of it: two rows of matrices.
struct Shape {
    /// The matrices and the threads of subgroups for which this shape is best.
    height: u32,
    size: u32,
    threads: u32,
    lanes: usize,
    down: usize,
    across: usize,
    /// Matrices side by side in a part.
    wide: usize,
    /// The most subgroups that share a part. Each multiplies some numbers along the sum.
    splits: usize,
}

impl Shape {
    fn rows(&self) -> usize {
        2 * self.height as usize * self.down
    }

    fn outputs(&self) -> usize {
        self.wide * self.size as usize * self.across
    }

    /// Numbers along the sum that a workgroup has in memory at the same time, as in the shader.
    fn step(&self, packed: bool) -> usize {
        16 * self.splits.max(if packed { self.lanes / self.outputs() } else { 1 })
    }
}

macro_rules! shapes {
    ($([
        $height:tt x $size:tt $threads:literal $lanes:literal $down:literal $across:literal $wide:literal
        $splits:literal $cells:ident $ahead:literal
    ],)*) => {
        const SHAPES: &[Shape] = &[
            $(Shape {
                height: $height,
                size: $size,
                threads: $threads,
                lanes: $lanes,
                down: $down,
                across: $across,
                wide: $wide,
                splits: $splits,
            }),*
        ];
        const LINES: Lines = || &[
            $(concat!(
                matrices!($height x $size),
                "const LANES = ", $lanes, "u;\n",
                "const DOWN = ", $down, "u;\n",
                "const ACROSS = ", $across, "u;\n",
                "const WIDE = ", $wide, "u;\n",
                "const SPLITS = ", $splits, "u;\n",
                "// Whether the next step is read while this one is multiplied. It takes registers.\n",
                "const AHEAD = ", $ahead, ";\n",
                "// What memory consists of, and how many of them four numbers are.\n",
                cells!($cells),
            )),*
        ];
    };
}

// The shapes for the same units are for large results, for others, and for few rows. Software devices have
// subgroups of 8 threads and run for tests alone: they get Metal's texts for large results and few rows, in
// which there are more subgroups than can be used, and one for others with fewer subgroups than parts, which
// is otherwise like Intel's. Intel's compiler has registers for 2 x 2 matrices of sums, where nothing is read
// ahead.
shapes! {
    [16 x 16 32 256 4 2 4 1 fours true],
    [16 x 16 32 64 2 1 4 1 fours true],
    [16 x 16 32 128 1 1 4 4 fours true],
    [8 x 8 32 256 4 2 4 1 scalars true],
    [8 x 8 32 64 2 1 4 1 scalars true],
    [8 x 8 32 256 2 2 4 2 scalars true],
    [8 x 8 8 256 4 2 4 1 scalars true],
    [8 x 8 8 64 4 4 2 1 fours false],
    [8 x 8 8 256 2 2 4 2 scalars true],
    [8 x 16 32 256 4 2 2 1 fours false],
    [8 x 16 32 128 2 2 2 1 fours false],
    [8 x 16 32 128 2 1 2 2 fours false],
}

/// Places of shapes among those for the same units.
const LARGE: usize = 0;
const SMALL: usize = 1;
const FEW: usize = 2;

/// Most rows for which subgroups share parts. Their tiles are few, and reading the weights is the limit. No
/// GPU was there to measure it.
const FEW_ROWS: usize = 64;

const EIGHTS: Lines =
    || &["alias pack = vec4<elem>;\nconst WIDTH = 8u;", "alias pack = elem;\nconst WIDTH = 1u;"];

const BINDINGS: &[Binding] = &[reads("x"), reads("w"), reads("bias"), reads("residual"), writes("y")];

pub(in crate::linear) const SHADER: Shader = Shader {
    name: "linear_tiles",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/linear_tiles.wgsl"),
        include_str!("../../../../shaders/matrix_dense.wgsl")
    ),
    options: &[EIGHTS, LINES],
};

pub(in crate::linear) const PACKED: Shader = Shader {
    name: "linear_tiles_packed",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/linear_tiles.wgsl"),
        include_str!("../../../../shaders/matrix_packed.wgsl"),
        include_str!("../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../shaders/halves.wgsl")
    ),
    options: &[packed_lines::FORMATS, EIGHTS, LINES],
};

/// Whether a device takes more than a few rows of type `dtype`.
pub(in crate::linear) fn takes(dtype: DType, device: &Device) -> bool {
    units_for(Linear::NAME, dtype, device).is_some()
}

/// Whether packed weights are better unpacked to memory, and multiplied like dense ones. Where lanes multiply
/// matrices, or have more to do than the units, unpacking takes time, and every tile down the rows unpacks
/// anew.
pub(in crate::linear) fn are_better_unpacked(linear: &Linear) -> bool {
    let [rows, tokens, _] = linear.x.dims();
    let units = units_for(Linear::NAME, linear.x.dtype(), &linear.x.device());
    units.filter(|units| !units.beside_lanes).is_some_and(|units| {
        // Unpacking to memory takes less time, by count, from 470 rows in Q4_K and 790 in Q4_0 on a Radeon
        // 7900 XTX, from 220 on an M3 Max, and from 160 on an Arc B580. No GPU was there to measure it.
        let worth = if units.height == 16 { 512 } else { 256 };
        rows * tokens >= worth
    })
}

/// Index of the shape for a result of this size.
fn shape_for(units: MatrixUnits, rows: usize, output: usize) -> usize {
    /// Number of workgroups that keeps a GPU busy. Large tiles read less, so they are used if there are this
    /// many.
    const BUSY: usize = 128;

    // A text is right for subgroups of any size. Those of 32 threads are common.
    let own = |threads| (units.height, units.size, threads);
    let of =
        |threads| SHAPES.iter().position(|shape| (shape.height, shape.size, shape.threads) == own(threads));
    let first = of(units.threads).or_else(|| of(32)).unwrap_or(0);
    if rows <= FEW_ROWS {
        return first + FEW;
    }
    let large = &SHAPES[first + LARGE];
    let down = rows.div_ceil(large.rows());
    let wasted = down * large.rows() - rows;
    let is_large = down * output.div_ceil(large.outputs()) >= BUSY && 4 * wasted <= rows;
    first + if is_large { LARGE } else { SMALL }
}

/// Computes the product if all tensors are float16 and the device has matrix units.
///
/// # Errors
/// Returns the inputs otherwise.
#[allow(clippy::result_large_err, reason = "as in `Kernel`")]
pub(in crate::linear) fn launch(linear: Linear) -> Result<Tensor<3>, Linear> {
    let ([batch, tokens, input], output) = (linear.x.dims(), linear.weight.rows());
    let (rows, device) = (batch * tokens, linear.x.device());
    let units = match units_for(Linear::NAME, linear.x.dtype(), &device) {
        Some(units) if rows > INVARIANT_UP_TO => units,
        _ => return Err(linear),
    };
    if !are_of_one_type(&linear.x, &linear.weight, linear.others()) {
        return Err(linear);
    }
    let number = shape_for(units, rows, output);
    let shape = &SHAPES[number];
    let workgroups = rows.div_ceil(shape.rows()) * output.div_ceil(shape.outputs());
    let Linear { x, weight, bias, residual } = linear;
    let (biased, added) = (bias.is_some(), residual.is_some());
    let x = primitive(x);
    let is_packed = matches!(weight, Matrix::Packed(_));
    let are_steps = comes_in(8, &x) && input.is_multiple_of(shape.step(is_packed));
    let (weight, w_strides, are_eights, format) = match weight {
        Matrix::Dense(weight) => {
            let weight = primitive(weight);
            let strides = strides(&weight);
            let are_eights = are_steps && comes_in(8, &weight);
            (weight, strides, are_eights, None)
        }
        Matrix::Packed(packed) => {
            let (words, format) = (packed.words.dims()[1], packed_lines::pick(packed.format()));
            (in_order(packed.words), [words as u32, 1], are_steps, format)
        }
    };
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, output], x.dtype);
    let [bias_stride] = strides(&bias);
    let info = Info {
        x_strides: strides(&x),
        tokens: tokens as u32,
        w_strides,
        input: input as u32,
        output: output as u32,
        residual_strides: strides(&residual),
        added: u32::from(added),
        rows: rows as u32,
        biased: u32::from(biased),
        bias_stride,
        workgroups: workgroups as u32,
    };
    let width = usize::from(!are_eights);
    let launch = match format {
        Some(format) => {
            Launch::new(&PACKED, x.dtype, &y.client).with(&[format, width, number]).unpacking_on(&device)
        }
        None => Launch::new(&SHADER, x.dtype, &y.client).with(&[width, number]),
    };
    launch.run(workgroups, [&x, &weight, &bias, &residual, &y], info);
    Ok(Tensor::from_primitive::<Cube>(y))
}
