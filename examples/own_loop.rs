//! The guide's own generation loop, with an explicit cache and mask: two prompts of unequal length, greedy.
//! `cargo run --release --example own_loop [MODEL_FOLDER]`

use kiln::{
    Model, Plan, TokenId,
    expert::{Batch, Logits, read_back},
};

const NEW_TOKENS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let mut rows: Vec<Vec<TokenId>> = ["ROMEO:", "\"My dear Watson,\" said"]
        .map(|prompt| model.encode(prompt))
        .into_iter()
        .collect::<Result<_, _>>()?;

    // The mask is the padding: slots before `left_pad` are hidden, and rotary positions begin after it.
    let mut cache = model.cache(&Plan::dynamic())?;
    let mut batch = Batch::left_padded(&rows, 0, model.device())?;
    for _ in 0..NEW_TOKENS {
        let logits = model.causal().forward(&batch, Logits::Last, &mut cache)?;
        let [count, _, vocab] = logits.dims();
        let next = logits.reshape([count, vocab]).argmax(1);
        // The cache holds the previous tokens: only the new token of each row is fed, and the padding does
        // not change.
        batch = Batch { left_pad: batch.left_pad, ..Batch::new(next.clone()) };
        for (row, token) in rows.iter_mut().zip(read_back::read(next)?.iter::<i64>()) {
            row.push(TokenId::try_from(token)?);
        }
    }
    for row in &rows {
        println!("{}\n", model.decode(row)?);
    }
    println!("{} tokens in the cache, {} bytes", cache.seq_len(), cache.device_bytes());
    Ok(())
}
