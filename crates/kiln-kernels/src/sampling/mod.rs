//! The choice of the next token.

pub(crate) mod beam_step;
#[cfg(feature = "cube")]
pub(crate) mod order;
pub(crate) mod sample;
pub(crate) mod top_logprobs;
