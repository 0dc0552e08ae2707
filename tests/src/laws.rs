//! The laws, for every strategy, on every device. No strategy is named here.

use kiln::{
    GenerationConfig, Model, ModelBuilder, Offload, Plan, TokenId,
    device::Opened,
    expert::{
        CacheSpec,
        kernels::{Choice, Kernels},
        memory::{AttentionNeed, KvLayer, LayerNeed},
    },
};
use kiln_testkit::laws::{self, Subject};

use crate::support::{Llama, assert_close, batch, float32, forward, llama_with, recorded, some_on};

const PROMPT: [TokenId; 11] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58];

/// Returns every strategy, with settings to which the laws apply. The cache of transformers 4.47 and the one
/// of 8-bit floats depend on how they were fed, which breaks laws, and rotated codes lose more than half a
/// token.
fn caches() -> impl Iterator<Item = String> {
    kiln::expert::cache_samples().filter(|text| {
        !["compat=4.47", "fp8", "residual=8,rotate=on"].iter().any(|other| text.contains(other))
    })
}

/// Returns the [`caches`], and on GPUs some of them where long tests are to be shorter.
fn caches_on(device: &str) -> impl Iterator<Item = String> {
    some_on(device, caches())
}

/// Recorded models: one with attention, and one without.
const RECORDED: [&str; 2] = ["llama", "mamba"];

const WINDOWS: [Option<usize>; 4] = [None, Some(1), Some(5), Some(70)];

fn need(window: Option<usize>) -> AttentionNeed {
    AttentionNeed { window, ..AttentionNeed::alike(2, 8) }
}

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Returns the plans that support `model`, each on the device, offloaded and partly offloaded, and whether
/// every block gets every visible key.
pub(crate) fn plans(model: &Model) -> impl Iterator<Item = (String, Plan, bool)> {
    let needs = model.causal().needs();
    let ways = [None, Some(Offload::All), Some(Offload::AllBut(1))];
    let all = caches().flat_map(move |text| ways.map(|offload| (text.clone(), offload)));
    all.filter_map(move |(text, offload)| {
        let plan = Plan { offload, ..Plan::named(&text).unwrap() };
        plan.check(&needs).ok().map(|()| {
            let name = offload.map_or_else(|| text.clone(), |way| format!("{text}, offloaded {way}"));
            (name, plan.clone(), plan.is_exact(&needs))
        })
    })
}

/// Returns the [`plans`] on the first device of a test, and on others one of each strategy, to save time.
pub(crate) fn plans_on(place: usize, model: &Model) -> impl Iterator<Item = (String, Plan, bool)> {
    let mut known = Vec::new();
    plans(model).filter(move |(text, ..)| {
        let strategy = text.split([':', ',']).next().map(str::to_owned);
        let is_new = place == 0 || !known.contains(&strategy) && !text.contains("offloaded");
        known.push(strategy);
        is_new
    })
}

/// Returns the [`plans`] of caches that retain their tokens.
pub(crate) fn remembering(model: &Model) -> impl Iterator<Item = (String, Plan, bool)> {
    plans(model).filter(|(_, plan, _)| plan.global.factory.remembers())
}

#[test]
fn attention_layers_obey_the_laws() {
    for (device, opened) in devices() {
        for text in caches_on(device) {
            for window in WINDOWS {
                // The slot of a token does not depend on the device; the way it is stored does.
                if device == "cpu" || [None, Some(5)].contains(&window) {
                    obey_the_laws(device, opened, &text, &need(window));
                }
            }
        }
    }
}

#[test]
fn keys_and_values_of_different_shapes_obey_the_laws() {
    for (device, opened) in devices() {
        for text in caches_on(device) {
            for need in uneven_needs(device) {
                obey_the_laws(device, opened, &text, &need);
            }
        }
    }
}

/// Returns needs with keys and values of different shapes, each without and with a window.
fn uneven_needs(device: &str) -> impl Iterator<Item = AttentionNeed> {
    // Other devices take one of them, to save time.
    let needs = laws::attention_needs().into_iter().take(if device == "cpu" { usize::MAX } else { 1 });
    needs.flat_map(|need| [None, Some(5)].map(|window| AttentionNeed { window, ..need.clone() }))
}

