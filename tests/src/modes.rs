//! Decoding modes: the tokens and scores equal those of transformers.

use std::{fs, path::Path};

use kiln::{GenerationConfig, Model, Plan, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::support::{CLOSE, fixtures, float32, greedy, recorded};

/// A record of `tools/mode_cases.py`: greedy tokens, alone and in a batch with padding.
#[derive(Deserialize)]
struct Case {
    model: String,
    settings: Map<String, Value>,
    eos_token_id: Vec<TokenId>,
    prompts: Vec<Vec<TokenId>>,
    negative_prompts: Vec<Vec<TokenId>>,
    tokens: Vec<Vec<TokenId>>,
    /// Scores of the first step, after all processors.
    scores: Vec<Vec<Option<f32>>>,
}

/// Returns the cases of a version of transformers that have the setting `name`.
fn cases(version: &str, name: &str) -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/modes.json");
    let mut recorded: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let cases = recorded[format!("transformers {version}")].take();
    let mut cases: Vec<Case> = serde_json::from_value(cases).unwrap();
    cases.retain(|case| case.settings.contains_key(name));
    assert!(cases.len() >= 20 && cases.iter().any(|case| case.prompts.len() > 1));
    cases
}

/// Returns the settings of a case.
fn settings(case: &Case) -> GenerationConfig {
    let settings = GenerationConfig::from_arguments(&case.settings).unwrap();
    settings
        .merged_over(&greedy(case.tokens[0].len()))
        .eos_token_id(case.eos_token_id.clone())
        .pad_token_id(0)
}

/// Returns the tokens of each row, padded as in transformers, and the scores of the first step.
fn generated(model: &Model, plan: &Plan, case: &Case) -> (Vec<Vec<TokenId>>, Vec<Vec<f32>>) {
    let mut request = model.generate(case.prompts.clone()).config(settings(case)).plan(plan.clone());
    if !case.negative_prompts.is_empty() {
        request = request.negative_prompt(case.negative_prompts.clone());
    }
    let mut steps = request.keep_scores(true).steps().unwrap();
    let scores = steps.next().unwrap().unwrap().scores.unwrap();
    let n = 1 + steps.by_ref().map(Result::unwrap).count();
    let tokens = |(row, prompt): (usize, &Vec<TokenId>)| {
        let mut tokens = steps.tokens(row).unwrap()[prompt.len()..].to_vec();
        tokens.resize(n, 0);
        tokens
    };
    (case.prompts.iter().enumerate().map(tokens).collect(), scores)
}

#[track_caller]
fn assert_recorded(model: &Model, plan: &Plan, case: &Case, what: &str) {
    let (tokens, scores) = generated(model, plan, case);
    let what = format!("{:?} of {} {what}", case.settings, case.model);
    assert_eq!(tokens, case.tokens, "{what}");
    for (got, want) in scores.iter().zip(&case.scores) {
        assert_eq!(got.len(), want.len(), "{what}");
        for (got, want) in got.iter().zip(want) {
            let near = match want {
                Some(want) => (got - want).abs() <= CLOSE * want.abs().max(1.0),
                None => *got == f32::NEG_INFINITY,
            };
            assert!(near, "{got} instead of {want:?}: {what}");
        }
    }
}

#[test]
fn guidance_gives_the_tokens_and_scores_of_transformers() {
    let cases = cases("5.23.0", "guidance_scale");
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        for case in &cases {
            assert_recorded(&model, &Plan::dynamic(), case, &format!("on {device}"));
        }
        for plan in ["static:len=48", "offloaded", "none"] {
            let plan = Plan::named(plan).unwrap();
            cases.iter().take(6).for_each(|case| assert_recorded(&model, &plan, case, "with another cache"));
        }
    }
}

#[test]
fn dola_gives_the_tokens_and_scores_of_transformers() {
    let cases = cases("4.47.1", "dola_layers");
    for (device, opened) in kiln_testkit::devices::opened() {
        let load = |name: &str| float32(Model::builder(fixtures("4.47.1").join("models").join(name)), opened);
        let models = ["llama", "llama_tied"].map(|name| (name, load(name).load().unwrap()));
        for case in &cases {
            let (_, model) = models.iter().find(|(name, _)| *name == case.model).unwrap();
            assert_recorded(model, &Plan::dynamic(), case, &format!("on {device}"));
        }
    }
}

#[test]
fn contrastive_search_gives_the_tokens_and_scores_of_transformers() {
    let cases = cases("4.47.1", "penalty_alpha");
    for (device, opened) in kiln_testkit::devices::opened() {
        let load = |name: &str| float32(Model::builder(fixtures("4.47.1").join("models").join(name)), opened);
        let models = ["llama", "llama_tied"].map(|name| (name, load(name).load().unwrap()));
        let all = |plan: &str, cases: &[Case]| {
            for case in cases {
                let (_, model) = models.iter().find(|(name, _)| *name == case.model).unwrap();
                assert_recorded(
                    model,
                    &Plan::named(plan).unwrap(),
                    case,
                    &format!("with {plan} on {device}"),
                );
            }
        };
        all("dynamic", &cases);
        // Both models, with and without padding.
        for plan in ["static:len=48", "sink:window=48", "offloaded", "none"] {
            all(plan, &cases[..6]);
        }
    }
}
