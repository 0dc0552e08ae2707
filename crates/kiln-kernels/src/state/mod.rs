//! Mixers with a state of constant size.

pub(crate) mod causal_conv;
mod functions;
pub(crate) mod matrix_scan;
pub(crate) mod selective_scan;
