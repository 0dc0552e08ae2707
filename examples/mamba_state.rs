//! The memory of a model without attention has constant size: it can be continued, branched and saved.
//! `cargo run --release --example mamba_state [MAMBA_FOLDER]`
//!
//! Without a folder, the example runs a tiny test model with random weights and no tokenizer.

use std::path::PathBuf;

use kiln::{Model, Plan, Request, Sequence, TokenId};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1).map_or_else(
        || {
            PathBuf::from(env!("CARGO_MANIFEST_DIR"))
                .join("../tests/fixtures/transformers-5.23.0/models/mamba")
        },
        PathBuf::from,
    );
    let model = Model::load(folder)?;
    let plan = Plan::dynamic();
    let text = model.encode("The state of a recurrent model is");
    let mut ids = text.unwrap_or_else(|_| vec![27, 42, 22, 85, 13, 36, 46]);
    let shown = |ids: &[TokenId]| model.decode(ids).unwrap_or_else(|_| format!("{ids:?}"));

    // A long text takes no more memory than a short one.
    let mut state = Sequence::new(&model, &plan)?;
    for tokens in [1, 8, 64, 512] {
        ids.extend(generated(model.generate(&ids[..]).max_new_tokens(tokens).sequence(&mut state))?);
        println!("{:>4} tokens, {} bytes", ids.len(), state.cache().device_bytes());
    }

    // Two continuations of one prefix.
    for seed in [1, 2] {
        let mut branch = state.snapshot();
        let request = model.generate(&ids[..]).max_new_tokens(8).temperature(1.0).seed(seed);
        println!("seed {seed}: {}", shown(&generated(request.sequence(&mut branch))?));
    }

    // A saved state can be loaded and continued.
    let path = std::env::temp_dir().join(format!("mamba_state_{}.safetensors", std::process::id()));
    state.save(&model, &plan, &path)?;
    let bytes = std::fs::metadata(&path)?.len();
    let mut loaded = Sequence::load(&model, &plan, &path)?;
    std::fs::remove_file(&path)?;
    let again = generated(model.generate(&ids[..]).max_new_tokens(8).sequence(&mut loaded))?;
    let want = generated(model.generate(&ids[..]).max_new_tokens(8).sequence(&mut state))?;
    assert_eq!(again, want, "it goes on as if it had never been saved");
    println!("a file of {bytes} bytes goes on: {}", shown(&again));
    Ok(())
}

/// Collects the tokens of a request.
fn generated(request: Request<'_>) -> kiln::Result<Vec<TokenId>> {
    let steps = request.steps()?;
    steps.map(|step| step.map(|step| step.tokens[0])).filter_map(Result::transpose).collect()
}
