//! `proc/*`: recorded scores through one logits processor.

use kiln::processors;

use super::{Folder, Mismatch, case::Case, difference};

pub(super) fn run(folder: &Folder, case: &Case) -> Result<f64, Mismatch> {
    let (shape, mut scores) = folder.tensor("proc.scores")?;
    let (_, want) = folder.tensor(case.out.as_deref().unwrap_or_default())?;
    let vocab = shape.last().copied().unwrap_or(0).max(1);
    for (name, value) in &case.kwargs {
        let processor = processors::by_name(name, value)
            .ok_or_else(|| Mismatch::new(format!("`{name}` is not a processor")))??;
        for (row, ids) in scores.chunks_mut(vocab).zip(&case.input_ids) {
            processor.apply(ids, row);
        }
    }
    difference(&scores, &want)
}
