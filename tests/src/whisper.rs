//! A model with an encoder: all caches, batched rows, beams, files, and refused inputs.

use burn::tensor::{Tensor, TensorData};
use kiln::{
    Error, Model, Offload, Plan, TokenId,
    device::Opened,
    expert::{Batch, Logits, cache_samples},
};
use kiln_testkit::conformance::{Line, Setup};

use crate::support::{assert_close, fixtures, floats, greedy, recorded, run_cases};

const PROMPT: [TokenId; 3] = [3, 10, 11];

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

fn model(device: &Opened) -> Model {
    recorded("whisper", device)
}

/// Returns different features for each of `rows` rows, starting with those of row `first`.
fn features(model: &Model, first: usize, rows: usize) -> Tensor<3> {
    let shape = model.causal().features().unwrap();
    let numbers = shape.bins * shape.frames;
    let number = |i: usize| ((i as f32 * 0.731).sin() * 43_758.547).fract();
    let all: Vec<f32> = (first * numbers..(first + rows) * numbers).map(number).collect();
    Tensor::from_data(TensorData::new(all, [rows, shape.bins, shape.frames]), model.device())
}

fn batch(model: &Model, first: usize, rows: &[Vec<TokenId>]) -> Batch {
    let features = Some(features(model, first, rows.len()));
    Batch { features, ..Batch::from_rows(rows, model.device()).unwrap() }
}

/// Generates after the prompt, for one row with these features.
fn alone(model: &Model, first: usize, prompt: &[TokenId], n: usize) -> Vec<TokenId> {
    let request = model.generate(prompt).features(features(model, first, 1)).config(greedy(n));
    let mut steps = request.steps().unwrap();
    steps.by_ref().for_each(|step| drop(step.unwrap()));
    steps.tokens(0).unwrap()[prompt.len()..].to_vec()
}

#[test]
fn every_exact_cache_gives_the_recorded_tokens() {
    for device in devices() {
        for version in ["4.47.1", "5.23.0"] {
            let needs = model(device).causal().needs();
            let plans = cache_samples().map(|text| Plan::named(&text).unwrap());
            let exact: Vec<Plan> =
                plans.filter(|plan| plan.is_exact(&needs) && plan.check(&needs).is_ok()).collect();
            assert!(exact.len() >= 3, "{exact:?}");
            for (cache, offload) in
                exact.into_iter().flat_map(|plan| [(plan.clone(), None), (plan, Some(Offload::All))])
            {
                let what = format!("{cache} {offload:?}");
                let setup = Setup { cache: Some(cache), offload, ..Setup::on(device) };
                let report = &mut |line: &Line| println!("{line}");
                let summary =
                    run_cases(&fixtures(version), &mut |name| name.contains("whisper/"), &setup, report);
                assert!(summary.passed == 1 && summary.failed == 0, "{what}: {summary}");
            }
        }
    }
}

#[test]
fn a_prompt_in_chunks_gives_the_logits_of_the_whole() {
    for device in devices() {
        let model = model(device);
        let batch = batch(&model, 0, &[PROMPT.to_vec(), vec![3, 20, 7]]);
        let whole = floats(
            model.causal().forward(&batch, Logits::All, &mut model.cache(&Plan::dynamic()).unwrap()).unwrap(),
        );
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        let first = model.causal().forward(&batch.slice(0..2), Logits::All, &mut cache).unwrap();
        let last = model.causal().forward(&batch.slice(2..3), Logits::All, &mut cache).unwrap();
        assert_close(&floats(Tensor::cat(vec![first, last], 1)), &whole, "in chunks");
    }
}

#[test]
fn each_row_gives_the_tokens_that_it_gives_alone() {
    for device in devices() {
        let model = model(device);
        let prompts: Vec<Vec<TokenId>> = vec![PROMPT.to_vec(), vec![3, 40, 8, 9, 2], vec![5]];
        let request = model.generate(prompts.clone()).features(features(&model, 4, 3)).config(greedy(7));
        let mut steps = request.steps().unwrap();
        steps.by_ref().for_each(|step| drop(step.unwrap()));
        for (row, prompt) in prompts.iter().enumerate() {
            let got = &steps.tokens(row).unwrap()[prompt.len()..];
            assert_eq!(got, alone(&model, 4 + row, prompt, 7), "row {row}");
        }
    }
}

