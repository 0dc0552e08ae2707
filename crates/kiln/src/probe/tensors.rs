//! The loss of single tensors: one kind of tensor, or one tensor, is packed, and the others keep their stored
//! format.
//!
//! A run for each tensor would take hours. Instead, the errors of all tensors and the divergence of each kind
//! are measured. The divergence of a kind, which grows with squared errors, is divided among its tensors in
//! proportion to these, and the tensors with the largest shares get a run of their own.

use std::collections::BTreeMap;

use kiln_core::{Result, model::TokenId};
use kiln_models::{
    Mixture,
    checkpoint::{PackedTensor, packed_tensors},
};

use super::{
    Comparison,
    reading::{Reading, compare},
    weights::check_unpacked,
    windows::Windows,
};
use crate::{Model, ModelBuilder, model::check_quant};

/// Share of the work that packing all tensors takes, for the progress bar.
const PACKING: f64 = 0.1;

/// The measurements of tensors that were packed while all others were not.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProbedTensors {
    /// The name of a tensor such as `blk.0.attn_v.weight`, or of a kind such as `attn_v`. These are the names
    /// in GGUF files, which `llama-quantize --tensor-type` takes.
    pub name: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Names of the formats in which they are packed.
    pub formats: Vec<&'static str>,
    /// Size in bytes when packed.
    pub bytes: u64,
    /// Root mean square of the errors, divided by the root mean square of the elements.
    pub relative_error: f64,
    /// The model's predictions, compared with those of the original.
    pub compared: Comparison,
}

/// The result of [`probe_tensors`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorsProbe {
    pub mixture: Mixture,
    /// Number of tokens that were fed to each model.
    pub tokens: usize,
    /// All kinds of tensors that the mixture packs, in descending order of loss.
    pub kinds: Vec<ProbedTensors>,
    /// Single tensors, in descending order of loss.
    pub worst: Vec<ProbedTensors>,
}

/// Measures which tensors of `mixture` lose most: feeds `text` to `original`, to a model for each kind of
/// tensor with only that kind packed, and to a model for each of the `worst` tensors with the largest
/// expected loss. Activations are exact. Calls `on_progress` with the share of the work that is done, from 0
/// to 1.
///
/// `builder` creates the builder that `original` was loaded with; this function sets its `quant` and `exact`.
///
/// # Errors
/// The errors of [`probe_weights`](super::probe_weights).
pub fn probe_tensors<'b>(
    original: &Model,
    builder: &dyn Fn() -> ModelBuilder<'b>,
    text: &[TokenId],
    window: usize,
    mixture: Mixture,
    worst: usize,
    on_progress: &mut dyn FnMut(f64),
) -> Result<TensorsProbe> {
    check_unpacked(builder().checkpoint()?)?;
    let windows = Windows::of(text, window, original)?;
    check_quant(mixture, original.kernels(), original.dtype(), &original.opened().info)?;

    let checkpoint = builder().checkpoint()?;
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
