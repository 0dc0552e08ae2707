//! Layers in host memory: the same numbers, two layers on the device, and no unnecessary transfers.

use burn::tensor::{Device, Tensor};
use kiln::{
    GenerationConfig, ModelBuilder, Offload, Plan, TokenId,
    device::Opened,
    expert::{
        Batch, Logits, ModelCache,
        kernels::{Choice, Kernels},
        memory::{
            AttentionNeed, LayerNeed, Moved, Positions, RecurrentNeed, RingEntries, RingNeed, StepShape,
        },
    },
};

use crate::support::{Llama, alone, batch, float32, forward, is_alone, recorded};

const LAYERS: usize = 32;
const NEED: AttentionNeed = AttentionNeed::alike(4, 64);
/// Size in bytes of a token in one layer, in float32.
const TOKEN: u64 = 2 * 4 * 64 * 4;

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Creates the cache of a model with 32 layers.
fn cache(plan: &str, offload: Option<Offload>, device: &Device) -> ModelCache {
    let needs = vec![LayerNeed::from(NEED); LAYERS];
    let plan = Plan { offload, ..Plan::named(plan).unwrap() };
    plan.build(&needs, &Kernels::new(Choice::Auto, device).unwrap().into()).unwrap()
}

/// Updates a cache like a forward pass over `n` tokens; calls `watch` while each layer is in use.
fn pass(cache: &mut ModelCache, n: usize, device: &Device, watch: &mut dyn FnMut()) {
    let step = StepShape { rows: 1, tokens: n, element: 4, last: false };
    let mut pass = cache.begin(&step, &[0], false, 0).unwrap();
    for layer in 0..LAYERS {
        let layer = pass.attention(layer).unwrap().remove(0).layer;
        let keys = Tensor::<4>::ones(NEED.keys.shape(1, n), device);
        let positions = Positions::all_at(layer.span(n).query(n), keys.dims()[0], device);
        let view = layer.update(keys.clone(), keys, &positions).unwrap();
        watch();
        drop(view);
    }
    pass.commit();
}

#[test]
fn a_step_uploads_the_cache_and_downloads_only_its_own_tokens() {
    for (device, opened) in devices() {
        for (plan, kept) in [("static:len=512", 0), ("static:len=512", 8), ("dynamic", 0)] {
            let mut cache = cache(plan, Some(Offload::AllBut(kept)), &opened.device);
            pass(&mut cache, 300, &opened.device, &mut || {});
            pass(&mut cache, 1, &opened.device, &mut || {});
            pass(&mut cache, 1, &opened.device, &mut || {});
            let before = cache.moved();
            pass(&mut cache, 1, &opened.device, &mut || {});
            let after = cache.moved();
            let layers = (LAYERS - kept) as u64;
            let moved = Moved { up: after.up - before.up, down: after.down - before.down };
            // With any strategy, 300 tokens are in a buffer of 512 slots.
            let want = Moved { up: layers * 512 * TOKEN, down: layers * TOKEN };
            assert_eq!(moved, want, "{plan}, last {kept} layers kept, on {device}");
        }
    }
}

/// Memory is measured rather than computed, if the device reports its usage.
#[test]
fn at_most_two_offloaded_layers_are_on_the_device() {
    // Runs in a separate process: the allocations of other tests would be counted.
    if !is_alone() {
        alone("offload::at_most_two_offloaded_layers_are_on_the_device", None);
        return;
    }
    for (device, opened) in devices() {
        let Some(start) = in_use(&opened.device) else { continue };
        let layer = 4096 * TOKEN;
        let peak = |plan, offload| {
            let mut cache = cache(plan, offload, &opened.device);
            let mut peak = 0;
            for n in [2000, 2000, 1, 1, 1] {
                pass(&mut cache, n, &opened.device, &mut || {
                    // Launched kernels hold their inputs until they have finished.
                    opened.device.sync().unwrap();
                    if n == 1 {
                        peak = in_use(&opened.device).unwrap().max(peak);
                    }
                });
            }
            (peak - start) as f64 / layer as f64
        };
        for plan in ["static:len=4096", "dynamic"] {
            let (offloaded, kept) = (peak(plan, Some(Offload::All)), peak(plan, Some(Offload::AllBut(4))));
            let bare = peak(plan, None);
            let reserved = opened.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
            println!("{device}, {plan}: {reserved:?} bytes are reserved at the end");
            println!(
                "{device}, {plan}: {bare:.3} layers bare, {offloaded:.3} offloaded, {kept:.3} but the last 4"
            );
            assert!(bare >= LAYERS as f64, "{device}: {bare} layers are {LAYERS}");
            assert!(offloaded <= 2.2 && kept <= 6.2, "{device}: {offloaded}, {kept} layers");
        }
    }
}

