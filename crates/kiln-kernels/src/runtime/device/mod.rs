//! Lists and opens devices. A device that is not available is reported as an error, never as a panic.

#[cfg(not(target_family = "wasm"))]
mod bandwidth;
#[cfg(feature = "cpu")]
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod info;
mod open;
#[cfg(feature = "cube")]
pub(crate) mod opened;
#[cfg(feature = "wgpu")]
mod subnormals;
mod system;
#[cfg(feature = "wgpu")]
pub(crate) mod wgpu;

#[cfg(not(target_family = "wasm"))]
pub use bandwidth::CopyBandwidth;
pub use info::{DeviceClass, DeviceInfo, DeviceName, MatrixUnits, Opened};
pub use open::{list, open, open_async};
#[cfg(all(feature = "cpu", target_family = "wasm"))]
pub use system::help;
pub use system::{limit_instructions, limit_threads, threads};
