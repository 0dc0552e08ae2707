//! Cases whose result depends on a rounding error.
//!
//! A number halfway between two codes is rounded to one or the other by its last bit, and a history that is
//! packed repeatedly has many such numbers. From that step on, no two programs agree, and transformers does
//! not agree with itself on another machine. Such a case can be detected by its own behaviour: its logits
//! change when the last bits of the weights change.

use std::sync::Arc;

use kiln::{
    Error, Model, Plan, Result,
    expert::source::{self, MemorySource},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::{Folder, Mismatch, Setup, TOLERANCE, case::Case, difference_of_logits, generate};

/// Maximum number of modified models.
const SEEDS: u64 = 8;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// Size limit in bytes of a model of a recording.
const LARGEST: u64 = 1 << 30;

/// Bits of a weight that may change. A different order of summation causes errors of the same size.
const CHANGED: u8 = 0b1111;

/// Returns the reason why a failure may be a rounding error, or `None` if it cannot be.
pub(super) async fn turns_on_a_rounding(
    folder: &Folder,
    case: &Case,
    model: &Model,
    setup: &Setup,
    plan: &Plan,
) -> Result<Option<String>, Mismatch> {
    let (Some(name), [_]) = (&case.logits, &case.input_ids[..]) else { return Ok(None) };
    let (shape, want) = folder.tensor(name)?;
    let vocab = shape.last().copied().unwrap_or(1).max(1);
    let ours = generate::logits(folder, case, model, plan).await?;
    let off =
        |a: &[f32], b: &[f32]| difference_of_logits(a, b).map_or(f64::INFINITY, |difference| difference);
    let steps = ours.iter().zip(want.chunks(vocab));
    let Some(step) = steps.clone().position(|(got, want)| off(got, want) > TOLERANCE) else {
        return Ok(None);
    };
    for seed in 1..=SEEDS {
        let changed = setup.load(Arc::new(changed(folder, &case.model, seed)?), None).await?;
        let other = generate::logits(folder, case, &changed, plan).await?;
        let changes = ours.iter().zip(&other).take(step + 1).map(|(a, b)| off(a, b));
        let change = changes.fold(0.0, f64::max);
        if change > TOLERANCE {
            return Ok(Some(format!(
                "it turns on a rounding: by step {step} its logits change by {change:.1e} when weights change in their \
                 last four bits"
            )));
        }
    }
    Ok(None)
}

/// A copy of a model in memory, whose weights differ in their last bits.
fn changed(folder: &Folder, model: &str, seed: u64) -> Result<MemorySource> {
    let source = folder.model(model);
    let wrong = |name: &str, why: String| Error::File { path: source.path(name), why };
    let read = |name: &str| {
        let read = source::read(&*source, name, LARGEST)?;
        read.ok_or_else(|| wrong(name, "there is no such file".to_owned()))
    };
    let damaged = |why: String| wrong(WEIGHTS, why);
    let file = read(WEIGHTS)?;
    let tensors = SafeTensors::deserialize(&file).map_err(|e| damaged(e.to_string()))?;
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let all: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, view)| {
            let mut bytes = view.data().to_vec();
            if view.dtype() == Dtype::F32 {
                for number in bytes.chunks_exact_mut(4) {
                    // Marsaglia's xorshift: which bits change does not matter.
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    number[0] ^= (random >> 32) as u8 & CHANGED;
                }
            }
            (name.to_owned(), view.dtype(), view.shape().to_vec(), bytes)
        })
        .collect();
    let views = all.iter().map(|(name, dtype, shape, bytes)| {
        TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(|e| damaged(e.to_string()))?;
    let bytes = safetensors::serialize(views, None).map_err(|e| damaged(e.to_string()))?;
    Ok(MemorySource::new([(CONFIG, read(CONFIG)?), (WEIGHTS, bytes)]))
}
