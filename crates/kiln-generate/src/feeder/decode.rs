//! Steps of one token each, fed from a buffer on the device: launched one by one, or captured once and
//! replayed.

use burn::tensor::{Device, Int, Tensor};
use kiln_core::{
    Result,
    batch::{Batch, PreparedSteps},
    layer::RowPosition,
    model::Logits,
};
use kiln_kernels::{Recorded, Recording};

use super::Feeder;
use crate::chooser::{Chooser, Chosen};

/// Number of steps before one is recorded: the allocator learns the needs of a step.
const WARM_UP: usize = 3;

/// Number of steps in the first rotary table. Each following table has twice as many, up to the largest.
const FIRST_TABLE: usize = 64;
const LARGEST_TABLE: usize = 2048;

/// The output of a step, on the device.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are two of it")]
pub(crate) enum Output {
    /// The choice of the device. The next step feeds it.
    Chosen(Chosen),
    /// Logits `[rows, 1, vocab]`, or another output that is [`Wanted`]. The next step feeds the tokens of
    /// [`DecodeLoop::give`].
    Logits(Tensor<3>),
}

/// The outputs of a pass; see [`Logits`].
#[derive(Clone, Debug, Default)]
pub(crate) enum Wanted {
    #[default]
    Last,
    Early(Vec<usize>),
    Hidden,
    /// The hidden states of a prompt, from which its log-probabilities are computed; later the last position.
    PromptLogprobs,
}

impl Wanted {
    pub(super) fn logits(&self) -> Logits<'_> {
        match self {
            Self::Last => Logits::Last,
            Self::Early(layers) => Logits::Early(layers),
            Self::Hidden | Self::PromptLogprobs => Logits::Hidden,
        }
    }
}

/// Feeds one token after the other to a model.
#[derive(Debug)]
pub(super) struct DecodeLoop {
    /// The tokens that are fed next, `[rows, 1]`. They have one owner, so that they are written in place.
    tokens: Tensor<2, Int>,
    steps: PreparedSteps,
    /// Number of steps in the current tables.
    table: usize,
    capture: Capture,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
enum Capture {
    Off,
    /// Number of steps since the allocator was told.
    WarmingUp(usize),
    On(Recording, Output),
    /// The device gave the recording up.
    Lost,
}

impl DecodeLoop {
    /// Prepares to feed `tokens` `[rows, 1]`.
    pub(super) fn new(tokens: &Tensor<2, Int>, feeder: &Feeder<'_>) -> Self {
        let (device, rows) = (tokens.device(), tokens.dims()[0]);
        let buffer = Tensor::zeros([rows, 1], (&device, tokens.dtype()));
        Self {
            tokens: buffer.slice_assign([0..rows, 0..1], tokens.clone()),
            steps: steps(feeder, FIRST_TABLE, &device),
            table: FIRST_TABLE,
            capture: if feeder.capture { Capture::WarmingUp(0) } else { Capture::Off },
        }
    }

    /// Returns the tokens that are fed next.
    pub(super) fn into_tokens(self) -> Tensor<2, Int> {
        self.tokens.clone()
    }

    /// Sets the tokens that are fed next.
    pub(super) fn give(&mut self, tokens: Tensor<2, Int>) {
        let rows = self.tokens.dims()[0];
        self.tokens.inplace(|buffer| buffer.slice_assign([0..rows, 0..1], tokens));
    }

