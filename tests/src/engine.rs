//! Requests that share passes: each gives what it gives alone, with every cache, on every device.

use std::{
    collections::HashMap,
    pin::pin,
    task::{Context, Poll, Waker},
};

use kiln::{
    EXACT_ROWS, Engine, Error, Event, GeneratedText, Generating, GenerationConfig, Grammar, Model, Plan,
    Request, RequestId, Steps, StopReason, TokenId, expert::read_back::block_on,
};

use crate::{
    laws::plans_on,
    requests::demos,
    support::{greedy, recorded, some_on},
};

/// The outputs of all requests, and how each ended.
struct Outcome<T: Generating> {
    outputs: HashMap<RequestId, Vec<T::Output>>,
    ended: HashMap<RequestId, T>,
    failed: HashMap<RequestId, Error>,
    turns: usize,
}

fn run<T: Generating>(engine: &mut Engine<T>) -> Outcome<T> {
    let mut outcome =
        Outcome { outputs: HashMap::new(), ended: HashMap::new(), failed: HashMap::new(), turns: 0 };
    while !engine.is_idle() {
        for event in block_on(engine.step()) {
            match event {
                Event::Output(id, output) => outcome.outputs.entry(id).or_default().push(output),
                Event::Ended(id, own) => assert!(outcome.ended.insert(id, own).is_none()),
                Event::Failed(id, _, error) => assert!(outcome.failed.insert(id, error).is_none()),
            }
        }
        outcome.turns += 1;
    }
    outcome
}

/// Prompts of different lengths, and settings that differ.
fn request(model: &Model, n: usize) -> Request<'static> {
    let len = [9, 3, 26, 14, 1, 40][n % 6].min(model.sizes().positions / 2);
    let prompt: Vec<TokenId> = (0..len as TokenId).map(|i| (7 * i + 13 * n as TokenId + 3) % 97).collect();
    let drawn = || GenerationConfig::new().do_sample(true).temperature(1.3).seed(n as u64);
    let config = match n % 6 {
        0 => greedy(12),
        1 => drawn().top_k(20).max_new_tokens(9),
        2 => greedy(5).repetition_penalty(1.4),
        3 => drawn().top_p(0.9).max_new_tokens(14),
        4 => drawn().num_return_sequences(2).max_new_tokens(6),
        _ => greedy(8).no_repeat_ngram_size(2),
    };
    model.generate(vec![prompt]).config(config.eos_token_id(Vec::new()))
}

/// Tokens, and the bits of the logits that they were chosen by where these are kept.
type Chosen = Vec<(Vec<Option<TokenId>>, Vec<Vec<u32>>)>;

fn chosen(steps: impl IntoIterator<Item = kiln::Step>) -> Chosen {
    let bits = |row: Vec<f32>| row.into_iter().map(f32::to_bits).collect();
    let step =
        |step: kiln::Step| (step.tokens, step.logits.unwrap_or_default().into_iter().map(bits).collect());
    steps.into_iter().map(step).collect()
}

#[test]
fn requests_in_an_engine_equal_those_alone_bit_for_bit() {
    for (place, (device, opened)) in kiln_testkit::devices::opened().iter().enumerate() {
        for name in ["llama", "jamba", "gemma2", "mistral"].into_iter().take(if place == 0 { 4 } else { 2 }) {
            let model = recorded(name, opened);
            let all: Vec<_> = plans_on(place, &model).map(|(_, plan, _)| plan).collect();
            // Logits are read by the host; without them the device chooses where it can.
            for keep_logits in [true, false] {
                // Each strategy alone (on the first device), and all beside each other.
                let mixed = (0..all.len()).map(|n| all[n].clone()).collect();
                let uniform = all.iter().filter(|_| place == 0).map(|plan| vec![plan.clone(); 4]);
                for plans in uniform.chain([mixed]) {
                    let request = |n: usize, plan: &Plan| {
                        request(&model, n).plan(plan.clone()).keep_logits(keep_logits).steps().unwrap()
                    };
                    let mut engine: Engine<Steps<'static>> = model.engine(6).unwrap();
                    let ids: Vec<RequestId> = plans
                        .iter()
                        .enumerate()
                        .map(|(n, plan)| engine.submit(request(n, plan)).unwrap())
                        .collect();
                    let mut outcome = run(&mut engine);
                    assert!(outcome.failed.is_empty(), "{name} on {device}: {:?}", outcome.failed);
                    for (n, (id, plan)) in ids.iter().zip(&plans).enumerate() {
                        let alone = chosen(request(n, plan).map(Result::unwrap));
                        let got = chosen(outcome.outputs.remove(id).unwrap());
                        let plan = plan.label(&model.causal().needs());
                        assert!(got == alone, "request {n}, {plan} of {name} on {device}");
                    }
                }
            }
        }
    }
}

