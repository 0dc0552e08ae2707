#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::{collections::BTreeMap, sync::Arc};

use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{CausalModel, TokenId},
    model_cache::ModelCache,
};

use super::DraftModel;
use crate::{
    GenerationConfig, Grammar, Matcher, StopReason, StoppingCriterion, TokenTable, Tokenizer,
    generation::{
        Generation, Options, Step,
        tests::fake::{self, Hashing, VOCAB, cache},
    },
    stats::Stats,
};

const PROMPT: [TokenId; 8] = [3, 1, 4, 1, 5, 3, 1, 4];

fn config(n: usize) -> GenerationConfig {
    GenerationConfig::new().max_new_tokens(n)
}

fn lookup(n: usize) -> GenerationConfig {
    config(n).prompt_lookup_num_tokens(4)
}

fn options(config: GenerationConfig) -> Options {
    Options { settings: config.resolve().unwrap(), ..Options::default() }
}

/// A draft model that agrees with the model for a while: it is the same one.
fn draft(model: &Hashing) -> DraftModel {
    DraftModel::new(model.shared(), cache::keeps(), fake::device(), 3)
}

/// The generated tokens, the statistics, and the slots of each row that the cache holds.
struct Ran {
    steps: Vec<Step>,
    stats: Stats,
    reasons: Vec<Option<StopReason>>,
    held: Vec<usize>,
}

fn start<'a>(
    model: &Hashing,
    cache: &'a mut ModelCache,
    prompts: &[Vec<TokenId>],
    options: Options,
    draft: Option<DraftModel>,
) -> Result<Generation<'a>> {
    let batch = Batch::left_padded(prompts, 0, &fake::device()).unwrap();
    let generation = Generation::new(model.shared(), cache, batch, prompts.to_vec(), options)?;
    match draft {
        Some(draft) => generation.with_draft(draft),
        None => Ok(generation),
    }
}

fn run(model: &Hashing, prompts: &[Vec<TokenId>], options: Options, draft: Option<DraftModel>) -> Ran {
    let mut cache = cache::keeps();
    let mut generation = start(model, &mut cache, prompts, options, draft).unwrap();
    let steps = generation.by_ref().map(Result::unwrap).collect();
    let (stats, rows) = (generation.stats(), 0..prompts.len());
    let reasons = rows.map(|row| generation.stop_reason(row)).collect();
    drop(generation);
    Ran { steps, stats, reasons, held: cache.seq_lens(prompts.len()) }
}

#[test]
fn assisted_decoding_gives_the_tokens_of_plain_decoding() {
    let prompts = [PROMPT.to_vec(), vec![7, 7], vec![2, 7, 1, 2, 7]];
    for n in [1, 2, 3, 20] {
        for config in [config(n), config(n).eos_token_id(vec![0, 8]), config(n).repetition_penalty(1.5)] {
            for rows in 1..=3 {
                for keep in [false, true] {
                    let with = |config: GenerationConfig| Options {
                        keep_logits: keep,
                        keep_scores: keep,
                        ..options(config)
                    };
                    let plain = run(&Hashing::default(), &prompts[..rows], with(config.clone()), None);
                    let looked_up = config.clone().prompt_lookup_num_tokens(4);
                    let looked_up = run(&Hashing::default(), &prompts[..rows], with(looked_up), None);
                    assert_eq!(looked_up.steps, plain.steps, "{n} tokens of {rows} rows");
                    assert_eq!(looked_up.reasons, plain.reasons);
                    let model = Hashing::default();
                    for schedule in ["constant", "heuristic"] {
                        let config = config
                            .clone()
                            .num_assistant_tokens(3)
                            .num_assistant_tokens_schedule(serde_json::from_value(schedule.into()).unwrap());
                        let draft = draft(&model);
                        let drafted = run(&Hashing::default(), &prompts[..rows], with(config), Some(draft));
                        assert_eq!(drafted.steps, plain.steps, "{n} tokens of {rows} rows, {schedule}");
                        assert_eq!(drafted.reasons, plain.reasons);
                        if rows == 1 {
                            assert_eq!(drafted.held, plain.held);
                        }
                        assert_eq!(drafted.stats.accepted, drafted.stats.proposed, "it is the same model");
                    }
                }
            }
        }
    }
}

