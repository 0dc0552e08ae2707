//! Text from a prompt: `cargo run --release --example generate [MODEL_FOLDER]`

use std::io::Write;

use kiln::{GenerationConfig, LoadOptions, Model, Plan, RunOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(&kiln_examples::model_folder(), LoadOptions::new("auto".parse()?)?)?;
    let mut cache = model.cache(&Plan::dynamic())?;
    let prompt = "The Constitution";
    let wanted = GenerationConfig::new().max_new_tokens(60).seed(1);

    print!("{prompt}");
    for piece in model.generate_text(&mut cache, model.encode(prompt)?, &wanted, RunOptions::default())? {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
