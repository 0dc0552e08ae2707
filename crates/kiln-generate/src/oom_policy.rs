//! What is done when memory runs out.

use std::fmt;

use kiln_core::{Result, layer::StepShape, model_cache::ModelCache};

/// Makes a cache take less memory in the middle of a generation, which then goes on from the same token.
pub trait OomPolicy: fmt::Debug + Send + Sync {
    /// Makes `cache` take less while `step` is stored, beside `working` bytes of the model's own; whether it does now.
    ///
    /// # Errors
    /// What the device says; the cache can only be reset then.
    fn shrink(&self, cache: &mut ModelCache, step: &StepShape, working: usize) -> Result<bool>;
}
