//! What every cache must do, which devices it is shown on, and what transformers did.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod devices;
pub mod laws;

pub use devices::devices;
