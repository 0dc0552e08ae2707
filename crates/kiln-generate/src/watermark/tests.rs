use std::{fs, path::Path};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{
    GreenList, GreenListConfig, SynthId, SynthIdConfig, SynthIdDetector, WatermarkDetector,
    WatermarkingConfig, detectors::p_value, torch_random::TorchRandom,
};
use crate::{GenerationConfig, Processors, RowState};

/// Records of `tools/watermark_cases.py`.
fn recorded<T: DeserializeOwned>(part: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/watermarks.json");
    let recorded: Value = serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON");
    serde_json::from_value(recorded[part].clone()).expect("cases")
}

fn checksum(numbers: impl IntoIterator<Item = u32>) -> u64 {
    let terms = numbers.into_iter().enumerate().map(|(i, number)| (i as u64 + 1) * u64::from(number));
    terms.sum::<u64>() % (1 << 32)
}

fn digits(bits: impl IntoIterator<Item = bool>) -> String {
    bits.into_iter().map(|bit| if bit { '1' } else { '0' }).collect()
}

fn removed_or(scores: &[Option<f32>]) -> Vec<f32> {
    scores.iter().map(|score| score.unwrap_or(f32::NEG_INFINITY)).collect()
}

fn processors(config: impl Into<WatermarkingConfig>) -> Processors {
    let config = GenerationConfig::new().watermarking_config(config.into());
    config.resolve().expect("possible").processors
}

fn row(ids: &[u32], generated: usize) -> RowState<'_> {
    RowState { index: 0, ids, generated, padding: 0, len: ids.len(), remaining: None }
}

#[test]
fn green_lists_are_those_of_transformers() {
    #[derive(Deserialize)]
    struct Case {
        vocab: usize,
        config: GreenListConfig,
        ids: Vec<u32>,
        size: usize,
        first: Vec<u32>,
        checksum: u64,
    }
    let cases: Vec<Case> = recorded("green_lists");
    assert!(cases.len() >= 18 && cases.iter().any(|case| case.vocab > 100_000));
    for Case { vocab, config, ids, size, first, checksum: sum } in cases {
        let list = GreenList::new(&config).expect("possible");
        let green = list.behind(&ids, vocab);
        assert_eq!(
            (green.len(), &green[..first.len()], checksum(green.iter().copied())),
            (size, &first[..], sum),
            "{config:?} of {vocab}"
        );
        let some = (0..vocab as u32).step_by(1 + vocab / 50);
        some.for_each(|token| assert_eq!(list.is_green(&ids, token, vocab), green.contains(&token)));
    }
}

#[test]
fn green_tokens_with_self_hashing_are_those_of_transformers() {
    #[derive(Deserialize)]
    struct Case {
        vocab: usize,
        config: GreenListConfig,
        ids: Vec<u32>,
        tokens: Vec<u32>,
        green: String,
    }
    let cases: Vec<Case> = recorded("own_green");
    assert!(cases.iter().any(|case| case.green.contains('1')));
    for Case { vocab, config, ids, tokens, green } in cases {
        let list = GreenList::new(&config).expect("possible");
        assert_eq!(
            digits(tokens.iter().map(|&token| list.is_green(&ids, token, vocab))),
            green,
            "{config:?}"
        );
    }
}

#[test]
fn scores_of_green_tokens_rise_as_in_transformers() {
    #[derive(Deserialize)]
    struct Case {
        config: GreenListConfig,
        ids: Vec<u32>,
        scores: Vec<Option<f32>>,
        changed: Vec<usize>,
    }
    for Case { config, ids, scores, changed } in recorded::<Case>("processed") {
        let scores = removed_or(&scores);
        let mut got = scores.clone();
        processors(config.clone()).apply(&row(&ids, 2), &mut got).expect("processed");
        let bias =
            |(i, score): (usize, &f32)| if changed.contains(&i) { score + config.bias } else { *score };
        assert_eq!(got, scores.iter().enumerate().map(bias).collect::<Vec<_>>(), "{config:?}");
    }
}