    /// Feeds a token to every row. If there is a chooser, it chooses the next tokens on the device; otherwise
    /// the host does.
    pub(super) fn step(&mut self, feeder: &mut Feeder<'_>) -> Result<Output> {
        let device = self.tokens.device();
        if feeder.chooser.as_mut().is_some_and(Chooser::prepare) {
            self.record_again();
        }
        let stand_at = |rows: usize| {
            self.steps.positions.on_host.iter().map(|row| row.base).eq(feeder.cache.bases(rows))
        };
        let ended = !self.steps.has_next();
        if ended || !stand_at(feeder.left_pad.len()) {
            self.table = if ended { LARGEST_TABLE.min(2 * self.table) } else { self.table };
            self.steps = steps(feeder, self.table, &device);
            self.record_again();
        }
        // A buffer that has to grow is replaced.
        let can_be_captured =
            feeder.chooser.as_ref().is_none_or(|chooser| chooser.can_be_captured(&feeder.cache));
        let repeats = can_be_captured && feeder.model.can_be_captured() && feeder.cache.replayable() > 0;
        match &self.capture {
            Capture::On(recording, output) if repeats && recording.is_of_this_thread() => {
                recording.replay()?;
                feeder.cache.replayed();
                self.steps.replayed();
                if let Some(chooser) = &mut feeder.chooser {
                    chooser.repeated();
                }
                return Ok(output.clone());
            }
            Capture::On(..) => self.record_again(),
            Capture::WarmingUp(WARM_UP..) if repeats => {
                match Recording::record(&device, || self.launch(feeder))? {
                    Recorded::Graph(recording, output) => {
                        recording.replay()?;
                        self.capture = Capture::On(recording, output.clone());
                        return Ok(output);
                    }
                    Recorded::Never => self.capture = Capture::Off,
                    Recorded::Lost(why) => {
                        self.capture = Capture::Lost;
                        return Err(why);
                    }
                }
            }
            Capture::WarmingUp(_) | Capture::Off | Capture::Lost => {}
        }
        match &mut self.capture {
            // Nothing to learn from a step that no recording can stand for, such as one that fetches layers.
            Capture::WarmingUp(0) if !repeats => {}
            Capture::WarmingUp(0) if Recording::prepare(&device).is_err() => self.capture = Capture::Off,
            Capture::WarmingUp(steps) => *steps += 1,
            Capture::Off | Capture::On(..) | Capture::Lost => {}
        }
        self.launch(feeder)
    }

    /// Drops the recording, because the buffers of the cache were replaced.
    pub(super) fn record_again(&mut self) {
        if matches!(self.capture, Capture::On(..)) {
            self.capture = Capture::WarmingUp(0);
        }
    }

    /// Whether a step was given up with its recording. Everything that it was to write, the cache included,
    /// cannot be read any more.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.capture, Capture::Lost)
    }

    fn launch(&mut self, feeder: &mut Feeder<'_>) -> Result<Output> {
        let Feeder { model, cache, left_pad, wanted, chooser, .. } = feeder;
        let batch = Batch {
            left_pad: left_pad.clone(),
            horizon: Vec::new(),
            steps: Some(self.steps.clone()),
            ..Batch::new(self.tokens.clone())
        };
        let logits = model.forward(&batch, wanted.logits(), cache)?;
        drop(batch);
        let output = match chooser {
            Some(chooser) => {
                let chosen = chooser.choose(logits)?;
                self.give(chosen.next.clone());
                chooser.reorder(cache, &self.steps.positions)?;
                Output::Chosen(chosen)
            }
            None => Output::Logits(logits),
        };
        self.steps.advance();
        Ok(output)
    }
}

/// The next `number` steps of the rows of a feeder.
fn steps(feeder: &Feeder<'_>, number: usize, device: &Device) -> PreparedSteps {
    let Feeder { model, cache, left_pad, .. } = feeder;
    let seen = cache.seq_lens(left_pad.len());
    let bases = cache.bases(left_pad.len());
    let rows = seen.into_iter().zip(left_pad).zip(bases);
    let rows = rows.map(|((first, &visible_from), base)| RowPosition { first, visible_from, base }).collect();
    PreparedSteps::new(&**model, rows, number, device)
}

impl Drop for DecodeLoop {
    fn drop(&mut self) {
        if matches!(self.capture, Capture::WarmingUp(1..)) {
            Recording::abandon(&self.tokens.device());
        }
    }
}
