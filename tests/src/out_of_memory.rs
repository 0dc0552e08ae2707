//! Memory that runs out: at every allocation, and at every size.

use std::cell::Cell;

use kiln::{
    Error, GenerationConfig, LoadOptions, Model, ModelCache, OnOutOfMemory, Plan, RandomLlama, Result, RunOptions,
    TokenId, device::Opened,
};

use crate::support::recorded;

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// The tokens of every row, or the error that ended them.
fn run(
    model: &Model,
    cache: &mut ModelCache,
    rows: &[Vec<TokenId>],
    n: usize,
    options: RunOptions,
) -> Result<Vec<Vec<Option<TokenId>>>> {
    let wanted = GenerationConfig {
        max_new_tokens: Some(n),
        eos_token_id: Some(Vec::new()),
        ..GenerationConfig::default()
    };
    let steps = model.generate(cache, rows.to_vec(), &wanted, options)?.steps();
    steps.map(|step| step.map(|step| step.tokens)).collect()
}

/// Whichever allocation fails, the tokens are the right ones; without a rescue it is a clear error. The cache and the
/// model can be used afterwards.
#[test]
fn any_allocation_may_fail() {
    let one = vec![(0..40).map(|i| i * 7 % 97).collect()];
    let padded = vec![vec![3, 1, 4, 1, 5, 9, 2], vec![8, 9]];
    for (device, opened) in devices() {
        for (name, text, rows) in [
            ("llama", "dynamic", &one),
            ("llama", "fixed", &padded),
            ("mistral", "sliding", &one),
            ("gemma2", "hybrid", &padded),
            ("llama", "sink:window=64,sinks=2", &one),
            ("llama", "none", &one),
            ("llama", "offloaded", &one),
        ] {
            let model = recorded(name, opened);
            let plan = Plan::named(text).unwrap();
            let options = |on_oom| RunOptions { on_oom, prefill_chunk: Some(32), ..RunOptions::default() };
            let budget = model.budget();
            let before = budget.allocations();
            let want = run(&model, &mut model.cache(&plan).unwrap(), rows, 12, options(OnOutOfMemory::Fail)).unwrap();
            // As many as a run makes; a rescued one makes some more.
            let allocations = budget.allocations() - before;
            assert!(allocations > 12 * model.sizes().layers as u64, "{text} on {device}: {allocations}");
            for n in 0..allocations {
                for on_oom in [OnOutOfMemory::Fail, OnOutOfMemory::Offload] {
                    let what = format!("{name}, {text} on {device}, allocation {n}, {on_oom}");
                    let mut cache = model.cache(&plan).unwrap();
                    budget.fail_allocation(n.saturating_sub(1));
                    match run(&model, &mut cache, rows, 12, options(on_oom)) {
                        Ok(tokens) => assert_eq!(tokens, want, "{what}"),
                        Err(Error::OutOfMemory { .. }) => {
                            let rescued = on_oom == OnOutOfMemory::Offload && !["none", "offloaded"].contains(&text);
                            assert!(!rescued, "{what}: was to go on");
                        }
                        Err(other) => panic!("{what}: {other}"),
                    }
                    cache.reset();
                    let again = run(&model, &mut cache, rows, 12, options(OnOutOfMemory::Fail));
                    assert_eq!(again.as_ref(), Ok(&want), "{what}: afterwards");
                }
            }
            drop(model);
        }
    }
}

/// Nothing of a step that ran out of memory is left: the cache goes on where it was.
#[test]
fn a_step_that_failed_was_never_made() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for text in ["dynamic", "fixed:len=64", "sink:window=16,sinks=2"] {
            let plan = Plan::named(text).unwrap();
            let mut cache = model.cache(&plan).unwrap();
            let mut want = model.cache(&plan).unwrap();
            let rows = [vec![3, 1, 4, 1, 5]];
            let fail = RunOptions { on_oom: OnOutOfMemory::Fail, ..RunOptions::default() };
            cache.keep_history(1);
            run(&model, &mut cache, &rows, 4, fail).unwrap();
            run(&model, &mut want, &rows, 4, fail).unwrap();
            let held = cache.seq_len();
            // In the second layer of the first pass.
            model.budget().fail_allocation(2);
            let refused = run(&model, &mut cache, &[vec![9]], 4, fail);
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{text} on {device}: {refused:?}");
            assert_eq!(cache.seq_len(), held, "{text} on {device}");
            let tokens = run(&model, &mut cache, &[vec![9]], 4, fail);
            assert_eq!(tokens, run(&model, &mut want, &[vec![9]], 4, fail), "{text} on {device}");
        }
    }
}

/// From a budget for everything down to one for nothing: the same tokens, or an error before the first.
#[test]
fn a_budget_is_kept() {
    let sizes = RandomLlama { layers: 8, hidden: 64, heads: 4, kv_heads: 4, intermediate: 96, vocab: 97 };
    for (device, opened) in devices() {
        let load = |memory| {
            Model::random(&sizes, LoadOptions { memory: Some(memory), ..LoadOptions::float32(opened.clone()) })
        };
        let model = load(1 << 30).unwrap();
        let prompt = vec![(0..300).map(|i| i * 31 % 97).collect::<Vec<TokenId>>()];
        let weights = model.weight_bytes();
        let mut cache = model.cache(&Plan::named("dynamic").unwrap()).unwrap();
        let want = run(&model, &mut cache, &prompt, 40, RunOptions::default()).unwrap();
        let whole = model.budget().peak();
        let dense = cache.device_bytes() as u64;
        assert!(whole > weights + dense, "the peak counts activations, too");
        assert_eq!(dense, 8 * 2 * 64 * 4 * 512, "of eight layers of 512 slots");
        drop(cache);
        assert_eq!(model.budget().used(), weights, "what is dropped is free again");

        let went = Cell::new(0);
        for percent in (10..=100).rev().step_by(5) {
            let memory = weights + (whole - weights) * percent / 100;
            let model = load(memory).unwrap();
            for on_oom in [OnOutOfMemory::Fail, OnOutOfMemory::Offload] {
                let mut cache = model.cache(&Plan::named("dynamic").unwrap()).unwrap();
                let options = RunOptions { on_oom, ..RunOptions::default() };
                match run(&model, &mut cache, &prompt, 40, options) {
                    Ok(tokens) => {
                        assert_eq!(tokens, want, "{on_oom} with {percent} % on {device}");
                        let offloaded = cache.host_bytes() > 0;
                        assert!(!offloaded || on_oom == OnOutOfMemory::Offload);
                        went.set(went.get() + usize::from(offloaded));
                    }
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains("would fit") && text.contains("--memory"), "{text}");
                        assert_eq!(cache.seq_len(), 0, "{text}: said before the first token");
                    }
                }
                assert!(model.budget().peak() <= memory, "{on_oom} with {percent} % on {device}");
            }
        }
        assert!(went.get() >= 5, "{} budgets were kept by offloading on {device}", went.get());
        // Weights that do not fit are refused, too.
        let refused = load(weights - 1).map(|_| ()).unwrap_err();
        assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
    }
}