#[derive(Deserialize)]
struct SynthIdCase {
    config: SynthIdConfig,
    ids: Vec<u32>,
    eos_token_id: u32,
    table: u64,
    g_values: Vec<String>,
    context_repetition_mask: String,
    eos_token_mask: String,
    steps: Vec<SynthIdStep>,
}

#[derive(Deserialize)]
struct SynthIdStep {
    ids: Vec<u32>,
    generated: usize,
    scores: Vec<Option<f32>>,
    out: Vec<Option<f32>>,
}

#[test]
fn g_values_and_masks_are_those_of_transformers() {
    for case in recorded::<SynthIdCase>("synth_ids") {
        let SynthIdConfig { sampling_table_seed, sampling_table_size, ngram_len, .. } = case.config;
        let table = TorchRandom::new(sampling_table_seed).bits(sampling_table_size);
        assert_eq!(checksum(table.into_iter().map(u32::from)), case.table);
        let detector = SynthIdDetector::new(&case.config).expect("possible");
        let g_values = detector.g_values(&case.ids).into_iter().map(digits);
        assert_eq!(g_values.collect::<Vec<_>>(), case.g_values, "{:?}", case.config);
        assert_eq!(digits(detector.context_repetition_mask(&case.ids)), case.context_repetition_mask);
        // A token is scored if it is new and comes before the end.
        let masks = case.context_repetition_mask.chars().zip(case.eos_token_mask.chars().skip(ngram_len - 1));
        let scored = masks.clone().filter(|masks| *masks == ('1', '1')).count();
        let ones = masks.zip(&case.g_values).filter(|(masks, _)| *masks == ('1', '1'));
        let ones: usize = ones.map(|(_, g_values)| g_values.matches('1').count()).sum();
        let found = detector.eos_token_id(vec![case.eos_token_id]).detect(&case.ids).expect("long enough");
        assert_eq!(found.num_tokens_scored, scored);
        assert_eq!(found.mean, ones as f64 / (scored * case.config.keys.len()) as f64);
    }
}

/// Compares up to rounding errors of float32. A round leaves a losing token `1 - mass` of its probability, in
/// which all but a few digits cancel if one token has nearly all the probability, in torch as here.
#[test]
fn tournaments_are_those_of_transformers() {
    let (mut scores_differ, mut probabilities_differ) = (0.0f32, 0.0f32);
    for SynthIdCase { config, steps, .. } in recorded("synth_ids") {
        let processors = processors(config);
        for SynthIdStep { ids, generated, scores, out } in &steps {
            let mut got = removed_or(scores);
            processors.apply(&row(ids, *generated), &mut got).expect("processed");
            for (got, want) in got.iter().zip(removed_or(out)).filter(|(got, want)| *got != want) {
                scores_differ = scores_differ.max((got - want).abs());
                probabilities_differ = probabilities_differ.max((got.exp() - want.exp()).abs());
            }
        }
    }
    assert!(
        scores_differ < 2e-3 && probabilities_differ < 1e-6,
        "{scores_differ:e} {probabilities_differ:e}"
    );
}

#[test]
fn detections_are_those_of_transformers() {
    #[derive(Deserialize)]
    struct Case {
        config: GreenListConfig,
        ids: Vec<u32>,
        ignore_repeated_ngrams: bool,
        num_tokens_scored: usize,
        num_green_tokens: usize,
        z_score: f64,
        p_value: f64,
        prediction: bool,
    }
    let cases: Vec<Case> = recorded("detections");
    assert!(cases.iter().any(|case| case.prediction) && cases.iter().any(|case| !case.prediction));
    let near = |got: f64, want: f64| (got - want).abs() <= 1e-12 * want.abs();
    for case in cases {
        let detector = WatermarkDetector::new(&case.config, 97).expect("possible").bos_token_id(1);
        let detector = detector.ignore_repeated_ngrams(case.ignore_repeated_ngrams);
        let found = detector.detect(&case.ids).expect("long enough");
        let counts = (found.num_tokens_scored, found.num_green_tokens, found.prediction);
        assert_eq!(counts, (case.num_tokens_scored, case.num_green_tokens, case.prediction));
        assert!(near(found.z_score, case.z_score) && near(found.p_value, case.p_value), "{found:?}");
    }
    for (z, want) in recorded::<(f64, f64)>("p_values") {
        assert!(near(p_value(z), want), "{z}: {:e} {want:e}", p_value(z));
    }
}

