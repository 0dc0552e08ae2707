//! Inputs for comparing the implementations.

pub(super) mod dense;
pub(super) mod packed;
