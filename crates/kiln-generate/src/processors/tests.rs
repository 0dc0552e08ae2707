use std::{fs, path::Path, sync::Arc};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{AllowedTokens, Processors, RowState, as_written, names};
use crate::GenerationConfig;

const OUT: f32 = f32::NEG_INFINITY;

/// The processors of only `settings`, with sampling.
fn processors(settings: Value) -> Processors {
    let config: GenerationConfig = serde_json::from_value(settings).expect("right types");
    let top_k = config.top_k.unwrap_or(0);
    Processors::of(&config.top_k(top_k), true).expect("possible")
}

fn row(ids: &[u32], generated: usize) -> RowState<'_> {
    RowState { index: 0, ids, generated, padding: 0, len: ids.len(), remaining: None }
}

fn applied(settings: Value, row: RowState<'_>, scores: &[f32]) -> Vec<f32> {
    let mut scores = scores.to_vec();
    processors(settings).apply(&row, &mut scores).expect("processed");
    scores
}

/// Applies the processors to a prompt without generated tokens.
fn of_prompt(settings: Value, ids: &[u32], scores: &[f32]) -> Vec<f32> {
    applied(settings, row(ids, 0), scores)
}

/// Compares with recordings of transformers, to the last bit except for logarithms.
#[test]
fn processors_match_recordings_of_transformers() {
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
            let name = case["case"].as_str().expect("a name");
            let number = |key: &str| case["kwargs"][key].as_u64().map(|number| number as usize);
            let ids: Vec<Vec<u32>> = serde_json::from_value(case["input_ids"].clone()).expect("ids");
            let (vocab, mut scores) = floats("proc.scores");
            let (_, want) = floats(case["out"].as_str().expect("out"));
            let processors = processors(case["kwargs"].clone());
            assert_eq!(processors.names().collect::<Vec<_>>(), [name]);
            for (scores, ids) in scores.chunks_mut(vocab).zip(&ids) {
                let generated = ids.len() - number("input_ids_seq_length").unwrap_or(ids.len());
                let remaining = number("max_length").map(|length| length - ids.len());
                let row = RowState { remaining, ..row(ids, generated) };
                processors.apply(&row, scores).expect("processed");
            }
            let near = |(got, want): (&f32, &f32)| got == want || (got - want).abs() < 1e-6 * want.abs();
            let to_the_bit = name != "renormalize_logits";
            let same = scores == want || !to_the_bit && scores.iter().zip(&want).all(near);
            assert!(same, "{version} {name}: {scores:?} {want:?}");
            seen.push(name.to_owned());
        }
        assert_eq!(seen.len(), 19, "{version}");
    }
}

/// A value that is not neutral for each setting.
fn all() -> Value {
    json!({
        "do_sample": true, "temperature": 0.7, "top_h": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9,
        "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "repetition_penalty": 1.1, "encoder_repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "sequence_bias": [[[5], 1.0]],
        "bad_words_ids": [[5]], "suppress_tokens": [5], "begin_suppress_tokens": [5], "min_length": 5, "min_new_tokens": 5,
        "forced_bos_token_id": 5, "forced_eos_token_id": 5, "exponential_decay_length_penalty": [5, 1.1],
        "remove_invalid_values": true, "watermarking_config": {}, "renormalize_logits": true, "eos_token_id": 2
    })
}

#[test]
fn order_and_conditions_are_those_of_transformers() {
    let named = |value: Value| -> Vec<&str> {
        let config: GenerationConfig = serde_json::from_value(value).expect("right types");
        config.resolve().expect("possible").processors.names().collect()
    };
    // `min_new_tokens` overrides `min_length`.
    let in_order: Vec<&str> = names().filter(|name| *name != "min_length").collect();
    assert_eq!(named(all()), in_order);
    let mut greedy = all();
    greedy["do_sample"] = json!(false);
    let sampling =
        ["temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"];
    let always: Vec<&str> = in_order.into_iter().filter(|name| !sampling.contains(name)).collect();
    assert_eq!(named(greedy), always);
    assert_eq!(named(json!({"do_sample": true})), ["top_k"], "the 50 likeliest by default");
    assert_eq!(named(json!({})), [""; 0]);
    let neutral = json!({
        "do_sample": true, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0,
        "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0, "sequence_bias": [], "bad_words_ids": [], "suppress_tokens": [],
        "begin_suppress_tokens": null, "min_length": 0, "min_new_tokens": 0, "forced_bos_token_id": null,
        "forced_eos_token_id": null, "remove_invalid_values": false, "watermarking_config": null,
        "renormalize_logits": false, "eos_token_id": 2
    });
    assert_eq!(named(neutral), [""; 0]);
    assert_eq!(named(json!({"min_length": 3, "min_new_tokens": 3})), [""; 0], "no token ends a row");
    let both = json!({"min_length": 3, "min_new_tokens": 3, "eos_token_id": 2});
    assert_eq!(named(both), ["min_new_tokens"], "which overrides the other");
    assert_eq!(named(json!({"min_length": 3, "eos_token_id": 2})), ["min_length"]);
}

