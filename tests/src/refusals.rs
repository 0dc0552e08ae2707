//! Allocations refused by the system or a device, tested in separate processes with a memory limit.

use std::process::Command;

use burn::tensor::Device;
use kiln::{
    EXACT_ROWS, Error, Event, GenerationConfig, Model, ModelBuilder, OnOutOfMemory, Plan, Request, RequestId,
    Result, TokenId,
    device::Opened,
    expert::{DolaLayers, ModelCache, memory::DeviceState, read_back},
};

use crate::support::{Llama, alone, float32, is_alone, recorded};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Returns the size in KiB of the address space of this process.
fn addresses() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Limits the address space of this process to `more` KiB above the present size. Kernels must be compiled
/// before: the compiler of software Vulkan crashes when it runs out of memory.
fn limit(opened: &Opened, more: u64) {
    opened.device.memory_cleanup();
    opened.device.sync().unwrap();
    let bytes = (addresses() + more) * 1024;
    let limited = Command::new("prlimit")
        .args([format!("--pid={}", std::process::id()), format!("--as={bytes}")])
        .status();
    assert!(limited.unwrap().success());
}

fn generate(
    model: &Model,
    cache: &mut ModelCache,
    prompt: &[TokenId],
    n: usize,
    run: impl FnOnce(Request<'_>) -> Request<'_>,
) -> Result<Vec<TokenId>> {
    let wanted = GenerationConfig::new().max_new_tokens(n).eos_token_id(Vec::new());
    let steps = run(model.generate(prompt.to_vec()).cache(cache).config(wanted)).steps()?;
    steps.map(|step| Ok(step?.tokens[0].unwrap())).collect()
}

/// 128 MiB of keys and values per layer for a row of 32,768 tokens, in a model that computes little.
const LARGE_CACHE: Llama =
    Llama { layers: 8, hidden: 512, heads: 8, kv_heads: 8, intermediate: 64, vocab: 97 };

/// 128 MiB for the gate and up activations of 2,048 tokens, which are computed by one product.
const LARGE_ACTIVATIONS: Llama =
    Llama { layers: 1, hidden: 16, heads: 1, kv_heads: 1, intermediate: 8192, vocab: 97 };

const MIB: u64 = 1 << 10;

fn numbers(n: usize) -> Vec<TokenId> {
    (0..n).map(|i| (i * 7 % 97) as TokenId).collect()
}

fn is_out_of_memory<T: std::fmt::Debug>(result: Result<T>) -> bool {
    match result {
        Err(Error::OutOfMemory { .. }) => true,
        other => panic!("{other:?}"),
    }
}

/// A cache of one gigabyte in 600 MiB: an error, or a packed cache; both the model and the cache remain
/// usable.
#[test]
fn a_cache_that_cannot_be_allocated_is_an_error_or_quantized() {
    if !is_alone() {
        return devices().for_each(|(device, _)| {
            alone("refusals::a_cache_that_cannot_be_allocated_is_an_error_or_quantized", Some(device))
        });
    }
    let (_, opened) = devices().next().unwrap();
    let model = float32(ModelBuilder::random(LARGE_CACHE.config()), opened).load().unwrap();
    let run = |cache: &mut ModelCache, on_oom| {
        generate(&model, cache, &numbers(5), 8, |request| request.on_oom(on_oom))
    };
    let cache = |name: &str| model.cache(&Plan::named(name).unwrap()).unwrap();
    let (large, fail) = ("static:len=32768", OnOutOfMemory::Fail);
    let [want, packed] = ["dynamic", "quantized"].map(|name| run(&mut cache(name), fail).unwrap());
    assert_eq!(run(&mut cache(large), fail).unwrap(), want);

    limit(opened, 600 * MIB);
    let mut refused = cache(large);
    assert!(is_out_of_memory(run(&mut refused, fail)));
    assert_eq!(refused.seq_len(), 0);
    assert!(is_out_of_memory(run(&mut refused, fail)), "it is as large as it was");
    // On a software device, host memory is limited as well.
    assert!(is_out_of_memory(run(&mut cache(large), OnOutOfMemory::Offload)));
    assert_eq!(run(&mut cache("dynamic"), fail).unwrap(), want);
    assert_eq!(run(&mut cache(large), OnOutOfMemory::Quantize).unwrap(), packed);
}

/// A prompt whose activations are refused is fed in smaller chunks.
#[test]
fn a_prompt_that_needs_too_much_memory_is_fed_in_smaller_chunks() {
    if !is_alone() {
        return devices().for_each(|(device, _)| {
            alone("refusals::a_prompt_that_needs_too_much_memory_is_fed_in_smaller_chunks", Some(device))
        });
    }
    let (_, opened) = devices().next().unwrap();
    let model = float32(ModelBuilder::random(LARGE_ACTIVATIONS.config()), opened).load().unwrap();
    let run = |on_oom, chunk| {
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        generate(&model, &mut cache, &numbers(2048), 2, |request| request.on_oom(on_oom).prefill_chunk(chunk))
    };
    // In chunks of the size used after a refusal, and at once.
    let want = run(OnOutOfMemory::Fail, 128).unwrap();
    run(OnOutOfMemory::Fail, 2048).unwrap();

    limit(opened, 100 * MIB);
    assert!(is_out_of_memory(run(OnOutOfMemory::Fail, 2048)));
    assert_eq!(run(OnOutOfMemory::Offload, 2048).unwrap(), want);
}

/// A device may refuse an allocation at any time: the tokens are fed again to a cache in host memory, and the
/// generated tokens do not change.
#[test]
fn a_failed_allocation_at_any_token_changes_no_token() {
    if is_alone() {
        return devices().for_each(|(_, opened)| refuse_at_any_token(opened));
    }
    // Runs in a separate process, because the refusal would affect other tests.
    alone("refusals::a_failed_allocation_at_any_token_changes_no_token", None);
}

fn refuse_at_any_token(opened: &Opened) {
    // The device need not exist.
    let another = Device::cuda(99);
    let one = vec![numbers(20)];
    let padded = vec![vec![3, 1, 4, 1, 5, 9, 2], vec![8, 9]];
    for (name, text, rows, looks_up) in [
        ("llama", "dynamic", &one, false),
        ("llama", "static:len=64", &padded, false),
        ("mistral", "sliding", &padded, false),
        ("gemma2", "hybrid", &one, false),
        ("llama", "sink:window=16,sinks=2", &one, false),
        ("llama", "quantized", &one, false),
        ("llama", "none", &padded, false),
        ("llama", "dynamic", &one, true),
        ("llama", "static:len=64", &padded, true),
    ] {
        let model = recorded(name, opened);
        let plain = || GenerationConfig::new().max_new_tokens(8).do_sample(false).eos_token_id(Vec::new());
        for (mode, mut wanted) in [
            ("greedy", plain()),
            ("sampled", plain().do_sample(true).seed(7)),
            ("guided", plain().guidance_scale(2.5)),
            ("contrasted", plain().dola_layers(DolaLayers::These(vec![0, 1]))),
            ("compared", plain().penalty_alpha(0.6).top_k(4)),
            ("searched", plain().num_beams(3)),
        ] {
            let has_no_proposals = ["guided", "contrasted", "compared", "searched"].contains(&mode);
            if looks_up && has_no_proposals
                || mode != "greedy" && !["dynamic", "static:len=64"].contains(&text)
            {
                continue;
            }
            wanted.prompt_lookup_num_tokens = looks_up.then_some(3);
            // A device refuses an allocation before the `n`th step.
            let run = |refusing: Option<(usize, &Device)>, on_oom| {
                let mut cache = model.cache(&Plan::named(text).unwrap()).unwrap();
                let mut steps = model
                    .generate(rows.clone())
                    .cache(&mut cache)
                    .config(wanted.clone())
                    .on_oom(on_oom)
                    .steps()?;
                let mut tokens = Vec::new();
                for i in 0.. {
                    if let Some((_, device)) = refusing.filter(|(n, _)| *n == i) {
                        DeviceState::of(device).report_refusal();
                    }
                    match steps.next() {
                        Some(step) => tokens.push(step?.tokens),
                        None => break,
                    }
                }
                drop(steps);
                Ok::<_, Error>((tokens, cache.seq_len(), cache.host_bytes() > 0))
            };
            let (want, len, _) = run(None, OnOutOfMemory::Fail).unwrap();
            for n in 0..8 {
                let what = format!("{name}, {text}, {mode}, looks up {looks_up}, step {n}");
                match run(Some((n, model.device())), OnOutOfMemory::Offload) {
                    Ok(got) => assert_eq!(got, (want.clone(), len, true), "{what}"),
                    Err(Error::OutOfMemory { .. }) => assert_eq!(text, "none", "{what}: was to go on"),
                    Err(other) => panic!("{what}: {other}"),
                }
                if mode != "greedy" {
                    continue;
                }
                let elsewhere = run(Some((n, &another)), OnOutOfMemory::Fail);
                assert_eq!(
                    elsewhere.unwrap(),
                    (want.clone(), len, false),
                    "{what}: another device's refusal"
                );
                let refused = run(Some((n, model.device())), OnOutOfMemory::Fail);
                assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{what}: {refused:?}");
            }
        }
    }
}

/// Requests that share passes are computed again, and their tokens do not change.
#[test]
fn a_failed_allocation_at_any_turn_of_an_engine_changes_no_token() {
    if !is_alone() {
        return alone("refusals::a_failed_allocation_at_any_turn_of_an_engine_changes_no_token", None);
    }
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let requests = || {
            let plans = ["dynamic", "static:len=64", "sink:window=16,sinks=2", "quantized", "dynamic"];
            plans.into_iter().enumerate().map(|(n, plan)| {
                let config = GenerationConfig::new().max_new_tokens(8).eos_token_id(Vec::new());
                let config = config.do_sample(n % 2 == 1).seed(n as u64);
                let request = model.generate(vec![numbers(20 - 3 * n)]).config(config);
                request.plan(Plan::named(plan).unwrap()).steps().unwrap()
            })
        };
        let want: Vec<Vec<_>> =
            requests().map(|steps| steps.map(|step| step.unwrap().tokens).collect()).collect();
        for turn in 0..14 {
            let mut engine = model.engine(EXACT_ROWS).unwrap();
            let ids: Vec<RequestId> = requests().map(|steps| engine.submit(steps).unwrap()).collect();
            let mut got = vec![Vec::new(); ids.len()];
            for n in 0.. {
                if engine.is_idle() {
                    break;
                }
                if n == turn {
                    DeviceState::of(model.device()).report_refusal();
                }
                for event in read_back::block_on(engine.step()) {
                    match event {
                        Event::Output(id, step) => {
                            let of = ids.iter().position(|own| *own == id).unwrap();
                            got[of].push(step.tokens);
                        }
                        Event::Ended(..) => {}
                        Event::Failed(id, _, error) => panic!("{id:?}, turn {turn} on {device}: {error}"),
                    }
                }
            }
            assert_eq!(got, want, "turn {turn} on {device}");
        }
    }
}
