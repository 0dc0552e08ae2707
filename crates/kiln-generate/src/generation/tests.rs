//! The loop on a model that remembers nothing but the tokens, so that every mistake changes what comes next.
#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::sync::{Arc, Mutex};

use kiln_core::{Error, batch::Batch, model::TokenId, model_cache::ModelCache};

use self::fake::{Hashing, VOCAB, cache};
use super::{Generation, Options, Step};
use crate::{
    AllowedTokens, GenerationConfig, Processor, RowState, Settings, StopReason, StoppingCriterion, prefill,
};

pub(crate) mod fake;

const PROMPT: [TokenId; 5] = [3, 1, 4, 1, 5];

fn options(config: GenerationConfig) -> Options {
    Options { settings: config.resolve().unwrap(), ..Options::default() }
}

fn greedy(n: usize) -> Options {
    options(GenerationConfig::new().max_new_tokens(n))
}

fn sampled(n: usize, seed: u64) -> Options {
    let config = GenerationConfig::new().do_sample(true).temperature(3.0).top_k(0);
    options(config.max_new_tokens(n).seed(seed))
}

fn run(model: &Hashing, cache: &mut ModelCache, prompts: &[Vec<TokenId>], options: Options) -> Vec<Step> {
    let batch = Batch::left_padded(prompts, 0, &fake::device()).unwrap();
    Generation::new(model.shared(), cache, batch, prompts.to_vec(), options)
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

/// The tokens of `row`, which must be there until it ends and not afterwards.
fn row(steps: &[Step], row: usize) -> Vec<TokenId> {
    let (mut tokens, mut ended) = (Vec::new(), false);
    for step in steps {
        assert_eq!(step.tokens[row].is_none(), ended, "{steps:?}");
        tokens.extend(step.tokens[row]);
        ended = step.finished[row];
    }
    assert!(ended, "{steps:?}");
    tokens
}

fn one(options: Options) -> (Vec<TokenId>, usize) {
    let mut cache = cache::keeps();
    let steps = run(&Hashing::default(), &mut cache, &[PROMPT.to_vec()], options);
    (row(&steps, 0), cache.seq_len())
}

/// The tokens that the model gives without a cache.
fn expected(n: usize) -> Vec<TokenId> {
    let mut ids = PROMPT.to_vec();
    for _ in 0..n {
        ids.push(crate::sampler::greedy(&fake::logits(&ids)).unwrap());
    }
    ids.split_off(PROMPT.len())
}

#[test]
fn lookahead_chunks_and_kept_logits_do_not_change_the_tokens() {
    let want = (expected(12), PROMPT.len() + 11);
    assert_eq!(one(greedy(12)), want);
    assert_eq!(one(Options { lookahead: true, ..greedy(12) }), want);
    assert_eq!(one(Options { keep_logits: true, lookahead: true, ..greedy(12) }), want, "on the host");
    assert_eq!(one(Options { keep_scores: true, ..greedy(12) }), want, "on the host");
    for chunk in 1..=6 {
        assert_eq!(one(Options { prefill_chunk: Some(chunk), ..greedy(12) }), want, "in chunks of {chunk}");
    }
}

#[test]
fn kept_logits_are_of_the_model_and_kept_scores_of_the_processors() {
    let config = GenerationConfig::new().repetition_penalty(5.0).max_new_tokens(6);
    let options = Options { keep_logits: true, keep_scores: true, ..options(config) };
    let processors = options.settings.processors.clone();
    let mut ids = PROMPT.to_vec();
    for step in run(&Hashing::default(), &mut cache::keeps(), &[PROMPT.to_vec()], options) {
        let logits = fake::logits(&ids);
        let mut scores = logits.clone();
        let state =
            RowState { index: 0, ids: &ids, generated: 0, padding: 0, len: ids.len(), remaining: None };
        processors.apply(&state, &mut scores).unwrap();
        let token = crate::sampler::greedy(&scores).unwrap();
        assert_ne!(scores, logits, "the prompt counts");
        assert_eq!(step.tokens, [Some(token)]);
        assert_eq!((step.logits, step.scores), (Some(vec![logits]), Some(vec![scores])));
        ids.push(token);
    }
}

/// The state of a row at each step, as processors see it.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<Seen>>);

/// The row, its prompt, tokens that were generated, the length, and what remains.
type Seen = (usize, Vec<TokenId>, usize, usize, Option<usize>);

impl Processor for Recorder {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let seen = (row.index, row.prompt().to_vec(), row.generated, row.len, row.remaining);
        self.0.lock().unwrap().push(seen);
        assert_eq!(row.ids.len(), row.prompt().len() + row.generated);
        scores[0] = f32::NEG_INFINITY;
    }
}

