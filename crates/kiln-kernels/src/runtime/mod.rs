//! The framework that kernels are written with and run by: their contract, their launches, devices. It knows
//! no kernel.

pub(crate) mod choice;
pub mod device;
pub mod faults;
pub(crate) mod half;
pub(crate) mod kernel;
pub(crate) mod kernels;
#[cfg(feature = "cube")]
pub(crate) mod launch;
#[cfg(feature = "cube")]
pub(crate) mod launches;
#[cfg(feature = "wgpu")]
pub(crate) mod matrix_units;
#[cfg(feature = "cpu")]
pub(crate) mod native;
pub(crate) mod product;
pub(crate) mod recording;
pub(crate) mod shader;
#[cfg(feature = "cube")]
pub(crate) mod tensor_cores;
#[cfg(feature = "cuda")]
pub(crate) mod tickets;
