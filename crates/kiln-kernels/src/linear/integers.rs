//! Which products with packed weights are computed in integers.

use kiln_weights::Format;

use crate::{
    linear::{Linear, packed_lines},
    runtime::{choice::Implementation, kernels::Kernels},
};

impl Kernels {
    /// Whether products with weights packed in this format are computed in integers where
    /// [`Arithmetic::Integers`](crate::Arithmetic::Integers) asks for it. On wgpu, those of few rows are
    /// ([`INVARIANT_UP_TO`](crate::INVARIANT_UP_TO)), and those of experts are not.
    pub fn multiplies_in_integers(&self, format: Format) -> bool {
        match self.implementation_of::<Linear>() {
            Implementation::Native => format.streams().is_some(),
            Implementation::Wgsl => packed_lines::has_bytes(format),
            Implementation::Reference | Implementation::Cube => false,
        }
    }
}
