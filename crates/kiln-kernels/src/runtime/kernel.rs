//! The contract between a kernel and the code that runs it.

use burn::tensor::IntDType;
use kiln_core::layer::Positions;

/// Largest number of rows times tokens per row for which the results of a row do not depend, bit for bit, on
/// what is computed beside it. More may take another path.
pub const INVARIANT_UP_TO: usize = 16;

/// The inputs of a computation with up to four implementations that agree with each other.
///
/// [`Kernels::run`](crate::Kernels::run) selects the implementation.
#[allow(clippy::result_large_err, reason = "an implementation that a kernel lacks gives its inputs back")]
pub trait Kernel: Clone + Sized + 'static {
    /// The name of the file and of the shader, also used in traces.
    const NAME: &'static str;
    type Output;

    /// Casts inputs to the types that the implementations take.
    ///
    /// # Panics
    /// If inputs do not fit together, as every operation of Burn does.
    fn checked(self) -> Self;

    /// The shape of the main input, for traces.
    fn shape(&self) -> Vec<usize>;

    /// Number of multiplications, if they take long on GPUs because there are many rows; 0 otherwise.
    fn work(&self) -> u64 {
        0
    }

    /// Computes the result in plain Burn operations, on any device. This defines the result of the other
    /// implementations.
    fn reference(self) -> Self::Output;

    /// Computes the result on the CPU.
    ///
    /// # Errors
    /// Returns the inputs, if this implementation does not support them.
    fn native(self) -> Result<Self::Output, Self> {
        Err(self)
    }

    /// Computes the result on wgpu, with a shader.
    ///
    /// # Errors
    /// Returns the inputs, if this implementation does not support them.
    fn wgsl(self) -> Result<Self::Output, Self> {
        Err(self)
    }

    /// Computes the result on CUDA or wgpu, with a `#[cube]` function.
    ///
    /// # Errors
    /// Returns the inputs, if this implementation does not support them.
    fn cube(self) -> Result<Self::Output, Self> {
        Err(self)
    }
}

/// Casts the positions of `rows` rows to the type that kernels read.
///
/// # Panics
/// If there are positions for another number of rows.
pub(crate) fn checked_positions(positions: Positions, rows: usize, kernel: &str) -> Positions {
    assert_eq!(positions.on_device.dims(), [3, rows], "{kernel}: positions");
    Positions { on_device: positions.on_device.cast(IntDType::I32), ..positions }
}
