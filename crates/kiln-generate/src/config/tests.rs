use kiln_core::Error;
use serde_json::{Value, json};

use super::GenerationConfig;
use crate::Settings;

fn arguments(value: Value) -> Result<GenerationConfig, Error> {
    GenerationConfig::from_arguments(value.as_object().expect("an object"))
}

fn config(value: Value) -> GenerationConfig {
    arguments(value).expect("right types")
}

fn refused(value: Value) -> String {
    config(value).resolve().expect_err("impossible").to_string()
}

#[test]
fn a_single_value_equals_a_list_of_one() {
    assert_eq!(config(json!({"eos_token_id": 2})), config(json!({"eos_token_id": [2]})));
    assert_eq!(config(json!({"stop_strings": "a"})), config(json!({"stop_strings": ["a"]})));
    assert_eq!(config(json!({"eos_token_id": [2, 5]})).eos_token_id, Some(vec![2, 5]));
}

#[test]
fn null_and_unknown_settings_have_no_effect() {
    let nothing = GenerationConfig::default();
    assert_eq!(
        config(json!({"top_k": null, "eos_token_id": null, "transformers_version": "5", "_from": 4})),
        nothing
    );
    assert_eq!(config(json!({"pad_token_id": -1, "bos_token_id": null})), nothing);
    assert_eq!(config(json!({"eos_token_id": -1})).eos_token_id, Some(vec![]));
    let (resolved, default) = (nothing.resolve().expect("possible"), Settings::default());
    assert_eq!(format!("{resolved:?}"), format!("{default:?}"));
}

#[test]
fn a_wrong_type_is_reported_with_its_key() {
    for (key, value) in [
        ("top_k", json!("many")),
        ("top_k", json!(-3)),
        ("do_sample", json!(1)),
        ("temperature", json!([0.7])),
        ("eos_token_id", json!("</s>")),
        ("pad_token_id", json!(1u64 << 40)),
        ("stop_strings", json!([1])),
        ("sequence_bias", json!([[5, 2.0]])),
        ("bad_words_ids", json!([5])),
        ("exponential_decay_length_penalty", json!([3])),
        ("remove_invalid_values", json!(1)),
        ("watermarking_config", json!(true)),
        ("watermarking_config", json!({"bias": "much"})),
        ("max_new_tokens", json!(1.5)),
    ] {
        let error = arguments(json!({key: value})).expect_err(key);
        assert!(error.to_string().starts_with(&format!("generation_config: `{key}")), "{error}");
    }
}

