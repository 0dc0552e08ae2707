//! Beams on a model whose logits are a hash of every token that its cache holds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use kiln_core::{batch::Batch, model::TokenId};

use crate::{
    Completion, EarlyStopping, ForceWord, Generation, GenerationConfig, Options,
    generation::tests::fake::{self, Hashing, VOCAB, cache},
    processors::log_softmax,
};

const PROMPT: [TokenId; 5] = [3, 1, 4, 1, 5];

fn options(config: GenerationConfig) -> Options {
    Options { settings: config.resolve().unwrap(), ..Options::default() }
}

fn beams(n: usize) -> GenerationConfig {
    GenerationConfig::new().num_beams(n).num_return_sequences(n).max_new_tokens(6)
}

fn run(prompts: &[Vec<TokenId>], options: Options) -> Vec<Vec<Completion>> {
    let batch = Batch::left_padded(prompts, 0, &fake::device()).unwrap();
    let model = Hashing::default();
    let mut generation =
        Generation::new(model.shared(), cache::keeps(), batch, prompts.to_vec(), options).unwrap();
    for step in generation.by_ref() {
        step.unwrap();
    }
    generation.completions()
}

fn one(config: GenerationConfig) -> Vec<Completion> {
    run(&[PROMPT.to_vec()], options(config)).remove(0)
}

/// The log-probabilities of `tokens` after `prompt`.
fn log_probabilities(prompt: &[TokenId], tokens: &[TokenId]) -> Vec<f32> {
    let mut ids = prompt.to_vec();
    let of = |&token: &TokenId| {
        let score = log_softmax(&fake::logits(&ids))[token as usize];
        ids.push(token);
        score
    };
    tokens.iter().map(of).collect()
}

/// The logits of a row are those of its own tokens: what belongs to a row went with it.
#[test]
fn each_sequence_has_the_scores_of_its_own_tokens() {
    let prompts = [PROMPT.to_vec(), vec![7], vec![2, 9, 9]];
    for config in [
        beams(4),
        beams(4).length_penalty(0.3).eos_token_id(vec![2, 11, 17]),
        beams(4).length_penalty(-1.0).eos_token_id(vec![2, 11]).early_stopping(EarlyStopping::Always),
        beams(6).num_beam_groups(3).diversity_penalty(0.0001).eos_token_id(vec![2]),
        beams(3).do_sample(true).temperature(1.0).top_k(0).seed(3),
        beams(4).force_words_ids(vec![ForceWord::Word(vec![9, 8]), ForceWord::Word(vec![20])]),
    ] {
        let together = run(&prompts, options(config.clone()));
        for (prompt, completions) in prompts.iter().zip(&together) {
            assert_eq!(completions.len(), config.num_return_sequences.unwrap());
            for completion in completions {
                let want = log_probabilities(prompt, &completion.tokens);
                let penalty = f64::from(config.length_penalty.unwrap_or(1.0));
                let score = want.iter().sum::<f32>() / (want.len() as f64).powf(penalty) as f32;
                let close = |a: f32, b: f32| (a - b).abs() < 1e-3;
                assert!(close(score, completion.score.unwrap()), "{score} {completion:?}");
                assert!(
                    want.iter().zip(&completion.token_scores).all(|(a, b)| close(*a, *b)),
                    "{completion:?}"
                );
                assert_eq!(completion.beam_indices.len(), want.len());
                assert!(completion.stop_reason.is_some());
            }
            assert!(completions.is_sorted_by(|a, b| a.score >= b.score));
        }
        if config.do_sample.is_none() {
            // Rows of a batch do not know of each other, but for their numbers.
            let alone: Vec<Vec<Completion>> = prompts
                .iter()
                .map(|prompt| run(std::slice::from_ref(prompt), options(config.clone())).remove(0))
                .collect();
            let tokens = |all: &[Vec<Completion>]| -> Vec<Vec<TokenId>> {
                all.iter().flatten().map(|completion| completion.tokens.clone()).collect()
            };
            assert_eq!(tokens(&alone), tokens(&together));
        }
    }
}

#[test]
fn a_beam_per_token_finds_the_best_sequence_of_two_tokens() {
    let pairs = (0..VOCAB as TokenId).flat_map(|a| (0..VOCAB as TokenId).map(move |b| vec![a, b]));
    let sum = |tokens: &Vec<TokenId>| log_probabilities(&PROMPT, tokens).iter().sum::<f32>();
    let best = pairs.map(|tokens| sum(&tokens)).fold(f32::NEG_INFINITY, f32::max);
    let found = one(beams(VOCAB).max_new_tokens(2)).remove(0);
    assert!((found.score.unwrap() * 2.0 - best).abs() < 1e-4, "{found:?}, {best}");
}

#[test]
fn groups_of_one_beam_without_a_penalty_are_greedy() {
    let mut options = options(beams(4).num_beam_groups(4).diversity_penalty(1.0));
    options.settings.beams.as_mut().unwrap().diversity_penalty = 0.0;
    let greedy = one(GenerationConfig::new().max_new_tokens(6)).remove(0);
    let groups = run(&[PROMPT.to_vec()], options).remove(0);
    assert!(groups.iter().all(|group| group.tokens == greedy.tokens), "{groups:?}");
}

