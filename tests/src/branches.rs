//! One prompt that serves many continuations: it is held once, and each is as if it were alone.

use burn::tensor::Device;
use kiln::{
    GenerationConfig, LoadOptions, Model, Offload, Plan, RandomLlama, RunOptions, Sequence, TokenId,
    device::Opened,
};

use crate::support::{TINY, alone, assert_close, is_alone};

/// Longer than what is copied rather than shared, and than what a workgroup of attention goes over.
const PROMPT: usize = 700;

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn text(n: usize, salt: usize) -> Vec<TokenId> {
    (0..n).map(|i| (i * i * 7 + i * 3 + salt * 31) as TokenId % 97).collect()
}

/// Tokens and logits of `n` steps that follow `ids`.
fn go_on(
    model: &Model,
    sequence: &mut Sequence,
    ids: &[TokenId],
    n: usize,
    options: RunOptions,
) -> (Vec<TokenId>, Vec<f32>, usize) {
    let wanted = GenerationConfig {
        max_new_tokens: Some(n),
        do_sample: Some(false),
        eos_token_id: Some(Vec::new()),
        ..GenerationConfig::default()
    };
    let steps = model.continue_from(sequence, vec![ids.to_vec()], &wanted, options).unwrap();
    let fed = steps.reuse().fed;
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    for step in steps {
        let step = step.unwrap();
        tokens.extend(step.tokens[0]);
        logits.extend(step.logits.into_iter().flatten().flatten());
    }
    (tokens, logits, fed)
}

/// Each branch gives the logits of a text that was fed alone, and, captured and launched, the same tokens.
#[test]
fn branches_say_what_they_say_alone() {
    for (device, opened) in devices() {
        let model = Model::random(&TINY, LoadOptions::float32(opened.clone())).unwrap();
        for (cache, offload) in [("dynamic", None), ("dynamic", Some(Offload::All)), ("fixed:len=2000", None)]
        {
            let plan = Plan { offload, ..Plan::named(cache).unwrap() };
            let run = |sequence: &mut Sequence, ids: &[TokenId], compile: bool, keep_logits: bool| {
                let options = RunOptions { compile: Some(compile), keep_logits, ..RunOptions::default() };
                go_on(&model, sequence, ids, 12, options)
            };
            let prompt = text(PROMPT, 0);
            let mut trunk = Sequence::new(&model, &plan).unwrap();
            run(&mut trunk, &prompt, false, false);
            // From the prompt, from a branch of it, and from within what both share.
            let mut branches: Vec<(Sequence, Vec<TokenId>)> = Vec::new();
            for (from, keep, more) in [(0, PROMPT, 3), (0, PROMPT, 300), (2, PROMPT + 300, 5), (2, 500, 40)] {
                let (sequence, ids) = match from {
                    0 => (trunk.snapshot(), prompt.clone()),
                    n => (branches[n - 1].0.snapshot(), branches[n - 1].1.clone()),
                };
                branches.push((sequence, [&ids[..keep], &text(more, branches.len() + 1)].concat()));
                let (sequence, ids) = branches.last_mut().unwrap();
                let what = format!("{cache}, offloaded {offload:?}, on {device}, branch of {more} at {keep}");
                let (_, logits, fed) = run(sequence, ids, false, true);
                assert_eq!(fed, more, "{what}");
                let (tokens, want, _) = run(&mut Sequence::new(&model, &plan).unwrap(), ids, false, true);
                assert_close(&logits, &want, &what);
                for compile in [false, true] {
                    let mut twig = sequence.snapshot();
                    assert_eq!(run(&mut twig, ids, compile, false).0, tokens, "{what}, captured: {compile}");
                }
            }
            // What branched from it left it as it was.
            let (tokens, ..) = run(&mut trunk, &prompt, true, false);
            let (want, ..) = run(&mut Sequence::new(&model, &plan).unwrap(), &prompt, true, false);
            assert_eq!(tokens, want, "{cache}, offloaded {offload:?}, on {device}");
        }
    }
}

/// Counted, and measured where the device says what is in use.
#[test]
fn a_prompt_is_held_once() {
    // In a process of its own: what other tests allocate would be counted.
    if !is_alone() {
        alone("branches::a_prompt_is_held_once", None);
        return;
    }
    const BRANCHES: usize = 8;
    let sizes = RandomLlama { hidden: 256, ..TINY };
    for (device, opened) in devices() {
        let model = Model::random(&sizes, LoadOptions::float32(opened.clone())).unwrap();
        let memory = |trunk: &Sequence, branches: &[Sequence]| {
            let counted: usize =
                branches.iter().chain([trunk]).map(|sequence| sequence.cache().device_bytes()).sum();
            (counted, in_use(&opened.device))
        };
        let plan = Plan::named("dynamic").unwrap();
        let mut trunk = Sequence::new(&model, &plan).unwrap();
        let prompt = text(2000, 0);
        go_on(&model, &mut trunk, &prompt, 1, RunOptions::default());
        let one = memory(&trunk, &[]);
        let branches: Vec<Sequence> = (0..BRANCHES)
            .map(|n| {
                let mut branch = trunk.snapshot();
                let ids = [&prompt[..], &text(20, n + 1)].concat();
                let (_, _, fed) = go_on(&model, &mut branch, &ids, 20, RunOptions::default());
                assert_eq!(fed, 20);
                branch
            })
            .collect();
        let all = memory(&trunk, &branches);
        println!(
            "{device}: {one:?} bytes for a prompt of 2,000 tokens, {all:?} with {BRANCHES} branches of 40"
        );
        let room = one.0 + one.0 / 4;
        assert!(all.0 > one.0 && all.0 < room, "{device}: {} bytes beside {}", all.0, one.0);
        if let (Some(one_used), Some(all_used)) = (one.1, all.1) {
            let more = all_used.saturating_sub(one_used);
            assert!(more < one.0 as u64 / 2, "{device}: {more} bytes more are in use beside {}", one.0);
        }
        // Who is left alone counts all of it.
        drop(branches);
        assert_eq!(memory(&trunk, &[]).0, one.0, "{device}");
    }
}

/// Bytes that tensors have, once what was launched is done.
fn in_use(device: &Device) -> Option<u64> {
    device.sync().unwrap();
    device.memory_pool_usage().map(|usage| usage.bytes_in_use)
}