#[test]
fn settings_with_a_kernel_run_on_the_device_and_others_are_listed() {
    let on_device = |value: Value| processors(value).on_device(true);
    let known = json!({"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
                       "renormalize_logits": true});
    let sampling = on_device(known).expect("all of it");
    assert_eq!((sampling.temperature, sampling.top_k, sampling.repetition_penalty), (0.7, 4, 1.1));
    let others = on_device(all()).expect_err("more than it can");
    assert_eq!(others.len(), names().count() - 7, "{others:?}");
}

#[test]
fn repeated_ngrams_of_the_row_and_of_the_prompt_are_removed() {
    let ids = [1, 2, 3, 1, 2, 4, 1, 2];
    assert_eq!(of_prompt(json!({"no_repeat_ngram_size": 3}), &ids, &[0.0; 5]), [0.0, 0.0, 0.0, OUT, OUT]);
    let behind = |n| applied(json!({"encoder_no_repeat_ngram_size": n}), row(&ids, 4), &[0.0; 5]);
    assert_eq!(behind(3), [0.0, 0.0, 0.0, OUT, 0.0], "the prompt is 1 2 3 1");
    assert_eq!(behind(1), [0.0, OUT, OUT, OUT, 0.0]);
    let behind_padding =
        |settings: Value| applied(settings, RowState { padding: 2, ..row(&[1, 0], 1) }, &[2.0; 3]);
    assert_eq!(behind_padding(json!({"no_repeat_ngram_size": 2, "pad_token_id": 0})), [OUT, OUT, 2.0]);
    assert_eq!(behind_padding(json!({"no_repeat_ngram_size": 2})), [2.0; 3], "no token pads");
    assert_eq!(
        behind_padding(json!({"encoder_no_repeat_ngram_size": 2, "pad_token_id": 0})),
        [OUT, OUT, 2.0]
    );
    let raised = behind_padding(json!({"encoder_repetition_penalty": 2.0, "pad_token_id": 0}));
    assert_eq!(raised, [4.0, 4.0, 2.0]);
    assert_eq!(
        of_prompt(json!({"no_repeat_ngram_size": 9}), &ids, &[0.0; 5]),
        [0.0; 5],
        "longer than the row"
    );
    assert_eq!(of_prompt(json!({"no_repeat_ngram_size": 99}), &ids, &[0.0; 5]), [0.0; 5]);
}

#[test]
fn a_sequence_bias_applies_to_the_token_that_completes_it() {
    let bias = json!({"sequence_bias": [[[1], 0.5], [[3, 2], 2.0], [[1, 3, 2], 4.0]]});
    assert_eq!(of_prompt(bias.clone(), &[3], &[0.0; 4]), [0.0, 0.5, 2.0, 0.0]);
    assert_eq!(
        of_prompt(bias.clone(), &[1, 3], &[0.0; 4]),
        [0.0, 0.5, 6.0, 0.0],
        "longer than the row until now"
    );
    assert_eq!(of_prompt(bias.clone(), &[0, 1, 3], &[0.0; 4]), [0.0, 0.5, 6.0, 0.0]);
    assert_eq!(of_prompt(bias, &[], &[0.0; 4]), [0.0, 0.5, 0.0, 0.0]);
    let words = json!({"bad_words_ids": [[2], [3], [0, 1]], "eos_token_id": [3]});
    assert_eq!(of_prompt(words, &[3, 0], &[0.0; 4]), [0.0, OUT, OUT, 0.0], "what ends a row is no bad word");
    let check = |settings| processors(settings).check(4).map_err(|error| error.to_string());
    let refused = "bad_words_ids: token 4 is not in the model's vocabulary of 4 tokens";
    assert_eq!(check(json!({"bad_words_ids": [[1, 4]]})), Err(refused.to_owned()));
    assert_eq!(check(json!({"suppress_tokens": [4]})), Ok(()), "folders name tokens that a vocabulary lacks");
    assert!(
        check(json!({"forced_eos_token_id": 9})).is_err()
            && check(json!({"forced_bos_token_id": 9})).is_err()
    );
}

