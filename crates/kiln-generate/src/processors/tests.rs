use std::{fs, path::Path};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{KNOWN, Processor, as_written, build, by_name};
use crate::GenerationConfig;

const OUT: f32 = f32::NEG_INFINITY;

fn processor(name: &str, value: Value) -> Box<dyn Processor> {
    by_name(name, &value).expect("known").expect("possible")
}

fn applied(name: &str, value: Value, ids: &[u32], scores: &[f32]) -> Vec<f32> {
    let mut scores = scores.to_vec();
    processor(name, value).apply(ids, &mut scores);
    scores
}

/// What transformers recorded, to the last bit.
#[test]
fn transformers() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    for version in ["transformers-4.47.1", "transformers-5.23.0"] {
        let folder = fixtures.join(version);
        let cases = fs::read_to_string(folder.join("cases.json")).expect("cases.json");
        let cases: Value = serde_json::from_str(&cases).expect("JSON");
        let bytes = fs::read(folder.join("tensors.safetensors")).expect("tensors.safetensors");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let floats = |name: &str| -> (usize, Vec<f32>) {
            let tensor = tensors.tensor(name).expect(name);
            let (words, _) = tensor.data().as_chunks::<4>();
            let values = words.iter().map(|word| f32::from_le_bytes(*word));
            (
                *tensor.shape().last().expect("a shape"),
                values.map(|v| if v <= -1e30 { OUT } else { v }).collect(),
            )
        };
        let mut seen = Vec::new();
        for case in cases["cases"].as_array().expect("cases").iter().filter(|case| case["model"] == "proc") {
            let kwargs = case["kwargs"].as_object().expect("kwargs");
            let Some((name, value)) = kwargs.iter().find(|(name, _)| KNOWN.contains(&name.as_str())) else {
                continue;
            };
            let ids: Vec<Vec<u32>> = serde_json::from_value(case["input_ids"].clone()).expect("ids");
            let (vocab, mut scores) = floats("proc.scores");
            let (_, want) = floats(case["out"].as_str().expect("out"));
            for (row, ids) in scores.chunks_mut(vocab).zip(&ids) {
                processor(name, value.clone()).apply(ids, row);
            }
            assert_eq!(scores, want, "{version} {name}");
            seen.push(name.clone());
        }
        for name in KNOWN {
            assert!(seen.iter().any(|seen| seen == name), "{version} has {name}");
        }
    }
}

#[test]
fn known_is_what_there_is() {
    for name in KNOWN {
        assert_eq!(processor(name, json!(1)).name(), *name);
        assert!(by_name(name, &json!("one")).expect("known").is_err(), "{name} takes numbers");
        assert!(by_name(name, &json!(-1)).expect("known").is_err(), "{name} takes no negative ones");
    }
    assert!(by_name("typical_p", &json!(0.5)).is_none());
}

#[test]
fn order_and_conditions_are_those_of_transformers() {
    let names = |value: Value| -> Vec<&str> {
        let config: GenerationConfig = serde_json::from_value(value).expect("right types");
        build(&config.resolve().expect("possible")).iter().map(|p| p.name()).collect()
    };
    let all =
        json!({"do_sample": true, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1});
    assert_eq!(names(all), KNOWN, "with the 50 likeliest by default");
    assert_eq!(
        names(json!({"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1})),
        ["repetition_penalty"]
    );
    assert_eq!(names(json!({"do_sample": true, "top_k": 0})), [""; 0]);
    assert_eq!(names(json!({})), [""; 0]);
}

#[test]
fn repetition_counts_a_token_once_and_ignores_what_is_not_there() {
    let got = applied("repetition_penalty", json!(2.0), &[0, 1, 0, 0, 99], &[4.0, -4.0, 4.0]);
    assert_eq!(got, [2.0, -8.0, 4.0]);
}

#[test]
fn top_k_keeps_ties_and_everything_where_k_is_large() {
    let scores = [1.0, 3.0, 2.0, 2.0, OUT];
    assert_eq!(applied("top_k", json!(2), &[], &scores), [OUT, 3.0, 2.0, 2.0, OUT]);
    assert_eq!(applied("top_k", json!(5), &[], &scores), scores);
    assert_eq!(applied("top_k", json!(u64::MAX), &[], &scores), scores);
}

#[test]
fn top_p_removes_the_first_of_equals_and_never_the_last() {
    let quarters = [0.0; 4];
    assert_eq!(
        applied("top_p", json!(0.5), &[], &quarters),
        [OUT, OUT, 0.0, 0.0],
        "0.25 and 0.5 are at most 0.5"
    );
    assert_eq!(applied("top_p", json!(0.51), &[], &quarters), [OUT, 0.0, 0.0, 0.0]);
    assert_eq!(applied("top_p", json!(1e-9), &[], &quarters), [OUT, OUT, OUT, 0.0]);
    // In float64, which Python computes in, 1 - 0.8 rounds to the float32 that a fifth is.
    assert_eq!(applied("top_p", json!(0.8), &[], &[0.0; 5]), [OUT, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(applied("top_p", json!(0.9), &[], &[OUT, 1.0, OUT]), [OUT, 1.0, OUT]);
    assert_eq!(applied("top_p", json!(0.9), &[], &[OUT; 2]), [OUT; 2]);
}

#[test]
fn min_p_keeps_what_is_as_likely_as_asked() {
    let scores = [0.0, -0.6, -0.8, OUT];
    assert_eq!(applied("min_p", json!(0.5), &[], &scores), [0.0, -0.6, OUT, OUT], "exp(-0.69) is a half");
    assert_eq!(applied("min_p", json!(0.0), &[], &scores), scores);
    assert_eq!(applied("min_p", json!(1.0), &[], &scores), [0.0, OUT, OUT, OUT]);
}

#[test]
fn a_float_is_taken_as_it_is_written() {
    assert_eq!([0.8f32, 0.9, 0.95, 0.05].map(as_written), [0.8, 0.9, 0.95, 0.05]);
}