#[test]
fn a_correct_draft_saves_passes() {
    let (model, assistant) = (Hashing::default(), Hashing::default());
    let config = config(13).num_assistant_tokens(5).assistant_confidence_threshold(0.0);
    let ran = run(&model, &[PROMPT.to_vec()], options(config), Some(draft(&assistant)));
    // The prompt and a token; then twice five proposals and one more.
    assert_eq!(model.fed().iter().map(|(len, _)| *len).collect::<Vec<_>>(), [8, 6, 6]);
    assert_eq!((ran.stats.proposed, ran.stats.accepted, ran.stats.generated), (10, 10, 13));
    assert_eq!(ran.held, [PROMPT.len() + 12]);
    // In chunks of three the prompt and the first token, then token by token.
    assert_eq!(
        assistant.fed().iter().map(|(len, _)| *len).collect::<Vec<_>>(),
        [vec![3, 3, 3], vec![1; 4], vec![2], vec![1; 4]].concat()
    );
}

#[test]
fn the_heuristic_schedule_drafts_more_tokens_after_acceptance() {
    let passes = |schedule: &str| {
        let (model, assistant) = (Hashing::default(), Hashing::default());
        let config = config(20)
            .num_assistant_tokens(2)
            .assistant_confidence_threshold(0.0)
            .num_assistant_tokens_schedule(serde_json::from_value(schedule.into()).unwrap());
        run(&model, &[PROMPT.to_vec()], options(config), Some(draft(&assistant)));
        model.fed().iter().map(|(len, _)| *len).collect::<Vec<_>>()
    };
    assert_eq!(passes("constant"), [8, 3, 3, 3, 3, 3, 3, 1]);
    assert_eq!(passes("heuristic_transient"), [8, 3, 5, 7, 4]);
}

#[test]
fn an_unlikely_token_ends_a_draft() {
    let model = Hashing::default();
    let config = config(7).num_assistant_tokens(5).assistant_confidence_threshold(1.0);
    let assistant = Hashing::default();
    run(&model, &[PROMPT.to_vec()], options(config), Some(draft(&assistant)));
    assert_eq!(
        model.fed().iter().map(|(len, _)| *len).collect::<Vec<_>>(),
        [8, 2, 2, 2],
        "one token each time"
    );
}

#[test]
fn prompt_lookup_drafts_what_followed_the_first_match() {
    let propose = |ids: &[TokenId], config: GenerationConfig, most: usize| {
        let settings = config.resolve().unwrap();
        let state =
            crate::RowState { index: 0, ids, generated: 1, padding: 0, len: ids.len(), remaining: None };
        let asked = super::Asked { state, most };
        settings.assisted.prompt_lookup.unwrap().propose(&asked, &settings, None, VOCAB).tokens
    };
    let two = || lookup(9);
    assert_eq!(propose(&[1, 2, 3, 4, 5, 1, 2], two(), 9), [3, 4, 5, 1]);
    assert_eq!(propose(&[1, 2, 3, 4, 5, 1, 2], two(), 2), [3, 4]);
    assert_eq!(propose(&[1, 2, 3, 1, 2, 4, 1, 2], two(), 9), [3, 1, 2, 4], "the first occurrence");
    assert_eq!(propose(&[2, 9, 1, 2, 3, 1, 2], two(), 9), [3, 1, 2], "two tokens before one");
    assert_eq!(propose(&[2, 9, 7, 2], two(), 9), [9, 7, 2]);
    assert_eq!(propose(&[5, 5], two(), 9), [5], "up to the end of the row");
    assert!(propose(&[1, 2, 3], two(), 9).is_empty());
    assert!(propose(&[1], two(), 9).is_empty());
    assert_eq!(propose(&[1, 2, 3, 4, 5, 1, 2], two().eos_token_id(vec![4]), 9), [3]);
    assert_eq!(propose(&[1, 2, 3, 4, 5, 1, 2], two().bad_words_ids(vec![vec![5]]), 9), [3, 4]);
    let forbidden = two().bad_words_ids(vec![vec![3]]);
    assert_eq!(propose(&[1, 2, 3, 4, 1, 2, 6, 1, 2], forbidden, 9), [6, 1, 2], "the next occurrence");
    assert_eq!(propose(&[1, 2, 3, 9, 2, 3, 4, 1, 2, 3], two().max_matching_ngram_size(3), 9), [9, 2, 3, 4]);
}

