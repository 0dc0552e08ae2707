//! The engine on a model that remembers nothing but the tokens, so that every mistake changes the next token.
#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::{
    collections::HashMap,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
};

use kiln_core::{
    Error, batch::Batch, model::CausalModel, model::TokenId, model_cache::ModelCache, read_back,
};

use super::{Engine, Event, RequestId, Share};
use crate::{
    GenerationConfig, Options,
    generation::{
        Generation,
        tests::fake::{self, Hashing, cache},
    },
};

/// Prompts, settings and caches of one kind each.
fn requests() -> Vec<(Vec<TokenId>, Options)> {
    let config = |prompt: &[TokenId], config: GenerationConfig| {
        (prompt.to_vec(), Options { settings: config.resolve().unwrap(), ..Options::default() })
    };
    let new = GenerationConfig::new;
    let sampled = |seed| new().do_sample(true).temperature(3.0).top_k(0).seed(seed);
    let (long, long_options) = config(&[2; 40], new().max_new_tokens(9));
    let (repeating, repeating_options) = config(&[4, 1, 4, 1], sampled(3).max_new_tokens(25));
    let (ahead, ahead_options) = config(&[6, 6, 1], new().max_new_tokens(12));
    vec![
        config(&[3, 1, 4, 1, 5], new().max_new_tokens(12)),
        config(&[9], sampled(7).max_new_tokens(20)),
        config(&[2, 6], new().repetition_penalty(1.5).max_new_tokens(1)),
        (long, Options { prefill_chunk: Some(7), ..long_options }),
        config(&[5, 3], sampled(8).num_return_sequences(3).max_new_tokens(6)),
        config(&[5, 8], new().num_beams(3).max_new_tokens(7)),
        (ahead, Options { lookahead: true, ..ahead_options }),
        config(&[7, 7], new().penalty_alpha(0.6).top_k(4).max_new_tokens(5)),
        config(&[1, 2, 1, 2], new().prompt_lookup_num_tokens(3).max_new_tokens(15)),
        config(&[8, 2], new().guidance_scale(2.0).max_new_tokens(6)),
        (repeating, Options { lookup_drafts: Some(5), ..repeating_options }),
        config(&[4], sampled(9).eos_token_id(vec![11]).max_new_tokens(30)),
    ]
}

fn generation(
    model: &Arc<dyn CausalModel>,
    cache: ModelCache,
    prompt: &[TokenId],
    options: &Options,
) -> Generation<'static> {
    let rows = vec![prompt.to_vec()];
    let batch = Batch::from_rows(&rows, &fake::device()).unwrap();
    Generation::new(model.clone(), cache, batch, rows, options.clone()).unwrap()
}

/// The tokens of all rows at the end.
fn tokens(generation: &Generation<'_>) -> Vec<Vec<TokenId>> {
    (0..).map_while(|row| generation.tokens(row).map(<[_]>::to_vec)).collect()
}

fn alone(prompt: &[TokenId], options: &Options) -> Vec<Vec<TokenId>> {
    let mut generation = generation(&Hashing::default().shared(), cache::keeps(), prompt, options);
    generation.by_ref().for_each(|step| drop(step.unwrap()));
    tokens(&generation)
}

/// The outcome of the requests to an engine.
#[derive(Default)]
struct Outcome {
    ended: HashMap<RequestId, Vec<Vec<TokenId>>>,
    failed: HashMap<RequestId, Error>,
    /// Number of steps of each.
    steps: HashMap<RequestId, usize>,
}

impl Outcome {
    fn take(&mut self, events: Vec<Event<Generation<'static>>>) {
        for event in events {
            match event {
                Event::Output(id, _) => *self.steps.entry(id).or_default() += 1,
                Event::Ended(id, generation) => {
                    assert_eq!(self.steps[&id], generation.generated(), "a step was lost, or told twice");
                    assert!(self.ended.insert(id, tokens(&generation)).is_none());
                }
                Event::Failed(id, _, error) => _ = self.failed.insert(id, error),
            }
        }
    }

    fn run(&mut self, engine: &mut Engine<Generation<'static>>) {
        while !engine.is_idle() {
            self.take(read_back::block_on(engine.step()));
        }
    }
}

/// A generation drafts tokens while it is alone, and shares passes once there are others. It drafts again
/// when they have ended.
#[test]
fn drafts_are_made_while_nothing_else_is_computed() {
    let with = |drafts: Option<usize>, new: usize| {
        let config = GenerationConfig::new().max_new_tokens(new);
        Options { settings: config.resolve().unwrap(), lookup_drafts: drafts, ..Options::default() }
    };
    let prompt = [1, 2, 1, 2];
    let wanted = alone(&prompt, &with(None, 60));
    let shared = Hashing::default().shared();
    let mut engine = Engine::new(shared.clone(), 4).unwrap();
    let request = |options: &Options| generation(&shared, cache::keeps(), &prompt, options);
    let mut outcome = Outcome::default();
    let drafting = engine.submit(request(&with(Some(4), 60))).unwrap();
    let proposed = |engine: &mut Engine<Generation<'static>>| {
        let apart = engine.apart.iter_mut().find_map(|apart| match &mut apart.turn {
            super::Turn::Between(job) => Some(job.own.stats().proposed),
            _ => None,
        });
        (apart, engine.together.jobs())
    };
    for _ in 0..8 {
        outcome.take(read_back::block_on(engine.step()));
    }
    let (before, together) = proposed(&mut engine);
    assert!(before.is_some_and(|before| before > 0) && together == 0, "{before:?}, {together}");
    engine.submit(request(&with(None, 10))).unwrap();
    for _ in 0..8 {
        outcome.take(read_back::block_on(engine.step()));
    }
    assert_eq!(proposed(&mut engine), (None, 2), "both share passes");
    outcome.run(&mut engine);
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    assert_eq!(outcome.ended[&drafting], wanted);
}

