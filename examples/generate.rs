//! Text from a prompt: `cargo run --release --example generate [MODEL_FOLDER]`

use std::io::Write;

use kiln::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let prompt = "The Constitution";
    print!("{prompt}");
    for piece in model.generate(prompt).max_new_tokens(60).seed(1).stream()? {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