/// Rows that share a processor, in any order, do not affect each other.
#[test]
fn rows_that_share_a_processor_do_not_affect_each_other() {
    let rows: [Vec<u32>; 3] = [vec![4, 9, 4, 9, 4], vec![9, 4, 9], vec![30, 4, 9, 4]];
    let scores: Vec<f32> = (0..31).map(|token| (token * 7 % 11) as f32).collect();
    let alone = |config: &WatermarkingConfig, ids: &[u32]| {
        let mut scores = scores.clone();
        processors(config.clone()).apply(&row(ids, ids.len() - 1), &mut scores).expect("processed");
        scores
    };
    let self_hash = GreenListConfig::default().seeding_scheme(super::SeedingScheme::SelfHash);
    for config in [self_hash.into(), WatermarkingConfig::from(SynthIdConfig::new(3, vec![1, 2, 3]))] {
        let shared = processors(config.clone());
        for ids in rows.iter().chain(rows.iter().rev()) {
            let mut got = scores.clone();
            shared.apply(&row(ids, ids.len() - 1), &mut got).expect("processed");
            assert_eq!(got, alone(&config, ids), "{config:?}");
        }
    }
}

/// Tokens that are sampled with a watermark carry it, and other tokens do not.
#[test]
fn a_watermark_is_detected_only_in_marked_tokens() {
    let config = SynthIdConfig::new(3, (1..=10).map(|key| key * 977).collect());
    let (processors, detector) =
        (processors(config.clone()), SynthIdDetector::new(&config).expect("possible"));
    let mut random = TorchRandom::new(3);
    let mut draw = |scores: &[f32]| {
        let mut left = f64::from(random.word()) / 2f64.powi(32);
        let token = scores.iter().position(|score| {
            left -= f64::from(score.exp());
            left < 0.0
        });
        token.unwrap_or(scores.len() - 1) as u32
    };
    let uniform = vec![-(64f32.ln()); 64];
    let (mut marked, mut other) = (vec![0], vec![0]);
    for generated in 0..200 {
        let mut scores = uniform.clone();
        processors.apply(&row(&marked, generated), &mut scores).expect("processed");
        marked.push(draw(&scores));
        other.push(draw(&uniform));
    }
    let (marked, other) =
        (detector.detect(&marked[1..]).expect("found"), detector.detect(&other[1..]).expect("found"));
    assert!(marked.prediction && marked.z_score > 10.0 && marked.p_value < 1e-20, "{marked:?}");
    assert!(!other.prediction && other.z_score.abs() < 3.0, "{other:?}");
}

#[test]
fn nan_and_removed_scores_are_kept() {
    let apply = |mut scores: Vec<f32>| {
        processors(SynthIdConfig::new(2, vec![1])).apply(&row(&[1, 2], 1), &mut scores).expect("processed");
        scores
    };
    assert!(apply(vec![f32::NAN, 1.0])[0].is_nan());
    assert_eq!(apply(vec![f32::NEG_INFINITY; 2]), [f32::NEG_INFINITY; 2]);
}

