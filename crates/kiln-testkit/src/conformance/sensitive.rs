//! Cases that turn on a rounding.
//!
//! A number that lies between two codes goes to the one or the other by its last bit, and a history that is packed again
//! and again has many that lie exactly there. From that step on, no two programs agree, and transformers does not agree
//! with itself on another machine. Such a case says so by its own behaviour: its logits change when the last bits of the
//! weights do.

use std::{fs, path::PathBuf};

use kiln::{Error, Model, Plan, Result};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::{Folder, Mismatch, Setup, TOLERANCE, case::Case, difference_of_logits, generate};

/// Models that are made, at most.
const SEEDS: u64 = 8;

/// Bits of a weight that may change. Programs that sum in another order differ by as much.
const CHANGED: u8 = 0b1111;

/// Why a case that failed cannot be told from one that did not; `None`: it can.
pub(super) fn turns_on_a_rounding(
    folder: &Folder,
    case: &Case,
    model: &Model,
    setup: &Setup,
    plan: &Plan,
) -> Result<Option<String>, Mismatch> {
    let (Some(name), [_]) = (&case.logits, &case.input_ids[..]) else { return Ok(None) };
    let (shape, want) = folder.tensor(name)?;
    let vocab = shape.last().copied().unwrap_or(1).max(1);
    let ours = generate::logits(folder, case, model, plan)?;
    let off =
        |a: &[f32], b: &[f32]| difference_of_logits(a, b).map_or(f64::INFINITY, |difference| difference);
    let steps = ours.iter().zip(want.chunks(vocab));
    let Some(step) = steps.clone().position(|(got, want)| off(got, want) > TOLERANCE) else {
        return Ok(None);
    };
    for seed in 1..=SEEDS {
        let changed = Changed::new(folder, &case.model, seed)?;
        let other = generate::logits(folder, case, &setup.load(&changed.0)?, plan)?;
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

/// A copy of a model whose weights differ in their last bits; it goes when this does.
struct Changed(PathBuf);

impl Changed {
    fn new(folder: &Folder, model: &str, seed: u64) -> Result<Self> {
        let source = folder.model(model);
        let path = std::env::temp_dir().join(format!("kiln-{}-{model}-{seed}", std::process::id()));
        let wrong = |why: String| Error::File { path: source.clone(), why };
        let io = |e: std::io::Error| wrong(e.to_string());
        fs::create_dir_all(&path).map_err(io)?;
        let changed = Self(path);
        fs::copy(source.join("config.json"), changed.0.join("config.json")).map_err(io)?;

        let file = fs::read(source.join("model.safetensors")).map_err(io)?;
        let tensors = SafeTensors::deserialize(&file).map_err(|e| wrong(e.to_string()))?;
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let all: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tensors
            .iter()
            .map(|(name, view)| {
                let mut bytes = view.data().to_vec();
                if view.dtype() == Dtype::F32 {
                    for number in bytes.chunks_exact_mut(4) {
                        // Marsaglia's xorshift: which bits change matters to nobody.
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
        let views = views.collect::<Result<Vec<_>, _>>().map_err(|e| wrong(e.to_string()))?;
        let bytes = safetensors::serialize(views, None).map_err(|e| wrong(e.to_string()))?;
        fs::write(changed.0.join("model.safetensors"), bytes).map_err(io)?;
        Ok(changed)
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        // What is left behind lies among temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