/// The cache of a Jamba with 32 blocks, of which 4 have attention, packed and in host memory: at most two of
/// its largest layers are on the device.
#[test]
fn at_most_two_offloaded_layers_of_a_jamba_are_on_the_device() {
    if !is_alone() {
        alone("offload::at_most_two_offloaded_layers_of_a_jamba_are_on_the_device", None);
        return;
    }
    let channels = 512;
    let ring = |groups, entries| RingNeed { groups, width: channels, entries };
    let rings = vec![ring(1, RingEntries::Inputs { reach: 3 }), ring(16, RingEntries::States)];
    let state = RecurrentNeed { rings };
    let attends = |layer: usize| layer % 8 == 4;
    let needs: Vec<_> = (0..LAYERS)
        .map(|layer| match attends(layer) {
            true => LayerNeed::from(NEED),
            false => LayerNeed::from(state.clone()),
        })
        .collect();
    for (device, opened) in devices() {
        let device_of = &opened.device;
        let Some(start) = in_use(device_of) else { continue };
        let peak = |offload| {
            let plan = Plan { offload, ..Plan::named("quantized:residual=128").unwrap() };
            let mut cache =
                plan.build(&needs, &Kernels::new(Choice::Auto, device_of).unwrap().into()).unwrap();
            let mut peak = 0;
            for n in [2000, 2000, 1, 1, 1] {
                let step = StepShape { rows: 1, tokens: n, element: 4, last: false };
                let mut pass = cache.begin(&step, &[0], false, 0).unwrap();
                for layer in 0..LAYERS {
                    if attends(layer) {
                        let layer = pass.attention(layer).unwrap().remove(0).layer;
                        let keys = Tensor::<4>::ones(NEED.keys.shape(1, n), device_of);
                        let positions = Positions::all_at(layer.span(n).query(n), 1, device_of);
                        drop(layer.update(keys.clone(), keys, &positions).unwrap());
                    } else {
                        let layer = pass.recurrent(layer).unwrap().remove(0).layer;
                        let rings = layer.take(&Tensor::ones([1, n, channels], device_of)).unwrap();
                        layer.store(rings, n).unwrap();
                    }
                    device_of.sync().unwrap();
                    if n == 1 {
                        peak = in_use(device_of).unwrap().max(peak);
                    }
                }
                pass.commit();
            }
            let all = (cache.device_bytes() + cache.host_bytes()) as u64;
            (peak - start, all, cache.host_bytes() as u64)
        };
        let states = state.bytes(0, 4) as u64 * (LAYERS as u64 - 4);
        let (bare, all, on_host) = peak(None);
        // The states to which the pass could be rolled back are counted too, although nothing wrote new
        // states next to them here.
        assert!(bare + states >= all && on_host == 0, "{device}: {bare} of {all} bytes");
        let (offloaded, all, on_host) = peak(Some(Offload::All));
        let largest = (all - states) / 4;
        println!("{device}: {bare} bytes bare, {offloaded} offloaded, where the largest layer has {largest}");
        assert!(on_host as f64 >= 0.9 * all as f64, "{device}: {on_host} of {all} bytes are in host memory");
        assert!(offloaded as f64 <= 2.2 * largest as f64, "{device}: {offloaded} bytes");
    }
}

