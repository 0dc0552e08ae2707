//! Inputs with which implementations are compared.

pub(super) mod dense;
pub(super) mod packed;
