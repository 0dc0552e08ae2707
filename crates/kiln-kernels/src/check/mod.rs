//! Checks of all kernels: their list, the laws that they keep, and the self-test of a device.

pub(crate) mod any_case;
pub(crate) mod invariance;
pub(crate) mod registry;
pub(crate) mod self_test;
