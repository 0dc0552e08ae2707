//! Many requests at once: they share passes, and each gives the text that it gives alone.
//! `cargo run --release --example engine [MODEL_FOLDER]`

use std::time::Instant;

use kiln::{EXACT_ROWS, Event, Model, expert::read_back::block_on};

const NAMES: [&str; 8] = ["ROMEO:", "JULIET:", "HAMLET:", "OTHELLO:", "IAGO:", "LEAR:", "PUCK:", "VIOLA:"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let requests = || {
        let draw =
            |(seed, &name)| model.generate(name).max_new_tokens(60).temperature(0.8).seed(seed).stream();
        (0..).zip(&NAMES).map(draw)
    };

    let start = Instant::now();
    let mut alone = Vec::new();
    for request in requests() {
        alone.push(request?.collect::<kiln::Result<String>>()?);
    }
    let one_by_one = start.elapsed();

    let start = Instant::now();
    let mut engine = model.engine(EXACT_ROWS)?;
    let mut texts = Vec::new();
    for request in requests() {
        // Requests may come at any time, and `cancel` ends one.
        texts.push((engine.submit(request?)?, String::new()));
    }
    while !engine.is_idle() {
        for event in block_on(engine.step()) {
            match event {
                Event::Output(id, piece) => {
                    texts
                        .iter_mut()
                        .filter(|(of, _)| *of == id)
                        .for_each(|(_, text)| text.push_str(&piece.text));
                }
                Event::Ended(id, text) => {
                    println!("{id:?} has {} tokens: {:?}", text.stats().generated, text.stop_reason());
                }
                Event::Failed(_, _, error) => return Err(error.into()),
            }
        }
    }
    println!("one by one {one_by_one:.2?}, together {:.2?}", start.elapsed());
    assert!(texts.iter().map(|(_, text)| text).eq(&alone), "a request does not see the others");
    Ok(())
}
