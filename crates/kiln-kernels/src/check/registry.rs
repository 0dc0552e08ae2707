//! The list of all kernels.

use crate::{
    attention::{Attention, append::AttentionAppend, packed::AttentionPacked, rotary::Rotary},
    cache::{
        float8_unpack::Float8Unpack, kv_append::KvAppend, kv_pack::KvPack, kv_reorder::KvReorder,
        kv_unpack::KvUnpack,
    },
    check::any_case::AnyCase,
    experts::{expert_linear::ExpertLinear, route::Route, weighted_sum::WeightedSum},
    linear::{Linear, activate::Activate, gated::Gated, normed_linear::NormedLinear, unpack::Unpack},
    norm::{layer_norm::LayerNorm, rms_norm::RmsNorm},
    runtime::shader::{Shader, Text},
    sampling::{beam_step::BeamStep, sample::Sample, top_logprobs::TopLogprobs},
    state::{causal_conv::CausalConv, matrix_scan::MatrixScan, selective_scan::SelectiveScan},
    testing::checked::Checked,
};

/// Every kernel. A line here gives a kernel the tests that all kernels have to pass.
pub static KERNELS: &[KernelInfo] = &[
    KernelInfo::of::<RmsNorm>(),
    KernelInfo::of::<LayerNorm>(),
    KernelInfo::of::<Rotary>(),
    KernelInfo::of::<KvAppend>(),
    KernelInfo::of::<Linear>(),
    KernelInfo::of::<NormedLinear>(),
    KernelInfo::of::<Gated>(),
    KernelInfo::of::<Activate>(),
    KernelInfo::of::<Attention>(),
    KernelInfo::of::<AttentionAppend>(),
    KernelInfo::of::<KvPack>(),
    KernelInfo::of::<KvUnpack>(),
    KernelInfo::of::<Float8Unpack>(),
    KernelInfo::of::<AttentionPacked>(),
    KernelInfo::of::<Sample>(),
    KernelInfo::of::<TopLogprobs>(),
    KernelInfo::of::<BeamStep>(),
    KernelInfo::of::<KvReorder>(),
    KernelInfo::of::<CausalConv>(),
    KernelInfo::of::<SelectiveScan>(),
    KernelInfo::of::<MatrixScan>(),
    KernelInfo::of::<Route>(),
    KernelInfo::of::<ExpertLinear>(),
    KernelInfo::of::<WeightedSum>(),
    KernelInfo::of::<Unpack>(),
];

/// A kernel of the list [`KERNELS`].
#[derive(Clone, Copy, Debug)]
pub struct KernelInfo {
    pub name: &'static str,
    shaders: fn() -> &'static [Shader],
    cases: fn() -> Vec<AnyCase>,
}

impl KernelInfo {
    /// Collects the name, the shaders and the cases of a kernel.
    pub const fn of<K: Checked>() -> Self {
        Self {
            name: K::NAME,
            shaders: K::shaders,
            cases: || K::cases().into_iter().map(AnyCase::of).collect(),
        }
    }

    /// Returns the text of each shader in every permutation.
    pub fn shaders(&self) -> impl Iterator<Item = Text> {
        (self.shaders)().iter().flat_map(Shader::permutations)
    }

    /// Inputs on which every implementation is compared with the reference.
    pub fn cases(&self) -> Vec<AnyCase> {
        (self.cases)()
    }
}