/// Checks the laws of a layer of a strategy, unless the strategy does not support such blocks.
fn obey_the_laws(device: &str, opened: &Opened, text: &str, need: &AttentionNeed) {
    let kernels = kernels(opened);
    let spec = Plan::named(text).unwrap().global;
    let serves = |window| spec.factory.check(&AttentionNeed { window, ..need.clone() }).is_ok();
    // Strategies that support blocks without a window ignore it, except `quantized`.
    let same = need.window.is_some() && serves(None) && !text.starts_with("quantized");
    if !serves(need.window) || same {
        return;
    }
    for offload in [false, true] {
        let way = if offload { ", offloaded" } else { "" };
        let build = || {
            let mut layer = spec.factory.build(need, &kernels).unwrap();
            if offload {
                layer.offload().unwrap();
            }
            layer
        };
        laws::conforms(&subject(format!("{text}{way} on {device}, {need:?}"), &build, &spec, need, &kernels));
    }
}

fn subject<'a>(
    name: String,
    build: &'a dyn Fn() -> Box<dyn KvLayer>,
    spec: &CacheSpec,
    need: &'a AttentionNeed,
    kernels: &'a Kernels,
) -> Subject<'a> {
    Subject {
        name,
        device: kernels.device(),
        build,
        remembers: spec.factory.remembers(),
        exact: spec.factory.exact(),
        // Below 0.5, so that a token can be recognized.
        loss: if spec.strategy.name == "quantized" { 0.4 } else { 0.0 },
        need,
        kernels,
    }
}

#[test]
fn rows_of_keys_and_values_of_different_shapes_see_what_they_see_alone() {
    for (device, opened) in devices() {
        let kernels = kernels(opened);
        for need in uneven_needs(device) {
            let needs = [LayerNeed::from(need.clone())];
            let mut have_shared = Vec::new();
            for text in caches() {
                let plan = Plan::named(&text).unwrap();
                if plan.check(&needs).is_err() || !plan.remembers(&needs) {
                    continue;
                }
                let spec = plan.spec(&need);
                let layer = || spec.factory.build(&need, &kernels).unwrap();
                let subject = subject(format!("{text} on {device}, {need:?}"), &layer, spec, &need, &kernels);
                if laws::rows_conform(&subject, &|| plan.build(&needs, &kernels.clone().into()).unwrap()) {
                    have_shared.push(text);
                }
            }
            // A window is a ring, in which positions are not slots.
            let want: &[&str] =
                if need.window.is_none() { &["dynamic", "static", "static:len=256"] } else { &[] };
            assert_eq!(have_shared, want, "{device}");
        }
    }
}

#[test]
fn recurrent_layers_obey_the_laws() {
    for (_, opened) in devices() {
        for need in laws::state_needs() {
            let needs = [LayerNeed::from(need.clone())];
            for plan in [dynamic(), dynamic().offloaded(Offload::All)] {
                let build = || {
                    let mut cache = plan.build(&needs, &kernels(opened).into()).unwrap();
                    let (_, layer) = cache.layers_mut().next().unwrap();
                    layer.state.as_ref().unwrap().snapshot()
                };
                laws::state_conforms(&need, &build, &opened.device);
            }
        }
    }
}

#[test]
fn cross_attention_layers_obey_the_laws() {
    for (_, opened) in devices() {
        for need in laws::attention_needs().into_iter().chain([need(None)]) {
            for plan in [dynamic(), dynamic().offloaded(Offload::All)] {
                let needs = [LayerNeed { encoder: true, ..need.clone().into() }];
                let mut cache = plan.build(&needs, &kernels(opened).into()).unwrap();
                laws::cross_conforms(&mut cache, &need, &opened.device);
            }
        }
    }
}

#[test]
fn chunked_prefill_gives_the_logits_of_whole_prefill() {
    for (device, opened) in devices() {
        for model in ["llama", "llama_rope_dynamic", "mamba"] {
            let model = recorded(model, opened);
            for (name, plan, exact) in plans(&model) {
                if !exact {
                    continue;
                }
                let prompt: Vec<TokenId> = (0..30).map(|i| i * 7 % 97).collect();
                let run = |chunk| {
                    let mut cache = model.cache(&plan).unwrap();
                    let rows = batch(&model, std::slice::from_ref(&prompt));
                    let options = kiln::expert::GenerationOptions {
                        settings: wanted(3).resolve().unwrap(),
                        prefill_chunk: chunk,
                        keep_logits: true,
                        ..kiln::expert::GenerationOptions::default()
                    };
                    // Not through the facade, which refuses prompts beyond the number of positions: these are
                    // the hard case.
                    let prompts = vec![prompt.clone()];
                    let mut generation = kiln::expert::Generation::new(
                        model.causal().clone(),
                        &mut cache,
                        rows,
                        prompts,
                        options,
                    )
                    .unwrap();
                    let step = generation.next().unwrap().unwrap();
                    step.logits.unwrap().remove(0)
                };
                let whole = run(None);
                for chunk in [1, 7, 29, 30, 99] {
                    assert_close(
                        &run(Some(chunk)),
                        &whole,
                        &format!("{name} on {device}, chunks of {chunk}"),
                    );
                }
            }
        }
    }
}

