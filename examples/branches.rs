//! One prompt, many continuations: the prompt is fed once and stored once.
//! `cargo run --release --example branches [MODEL_FOLDER]`

use std::time::Instant;

use kiln::{Model, Plan, Sequence};

const BRANCHES: u64 = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let prompt = "KING HENRY V:\nOnce more unto the breach, dear friends, once more.\n".repeat(15);

    let mut trunk = Sequence::new(&model, &Plan::dynamic())?;
    let start = Instant::now();
    let fed = model.generate(&prompt).sequence(&mut trunk).prefill()?.fed;
    let alone = trunk.cache().device_bytes();
    println!("the prompt: {fed} tokens fed in {:.0?}, {alone} bytes held\n", start.elapsed());

    let mut branches = Vec::new();
    for seed in 1..=BRANCHES {
        let mut branch = trunk.snapshot();
        let start = Instant::now();
        let request = model.generate(&prompt).max_new_tokens(30).temperature(1.0).seed(seed);
        let mut pieces = request.sequence(&mut branch).stream()?;
        let text = pieces.by_ref().collect::<kiln::Result<String>>()?;
        println!("{seed}: {} fed, {:.0?}: {text:?}", pieces.reuse().fed, start.elapsed());
        drop(pieces);
        branches.push(branch);
    }
    let own = |branch: &Sequence| branch.cache().device_bytes() - branch.cache().shared_bytes();
    let all = alone + branches.iter().map(own).sum::<usize>();
    println!(
        "\n{BRANCHES} continuations and the prompt hold {all} bytes: {:.2} times the prompt",
        all as f64 / alone as f64
    );
    Ok(())
}
