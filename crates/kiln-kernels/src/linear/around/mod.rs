//! Products of few rows on GPUs, fused with the operations before and after them in a decoder.

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

/// The operation after a product `[rows, tokens, out]`.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a launch has one")]
pub enum Then {
    Nothing,
    /// The first half is the gate of the second, as in [`Gated`](crate::Gated): `[rows, tokens, out / 2]`.
    Gate(Activation),
    /// The first `heads` vectors of `head_dim` numbers are rotated, as in [`Rotary`](crate::Rotary) with
    /// [`Halves`](kiln_core::need::RotaryPairs::Halves).
    Rotate {
        /// `[1 or rows, tokens, rotary_dim / 2]`, float32
        cos: Tensor<3>,
        /// Like `cos`.
        sin: Tensor<3>,
        heads: usize,
        head_dim: usize,
    },
}

/// A product with the operations before and after it, for the GPU kernels.
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

/// The parameters of the norm before a product.
#[cfg(feature = "cube")]
#[derive(Debug)]
pub(crate) struct Scales {
    pub(crate) scale: Tensor<1>,
    pub(crate) eps: f64,
    pub(crate) order: NormOrder,
}

#[cfg(feature = "cube")]
impl Then {
    /// Number of places in the order of work: rows of the weight whose results are combined are in the same
    /// four.
    fn places(&self, output: usize) -> usize {
        match self {
            Self::Gate(_) => (output / 2).div_ceil(2) * 4,
            Self::Nothing | Self::Rotate { .. } => output,
        }
    }

    /// Length of a result.
    fn width(&self, output: usize) -> usize {
        match self {
            Self::Gate(_) => output / 2,
            Self::Nothing | Self::Rotate { .. } => output,
        }
    }

    /// Index of the operation in [`AFTER`].
    #[cfg(feature = "wgpu")]
    fn after(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Gate(activation) => 1 + *activation as usize,
            Self::Rotate { .. } => 5,
        }
    }

    /// Index of the operation in [`FUSED`].
    #[cfg(feature = "wgpu")]
    fn option(&self, normed: bool) -> usize {
        match self {
            Self::Nothing => usize::from(normed),
            Self::Gate(activation) => 2 + *activation as usize,
            Self::Rotate { .. } => 6,
        }
    }
}

/// The division of work among workgroups. It depends on shapes alone, because a captured step is replayed.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharing {
    /// Number of groups of eight lanes along a row of the weight: a power of 2, up to 32. With tensor cores,
    /// number of warps, up to 8. It does not depend on the rows of x, so that sums are the same for any
    /// number of them.
    pub(crate) splits: usize,
    /// Rows of x per workgroup: a power of 2, up to 8, or up to 32 with tensor cores.
    together: usize,
    pub(crate) workgroups: usize,
}

#[cfg(feature = "cube")]
impl Sharing {
    pub(crate) fn new(rows: usize, [output, input]: [usize; 2], packed: bool, device: &Device) -> Self {
        /// The fewest numbers of a dense row that are worth a lane.
        const NUMBERS: usize = 16;
        /// The numbers of a packed row that a lane reads at once.
        const RUN: usize = 32;
        /// Results per workgroup and row of x, with eight lanes along a row of the weight.
        const OUTPUTS: usize = LANES / 8 * 4;
        /// Splits that use all lanes of a workgroup.
        const MOST_SPLITS: usize = LANES / 8;
        /// Most rows that there are registers for.
        const MOST: usize = 8;

        let worth = if packed { RUN } else { NUMBERS };
        let most = (input / (8 * worth)).min(enough(device, 1024) * OUTPUTS / output);
        let splits = 1 << most.clamp(1, MOST_SPLITS).ilog2();
        let together = rows.next_power_of_two().min(MOST);
        let workgroups = output.div_ceil(OUTPUTS / splits) * rows.div_ceil(together);
        Self { splits, together, workgroups }
    }

    /// A division of these `rows` of x with up to four per workgroup.
    #[cfg(feature = "wgpu")]
    fn by_four(self, rows: usize) -> Self {
        let together = self.together.min(4);
        let workgroups = self.workgroups / rows.div_ceil(self.together) * rows.div_ceil(together);
        Self { together, workgroups, ..self }
    }
}

/// How the shader reads tensors: by fours where their layout allows it.
pub(crate) const PACK: Lines =
    || &["alias pack = vec4<elem>;\nconst WIDTH = 4u;", "alias pack = elem;\nconst WIDTH = 1u;"];

/// Number of groups of eight lanes along a row of the weight.
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

/// The operations before and after a product.
const FUSED: Lines = || {
    &[
        "const NORMED = false;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
        "const NORMED = true;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 0u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 1u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 2u;",
        "const NORMED = true;\nconst THEN = GATED;\nconst ACTIVATION = 3u;",
        "const NORMED = true;\nconst THEN = ROTATED;\nconst ACTIVATION = 0u;",
    ]
};

/// The operations after a product with bytes.
#[cfg(feature = "wgpu")]
const AFTER: Lines = || {
    &[
        "const NORMED = false;\nconst THEN = NOTHING;\nconst ACTIVATION = 0u;",
        "const NORMED = false;\nconst THEN = GATED;\nconst ACTIVATION = 0u;",
        "const NORMED = false;\nconst THEN = GATED;\nconst ACTIVATION = 1u;",
        "const NORMED = false;\nconst THEN = GATED;\nconst ACTIVATION = 2u;",
        "const NORMED = false;\nconst THEN = GATED;\nconst ACTIVATION = 3u;",
        "const NORMED = false;\nconst THEN = ROTATED;\nconst ACTIVATION = 0u;",
    ]
};

/// Rows of x per workgroup.
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

/// The shader for packed weights.
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

/// The shader for packed weights and x in bytes.
#[cfg(feature = "wgpu")]
pub(crate) const BYTES: Shader = Shader {
    name: "linear_bytes",
    bindings: BINDINGS,
    text: concat!(
        include_str!("../../../../../shaders/linear.wgsl"),
        include_str!("../../../../../shaders/linear_bytes.wgsl"),
        include_str!("../../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../../shaders/halves.wgsl"),
        include_str!("../../../../../shaders/row_products.wgsl"),
        include_str!("../../../../../shaders/activation.wgsl")
    ),
    options: &[packed_lines::OF_BYTES, ROWS, SPLITS, AFTER],
};

/// The shader that rounds x to bytes.
#[cfg(feature = "wgpu")]
pub(crate) const ROWS_IN_BYTES: Shader = Shader {
    name: "rows_in_bytes",
    bindings: &[reads("x"), reads("scales"), writes("bytes"), writes("runs")],
    text: include_str!("../../../../../shaders/rows_in_bytes.wgsl"),
    options: &[|| &["const NORMED = false;", "const NORMED = true;"]],
};