#[test]
fn processors_get_the_index_tokens_and_lengths_of_a_row() {
    let recorder = Arc::new(Recorder::default());
    let prompts = [PROMPT.to_vec(), vec![7]];
    let mut options = Options { lookahead: true, ..greedy(3) };
    options.settings.add_processor(recorder.clone());
    run(&Hashing::default(), &mut cache::keeps(), &prompts, options);
    let seen = std::mem::take(&mut *recorder.0.lock().unwrap());
    let want = (0..3).flat_map(|step| {
        let padded = [(0, PROMPT.to_vec()), (1, vec![7])];
        padded.map(|(row, prompt)| (row, prompt, step, PROMPT.len() + step, Some(3 - step)))
    });
    assert_eq!(seen, want.collect::<Vec<_>>());
}

#[test]
fn a_row_without_allowed_tokens_is_an_error() {
    let allowed = AllowedTokens::new(|row| match (row.index, row.generated) {
        (1, 2) => vec![],
        (index, _) => vec![index as TokenId + 3],
    });
    let mut options = greedy(5);
    options.settings.add_allowed_tokens(allowed);
    let (model, mut cache) = (Hashing::default(), cache::keeps());
    let prompts = vec![PROMPT.to_vec(), PROMPT.to_vec()];
    let batch = Batch::from_rows(&prompts, &fake::device()).unwrap();
    let steps: Vec<_> =
        Generation::new(model.shared(), &mut cache, batch, prompts, options).unwrap().collect();
    assert_eq!(steps.len(), 3);
    assert!(steps[..2].iter().all(|step| step.as_ref().unwrap().tokens == [Some(3), Some(4)]));
    let said = steps[2].as_ref().unwrap_err().to_string();
    assert!(said.starts_with("allowed_tokens: the list is empty for row 1"), "{said}");
}

#[test]
fn the_stop_reason_of_a_row_is_reported() {
    let want = expected(8);
    let ended = |config: GenerationConfig, criterion: Option<TokenId>| {
        let stopping_criteria =
            criterion.map(|last| StoppingCriterion::new(move |row| row.ids.last() == Some(&last)));
        let options = Options {
            stopping_criteria: stopping_criteria.into_iter().collect(),
            lookahead: true,
            ..options(config)
        };
        let (model, mut cache) = (Hashing::default(), cache::keeps());
        let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
        let mut steps =
            Generation::new(model.shared(), &mut cache, batch, vec![PROMPT.to_vec()], options).unwrap();
        assert_eq!((steps.stop_reason(0), steps.stop_reason(1)), (None, None));
        let n = steps.by_ref().map(Result::unwrap).count();
        let (reason, tokens) = (steps.stop_reason(0).unwrap(), steps.tokens(0).unwrap().to_vec());
        drop(steps);
        assert_eq!((tokens.len(), cache.seq_len()), (PROMPT.len() + n, PROMPT.len() + n - 1));
        (reason, n)
    };
    let at = |token: TokenId| want.iter().position(|&id| id == token).unwrap() + 1;
    let config = || GenerationConfig::new().max_new_tokens(8);
    assert_eq!(ended(config(), None), (StopReason::Length, 8));
    let eos = config().eos_token_id(vec![want[5]]);
    assert_eq!(ended(eos.clone(), None), (StopReason::EndOfText, at(want[5])));
    assert_eq!(
        ended(eos, Some(want[5])),
        (StopReason::EndOfText, at(want[5])),
        "a token that ends goes first"
    );
    assert_eq!(ended(config(), Some(want[3])), (StopReason::Criterion, at(want[3])));
    assert_eq!(ended(config().max_time(1e-9), None), (StopReason::Time, 1));
    assert_eq!(ended(config().max_time(f32::MAX), None), (StopReason::Length, 8));
}

