//! Encoder-decoder cases: recorded features, a prompt, and the most likely token after each pass.

use kiln::{
    Model, Plan,
    burn::tensor::{Tensor, TensorData},
    expert::{Batch, Logits, read_back},
};

use super::{Folder, Mismatch, case::Case, difference_of_logits};

pub(super) async fn run(folder: &Folder, case: &Case, model: &Model, plan: &Plan) -> Result<f64, Mismatch> {
    let name = case.logits.as_ref().ok_or_else(|| Mismatch::new("no logits were recorded"))?;
    let (_, want) = folder.tensor(name)?;
    let (shape, features) = folder.tensor(&format!("{}.input_features", case.model))?;
    let [rows, bins, frames] = *shape.as_slice() else {
        return Err(Mismatch::new(format!("features of shape {shape:?} are not [rows, bins, frames]")));
    };
    let features = Tensor::from_data(TensorData::new(features, [rows, bins, frames]), model.device());
    let mut cache = model.cache(plan)?;
    let mut batch = Batch::from_rows(std::slice::from_ref(&case.prompt), model.device())?;
    batch.features = Some(features);
    let mut largest: f64 = 0.0;
    let next = case.tokens.get(case.prompt.len()..).unwrap_or_default();
    let vocab = want.len() / next.len().max(1);
    let mut whole = case.prompt.clone();
    for (&token, want) in next.iter().zip(want.chunks(vocab.max(1))) {
        let logits = model.causal().forward(&batch, Logits::Last, &mut cache)?;
        let got: Vec<f32> = read_back::start(logits).finish().await?.iter().collect();
        largest = largest.max(difference_of_logits(&got, want)?);
        let likeliest = got.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(id, _)| id as u32);
        if likeliest != Some(token) {
            let why = format!("the token {likeliest:?} follows {whole:?}, {token} was recorded");
            return Err(Mismatch { max_dlogit: Some(largest), why });
        }
        whole.push(token);
        // A cache that retains nothing is fed the whole sequence.
        let new = if cache.seq_len() == 0 { whole.clone() } else { vec![token] };
        batch = Batch::from_rows(&[new], model.device())?;
    }
    let encoders = cache.layers_mut().filter_map(|(_, layer)| layer.encoder.as_ref());
    let crosses: Vec<usize> = encoders.map(|encoder| encoder.seq_len()).collect();
    if let Some(len) = case.cross_len.filter(|len| crosses.iter().any(|cross| cross != len)) {
        return Err(Mismatch::new(format!("the encoder's keys are {crosses:?}, {len} were recorded")));
    }
    let expected = case.self_len.filter(|_| plan.remembers(&model.causal().needs()));
    match expected {
        Some(len) if cache.seq_len() != len => {
            Err(Mismatch::new(format!("the cache saw {} tokens, {len} were recorded", cache.seq_len())))
        }
        _ => Ok(largest),
    }
}
