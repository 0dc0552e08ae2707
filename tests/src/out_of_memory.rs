//! Out-of-memory errors at every allocation and with every budget.

use std::{collections::HashSet, path::Path};

use kiln::{
    Error, GenerationConfig, Model, ModelBuilder, OnOutOfMemory, Plan, Request, Result, TokenId,
    device::Opened,
    expert::{Logits, ModelCache, memory::LayerCache},
};

use crate::support::{Llama, batch, float32, forward, greedy, recorded, some_on};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Returns the tokens of every row, or the error that ended the generation.
fn run(
    model: &Model,
    cache: &mut ModelCache,
    rows: &[Vec<TokenId>],
    n: usize,
    on_oom: OnOutOfMemory,
) -> Result<Vec<Vec<Option<TokenId>>>> {
    begin(model, cache, rows, n, &greedy(n), |request| request.on_oom(on_oom))
}

/// Returns the first `n` tokens of every row.
fn begin(
    model: &Model,
    cache: &mut ModelCache,
    rows: &[Vec<TokenId>],
    n: usize,
    wanted: &GenerationConfig,
    set: impl FnOnce(Request<'_>) -> Request<'_>,
) -> Result<Vec<Vec<Option<TokenId>>>> {
    let steps = set(model.generate(rows.to_vec()).cache(cache).config(wanted.clone())).steps()?;
    steps.take(n).map(|step| step.map(|step| step.tokens)).collect()
}

/// Returns settings with sampling and a repetition penalty.
fn drawn(n: usize) -> GenerationConfig {
    greedy(n).do_sample(true).seed(3).temperature(3.0).repetition_penalty(1.3)
}

/// Enough tokens for launched steps, a recorded step and a replayed one.
const NEW: usize = 6;

/// Whichever allocation fails, the tokens are correct; without a policy the result is a clear error. The
/// cache and the model remain usable.
#[test]
fn any_failed_allocation_gives_the_same_tokens_or_an_error() {
    let one = vec![(0..24).map(|i| i * 7 % 97).collect()];
    let padded = vec![vec![3, 1, 4, 1, 5, 9, 2], vec![8, 9]];
    for (device, opened) in devices() {
        for (name, text, rows, wanted) in [
            ("llama", "dynamic", &one, greedy(NEW)),
            ("llama", "static", &padded, greedy(NEW)),
            ("mistral", "sliding", &one, greedy(NEW)),
            ("gemma2", "hybrid", &padded, greedy(NEW)),
            ("llama", "sink:window=64,sinks=2", &one, greedy(NEW)),
            ("llama", "none", &one, greedy(NEW)),
            ("llama", "offloaded", &one, greedy(NEW)),
            ("llama", "quantized:group=8,residual=8", &one, greedy(NEW)),
            ("llama", "quantized:group=8,residual=6,format=quanto,flush=requantize", &padded, greedy(NEW)),
            ("mamba", "dynamic", &one, greedy(NEW)),
            ("mamba", "offloaded", &padded, greedy(NEW)),
            // No random word is used twice or skipped.
            ("llama", "dynamic", &padded, drawn(NEW)),
            ("llama", "static", &one, drawn(NEW)),
            ("llama", "none", &one, drawn(NEW)),
            ("llama", "dynamic", &padded, greedy(NEW).num_beams(3)),
            ("llama", "static", &one, greedy(NEW).num_beams(3)),
        ] {
            let model = recorded(name, opened);
            let plan = Plan::named(text).unwrap();
            let budget = model.budget();
            let before = budget.allocations();
            let run = |cache: &mut ModelCache, on_oom| {
                begin(&model, cache, rows, NEW, &wanted, |request| request.on_oom(on_oom).prefill_chunk(18))
            };
            let want = run(&mut model.cache(&plan).unwrap(), OnOutOfMemory::Fail).unwrap();
            let allocations = budget.allocations() - before;
            assert!(allocations > 12, "{text} on {device}: {allocations}");
            for n in some_on(device, 0..allocations) {
                let policies = [OnOutOfMemory::Fail, OnOutOfMemory::Offload, OnOutOfMemory::Quantize];
                // Policies behave the same on every device: one of them per allocation is sufficient.
                let turn = n as usize / 3 % policies.len();
                let policies = if device == "cpu" { &policies[..] } else { &policies[turn..=turn] };
                for &on_oom in policies {
                    let what = format!("{name}, {text} on {device}, allocation {n}, {on_oom}");
                    let mut cache = model.cache(&plan).unwrap();
                    budget.fail_allocation(n);
                    match run(&mut cache, on_oom) {
                        Ok(tokens) => assert_eq!(tokens, want, "{what}"),
                        Err(Error::OutOfMemory { .. }) => {
                            // With two blocks, both are on the device while one is in use.
                            let rescued = on_oom != OnOutOfMemory::Fail
                                && !["none", "offloaded"].contains(&text)
                                && name != "mamba";
                            assert!(!rescued, "{what}: was to go on");
                        }
                        Err(other) => panic!("{what}: {other}"),
                    }
                    if on_oom == OnOutOfMemory::Fail {
                        cache.reset();
                        let again = run(&mut cache, on_oom);
                        assert_eq!(again.as_ref(), Ok(&want), "{what}: afterwards");
                    }
                }
            }
        }
    }
}

/// A step that ran out of memory leaves nothing behind: the cache continues from its previous state.
#[test]
fn a_failed_step_leaves_the_cache_unchanged() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for text in ["dynamic", "static:len=64", "sink:window=16,sinks=2"] {
            let plan = Plan::named(text).unwrap();
            let mut cache = model.cache(&plan).unwrap();
            let mut want = model.cache(&plan).unwrap();
            let rows = [vec![3, 1, 4, 1, 5]];
            let fail = OnOutOfMemory::Fail;
            cache.keep_history(1);
            run(&model, &mut cache, &rows, 4, fail).unwrap();
            run(&model, &mut want, &rows, 4, fail).unwrap();
            let held = cache.seq_len();
            // The second layer of the first pass.
            model.budget().fail_allocation(2);
            let refused = run(&model, &mut cache, &[vec![9]], 4, fail);
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{text} on {device}: {refused:?}");
            assert_eq!(cache.seq_len(), held, "{text} on {device}");
            let tokens = run(&model, &mut cache, &[vec![9]], 4, fail);
            assert_eq!(tokens, run(&model, &mut want, &[vec![9]], 4, fail), "{text} on {device}");
        }
    }
}

