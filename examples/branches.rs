//! One prompt, many continuations: it is fed once, and held once.
//! `cargo run --release --example branches [MODEL_FOLDER]`

use std::time::Instant;

use kiln::{GenerationConfig, LoadOptions, Model, Plan, RunOptions, Sequence, TokenId};

const BRANCHES: u64 = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(&kiln_examples::model_folder(), LoadOptions::new("auto".parse()?)?)?;
    let prompt =
        model.encode(&"KING HENRY V:\nOnce more unto the breach, dear friends, once more.\n".repeat(15))?;
    let wanted = |max_new_tokens, seed| {
        GenerationConfig::new().max_new_tokens(max_new_tokens).do_sample(true).seed(seed)
    };
    let go_on = |sequence: &mut Sequence, n, seed| {
        let options = RunOptions::default();
        let steps = model.continue_from(sequence, vec![prompt.clone()], &wanted(n, seed), options)?;
        let fed = steps.reuse().fed;
        let tokens = steps.map(|step| step.map(|step| step.tokens[0])).collect::<kiln::Result<Vec<_>>>()?;
        Ok::<_, kiln::Error>((tokens.into_iter().flatten().collect::<Vec<TokenId>>(), fed))
    };

    let mut trunk = Sequence::new(&model, &Plan::dynamic())?;
    let start = Instant::now();
    let (_, fed) = go_on(&mut trunk, 1, 0)?;
    let alone = trunk.cache().device_bytes();
    println!("the prompt: {fed} tokens fed in {:.0?}, {alone} bytes held\n", start.elapsed());

    let mut branches = Vec::new();
    for seed in 1..=BRANCHES {
        let mut branch = trunk.snapshot();
        let start = Instant::now();
        let (tokens, fed) = go_on(&mut branch, 30, seed)?;
        println!("{seed}: {fed} fed, {:.0?}: {:?}", start.elapsed(), model.decode(&tokens)?);
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
