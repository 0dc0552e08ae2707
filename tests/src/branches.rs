//! One prompt with many continuations: it is stored once, and each continuation gives the result that it
//! gives alone.

use burn::tensor::Device;
use kiln::{
    Completion, Error, Model, ModelBuilder, Offload, OnOutOfMemory, Plan, Request, Sequence, TokenId,
    device::Opened,
    expert::{Logits, ModelCache, offload_all},
};

use crate::support::{
    Llama, TINY, alone, assert_close, batch, float32, forward, greedy, is_alone, recorded, some_on,
};

/// Longer than a prefix that is copied rather than shared, and than the part that one attention workgroup
/// reads.
const PROMPT: usize = 700;

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn text(n: usize, salt: usize) -> Vec<TokenId> {
    (0..n).map(|i| (i * i * 7 + i * 3 + salt * 31) as TokenId % 97).collect()
}

/// Generates `n` steps after `ids`. Returns the tokens and logits, and the number of tokens that were fed.
fn go_on(
    model: &Model,
    sequence: &mut Sequence,
    ids: &[TokenId],
    n: usize,
    run: impl FnOnce(Request<'_>) -> Request<'_>,
) -> (Vec<TokenId>, Vec<f32>, usize) {
    let steps = run(model.generate(ids).sequence(sequence).config(greedy(n))).steps().unwrap();
    let fed = steps.reuse().fed;
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    for step in steps {
        let step = step.unwrap();
        tokens.extend(step.tokens[0]);
        logits.extend(step.logits.into_iter().flatten().flatten());
    }
    (tokens, logits, fed)
}

/// Each branch gives the logits of a text that was fed alone, and the same tokens whether steps are captured
/// or launched.
#[test]
fn branches_give_the_logits_and_tokens_of_a_text_fed_alone() {
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
        for (cache, offload) in
            [("dynamic", None), ("dynamic", Some(Offload::All)), ("static:len=2000", None)]
        {
            let plan = Plan { offload, ..Plan::named(cache).unwrap() };
            let run = |sequence: &mut Sequence, ids: &[TokenId], compile: bool, keep_logits: bool| {
                go_on(&model, sequence, ids, 12, |request| request.compile(compile).keep_logits(keep_logits))
            };
            let prompt = text(PROMPT, 0);
            let mut trunk = Sequence::new(&model, &plan).unwrap();
            run(&mut trunk, &prompt, false, false);
            // From the prompt, from a branch, and from within the part that both share.
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
                // Fewer tokens are fed if the sequence already holds some of the following ones.
                assert!(fed <= more, "{what}: {fed}");
                let (tokens, want, _) = run(&mut Sequence::new(&model, &plan).unwrap(), ids, false, true);
                assert_close(&logits, &want, &what);
                for compile in [false, true] {
                    let mut twig = sequence.snapshot();
                    assert_eq!(run(&mut twig, ids, compile, false).0, tokens, "{what}, captured: {compile}");
                }
            }
            // Branching did not change the trunk.
            let (tokens, ..) = run(&mut trunk, &prompt, true, false);
            let (want, ..) = run(&mut Sequence::new(&model, &plan).unwrap(), &prompt, true, false);
            assert_eq!(tokens, want, "{cache}, offloaded {offload:?}, on {device}");
        }
    }
}

