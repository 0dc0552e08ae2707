//! Captured steps, and caches of bounded size when they are full.

use kiln::{
    Error, GenerationConfig, Model, Plan, TokenId,
    device::{DeviceClass, Opened},
    expert::{
        cache_samples,
        kernels::{Kernels, RunCount},
    },
};

use crate::support::{alone_with, cases_are, is_alone, recorded, some_on};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn wanted(n: usize, sample: bool) -> GenerationConfig {
    GenerationConfig::new().max_new_tokens(n).do_sample(sample).seed(7).eos_token_id(Vec::new())
}

/// Returns the tokens of every row.
fn run(
    model: &Model,
    plan: &str,
    prompts: &[Vec<TokenId>],
    wanted: &GenerationConfig,
    compile: Option<bool>,
) -> Vec<Vec<TokenId>> {
    let mut cache = model.cache(&Plan::named(plan).unwrap()).unwrap();
    let steps = model
        .generate(prompts.to_vec())
        .cache(&mut cache)
        .config(wanted.clone())
        .compile(compile)
        .steps()
        .unwrap();
    let mut rows = vec![Vec::new(); prompts.len()];
    for step in steps {
        for (row, token) in rows.iter_mut().zip(step.unwrap().tokens) {
            row.extend(token);
        }
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    let held = longest + wanted.max_new_tokens.unwrap() - 1;
    assert_eq!(cache.seq_len(), held, "{plan}: all tokens but the last");
    rows
}

fn launched(kernels: &Kernels) -> u64 {
    kernels.ran().iter().map(|RunCount { count, .. }| count).sum()
}

#[test]
fn captured_steps_give_the_tokens_of_launched_ones() {
    // 70 tokens: `dynamic` grows during the generation; windows of 8 are exceeded many times.
    let one = vec![vec![3, 1, 4, 1, 5, 9, 2]];
    let padded = vec![vec![3, 1, 4, 1, 5, 9, 2], vec![8, 9], vec![5, 5, 5, 5, 5]];
    for (device, opened) in devices() {
        let all = [
            ("llama", &["static", "static:len=90", "dynamic", "quantized:group=8,residual=40"][..]),
            ("mistral", &["sliding", "static", "dynamic"]),
            ("gemma2", &["static"]),
            ("llama_rope_dynamic", &["static"]),
            ("mamba", &["dynamic"]),
            ("mixtral", &["static", "dynamic"]),
            ("jamba", &["static", "dynamic"]),
        ];
        let mut place = 0;
        for (name, caches) in all {
            let model = recorded(name, opened);
            for cache in caches {
                place += 1;
                // Every third, in all lists together.
                if cases_are("some") && device != "cpu" && place % 3 > 0 {
                    continue;
                }
                for (prompts, sample) in [(&one, true), (&padded, false)] {
                    let wanted = wanted(70, sample);
                    let what =
                        format!("{name}, {cache} on {device}, {} rows, sampled: {sample}", prompts.len());
                    let before = launched(model.kernels());
                    let eager = run(&model, cache, prompts, &wanted, Some(false));
                    let between = launched(model.kernels());
                    assert_eq!(run(&model, cache, prompts, &wanted, Some(true)), eager, "{what}");
                    let (eager, captured) = (between - before, launched(model.kernels()) - between);
                    if device != "cpu" {
                        // A replay does not launch individual kernels.
                        assert!(
                            captured * 3 < eager,
                            "{what}: {captured} launches are not few beside {eager}"
                        );
                    }
                }
            }
        }
    }
}

/// CUDA abandons a recording, along with the data that it was to write, if another thread allocates in the
/// meantime. The software device does so on request; other devices only record.
#[test]
fn an_aborted_recording_changes_no_token() {
    if !is_alone() {
        let name = "decoding::an_aborted_recording_changes_no_token";
        return devices()
            .for_each(|(device, _)| alone_with(name, Some(device), &[("SOFTCUDA_FAIL_CAPTURE", "1")]));
    }
    let (device, opened) = devices().next().unwrap();
    for (name, cache) in [
        ("llama", "static"),
        ("llama", "dynamic"),
        ("llama", "quantized:group=8,residual=8"),
        ("mistral", "sliding"),
        ("mamba", "dynamic"),
    ] {
        let model = recorded(name, opened);
        for (prompts, sample) in [(vec![vec![3, 1, 4, 1, 5]], true), (vec![vec![3, 1, 4], vec![8]], false)] {
            let tokens = |compile| run(&model, cache, &prompts, &wanted(12, sample), Some(compile));
            assert_eq!(tokens(true), tokens(false), "{name}, {cache} on {device}");
        }
        // With a cache that already holds tokens known only to the caller, the failure is an error;
        // afterwards the cache can be used again.
        let mut kept = model.cache(&Plan::named(cache).unwrap()).unwrap();
        let mut go_on = |prompt: TokenId| -> kiln::Result<Vec<_>> {
            let request = model.generate(vec![vec![prompt]]).cache(&mut kept).config(wanted(8, false));
            request.compile(Some(true)).steps()?.map(|step| Ok(step?.tokens[0])).collect()
        };
        let first = go_on(3).unwrap();
        let fails = device == "cuda" && opened.info.class == DeviceClass::Software;
        match go_on(4) {
            Err(error) if fails => {
                assert!(matches!(error, Error::Execution(_)), "{name}, {cache} on {device}: {error}");
                assert_eq!(go_on(3).unwrap(), first, "{name}, {cache} on {device}: afterwards");
            }
            other => assert!(other.is_ok() && !fails, "{name}, {cache} on {device}: {other:?}"),
        }
    }
}

#[test]
fn every_strategy_gives_the_same_tokens_with_captured_steps() {
    for (device, opened) in devices() {
        let mut tested = Vec::new();
        for name in ["llama", "mistral"] {
            let model = recorded(name, opened);
            let needs = model.causal().needs();
            for cache in some_on(device, cache_samples()) {
                let plan = Plan::named(&cache).unwrap();
                if plan.check(&needs).is_err() || !plan.remembers(&needs) || tested.contains(&cache) {
                    continue;
                }
                tested.push(cache.clone());
                let tokens = |compile| {
                    run(&model, &cache, &[vec![3, 1, 4, 1, 5, 9, 2]], &wanted(50, false), Some(compile))
                };
                assert_eq!(tokens(true), tokens(false), "{name}, {cache} on {device}");
            }
        }
    }
}

#[test]
fn a_static_cache_that_is_too_small_is_an_error_before_it_is_filled() {
    for (_, opened) in devices() {
        let model = recorded("llama", opened);
        let mut cache = model.cache(&Plan::named("static:len=10").unwrap()).unwrap();
        let refused = model
            .generate(vec![1; 8])
            .cache(&mut cache)
            .config(wanted(4, false))
            .steps()
            .map(|_| ())
            .unwrap_err();
        assert_eq!(refused, Error::Full { capacity: 10, needed: 11 });
        // The last token is not fed: 8 tokens and 2 more fit.
        let steps = model.generate(vec![1; 8]).cache(&mut cache).config(wanted(3, false)).steps().unwrap();
        assert_eq!(steps.count(), 3);
        assert_eq!(cache.seq_len(), 10);
        assert_eq!(cache.admits(1, false), Err(Error::Full { capacity: 10, needed: 11 }));
        // Without a limit, generation continues until the cache is full.
        cache.reset();
        let unbounded = GenerationConfig::new().do_sample(false).eos_token_id(Vec::new());
        let steps = model.generate(vec![1; 8]).cache(&mut cache).config(unbounded).steps().unwrap();
        assert_eq!(steps.count(), 3);
    }
}

/// A speculatively launched step is still running when the generation is dropped.
#[test]
fn a_dropped_generation_leaves_the_device_usable() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let whole = run(&model, "static", &[vec![1, 2, 3]], &wanted(12, false), None);
        for taken in [0, 1, 2, 5, 8] {
            for cache in ["dynamic", "static"] {
                let mut cache = model.cache(&Plan::named(cache).unwrap()).unwrap();
                let generation = model
                    .generate(vec![1, 2, 3])
                    .cache(&mut cache)
                    .config(wanted(12, false))
                    .steps()
                    .unwrap();
                let tokens: Vec<TokenId> =
                    generation.take(taken).filter_map(|step| step.unwrap().tokens[0]).collect();
                assert_eq!(tokens, whole[0][..taken], "on {device}");
                assert_eq!(cache.seq_len(), if taken == 0 { 0 } else { 3 + taken - 1 }, "on {device}");
            }
        }
    }
}