#[test]
fn a_file_is_read_and_its_errors_name_it() {
    let folder = std::env::temp_dir().join(format!("kiln-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let path = folder.join("generation_config.json");
    let read = |text: &str| {
        std::fs::write(&path, text).expect("written");
        GenerationConfig::from_file(&path)
    };
    let good =
        read(r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "_from": 1}"#);
    let want = GenerationConfig::new().do_sample(true).temperature(0.6).top_p(0.9).eos_token_id(vec![1, 2]);
    assert_eq!(good, Ok(Some(want)));
    let wrong = read(r#"{"temperature": "hot"}"#).expect_err("a string").to_string();
    assert!(wrong.contains("generation_config.json") && wrong.contains("`temperature`"), "{wrong}");
    for text in ["[]", "{", ""] {
        assert!(matches!(read(text), Err(Error::File { .. })), "{text:?}");
    }
    std::fs::remove_dir_all(&folder).expect("removed");
    assert_eq!(GenerationConfig::from_file(&path), Ok(None), "gone");
}

#[test]
fn settings_of_the_call_override_those_of_the_file() {
    let file = config(json!({"temperature": 0.6, "top_k": 20, "max_new_tokens": 8, "eos_token_id": 2}));
    let call = config(json!({"temperature": 0.9, "max_length": 30, "eos_token_id": []}));
    let both = file.merged_with(call.clone());
    assert_eq!(both, call.merged_over(&file));
    assert_eq!(
        (both.temperature, both.top_k, both.eos_token_id.clone()),
        (Some(0.9), Some(20), Some(vec![]))
    );
    assert_eq!((both.max_new_tokens, both.max_length), (None, Some(30)), "one wish with two spellings");
}

#[test]
fn impossible_values_are_errors() {
    for (key, value) in [
        ("max_new_tokens", json!(0)),
        ("max_length", json!(0)),
        ("max_time", json!(0)),
        ("max_time", json!(-1.5)),
        ("temperature", json!(-0.5)),
        ("temperature", json!(1e300)),
        ("top_p", json!(0)),
        ("top_p", json!(1.01)),
        ("min_p", json!(-0.1)),
        ("min_p", json!(1.5)),
        ("repetition_penalty", json!(0)),
        ("stop_strings", json!(["a", ""])),
        ("typical_p", json!(0)),
        ("typical_p", json!(1.1)),
        ("top_h", json!(0)),
        ("epsilon_cutoff", json!(1)),
        ("eta_cutoff", json!(-0.1)),
        ("encoder_repetition_penalty", json!(-1)),
        ("encoder_repetition_penalty", json!(1e38)),
        ("repetition_penalty", json!(1e-38)),
        ("exponential_decay_length_penalty", json!([3, 0])),
        ("sequence_bias", json!([[[], 1.0]])),
        ("bad_words_ids", json!([[]])),
        ("watermarking_config", json!({"greenlist_ratio": 1.5})),
        ("watermarking_config", json!({"ngram_len": 5, "keys": []})),
    ] {
        assert!(refused(json!({key: value})).starts_with(key), "{key} {value}");
    }
    let nan = |config: GenerationConfig| assert!(config.resolve().is_err(), "{config:?}");
    nan(GenerationConfig::new().temperature(f32::NAN));
    nan(GenerationConfig::new().top_p(f32::NAN));
    nan(GenerationConfig::new().min_p(f32::NAN));
    nan(GenerationConfig::new().repetition_penalty(f32::INFINITY));
}

#[test]
fn a_temperature_of_zero_is_greedy() {
    let settings =
        config(json!({"do_sample": true, "temperature": 0, "top_p": 0.5})).resolve().expect("possible");
    assert!(!settings.do_sample);
    assert!(settings.processors.is_empty());
}

#[test]
fn max_length_counts_the_prompt_and_max_new_tokens_overrides_it() {
    let settings = |value| config(value).resolve().expect("possible");
    assert_eq!(settings(json!({})).new_tokens(10), Ok(None));
    assert_eq!(settings(json!({"max_length": 12})).new_tokens(10), Ok(Some(2)));
    assert_eq!(settings(json!({"max_length": 12, "max_new_tokens": 7})).new_tokens(100), Ok(Some(7)));
    assert!(settings(json!({"max_length": 12})).new_tokens(12).is_err());
}

#[test]
fn settings_that_are_not_applied_are_named() {
    let config =
        |json: Value| GenerationConfig::read(json.as_object().expect("an object")).expect("settings");
    for neutral in [
        json!({"num_beams": 1, "guidance_scale": 1.0, "constraints": [], "token_healing": false}),
        json!({"typical_p": 0.9, "no_repeat_ngram_size": 3, "diversity_penalty": 0, "length_penalty": 2.0}),
        json!({"renormalize_logits": true, "_from_model_config": true, "transformers_version": "5.0"}),
    ] {
        assert!(config(neutral.clone()).not_applied().is_empty(), "{neutral}");
    }
    let json = json!({"dola_layers": "low", "constraints": [1], "num_beams": 4, "token_healing": true});
    let named = ["constraints", "token_healing"];
    assert_eq!(config(json.clone()).not_applied(), named);
    let refused = arguments(json.clone()).expect_err("it is asked for").to_string();
    assert_eq!(refused, "constraints: is a setting of transformers that is not applied here; leave it out");
    let overridden = config(json!({"constraints": []})).merged_over(&config(json));
    assert!(!overridden.not_applied().contains(&"constraints"));
}