/// Gives the results of `PrefixConstrainedLogitsProcessor` of transformers 5.23.
#[test]
fn tokens_that_are_not_allowed_are_removed() {
    let after = |settings: Value, allowed: Vec<u32>, scores: &[f32]| {
        let mut processors = processors(settings);
        processors.add_allowed_tokens(AllowedTokens::new(move |_| allowed.clone()));
        let mut scores = scores.to_vec();
        processors.apply(&row(&[7, 8], 1), &mut scores).map(|()| scores).map_err(|error| error.to_string())
    };
    let nothing = || json!({});
    assert_eq!(after(nothing(), vec![2, 0, 2], &[1.0, 2.0, -3.0]), Ok(vec![1.0, OUT, -3.0]));
    assert_eq!(after(nothing(), vec![0, 2], &[OUT, 2.0, OUT]), Ok(vec![0.0, OUT, 0.0]), "all were removed");
    assert_eq!(after(nothing(), vec![0, 2], &[OUT, 2.0, 1.0]), Ok(vec![OUT, OUT, 1.0]));
    assert!(after(nothing(), vec![0], &[1.0, f32::NAN]).expect("allowed")[1].is_nan());
    let empty = "allowed_tokens: the list is empty for row 0 after 2 tokens; allow at least one token";
    assert_eq!(after(json!({"remove_invalid_values": true}), vec![], &[1.0; 3]), Err(empty.to_owned()));
    let foreign = "allowed_tokens: token 3 is not in the model's vocabulary of 3 tokens";
    assert_eq!(after(nothing(), vec![1, 3], &[1.0; 3]), Err(foreign.to_owned()));

    let mut all = processors(all());
    all.add(Arc::new(AllowedTokens::new(|_| vec![0])));
    all.add_allowed_tokens(AllowedTokens::new(|_| vec![0]));
    let names: Vec<&str> = all.names().collect();
    let around = |name| {
        let at = names.iter().position(|other| *other == name).expect(name);
        [names[at - 1], names[at + 1]]
    };
    assert_eq!(around("allowed_tokens"), ["min_new_tokens", "forced_bos_token_id"]);
    assert_eq!(around("processors"), ["begin_suppress_tokens", "temperature"]);
}

#[test]
fn own_processors_act_after_allowed_tokens_whichever_came_first() {
    let mut few = processors(json!({}));
    few.add(Arc::new(AllowedTokens::new(|_| vec![0])));
    few.add_allowed_tokens(AllowedTokens::new(|_| vec![0]));
    assert_eq!(few.names().collect::<Vec<_>>(), ["allowed_tokens", "processors"]);
}

