//! The contract between a kernel and the code that checks it.

use crate::{
    runtime::{
        kernel::{INVARIANT_UP_TO, Kernel},
        shader::Shader,
    },
    testing::{
        case::{Case, Read},
        cut::Extent,
    },
};

/// A kernel whose implementations can be compared with each other, and whose results for rows and tokens
/// together can be compared with the results for each alone.
pub trait Checked: Kernel<Output: Read + Clone> {
    /// Number of rows, and of tokens per row, that are computed beside each other. 1 token if a row is
    /// computed as a whole.
    fn extent(&self) -> [usize; 2];

    /// Number of rows times tokens up to which the results of `cube` do not depend on each other.
    fn cube_is_invariant_up_to(&self) -> usize {
        INVARIANT_UP_TO
    }

    /// Cuts the inputs to some rows and tokens.
    fn part(self, part: Extent) -> Self;

    /// Cuts the result for all rows and tokens to these.
    fn part_of(whole: Self::Output, part: Extent) -> Self::Output;

    /// The shaders that `wgsl` launches.
    fn shaders() -> &'static [Shader] {
        &[]
    }

    /// Inputs on which every implementation is compared with the reference.
    fn cases() -> Vec<Case<Self>>;
}
