//! A beam search on the device. It chooses the next beams, feeds them, and moves the rows of the cache. The
//! host repeats the choice from the candidates.

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    layer::{Parents, Positions},
    model_cache::ModelCache,
};
use kiln_kernels::{BeamShape, BeamStep, Beams, Kernels, TopLogprobs};

use crate::chooser::{Chosen, ToRead};

/// The beams of all prompts, on the device.
#[derive(Debug)]
pub(crate) struct DeviceBeams {
    kernels: Kernels,
    shape: BeamShape,
    /// Number of the likeliest tokens of each row that are considered.
    most: usize,
    /// The sum of each row, `[rows]`. It has one owner, so that it is written in place. `None` only while a
    /// step is launched.
    sums: Option<Tensor<1>>,
    /// Tokens that end a sequence.
    ends: Tensor<1, Int>,
    /// Which groups are done, `[prompts · groups]`: on the device, and as the host last set them.
    done: Tensor<1, Int>,
    told: Vec<i32>,
    /// The first row of the prompt of each row.
    firsts: Tensor<1, Int>,
    /// Number of tokens of each row after the prompt that the cache holds, `[1]`.
    behind: Tensor<1, Int>,
    /// The rows that the next step continues; `None` once the cache has moved them.
    parents: Option<Tensor<1, Int>>,
}

impl DeviceBeams {
    /// Creates beams with these sums. `behind`: number of tokens after the prompt that the cache holds;
    /// `ends`: the tokens that end a sequence.
    pub(crate) fn new(
        kernels: &Kernels,
        shape: BeamShape,
        most: usize,
        sums: Vec<f32>,
        ends: impl Iterator<Item = i32>,
        behind: usize,
    ) -> Self {
        let (rows, device) = (sums.len(), kernels.device());
        let none = std::iter::once(-1);
        let told = vec![0; rows / shape.beams * shape.groups];
        let firsts = (0..rows).map(|row| (row - row % shape.beams) as i32);
        Self {
            kernels: kernels.clone(),
            shape,
            most,
            sums: Some(Tensor::from_data(TensorData::new(sums, [rows]), device)),
            ends: ints(ends.chain(none), device),
            done: ints(told.iter().copied(), device),
            told,
            firsts: ints(firsts, device),
            behind: ints(std::iter::once(behind as i32), device),
            parents: None,
        }
    }

    /// Chooses the next beams for logits `[rows, 1, vocab]`.
    pub(crate) fn choose(&mut self, logits: Tensor<3>) -> Result<Chosen> {
        let given_up = || Error::Execution("the step before was given up".into());
        let (tokens, log_probs) = self.kernels.run(TopLogprobs { logits, most: self.most });
        let step = BeamStep {
            tokens,
            log_probs,
            sums: self.sums.take().ok_or_else(given_up)?,
            ends: self.ends.clone(),
            done: self.done.clone(),
            shape: self.shape,
        };
        let Beams { candidates, next, parents, sums } = self.kernels.run(step);
        (self.sums, self.parents) = (Some(sums), Some(parents));
        Ok(Chosen { next, to_read: ToRead::Candidates(candidates) })
    }

    /// Moves the rows of the cache to the beams that were chosen last. `positions`: the positions of the
    /// tokens that were fed last.
    pub(crate) fn reorder(&mut self, cache: &mut ModelCache, positions: &Positions) -> Result<()> {
        self.behind.inplace(|behind| behind + 1);
        let Some(rows) = self.parents.take() else { return Ok(()) };
        let parents = Parents {
            rows,
            firsts: self.firsts.clone(),
            width: self.shape.beams,
            positions: positions.clone(),
            behind: self.behind.clone(),
        };
        cache.reorder_on_device(&parents)
    }

    /// Sets which groups are done, `[prompts · groups]`. Without effect if a prompt has one group.
    pub(crate) fn set_done(&mut self, done: impl Iterator<Item = bool>) {
        let done: Vec<i32> = done.map(i32::from).collect();
        if self.shape.groups > 1 && done != self.told {
            // In place, because a captured step reads it.
            let newly =
                ints(done.iter().zip(&self.told).map(|(now, before)| now - before), self.kernels.device());
            self.done.inplace(|done| done + newly);
            self.told = done;
        }
    }
}

fn ints(ints: impl Iterator<Item = i32>, device: &Device) -> Tensor<1, Int> {
    let ints: Vec<i32> = ints.collect();
    let len = ints.len();
    Tensor::from_data(TensorData::new(ints, [len]), device)
}