#[test]
fn settings_are_read_from_json() {
    let read = |value: Value| WatermarkingConfig::from_json(&value.to_string());
    assert_eq!(read(json!({})), Ok(GreenListConfig::default().into()));
    let own = json!({"bias": 1, "seeding_scheme": "selfhash", "context_width": 4, "hashing_key": -5});
    let want = GreenListConfig::default().bias(1.0).context_width(4).hashing_key(-5);
    assert_eq!(read(own), Ok(want.seeding_scheme(super::SeedingScheme::SelfHash).into()));
    let tournament = json!({"ngram_len": 5, "keys": [1, 2], "sampling_table_size": 9, "debug_mode": true});
    let want = SynthIdConfig::new(5, vec![1, 2]).sampling_table_size(9).debug_mode(true);
    assert_eq!(read(tournament), Ok(want.into()));
    for (value, why) in [
        (json!([1]), "is not a JSON object"),
        (json!({"biass": 1}), "unknown field `biass`, expected one of `greenlist_ratio`"),
        (json!({"bias": "much"}), "`bias`: invalid type: string \"much\", expected f32"),
        (
            json!({"seeding_scheme": "hash"}),
            "`seeding_scheme`: unknown variant `hash`, expected `lefthash` or",
        ),
        (json!({"keys": [1]}), "missing field `ngram_len`"),
        (json!({"ngram_len": 5, "keys": [1], "bias": 2.0}), "unknown field `bias`"),
        (json!({"ngram_len": 5, "keys": [1, "x"]}), "`keys[1]`: invalid type: string \"x\", expected i64"),
    ] {
        let error = read(value).expect_err(why).to_string();
        assert!(error.starts_with("watermarking_config: ") && error.contains(why), "{error}");
    }
}

#[test]
fn impossible_settings_are_errors() {
    let green = GreenListConfig::default;
    let config: [(WatermarkingConfig, &str); 9] = [
        (green().greenlist_ratio(0.0).into(), "`greenlist_ratio` is 0, must be above 0 and below 1"),
        (green().greenlist_ratio(1.0).into(), "`greenlist_ratio` is 1"),
        (green().greenlist_ratio(f64::NAN).into(), "`greenlist_ratio` is NaN"),
        (green().bias(f32::INFINITY).into(), "`bias` is inf, must be a finite number"),
        (green().context_width(0).into(), "`context_width` is 0, must be at least 1"),
        (SynthIdConfig::new(0, vec![1]).into(), "`ngram_len` is 0, must be from 1 to 1024"),
        (SynthIdConfig::new(usize::MAX, vec![1]).into(), "must be from 1 to 1024"),
        (SynthIdConfig::new(2, vec![]).into(), "`keys` is empty; give at least one key"),
        (SynthIdConfig::new(2, vec![1]).sampling_table_size(0).into(), "must be from 1 to 16777216"),
    ];
    for (config, why) in config {
        let error = GenerationConfig::new().watermarking_config(config).resolve().expect_err(why).to_string();
        assert!(error.starts_with("watermarking_config: ") && error.contains(why), "{error}");
    }
}

#[test]
fn text_that_cannot_be_scored_is_an_error() {
    let green = WatermarkDetector::new(&GreenListConfig::default(), 97).expect("possible");
    let said = |error: kiln_core::Error| error.to_string();
    assert!(said(green.detect(&[5]).expect_err("short")).contains("shows in 2 tokens or more"));
    assert!(said(green.detect(&[5, 97]).expect_err("foreign")).contains("token 97 is not in"));
    let green = green.bos_token_id(1);
    assert!(green.detect(&[1, 5]).is_err() && green.detect(&[5, 1]).is_ok());
    let synth_id = SynthIdDetector::new(&SynthIdConfig::new(3, vec![1])).expect("possible");
    assert!(said(synth_id.detect(&[5, 6]).expect_err("short")).contains("shows in 3 tokens or more"));
    assert!(synth_id.eos_token_id(vec![6]).detect(&[5, 5, 6, 7, 8]).is_err());
    let unit = SynthId::new(&SynthIdConfig::new(1, vec![1]));
    assert!(unit.is_ok(), "a sequence may be the token alone");
}
