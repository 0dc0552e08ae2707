//! Checks of all kernels: the list of them, the laws that they keep, the self-test of a device.

pub(crate) mod any_case;
pub(crate) mod invariance;
pub(crate) mod registry;
pub(crate) mod self_test;
