//! `proc/*`: recorded scores through one logits processor.

use kiln::{GenerationConfig, RowState, expert::Processors};
use serde_json::Value;

use super::{Folder, Mismatch, case::Case, difference};

/// Arguments of a processor besides its own setting.
pub(super) const BESIDE: [&str; 4] = ["eos_token_id", "max_length", "begin_index", "input_ids_seq_length"];

pub(super) fn run(folder: &Folder, case: &Case) -> Result<f64, Mismatch> {
    let (shape, mut scores) = folder.tensor("proc.scores")?;
    let (_, want) = folder.tensor(case.out.as_deref().unwrap_or_default())?;
    let vocab = shape.last().copied().unwrap_or(0).max(1);
    let config = GenerationConfig::from_arguments(&case.kwargs)?;
    // Without an explicit value, sampling keeps the 50 most likely tokens.
    let top_k = config.top_k.unwrap_or(0);
    let processors = Processors::of(&config.clone().top_k(top_k), true)?;
    let number = |name: &str| case.kwargs.get(name).and_then(Value::as_u64).map(|number| number as usize);
    for (index, (scores, ids)) in scores.chunks_mut(vocab).zip(&case.input_ids).enumerate() {
        let prompt = number("input_ids_seq_length").or(number("begin_index")).unwrap_or(ids.len());
        let row = RowState {
            index,
            ids,
            generated: ids.len().saturating_sub(prompt),
            padding: 0,
            len: ids.len(),
            remaining: config.max_length.and_then(|length| length.checked_sub(ids.len())),
        };
        processors.apply(&row, scores)?;
    }
    difference(&scores, &want)
}
