//! Real language models, if available: the tokens of Transformers.
//!
//! `KILN_TEST_REAL_MODELS` names the folder that `python tools/real_models.py fetch DIR` creates. Without it,
//! this test reports that it was skipped.

use std::{collections::BTreeMap, fs, path::Path};

use kiln::{DtypeChoice, Model, TokenId};
use serde::Deserialize;

/// Difference of two logits that rounding may turn around.
const NEARLY_TIED: f32 = 0.02;

#[derive(Deserialize)]
struct Record {
    models: BTreeMap<String, Vec<Greedy>>,
}

#[derive(Deserialize)]
struct Greedy {
    prompt: String,
    ids: Vec<TokenId>,
    tokens: Vec<TokenId>,
    /// Differences of the two largest logits.
    margins: Vec<f32>,
}

#[test]
fn real_models_give_the_tokens_of_transformers() {
    let Some(folder) = std::env::var_os("KILN_TEST_REAL_MODELS") else {
        println!(
            "real_models_give_the_tokens_of_transformers: skipped: set KILN_TEST_REAL_MODELS to a folder made by \
             `python tools/real_models.py fetch DIR`"
        );
        return;
    };
    let record = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/real_models.json");
    let record: Record = serde_json::from_str(&fs::read_to_string(record).unwrap()).unwrap();
    // A software GPU would take minutes.
    let (_, device) = &kiln_testkit::devices::opened()[0];
    let (mut compared, mut tied) = (0, 0);
    for (file, texts) in &record.models {
        let model = Model::builder(Path::new(&folder).join(file)).opened(device.clone());
        let model = model.dtype(DtypeChoice::F32).exact(true).load().unwrap();
        for Greedy { prompt, ids, tokens, margins } in texts {
            assert_eq!(model.encode(prompt).unwrap(), *ids, "{file}: {prompt}");
            let config = kiln::GenerationConfig::new().do_sample(false).repetition_penalty(1.0);
            let config = config.min_new_tokens(tokens.len());
            let request = model.generate(ids.clone()).config(config).max_new_tokens(tokens.len());
            let mut steps = request.steps().unwrap();
            steps.by_ref().for_each(|step| drop(step.unwrap()));
            let got = &steps.tokens(0).unwrap()[ids.len()..];
            match got.iter().zip(tokens).position(|(got, want)| got != want) {
                None => assert_eq!(got.len(), tokens.len(), "{file}: {prompt}"),
                Some(at) => {
                    assert!(
                        margins[at] < NEARLY_TIED,
                        "{file}: {prompt}: token {at}, margin {}",
                        margins[at]
                    );
                    tied += 1;
                }
            }
            compared += 1;
        }
    }
    assert!(compared >= 10 && tied <= 1, "{tied} of {compared} texts left the record at a near-tie");
}
