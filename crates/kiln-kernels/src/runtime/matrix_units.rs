//! What the shaders share that multiply with a GPU's matrix units.

use burn::tensor::{DType, Device};

use crate::runtime::{
    device::{info::MatrixUnits, opened::matrix_units},
    launch::prefers_few_groups,
};

/// The units that many rows of that type are multiplied with, if they are. A software device imitates them and is faster without.
pub(crate) fn units_for(dtype: DType, device: &Device) -> Option<MatrixUnits> {
    let is_worth_it = dtype == DType::F16 && !prefers_few_groups(device);
    is_worth_it.then(|| matrix_units(device)).flatten()
}

/// The lines that say what workgroup memory consists of.
macro_rules! cells {
    (fours) => {
        "alias cell = vec4<elem>;\nconst CELLS = 1u;\nfn cell_of(four: vec4<elem>, i: u32) -> cell { return four; }"
    };
    // naga writes Metal's loads of matrices for pointers to scalars.
    (scalars) => {
        "alias cell = elem;\nconst CELLS = 4u;\nfn cell_of(four: vec4<elem>, i: u32) -> cell { return four[i]; }"
    };
}

pub(crate) use cells;
