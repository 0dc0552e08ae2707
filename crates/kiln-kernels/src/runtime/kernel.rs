//! The contract of a kernel with the code that runs it.

use burn::tensor::IntDType;
use kiln_core::layer::Positions;

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
    type Output;

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
}

/// Casts the positions of `rows` rows as kernels read them.
///
/// # Panics
/// If they are those of another number of rows.
pub(crate) fn checked_positions(positions: Positions, rows: usize, kernel: &str) -> Positions {
    assert_eq!(positions.on_device.dims(), [3, rows], "{kernel}: positions");
    Positions { on_device: positions.on_device.cast(IntDType::I32), ..positions }
}