#[test]
fn prompts_that_begin_with_the_cache_of_another_one_keep_their_bits() {
    const CHUNK: usize = 8;
    for (place, (device, opened)) in kiln_testkit::devices::opened().iter().enumerate() {
        for name in ["llama", "jamba", "gemma2", "mistral"].into_iter().take(if place == 0 { 4 } else { 2 }) {
            let model = recorded(name, opened);
            for (_, plan, _) in some_on(device, plans_on(place, &model)) {
                // Some begin alike for 3 chunks, some for more, and one is the beginning of another.
                let request = |n: usize| {
                    let len = [30, 33, 30, 17, 46, 46, 25, 8][n].min(model.sizes().positions - 7);
                    let token = |i: usize| if i < 26 + n % 3 { 7 * i + 3 } else { 5 * i + 13 * n };
                    let prompt: Vec<TokenId> = (0..len).map(|i| token(i) as TokenId % 97).collect();
                    let request = model.generate(vec![prompt]).config(greedy(6).eos_token_id(Vec::new()));
                    request.plan(plan.clone()).prefill_chunk(CHUNK).keep_logits(true)
                };
                let mut engine: Engine<Steps<'static>> = model.engine(4).unwrap().with_prefixes(1 << 20);
                let what = || format!("{} of {name} on {device}", plan.label(&model.causal().needs()));
                let mut reused = 0;
                // One after the other, then all at once.
                for round in [vec![0, 1, 2, 0], vec![3, 4, 5, 6, 7, 1, 2]] {
                    let all: Vec<_> = round
                        .iter()
                        .map(|&n| {
                            let steps = request(n).prefix_scope("a user").steps().unwrap();
                            let id = engine.submit(steps).unwrap();
                            (n, id, (round.len() == 4).then(|| run(&mut engine)))
                        })
                        .collect();
                    let mut rest = run(&mut engine);
                    for (n, id, own) in all {
                        let outcome = own.as_ref().map_or(&rest, |own| own);
                        assert!(outcome.failed.is_empty(), "{}: {:?}", what(), outcome.failed);
                        let stats = outcome.ended[&id].stats();
                        assert_eq!(stats.reused % CHUNK, 0);
                        reused += stats.reused;
                        let alone = chosen(request(n).steps().unwrap().map(Result::unwrap));
                        let mut own = own;
                        let got = own.as_mut().unwrap_or(&mut rest).outputs.remove(&id).unwrap();
                        assert!(
                            chosen(got) == alone,
                            "prompt {n}, {} tokens reused, {}",
                            stats.reused,
                            what()
                        );
                    }
                }
                let other = engine.submit(request(0).prefix_scope("another user").steps().unwrap()).unwrap();
                assert_eq!(run(&mut engine).ended[&other].stats().reused, 0);
                let remembers = plan.remembers(&model.causal().needs());
                assert_eq!(reused > 0, remembers, "{}", what());
                assert_eq!(engine.prefix_bytes() > 0, remembers, "{}", what());
            }
        }
    }
}

#[test]
fn texts_in_an_engine_equal_those_alone_with_their_stop_reasons() {
    for (device, model) in demos() {
        let date = || Grammar::regex("[0-9]{4}-[0-9]{2}").unwrap();
        let draw = |prompt: &str| model.generate(prompt).max_new_tokens(24).temperature(1.2).seed(5);
        let requests = || -> Vec<Request<'static>> {
            vec![
                draw("The Constitution"),
                draw("ROMEO:").config(GenerationConfig::new().stop_strings(vec!["e".into()])),
                draw("The date is ").grammar(date()),
                draw("JULIET").num_beams(3).temperature(0.0),
                draw("The date: ").grammar(date()).temperature(0.0),
                draw("The").config(GenerationConfig::new().prompt_lookup_num_tokens(3)).temperature(0.0),
                draw("And").stop_when(|row| row.ids.len() == 9),
                draw("A text that goes on after the others").max_new_tokens(60),
            ]
        };
        let mut engine: Engine<GeneratedText<'static>> = model.engine(EXACT_ROWS).unwrap();
        let ids: Vec<RequestId> =
            requests().into_iter().map(|request| engine.submit(request.stream().unwrap()).unwrap()).collect();
        let outcome = run(&mut engine);
        let mut reasons = Vec::new();
        for (id, request) in ids.iter().zip(requests()) {
            let mut alone = request.stream().unwrap();
            let text: String = alone.by_ref().map(Result::unwrap).collect();
            let got: String = outcome.outputs[id].iter().map(|piece| piece.text.as_str()).collect();
            assert_eq!(got, text, "{id:?} on {device}");
            assert_eq!(outcome.ended[id].stop_reason(), alone.stop_reason(), "{id:?} on {device}");
            reasons.extend(alone.stop_reason());
        }
        assert!(
            reasons.contains(&StopReason::StopString) && reasons.contains(&StopReason::Length),
            "{reasons:?}"
        );
        // 60 tokens of the longest, after the prompts before it.
        assert!(outcome.turns < 60 + 2 * ids.len(), "{} turns", outcome.turns);
    }
}

