//! Guidance of a model whose logits are a hash of every token that its cache holds.
#![allow(clippy::unwrap_used, reason = "these are tests")]

use kiln_core::{batch::Batch, model::TokenId, model_cache::ModelCache};

use super::*;
use crate::{
    Generation, GenerationConfig, Options,
    generation::tests::fake::{self, Hashing, VOCAB, cache},
    sampler::greedy,
};

const SCALE: f32 = 1.75;

fn prompts() -> Vec<Vec<TokenId>> {
    vec![vec![3, 1, 4, 1, 5], vec![7], vec![2, 7, 1]]
}

fn options(config: GenerationConfig, negative: &[Vec<TokenId>]) -> Options {
    let settings = config.guidance_scale(SCALE).resolve().unwrap();
    Options { settings, negative_prompts: negative.to_vec(), ..Options::default() }
}

fn generation(model: &Hashing, cache: ModelCache, options: Options) -> Result<Generation<'static>> {
    let batch = Batch::left_padded(&prompts(), 0, &fake::device()).unwrap();
    Generation::new(model.shared(), cache, batch, prompts(), options)
}

/// Guided log-probabilities after `tokens`, which follow both prompts.
fn guided(prompt: &[TokenId], negative: &[TokenId], tokens: &[TokenId]) -> Vec<f32> {
    let after = |prompt: &[TokenId]| log_softmax(&fake::logits(&[prompt, tokens].concat()));
    after(prompt).into_iter().zip(after(negative)).map(|(p, n)| SCALE * (p - n) + n).collect()
}

#[test]
fn each_row_is_guided_by_its_own_negative_prompt() {
    let own = vec![vec![9, 9], vec![2, 1, 8, 4, 5, 6], vec![4]];
    let last: Vec<Vec<TokenId>> = prompts().iter().map(|prompt| vec![prompt[prompt.len() - 1]]).collect();
    let all = vec![vec![6, 13]; 3];
    for (given, negative) in [(own.clone(), own), (vec![], last), (vec![vec![6, 13]], all)] {
        for (cache, chunk) in [(cache::keeps(), None), (cache::keeps(), Some(2)), (cache::forgets(), None)] {
            let model = Hashing::default();
            let config = GenerationConfig::new().max_new_tokens(7);
            let options = Options { prefill_chunk: chunk, lookahead: true, ..options(config, &given) };
            let mut steps = generation(&model, cache, options).unwrap();
            steps.by_ref().for_each(|step| _ = step.unwrap());
            for (row, (prompt, negative)) in prompts().iter().zip(&negative).enumerate() {
                let mut want = Vec::new();
                for _ in 0..7 {
                    want.push(greedy(&guided(prompt, negative, &want)).unwrap());
                }
                assert_eq!(steps.tokens(row).unwrap()[prompt.len()..], want, "row {row}, {given:?}");
            }
        }
    }
}

/// The negative branch of a beam moves with it.
#[test]
fn each_beam_is_guided_by_its_own_negative_prompt() {
    let negative = [vec![9, 9], vec![2, 1, 8], vec![4]];
    let config = GenerationConfig::new().num_beams(4).num_return_sequences(4).max_new_tokens(6);
    let model = Hashing::default();
    let mut steps = generation(&model, cache::keeps(), options(config, &negative)).unwrap();
    let mut moved = false;
    for step in steps.by_ref() {
        moved |= step.unwrap().parents.is_some_and(|parents| !parents.into_iter().eq(0..12));
    }
    assert!(moved);
    for ((prompt, negative), completions) in prompts().iter().zip(&negative).zip(steps.completions()) {
        assert_eq!(completions.len(), 4);
        for completion in completions {
            for (i, (&token, score)) in completion.tokens.iter().zip(&completion.token_scores).enumerate() {
                let want = guided(prompt, negative, &completion.tokens[..i])[token as usize];
                assert!((want - score).abs() < 1e-4, "{want} {completion:?}");
            }
        }
    }
}

#[test]
fn kept_logits_are_unguided_and_kept_scores_are_guided() {
    let config = GenerationConfig::new().max_new_tokens(1);
    let options = Options { keep_logits: true, keep_scores: true, ..options(config, &[vec![9]]) };
    let model = Hashing::default();
    let step = generation(&model, cache::keeps(), options).unwrap().next().unwrap().unwrap();
    for (row, prompt) in prompts().iter().enumerate() {
        assert_eq!(step.logits.as_ref().unwrap()[row], fake::logits(prompt));
        assert_eq!(step.scores.as_ref().unwrap()[row], guided(prompt, &[9], &[]));
    }
}

#[test]
fn impossible_negative_prompts_are_errors() {
    let refused = |options: Options| {
        let model = Hashing::default();
        generation(&model, cache::keeps(), options).unwrap_err().to_string()
    };
    let with = |negative: &[Vec<TokenId>]| refused(options(GenerationConfig::new(), negative));
    assert!(with(&[vec![1], vec![2]]).starts_with("negative_prompt: there are 2 for 3 prompts"));
    assert!(with(&[vec![]]).starts_with("negative_prompt: is empty"));
    assert!(with(&[vec![VOCAB as TokenId]]).contains("token 23"));
    let off = GenerationConfig::new().guidance_scale(1.0).resolve().unwrap();
    let off = Options { settings: off, negative_prompts: vec![vec![1]], ..Options::default() };
    assert!(refused(off).starts_with("negative_prompt: has no effect"));
    assert!(GenerationConfig::new().guidance_scale(f32::NAN).resolve().is_err());
}
