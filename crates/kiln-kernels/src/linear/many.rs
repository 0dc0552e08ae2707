//! Products of many rows on wgpu devices without matrix units, in browsers among them. Packed weights are
//! unpacked in workgroup memory.

use burn::{
    backend::Cube,
    tensor::{Device, Tensor},
};

use super::{Linear, are_of_one_type};
use crate::{
    linear::{around::PACK, matrix::Matrix, packed_lines},
    runtime::{
        launch::{Launch, comes_in_fours, empty, in_order, prefers_few_groups, primitive, strides},
        shader::{Binding, Lines, Shader, reads, writes},
    },
    shaders::linear_many::Info,
};

/// Lanes of a workgroup, as in the shader.
const LANES: usize = 128;

/// Rows of x per tile, and per lane.
#[derive(Clone, Copy)]
struct Size {
    tile: usize,
    down: usize,
}

impl Size {
    /// Rows of the weight per workgroup: a lane has eight.
    fn outputs(self) -> usize {
        8 * LANES * self.down / self.tile
    }
}

/// The sizes of tiles, in the order of [`LINES`].
const SIZES: [Size; 2] = [Size { tile: 32, down: 4 }, Size { tile: 128, down: 8 }];

const LINES: Lines = || &["const TILE = 32u; const DOWN = 4u;", "const TILE = 128u; const DOWN = 8u;"];

const BINDINGS: &[Binding] = &[reads("x"), reads("w"), reads("bias"), reads("residual"), writes("y")];

pub(super) const SHADER: Shader = Shader {
    name: "linear_many",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/linear_many.wgsl"),
        include_str!("../../../../shaders/tile_dense.wgsl")
    ),
    options: &[PACK, LINES],
};

pub(super) const PACKED: Shader = Shader {
    name: "linear_many_packed",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/linear_many.wgsl"),
        include_str!("../../../../shaders/tile_packed.wgsl"),
        include_str!("../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../shaders/halves.wgsl")
    ),
    options: &[packed_lines::FORMATS, LINES],
};

/// Whether the shader is faster than Burn's product. It is not on a software GPU (0.75 to 0.95 of the speed
/// on Mesa's), unless a browser guards all loops of Burn's (12 times the speed in Firefox).
pub(super) fn is_faster(device: &Device) -> bool {
    cfg!(target_family = "wasm") || !prefers_few_groups(device)
}

/// Index of the size for this many rows: the larger tile, if it is at least three quarters full.
fn size_for(rows: usize) -> usize {
    let wasted = rows.next_multiple_of(SIZES[1].tile) - rows;
    usize::from(4 * wasted <= rows)
}

/// Computes the product if all tensors have one type.
///
/// # Errors
/// Returns the inputs otherwise.
#[allow(clippy::result_large_err, reason = "as in `Kernel`")]
pub(super) fn launch(linear: Linear) -> Result<Tensor<3>, Linear> {
    let ([batch, tokens, input], output) = (linear.x.dims(), linear.weight.rows());
    if !are_of_one_type(&linear.x, &linear.weight, linear.others()) {
        return Err(linear);
    }
    let (rows, device) = (batch * tokens, linear.x.device());
    let Linear { x, weight, bias, residual } = linear;
    let (biased, added) = (bias.is_some(), residual.is_some());
    let (x, weight, w_strides, format) = match weight {
        Matrix::Dense(weight) => {
            let weight = primitive(weight);
            let strides = strides(&weight);
            (primitive(x), weight, strides, None)
        }
        Matrix::Packed(packed) => {
            let (words, format) = (packed.words.dims()[1], packed_lines::pick(packed.format()));
            // Vectors are read by fours, as weights are.
            (in_order(x), in_order(packed.words), [words as u32, 1], format)
        }
    };
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, output], x.dtype);
    let size = size_for(rows);
    let workgroups = rows.div_ceil(SIZES[size].tile) * output.div_ceil(SIZES[size].outputs());
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
    let launch = match format {
        Some(format) => Launch::new(&PACKED, x.dtype, &y.client).with(&[format, size]).unpacking_on(&device),
        None => {
            let fours = comes_in_fours(&x) && comes_in_fours(&weight);
            Launch::new(&SHADER, x.dtype, &y.client).with(&[usize::from(!fours), size])
        }
    };
    launch.run(workgroups, [&x, &weight, &bias, &residual, &y], info);
    Ok(Tensor::from_primitive::<Cube>(y))
}