#[test]
fn a_sink_cache_generates_beyond_the_positions_in_constant_memory() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let positions = model.sizes().positions;
        let mut cache = model.cache(&Plan::named("sink:window=16,sinks=2").unwrap()).unwrap();
        let n = 20 * 16;
        assert!(n > positions, "beyond the positions that the model was made for");
        let mut bytes = Vec::new();
        let mut generation =
            model.generate(vec![1; 5]).cache(&mut cache).config(wanted(2 * 16, false)).steps().unwrap();
        generation.try_for_each(|step| step.map(drop)).unwrap();
        drop(generation);
        bytes.push(cache.device_bytes());
        let generation = model.generate(vec![1]).cache(&mut cache).config(wanted(n, false)).steps().unwrap();
        assert_eq!(generation.count(), n);
        bytes.push(cache.device_bytes());
        assert_eq!(bytes[0], bytes[1], "on {device}");
        assert_eq!(cache.seq_len(), 5 + 2 * 16 - 1 + n, "on {device}");
    }
}

/// A pass that one layer would refuse is refused before any layer has stored a token.
#[test]
fn a_batch_that_one_layer_rejects_is_stored_in_no_layer() {
    for (device, opened) in kiln_testkit::devices::opened() {
        // Layers with a window, which accept padded rows, come before those with sinks.
        let model = recorded("gemma2", opened);
        let plan = Plan::sink(16, 2).unwrap().windowed(Plan::sliding());
        let mut cache = model.cache(&plan).unwrap();
        let padded =
            kiln::expert::Batch::left_padded(&[vec![5, 6, 7], vec![9, 8, 7, 6, 5]], 0, model.device())
                .unwrap();
        let refused = model.causal().forward(&padded, kiln::expert::Logits::Last, &mut cache);
        assert!(matches!(refused, Err(Error::Prompt { .. })), "on {device}");
        assert_eq!((cache.seq_len(), cache.device_bytes()), (0, 0), "on {device}");
    }
}
