//! Embeddings: the hidden states of texts, and the vectors that they are pooled to.

use kiln::{
    Model, Plan, Pooling,
    expert::{Batch, Logits, read_back},
};
use serde_json::Value;

use super::{Folder, Mismatch, case::Case, difference_of_logits};

/// Returns the setting that a case needs and that is not known.
pub(super) fn not_yet(name: &str) -> Option<String> {
    (!matches!(name, "pooling" | "normalize")).then(|| format!("the setting `{name}` is not implemented yet"))
}

pub(super) async fn run(folder: &Folder, case: &Case, model: &Model) -> Result<f64, Mismatch> {
    let pooling: Option<Pooling> = match case.kwargs.get("pooling").and_then(Value::as_str) {
        Some(name) => Some(name.parse()?),
        None => None,
    };
    let normalize = case.kwargs.get("normalize").and_then(Value::as_bool);
    let request = || model.embed(case.input_ids.clone()).pooling(pooling).normalize(normalize);
    let vectors = request().run_async().await?.vectors.concat();
    let (_, want) = folder.tensor(case.embeddings.as_deref().unwrap_or_default())?;
    let mut largest = compared(&vectors, &want, case.input_ids.len())?;
    // A text has the same vector whatever others are computed with it.
    for (tokens, vector) in case.input_ids.iter().zip(request().run_async().await?.vectors) {
        let alone = model.embed([tokens.clone()]).pooling(pooling).normalize(normalize);
        let alone = alone.run_async().await?.vectors;
        largest = largest.max(compared(&alone.concat(), &vector, 1)?);
    }
    let Some(name) = &case.hidden else { return Ok(largest) };
    let (_, want) = folder.tensor(name)?;
    let batch = Batch::ragged(&case.input_ids, 0, model.device())?;
    let hidden = model.causal().forward(&batch, Logits::Hidden, &mut model.cache(&Plan::none())?)?;
    let [_, columns, width] = hidden.dims();
    let all: Vec<f32> = read_back::start(hidden).finish().await?.iter::<f32>().collect();
    let rows = all.chunks(columns * width).zip(&case.input_ids);
    let got: Vec<f32> =
        rows.flat_map(|(row, tokens)| &row[(columns - tokens.len()) * width..]).copied().collect();
    Ok(largest.max(compared(&got, &want, got.len() / width.max(1))?))
}

/// Returns the largest difference of vectors, `vectors` in all.
fn compared(got: &[f32], want: &[f32], vectors: usize) -> Result<f64, Mismatch> {
    if got.len() != want.len() {
        return Err(Mismatch::new(format!("{} numbers, {} were recorded", got.len(), want.len())));
    }
    let each = (got.len() / vectors.max(1)).max(1);
    let mut differences =
        got.chunks(each).zip(want.chunks(each)).map(|(got, want)| difference_of_logits(got, want));
    differences.try_fold(0.0f64, |largest, next| Ok(largest.max(next?)))
}