/// Memory runs out at any allocation: no token changes, and no request fails that others can make room for.
#[test]
fn a_failed_allocation_changes_no_token() {
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        let plans = ["dynamic", "sink:window=6,sinks=2", "static:len=60", "quantized:nbits=4", "offloaded"];
        let requests = || {
            plans.iter().enumerate().map(|(n, plan)| {
                let request = request(&model, n).plan(Plan::named(plan).unwrap());
                request.steps().unwrap()
            })
        };
        let alone: Vec<Chosen> = requests().map(|steps| chosen(steps.map(Result::unwrap))).collect();
        for at in [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144] {
            let mut engine: Engine<Steps<'static>> = model.engine(EXACT_ROWS).unwrap();
            let ids: Vec<RequestId> = requests().map(|steps| engine.submit(steps).unwrap()).collect();
            model.budget().fail_allocation(at);
            let mut outcome = run(&mut engine);
            assert!(outcome.failed.is_empty(), "allocation {at} on {device}: {:?}", outcome.failed);
            for (n, (id, alone)) in ids.iter().zip(&alone).enumerate() {
                let got = chosen(outcome.outputs.remove(id).unwrap());
                assert!(&got == alone, "{}, allocation {at} on {device}", plans[n]);
            }
        }
    }
}

/// Turns whose future is dropped after some polls, on devices whose reads take a while also in a shared pass.
#[test]
fn dropped_turns_change_no_token() {
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        let requests = || (0..6).map(|n| request(&model, n).steps().unwrap());
        let alone: Vec<Chosen> = requests().map(|steps| chosen(steps.map(Result::unwrap))).collect();
        for polls in 1..4 {
            let mut engine: Engine<Steps<'static>> = model.engine(EXACT_ROWS).unwrap();
            let ids: Vec<RequestId> = requests().map(|steps| engine.submit(steps).unwrap()).collect();
            let mut got: HashMap<RequestId, Vec<kiln::Step>> = HashMap::new();
            for turn in 0.. {
                if engine.is_idle() {
                    break;
                }
                let mut events = None;
                if turn % 3 == 0 {
                    let mut step = pin!(engine.step());
                    let mut context = Context::from_waker(Waker::noop());
                    for _ in 0..polls {
                        if let Poll::Ready(ready) = step.as_mut().poll(&mut context) {
                            events = Some(ready);
                            break;
                        }
                    }
                } else {
                    events = Some(block_on(engine.step()));
                }
                for event in events.into_iter().flatten() {
                    match event {
                        Event::Output(id, step) => got.entry(id).or_default().push(step),
                        Event::Ended(..) => {}
                        Event::Failed(id, _, error) => panic!("{id:?}, {polls} polls on {device}: {error}"),
                    }
                }
            }
            for (id, alone) in ids.iter().zip(&alone) {
                let got = chosen(got.remove(id).unwrap());
                assert!(&got == alone, "{id:?}, {polls} polls on {device}");
            }
        }
    }
}

/// A budget that has room for some of the requests at a time.
#[test]
fn requests_wait_for_memory_that_others_hold() {
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        let used = model.budget().used();
        let request =
            |n: usize| request(&model, 6 * n).config(greedy(40).eos_token_id(Vec::new())).steps().unwrap();
        let alone: Vec<Chosen> = (0..5).map(|n| chosen(request(n).map(Result::unwrap))).collect();
        let peak = model.budget().peak() - used;
        for rows in [1, 2, 3] {
            let mut engine: Engine<Steps<'static>> = model.engine(EXACT_ROWS).unwrap();
            let ids: Vec<RequestId> = (0..5).map(|n| engine.submit(request(n)).unwrap()).collect();
            model.budget().set_limit(Some(used + rows * peak + peak / 3));
            let mut outcome = run(&mut engine);
            model.budget().set_limit(None);
            assert!(outcome.failed.is_empty(), "room for {rows} rows on {device}: {:?}", outcome.failed);
            for (id, alone) in ids.iter().zip(&alone) {
                assert!(
                    &chosen(outcome.outputs.remove(id).unwrap()) == alone,
                    "room for {rows} rows on {device}"
                );
            }
            drop(outcome);
            assert_eq!(model.budget().used(), used, "on {device}: what is left holds nothing");
        }
    }
}

#[test]
fn cancelled_requests_release_their_memory() {
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        let used = model.budget().used();
        // Rows of the second kind share buffers, which are held until the last one leaves.
        for (plan, is_apart) in [("sink:window=16,sinks=2", true), ("dynamic", false)] {
            let request = |n: usize| request(&model, 6 * n).plan(Plan::named(plan).unwrap()).steps().unwrap();
            let mut engine: Engine<Steps<'static>> = model.engine(EXACT_ROWS).unwrap();
            let ids: Vec<RequestId> = (0..3).map(|n| engine.submit(request(n)).unwrap()).collect();
            for _ in 0..6 {
                block_on(engine.step());
            }
            let mut held = vec![model.budget().used() - used];
            for id in ids {
                drop(engine.cancel(id));
                held.push(model.budget().used() - used);
            }
            let falls = if is_apart { held.is_sorted_by(|a, b| a > b) } else { held[0] > 0 };
            assert!(falls && held[3] == 0, "{held:?}, {plan} on {device}");
            assert!(engine.is_idle());
        }
    }
}
