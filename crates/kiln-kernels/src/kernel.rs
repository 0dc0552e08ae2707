//! What a kernel is, and the list of all of them.

use burn::tensor::IntDType;
use kiln_core::layer::Positions;

use crate::{
    activate::Activate,
    attention::{Attention, AttentionPacked},
    beam_step::BeamStep,
    cases::{AnyCase, Case, Read},
    causal_conv::CausalConv,
    expert_linear::ExpertLinear,
    gated::Gated,
    invariance::Extent,
    kv_append::KvAppend,
    kv_pack::KvPack,
    kv_reorder::KvReorder,
    kv_unpack::KvUnpack,
    layer_norm::LayerNorm,
    linear::Linear,
    normed_linear::NormedLinear,
    rms_norm::RmsNorm,
    rotary::Rotary,
    route::Route,
    sample::Sample,
    selective_scan::SelectiveScan,
    shader::{Shader, Text},
    top_logprobs::TopLogprobs,
    unpack::Unpack,
    weighted_sum::WeightedSum,
};

/// Every kernel. A line here gives it the tests that all kernels have to pass.
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
    KernelInfo::of::<KvPack>(),
    KernelInfo::of::<KvUnpack>(),
    KernelInfo::of::<AttentionPacked>(),
    KernelInfo::of::<Sample>(),
    KernelInfo::of::<TopLogprobs>(),
    KernelInfo::of::<BeamStep>(),
    KernelInfo::of::<KvReorder>(),
    KernelInfo::of::<CausalConv>(),
    KernelInfo::of::<SelectiveScan>(),
    KernelInfo::of::<Route>(),
    KernelInfo::of::<ExpertLinear>(),
    KernelInfo::of::<WeightedSum>(),
    KernelInfo::of::<Unpack>(),
];

/// Rows times tokens of each, up to which no number of a row depends on what is computed beside it, bit for bit. More may
/// take another path.
pub const INVARIANT_UP_TO: usize = 16;

/// The inputs of a computation that has up to four implementations. They agree with each other.
///
/// [`Kernels::run`](crate::Kernels::run) selects the implementation.
#[allow(clippy::result_large_err, reason = "an implementation that a kernel lacks gives its inputs back")]
pub trait Kernel: Clone + Sized + 'static {
    /// The name of its file, of its shader, and in traces.
    const NAME: &'static str;
    type Output: Read + Clone;

    /// Casts inputs to the types that the implementations take.
    ///
    /// # Panics
    /// If inputs do not fit together, as every operation of Burn does.
    fn checked(self) -> Self;

    /// The shape of the main input, for traces.
    fn shape(&self) -> Vec<usize>;

    /// Products of two numbers that it takes, where these are what GPUs take long for: of many rows. 0 for others.
    fn work(&self) -> u64 {
        0
    }

    /// Computes it in plain Burn operations, on any device. This defines what the other implementations compute.
    fn reference(self) -> Self::Output;

    /// Computes it on the CPU.
    ///
    /// # Errors
    /// The inputs, if this implementation does not support them.
    fn native(self) -> Result<Self::Output, Self> {
        Err(self)
    }

    /// Computes it on wgpu, with a shader.
    ///
    /// # Errors
    /// The inputs, if this implementation does not support them.
    fn wgsl(self) -> Result<Self::Output, Self> {
        Err(self)
    }

    /// Computes it on CUDA or wgpu, with a `#[cube]` function.
    ///
    /// # Errors
    /// The inputs, if this implementation does not support them.
    fn cube(self) -> Result<Self::Output, Self> {
        Err(self)
    }

    /// How many rows, and tokens of each of them, are computed beside each other: up to [`INVARIANT_UP_TO`] of them, none
    /// depends on the others. 1 token where a row is computed as a whole.
    fn extent(&self) -> [usize; 2];

    /// The inputs of some rows and tokens alone.
    fn part(self, part: Extent) -> Self;

    /// What belongs to these rows and tokens, of the result of all.
    fn part_of(whole: Self::Output, part: Extent) -> Self::Output;

    /// The shaders that `wgsl` launches.
    fn shaders() -> &'static [Shader] {
        &[]
    }

    /// Inputs with which every implementation is compared with the reference.
    fn cases() -> Vec<Case<Self>>;
}

/// A kernel of the list [`KERNELS`].
#[derive(Clone, Copy, Debug)]
pub struct KernelInfo {
    pub name: &'static str,
    shaders: fn() -> &'static [Shader],
    cases: fn() -> Vec<AnyCase>,
}

impl KernelInfo {
    /// What is known of a kernel.
    pub const fn of<K: Kernel>() -> Self {
        Self {
            name: K::NAME,
            shaders: K::shaders,
            cases: || K::cases().into_iter().map(AnyCase::of).collect(),
        }
    }

    /// The text of each of its shaders in every permutation.
    pub fn shaders(&self) -> impl Iterator<Item = Text> {
        (self.shaders)().iter().flat_map(Shader::permutations)
    }

    /// Inputs with which every implementation is compared with the reference.
    pub fn cases(&self) -> Vec<AnyCase> {
        (self.cases)()
    }
}

/// Casts the positions of `rows` rows as kernels read them.
///
/// # Panics
/// If they are those of another number of rows.
pub(crate) fn checked_positions(positions: Positions, rows: usize, kernel: &str) -> Positions {
    assert_eq!(positions.on_device.dims(), [2, rows], "{kernel}: positions");
    Positions { on_device: positions.on_device.cast(IntDType::I32), ..positions }
}
