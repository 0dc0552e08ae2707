//! Assisted decoding: tokens are proposed from the prompt or by a draft model, and the model checks many of
//! them in one pass.
//! `cargo run --release --example assisted [MODEL_FOLDER [DRAFT_FOLDER]]`

use std::path::PathBuf;

use kiln::{GenerationConfig, Model, Request};

const PROMPT: &str = "The Constitution";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = kiln_examples::model_folder();
    let model = Model::load(&folder)?;
    // Without a smaller model, the model drafts for itself: every proposal is accepted, and nothing is
    // gained.
    let draft = Model::load(std::env::args_os().nth(2).map_or(folder, PathBuf::from))?;
    let request = || model.generate(PROMPT).temperature(0.0).max_new_tokens(60);

    let alone = show("alone", request())?;
    let lookup = GenerationConfig::new().prompt_lookup_num_tokens(8);
    let looked_up = show("prompt lookup", request().config(lookup))?;
    let drafted = show("a draft model", request().draft(&draft))?;
    assert!(alone == looked_up && alone == drafted, "proposals change no token");
    println!("\n{PROMPT}{alone}");
    Ok(())
}

fn show(what: &str, request: Request<'_>) -> kiln::Result<String> {
    let mut pieces = request.stream()?;
    let text = pieces.by_ref().collect::<kiln::Result<String>>()?;
    let stats = pieces.stats();
    let rate = stats.decoded() as f64 / stats.decode_time.as_secs_f64();
    println!("{what:<14} {:>3} proposed, {:>3} accepted, {rate:.0} tokens/s", stats.proposed, stats.accepted);
    Ok(text)
}
