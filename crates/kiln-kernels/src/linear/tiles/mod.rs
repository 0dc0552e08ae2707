//! Products of more than a few rows with the matrix units of GPUs. Packed weights are unpacked in the memory
//! of a workgroup.

#[cfg(feature = "cuda")]
pub(super) mod cube;
#[cfg(feature = "wgpu")]
pub(super) mod wgsl;
