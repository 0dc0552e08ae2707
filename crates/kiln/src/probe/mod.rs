//! Measurement of the loss of packed weights and caches: text is fed, and the predictions of the model are
//! compared.

mod caches;
mod comparison;
mod reading;
mod tensors;
mod weights;
mod windows;

pub use caches::{PROBED, Probe, Probed, probe};
pub use comparison::{BROKEN, Comparison, Loss, UNSEEN, UNSEEN_AGREEMENT};
pub use tensors::{ProbedTensors, TensorsProbe, probe_tensors};
pub use weights::{MIXTURES, ProbedWeights, ROUNDING, WeightsProbe, check_original, probe_weights};
pub use windows::own_text;