#[test]
fn length_settings_count_tokens_as_in_transformers() {
    let eos = |settings: Value, generated: usize, len: usize, remaining: Option<usize>| {
        let mut settings = settings;
        settings["eos_token_id"] = json!([1]);
        let state = RowState { len, remaining, ..row(&[0, 0, 0, 0], generated) };
        applied(settings, state, &[-2.0; 3])
    };
    let kept = [-2.0; 3];
    assert_eq!(eos(json!({"min_length": 6}), 2, 5, None), [-2.0, OUT, -2.0], "padding counts");
    assert_eq!(eos(json!({"min_length": 6}), 2, 6, None), kept);
    assert_eq!(eos(json!({"min_new_tokens": 3}), 2, 9, None), [-2.0, OUT, -2.0]);
    assert_eq!(eos(json!({"min_new_tokens": 3}), 3, 9, None), kept);
    assert_eq!(eos(json!({"forced_eos_token_id": 2}), 3, 9, Some(1)), [OUT, OUT, 0.0]);
    assert_eq!(eos(json!({"forced_eos_token_id": 2}), 3, 9, Some(2)), kept);
    assert_eq!(eos(json!({"forced_eos_token_id": 2}), 3, 9, None), kept);
    assert_eq!(eos(json!({"forced_bos_token_id": 2}), 0, 1, None), [OUT, OUT, 0.0]);
    assert_eq!(eos(json!({"forced_bos_token_id": 2}), 1, 2, None), kept);
    assert_eq!(eos(json!({"exponential_decay_length_penalty": [2, 2.0]}), 2, 9, None), kept);
    let raised = eos(json!({"exponential_decay_length_penalty": [2, 2.0]}), 4, 9, None);
    assert_eq!(raised, [-2.0, 4.0, -2.0], "by three times its size");
    let removed = eos(json!({"min_new_tokens": 9, "exponential_decay_length_penalty": [2, 2.0]}), 4, 9, None);
    assert_eq!(removed, [-2.0, OUT, -2.0], "what was removed stays removed");
    let endless = eos(json!({"exponential_decay_length_penalty": [0, 1e9]}), 4000, 9, None);
    assert_eq!(endless[1], f32::MAX);
    assert_eq!(eos(json!({"begin_suppress_tokens": [0]}), 0, 4, None), [OUT, -2.0, -2.0]);
    assert_eq!(eos(json!({"begin_suppress_tokens": [0]}), 1, 4, None), kept);
    let forced = json!({"begin_suppress_tokens": [0], "forced_bos_token_id": 2});
    assert_eq!(eos(forced.clone(), 0, 1, None), [OUT, OUT, 0.0]);
    assert_eq!(eos(forced, 1, 2, None), [OUT, -2.0, -2.0], "behind the token that was forced");
}

#[test]
fn remove_invalid_values_makes_scores_finite() {
    let scores = [f32::NAN, f32::INFINITY, OUT, 1.0];
    let want = [0.0, f32::MAX, f32::MIN, 1.0];
    assert_eq!(of_prompt(json!({"remove_invalid_values": true}), &[], &scores), want);
    let cold = json!({"remove_invalid_values": true, "temperature": 0.5});
    let want = [0.0, f32::INFINITY, OUT, 2.0];
    assert_eq!(of_prompt(cold, &[], &scores), want, "they overflow again, as in transformers");
}

#[test]
fn cutoffs_remove_unlikely_tokens_but_never_all() {
    // Probabilities of 0.5, 0.25, 0.125, 0.125.
    let scores = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    let kept = |settings: Value| -> Vec<bool> {
        of_prompt(settings, &[], &scores).iter().map(|score| *score != OUT).collect()
    };
    assert_eq!(kept(json!({"epsilon_cutoff": 0.2})), [true, true, false, false]);
    assert_eq!(kept(json!({"epsilon_cutoff": 0.9})), [true, false, false, false]);
    // The entropy is 1.21 nats: sqrt(0.9) * exp(-1.21) is 0.28.
    assert_eq!(kept(json!({"eta_cutoff": 0.9})), [true, false, false, false]);
    assert_eq!(kept(json!({"eta_cutoff": 0.2})), [true, true, false, false], "0.13 is least");
    assert_eq!(kept(json!({"eta_cutoff": 0.1})), [true; 4], "0.094 is least");
    // Terms of the entropy: 0.347, 0.347, 0.26, 0.26.
    assert_eq!(kept(json!({"top_h": 0.6})), [true, true, false, false]);
    assert_eq!(kept(json!({"top_h": 0.1})), [true, false, false, false]);
    // The second is closest to the entropy (1.39 nats), then the first (0.69), then the others (2.08).
    assert_eq!(kept(json!({"typical_p": 0.2})), [false, true, false, false]);
    assert_eq!(kept(json!({"typical_p": 0.5})), [true, true, false, false]);
    let empty: Vec<f32> =
        of_prompt(json!({"typical_p": 0.5, "top_h": 0.5, "eta_cutoff": 0.1}), &[], &[OUT; 2]);
    assert_eq!(empty, [OUT; 2]);
    for settings in [json!({"top_h": 0.5}), json!({"top_p": 0.5})] {
        let got = of_prompt(settings, &[], &[-f32::NAN, 1.0, 2.0]);
        assert!(got[0].is_nan() && got[1..] == [1.0, 2.0], "{got:?}: a damaged model is not hidden");
    }
}

