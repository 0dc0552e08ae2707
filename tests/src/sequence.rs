//! Sequences: a continuation gives the tokens of a new generation, and only new tokens are fed.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use burn::tensor::Tensor;
use kiln::{
    Error, GenerationConfig, Model, Plan, Result, Reuse, Sequence, TokenId,
    expert::{
        KvFactory, STRATEGIES,
        kernels::Kernels,
        memory::{
            AttentionNeed, Kv, KvLayer, KvPolicy, KvView, LayerNeed, Memory, Policy, Positions, Progress,
            Slot,
        },
    },
};
use kiln_testkit::devices;

use crate::support::{greedy, recorded};

const PROMPT: [TokenId; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 5];

/// Generates tokens after `rows`. Returns them by row, with the numbers of reused and fed tokens.
fn go_on(
    model: &Model,
    sequence: &mut Sequence,
    rows: &[Vec<TokenId>],
    wanted: &GenerationConfig,
) -> (Vec<Vec<TokenId>>, Reuse) {
    let steps = model.generate(rows.to_vec()).sequence(sequence).config(wanted.clone()).steps().unwrap();
    let reuse = steps.reuse();
    let mut out = vec![Vec::new(); rows.len()];
    for step in steps {
        for (out, token) in out.iter_mut().zip(step.unwrap().tokens) {
            out.extend(token);
        }
    }
    (out, reuse)
}

/// Runs [`go_on`] from an empty cache.
fn anew(model: &Model, plan: &Plan, rows: &[Vec<TokenId>], wanted: &GenerationConfig) -> Vec<Vec<TokenId>> {
    go_on(model, &mut Sequence::new(model, plan).unwrap(), rows, wanted).0
}

/// Further settings, with windows and capacities that these sequences exceed.
const MORE: [&str; 3] = ["sink:window=6,sinks=2", "sink:window=200,sinks=4", "static:len=256"];

/// Tests every cache on every device, with models without windows and, on one device, with one that has
/// windows.
fn everywhere(mut test: impl FnMut(&Model, &Plan, &str)) {
    for (place, (device, opened)) in devices::opened().iter().enumerate() {
        for name in ["llama", "mamba", "mistral"].into_iter().take(if place == 0 { 3 } else { 2 }) {
            let model = recorded(name, opened);
            for text in STRATEGIES.iter().map(|strategy| strategy.name).chain(MORE) {
                let plan = Plan::named(text).unwrap();
                if plan.check(&model.causal().needs()).is_ok() {
                    test(&model, &plan, &format!("{text} of {name} on {device}"));
                }
            }
        }
    }
}

fn counts(Reuse { reused, fed, forgotten, reset, .. }: Reuse) -> (usize, usize, usize, bool) {
    (reused, fed, forgotten, reset)
}

fn one(ids: &[TokenId]) -> Vec<Vec<TokenId>> {
    vec![ids.to_vec()]
}

#[test]
fn a_second_turn_feeds_only_new_tokens() {
    everywhere(|model, plan, what| {
        let mut sequence = Sequence::new(model, plan).unwrap();
        let (first, reuse) = go_on(model, &mut sequence, &one(&PROMPT), &greedy(6));
        assert_eq!(counts(reuse), (0, PROMPT.len(), 0, false), "{what}");
        let said = [&PROMPT[..], &first[0]].concat();
        // The last token was generated but not fed.
        let held = if plan.remembers(&model.causal().needs()) { said.len() - 1 } else { 0 };
        assert_eq!((sequence.len(), sequence.ids()), (held, vec![&said[..held]]), "{what}");

        let whole = [&said[..], &[8, 9, 7, 9]].concat();
        let (second, reuse) = go_on(model, &mut sequence, &one(&whole), &greedy(6));
        let fed = whole.len() - held;
        assert_eq!(counts(reuse), (held, fed, 0, false), "{what}");
        if plan.is_exact(&model.causal().needs()) {
            assert_eq!(second, anew(model, plan, &one(&whole), &greedy(6)), "{what}");
        }
    });
}