#[test]
fn a_diversity_penalty_makes_groups_differ() {
    let firsts = |penalty: f32| {
        let config = beams(5).num_beam_groups(5).diversity_penalty(penalty).max_new_tokens(1);
        let mut firsts: Vec<TokenId> = one(config).iter().map(|group| group.tokens[0]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        firsts.len()
    };
    assert_eq!(firsts(100.0), 5);
}

#[test]
fn forced_words_are_in_the_best_sequence() {
    let words = [vec![9, 8], vec![20]];
    let either = ForceWord::AnyOf(vec![vec![13, 14], vec![6]]);
    let config = beams(4).num_return_sequences(1).force_words_ids(
        words.iter().cloned().map(ForceWord::Word).chain([either]).collect::<Vec<ForceWord>>(),
    );
    let best = one(config.max_new_tokens(8)).remove(0).tokens;
    let has = |word: &[TokenId]| best.windows(word.len()).any(|window| window == word);
    assert!(words.iter().all(|word| has(word)) && (has(&[13, 14]) || has(&[6])), "{best:?}");
}

#[test]
fn early_stopping_shortens_a_search() {
    // Tokens that end a row are frequent, and long sequences are favoured.
    let config = |early| {
        let config = beams(3).eos_token_id((0..12).collect::<Vec<TokenId>>()).length_penalty(3.0);
        config.max_new_tokens(12).early_stopping(early)
    };
    let longest = |early| one(config(early)).iter().map(|one| one.tokens.len()).max().unwrap();
    let [always, never] = [EarlyStopping::Always, EarlyStopping::Never].map(longest);
    assert!(always < never, "{always} {never}");
    let settings = |word: &str| serde_json::from_str::<EarlyStopping>(word);
    assert_eq!(settings("\"never\"").unwrap(), EarlyStopping::Never);
    assert_eq!(settings("false").unwrap(), EarlyStopping::Heuristic);
    assert_eq!(settings("true").unwrap(), EarlyStopping::Always);
    assert!(settings("\"always\"").is_err());
}

#[test]
fn sampled_beams_repeat_with_their_seed() {
    let run = |seed: u64| one(beams(4).do_sample(true).temperature(3.0).top_k(0).seed(seed));
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

/// Agreed tokens never change, and begin the best sequence.
#[test]
fn agreed_tokens_never_change_and_begin_the_best_sequence() {
    let config = beams(3).eos_token_id(vec![2, 11]).max_new_tokens(12);
    let batch = Batch::from_rows(&[PROMPT.to_vec()], &fake::device()).unwrap();
    let model = Hashing::default();
    let mut generation =
        Generation::new(model.shared(), cache::keeps(), batch, vec![PROMPT.to_vec()], options(config))
            .unwrap();
    let mut agreed: Vec<TokenId> = Vec::new();
    while let Some(step) = generation.next() {
        step.unwrap();
        let now = generation.agreed();
        assert!(now.starts_with(&agreed), "{now:?} {agreed:?}");
        agreed = now;
    }
    assert!(generation.completions()[0][0].tokens.starts_with(&agreed));
}

#[test]
fn after_a_beam_search_the_cache_holds_the_prompts_or_nothing() {
    let prompts = [PROMPT.to_vec(), vec![7, 7]];
    let model = Hashing::default();
    for (mut cache, held) in [(cache::keeps(), 5), (cache::cannot_truncate(), 0)] {
        for config in [beams(4), beams(2).num_beams(1).do_sample(true).temperature(2.0)] {
            cache.reset();
            cache.keep_history(100);
            let batch = Batch::left_padded(&prompts, 0, &fake::device()).unwrap();
            let steps = Generation::new(model.shared(), &mut cache, batch, prompts.to_vec(), options(config))
                .unwrap();
            steps.for_each(|step| drop(step.unwrap()));
            assert_eq!(cache.seq_len(), held);
            assert!(held == 0 || cache.check_rows(2).is_ok());
        }
    }
}

#[test]
fn impossible_searches_are_errors() {
    let config = GenerationConfig::new;
    let word = |tokens: &[TokenId]| ForceWord::Word(tokens.to_vec());
    for (config, name) in [
        (config().num_beams(0), "num_beams"),
        (config().num_beams(5000), "num_beams"),
        (config().num_beams(4).num_beam_groups(3).diversity_penalty(1.0), "num_beam_groups"),
        (config().num_beam_groups(2).diversity_penalty(1.0), "num_beam_groups"),
        (config().num_beams(4).num_beam_groups(2), "diversity_penalty"),
        (config().num_beams(4).num_beam_groups(2).diversity_penalty(1.0).do_sample(true), "num_beam_groups"),
        (config().num_beams(2).length_penalty(f32::NAN), "length_penalty"),
        (config().num_beams(2).num_return_sequences(3), "num_return_sequences"),
        (config().num_return_sequences(0), "num_return_sequences"),
        (config().num_return_sequences(2), "num_return_sequences"),
        (config().num_return_sequences(usize::MAX).do_sample(true), "num_return_sequences"),
        (config().force_words_ids(vec![word(&[1])]), "force_words_ids"),
        (config().num_beams(2).force_words_ids(vec![]), "force_words_ids"),
        (config().num_beams(2).force_words_ids(vec![word(&[])]), "force_words_ids"),
        (config().num_beams(2).force_words_ids(vec![ForceWord::AnyOf(vec![])]), "force_words_ids"),
        (config().num_beams(2).force_words_ids(vec![word(&[1, 2, 3])]).max_new_tokens(2), "force_words_ids"),
        (
            config().num_beams(2).force_words_ids(vec![ForceWord::AnyOf(vec![vec![1], vec![1, 2]])]),
            "force_words_ids",
        ),
    ] {
        match config.resolve() {
            Err(kiln_core::Error::Setting { name: refused, .. }) => assert_eq!(refused, name, "{config:?}"),
            other => panic!("{config:?}: {other:?}"),
        }
    }
}
