//! Laws of every cache, the devices under test, and conformance with recordings of transformers.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod devices;
pub mod laws;

pub use devices::devices;
