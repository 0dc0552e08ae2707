//! Products of many rows with a GPU's matrix units: float16 factors, float32 sums.

use burn::{
    backend::Cube,
    tensor::{DType, Device, Tensor},
};

use super::Linear;
use crate::{
    linear::matrix::Matrix,
    runtime::{
        device::info::MatrixUnits,
        kernel::{INVARIANT_UP_TO, Kernel},
        launch::{Launch, comes_in, empty, primitive, strides},
        matrix_units::{cells, units_for},
        shader::{Lines, Shader, reads, writes},
    },
    shaders::linear_tiles::Info,
};

/// A division of y into tiles. A workgroup has a tile, and a subgroup a part of it: 2 x 4 matrices.
struct Shape {
    /// The units for which this shape is best.
    units: MatrixUnits,
    down: usize,
    across: usize,
}

impl Shape {
    fn rows(&self) -> usize {
        2 * self.units.size as usize * self.down
    }

    fn outputs(&self) -> usize {
        4 * self.units.size as usize * self.across
    }
}

macro_rules! shapes {
    ($([$size:tt $threads:literal $lanes:literal $down:literal $across:literal $cells:ident],)*) => {
        const SHAPES: &[Shape] = &[
            $(Shape { units: MatrixUnits { size: $size, threads: $threads }, down: $down, across: $across }),*
        ];
        const LINES: Lines = || &[
            $(concat!(
                "alias x_matrix = coop_mat", $size, "x", $size, "<elem, A>;\n",
                "alias w_matrix = coop_mat", $size, "x", $size, "<elem, B>;\n",
                "alias y_matrix = coop_mat", $size, "x", $size, "<f32, C>;\n",
                "const SIZE = ", $size, "u;\n",
                "const LANES = ", $lanes, "u;\n",
                "const DOWN = ", $down, "u;\n",
                "const ACROSS = ", $across, "u;\n",
                "// What memory consists of, and how many of them four numbers are.\n",
                cells!($cells),
            )),*
        ];
    };
}

// If there are two shapes for the same units, the first one is for large results. Software devices have
// subgroups of 8 threads and run for tests alone: they get Metal's text, which has fewer parts than they have
// subgroups, and one that has more.
shapes! {
    [16 32 256 4 2 fours],
    [16 32 64 2 1 fours],
    [8 32 256 4 2 scalars],
    [8 32 64 2 1 scalars],
    [8 8 256 4 2 scalars],
    [8 8 64 4 4 fours],
}

/// Numbers along the sum that a workgroup has in memory at the same time, as in the shader.
const STEP: usize = 16;

const EIGHTS: Lines =
    || &["alias pack = vec4<elem>;\nconst WIDTH = 8u;", "alias pack = elem;\nconst WIDTH = 1u;"];

pub(super) const SHADER: Shader = Shader {
    name: "linear_tiles",
    bindings: &[reads("x"), reads("w"), reads("bias"), reads("residual"), writes("y")],
    text: include_str!("../../../../shaders/linear_tiles.wgsl"),
    options: &[EIGHTS, LINES],
};

/// Whether a device takes more than a few rows of type `dtype`.
pub(super) fn takes(dtype: DType, device: &Device) -> bool {
    units_for(Linear::NAME, dtype, device).is_some()
}

/// Index of the shape for a result of this size.
fn shape_for(units: MatrixUnits, rows: usize, output: usize) -> usize {
    /// Number of workgroups that keeps a GPU busy. Large tiles read less, so they are used if there are this
    /// many.
    const BUSY: usize = 128;

    // A text is right for subgroups of any size. Those of 32 threads are common.
    let of = |threads| SHAPES.iter().position(|shape| shape.units == MatrixUnits { threads, ..units });
    let large = of(units.threads).or_else(|| of(32)).unwrap_or(0);
    let shape = &SHAPES[large];
    let down = rows.div_ceil(shape.rows());
    let wasted = down * shape.rows() - rows;
    let is_large = down * output.div_ceil(shape.outputs()) >= BUSY && 4 * wasted <= rows;
    if is_large { large } else { large + 1 }
}

/// Computes the product if all tensors are float16 and the device has matrix units.
///
/// # Errors
/// Returns the inputs otherwise.
#[allow(clippy::result_large_err, reason = "as in `Kernel`")]
pub(super) fn launch(linear: Linear) -> Result<Tensor<3>, Linear> {
    let Linear { x, weight: Matrix::Dense(weight), bias, residual } = &linear else { return Err(linear) };
    let ([batch, tokens, input], [output, _]) = (x.dims(), weight.dims());
    let rows = batch * tokens;
    let others = bias.iter().map(Tensor::dtype).chain(residual.iter().map(Tensor::dtype));
    let of_one_type = others.chain([weight.dtype()]).all(|dtype| dtype == x.dtype());
    let units = match units_for(Linear::NAME, x.dtype(), &x.device()) {
        Some(units) if of_one_type && rows > INVARIANT_UP_TO && input * output > 0 => units,
        _ => return Err(linear),
    };
    let number = shape_for(units, rows, output);
    let shape = &SHAPES[number];
    let workgroups = rows.div_ceil(shape.rows()) * output.div_ceil(shape.outputs());
    let weight = weight.clone();
    let Linear { x, bias, residual, .. } = linear;
    let (biased, added) = (bias.is_some(), residual.is_some());
    let (x, weight) = (primitive(x), primitive(weight));
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, output], x.dtype);
    let eights = comes_in(8, &x) && comes_in(8, &weight) && input.is_multiple_of(STEP);
    let [bias_stride] = strides(&bias);
    let info = Info {
        x_strides: strides(&x),
        tokens: tokens as u32,
        w_strides: strides(&weight),
        input: input as u32,
        output: output as u32,
        residual_strides: strides(&residual),
        added: u32::from(added),
        rows: rows as u32,
        biased: u32::from(biased),
        bias_stride,
        workgroups: workgroups as u32,
    };
    let launch = Launch::new(&SHADER, x.dtype, &y.client).with(&[usize::from(!eights), number]);
    launch.run(workgroups, [&x, &weight, &bias, &residual, &y], info);
    Ok(Tensor::from_primitive::<Cube>(y))
}
