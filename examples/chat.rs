//! A conversation of two turns: `cargo run --release --example chat [MODEL_FOLDER]`

use std::io::Write;

use kiln::{Chat, ChatTemplate, Model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let template = model.chat_templates().choose(false).unwrap_or_else(|_| ChatTemplate::chatml());
    let mut chat = Chat::new(&model, template, model.plan())?;

    for question in ["What news from Rome?", "And who told you so?"] {
        println!("> {question}");
        let mut answer = chat.say(question)?.max_new_tokens(60).seed(1).stream()?;
        for piece in answer.by_ref() {
            print!("{}", piece?);
            std::io::stdout().flush()?;
        }
        // The second turn feeds only the second question: the cache holds the previous text.
        let reuse = answer.reuse();
        println!("\n[{} tokens reused, {} fed]\n", reuse.reused, reuse.fed);
    }
    Ok(())
}