#[test]
fn captured_steps_give_the_tokens_of_launched_ones() {
    for device in devices() {
        let model = model(device);
        let tokens = |compile: bool, plan: &Plan| {
            let request = model.generate(&PROMPT[..]).features(features(&model, 1, 1)).config(greedy(20));
            let mut steps = request.plan(plan.clone()).compile(compile).steps().unwrap();
            steps.by_ref().for_each(|step| drop(step.unwrap()));
            steps.tokens(0).unwrap().to_vec()
        };
        for plan in [Plan::dynamic(), Plan::named("static").unwrap()] {
            assert_eq!(tokens(true, &plan), tokens(false, &plan), "{plan}");
        }
    }
}

#[test]
fn beams_attend_to_the_encoder_output_of_their_prompt() {
    for device in devices() {
        let model = model(device);
        let beams = |first: usize, prompts: Vec<Vec<TokenId>>| {
            let rows = prompts.len();
            let config = greedy(6).num_beams(3).num_return_sequences(3);
            let request = model.generate(prompts).features(features(&model, first, rows)).config(config);
            request.completions().unwrap()
        };
        let together = beams(2, vec![PROMPT.to_vec(), vec![3, 8, 30]]);
        for (row, prompt) in [PROMPT.to_vec(), vec![3, 8, 30]].into_iter().enumerate() {
            let alone = beams(2 + row, vec![prompt]).remove(0);
            for (got, want) in together[row].iter().zip(&alone) {
                assert_eq!(got.tokens, want.tokens, "prompt {row}");
            }
        }
        // All requested beams are returned.
        assert_eq!(together[0].len(), 3);
    }
}

#[test]
fn a_saved_cache_continues_without_the_encoder() {
    for device in devices() {
        let model = model(device);
        let (one, two) =
            (batch(&model, 0, &[PROMPT.to_vec()]), Batch::from_rows(&[vec![17, 4]], model.device()).unwrap());
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        model.causal().forward(&one, Logits::Last, &mut cache).unwrap();
        let state = cache.save().unwrap();
        let want = floats(model.causal().forward(&two, Logits::Last, &mut cache).unwrap());
        let mut other = model.cache(&Plan::dynamic()).unwrap();
        other.restore(state).unwrap();
        assert!(other.is_conditioned());
        let got = floats(model.causal().forward(&two, Logits::Last, &mut other).unwrap());
        assert_close(&got, &want, "restored");
        // Tokens can be rolled back, and the encoder's output stays.
        other.truncate(0).unwrap();
        assert!(other.is_conditioned());
        let again = Batch { features: None, ..one };
        model.causal().forward(&again, Logits::Last, &mut other).unwrap();
        let got = floats(model.causal().forward(&two, Logits::Last, &mut other).unwrap());
        assert_close(&got, &want, "from the beginning");
    }
}

#[test]
fn encoder_outputs_can_be_quantized() {
    for device in devices() {
        let model = model(device);
        let dense = Plan::dynamic();
        // Blocks of 8 of the 20 positions; the last positions stay unquantized.
        let packed = Plan::named("dynamic + encoder=quantized:nbits=8,group=8,residual=8").unwrap();
        assert_eq!(packed.to_string(), "dynamic + encoder=quantized:nbits=8,group=8,residual=8");
        let prompts = [PROMPT.to_vec(), vec![3, 9, 1]];
        let logits = |plan: &Plan| {
            let mut cache = model.cache(plan).unwrap();
            let first = model.causal().forward(&batch(&model, 0, &prompts), Logits::All, &mut cache).unwrap();
            cache.reorder(&[1, 0, 0]).unwrap();
            let state = cache.save().unwrap();
            let mut cache = model.cache(plan).unwrap();
            cache.restore(state).unwrap();
            let next = Batch::from_rows(&[vec![7], vec![8], vec![9]], model.device()).unwrap();
            let next = model.causal().forward(&next, Logits::All, &mut cache).unwrap();
            [floats(first), floats(next)].concat()
        };
        let (want, got) = (logits(&dense), logits(&packed));
        let largest = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // 8 bits lose about a thousandth of logits of about 10.
        assert!(largest > 0.0 && largest < 0.5, "{largest}");
        assert_eq!(got, logits(&packed.clone().offloaded(Offload::All)), "offloaded");
        let sink = Plan::named("dynamic + encoder=sink").unwrap_err().to_string();
        assert!(sink.contains("kept by `dynamic`, or by `quantized`"), "{sink}");
    }
}