#[test]
fn cached_logits_equal_recomputed_logits() {
    for (device, opened) in devices() {
        for model in RECORDED.map(|name| recorded(name, opened)) {
            let recompute = |len: usize| {
                let mut cache = model.cache(&Plan::named("none").unwrap()).unwrap();
                let logits = forward(&model, &batch(&model, &[PROMPT[..len].to_vec()]), &mut cache);
                logits[logits.len() - 97..].to_vec()
            };
            for (name, plan, exact) in remembering(&model) {
                if !exact {
                    continue;
                }
                let mut cache = model.cache(&plan).unwrap();
                for (at, &token) in PROMPT.iter().enumerate() {
                    let logits = forward(&model, &batch(&model, &[vec![token]]), &mut cache);
                    assert_close(&logits, &recompute(at + 1), &format!("{name} on {device} at {at}"));
                }
            }
        }
    }
}

#[test]
fn truncating_extra_tokens_restores_the_cache() {
    for (device, opened) in devices() {
        for model in RECORDED.map(|name| recorded(name, opened)) {
            for (name, plan, _) in remembering(&model) {
                let (mut straight, mut detour) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
                detour.keep_history(3);
                forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut straight);
                forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut detour);
                forward(&model, &batch(&model, &[vec![7, 7, 7]]), &mut detour);
                detour.truncate(PROMPT.len()).unwrap();
                let next = batch(&model, &[vec![8]]);
                let want = forward(&model, &next, &mut straight);
                // Not bit for bit: a buffer that had to hold more tokens is longer, which changes the order
                // of sums.
                assert_close(&forward(&model, &next, &mut detour), &want, &format!("{name} on {device}"));
            }
        }
    }
}

#[test]
fn reordering_commutes_with_update() {
    for (device, opened) in devices() {
        for model in RECORDED.map(|name| recorded(name, opened)) {
            let (a, b) = (PROMPT.to_vec(), PROMPT.iter().map(|t| t + 1).collect::<Vec<_>>());
            for (name, plan, _) in remembering(&model) {
                let (mut selected, mut direct) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
                forward(&model, &batch(&model, &[a.clone(), b.clone()]), &mut selected);
                selected.reorder(&[1, 1, 0]).unwrap();
                forward(&model, &batch(&model, &[b.clone(), b.clone(), a.clone()]), &mut direct);
                let next = batch(&model, &[vec![5], vec![6], vec![7]]);
                let want = forward(&model, &next, &mut direct);
                assert_close(&forward(&model, &next, &mut selected), &want, &format!("{name} on {device}"));
            }
        }
    }
}

#[test]
fn a_reset_cache_gives_the_tokens_of_a_new_one() {
    for (device, opened) in devices() {
        for model in RECORDED.map(|name| recorded(name, opened)) {
            for (name, plan, _) in some_on(device, plans(&model)) {
                let mut reused = model.cache(&plan).unwrap();
                let first = tokens(&model, &mut reused, 12);
                reused.reset();
                assert_eq!(tokens(&model, &mut reused, 12), first, "{name} on {device}");
            }
        }
    }
}

#[test]
fn a_cache_is_rebuilt_from_legacy_keys_and_values() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for (name, plan, exact) in remembering(&model) {
            if !exact {
                continue;
            }
            let (mut stayed, mut rebuilt) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
            forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut stayed);
            let legacy = stayed.to_legacy().unwrap();
            assert_eq!(legacy.len(), model.sizes().layers);
            assert!(
                legacy
                    .iter()
                    .all(|(keys, values)| keys.dims() == [1, 2, 11, 8] && values.dims() == keys.dims())
            );
            rebuilt.from_legacy(legacy.clone()).unwrap();
            assert!(rebuilt.from_legacy(legacy.clone()).is_err(), "not into one that is filled");
            let next = batch(&model, &[vec![8]]);
            let want = forward(&model, &next, &mut stayed);
            assert_close(&forward(&model, &next, &mut rebuilt), &want, &format!("{name} on {device}"));
            let mut other = model.cache(&plan).unwrap();
            assert!(other.from_legacy(legacy[1..].to_vec()).is_err(), "a layer is missing");
        }
    }
}