/// Such drafts may change tokens, so they must not depend on what else runs.
#[test]
fn drafts_that_the_settings_ask_for_are_made_beside_others_too() {
    let shared = Hashing::default().shared();
    let mut engine = Engine::new(shared.clone(), 4).unwrap();
    let mut outcome = Outcome::default();
    let config = || GenerationConfig::new().max_new_tokens(30);
    for config in [config().prompt_lookup_num_tokens(4), config()] {
        let options = Options { settings: config.resolve().unwrap(), ..Options::default() };
        engine.submit(generation(&shared, cache::keeps(), &[1, 2, 1, 2], &options)).unwrap();
    }
    for _ in 0..8 {
        outcome.take(read_back::block_on(engine.step()));
        assert!(engine.together.jobs() < 2);
    }
    assert_eq!((engine.apart.len(), engine.together.jobs()), (1, 1));
}

#[test]
fn generations_in_an_engine_give_the_tokens_that_they_give_alone() {
    for rows in [1, 2, 5, 16] {
        // All at once, or one in each turn or two.
        for turns in [0, 1, 2] {
            let model = Hashing::default();
            let shared = model.shared();
            let mut engine = Engine::new(shared.clone(), rows).unwrap();
            let mut outcome = Outcome::default();
            let mut wanted = Vec::new();
            for (prompt, options) in requests() {
                let generation = generation(&shared, cache::keeps(), &prompt, &options);
                wanted.push((engine.submit(generation).unwrap(), alone(&prompt, &options)));
                for _ in 0..turns {
                    outcome.take(read_back::block_on(engine.step()));
                }
            }
            outcome.run(&mut engine);
            assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
            for (id, wanted) in wanted {
                assert_eq!(outcome.ended[&id], wanted, "{id:?} in {rows} rows, after {turns} turns");
            }
        }
    }
}

#[test]
fn users_take_turns_and_their_own_requests_go_by_priority() {
    let shared = Hashing::default().shared();
    let (_, options) = &requests()[0];
    let mut engine = Engine::new(shared.clone(), 1).unwrap();
    let mut submit = |user, priority| {
        let generation = generation(&shared, cache::keeps(), &[3, 1], options);
        engine.submit_for(generation, Share { user, priority }).unwrap()
    };
    let of_first: Vec<RequestId> = (0..4).map(|_| submit(1, 0)).collect();
    let urgent = submit(1, -1);
    let of_second = submit(2, 9);
    let mut order = Vec::new();
    while !engine.is_idle() {
        for event in read_back::block_on(engine.step()) {
            if let Event::Ended(id, _) = event {
                order.push(id);
            }
        }
    }
    // The urgent one begins, as all wait when the first turn comes. Then the second user is next.
    assert_eq!(order[..3], [urgent, of_second, of_first[0]]);
    assert_eq!(order[3..], of_first[1..]);
}

#[test]
fn rows_of_an_engine_share_forward_passes() {
    let model = Hashing::default();
    let shared = model.shared();
    let mut engine = Engine::new(shared.clone(), 4).unwrap();
    let (_, options) = &requests()[0];
    for first in 0..4 {
        engine.submit(generation(&shared, cache::keeps(), &[first, 3], options)).unwrap();
    }
    Outcome::default().run(&mut engine);
    // A prompt each, one a turn. The last one's rows are there for the last 11 passes.
    assert!(model.fed().len() <= 4 + 11 + 3, "{} passes", model.fed().len());
}

#[test]
fn generations_with_different_caches_give_the_same_tokens_as_alone() {
    let model = Hashing::default().shared();
    let mut engine = Engine::new(model.clone(), 4).unwrap();
    let mut outcome = Outcome::default();
    let (prompt, options) = &requests()[0];
    let ids = [cache::forgets(), cache::keeps(), cache::cannot_truncate()]
        .map(|cache| engine.submit(generation(&model, cache, prompt, options)).unwrap());
    outcome.run(&mut engine);
    assert!(ids.iter().all(|id| outcome.ended[id] == alone(prompt, options)));
}