#[test]
fn tokens_after_the_common_prefix_are_forgotten() {
    everywhere(|model, plan, what| {
        let mut sequence = Sequence::new(model, plan).unwrap();
        let (first, _) = go_on(model, &mut sequence, &one(&PROMPT), &greedy(6));
        let said = [&PROMPT[..], &first[0]].concat();
        for (common, whole) in [
            (7, [&PROMPT[..7], &[50, 51, 52, 53]].concat()),
            // The same again, and a shorter text: at least one token must be fed.
            (10, said[..11].to_vec()),
            (8, PROMPT.to_vec()),
            (0, vec![60, 61, 62]),
        ] {
            let mut sequence = Sequence::new(model, plan).unwrap();
            go_on(model, &mut sequence, &one(&PROMPT), &greedy(6));
            let held = sequence.len();
            let (got, reuse) = go_on(model, &mut sequence, &one(&whole), &greedy(5));
            assert_eq!(reuse.reused + reuse.fed, whole.len(), "{what}");
            assert_eq!(reuse.reused + reuse.forgotten, held, "{what}");
            let could = plan.remembers(&model.causal().needs()) && !reuse.reset;
            assert_eq!(reuse.reused, if could { common } else { 0 }, "{what}: {whole:?}");
            if plan.is_exact(&model.causal().needs()) {
                assert_eq!(got, anew(model, plan, &one(&whole), &greedy(5)), "{what}: {whole:?}");
            }
        }
    });
}

#[test]
fn a_generation_may_be_dropped_at_any_step() {
    everywhere(|model, plan, what| {
        for taken in [0, 1, 4] {
            let mut sequence = Sequence::new(model, plan).unwrap();
            let steps = model.generate(one(&PROMPT)).sequence(&mut sequence).config(greedy(9)).steps();
            let tokens: Vec<TokenId> =
                steps.unwrap().take(taken).flat_map(|step| step.unwrap().tokens[0]).collect();
            let said = [&PROMPT[..], &tokens].concat();
            let held =
                if taken == 0 || !plan.remembers(&model.causal().needs()) { 0 } else { said.len() - 1 };
            assert_eq!(
                (sequence.len(), sequence.ids()),
                (held, vec![&said[..held]]),
                "{what}, {taken} steps"
            );

            let whole = [&said[..], &[8, 9]].concat();
            let (got, reuse) = go_on(model, &mut sequence, &one(&whole), &greedy(5));
            assert_eq!((reuse.reused, reuse.fed), (held, whole.len() - held), "{what}, {taken} steps");
            if plan.is_exact(&model.causal().needs()) {
                assert_eq!(got, anew(model, plan, &one(&whole), &greedy(5)), "{what}, {taken} steps");
            }
        }
    });
}

/// Hidden states of cached tokens are not stored.
#[test]
fn contrastive_search_starts_over_and_leaves_a_cache_to_continue_from() {
    let contrastive = greedy(9).penalty_alpha(0.6).top_k(4);
    everywhere(|model, plan, what| {
        let prompts = match plan.is_exact(&model.causal().needs()) {
            true => vec![PROMPT.to_vec(), vec![7, 8]],
            false => one(&PROMPT),
        };
        let remembers = plan.remembers(&model.causal().needs());
        let said = anew(model, plan, &prompts, &contrastive);
        for taken in [0, 1, 9] {
            let mut sequence = Sequence::new(model, plan).unwrap();
            go_on(model, &mut sequence, &prompts, &greedy(3));
            let held = sequence.ids().concat().len();
            let steps = model.generate(prompts.clone()).sequence(&mut sequence).config(contrastive.clone());
            let mut steps = steps.steps().unwrap();
            let fed = prompts.concat().len();
            assert_eq!(counts(steps.reuse()), (0, fed, held, false), "{what}, {taken} steps");
            for (i, step) in steps.by_ref().take(taken).enumerate() {
                let want: Vec<_> = said.iter().map(|row| Some(row[i])).collect();
                assert_eq!(step.unwrap().tokens, want, "{what}, token {i}");
            }
            drop(steps);
            let longest = if taken == 0 || !remembers { 0 } else { PROMPT.len() + taken - 1 };
            assert_eq!(sequence.len(), longest, "{what}, {taken} steps");
            let rows: Vec<Vec<TokenId>> = prompts
                .iter()
                .zip(&said)
                .map(|(prompt, said)| [prompt, &said[..taken], &[20, 21]].concat())
                .collect();
            let (got, reuse) = go_on(model, &mut sequence, &rows, &greedy(5));
            assert_eq!(reuse.reused > 0, remembers && taken > 0, "{what}, {taken} steps");
            if plan.is_exact(&model.causal().needs()) {
                assert_eq!(got, anew(model, plan, &rows, &greedy(5)), "{what}, {taken} steps");
            }
        }
    });
}

