//! Readings of a text by models, and their comparison.
//!
//! A reading keeps hidden states instead of logits: 2 KiB per position instead of 192 KiB in SmolLM2. The
//! model's head computes the logits from them again, for some positions at a time. So a model reads the text
//! once, and can be compared with several others.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use burn::tensor::Tensor;
use kiln_cache::Plan;
use kiln_core::{
    Result,
    batch::Batch,
    device_state::DeviceState,
    model::{Logits, TokenId},
    read_back,
};
use kiln_generate::GenerationConfig;
use kiln_kernels::{Arithmetic, INVARIANT_UP_TO, device::DeviceClass};
use rayon::prelude::*;

use super::{
    Comparison,
    comparison::{Comparisons, Distribution},
    windows::Windows,
};
use crate::Model;

/// Maximum number of tokens that are fed at once.
const CHUNK: usize = 512;

/// Maximum number of tokens that are fed to a model with products in integers on a GPU: more would be
/// multiplied in floats.
const STEP: usize = INVARIANT_UP_TO;

/// Number of logits of a model that are in memory at a time: 16 MiB in float32.
const LOGITS: usize = 1 << 22;

/// Number of tokens that are decoded to measure the speed.
const DECODED: usize = 32;

/// Number of prompt tokens before them.
const PROMPT: usize = 16;

/// The reading of a text by a model.
pub(super) struct Reading<'a> {
    model: &'a Model,
    /// Hidden states of each window, `[1, tokens, hidden]`.
    states: Vec<Tensor<3>>,
    /// Tokens per second in the fastest window.
    pub(super) prefill: f64,
}

impl<'a> Reading<'a> {
    /// Reads the text with `model`. Calls `on_read` with the number of tokens fed since the last call.
    pub(super) fn of(model: &'a Model, windows: Windows<'_>, on_read: &mut dyn FnMut(usize)) -> Result<Self> {
        let (mut states, mut prefill) = (Vec::new(), 0.0_f64);
        let chunk = if is_in_steps(model) { STEP } else { CHUNK };
        for window in windows.iter() {
            let fed = window.split_last().map_or(&[][..], |(_, fed)| fed);
            let mut cache = model.cache(&Plan::dynamic())?;
            cache.reserve(fed.len());
            let started = Instant::now();
            let (mut parts, mut start) = (Vec::new(), 0);
            while start < fed.len() {
                let most = cache.at_once().unwrap_or(chunk).clamp(1, chunk);
                let part = &fed[start..fed.len().min(start + most)];
                let batch = Batch::from_rows(&[part.to_vec()], model.device())?;
                parts.push(model.causal().forward(&batch, Logits::Hidden, &mut cache)?);
                start += part.len();
            }
            states.push(Tensor::cat(parts, 1));
            model.placement().iter().try_for_each(|kernels| DeviceState::of(kernels.device()).sync())?;
            prefill = prefill.max(fed.len() as f64 / seconds(started.elapsed()));
            on_read(fed.len());
        }
        Ok(Self { model, states, prefill })
    }

    pub(super) fn model(&self) -> &'a Model {
        self.model
    }

    /// Whether the text was read in steps of few tokens, as it would be decoded.
    pub(super) fn is_in_steps(&self) -> bool {
        is_in_steps(self.model)
    }

    /// The predicted distributions at some positions of a window.
    fn said(&self, window: usize, places: &Range<usize>, is_right: bool) -> Result<Vec<Distribution>> {
        let Some(states) = self.states.get(window) else { return Ok(Vec::new()) };
        let states = states.clone().narrow(1, places.start, places.len());
        let logits: Vec<f32> = read_back::read(self.model.causal().head(states))?.iter().collect();
        let each = logits.par_chunks(self.model.causal().vocab().max(1));
        match is_right {
            true => each.map(Distribution::checked).collect(),
            false => Ok(each.map(Distribution::of).collect()),
        }
    }
}

/// Compares readings of one text, position by position: the second of each pair with the first. Calls
/// `on_compared` with the number of positions compared since the last call.
///
/// # Errors
/// Scores of the first reading that are not finite numbers.
pub(super) fn compare<const PAIRS: usize>(
    readings: &[&Reading<'_>],
    pairs: [[usize; 2]; PAIRS],
    windows: Windows<'_>,
    on_compared: &mut dyn FnMut(usize),
) -> Result<[Comparison; PAIRS]> {
    let mut all = [(); PAIRS].map(|()| Comparisons::default());
    let vocab = readings.iter().map(|reading| reading.model.causal().vocab()).max().unwrap_or(1);
    let most = if readings.iter().any(|reading| reading.is_in_steps()) { STEP } else { usize::MAX };
    let at_once = (LOGITS / vocab.max(1)).clamp(1, most);
    for (number, window) in windows.iter().enumerate() {
        let places = window.len().saturating_sub(1);
        for start in (0..places).step_by(at_once) {
            let places = start..places.min(start + at_once);
            let said = (readings.iter().enumerate())
                .map(|(which, reading)| reading.said(number, &places, which == 0))
                .collect::<Result<Vec<_>>>()?;
            let next = &window[places.start + 1..=places.end];
            for ([right, other], all) in pairs.iter().zip(&mut all) {
                let (Some(right), Some(other)) = (said.get(*right), said.get(*other)) else { continue };
                let beside =
                    |((other, right), next): ((&Distribution, _), &TokenId)| other.beside(right, *next);
                let compared: Vec<_> = other.par_iter().zip(right).zip(next).map(beside).collect();
                compared.into_iter().for_each(|place| all.add(place));
            }
            on_compared(places.len());
        }
    }
    Ok(all.map(Comparisons::finish))
}

fn is_in_steps(model: &Model) -> bool {
    let stages = model.stages().zip(model.arithmetic().clone(), |device, arithmetic| {
        device.info.class != DeviceClass::Cpu && arithmetic == Arithmetic::Integers
    });
    stages.iter().any(|in_steps| *in_steps)
}

/// Decoding speed of a model in tokens per second, after the beginning of the text; the median of some steps.
pub(super) fn decode_speed(model: &Model, windows: Windows<'_>) -> Result<f64> {
    let text = windows.iter().next().unwrap_or_default();
    let positions = model.sizes().positions;
    let prompt = text[..text.len().min(PROMPT).min(positions / 2)].to_vec();
    let config = GenerationConfig::new()
        .max_new_tokens(DECODED.min(positions - prompt.len()))
        .do_sample(false)
        .eos_token_id(Vec::new());
    let mut last = Instant::now();
    let mut times = Vec::new();
    for step in model.generate(prompt).config(config).plan(Plan::dynamic()).steps()? {
        step?;
        times.push(last.elapsed());
        last = Instant::now();
    }
    times.sort();
    Ok(1.0 / seconds(times.get(times.len() / 2).copied().unwrap_or_default()))
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64().max(1e-9)
}