/// A growing buffer never exceeds the length of the text.
#[test]
fn a_dynamic_cache_never_grows_beyond_the_final_length() {
    for (device, opened) in devices() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let model = float32(Model::builder(&folder), opened).load().unwrap();
        let plan = Plan::dynamic();
        let slot = plan.bytes(&model.causal().needs(), 1, 4);
        for (limit, prompt, slots) in [
            (1, 1, 1),
            (10, 1, 10),
            (256, 1, 256),
            (512, 1, 256),
            (513, 1, 257),
            // 2049, 1025, 513, 257
            (2049, 1, 257),
            (2049 - 299, 300, 513),
            (2, 300, 301),
        ] {
            let rows = [(0..prompt).map(|i| i % 97).collect()];
            let mut cache = model.cache(&plan).unwrap();
            begin(&model, &mut cache, &rows, 1, &greedy(limit), |request| request).unwrap();
            assert_eq!(cache.device_bytes(), slots * slot, "{limit} after {prompt} on {device}");
        }
        // Without a generation, the final length is unknown.
        let mut cache = model.cache(&plan).unwrap();
        forward(&model, &batch(&model, &[vec![3, 1, 4]]), &mut cache);
        assert_eq!(cache.device_bytes(), 64 * slot, "on {device}");
    }
}