#[test]
fn a_processor_that_leaves_no_token_is_an_error_that_names_it() {
    let all: Vec<Vec<TokenId>> = (0..VOCAB as TokenId).map(|id| vec![id]).collect();
    let options = options(GenerationConfig::new().bad_words_ids(all).max_new_tokens(2));
    let (model, mut cache) = (Hashing::default(), cache::keeps());
    let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
    let mut steps =
        Generation::new(model.shared(), &mut cache, batch, vec![PROMPT.to_vec()], options).unwrap();
    let error = steps.next().unwrap().unwrap_err().to_string();
    assert_eq!(error, "bad_words_ids: leaves no token to choose after 5 tokens of a row");
}

#[test]
fn generation_ends_with_the_end_token() {
    let want = expected(8);
    let eos = want[5];
    let end = want.iter().position(|&id| id == eos).unwrap();
    for lookahead in [false, true] {
        for keep_logits in [false, true] {
            let config = GenerationConfig::new().eos_token_id(vec![VOCAB as u32 + 7, eos]);
            let got = one(Options { lookahead, keep_logits, ..options(config) });
            assert_eq!(got, (want[..=end].to_vec(), PROMPT.len() + end), "looks ahead: {lookahead}");
        }
    }
}

#[test]
fn a_cache_that_cannot_be_truncated_keeps_the_token_fed_in_advance() {
    let eos = expected(3)[2];
    let config = GenerationConfig::new().eos_token_id(vec![eos]);
    let mut cache = cache::cannot_truncate();
    let options = Options { lookahead: true, ..options(config) };
    let tokens = row(&run(&Hashing::default(), &mut cache, &[PROMPT.to_vec()], options), 0);
    assert_eq!(cache.seq_len(), PROMPT.len() + tokens.len(), "one too many");
}

#[test]
fn lookahead_makes_no_pass_after_the_last_token() {
    let model = Hashing::default();
    run(&model, &mut cache::keeps(), &[PROMPT.to_vec()], Options { lookahead: true, ..greedy(4) });
    assert_eq!(model.fed(), [(5, 5), (1, 0), (1, 0), (1, 0)]);
}

#[test]
fn after_a_drop_the_cache_holds_only_delivered_tokens() {
    for (lookahead, taken) in [(true, 0), (true, 1), (true, 3), (false, 3)] {
        let (model, mut cache) = (Hashing::default(), cache::keeps());
        let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
        let options = Options { lookahead, ..greedy(9) };
        let generation =
            Generation::new(model.shared(), &mut cache, batch, vec![PROMPT.to_vec()], options).unwrap();
        assert_eq!(generation.take(taken).count(), taken);
        let want = if taken == 0 { 0 } else { PROMPT.len() + taken - 1 };
        assert_eq!(cache.seq_len(), want, "looks ahead: {lookahead}, took {taken}");
    }
}

#[test]
fn a_generation_continues_from_the_last_token_which_was_not_fed() {
    let want = expected(9);
    for lookahead in [false, true] {
        let (model, mut cache) = (Hashing::default(), cache::keeps());
        let begun = row(&run(&model, &mut cache, &[PROMPT.to_vec()], Options { lookahead, ..greedy(4) }), 0);
        assert_eq!(begun, want[..4]);
        let whole = [&PROMPT[..], &begun].concat();
        let batch = Batch::from_rows(&[vec![begun[3]]], &fake::device()).unwrap();
        let steps = Generation::new(model.shared(), &mut cache, batch, vec![whole], greedy(5)).unwrap();
        let steps: Vec<Step> = steps.map(Result::unwrap).collect();
        assert_eq!(row(&steps, 0), want[4..]);
    }
}

