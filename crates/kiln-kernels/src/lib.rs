//! Every custom kernel, in up to four implementations that agree.
//!
//! A kernel is a type that implements [`Kernel`]: its fields are the inputs, and [`Kernels::run`] computes it. The reference is
//! written in plain Burn operations, runs on every device, and defines what the other implementations compute.
//!
//! **Invariant:** nothing outside this crate launches a kernel of its own, or names cubecl or wgpu.
#![forbid(unsafe_code)]

mod activate;
mod attention;
mod beam_step;
pub mod cases;
mod causal_conv;
mod choice;
pub mod device;
mod expert_linear;
#[doc(hidden)]
pub mod faults;
mod gated;
mod half;
pub mod invariance;
mod kernel;
mod kernels;
mod kv_append;
mod kv_pack;
mod kv_reorder;
mod kv_unpack;
#[cfg(feature = "cube")]
mod launch;
#[cfg(feature = "cube")]
mod launches;
mod layer_norm;
mod linear;
mod matrix;
#[cfg(feature = "wgpu")]
mod matrix_units;
#[cfg(feature = "cpu")]
mod native;
mod normed_linear;
#[cfg(feature = "cube")]
mod order;
mod packed_lines;
#[cfg(feature = "cube")]
mod packed_reader;
mod product;
mod recording;
mod rms_norm;
mod rotary;
mod route;
mod sample;
mod selective_scan;
mod self_test;
mod shader;
mod top_logprobs;
mod unpack;
mod weighted_sum;

pub use activate::Activate;
pub use attention::{Attention, AttentionPacked, AttentionShape};
pub use beam_step::{BeamShape, BeamStep, Beams, MOST_BEAMS};
pub use causal_conv::CausalConv;
pub use choice::{Choice, Path, Ran};
pub use expert_linear::ExpertLinear;
pub use gated::{Activation, Gated};
pub use kernel::{INVARIANT_UP_TO, KERNELS, Kernel, KernelInfo};
pub use kernels::Kernels;
pub use kiln_weights::streams::Arithmetic;
pub use kv_append::KvAppend;
pub use kv_pack::KvPack;
pub use kv_reorder::KvReorder;
pub use kv_unpack::KvUnpack;
#[cfg(feature = "cube")]
pub use launches::launches_of;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use matrix::{Matrix, MatrixStack, PackedLayout, PackedMatrix, Use};
pub use normed_linear::{NormedLinear, Then};
pub use product::product;
pub use recording::{Recorded, Recording};
pub use rms_norm::{NormOrder, RmsNorm};
pub use rotary::Rotary;
pub use route::{Route, Routing};
pub use sample::{Draws, Sample, Sampling, likeliest};
pub use selective_scan::SelectiveScan;
pub use self_test::{Coverage, Verdict, self_test};
pub use shader::{Shader, Text};
pub use top_logprobs::TopLogprobs;
pub use unpack::Unpack;
pub use weighted_sum::WeightedSum;
