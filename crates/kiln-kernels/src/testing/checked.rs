//! The contract of a kernel with the code that checks it.

use crate::{
    runtime::{kernel::Kernel, shader::Shader},
    testing::{
        case::{Case, Read},
        cut::Extent,
    },
};

/// A kernel whose implementations can be compared with each other, and rows and tokens together with each
/// alone.
pub trait Checked: Kernel<Output: Read + Clone> {
    /// How many rows, and tokens of each of them, are computed beside each other. Up to
    /// [`INVARIANT_UP_TO`](crate::INVARIANT_UP_TO) of them, none depends on the others. 1 token where a row is
    /// computed as a whole.
    fn extent(&self) -> [usize; 2];

    /// The inputs of some rows and tokens alone.
    fn part(self, part: Extent) -> Self;

    /// What belongs to these rows and tokens, of the result of all.
    fn part_of(whole: Self::Output, part: Extent) -> Self::Output;

    /// The shaders that `wgsl` launches.
    fn shaders() -> &'static [Shader] {
        &[]
    }

    /// Inputs with which every implementation is compared with the reference.
    fn cases() -> Vec<Case<Self>>;
}