#[test]
fn a_repetition_penalty_counts_a_token_once_and_ignores_unknown_ids() {
    let got = of_prompt(json!({"repetition_penalty": 2.0}), &[0, 1, 0, 0, 99], &[4.0, -4.0, 4.0]);
    assert_eq!(got, [2.0, -8.0, 4.0]);
}

#[test]
fn top_k_keeps_ties_and_all_tokens_if_k_is_large() {
    let scores = [1.0, 3.0, 2.0, 2.0, OUT];
    assert_eq!(of_prompt(json!({"top_k": 2}), &[], &scores), [OUT, 3.0, 2.0, 2.0, OUT]);
    assert_eq!(of_prompt(json!({"top_k": 5}), &[], &scores), scores);
    assert_eq!(of_prompt(json!({"top_k": u64::MAX}), &[], &scores), scores);
}

/// The definition, without the short cut for tokens that are removed in any case.
fn top_p_by_definition(p: f32, scores: &[f32]) -> Vec<f32> {
    let largest = scores.iter().copied().fold(OUT, f32::max);
    let total = scores.iter().map(|score| f64::from((score - largest).exp())).sum::<f64>() as f32;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    order.pop();
    let (mut sum, mut left) = (0.0, scores.to_vec());
    for i in order {
        sum += f64::from((scores[i] - largest).exp() / total);
        if sum as f32 > (1.0 - as_written(p)) as f32 {
            break;
        }
        left[i] = OUT;
    }
    left
}

#[test]
fn top_p_of_large_vocabularies_is_as_defined() {
    let mut state = 7u64;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    for vocab in [2, 41, 1000, 50_000] {
        // From flat to steep, with ties.
        for width in [0.0, 1.0, 12.0, 90.0] {
            let scores: Vec<f32> = (0..vocab).map(|_| (width * noise() * 8.0).round() / 8.0).collect();
            for p in [1e-6, 0.1, 0.5, 0.9, 0.999] {
                let got = of_prompt(json!({"top_p": p}), &[], &scores);
                assert_eq!(got, top_p_by_definition(p, &scores), "{vocab} tokens, width {width}, top_p {p}");
            }
        }
    }
}

#[test]
fn top_p_removes_the_first_of_equal_tokens_and_never_the_last() {
    let quarters = [0.0; 4];
    assert_eq!(
        of_prompt(json!({"top_p": 0.5}), &[], &quarters),
        [OUT, OUT, 0.0, 0.0],
        "0.25 and 0.5 are at most 0.5"
    );
    assert_eq!(of_prompt(json!({"top_p": 0.51}), &[], &quarters), [OUT, 0.0, 0.0, 0.0]);
    assert_eq!(of_prompt(json!({"top_p": 1e-9}), &[], &quarters), [OUT, OUT, OUT, 0.0]);
    // In float64, in which Python computes, 1 - 0.8 rounds to the float32 nearest to a fifth.
    assert_eq!(of_prompt(json!({"top_p": 0.8}), &[], &[0.0; 5]), [OUT, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(of_prompt(json!({"top_p": 0.9}), &[], &[OUT, 1.0, OUT]), [OUT, 1.0, OUT]);
    assert_eq!(of_prompt(json!({"top_p": 0.9}), &[], &[OUT; 2]), [OUT; 2]);
}

#[test]
fn min_p_keeps_tokens_of_at_least_that_share_of_the_likeliest() {
    let scores = [0.0, -0.6, -0.8, OUT];
    assert_eq!(of_prompt(json!({"min_p": 0.5}), &[], &scores), [0.0, -0.6, OUT, OUT], "exp(-0.69) is a half");
    assert_eq!(of_prompt(json!({"min_p": 0.0}), &[], &scores), scores);
    assert_eq!(of_prompt(json!({"min_p": 1.0}), &[], &scores), [0.0, OUT, OUT, OUT]);
}

#[test]
fn a_float32_setting_becomes_the_decimal_that_was_written() {
    assert_eq!([0.8f32, 0.9, 0.95, 0.05].map(as_written), [0.8, 0.9, 0.95, 0.05]);
}
