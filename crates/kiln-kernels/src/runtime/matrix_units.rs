//! Shared parts of the shaders that use a GPU's matrix units.

use burn::tensor::{DType, Device};

use crate::runtime::{
    device::{info::MatrixUnits, opened::matrix_units},
    launch::prefers_few_groups,
};

/// The units that multiply many rows of type `dtype` in a kernel, if any do. A software device emulates them
/// and is faster without.
pub(crate) fn units_for(kernel: &str, dtype: DType, device: &Device) -> Option<MatrixUnits> {
    let is_worth_it = dtype == DType::F16 && !prefers_few_groups(device);
    is_worth_it.then(|| matrix_units(device, kernel)).flatten()
}

/// The lines that define the elements of workgroup memory.
macro_rules! cells {
    (fours) => {
        "alias cell = vec4<elem>;\nconst CELLS = 1u;\nfn cell_of(four: vec4<elem>, i: u32) -> cell { return four; }"
    };
    // On Metal, naga translates loads of matrices for pointers to scalars.
    (scalars) => {
        "alias cell = elem;\nconst CELLS = 4u;\nfn cell_of(four: vec4<elem>, i: u32) -> cell { return four[i]; }"
    };
}

/// The lines that define the matrices: `HEIGHT` rows of the first factor and of sums, `SIZE` of all else.
/// WGSL names the columns first.
#[rustfmt::skip]
macro_rules! matrices {
    ($height:tt x $size:tt) => {
        concat!(
            "alias x_matrix = coop_mat", $size, "x", $height, "<elem, A>;\n",
            "alias w_matrix = coop_mat", $size, "x", $size, "<elem, B>;\n",
            "alias y_matrix = coop_mat", $size, "x", $height, "<f32, C>;\n",
            "const HEIGHT = ", $height, "u;\n",
            "const SIZE = ", $size, "u;\n",
        )
    };
}

pub(crate) use {cells, matrices};