#[test]
fn prompt_lookup_does_not_change_sampled_tokens() {
    let sampled = |seed: u64, with: bool| {
        let config = config(30).do_sample(true).temperature(0.6).top_k(3).seed(seed);
        let config = if with { config.prompt_lookup_num_tokens(3) } else { config };
        run(&Hashing::default(), &[PROMPT.to_vec(), vec![7]], options(config), None)
    };
    let (mut proposed, mut accepted) = (0, 0);
    for seed in 0..40 {
        let ran = sampled(seed, true);
        assert_eq!(ran.steps, sampled(seed, false).steps, "seed {seed}");
        proposed += ran.stats.proposed;
        accepted += ran.stats.accepted;
    }
    assert!(accepted > 20 && accepted < proposed, "{accepted} of {proposed}");
}

/// A model that finds other tokens likely than [`Hashing`] does, often the same.
#[derive(Debug)]
struct Off(Hashing);

impl CausalModel for Off {
    fn needs(&self) -> Vec<kiln_core::need::LayerNeed> {
        self.0.needs()
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn head(&self, hidden: burn::tensor::Tensor<3>) -> burn::tensor::Tensor<3> {
        self.0.head(hidden)
    }

    fn compute(
        &self,
        batch: &Batch,
        logits: kiln_core::model::Logits,
        pass: &mut kiln_core::model_cache::Pass<'_>,
    ) -> Result<burn::tensor::Tensor<3>> {
        let logits = self.0.compute(batch, logits, pass)?;
        let slope = burn::tensor::Tensor::<1, burn::tensor::Int>::arange(0..VOCAB as i64, &fake::device());
        Ok(logits * 0.5 + slope.float().mul_scalar(0.1).reshape([1, 1, VOCAB]))
    }
}

#[test]
fn sampled_drafts_keep_the_distribution_of_the_model() {
    const RUNS: u64 = 4000;

    let config = |seed| config(3).do_sample(true).temperature(2.0).top_k(6).seed(seed);
    let mut counts: [BTreeMap<Vec<TokenId>, f64>; 2] = Default::default();
    let mut stats = (0, 0);
    for seed in 0..RUNS {
        for (assisted, counts) in counts.iter_mut().enumerate() {
            let other = Arc::new(Off(Hashing::default()));
            let draft = DraftModel::new(other, cache::keeps(), fake::device(), 99);
            let draft = (assisted == 1).then_some(draft);
            // Other seeds: the two samples are independent.
            let seed = 2 * seed + assisted as u64;
            let mut options = options(config(seed).assistant_confidence_threshold(0.0));
            options.settings.seed = Some(seed);
            let ran = run(&Hashing::default(), &[PROMPT.to_vec()], options, draft);
            let tokens = ran.steps.iter().map(|step| step.tokens[0].unwrap()).collect();
            *counts.entry(tokens).or_default() += 1.0;
            stats.0 += ran.stats.proposed;
            stats.1 += ran.stats.accepted;
        }
    }
    assert!(
        stats.1 * 4 > stats.0 && stats.1 * 10 < stats.0 * 9,
        "{stats:?}: some are accepted, some are not"
    );
    // Two samples of the same distribution: chi-squared over what is not rare, about its degrees of freedom.
    let count = |counts: &BTreeMap<_, f64>, key| counts.get(key).copied().unwrap_or(0.0);
    let common: Vec<(f64, f64)> = counts[0]
        .keys()
        .map(|key| (count(&counts[0], key), count(&counts[1], key)))
        .filter(|(a, b)| a + b >= 20.0)
        .collect();
    let chi: f64 = common.iter().map(|(a, b)| (a - b).powi(2) / (a + b)).sum();
    let freedom = common.len() as f64;
    assert!(freedom > 30.0, "{freedom}");
    assert!(chi < freedom + 4.0 * (2.0 * freedom).sqrt(), "{chi} with {freedom} degrees of freedom");
}

#[test]
fn stopping_criteria_are_called_once_per_token() {
    let plain = run(&Hashing::default(), &[PROMPT.to_vec()], options(config(9)), None);
    let last = plain.steps[6].tokens[0].unwrap();
    let end = plain.steps.iter().position(|step| step.tokens[0] == Some(last)).unwrap() + 1;
    let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let heard = asked.clone();
    let criterion = StoppingCriterion::new(move |row| {
        heard.lock().unwrap().push(row.generated);
        row.ids.last() == Some(&last)
    });
    let model = Hashing::default();
    let options = Options {
        stopping_criteria: vec![criterion],
        ..options(config(9).num_assistant_tokens(20).assistant_confidence_threshold(0.0))
    };
    let ran = run(&Hashing::default(), &[PROMPT.to_vec()], options, Some(draft(&model)));
    assert_eq!((ran.steps.len(), ran.reasons), (end, vec![Some(StopReason::Criterion)]));
    assert_eq!(*asked.lock().unwrap(), (1..=end).collect::<Vec<_>>());
    assert_eq!(ran.held, [PROMPT.len() + end - 1]);
}

#[test]
fn after_a_drop_the_cache_holds_only_delivered_tokens() {
    let (model, assistant) = (Hashing::default(), Hashing::default());
    for taken in 0..8 {
        let mut cache = cache::keeps();
        let options = options(config(9).num_assistant_tokens(4).assistant_confidence_threshold(0.0));
        let generation =
            start(&model, &mut cache, &[PROMPT.to_vec()], options, Some(draft(&assistant))).unwrap();
        assert_eq!(generation.take(taken).count(), taken);
        assert_eq!(cache.seq_len(), if taken == 0 { 0 } else { PROMPT.len() + taken - 1 });
    }
}

/// A grammar over a vocabulary of letters: token 0 is `a`, and the last ends a text.
fn letters(regex: &str) -> Matcher {
    compiled(&Grammar::regex(regex).unwrap())
}

fn compiled(grammar: &Grammar) -> Matcher {
    let vocab: BTreeMap<String, usize> =
        ('a'..).take(VOCAB).enumerate().map(|(id, c)| (c.to_string(), id)).collect();
    let file = serde_json::json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Fuse"}, "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let tokenizer = Arc::new(Tokenizer::load(file.to_string().as_bytes()).unwrap());
    let table = Arc::new(TokenTable::new(tokenizer, VOCAB, &[END]).unwrap());
    grammar.compile(&table).unwrap()
}

const END: TokenId = VOCAB as TokenId - 1;

#[test]
fn drafts_do_not_change_the_tokens_of_a_grammar() {
    let prompts = [PROMPT.to_vec(), vec![7, 7], vec![2, 7, 1, 2, 7]];
    let (mut proposed, mut accepted) = (0, 0);
    for regex in ["[a-i]{1,19}", "(ab|cd|d|e[f-k]){1,9}", "(dbeb){3}"] {
        for (config, greedy) in [
            (config(20).eos_token_id(vec![END]).repetition_penalty(1.5), true),
            (config(20).eos_token_id(vec![END]), true),
            (config(20).eos_token_id(vec![END]).do_sample(true).top_k(4).seed(5), false),
        ] {
            for rows in 1..=3 {
                let with = |config: GenerationConfig| Options {
                    keep_scores: true,
                    grammar: Some(letters(regex)),
                    ..options(config)
                };
                let plain = run(&Hashing::default(), &prompts[..rows], with(config.clone()), None);
                let looked_up = with(config.clone().prompt_lookup_num_tokens(4));
                let looked_up = run(&Hashing::default(), &prompts[..rows], looked_up, None);
                assert_eq!(looked_up.steps, plain.steps, "{regex}, {rows} rows");
                proposed += looked_up.stats.proposed;
                accepted += looked_up.stats.accepted;
                let model = Hashing::default();
                let drafting = with(config.clone().assistant_confidence_threshold(0.0));
                let drafted = run(&Hashing::default(), &prompts[..rows], drafting, Some(draft(&model)));
                if greedy {
                    assert_eq!(drafted.steps, plain.steps, "{regex}, {rows} rows");
                }
                let stats = drafted.stats;
                assert!(
                    stats.proposed > 0 && stats.accepted == stats.proposed,
                    "it is the same model: {stats:?}"
                );
            }
        }
    }
    assert!(accepted > 20 && accepted < proposed, "{accepted} of {proposed}");
}

#[test]
fn drafts_end_before_a_token_that_the_grammar_forbids() {
    // Looked up: 1 (b), 4, 1, 5. Only b may follow, then c.
    let model = Hashing::default();
    let options = Options { grammar: Some(letters("bc{9}")), ..options(lookup(3)) };
    let ran = run(&model, &[vec![3, 1, 4, 1, 5, 3]], options, None);
    // The prompt, then a step of one token each: c is nowhere in the prompt, and was proposed once it was
    // there.
    assert_eq!(ran.steps.iter().map(|step| step.tokens[0].unwrap()).collect::<Vec<_>>(), [1, 2, 2]);
    assert_eq!(model.fed().iter().map(|(len, _)| *len).collect::<Vec<_>>(), [6, 1, 1]);
    assert_eq!(ran.stats.proposed, 0);
}

#[test]
fn after_a_drop_with_a_grammar_the_cache_holds_only_delivered_tokens() {
    for taken in 1..8 {
        let (model, assistant) = (Hashing::default(), Hashing::default());
        let mut cache = cache::keeps();
        let options = Options {
            grammar: Some(letters("[a-i]{9}")),
            ..options(config(9).num_assistant_tokens(4).assistant_confidence_threshold(0.0))
        };
        let prompts = [PROMPT.to_vec()];
        let generation = start(&model, &mut cache, &prompts, options, Some(draft(&assistant))).unwrap();
        assert_eq!(generation.take(taken).count(), taken);
        assert_eq!(cache.seq_len(), PROMPT.len() + taken - 1);
    }
}

#[test]
fn impossible_settings_of_assisted_decoding_are_errors() {
    let refused = |config: GenerationConfig, cache: ModelCache, with_draft: bool| {
        let (model, assistant, mut cache) = (Hashing::default(), Hashing::default(), cache);
        let draft = with_draft.then(|| draft(&assistant));
        match start(&model, &mut cache, &[PROMPT.to_vec()], options(config), draft) {
            Err(error @ Error::Setting { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        refused(lookup(3), cache::cannot_truncate(), false),
        "prompt_lookup_num_tokens: proposals that are wrong must be forgotten, which the fake cache cannot do; use another"
    );
    assert_eq!(
        refused(config(3), cache::forgets(), true),
        "draft: proposals that are wrong must be forgotten, which the fake cache cannot do; use another"
    );
    assert_eq!(
        refused(lookup(3).num_beams(2), cache::keeps(), false),
        "prompt_lookup_num_tokens: goes with one sequence of each prompt; set num_beams to 1"
    );
    assert_eq!(
        refused(config(3).do_sample(true).num_return_sequences(2), cache::keeps(), true),
        "draft: goes with one sequence of each prompt; set num_return_sequences to 1"
    );
    assert!(refused(lookup(3), cache::keeps(), true).contains("leave out either it or"));
    let lark = Grammar::lark("start: word\nword[stop=\"c\"]: /[ab]+/\n").unwrap();
    let (model, mut cache) = (Hashing::default(), cache::keeps());
    let options = Options { grammar: Some(compiled(&lark)), ..options(lookup(3)) };
    let said = start(&model, &mut cache, &[PROMPT.to_vec()], options, None).unwrap_err().to_string();
    assert!(said.contains("does not go with a grammar that has `stop=`"), "{said}");
    for (config, name) in [
        (config(3).prompt_lookup_num_tokens(0), "prompt_lookup_num_tokens: is 0"),
        (config(3).prompt_lookup_num_tokens(1 << 40), "prompt_lookup_num_tokens: is 1099511627776"),
        (config(3).max_matching_ngram_size(0), "max_matching_ngram_size: is 0"),
        (config(3).num_assistant_tokens(0), "num_assistant_tokens: is 0"),
        (config(3).assistant_confidence_threshold(1.5), "assistant_confidence_threshold: is 1.5"),
    ] {
        let said = config.resolve().unwrap_err().to_string();
        assert!(said.starts_with(name), "{said}");
    }
}