/// Budgets from sufficient to insufficient: each run gives the same tokens, or an error before the first one.
#[test]
fn a_generation_stays_within_its_budget_or_is_an_error() {
    for (device, opened) in devices() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let load = |memory| float32(Model::builder(&folder), opened).memory(memory).load();
        let model = load(Some(1 << 30)).unwrap();
        let weights = model.weight_bytes();
        let mut prompt =
            vec![model.encode(&"ROMEO: my love is deep as the sea, and as wide. ".repeat(20)).unwrap()];
        prompt[0].truncate(240);
        // The buffers of `dynamic` double for the last time when they reach half of the final length.
        let wanted = greedy(513 - 240);
        let dynamic = Plan::dynamic();
        let mut cache = model.cache(&dynamic).unwrap();
        let want = begin(&model, &mut cache, &prompt, 20, &wanted, |request| request).unwrap();
        assert!(want.iter().collect::<HashSet<_>>().len() > 3, "tokens that tell something: {want:?}");
        let (whole, dense) = (model.budget().peak(), cache.device_bytes() as u64);
        assert_eq!(dense, 5 * 2 * 2 * 64 * 4 * 512, "of five layers of 512 slots");
        assert!(whole > weights + dense, "the peak counts activations, too");
        drop(cache);
        assert_eq!(model.budget().used(), weights, "what is dropped is free again");

        let (mut offloaded, mut refused) = (0, 0);
        for percent in [100, 80, 65, 50, 35, 15] {
            let memory = weights + (whole - weights) * percent / 100;
            model.budget().set_limit(Some(memory));
            for on_oom in [OnOutOfMemory::Fail, OnOutOfMemory::Offload] {
                let what = format!("{on_oom} with {percent} % on {device}");
                let mut cache = model.cache(&dynamic).unwrap();
                match begin(&model, &mut cache, &prompt, 20, &wanted, |request| request.on_oom(on_oom)) {
                    Ok(tokens) => {
                        assert_eq!(tokens, want, "{what}");
                        assert!(on_oom == OnOutOfMemory::Offload || cache.host_bytes() == 0, "{what}");
                        offloaded += usize::from(cache.host_bytes() > 0);
                    }
                    Err(error @ Error::OutOfMemory { .. }) => {
                        let text = error.to_string();
                        assert!(text.contains("allow at least") && text.contains("`memory`"), "{text}");
                        if on_oom == OnOutOfMemory::Offload {
                            assert!(text.contains("use at most") && cache.seq_len() == 0, "{what}: {text}");
                            refused += 1;
                        }
                    }
                    Err(other) => panic!("{what}: {other}"),
                }
                assert!(model.budget().peak() <= memory, "{what}");
            }
        }
        assert!(offloaded >= 2 && refused >= 1, "{offloaded} were offloaded, {refused} refused on {device}");
        // Weights that do not fit, and tokens that certainly do not fit, are refused before anything is read.
        let refuse = |memory, tokens| {
            let builder = float32(Model::builder(&folder), opened).memory(memory).tokens(tokens);
            builder.load().map(|_| ()).unwrap_err().to_string()
        };
        assert!(refuse(weights - 1, 0).contains("weights"), "{}", refuse(weights - 1, 0));
        assert!(refuse(weights + 1000, 100).contains("a cache"), "{}", refuse(weights + 1000, 100));
    }
}

/// Generation continues in a cache that is packed midway; the tokens chosen before it do not change.
#[test]
fn a_cache_is_quantized_when_memory_runs_out() {
    for (device, opened) in devices() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let model = float32(Model::builder(&folder), opened).load().unwrap();
        let prompt =
            vec![model.encode(&"ROMEO: my love is deep as the sea, and as wide. ".repeat(22)).unwrap()];
        let quantize = OnOutOfMemory::Quantize;
        let dynamic = Plan::dynamic();
        let mut cache = model.cache(&dynamic).unwrap();
        let before = model.budget().allocations();
        let dense = run(&model, &mut cache, &prompt, 6, quantize).unwrap();
        let allocations = model.budget().allocations() - before;
        for n in [allocations - 1, allocations - 6, allocations / 2] {
            let mut packed = model.cache(&dynamic).unwrap();
            model.budget().fail_allocation(n);
            let tokens = run(&model, &mut packed, &prompt, 6, quantize).unwrap();
            assert_eq!(tokens.len(), dense.len(), "on {device}");
            assert_eq!(tokens[..2], dense[..2], "what was chosen before, on {device}");
            let names: Vec<&str> = packed.layers_mut().map(|(_, layer)| name(layer)).collect();
            assert!(names.iter().all(|name| *name == "quantized"), "{names:?} on {device}, allocation {n}");
            assert_eq!(packed.seq_len(), cache.seq_len(), "on {device}");
            assert!(packed.device_bytes() < cache.device_bytes() && packed.host_bytes() == 0, "on {device}");
        }
    }
}

