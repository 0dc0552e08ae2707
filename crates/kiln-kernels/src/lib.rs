//! Every custom kernel, in up to four implementations that agree.
//!
//! A kernel is a type that implements [`Kernel`]: its fields are the inputs, and [`Kernels::run`] computes it. The reference is
//! written in plain Burn operations, runs on every device, and defines what the other implementations compute. [`Checked`] adds what
//! tests need.
//!
//! Modules use those above them in this list: `shaders`, `runtime`, `testing`, the kernels in a folder for each idea, `check`.
//!
//! **Invariant:** nothing outside this crate launches a kernel of its own, or names cubecl or wgpu.
#![forbid(unsafe_code)]

/// The uniform of each shader, which `build.rs` makes of its text.
#[cfg(feature = "wgpu")]
mod shaders {
    include!(concat!(env!("OUT_DIR"), "/shaders.rs"));
}

mod runtime;

mod testing;

mod attention;
mod cache;
mod experts;
mod linear;
mod norm;
mod sampling;
mod state;

mod check;

pub use attention::{Attention, AttentionShape, packed::AttentionPacked, rotary::Rotary};
pub use cache::{kv_append::KvAppend, kv_pack::KvPack, kv_reorder::KvReorder, kv_unpack::KvUnpack};
pub use check::{
    registry::{KERNELS, KernelInfo},
    self_test::{Coverage, Verdict, self_test},
};
pub use experts::{
    expert_linear::ExpertLinear,
    route::{Route, Routing},
    weighted_sum::WeightedSum,
};
pub use kiln_weights::streams::Arithmetic;
pub use linear::{
    Linear,
    activate::Activate,
    activation::Activation,
    around::Then,
    gated::Gated,
    matrix::{Matrix, MatrixStack},
    normed_linear::NormedLinear,
    packed::{PackedLayout, PackedMatrix, Use},
    unpack::Unpack,
};
pub use norm::{
    layer_norm::LayerNorm,
    rms_norm::{NormOrder, RmsNorm},
};
#[doc(hidden)]
pub use runtime::faults;
#[cfg(feature = "cube")]
pub use runtime::launches::launches_of;
pub use runtime::{
    choice::{Choice, Path, Ran},
    device,
    kernel::{INVARIANT_UP_TO, Kernel},
    kernels::Kernels,
    product::product,
    recording::{Recorded, Recording},
    shader::{Access, Binding, Shader, Text},
};
pub use sampling::{
    beam_step::{BeamShape, BeamStep, Beams, MOST_BEAMS},
    sample::{Draws, Sample, Sampling, likeliest},
    top_logprobs::TopLogprobs,
};
#[cfg(feature = "wgpu")]
#[doc(hidden)]
pub use shaders::UNIFORMS;
pub use state::{causal_conv::CausalConv, selective_scan::SelectiveScan};
pub use testing::checked::Checked;

/// Inputs with which implementations of a kernel are compared. Tests use them, and so can a check of a device.
pub mod cases {
    pub use crate::{
        check::any_case::AnyCase,
        testing::{
            case::{Case, Read, Rounding},
            numbers::{Cut, Layout, Numbers, Plain, Swapped},
        },
    };
}

/// Batch invariance: what a row or a token comes to does not depend on what is computed beside it.
pub mod invariance {
    pub use crate::testing::checked::Extent;
}