#[test]
fn rows_of_a_batch_give_the_tokens_that_they_give_alone() {
    let prompts = [PROMPT.to_vec(), vec![7], vec![2, 7, 1], vec![9, 9, 9, 9, 9, 9, 2]];
    for (lookahead, keep_logits, sample) in
        [(false, false, false), (true, false, false), (false, true, false), (false, false, true)]
    {
        // Three tokens end a text here, so that rows end at different steps.
        let base = if sample { sampled(30, 11) } else { greedy(30) };
        let settings =
            Settings { eos_token_id: vec![0, 8, 15], pad_token_id: Some(VOCAB as u32), ..base.settings };
        let options = Options { settings, lookahead, keep_logits, ..Options::default() };
        let steps = run(&Hashing::default(), &mut cache::keeps(), &prompts, options.clone());
        let lengths: Vec<usize> = (0..prompts.len()).map(|i| row(&steps, i).len()).collect();
        assert!(lengths.iter().any(|n| *n != lengths[0]), "{lengths:?}");
        for (i, prompt) in prompts.iter().enumerate().filter(|(i, _)| !sample || *i == 0) {
            let alone =
                run(&Hashing::default(), &mut cache::keeps(), std::slice::from_ref(prompt), options.clone());
            assert_eq!(row(&steps, i), row(&alone, 0), "row {i}");
        }
        let kept = steps.iter().filter_map(|step| step.logits.as_ref()).flatten().map(Vec::len);
        let tokens = steps.iter().flat_map(|step| &step.tokens);
        if keep_logits {
            let want = tokens.map(|token| token.map_or(0, |_| VOCAB));
            assert!(kept.eq(want), "logits are of rows that have not ended");
        }
    }
}

#[test]
fn a_seed_repeats_a_run_and_each_row_has_its_own_random_stream() {
    let batch = |second: Vec<TokenId>, seed| {
        run(
            &Hashing::default(),
            &mut cache::keeps(),
            &[PROMPT.to_vec(), second.clone(), second],
            sampled(20, seed),
        )
    };
    let steps = batch(vec![6, 6], 1);
    assert_eq!(steps, batch(vec![6, 6], 1));
    assert_ne!(row(&steps, 0), row(&batch(vec![6, 6], 2), 0));
    assert_ne!(row(&steps, 1), row(&steps, 2), "the same prompt, another stream");
    let other = batch(vec![1, 2, 3, 4, 5, 6, 7, 8], 1);
    assert_eq!(row(&steps, 0), row(&other, 0), "whatever its neighbours");
    assert_ne!(row(&steps, 1), row(&other, 1));
}

#[test]
fn a_cache_that_keeps_nothing_is_fed_all_tokens_at_each_step() {
    let prompts = [PROMPT.to_vec(), vec![7, 7]];
    let want = run(&Hashing::default(), &mut cache::keeps(), &prompts, greedy(6));
    for (lookahead, keep_logits, chunk) in
        [(false, false, None), (true, false, Some(2)), (false, true, Some(5))]
    {
        let model = Hashing::default();
        let options = Options { lookahead, keep_logits, prefill_chunk: chunk, ..greedy(6) };
        let mut got = run(&model, &mut cache::forgets(), &prompts, options);
        got.iter_mut().for_each(|step| step.logits = None);
        assert_eq!(got, want);
        let mut lengths: Vec<usize> = model.fed().iter().map(|(len, _)| *len).collect();
        if chunk == Some(2) {
            assert_eq!(lengths.remove(0), 2, "only the first chunk is in vain");
        }
        assert_eq!(lengths, [5, 6, 7, 8, 9, 10]);
    }
}

#[test]
fn each_chunk_is_fed_with_the_length_of_the_whole_prompt() {
    let (model, mut cache) = (Hashing::default(), cache::keeps());
    let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
    let fed = |n: Option<usize>, cache: &mut ModelCache| {
        kiln_core::read_back::block_on(prefill(model.shared(), cache, &batch, n)).map(|logits| logits.dims())
    };
    assert_eq!(fed(Some(2), &mut cache), Ok([1, 1, VOCAB]));
    assert_eq!(fed(None, &mut cache), Ok([1, 1, VOCAB]));
    assert_eq!(model.fed(), [(2, 5), (2, 5), (1, 5), (5, 10)]);
    assert!(matches!(fed(Some(0), &mut cache), Err(Error::Setting { name: "prefill_chunk", .. })));
}