/// A query of a sliding layer sees the same keys as a query of a full cache with a mask.
#[test]
fn a_sliding_window_equals_a_full_cache_with_a_band_mask() {
    for (device, opened) in devices() {
        for name in ["mistral", "gemma2", "gemma3_text"] {
            let model = recorded(name, opened);
            let (sliding, banded) = (Plan::dynamic(), Plan::dynamic().windowed(Plan::dynamic()));
            assert_eq!(sliding.windowed.strategy.name, "sliding");
            let rows = [vec![3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 9, 7, 9, 3, 2, 3], vec![8, 4, 6, 2, 6, 4]];
            let padded = kiln::expert::Batch::left_padded(&rows, 0, model.device()).unwrap();
            let (mut window, mut full) = (model.cache(&sliding).unwrap(), model.cache(&banded).unwrap());
            // Chunks that fit into the window, cross it, and exceed it.
            let mut start = 0;
            for n in [1, 3, 9, 2, 1, 1] {
                let chunk = padded.slice(start..start + n);
                start += n;
                let visible = |logits: Vec<f32>| {
                    // Padding is never compared.
                    let vocab = model.sizes().vocab;
                    let each = |(i, row): (usize, &[f32])| {
                        let (row_of, slot) = (i / n, start - n + i % n);
                        (slot >= padded.left_pad[row_of]).then(|| row.to_vec())
                    };
                    logits.chunks(vocab).enumerate().filter_map(each).flatten().collect::<Vec<f32>>()
                };
                let want = visible(forward(&model, &chunk, &mut full));
                let got = visible(forward(&model, &chunk, &mut window));
                assert_close(&got, &want, &format!("{name} on {device}, up to {start}"));
            }
            assert!(window.device_bytes() <= full.device_bytes(), "{name}");
        }
    }
}

/// In a model of one block, attention over sinks and the latest tokens equals a forward pass over only these
/// tokens.
#[test]
fn a_sink_cache_equals_a_forward_pass_over_the_tokens_it_kept() {
    let sizes = Llama { layers: 1, hidden: 32, heads: 4, kv_heads: 2, intermediate: 48, vocab: 97 };
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(sizes.config()), opened).load().unwrap();
        for (window, sinks) in [(12, 4), (9, 1), (8, 0)] {
            let plan = Plan::named(&format!("sink:window={window},sinks={sinks}")).unwrap();
            let mut cache = model.cache(&plan).unwrap();
            // Long enough that all keys are moved back several times.
            let text: Vec<TokenId> = (0..60).map(|i| i * 31 % 97).collect();
            for at in 0..text.len() {
                let got = forward(&model, &batch(&model, &[vec![text[at]]]), &mut cache);
                let kept: Vec<TokenId> = match at + 1 {
                    all if all <= window => text[..all].to_vec(),
                    all => [&text[..sinks], &text[all - (window - sinks)..all]].concat(),
                };
                let mut alone = model.cache(&dynamic()).unwrap();
                let want = forward(&model, &batch(&model, &[kept]), &mut alone);
                let what = format!("{window}/{sinks} on {device} at {at}");
                assert_close(&got, &want[want.len() - 97..], &what);
            }
        }
    }
}

#[test]
fn padded_rows_in_a_sink_cache_are_an_error() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let padded = kiln::expert::Batch::left_padded(&[vec![1, 2], vec![3]], 0, model.device()).unwrap();
    let mut cache = model.cache(&Plan::named("sink:window=8").unwrap()).unwrap();
    let refused =
        model.causal().forward(&padded, kiln::expert::Logits::Last, &mut cache).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("padding"), "{refused}");
}

#[test]
fn every_kind_of_kernel_gives_the_same_tokens() {
    for (device, opened) in devices() {
        let choices: &[Choice] = match device {
            "cpu" => &[Choice::Auto],
            "wgpu" => &[Choice::Wgsl, Choice::Cube],
            _ => &[Choice::Cube],
        };
        let run = |kernels| {
            let model = llama_with(opened, kernels);
            let mut cache = model.cache(&dynamic()).unwrap();
            tokens(&model, &mut cache, 12)
        };
        let want = run(Choice::Reference);
        for &kernels in choices {
            assert_eq!(run(kernels), want, "{kernels} on {device}");
        }
    }
}

fn dynamic() -> Plan {
    Plan::dynamic()
}

fn kernels(opened: &Opened) -> Kernels {
    Kernels::new(Choice::Auto, &opened.device).unwrap()
}

fn wanted(n: usize) -> GenerationConfig {
    GenerationConfig::new().max_new_tokens(n).eos_token_id(Vec::new())
}

fn tokens(model: &Model, cache: &mut kiln::expert::ModelCache, n: usize) -> Vec<TokenId> {
    let steps = model.generate(PROMPT.to_vec()).cache(cache).config(wanted(n)).steps().unwrap();
    steps.filter_map(|step| step.unwrap().tokens[0]).collect()
}
