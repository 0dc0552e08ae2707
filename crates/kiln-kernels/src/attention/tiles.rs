//! Attention for many queries with a GPU's matrix units: float16 factors, float32 sums.

use burn::tensor::Device;
use burn_cubecl::tensor::CubeTensor;

use super::{Attention, BINDINGS, MIXED};
use crate::runtime::{
    kernel::Kernel,
    launch::comes_in,
    matrix_units::{cells, matrices, units_for},
    shader::{Lines, Shader},
};

macro_rules! units {
    ($([$height:tt x $size:tt $threads:literal $lanes:literal $cells:ident],)*) => {
        /// Heights and sizes of matrices, and threads of subgroups.
        const UNITS: &[(u32, u32, u32)] = &[$(($height, $size, $threads)),*];
        const LINES: Lines = || &[
            $(concat!(
                matrices!($height x $size),
                "const LANES = ", $lanes, "u;\n",
                "// What memory consists of, and how many of them four numbers are.\n",
                cells!($cells),
            )),*
        ];
    };
}

// A workgroup has four parts. If there are two texts for the same units, the second one is for workgroups
// that share keys. Software devices have subgroups of 8 threads and run for tests alone: they get a text with
// half as many subgroups as parts, and Metal's, with four times as many.
units! {
    [16 x 16 32 128 fours],
    [8 x 8 32 128 scalars],
    [8 x 8 8 16 fours],
    [8 x 8 8 128 scalars],
}

/// Lengths of vectors, in the order of [`DIMS`].
const LENGTHS: [usize; 4] = [128, 96, 80, 64];

const DIMS: Lines = || &["const DIM = 128u;", "const DIM = 96u;", "const DIM = 80u;", "const DIM = 64u;"];

pub(super) const SHADER: Shader = Shader {
    name: "attention_tiles",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../shaders/attention_tiles.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_dense.wgsl"),
        include_str!("../../../../shaders/attention_many.wgsl"),
    ),
    options: &[MIXED, DIMS, LINES],
};

/// Picks the lines of the shader for queries, keys and values. Returns `None` unless they are float16, have a
/// supported length and layout, and the device has matrix units. `split` is 1 if workgroups share keys.
pub(super) fn picks(tensors: [&CubeTensor; 3], split: usize, device: &Device) -> Option<[usize; 3]> {
    let [q, ..] = tensors;
    let units = units_for(Attention::NAME, q.dtype, device)?;
    // A text is right for subgroups of any size. Those of 32 threads are common.
    let of = |threads| UNITS.iter().position(|&own| own == (units.height, units.size, threads));
    let first = of(units.threads).or_else(|| of(32))?;
    let number = if UNITS.get(first + split) == UNITS.get(first) { first + split } else { first };
    let length = LENGTHS.iter().position(|length| q.meta.shape().last() == Some(length))?;
    tensors.into_iter().all(|tensor| comes_in(8, tensor)).then_some([split, length, number])
}
