//! KIVI: scales keys by channel over groups of tokens, and values by token over groups of channels (Liu et
//! al., 2024, <https://arxiv.org/abs/2402.02750>).
//!
//! Some channels of keys are large for every token; with a scale of their own they do not hide the others.

use super::{CacheFormat, Grouping, Optimizer};

pub(super) static KIVI: CacheFormat = CacheFormat {
    name: "kivi",
    summary: "scales keys by channel over tokens and values by token over channels",
    bits: &[2, 4, 8],
    axes: &[(-1, Grouping::PerChannel), (0, Grouping::Neighbours)],
    default_axes: [-1, 0],
    optimizers: &[Optimizer::Off],
    // The history is never packed again.
    backend: None,
    refined: |_, _| None,
};