/// Rolls back to the start of a branch and beyond it, on the device and moved to the host in between.
#[test]
fn a_branch_can_be_truncated_to_its_start_and_beyond() {
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
        let feed =
            |cache: &mut ModelCache, ids: &[TokenId]| forward(&model, &batch(&model, &[ids.to_vec()]), cache);
        let new = || model.cache(&Plan::dynamic()).unwrap();
        let (prompt, more) = (text(PROMPT, 0), text(300, 1));
        for back in [0, 1, 300, 350] {
            for moves in [false, true] {
                let mut trunk = new();
                feed(&mut trunk, &prompt);
                let mut branch = trunk.snapshot();
                feed(&mut branch, &more);
                feed(&mut trunk, &more[..5]);
                if moves {
                    offload_all(&mut branch).unwrap();
                }
                branch.truncate(branch.seq_len() - back).unwrap();
                let ids = [&prompt[..], &more].concat();
                let ids = [&ids[..ids.len() - back], &text(20, 2)].concat();
                let (start, what) = (ids.len() - 20, format!("{back} back on {device}, moved: {moves}"));
                let got = [feed(&mut branch, &ids[start..start + 1]), feed(&mut branch, &ids[start + 1..])];
                let all = feed(&mut new(), &ids);
                assert_close(&got.concat(), &all[all.len() - 20 * TINY.vocab..], &what);
                // The shared part is unchanged.
                let got = feed(&mut trunk, &more[5..7]);
                let all = feed(&mut new(), &[&prompt[..], &more[..7]].concat());
                assert_close(&got, &all[all.len() - 2 * TINY.vocab..], &what);
            }
        }
    }
}

/// Takes snapshots at any step of a generation, also while steps are captured or replayed.
#[test]
fn a_snapshot_in_the_middle_of_a_generation_changes_nothing() {
    const STEPS: usize = 24;
    for (device, opened) in devices() {
        for (name, cache, prompt) in [
            ("llama", "dynamic", 7),
            ("llama", "static", 7),
            ("mistral", "dynamic", 20),
            ("llama", "quantized:group=8,residual=40", 7),
        ] {
            let model = recorded(name, opened);
            let new = || model.cache(&Plan::named(cache).unwrap()).unwrap();
            let prompt = text(prompt, 0);
            let run = |at: Option<usize>| {
                let (mut cache, mut snapshot) = (new(), None);
                let wanted = greedy(STEPS);
                let mut steps =
                    model.generate(prompt.clone()).cache(&mut cache).config(wanted.clone()).steps().unwrap();
                let mut tokens = prompt.clone();
                for step in 0.. {
                    if at == Some(step) {
                        snapshot = Some(steps.cache().snapshot());
                    }
                    let Some(step) = steps.next() else { break };
                    tokens.extend(step.unwrap().tokens[0]);
                }
                (tokens, snapshot)
            };
            let (tokens, _) = run(None);
            for at in some_on(device, 1..12) {
                let what = format!("{cache} of {name} on {device}, a snapshot before step {at}");
                let (same, snapshot) = run(Some(at));
                assert_eq!(same, tokens, "{what}");
                // The snapshot does not contain the later tokens.
                let (mut snapshot, mut alone) = (snapshot.unwrap(), new());
                let held = snapshot.seq_len();
                forward(&model, &batch(&model, &[tokens[..prompt.len()].to_vec()]), &mut alone);
                for &token in &tokens[prompt.len()..held] {
                    forward(&model, &batch(&model, &[vec![token]]), &mut alone);
                }
                let next = batch(&model, &[vec![5]]);
                assert_close(
                    &forward(&model, &next, &mut snapshot),
                    &forward(&model, &next, &mut alone),
                    &what,
                );
            }
        }
    }
}

/// Beams continue in buffers that a snapshot also holds: short ones are copied, and long ones become a chain.
#[test]
fn a_snapshot_in_the_middle_of_a_beam_search_changes_nothing() {
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
        // With 250 tokens, a buffer of all rows becomes part of a chain with the generated tokens.
        for (cache, prompt) in [("dynamic", 7), ("dynamic", 250), ("dynamic", 300), ("static", 7)] {
            let run = |at: Option<usize>| {
                let mut snapshot = None;
                let request = model.generate(text(prompt, 0)).plan(Plan::named(cache).unwrap());
                let request = request.config(greedy(24)).num_beams(3).num_return_sequences(3);
                let mut steps = request.steps().unwrap();
                for step in 0.. {
                    if at == Some(step) {
                        snapshot = Some(steps.cache().snapshot());
                    }
                    let Some(step) = steps.next() else { break };
                    step.unwrap();
                }
                drop(snapshot);
                let completions = steps.completions().unwrap().into_iter().flatten();
                completions.map(|one| (one.tokens, one.beam_indices)).collect::<Vec<_>>()
            };
            let want = run(None);
            for at in [1, 5, 12] {
                assert_eq!(run(Some(at)), want, "{cache} on {device}, {prompt} tokens, before step {at}");
            }
        }
    }
}