#[test]
fn a_strict_continuation_reports_the_common_length() {
    everywhere(|model, plan, what| {
        let mut sequence = Sequence::new(model, plan).unwrap();
        let (first, _) = go_on(model, &mut sequence, &one(&PROMPT), &greedy(4));
        let said = [&PROMPT[..], &first[0]].concat();
        let held = sequence.len();
        let strictly = |ids: &[TokenId]| sequence.check_continued_by(&one(ids));
        if plan.remembers(&model.causal().needs()) {
            let other = [&PROMPT[..5], &[70, 71, 72]].concat();
            assert_eq!(strictly(&other), Err(Error::NotAContinuation { common: 5, held }), "{what}");
            // Nothing is new: a cached token would have to be fed again.
            let same = Err(Error::NotAContinuation { common: held - 1, held });
            assert_eq!(strictly(&said[..held]), same, "{what}");
        }
        assert_eq!(strictly(&said), Ok(()), "{what}");
    });
}

#[test]
fn padded_rows_are_continued_together() {
    everywhere(|model, plan, what| {
        // Rows of different lengths cannot share sinks.
        if !plan.is_exact(&model.causal().needs()) {
            return;
        }
        let prompts = vec![PROMPT.to_vec(), vec![7, 8], vec![2, 7, 1, 8, 2]];
        let mut sequence = Sequence::new(model, plan).unwrap();
        let (first, _) = go_on(model, &mut sequence, &prompts, &greedy(5));
        let after = |more: [&[TokenId]; 3]| -> Vec<Vec<TokenId>> {
            prompts.iter().zip(&first).zip(more).map(|((p, f), more)| [p, &f[..], more].concat()).collect()
        };
        let whole = after([&[20, 21, 22], &[30, 31, 32], &[40, 41, 42]]);
        let (got, reuse) = go_on(model, &mut sequence, &whole, &greedy(5));
        if plan.remembers(&model.causal().needs()) {
            // The last token and three new ones of each row.
            assert_eq!((reuse.fed, reuse.reset), (3 * 4, false), "{what}");
        }
        if plan.is_exact(&model.causal().needs()) {
            assert_eq!(got, anew(model, plan, &whole, &greedy(5)), "{what}");
        }
        // Rows that grew by different lengths keep their padding and their common prefix.
        let uneven = after([&[20], &[30, 31, 32, 33, 34], &[]]);
        let (got, reuse) = go_on(model, &mut sequence, &uneven, &greedy(5));
        assert_eq!(reuse.reused + reuse.fed, uneven.iter().map(Vec::len).sum::<usize>(), "{what}");
        let sees_all = |need: &LayerNeed| need.attention.as_ref().is_some_and(|need| need.window.is_none());
        let keeps_all = ["dynamic", "static"].contains(&plan.global.strategy.name);
        if keeps_all && model.causal().needs().iter().all(sees_all) {
            // The last token of each row, and the two tokens that differ.
            assert_eq!((reuse.fed, reuse.reset), (2 + 2, false), "{what}");
        }
        if plan.is_exact(&model.causal().needs()) {
            assert_eq!(got, anew(model, plan, &uneven, &greedy(5)), "{what}");
        }
        // Rows other than the cached ones.
        let (got, _) = go_on(model, &mut sequence, &one(&whole[1]), &greedy(5));
        if plan.is_exact(&model.causal().needs()) {
            assert_eq!(got, anew(model, plan, &one(&whole[1]), &greedy(5)), "{what}");
        }
    });
}

