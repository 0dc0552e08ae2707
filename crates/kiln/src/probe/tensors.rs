//! Which tensors of a mixture cost most: one kind of them, or one tensor, is packed, and the others are as they are stored.
//!
//! A run for each tensor would take hours. So errors of numbers are measured of all, and divergence of kinds. A kind's divergence is
//! divided among its tensors by their squared errors, with which it grows, and those that get most are run alone.

use std::collections::BTreeMap;

use kiln_core::{Result, model::TokenId};
use kiln_models::{
    Mixture,
    checkpoint::{Checkpoint, PackedTensor, packed_tensors},
};

use super::{
    Comparison,
    reading::{Reading, compare},
    weights::check_original,
    windows::Windows,
};
use crate::{Model, ModelBuilder, model::check_quant};

/// The share of the work that it is to pack all tensors, for a bar.
const PACKING: f64 = 0.1;

/// What was measured of tensors of a model that were packed alone.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProbedTensors {
    /// A tensor, as `blk.0.attn_v.weight`, or a kind of them, as `attn_v`: the names of GGUF files, which `llama-quantize
    /// --tensor-type` takes.
    pub name: String,
    /// How many tensors they are.
    pub tensors: usize,
    /// The formats that they are packed in, by name.
    pub formats: Vec<&'static str>,
    /// Bytes that they are packed in.
    pub bytes: u64,
    /// The root of the mean squared error of their numbers, divided by that of the mean square.
    pub relative_error: f64,
    /// What the model says, beside what the original says.
    pub compared: Comparison,
}

/// What [`probe_tensors`] measured.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorsProbe {
    pub mixture: Mixture,
    /// Tokens of text that were fed to each model.
    pub tokens: usize,
    /// All kinds of tensors that the mixture packs, those that lose most first.
    pub kinds: Vec<ProbedTensors>,
    /// Single tensors, those that lose most first.
    pub worst: Vec<ProbedTensors>,
}

/// Measures which tensors of `mixture` lose most: feeds `text` to `original`, to a model for each kind of tensors of which only these are
/// packed, and to a model for each of the `worst` tensors of which most is expected. Activations are exact. `on_progress` is told the
/// share of the work that is done, from 0 to 1.
///
/// `builder` makes the builder that `original` was loaded with; its `quant` and `exact` are set here.
///
/// # Errors
/// Those of [`probe_weights`](super::probe_weights).
pub fn probe_tensors<'b>(
    original: &Model,
    builder: &dyn Fn() -> ModelBuilder<'b>,
    text: &[TokenId],
    window: usize,
    mixture: Mixture,
    worst: usize,
    on_progress: &mut dyn FnMut(f64),
) -> Result<TensorsProbe> {
    let path = builder().path()?.to_owned();
    check_original(&path)?;
    let windows = Windows::of(text, window, original)?;
    check_quant(mixture, original.kernels(), original.dtype(), &original.opened().info)?;

    let checkpoint = Checkpoint::open(&path)?;
    let (mut read, all) = (0, checkpoint.bytes().max(1));
    let tensors = packed_tensors(&checkpoint, mixture, &mut |bytes| {
        read += bytes;
        on_progress(PACKING * read as f64 / all as f64);
    })?;
    let mut kinds = BTreeMap::<&str, Vec<&PackedTensor>>::new();
    for tensor in &tensors {
        kinds.entry(tensor.kind()).or_default().push(tensor);
    }

    let right = Reading::of(original, windows, &mut |_| ())?;
    let (mut done, runs) = (0, kinds.len() + worst.min(tensors.len()));
    let mut run = |tensors: &[&PackedTensor], name: &str| {
        let names = tensors.iter().map(|tensor| tensor.name.clone());
        let model = builder().quant(mixture).packed_tensors(names).exact(true).load()?;
        let reading = Reading::of(&model, windows, &mut |_| ())?;
        let [compared] = compare(&[&right, &reading], [[0, 1]], windows, &mut |_| ())?;
        done += 1;
        on_progress(PACKING + (1.0 - PACKING) * done as f64 / runs as f64);
        Ok(ProbedTensors::of(tensors, name, compared))
    };
    let mut of_kinds = Vec::new();
    let mut expected = Vec::new();
    for (kind, tensors) in &kinds {
        let probed = run(tensors, kind)?;
        let errors: f64 = tensors.iter().map(|tensor| tensor.squared_errors).sum();
        let share = |tensor: &PackedTensor| tensor.squared_errors / errors.max(f64::MIN_POSITIVE);
        expected.extend(tensors.iter().map(|tensor| (*tensor, share(tensor) * probed.compared.divergence)));
        of_kinds.push(probed);
    }
    expected.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let worst = expected.into_iter().take(worst).map(|(tensor, _)| run(&[tensor], &tensor.name));
    let mut worst = worst.collect::<Result<Vec<_>>>()?;
    for probed in [&mut of_kinds, &mut worst] {
        probed.sort_by(|a, b| b.compared.divergence.total_cmp(&a.compared.divergence));
    }
    Ok(TensorsProbe { mixture, tokens: windows.tokens(), kinds: of_kinds, worst })
}

impl ProbedTensors {
    fn of(tensors: &[&PackedTensor], name: &str, compared: Comparison) -> Self {
        let sum = |of: fn(&PackedTensor) -> f64| tensors.iter().map(|tensor| of(tensor)).sum::<f64>();
        let mut formats: Vec<_> = tensors.iter().map(|tensor| tensor.format.name()).collect();
        formats.sort_unstable();
        formats.dedup();
        let squares = sum(|tensor| tensor.squares).max(f64::MIN_POSITIVE);
        Self {
            name: name.to_owned(),
            tensors: tensors.len(),
            formats,
            bytes: tensors.iter().map(|tensor| tensor.bytes()).sum(),
            relative_error: (sum(|tensor| tensor.squared_errors) / squares).sqrt(),
            compared,
        }
    }
}