/// Bytes are counted, claimed, and measured if the device reports its memory usage.
#[test]
fn branches_hold_their_prompt_in_memory_once() {
    // Runs in a separate process: the allocations of other tests would be counted.
    if !is_alone() {
        alone("branches::branches_hold_their_prompt_in_memory_once", None);
        return;
    }
    const BRANCHES: usize = 8;
    fn fail(request: Request<'_>) -> Request<'_> {
        request.on_oom(OnOutOfMemory::Fail)
    }
    let sizes = Llama { hidden: 256, ..TINY };
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(sizes.config()), opened).load().unwrap();
        let weights = model.budget().used();
        let mut trunk = Sequence::new(&model, &Plan::dynamic()).unwrap();
        let prompt = text(2000, 0);
        go_on(&model, &mut trunk, &prompt, 1, fail);
        let one = trunk.cache().device_bytes();
        assert_eq!((trunk.cache().shared_bytes(), model.budget().used() - weights), (0, one as u64));
        let used = in_use(&opened.device);

        // Room for half a prompt, which a buffer of its layers may need to grow, and for the working memory
        // of a pass.
        let working = model.causal().working_bytes(1, 20);
        model.budget().set_limit(Some(weights + (one + one / 2 + working) as u64));
        let mut branches: Vec<Sequence> = (0..BRANCHES).map(|_| trunk.snapshot()).collect();
        for (n, branch) in branches.iter_mut().enumerate() {
            let ids = [&prompt[..], &text(20, n + 1)].concat();
            assert_eq!(go_on(&model, branch, &ids, 20, fail).2, 20);
        }
        let own: usize = branches.iter().map(|branch| branch.cache().device_bytes() - one).sum();
        println!("{device}: {one} bytes for a prompt of 2,000 tokens, {own} for {BRANCHES} branches of 40");
        assert!(own > 0 && own < one / 4, "{device}: {own} bytes beside {one}");
        assert!(branches.iter().all(|branch| branch.cache().shared_bytes() == one), "{device}");
        assert_eq!(model.budget().used() - weights, (one + own) as u64, "{device}");
        if let (Some(before), Some(after)) = (used, in_use(&opened.device)) {
            let more = after.saturating_sub(before);
            println!("{device}: {more} bytes more are in use");
            assert!(more < one as u64 / 4, "{device}: {more} bytes more are in use beside {one}");
        }

        // The remaining branches count the prompt.
        drop(trunk);
        let left = branches.split_off(BRANCHES - 1);
        drop(branches);
        let cache = left[0].cache();
        assert_eq!((cache.shared_bytes(), cache.device_bytes()), (0, one + own / BRANCHES), "{device}");
        assert_eq!(model.budget().used() - weights, cache.device_bytes() as u64, "{device}");
        drop(left);
        assert_eq!(model.budget().used(), weights, "{device}");
    }
}