/// A cache without a budget outgrows the largest buffer of the device: it continues from its state, packed or
/// not at all.
#[test]
fn a_cache_that_outgrows_the_largest_buffer_is_an_error_or_quantized() {
    for (device, opened) in devices() {
        let sizes = Llama { layers: 2, hidden: 128, heads: 2, kv_heads: 2, intermediate: 64, vocab: 97 };
        let model = float32(ModelBuilder::random(sizes.config()), opened).load().unwrap();
        let plan = Plan::dynamic();
        let prompt = vec![(0..1020).map(|i| i * 7 % 97).collect::<Vec<_>>()];
        let endless = GenerationConfig::new().eos_token_id(Vec::new());
        let go_on = |cache: &mut ModelCache, prompt: &[Vec<TokenId>], on_oom| {
            let steps = model
                .generate(prompt.to_vec())
                .cache(cache)
                .config(endless.clone())
                .on_oom(on_oom)
                .steps()
                .unwrap();
            let (mut tokens, mut error) = (Vec::new(), None);
            for step in steps.take(12) {
                match step {
                    Ok(step) => tokens.push(step.tokens),
                    Err(refused) => error = Some(refused),
                }
            }
            (tokens, error)
        };
        let (want, _) = go_on(&mut model.cache(&plan).unwrap(), &prompt, OnOutOfMemory::Fail);
        assert_eq!(want.len(), 12);
        // Keys of 1,024 tokens: two heads of dimension 64.
        let largest = 1024 * 2 * 64 * 4;
        model.budget().set_largest_buffer(Some(largest));
        for on_oom in [OnOutOfMemory::Fail, OnOutOfMemory::Offload] {
            let mut cache = model.cache(&plan).unwrap();
            let (tokens, error) = go_on(&mut cache, &prompt, on_oom);
            assert_eq!(tokens, want[..5], "{on_oom} on {device}");
            let refused = Error::BufferTooLarge { needed: 2 * largest, largest };
            assert_eq!(error, Some(refused), "{on_oom} on {device}");
            assert_eq!((cache.seq_len(), cache.host_bytes()), (1024, 0), "{on_oom} on {device}");
            // The cache is usable at its present size.
            cache.truncate(1020).unwrap();
            let next = vec![vec![tokens[0][0].unwrap()]];
            let (again, _) = go_on(&mut cache, &next, on_oom);
            assert_eq!(again, want[1..5], "{on_oom} on {device}");
        }
        let mut cache = model.cache(&plan).unwrap();
        let (tokens, error) = go_on(&mut cache, &prompt, OnOutOfMemory::Quantize);
        assert_eq!((tokens.len(), &tokens[..5], error), (12, &want[..5], None), "on {device}");
        assert_eq!(
            cache.layers_mut().next().map(|(_, layer)| name(layer)).unwrap(),
            "quantized",
            "on {device}"
        );
        // A size that is known in advance is refused before the first token.
        let wanted = GenerationConfig::new().max_new_tokens(8);
        let mut cache = model.cache(&plan).unwrap();
        let refused = model.generate(prompt).cache(&mut cache).config(wanted.clone()).steps().map(|_| ());
        assert!(matches!(refused, Err(Error::BufferTooLarge { .. })), "{refused:?} on {device}");
    }
}

/// A user's own decoding loop is counted like Kiln's.
#[test]
fn a_forward_pass_claims_its_memory_from_the_budget() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        let tokens = batch(&model, &[(0..40).collect()]);
        model.budget().set_limit(Some(model.weight_bytes() + (20 << 10)));
        let refused = model.causal().forward(&tokens, Logits::All, &mut cache);
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "on {device}");
        assert_eq!((cache.seq_len(), cache.device_bytes()), (0, 0), "nothing was changed on {device}");
        model.budget().set_limit(Some(1 << 30));
        model.causal().forward(&tokens, Logits::All, &mut cache).unwrap();
        let (peak, held) = (model.budget().peak(), model.weight_bytes() + cache.device_bytes() as u64);
        // Logits of forty tokens, before and after a softcap, and more.
        assert!(peak > held + 2 * 4 * 97 * 40, "{peak} on {device}");
        assert_eq!(model.budget().used(), held, "on {device}");
    }
}

/// A window that is full becomes longer where more history is promised.
#[test]
fn a_window_that_becomes_longer_claims_its_memory_from_the_budget() {
    for (device, opened) in devices() {
        let model = recorded("mistral", opened);
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        forward(&model, &batch(&model, &[(0..40).collect()]), &mut cache);
        let held = cache.device_bytes();
        cache.keep_history(4000);
        model.budget().set_limit(Some(model.weight_bytes() + held as u64 + (64 << 10)));
        let next = batch(&model, &[vec![7]]);
        let refused = model.causal().forward(&next, Logits::All, &mut cache);
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "on {device}");
        assert_eq!((cache.seq_len(), cache.device_bytes()), (40, held), "nothing was changed on {device}");
        model.budget().set_limit(None);
        forward(&model, &next, &mut cache);
        assert!(
            cache.device_bytes() > held + (64 << 10),
            "{} after {held} on {device}",
            cache.device_bytes()
        );
    }
}

fn name(layer: &LayerCache) -> &'static str {
    layer.keys.as_ref().map_or("another", |keys| keys.name())
}
