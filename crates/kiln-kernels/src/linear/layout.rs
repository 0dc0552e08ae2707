//! Which weights are packed, and how they lie in memory.

use burn::tensor::DType;
use kiln_weights::{Format, streams::Order};

use crate::{
    linear::{
        Linear,
        normed_linear::NormedLinear,
        packed::{PackedLayout, takes_packed},
        unpack::Unpack,
    },
    runtime::{choice::Path, kernels::Kernels},
};

impl PackedLayout {
    /// How packed weights of a format lie in memory, so that they are computed with as fast as dense ones or faster, in
    /// vectors of `dtype`; `None` where they are not.
    pub fn for_matrix(kernels: &Kernels, format: Format, dtype: DType) -> Option<Self> {
        let path = kernels.path();
        let paths =
            [kernels.path_of::<Linear>(), kernels.path_of::<NormedLinear>(), kernels.path_of::<Unpack>()];
        let order = if path == Path::Native { Order::Sixteens } else { Order::Rows };
        let layout = Self { format, order };
        let is_worth_it = match format {
            // Numbers as they are computed with are dense.
            Format::F32 => false,
            // GPUs that compute in float16 have faster ways for numbers of 16 bits.
            Format::F16 | Format::Bf16 => dtype == DType::F32,
            _ => path != Path::Native || dtype == DType::F32,
        };
        let takes = |own: &Path| *own == path && takes_packed(path, layout);
        (is_worth_it && path != Path::Reference && paths.iter().all(takes)).then_some(layout)
    }
}
