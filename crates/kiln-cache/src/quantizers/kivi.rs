//! KIVI: keys are scaled by channel over groups of tokens, values by token over groups of channels (Liu et al., 2024,
//! <https://arxiv.org/abs/2402.02750>).
//!
//! Some channels of keys are large for every token; a scale of their own keeps them from hiding the others.

use super::{Backend, Format, Grouping};

#[derive(Debug)]
pub(super) struct Kivi;

impl Format for Kivi {
    fn name(&self) -> &'static str {
        "kivi"
    }

    fn summary(&self) -> &'static str {
        "scales keys by channel over tokens and values by token over channels"
    }

    fn bits(&self) -> &'static [usize] {
        &[2, 4, 8]
    }

    fn axes(&self) -> &'static [(i64, Grouping)] {
        &[(-1, Grouping::PerChannel), (0, Grouping::Neighbours)]
    }

    fn default_axes(&self) -> [i64; 2] {
        [-1, 0]
    }

    /// History is never touched again.
    fn backend(&self) -> Option<&'static dyn Backend> {
        None
    }
}
