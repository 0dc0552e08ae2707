//! What chooses the next tokens on the device, so that the host need not wait for it.

use burn::tensor::{Int, Tensor};
use kiln_core::{
    Result,
    layer::{Positions, Reorders},
    model_cache::ModelCache,
    read_back::{self, ReadBack},
};

use crate::{device_beams::DeviceBeams, device_sampler::DeviceSampler};

/// What chooses the next tokens.
#[derive(Debug)]
pub(crate) enum Chooser {
    /// For each row alone.
    Sampler(DeviceSampler),
    /// For all rows of a prompt.
    Beams(Box<DeviceBeams>),
}

/// What was chosen in a step.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    /// What is fed next, `[rows, 1]`.
    pub(crate) next: Tensor<2, Int>,
    pub(crate) to_read: ToRead,
}

/// What the host reads of a step.
#[derive(Clone, Debug)]
pub(crate) enum ToRead {
    /// The token of each row, `[rows, 1]`; -1 where its scores are no distribution.
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
    /// Has all that a step needs; whether some of it is new, which a recording does not know.
    pub(crate) fn prepare(&mut self) -> bool {
        match self {
            Self::Sampler(sampler) => sampler.prepare(),
            Self::Beams(_) => false,
        }
    }

    /// Whether a captured step can choose and leave `cache` as the next one needs it.
    pub(crate) fn can_be_captured(&self, cache: &ModelCache) -> bool {
        matches!(self, Self::Sampler(_)) || cache.reorders() == Reorders::InPlace
    }

    /// The next tokens for logits `[rows, 1, vocab]`.
    pub(crate) fn choose(&mut self, logits: Tensor<3>) -> Result<Chosen> {
        match self {
            Self::Sampler(sampler) => {
                let tokens = sampler.choose(logits)?;
                // Any token will do where there is none.
                Ok(Chosen { next: tokens.clone().clamp_min(0), to_read: ToRead::Tokens(tokens) })
            }
            Self::Beams(beams) => beams.choose(logits),
        }
    }

    /// After a token was fed to each row, which stand at `positions`, and the next was chosen: has the cache hold what it continues.
    pub(crate) fn reorder(&mut self, cache: &mut ModelCache, positions: &Positions) -> Result<()> {
        match self {
            Self::Sampler(_) => Ok(()),
            Self::Beams(beams) => beams.reorder(cache, positions),
        }
    }

    /// After a step that chose tokens was replayed.
    pub(crate) fn repeated(&mut self) {
        if let Self::Sampler(sampler) = self {
            sampler.repeated();
        }
    }
}
