//! `mel/*`: recorded samples and their log-mel features.

use kiln::expert::audio::{LogMel, SAMPLE_RATE};

use super::{Folder, Mismatch, case::Case, difference};

/// Tolerance of a feature. Transformers states that its own two implementations differ by 1e-5, so two
/// implementations that are each that far from the exact value may differ by twice as much.
const TOLERANCE: f64 = 2e-5;

pub(super) fn run(folder: &Folder, case: &Case) -> Result<f64, Mismatch> {
    let (shape, want) = folder.tensor(case.out.as_deref().unwrap_or_default())?;
    let &[_, bins, _] = &shape[..] else { return Err(Mismatch::new("features have not three dimensions")) };
    let (_, samples) = folder.tensor(&format!("mel.{bins}.wave"))?;
    let seconds = case.chunk_length.ok_or_else(|| Mismatch::new("`chunk_length` is missing"))?;
    let got = LogMel::new(bins)?.features(&samples, seconds * SAMPLE_RATE)?;
    let difference = difference(&got, &want)?;
    match difference <= TOLERANCE {
        true => Ok(difference),
        false => Err(Mismatch::new(format!("a feature differs by {difference:e}"))),
    }
}
