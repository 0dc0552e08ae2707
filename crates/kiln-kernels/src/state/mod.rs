//! State-space mixers.

pub(crate) mod causal_conv;
pub(crate) mod selective_scan;