#[test]
fn an_error_is_the_last_step() {
    for (lookahead, keep_logits) in [(false, false), (true, false), (false, true)] {
        let model = Hashing { fails_at: Some(3), ..Hashing::default() };
        let mut cache = cache::keeps();
        let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
        let options = Options { lookahead, keep_logits, ..greedy(9) };
        let generation =
            Generation::new(model.shared(), &mut cache, batch, vec![PROMPT.to_vec()], options).unwrap();
        let got: Vec<Option<Vec<Option<TokenId>>>> = generation.map(|s| s.ok().map(|s| s.tokens)).collect();
        let want: Vec<_> = expected(3).into_iter().map(|id| Some(vec![Some(id)])).chain([None]).collect();
        assert_eq!(got, want, "looks ahead: {lookahead}");
    }
}

#[test]
fn impossible_prompts_are_errors() {
    let device = fake::device();
    let refused = |prompts: &[Vec<TokenId>], batch: Batch, options: Options| {
        let (model, mut cache) = (Hashing::default(), cache::keeps());
        Generation::new(model.shared(), &mut cache, batch, prompts.to_vec(), options).unwrap_err().to_string()
    };
    let batch = |rows: &[Vec<TokenId>]| Batch::left_padded(rows, 0, &device).unwrap();
    let outside = vec![vec![1], vec![2, VOCAB as u32]];
    assert!(refused(&outside, batch(&outside), greedy(1)).contains("token 23 in row 1"), "names the id");
    let prompt = vec![PROMPT.to_vec()];
    assert!(refused(&[], batch(&prompt), greedy(1)).contains("rows"));
    assert!(refused(&[vec![1]], batch(&prompt), greedy(1)).contains("feeds 5 tokens"));
    let all_padding = Batch { left_pad: vec![5], ..batch(&prompt) };
    assert!(refused(&prompt, all_padding, greedy(1)).contains("padding"));
    assert!(
        refused(&prompt, batch(&prompt), Options { prefill_chunk: Some(0), ..greedy(1) })
            .contains("prefill_chunk")
    );
    let short = options(GenerationConfig::new().max_length(5));
    assert!(refused(&prompt, batch(&prompt), short).starts_with("max_length"));
    let unknown = options(GenerationConfig::new().bad_words_ids(vec![vec![1, VOCAB as u32]]));
    assert!(refused(&prompt, batch(&prompt), unknown).starts_with("bad_words_ids: token"));
}

#[test]
fn max_length_counts_the_prompt() {
    let got = one(options(GenerationConfig::new().max_length(8)));
    assert_eq!(got, (expected(3), 7));
}

#[test]
fn statistics_count_tokens_without_padding() {
    let prompts = [PROMPT.to_vec(), vec![7]];
    let (model, mut cache) = (Hashing::default(), cache::keeps());
    let batch = Batch::left_padded(&prompts, 0, &fake::device()).unwrap();
    let mut steps =
        Generation::new(model.shared(), &mut cache, batch, prompts.to_vec(), sampled(3, 5)).unwrap();
    assert_eq!(steps.by_ref().count(), 3);
    let stats = steps.stats();
    assert_eq!((stats.rows, stats.prompt_tokens, stats.generated, stats.decoded()), (2, 6, 6, 4));
    assert_eq!(stats.seed, Some(5));
    assert!(stats.prefill_time <= stats.time_to_first_token);
}

#[test]
fn a_generation_and_its_steps_are_send() {
    fn movable<T: Send>(_: &T) {}
    let (model, mut cache) = (Hashing::default(), cache::keeps());
    let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
    let mut generation =
        Generation::new(model.shared(), &mut cache, batch, vec![PROMPT.to_vec()], greedy(1)).unwrap();
    movable(&generation);
    movable(&generation.next_step());
}
