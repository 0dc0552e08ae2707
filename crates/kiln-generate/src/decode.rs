//! Steps of one token each, fed from a buffer on the device: launched one by one, or captured once and replayed.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor};
use kiln_core::{
    Result,
    batch::{Batch, Steps},
    layer::RowPosition,
    model::{CausalModel, Logits},
};
use kiln_kernels::{Recorded, Recording};

use crate::{
    cache_handle::CacheHandle,
    chooser::{Chooser, Chosen},
};

/// Steps that run before one is recorded: the allocator learns what a step needs.
const WARM_UP: usize = 3;

/// Steps that rotary tables are made for at first; each time they end, for twice as many, up to the most.
const FIRST_TABLE: usize = 64;
const LARGEST_TABLE: usize = 2048;

/// What a step leaves on the device.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are two of it")]
pub(crate) enum Output {
    /// What the device chose. It is fed by the next step.
    Chosen(Chosen),
    /// Logits `[rows, 1, vocab]`, or what else is [`Wanted`]. The next step is fed what [`DecodeLoop::give`] is given.
    Logits(Tensor<3>),
}

/// The model and what it runs on.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    pub(crate) model: Arc<dyn CausalModel>,
    pub(crate) cache: CacheHandle<'a>,
    /// Padding slots at the start of each row.
    pub(crate) left_pad: Vec<usize>,
    pub(crate) wanted: Wanted,
}

/// What passes give: see [`Logits`].
#[derive(Clone, Debug, Default)]
pub(crate) enum Wanted {
    #[default]
    Last,
    Early(Vec<usize>),
    Hidden,
}

impl Wanted {
    pub(crate) fn logits(&self) -> Logits<'_> {
        match self {
            Self::Last => Logits::Last,
            Self::Early(layers) => Logits::Early(layers),
            Self::Hidden => Logits::Hidden,
        }
    }
}

impl Running<'_> {
    /// The next `number` steps, from where the rows stand.
    fn steps(&self, number: usize, device: &Device) -> Steps {
        let seen = self.cache.seq_lens(self.left_pad.len());
        let bases = self.cache.bases(self.left_pad.len());
        let rows = seen.into_iter().zip(&self.left_pad).zip(bases);
        let rows =
            rows.map(|((first, &visible_from), base)| RowPosition { first, visible_from, base }).collect();
        Steps::new(&*self.model, rows, number, device)
    }
}

/// Feeds one token after the other to a model.
#[derive(Debug)]
pub(crate) struct DecodeLoop {
    /// What is fed next, `[rows, 1]`. Nothing else ever holds it, so that it is written in place.
    tokens: Tensor<2, Int>,
    steps: Steps,
    /// Steps that the tables were made for.
    table: usize,
    capture: Capture,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
enum Capture {
    Off,
    /// Steps that were made since the allocator was told.
    WarmingUp(usize),
    On(Recording, Output),
    /// The device gave the recording up.
    Lost,
}

impl DecodeLoop {
    /// Prepares to feed `tokens` `[rows, 1]`.
    pub(crate) fn new(tokens: &Tensor<2, Int>, running: &Running<'_>, capture: bool) -> Self {
        let (device, rows) = (tokens.device(), tokens.dims()[0]);
        let buffer = Tensor::zeros([rows, 1], (&device, tokens.dtype()));
        Self {
            tokens: buffer.slice_assign([0..rows, 0..1], tokens.clone()),
            steps: running.steps(FIRST_TABLE, &device),
            table: FIRST_TABLE,
            capture: if capture { Capture::WarmingUp(0) } else { Capture::Off },
        }
    }

    /// What is fed next.
    pub(crate) fn into_tokens(self) -> Tensor<2, Int> {
        self.tokens.clone()
    }

    /// Sets what is fed next.
    pub(crate) fn give(&mut self, tokens: Tensor<2, Int>) {
        let rows = self.tokens.dims()[0];
        self.tokens.inplace(|buffer| buffer.slice_assign([0..rows, 0..1], tokens));
    }

    /// Feeds a token to every row. `chooser`: what chooses the next on the device; `None`: the host does.
    pub(crate) fn step(
        &mut self,
        running: &mut Running<'_>,
        mut chooser: Option<&mut Chooser>,
    ) -> Result<Output> {
        let device = self.tokens.device();
        if chooser.as_mut().is_some_and(|chooser| chooser.prepare()) {
            self.record_again();
        }
        let stand_at = |rows: usize| {
            self.steps.positions.on_host.iter().map(|row| row.base).eq(running.cache.bases(rows))
        };
        let ended = !self.steps.has_next();
        if ended || !stand_at(running.left_pad.len()) {
            self.table = if ended { LARGEST_TABLE.min(2 * self.table) } else { self.table };
            self.steps = running.steps(self.table, &device);
            self.record_again();
        }
        // A buffer that has to grow is another one afterwards.
        let can_be_captured = chooser.as_ref().is_none_or(|chooser| chooser.can_be_captured(&running.cache));
        let repeats = can_be_captured && running.model.can_be_captured() && running.cache.replayable() > 0;
        match &self.capture {
            Capture::On(recording, output) if repeats && recording.is_of_this_thread() => {
                recording.replay()?;
                running.cache.replayed();
                self.steps.replayed();
                if let Some(chooser) = chooser {
                    chooser.repeated();
                }
                return Ok(output.clone());
            }
            Capture::On(..) => self.record_again(),
            Capture::WarmingUp(WARM_UP..) if repeats => {
                match Recording::record(&device, || self.launch(running, chooser.as_deref_mut()))? {
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
        self.launch(running, chooser)
    }

    /// The cache's buffers are others than those that were recorded.
    pub(crate) fn record_again(&mut self) {
        if matches!(self.capture, Capture::On(..)) {
            self.capture = Capture::WarmingUp(0);
        }
    }

    /// Whether a step was given up with its recording. What it was to write, the cache included, cannot be read any more.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.capture, Capture::Lost)
    }

    fn launch(&mut self, running: &mut Running<'_>, chooser: Option<&mut Chooser>) -> Result<Output> {
        let batch = Batch {
            left_pad: running.left_pad.clone(),
            horizon: Vec::new(),
            steps: Some(self.steps.clone()),
            ..Batch::new(self.tokens.clone())
        };
        let Running { model, cache, wanted, .. } = running;
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

impl Drop for DecodeLoop {
    fn drop(&mut self) {
        if matches!(self.capture, Capture::WarmingUp(1..)) {
            Recording::abandon(&self.tokens.device());
        }
    }
}