/// Roll-back, snapshots, files and row operations fetch one layer at a time and leave none on the device.
#[test]
fn at_most_two_layers_are_on_the_device_during_cache_operations() {
    if !is_alone() {
        alone("offload::at_most_two_layers_are_on_the_device_during_cache_operations", None);
        return;
    }
    for (device, opened) in devices() {
        for plan in ["static:len=4096", "dynamic", "sink:window=4095"] {
            let mut cache = cache(plan, Some(Offload::All), &opened.device);
            cache.keep_history(1);
            for n in [2000, 2000, 1] {
                pass(&mut cache, n, &opened.device, &mut || {});
            }
            // The first layer was prefetched for the next pass.
            cache.reorder(&[0]).unwrap();
            let layer = cache.host_bytes() as f64 / LAYERS as f64;
            let Some(before) = given_back(&opened.device) else { break };
            let done = |what: &str| {
                let most = pages(&opened.device).unwrap() - before;
                let left = given_back(&opened.device).unwrap() - before;
                let [most, left] = [most, left].map(|bytes| bytes as f64 / layer);
                println!("{device}, {plan}, {what}: pages for {most:.2} layers, {left:.2} are left");
                // Two layers, in pages of 0.62 layers. On a busy machine one more page is allocated before
                // another is returned.
                assert!(most <= 2.6 && left <= 1.0, "{device}, {plan}, {what}: {most} and {left} layers");
            };
            cache.truncate(cache.seq_len() - 1).unwrap();
            done("truncated");
            drop(cache.snapshot());
            done("a snapshot");
            let state = cache.save().unwrap();
            done("saved");
            let mut restored = self::cache(plan, Some(Offload::All), &opened.device);
            restored.restore(state).unwrap();
            done("restored");
            drop(restored);
            cache.reorder(&[0, 0]).unwrap();
            cache.reorder(&[1]).unwrap();
            done("rows selected");
        }
    }
}

/// Returns the bytes of the pages that hold tensors. Data that was read back is in other pages, in host
/// memory.
fn pages(device: &Device) -> Option<u64> {
    device.sync().unwrap();
    let pools = device.memory_pool_report()?;
    Some(pools.iter().map(|pool| pool.page_size * pool.pages).sum())
}

/// Returns [`pages`] after empty ones were returned to the device.
fn given_back(device: &Device) -> Option<u64> {
    device.memory_cleanup();
    pages(device)
}

fn in_use(device: &Device) -> Option<u64> {
    device.memory_cleanup();
    device.sync().unwrap();
    device.memory_pool_usage().map(|usage| usage.bytes_in_use)
}

