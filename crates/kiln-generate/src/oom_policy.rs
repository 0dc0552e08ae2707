//! The answer of a generation to an error of memory.

use std::fmt;

use kiln_core::{Result, layer::StepShape, model_cache::ModelCache};

/// Makes a cache take less memory in the middle of a generation, which then continues from the same token.
pub trait OomPolicy: fmt::Debug + Send + Sync {
    /// Makes `cache` take less memory while `step` is stored, beside `working` bytes of the model's own.
    /// Returns whether it did.
    ///
    /// # Errors
    /// Errors of the device. The cache can only be reset after them.
    fn shrink(&self, cache: &mut ModelCache, step: &StepShape, working: usize) -> Result<bool>;
}