/// A row that has ended is fed arbitrary tokens. They are in the cache, but not in its ids.
#[test]
fn tokens_fed_after_the_end_of_a_row_are_not_reused() {
    everywhere(|model, plan, what| {
        // Rows of different lengths cannot share sinks.
        if !plan.is_exact(&model.causal().needs()) {
            return;
        }
        let prompts = vec![PROMPT.to_vec(), vec![7, 8]];
        let free = anew(model, plan, &prompts, &greedy(8));
        let end = free[0][2];
        let wanted = greedy(8).eos_token_id(vec![end]);
        let mut sequence = Sequence::new(model, plan).unwrap();
        let (first, _) = go_on(model, &mut sequence, &prompts, &wanted);
        assert!(first[0].len() < first[1].len(), "{first:?}");
        let ids = sequence.ids();
        if plan.remembers(&model.causal().needs()) {
            assert_eq!(ids[0], [&prompts[0][..], &first[0]].concat(), "{what}");
        }
        // Both rows have the length that was fed, the first with the tokens that it would have had without
        // ending.
        let whole: Vec<Vec<TokenId>> =
            prompts.iter().zip(&free).map(|(p, f)| [&p[..], f, &[5]].concat()).collect();
        let (got, _) = go_on(model, &mut sequence, &whole, &greedy(4));
        if plan.is_exact(&model.causal().needs()) {
            assert_eq!(got, anew(model, plan, &whole, &greedy(4)), "{what}");
        }
    });
}

#[test]
fn impossible_continuations_are_errors_and_change_nothing() {
    let (_, opened) = &devices::opened()[0];
    let model = recorded("llama", opened);
    let mut sequence = Sequence::new(&model, &Plan::dynamic()).unwrap();
    let (first, _) = go_on(&model, &mut sequence, &one(&PROMPT), &greedy(3));
    let said = [&PROMPT[..], &first[0]].concat();
    let mut refused = |rows: Vec<Vec<TokenId>>, wanted: &GenerationConfig| {
        model
            .generate(rows)
            .sequence(&mut sequence)
            .config(wanted.clone())
            .steps()
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert!(refused(vec![], &greedy(1)).contains("empty"));
    assert!(refused(vec![vec![]], &greedy(1)).contains("empty"));
    assert!(refused(one(&[&said[..], &[97]].concat()), &greedy(1)).contains("vocabulary"));
    let positions = model.sizes().positions;
    assert!(refused(vec![vec![1; positions]], &greedy(1)).contains(&format!("{positions} positions")));
    let wrong = greedy(1).temperature(-1.0).do_sample(true);
    assert!(refused(one(&said), &wrong).contains("temperature"));
    assert_eq!(sequence.ids(), [&said[..said.len() - 1]]);
}

/// A test strategy that keeps everything but lacks some operations.
#[derive(Clone, Debug)]
struct Lacks {
    /// Granularity of truncation in tokens; 0 if the cache cannot be truncated.
    grain: usize,
    /// Makes the next update fail once.
    fails: &'static AtomicBool,
}

impl KvFactory for Lacks {
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element) * tokens
    }

    fn build(&self, _need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        Ok(Box::new(Memory::new(self.clone(), kernels.device())))
    }
}

/// Creates a plan that uses only the test strategy.
fn lacking(grain: usize, fails: &'static AtomicBool) -> Plan {
    let mut plan = Plan::dynamic().windowed(Plan::dynamic());
    plan.global.factory = Arc::new(Lacks { grain, fails });
    plan.windowed.factory = plan.global.factory.clone();
    plan
}

impl Policy for Lacks {
    const NAME: &'static str = "lacks";
    type Counts = ();
    type Tensors = Slot<Kv>;

    fn rewind_point(&self, at: &Progress<()>, at_most: usize) -> Option<usize> {
        match self.grain {
            _ if at_most == at.seq_len => Some(at_most),
            0 => None,
            grain => Some(at_most / grain * grain),
        }
    }

    fn rewind(&self, _: &mut Progress<()>, kv: &mut Slot<Kv>, len: usize) -> Result<()> {
        if let Some((keys, values)) = kv.take()? {
            kv.set((keys.narrow(2, 0, len), values.narrow(2, 0, len)));
        }
        Ok(())
    }

