//! The choice of the weights that stay packed, and of their layout in memory.

use burn::tensor::DType;
use kiln_weights::{Format, streams::Order};

use crate::{
    linear::{
        Linear,
        normed_linear::NormedLinear,
        packed::{PackedLayout, takes_packed},
        unpack::Unpack,
    },
    runtime::{choice::Implementation, kernels::Kernels},
};

impl PackedLayout {
    /// Chooses the layout of packed weights of a format, for vectors of `dtype`. Returns `None` unless
    /// products with packed weights are at least as fast as with dense ones.
    pub fn for_matrix(kernels: &Kernels, format: Format, dtype: DType) -> Option<Self> {
        let path = kernels.implementation();
        let paths = [
            kernels.implementation_of::<Linear>(),
            kernels.implementation_of::<NormedLinear>(),
            kernels.implementation_of::<Unpack>(),
        ];
        let order = if path == Implementation::Native { Order::Sixteens } else { Order::Rows };
        let layout = Self { format, order };
        let is_worth_it = match (path, format) {
            // On the CPU, sixteen interleaved rows are read faster than one row after the other.
            (Implementation::Native, Format::F16) => dtype == DType::F32 || dtype == DType::F16,
            (Implementation::Native, _) => dtype == DType::F32,
            // Float32 is the type of the arithmetic.
            (_, Format::F32) => false,
            // GPUs that compute in float16 have faster ways to multiply 16-bit numbers.
            (_, Format::F16 | Format::Bf16) => dtype == DType::F32,
            _ => true,
        };
        let takes = |own: &Implementation| *own == path && takes_packed(path, layout);
        (is_worth_it && path != Implementation::Reference && paths.iter().all(takes)).then_some(layout)
    }
}