/// Tuples of four as in Transformers: keys and values of the decoder, and of the encoder.
#[test]
fn encoder_memory_is_exported_and_imported_in_the_legacy_format() {
    for device in devices() {
        let model = model(device);
        let prompts = [PROMPT.to_vec(), vec![3, 9, 1]];
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        model.causal().forward(&batch(&model, 0, &prompts), Logits::Last, &mut cache).unwrap();
        let (own, encoder) = (cache.to_legacy().unwrap(), cache.encoder_to_legacy().unwrap());
        assert_eq!((own.len(), encoder.len()), (2, 2));
        assert_eq!(encoder[0].0.dims(), [2, 4, 20, 8]);
        let mut other = model.cache(&Plan::dynamic()).unwrap();
        assert!(other.encoder_from_legacy(encoder[1..].to_vec()).is_err(), "a layer is missing");
        other.encoder_from_legacy(encoder.clone()).unwrap();
        other.from_legacy(own).unwrap();
        assert_eq!(other.encoder_from_legacy(encoder.clone()), Err(Error::AlreadyConditioned));
        // With other rows than the decoder, and with other heads.
        let cut = |dim: usize| {
            let cut = |x: &Tensor<4>| x.clone().narrow(dim, 0, 1);
            encoder.iter().map(|(keys, values)| (cut(keys), cut(values))).collect::<Vec<_>>()
        };
        let mut third = model.cache(&Plan::dynamic()).unwrap();
        third.from_legacy(cache.to_legacy().unwrap()).unwrap();
        assert_eq!(third.encoder_from_legacy(cut(0)), Err(Error::WrongRows { rows: 2, given: 1 }));
        assert!(matches!(third.encoder_from_legacy(cut(1)), Err(Error::Import { .. })), "one head");
        let next = || Batch::from_rows(&[vec![7], vec![8]], model.device()).unwrap();
        let [want, got] = [&mut cache, &mut other]
            .map(|cache| floats(model.causal().forward(&next(), Logits::Last, cache).unwrap()));
        assert_close(&got, &want, "taken over");
    }
}

#[test]
fn alignment_weights_over_encoder_positions_sum_to_one() {
    for device in devices() {
        let model = model(device);
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        let batch = batch(&model, 0, &[PROMPT.to_vec(), vec![3, 4, 5]]);
        let heads = [(0, 1), (1, 0), (1, 3)];
        let weights = model.causal().forward(&batch, Logits::Alignment(&heads), &mut cache).unwrap();
        let positions = model.causal().features().unwrap().frames / 2;
        assert_eq!(weights.dims(), [6, 3, positions]);
        for row in floats(weights).chunks(positions) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-4 && row.iter().all(|&weight| weight >= 0.0));
        }
    }
}

#[test]
fn wrong_missing_and_repeated_features_are_errors() {
    let device = devices().next().unwrap();
    let model = model(device);
    let prompt =
        |features| Batch { features, ..Batch::from_rows(&[PROMPT.to_vec()], model.device()).unwrap() };
    let mut cache = model.cache(&Plan::dynamic()).unwrap();
    let error = |batch: &Batch, cache: &mut _| {
        model.causal().forward(batch, Logits::Last, cache).unwrap_err().to_string()
    };
    let missing = error(&prompt(None), &mut cache);
    assert!(missing.contains("was given nothing to encode"), "{missing}");
    let wrong = features(&model, 0, 1).narrow(2, 0, 10);
    let wrong = error(&prompt(Some(wrong)), &mut cache);
    assert!(wrong.contains("takes features [1, 8, 40] and was given [1, 8, 10]"), "{wrong}");
    assert!(!cache.is_conditioned());
    model.causal().forward(&prompt(Some(features(&model, 0, 1))), Logits::Last, &mut cache).unwrap();
    let again = error(&prompt(Some(features(&model, 1, 1))), &mut cache);
    assert!(again.contains("already stored"), "{again}");
    let crosses = cache.layers_mut().filter(|(_, layer)| layer.encoder.is_some());
    assert_eq!(crosses.count(), 2);
    // More tokens than the 32 learned positions.
    let long = Batch::from_rows(&[vec![5; 30]], model.device()).unwrap();
    let long = model.causal().forward(&long, Logits::Last, &mut cache).unwrap_err();
    assert!(matches!(long, Error::Full { capacity: 32, needed: 33 }), "{long}");

    let llama = recorded("llama", device);
    let unwanted =
        llama.generate(&PROMPT[..]).features(features(&model, 0, 1)).steps().map(drop).unwrap_err();
    assert!(unwanted.to_string().contains("has no encoder"), "{unwanted}");
}