    fn validate(&self, _: &Progress<()>, _: &Slot<Kv>) -> Result<()> {
        Ok(())
    }
}

impl KvPolicy for Lacks {
    fn append(&self, _: &mut Progress<()>, kv: &mut Slot<Kv>, new: Kv, _: &Positions) -> Result<KvView> {
        if self.fails.swap(false, Ordering::Relaxed) {
            return Err(Error::Execution("as asked".into()));
        }
        let (keys, values) = match kv.take()? {
            Some((k, v)) => (Tensor::cat(vec![k, new.0], 2), Tensor::cat(vec![v, new.1], 2)),
            None => new,
        };
        kv.set((keys.clone(), values.clone()));
        Ok(KvView::from_zero(keys, values))
    }

    fn gather(&self, _: &Progress<()>, kv: &Slot<Kv>) -> Result<Option<Kv>> {
        Ok(kv.get()?.cloned())
    }
}

#[test]
fn a_cache_that_cannot_be_truncated_is_filled_again() {
    static NEVER: AtomicBool = AtomicBool::new(false);
    for (name, opened) in devices::opened() {
        let model = recorded("llama", opened);
        let plan = lacking(0, &NEVER);
        let mut sequence = Sequence::new(&model, &plan).unwrap();
        let (first, _) = go_on(&model, &mut sequence, &one(&PROMPT), &greedy(6));
        let said = [&PROMPT[..], &first[0]].concat();
        let held = sequence.len();
        let (_, reuse) = go_on(&model, &mut sequence, &one(&[&said[..], &[8]].concat()), &greedy(3));
        assert_eq!((reuse.reused, reuse.reset), (held, false), "it goes on from what it holds, on {name}");

        let other = [&PROMPT[..5], &[70, 71]].concat();
        let (got, reuse) = go_on(&model, &mut sequence, &one(&other), &greedy(5));
        assert_eq!((reuse.reused, reuse.fed, reuse.reset), (0, 7, true), "on {name}");
        assert_eq!(got, anew(&model, &plan, &one(&other), &greedy(5)), "on {name}");
    }
}

#[test]
fn a_cache_that_truncates_in_steps_forgets_only_what_it_must() {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let (_, opened) = &devices::opened()[0];
    let model = recorded("llama", opened);
    let plan = lacking(4, &NEVER);
    let mut sequence = Sequence::new(&model, &plan).unwrap();
    go_on(&model, &mut sequence, &one(&PROMPT), &greedy(6));
    let other = [&PROMPT[..7], &[70, 71]].concat();
    let (got, reuse) = go_on(&model, &mut sequence, &one(&other), &greedy(5));
    assert_eq!((reuse.reused, reuse.fed, reuse.reset), (4, 5, false), "of 7 tokens in common");
    assert_eq!(got, anew(&model, &plan, &one(&other), &greedy(5)));
}

#[test]
fn after_a_failed_step_all_tokens_are_fed_again() {
    static NOW: AtomicBool = AtomicBool::new(false);
    let (_, opened) = &devices::opened()[0];
    let model = recorded("llama", opened);
    let plan = lacking(1, &NOW);
    let mut sequence = Sequence::new(&model, &plan).unwrap();
    let mut steps = model.generate(one(&PROMPT)).sequence(&mut sequence).config(greedy(6)).steps().unwrap();
    let mut tokens = Vec::new();
    for _ in 0..2 {
        tokens.extend(steps.next().unwrap().unwrap().tokens[0]);
    }
    NOW.store(true, Ordering::Relaxed);
    assert!(steps.by_ref().any(|step| step.is_err()), "it fails");
    assert!(steps.next().is_none(), "and that is the last of it");
    drop(steps);
    assert!(sequence.is_empty());
    let whole = [&PROMPT[..], &tokens, &[8]].concat();
    let (got, reuse) = go_on(&model, &mut sequence, &one(&whole), &greedy(5));
    assert_eq!((reuse.reused, reuse.fed), (0, whole.len()));
    assert_eq!(got, anew(&model, &plan, &one(&whole), &greedy(5)));
}
