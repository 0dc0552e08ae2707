//! Forward cases: chunks are fed in order through one cache, and the logits of every token are compared.

use kiln::{
    Model, Plan,
    expert::{Batch, Logits, read_back},
};

use super::{Folder, Mismatch, case::Case, difference_of_logits};

pub(super) async fn run(folder: &Folder, case: &Case, model: &Model, plan: &Plan) -> Result<f64, Mismatch> {
    let (shape, want) = folder.tensor(case.logits.as_deref().unwrap_or_default())?;
    let &[rows, tokens, vocab] = shape.as_slice() else {
        return Err(Mismatch::new(format!("logits of shape {shape:?} are not [rows, tokens, vocab]")));
    };
    let mut cache = model.cache(plan)?;
    let mut largest: f64 = 0.0;
    let mut start = 0;
    for chunk in &case.chunks {
        let batch = Batch::from_rows(chunk, model.device())?;
        let logits = model.causal().forward(&batch, Logits::All, &mut cache)?;
        let got: Vec<f32> = read_back::start(logits).finish().await?.iter::<f32>().collect();
        let end = start + batch.len();
        if end > tokens {
            return Err(Mismatch::new(format!("{end} tokens were fed, logits of {tokens} were recorded")));
        }
        let expected: Vec<f32> = (0..rows)
            .flat_map(|row| &want[(row * tokens + start) * vocab..(row * tokens + end) * vocab])
            .copied()
            .collect();
        if got.len() != expected.len() {
            return Err(Mismatch::new(format!("{} logits, {} were recorded", got.len(), expected.len())));
        }
        for (got, want) in got.chunks(vocab.max(1)).zip(expected.chunks(vocab.max(1))) {
            largest = largest.max(difference_of_logits(got, want)?);
        }
        start = end;
    }
    match start == tokens {
        true => Ok(largest),
        false => Err(Mismatch::new(format!("{start} tokens were fed, logits of {tokens} were recorded"))),
    }
}