#[test]
fn a_cancelled_generation_does_not_change_the_others() {
    for turn in 0..12 {
        for cancelled in 0..requests().len() {
            let model = Hashing::default().shared();
            let mut engine = Engine::new(model.clone(), 6).unwrap();
            let mut outcome = Outcome::default();
            let submit = |(prompt, options): (Vec<TokenId>, Options)| {
                (
                    engine.submit(generation(&model, cache::keeps(), &prompt, &options)).unwrap(),
                    prompt,
                    options,
                )
            };
            let all: Vec<_> = requests().into_iter().map(submit).collect();
            for _ in 0..turn {
                outcome.take(read_back::block_on(engine.step()));
            }
            engine.cancel(all[cancelled].0);
            assert!(engine.cancel(all[cancelled].0).is_none(), "it is gone");
            outcome.run(&mut engine);
            assert_eq!(engine.running_rows(), 0);
            for (at, (id, prompt, options)) in all.iter().enumerate().filter(|(at, _)| *at != cancelled) {
                assert_eq!(outcome.ended[id], alone(prompt, options), "{at}, {cancelled} was cancelled");
            }
        }
    }
}

#[test]
fn a_dropped_step_of_the_engine_changes_no_token() {
    // A future that is polled so often, then dropped.
    for polls in 1..4 {
        let model = Hashing::default().shared();
        let mut engine = Engine::new(model.clone(), 6).unwrap();
        let mut outcome = Outcome::default();
        let mut all = Vec::new();
        for (prompt, options) in requests() {
            all.push((
                engine.submit(generation(&model, cache::keeps(), &prompt, &options)).unwrap(),
                prompt,
                options,
            ));
            let mut step = pin!(engine.step());
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..polls {
                if let std::task::Poll::Ready(events) = step.as_mut().poll(&mut context) {
                    outcome.take(events);
                    break;
                }
            }
        }
        outcome.run(&mut engine);
        for (id, prompt, options) in &all {
            assert_eq!(
                outcome.ended.get(id),
                Some(&alone(prompt, options)),
                "{polls} polls, {:?}",
                outcome.failed
            );
        }
    }
}

/// Rows that cannot be trusted: of a turn that was given up between a pass and the last of its reads.
#[test]
fn rows_that_are_lost_at_any_turn_change_no_token() {
    for turn in 0..25 {
        let model = Hashing::default().shared();
        let mut engine = Engine::new(model.clone(), 6).unwrap();
        let mut outcome = Outcome::default();
        let submit = |(prompt, options): (Vec<TokenId>, Options)| {
            (engine.submit(generation(&model, cache::keeps(), &prompt, &options)).unwrap(), prompt, options)
        };
        let all: Vec<_> = requests().into_iter().map(submit).collect();
        for _ in 0..turn {
            outcome.take(read_back::block_on(engine.step()));
        }
        // Several times, so that rows that were computed again are lost, too.
        for _ in 0..5 {
            engine.together.in_pass = !engine.together.is_empty();
            outcome.take(read_back::block_on(engine.step()));
            outcome.take(read_back::block_on(engine.step()));
        }
        outcome.run(&mut engine);
        for (id, prompt, options) in &all {
            let got = outcome.ended.get(id);
            assert_eq!(got, Some(&alone(prompt, options)), "lost at turn {turn}, {:?}", outcome.failed);
        }
    }
}

#[test]
fn a_failed_pass_ends_only_its_own_generations() {
    for fails_at in 0..20 {
        let model = Hashing { fails_at: Some(fails_at), ..Hashing::default() };
        let shared = model.shared();
        let mut engine = Engine::new(shared.clone(), 3).unwrap();
        let mut outcome = Outcome::default();
        let (_, options) = &requests()[0];
        let prompts: Vec<Vec<TokenId>> = (0..5).map(|first| vec![first, 3]).collect();
        let submit = |prompt: &Vec<TokenId>| {
            (engine.submit(generation(&shared, cache::keeps(), prompt, options)).unwrap(), prompt.clone())
        };
        let all: Vec<_> = prompts.iter().map(submit).collect();
        outcome.run(&mut engine);
        assert!((1..=3).contains(&outcome.failed.len()), "{fails_at}: {:?}", outcome.failed);
        for (id, prompt) in all {
            match outcome.failed.get(&id) {
                Some(error) => assert!(matches!(error.cause(), Error::Execution(_)), "{error}"),
                None => assert_eq!(outcome.ended[&id], alone(&prompt, options), "pass {fails_at} failed"),
            }
        }
    }
}

#[test]
fn engines_without_rows_and_generations_of_other_models_are_errors() {
    let model = Hashing::default().shared();
    assert!(matches!(
        Engine::<Generation<'static>>::new(model.clone(), 0),
        Err(Error::Setting { name: "rows", .. })
    ));
    let mut engine = Engine::new(model, 1).unwrap();
    let (prompt, options) = &requests()[0];
    let other = generation(&Hashing::default().shared(), cache::keeps(), prompt, options);
    assert!(matches!(engine.submit(other), Err(Error::Setting { name: "submit", .. })));
    assert!(engine.is_idle());
    assert!(read_back::block_on(engine.step()).is_empty(), "there is nothing to do");
}
