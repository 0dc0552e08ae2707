//! The choice of the next tokens on the device, so that the host need not wait for it.

use burn::tensor::{Int, Tensor};
use kiln_core::{
    Result,
    layer::{Positions, Reorders},
    model_cache::ModelCache,
    read_back::{self, ReadBack},
};

use crate::{device_beams::DeviceBeams, device_sampler::DeviceSampler};

/// Chooses the next tokens.
#[derive(Debug)]
pub(crate) enum Chooser {
    /// For each row alone.
    Sampler(DeviceSampler),
    /// For all rows of a prompt.
    Beams(Box<DeviceBeams>),
}

/// The choice of a step.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    /// The tokens that are fed next, `[rows, 1]`.
    pub(crate) next: Tensor<2, Int>,
    pub(crate) to_read: ToRead,
}

/// The tensor that the host reads of a step.
#[derive(Clone, Debug)]
pub(crate) enum ToRead {
    /// The token of each row, `[rows, 1]`; -1 if its scores are not a distribution.
    Tokens(Tensor<2, Int>),
    /// See [`candidates`](kiln_kernels::Beams::candidates).
    Candidates(Tensor<3>),
}

impl ToRead {
    pub(crate) fn start_reading(self) -> ReadBack {
        match self {
            Self::Tokens(tokens) => read_back::start(tokens),
            Self::Candidates(candidates) => read_back::start(candidates),
        }
    }
}

impl Chooser {
    /// Prepares the next step. Returns true if a buffer was replaced, so that a captured step must be
    /// recorded again.
    pub(crate) fn prepare(&mut self) -> bool {
        match self {
            Self::Sampler(sampler) => sampler.prepare(),
            Self::Beams(_) => false,
        }
    }

    /// Whether a captured step can choose, and leave `cache` ready for the next step.
    pub(crate) fn can_be_captured(&self, cache: &ModelCache) -> bool {
        matches!(self, Self::Sampler(_)) || cache.reorders() == Reorders::InPlace
    }

    /// Chooses the next tokens for logits `[rows, 1, vocab]`.
    pub(crate) fn choose(&mut self, logits: Tensor<3>) -> Result<Chosen> {
        match self {
            Self::Sampler(sampler) => {
                let tokens = sampler.choose(logits)?;
                // Any token will do if there is none.
                Ok(Chosen { next: tokens.clone().clamp_min(0), to_read: ToRead::Tokens(tokens) })
            }
            Self::Beams(beams) => beams.choose(logits),
        }
    }

    /// Moves the rows of the cache to the rows that the chosen tokens continue. `positions`: the positions of
    /// the tokens that were fed last.
    pub(crate) fn reorder(&mut self, cache: &mut ModelCache, positions: &Positions) -> Result<()> {
        match self {
            Self::Sampler(_) => Ok(()),
            Self::Beams(beams) => beams.reorder(cache, positions),
        }
    }

    /// Counts a step that chose tokens and was replayed.
    pub(crate) fn repeated(&mut self) {
        if let Self::Sampler(sampler) = self {
            sampler.repeated();
        }
    }
}
