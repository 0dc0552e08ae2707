//! Mixtures of experts.

pub(crate) mod expert_linear;
pub(crate) mod route;
pub(crate) mod weighted_sum;
