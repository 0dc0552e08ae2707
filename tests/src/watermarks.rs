//! Watermarks of generated text: the tokens equal those of transformers, and detectors find the watermarks.

use std::{fs, path::Path};

use kiln::{
    TokenId,
    expert::watermark::{GreenListConfig, WatermarkDetector, WatermarkingConfig},
};
use serde::Deserialize;
use serde_json::Value;

use crate::support::{greedy, recorded};

#[derive(Deserialize)]
struct Case {
    config: Option<WatermarkingConfig>,
    prompts: Vec<Vec<TokenId>>,
    tokens: Vec<Vec<TokenId>>,
}

/// Returns the records of `tools/watermark_cases.py`: greedy tokens, alone and in a batch with padding.
fn cases() -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/watermarks.json");
    let recorded: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    serde_json::from_value(recorded["generations"].clone()).unwrap()
}

#[test]
fn tokens_with_a_watermark_are_those_of_transformers() {
    let cases = cases();
    assert!(cases.len() >= 15 && cases.iter().any(|case| case.prompts.len() > 1));
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        for Case { config, prompts, tokens } in &cases {
            let settings = greedy(tokens[0].len()).pad_token_id(0);
            let settings = match config.clone() {
                Some(config) => settings.watermarking_config(config),
                None => settings,
            };
            let mut steps = model.generate(prompts.clone()).config(settings).steps().unwrap();
            steps.by_ref().try_for_each(|step| step.map(drop)).unwrap();
            for (row, (prompt, tokens)) in prompts.iter().zip(tokens).enumerate() {
                let got = &steps.tokens(row).unwrap()[prompt.len()..];
                assert_eq!(got, tokens, "{config:?}, row {row} on {device}");
            }
        }
    }
}

/// On a GPU the scores are read back for the watermark. A row is marked as if it were alone, and only its own
/// key detects it.
#[test]
fn a_detector_finds_the_watermark_of_generated_tokens() {
    let own = GreenListConfig::default().bias(6.0).hashing_key(4711);
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        let rows = vec![vec![3, 1, 4], vec![1, 5, 9, 2, 6]];
        let request = model.generate(rows).max_new_tokens(80).temperature(1.0).seed(5);
        let settings = greedy(80).do_sample(true).watermarking_config(own.clone().into());
        let mut steps = request.config(settings).steps().unwrap();
        steps.by_ref().try_for_each(|step| step.map(drop)).unwrap();
        for row in 0..2 {
            let ids = &steps.tokens(row).unwrap()[5..];
            let detect = |config| WatermarkDetector::new(config, 97).unwrap().detect(ids).unwrap();
            let (found, other) = (detect(&own), detect(&GreenListConfig::default()));
            assert!(found.prediction && found.z_score > 5.0, "row {row} on {device}: {found:?}");
            assert!(!other.prediction, "row {row} on {device}: {other:?}");
        }
    }
}
