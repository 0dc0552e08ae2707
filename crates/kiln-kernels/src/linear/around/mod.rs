//! Products of few rows on GPUs, with what is around them in a decoder.

#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "wgpu")]
pub(crate) mod wgsl;

#[cfg(feature = "cube")]
use burn::tensor::Device;
use burn::tensor::Tensor;

#[cfg(feature = "cube")]
use crate::{
    linear::matrix::Matrix,
    norm::rms_norm::NormOrder,
    runtime::launch::{LANES, enough},
};
use crate::{
    linear::{activation::Activation, packed_lines},
    runtime::shader::{Binding, Lines, Shader, reads, writes},
};

/// What becomes of a product `[rows, tokens, out]`.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a launch has one")]
pub enum Then {
    Nothing,
    /// Its first half makes gates of its second, as [`Gated`](crate::Gated) does: `[rows, tokens, out / 2]`.
    Gate(Activation),
    /// The first `heads` vectors of `head_dim` numbers are rotated, as [`Rotary`](crate::Rotary) does.
    Rotate {
        /// `[1 or rows, tokens, rotary_dim / 2]`, float32
        cos: Tensor<3>,
        /// As `cos`.
        sin: Tensor<3>,
        heads: usize,
        head_dim: usize,
    },
}

/// A product with what is around it, for the GPU kernels.
#[cfg(feature = "cube")]
#[derive(Debug)]
pub(crate) struct Around {
    pub(crate) x: Tensor<3>,
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Tensor<1>>,
    pub(crate) residual: Option<Tensor<3>>,
    pub(crate) norm: Option<Scales>,
    pub(crate) then: Then,
}

/// What normed numbers are multiplied by.
#[cfg(feature = "cube")]
#[derive(Debug)]
pub(crate) struct Scales {
    pub(crate) scale: Tensor<1>,
    pub(crate) eps: f64,
    pub(crate) order: NormOrder,
}

#[cfg(feature = "cube")]
impl Then {
    /// Places in the order of work: rows of the weight that meet are in one four.
    fn places(&self, output: usize) -> usize {
        match self {
            Self::Gate(_) => (output / 2).div_ceil(2) * 4,
            Self::Nothing | Self::Rotate { .. } => output,
        }
    }

    /// Numbers of a result.
    fn width(&self, output: usize) -> usize {
        match self {
            Self::Gate(_) => output / 2,
            Self::Nothing | Self::Rotate { .. } => output,
        }
    }

    /// Which of [`FUSED`] it is.
    #[cfg(feature = "wgpu")]
    fn option(&self, normed: bool) -> usize {
        match self {
            Self::Nothing => usize::from(normed),
            Self::Gate(activation) => 2 + *activation as usize,
            Self::Rotate { .. } => 5,
        }
    }
}

/// Which workgroup has what. Shapes alone say it: a captured step is replayed.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharing {
    /// Eight lanes times this number go along a row of the weight: a power of 2, up to 32. It does not depend on the rows of x, so that sums
    /// are the same for any number of them.
    pub(crate) splits: usize,
    /// Rows of x that a workgroup has: 1, 2, 4 or 8.
    together: usize,
    pub(crate) workgroups: usize,
}

#[cfg(feature = "cube")]
impl Sharing {
    pub(crate) fn new(rows: usize, input: usize, output: usize, device: &Device) -> Self {
        /// Numbers of a row of the result that a workgroup makes, where eight lanes go along a row of the weight.
        const OUTPUTS: usize = LANES / 8 * 4;
        /// Numbers along which eight lanes are worth having.
        const WORTH: usize = 128;
        /// All lanes of a workgroup.
        const MOST_SPLITS: usize = LANES / 8;
        /// Rows that there are registers for.
        const MOST: usize = 8;

        let most = (input / WORTH).min(enough(device, 1024) * OUTPUTS / output);
        let splits = 1 << most.clamp(1, MOST_SPLITS).ilog2();
        let together = rows.next_power_of_two().min(MOST);
        let workgroups = output.div_ceil(OUTPUTS / splits) * rows.div_ceil(together);
        Self { splits, together, workgroups }
    }
}

/// How tensors are read: by fours where their layout allows.
pub(crate) const PACK: Lines =
    || &["alias pack = vec4<elem>;\nconst WIDTH = 4u;", "alias pack = elem;\nconst WIDTH = 1u;"];

/// How many times eight lanes go along a row of the weight.
pub(crate) const SPLITS: Lines = || {
    &[
        "const SPLITS = 1u;",
        "const SPLITS = 2u;",
        "const SPLITS = 4u;",
        "const SPLITS = 8u;",
        "const SPLITS = 16u;",
        "const SPLITS = 32u;",
    ]
};

/// What is done around a product.
const FUSED: Lines = || {
    &[
        "const NORMED = false;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
        "const NORMED = true;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 0u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 1u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 2u;",
        "const NORMED = true;\nconst THEN = ROTATED;\nconst ACTIVATION = 0u;",
    ]
};

/// Rows of x that a workgroup has.
const ROWS: Lines = || &["const ROWS = 1u;", "const ROWS = 2u;", "const ROWS = 4u;", "const ROWS = 8u;"];

/// The tensors of both shaders.
const BINDINGS: &[Binding] = &[
    reads("x"),
    reads("w"),
    reads("bias"),
    reads("residual"),
    writes("y"),
    reads("scales"),
    reads("cosines"),
    reads("sines"),
];

pub(crate) const SHADER: Shader = Shader {
    name: "linear",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../../shaders/linear.wgsl"),
        include_str!("../../../../../shaders/linear_dense.wgsl"),
        include_str!("../../../../../shaders/weights_dense.wgsl"),
        include_str!("../../../../../shaders/row_products.wgsl"),
        include_str!("../../../../../shaders/activation.wgsl")
    ),
    options: &[PACK, ROWS, SPLITS, FUSED],
};

/// For packed weights.
pub(crate) const PACKED: Shader = Shader {
    name: "linear_packed",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../../shaders/linear.wgsl"),
        include_str!("../../../../../shaders/linear_packed.wgsl"),
        include_str!("../../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../../shaders/halves.wgsl"),
        include_str!("../../../../../shaders/row_products.wgsl"),
        include_str!("../../../../../shaders/activation.wgsl")
    ),
    options: &[packed_lines::FORMATS, ROWS, SPLITS, FUSED],
};