#[test]
fn an_offloaded_cache_gives_the_same_logits_bit_for_bit() {
    for (device, opened) in devices() {
        for (name, caches) in [
            ("llama", &["dynamic", "static:len=64", "sink:window=8,sinks=2", "none"] as &[&str]),
            ("mistral", &["dynamic", "sliding", "static:len=64"]),
            ("gemma2", &["hybrid"]),
            ("mamba", &["dynamic", "none"]),
            ("jamba", &["dynamic", "static:len=64", "sink:window=8,sinks=2", "none"]),
            ("mixtral", &["dynamic"]),
        ] {
            let model = recorded(name, opened);
            for text in caches {
                for way in [Offload::All, Offload::AllBut(1)] {
                    let plan = Plan::named(text).unwrap();
                    let mut bare = model.cache(&plan).unwrap();
                    let mut away = model.cache(&plan.offloaded(way)).unwrap();
                    let chunks: [&[TokenId]; 6] =
                        [&[3, 1, 4, 1, 5, 9, 2], &[6], &[5], &[3, 58, 9], &[7], &[9]];
                    for chunk in chunks {
                        let chunk = batch(&model, &[chunk.to_vec(), chunk.iter().map(|t| t + 1).collect()]);
                        let want = forward(&model, &chunk, &mut bare);
                        let what = format!("{name}, {text}, {way} on {device}");
                        assert_eq!(forward(&model, &chunk, &mut away), want, "{what}");
                    }
                    // The rows of a beam search, which the host reorders.
                    for cache in [&mut bare, &mut away] {
                        cache.reorder(&[1, 1, 0]).unwrap();
                    }
                    let next = batch(&model, &[vec![8], vec![9], vec![10]]);
                    if *text != "none" {
                        let want = forward(&model, &next, &mut bare);
                        assert_eq!(forward(&model, &next, &mut away), want, "{name}, {text} on {device}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_cache_can_be_offloaded_midway_and_saved() {
    for (device, opened) in devices() {
        for (name, text) in [
            ("llama", "dynamic"),
            ("llama", "static:len=64"),
            ("llama", "sink:window=8,sinks=2"),
            ("mamba", "dynamic"),
        ] {
            let model = recorded(name, opened);
            let plan = Plan::named(text).unwrap();
            let (mut bare, mut moved) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
            let feed = |cache: &mut ModelCache, ids: &[TokenId]| {
                forward(&model, &batch(&model, &[ids.to_vec()]), cache)
            };
            for cache in [&mut bare, &mut moved] {
                feed(cache, &[3, 1, 4, 1, 5]);
                (0..6).for_each(|token| _ = feed(cache, &[token]));
            }
            kiln::expert::offload_all(&mut moved).unwrap();
            assert_eq!(moved.device_bytes(), 0, "{text} on {device}");
            assert!(moved.host_bytes() > 0, "{text} on {device}");
            let mut snapshot = moved.snapshot();
            assert_eq!(feed(&mut moved, &[9]), feed(&mut bare, &[9]), "{text} on {device}");
            let want = moved.save().unwrap();
            assert_eq!(want, bare.save().unwrap(), "{text} on {device}");
            feed(&mut snapshot, &[9]);
            assert_eq!(snapshot.save().unwrap(), want, "{text} on {device}: the snapshot goes the same way");
            let mut loaded = model.cache(&plan).unwrap();
            loaded.restore(want).unwrap();
            assert_eq!(feed(&mut loaded, &[2]), feed(&mut bare, &[2]), "{text} on {device}");
        }
    }
}

#[test]
fn padded_rows_generate_the_same_tokens_offloaded() {
    let sizes = Llama { layers: 3, hidden: 32, heads: 4, kv_heads: 2, intermediate: 48, vocab: 97 };
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(sizes.config()), opened).load().unwrap();
        for text in ["dynamic", "static"] {
            let generate = |plan: &Plan, compile| {
                let wanted = GenerationConfig::new().max_new_tokens(80);
                let rows = vec![vec![1, 2, 3, 4, 5], vec![6, 7]];
                let mut cache = model.cache(plan).unwrap();
                let steps = model
                    .generate(rows)
                    .cache(&mut cache)
                    .config(wanted.clone())
                    .compile(compile)
                    .steps()
                    .unwrap();
                steps.map(|step| step.unwrap().tokens).collect::<Vec<_>>()
            };
            let plan = Plan::named(text).unwrap();
            let want = generate(&plan, None);
            for compile in [None, Some(true)] {
                let got = generate(&plan.clone().offloaded(Offload::All), compile);
                assert_eq!(got, want, "{text} on {device}, compile {compile:?}");
            }
        }
    }
}

#[test]
fn names_of_offloaded_caches_in_transformers_are_accepted() {
    for (name, strategy) in [("offloaded", "dynamic"), ("offloaded_static:len=9", "static:len=9")] {
        let plan = Plan::named(name).unwrap();
        assert_eq!((plan.global.to_string().as_str(), plan.offload), (strategy, Some(Offload::All)));
    }
    assert!("layers=x".parse::<Offload>().unwrap_err().to_string().contains("layers=N"));
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let mut cache = model.cache(&Plan::named("offloaded_static:len=9").unwrap()).unwrap();
    let ids: Vec<TokenId> = (0..10).collect();
    let refused =
        model.causal().forward(&Batch::from_rows(&[ids], model.device()).unwrap(), Logits::Last, &mut cache);
    assert!(refused.is_err(), "it is as long as the bare one");
}

#[test]
fn only_layers_without_a_window_are_moved_if_asked_for() {
    for (device, opened) in devices() {
        // Blocks with and without a window, shared keys, and states.
        for name in ["gemma2", "gemma3_text", "gemma4_text", "qwen3_5_text", "gpt_oss"] {
            let model = recorded(name, opened);
            let needs = model.causal().needs();
            let plan = Plan::dynamic().offloaded(Offload::Full);
            let tokens = |plan: &Plan| {
                let config = GenerationConfig::new().max_new_tokens(20).do_sample(false);
                let steps =
                    model.generate((3..15).collect::<Vec<TokenId>>()).config(config).plan(plan.clone());
                let mut steps = steps.steps().unwrap();
                steps.by_ref().for_each(|step| drop(step.unwrap()));
                steps.tokens(0).unwrap().to_vec()
            };
            assert_eq!(tokens(&plan), tokens(&Plan::dynamic()), "{name} on {device}");
            let mut cache = model.cache(&plan).unwrap();
            for (block, layer) in cache.layers_mut() {
                let grows = needs[block].attention.as_ref().is_some_and(|need| need.window.is_none());
                assert_eq!(layer.is_offloaded() && !layer.is_empty(), grows, "{name}, block {block}");
            }
            let text = plan.to_string();
            assert_eq!(Plan::named(&text).unwrap(), plan, "{text}");
        }
    }
}
