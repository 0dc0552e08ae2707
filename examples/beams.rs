//! Beam search, diverse beam groups, and forced words.
//! `cargo run --release --example beams [MODEL_FOLDER]`

use kiln::{
    Completion, GenerationConfig, Model,
    expert::{EarlyStopping, ForceWord},
};

const PROMPT: &str = "The Constitution of the";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let config = || GenerationConfig::new().do_sample(false).max_new_tokens(23);
    let generate = |what: &str, config: GenerationConfig| -> kiln::Result<()> {
        println!("{what}");
        let prompts = model.generate(PROMPT).config(config).completions()?;
        prompts.iter().flatten().take(4).for_each(show);
        Ok(())
    };

    generate("Four beams, the best two:", config().num_beams(4).num_return_sequences(2))?;

    // The example of the Transformers guide: each group is one beam, and avoids the choices of the groups
    // before it.
    let groups = config().num_beams(40).num_beam_groups(40).diversity_penalty(1.0).num_return_sequences(40);
    generate("Forty groups, the best four:", groups.early_stopping(EarlyStopping::Always))?;

    let words = ["king", "peace"].map(|word| model.encode_more(&format!(" {word}")).map(ForceWord::Word));
    let words: Vec<ForceWord> = words.into_iter().collect::<kiln::Result<_>>()?;
    generate("Two words that must occur:", config().num_beams(8).force_words_ids(words))?;
    Ok(())
}

fn show(completion: &Completion) {
    let score = completion.score.unwrap_or_default();
    println!("  {score:.3} {:?}", completion.text.as_deref().unwrap_or_default());
}