/// A prefix too short to be shared is copied by the branch that is fed, and the copy is claimed first.
#[test]
fn branches_copy_short_prompts_and_claim_their_memory() {
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
        let budget = model.budget();
        let weights = budget.used();
        let new = || model.cache(&Plan::dynamic()).unwrap();
        let ids = |n| batch(&model, &[text(n, 0)]);
        let feed = |cache: &mut ModelCache, n| model.causal().forward(&ids(n), Logits::Last, cache).map(drop);
        let claimed = |caches: &[&ModelCache]| {
            let bytes: usize = caches.iter().map(|cache| cache.device_bytes()).sum();
            assert_eq!(budget.used() - weights, bytes as u64, "{device}");
        };

        let mut trunk = new();
        feed(&mut trunk, 100).unwrap();
        let mut branch = trunk.snapshot();
        let one = trunk.device_bytes();
        assert_eq!((trunk.shared_bytes(), branch.shared_bytes()), (one, one));
        // Not enough memory for a second copy.
        budget.set_limit(Some(weights + (one + model.causal().working_bytes(1, 1) + one / 2) as u64));
        for cache in [&mut branch, &mut trunk] {
            assert!(matches!(feed(cache, 1), Err(Error::OutOfMemory { .. })), "{device}");
            assert_eq!(cache.seq_len(), 100);
        }
        assert_eq!(budget.used() - weights, one as u64, "{device}: nothing was changed");
        // A single owner needs no copy.
        drop(branch);
        feed(&mut trunk, 1).unwrap();
        claimed(&[&trunk]);
        budget.set_limit(None);
        let mut branch = trunk.snapshot();
        feed(&mut branch, 1).unwrap();
        feed(&mut trunk, 1).unwrap();
        claimed(&[&trunk, &branch]);

        // A loaded cache is claimed, so that it can be shared.
        feed(&mut trunk, PROMPT).unwrap();
        let mut loaded = new();
        loaded.restore(trunk.save().unwrap()).unwrap();
        claimed(&[&trunk, &branch, &loaded]);
        let held = loaded.device_bytes();
        let mut branches: Vec<ModelCache> = (0..3).map(|_| loaded.snapshot()).collect();
        branches.iter_mut().for_each(|branch| feed(branch, 1).unwrap());
        let own: usize = branches.iter().map(|branch| branch.device_bytes() - held).sum();
        let all = trunk.device_bytes() + branch.device_bytes() + held + own;
        assert_eq!(budget.used() - weights, all as u64, "{device}");
        // A claim ends when its data is moved to the host.
        drop(branches);
        offload_all(&mut loaded).unwrap();
        feed(&mut loaded, 1).unwrap();
        drop((trunk, branch));
        loaded.recount();
        claimed(&[&loaded]);
        drop(loaded);
        assert_eq!(budget.used(), weights, "{device}");
    }
}

/// Returns the bytes in use by tensors, after all launched work has finished.
fn in_use(device: &Device) -> Option<u64> {
    device.sync().unwrap();
    device.memory_pool_usage().map(|usage| usage.bytes_in_use)
}

/// The prompt of any number of beams is stored once. The beams are the same as with a cache that copies it.
#[test]
fn beams_hold_their_prompt_in_memory_once() {
    let tokens = |all: &[Vec<Completion>]| -> Vec<Vec<TokenId>> {
        all.iter().flatten().map(|completion| completion.tokens.clone()).collect()
    };
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
        let run = |plan: &Plan, beams: usize, salts: &[usize]| {
            let prompts: Vec<_> = salts.iter().map(|&salt| text(PROMPT, salt)).collect();
            let request = model.generate(prompts).config(greedy(9)).num_beams(beams).plan(plan.clone());
            let mut steps = request.steps().unwrap();
            steps.try_for_each(|step| step.map(drop)).unwrap();
            (tokens(&steps.completions().unwrap()), steps.cache().device_bytes())
        };
        let (_, alone) = run(&Plan::dynamic(), 1, &[0]);
        let (many, bytes) = run(&Plan::dynamic(), 8, &[0]);
        assert!(bytes < alone * 3 / 2, "on {device}: {bytes} bytes, {alone} for one row");
        let (copied, _) = run(&Plan::named("static").unwrap(), 8, &[0]);
        assert_eq!(many, copied, "on {device}");
        // With several prompts, each is stored once.
        let (two, bytes) = run(&Plan::dynamic(), 8, &[0, 1]);
        assert!(bytes < alone * 3, "on {device}: {bytes} bytes, {alone} for one row of one prompt");
        let (copied, _) = run(&Plan::named("static").unwrap(), 8, &[0, 1]);
        assert_eq!((&two, &two[..1]), (&copied, &many[..]), "on {device}");
    }
}
