//! Contrastive search on a model whose hidden states are its logits, a hash of every token.
#![allow(clippy::unwrap_used, reason = "these are tests")]

use kiln_core::{batch::Batch, model_cache::ModelCache};

use super::*;
use crate::{
    Generation, GenerationConfig, StopReason,
    generation::tests::fake::{self, Hashing, VOCAB, cache},
};

fn config(penalty_alpha: f32, top_k: usize) -> GenerationConfig {
    GenerationConfig::new().penalty_alpha(penalty_alpha).top_k(top_k)
}

fn prompts() -> Vec<Vec<TokenId>> {
    vec![vec![3, 1, 4, 1, 5], vec![7], vec![9, 2, 6]]
}

/// The next token after `ids`, without any cache.
fn expected(ids: &[TokenId], settings: ContrastiveSettings, removed: &[TokenId]) -> TokenId {
    let state = |ids: &[TokenId]| fake::logits(ids);
    let mut scores = state(ids);
    removed.iter().for_each(|&id| scores[id as usize] = f32::NEG_INFINITY);
    let cosine = |a: &[f32], b: &[f32]| {
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        product(a, b) / (product(a, a) * product(b, b)).sqrt()
    };
    let score = |candidate: &Candidate| {
        let own = state(&[ids, &[candidate.token]].concat());
        let similarities = (1..=ids.len()).map(|end| cosine(&own, &state(&ids[..end])));
        settings.score(candidate.probability, similarities.fold(-1.0, f32::max))
    };
    let candidates = likeliest(&scores, settings.top_k).unwrap();
    candidates.iter().max_by(|a, b| score(a).total_cmp(&score(b))).unwrap().token
}

fn generation<'a>(
    model: &Hashing,
    cache: &'a mut ModelCache,
    prompts: &[Vec<TokenId>],
    ragged: bool,
    options: Options,
) -> Generation<'a> {
    let batch = match ragged {
        true => Batch::ragged(prompts, 0, &fake::device()),
        false => Batch::left_padded(prompts, 0, &fake::device()),
    };
    Generation::new(model.shared(), cache, batch.unwrap(), prompts.to_vec(), options).unwrap()
}

fn options(config: GenerationConfig) -> Options {
    Options { settings: config.resolve().unwrap(), ..Options::default() }
}

#[test]
fn every_step_chooses_the_best_candidate() {
    const NEW: usize = 8;

    let mut unlike_greedy = 0;
    for (alpha, top_k) in [(0.6, 4), (0.3, 2), (1.0, 3), (0.5, VOCAB + 9)] {
        for (mut cache, chunk, ragged, remembers) in [
            (cache::keeps(), None, false, true),
            (cache::keeps(), Some(2), false, true),
            (cache::keeps(), None, true, true),
            (cache::keeps(), Some(2), true, true),
            (cache::cannot_truncate(), Some(3), false, true),
            (cache::forgets(), Some(2), false, false),
            (cache::forgets(), None, true, false),
        ] {
            let settings = ContrastiveSettings { penalty_alpha: alpha, top_k };
            let options = Options {
                prefill_chunk: chunk,
                keep_logits: true,
                keep_scores: true,
                ..options(config(alpha, top_k).max_new_tokens(NEW).suppress_tokens(vec![4]))
            };
            let model = Hashing::default();
            let mut rows = prompts();
            let mut steps = generation(&model, &mut cache, &rows, ragged, options);
            for step in steps.by_ref() {
                let step = step.unwrap();
                for (row, ids) in rows.iter_mut().enumerate() {
                    let mut scores = fake::logits(ids);
                    assert_eq!(step.logits.as_ref().unwrap()[row], scores);
                    scores[4] = f32::NEG_INFINITY;
                    assert_eq!(step.scores.as_ref().unwrap()[row], scores);
                    let token = expected(ids, settings, &[4]);
                    assert_eq!(step.tokens[row], Some(token), "row {row}, {settings:?}, {chunk:?}, {ragged}");
                    unlike_greedy += usize::from(greedy(&scores) != Some(token));
                    ids.push(token);
                }
            }
            drop(steps);
            // All but the last token, or that too where the cache cannot forget it.
            let held = if ragged { [5, 1, 3] } else { [5; 3] };
            let held = held.map(|prompt| if remembers { prompt + NEW - 1 } else { 0 });
            assert_eq!(
                cache.seq_lens(3),
                held.map(|len| len + usize::from(cache.cannot_rewind().is_some() && remembers))
            );
        }
    }
    assert!(unlike_greedy > 100, "{unlike_greedy}");
}

#[test]
fn the_cache_can_be_continued_by_greedy_decoding() {
    let model = Hashing::default();
    for steps in [0, 1, 3] {
        let mut cache = cache::keeps();
        let mut search = generation(&model, &mut cache, &prompts(), false, options(config(0.6, 4)));
        search.by_ref().take(steps).for_each(|step| _ = step.unwrap());
        let rows: Vec<Vec<TokenId>> = (0..3).map(|row| search.tokens(row).unwrap().to_vec()).collect();
        drop(search);
        if steps == 0 {
            assert_eq!(cache.seq_len(), 0);
            continue;
        }
        assert_eq!(cache.seq_len(), 5 + steps - 1);
        let last: Vec<Vec<TokenId>> = rows.iter().map(|row| vec![row[row.len() - 1]]).collect();
        let padding = Batch::left_padded(&prompts(), 0, &fake::device()).unwrap().left_pad;
        let batch = Batch { left_pad: padding, ..Batch::from_rows(&last, &fake::device()).unwrap() };
        let wanted = options(GenerationConfig::new().max_new_tokens(1));
        let mut more = Generation::new(model.shared(), &mut cache, batch, rows.clone(), wanted).unwrap();
        let want: Vec<_> = rows.iter().map(|row| greedy(&fake::logits(row))).collect();
        assert_eq!(more.next().unwrap().unwrap().tokens, want);
    }
}

#[test]
fn each_row_ends_at_its_own_end_token() {
    let model = Hashing::default();
    let all = |config: GenerationConfig| {
        let mut cache = cache::keeps();
        let mut search =
            generation(&model, &mut cache, &prompts(), false, options(config.max_new_tokens(12)));
        search.by_ref().for_each(|step| _ = step.unwrap());
        search.completions().into_iter().map(|mut of_prompt| of_prompt.remove(0)).collect::<Vec<_>>()
    };
    let free = all(config(0.6, 4));
    let end = free[0].tokens[4];
    for (free, ended) in free.iter().zip(all(config(0.6, 4).eos_token_id(vec![end]))) {
        let until = free.tokens.iter().position(|&token| token == end);
        assert_eq!(ended.tokens, free.tokens[..until.map_or(12, |at| at + 1)]);
        let reason = if until.is_some() { StopReason::EndOfText } else { StopReason::Length };
        assert_eq!(ended.stop_reason, Some(reason));
    }
}

#[test]
fn a_tiny_penalty_or_one_candidate_chooses_the_likeliest_token() {
    let model = Hashing::default();
    let mut cache = cache::keeps();
    let penalized = config(1e-6, 5).repetition_penalty(1.7).max_new_tokens(9);
    let options = |config| Options { keep_scores: true, ..options(config) };
    for step in generation(&model, &mut cache, &prompts()[..1], false, options(penalized)) {
        let step = step.unwrap();
        let (scores, token) = (&step.scores.unwrap()[0], step.tokens[0].unwrap());
        // There may be several.
        assert_eq!(scores[token as usize], scores[greedy(scores).unwrap() as usize]);
    }
    assert_eq!(config(0.9, 1).resolve().unwrap().contrastive, None);
}

/// Transformers takes others where they are less like the text, though their probability is 0.
#[test]
fn a_token_that_processors_removed_is_never_chosen() {
    assert_eq!(
        likeliest(&[0.0, f32::NEG_INFINITY, 3.0, 3.0, 1.0], 9)
            .unwrap()
            .iter()
            .map(|c| c.token)
            .collect::<Vec<_>>(),
        [2, 3, 4, 0]
    );
    assert_eq!(likeliest(&[0.5, 0.5, 0.5], 2).unwrap()[1], Candidate { token: 1, probability: 1.0 / 3.0 });
    assert!(likeliest(&[0.0, f32::NAN], 2).is_err() && likeliest(&[f32::NEG_INFINITY; 2], 2).is_err());
    let model = Hashing::default();
    let forced = config(1.0, 8).forced_eos_token_id(vec![11]).max_new_tokens(3);
    let mut cache = cache::keeps();
    let mut search = generation(&model, &mut cache, &prompts(), false, options(forced));
    search.by_ref().for_each(|step| _ = step.unwrap());
    for row in 0..3 {
        assert_eq!(search.tokens(row).unwrap().last(), Some(&11), "row {row}");
    }
}

#[test]
fn contrastive_search_with_incompatible_settings_is_an_error() {
    let said = |config: GenerationConfig| config.resolve().unwrap_err().to_string();
    for (other, name) in [
        (config(0.6, 4).do_sample(true), "do_sample"),
        (config(0.6, 4).num_beams(2), "num_beams"),
        (config(0.6, 4).guidance_scale(2.0), "guidance_scale"),
        (config(0.6, 4).dola_layers(crate::DolaLayers::Low), "dola_layers"),
        (config(0.6, 4).prompt_lookup_num_tokens(3), "prompt_lookup_num_tokens"),
    ] {
        let said = said(other);
        assert!(said.starts_with("penalty_alpha: ") && said.contains(&format!("`{name}`")), "{said}");
    }
    assert!(said(config(0.6, 0)).starts_with("top_k: is 0"));
    assert!(said(config(0.6, 5000)).starts_with("top_k: is 5000"));
    for alpha in [-0.1, 1.1, f32::NAN] {
        assert!(said(config(alpha, 4)).starts_with("penalty_alpha: "), "{alpha}");
    }
    assert_eq!(config(0.0, 4).do_sample(true).resolve().unwrap().contrastive, None);
    let default = GenerationConfig::new().penalty_alpha(0.6).resolve().unwrap();
    assert_eq!(default.contrastive.unwrap().top_k, 50);

    let several = config(0.6, 4).num_return_sequences(2).resolve().unwrap_err();
    assert!(several.to_string().contains("`num_return_sequences`"), "{several}");
    let model = Hashing::default();
    let mut cache = cache::keeps();
    let start = |cache: &mut ModelCache, prompt: Vec<TokenId>, all: Vec<TokenId>| {
        let batch = Batch::from_rows(&[prompt], &fake::device()).unwrap();
        Generation::new(model.shared(), cache, batch, vec![all], options(config(0.6, 4).max_new_tokens(2)))
            .map(drop)
    };
    generation(&model, &mut cache, &prompts()[..1], false, options(config(0.6, 4))).next().unwrap().unwrap();
    let said = start(&mut cache, vec![8], vec![3, 1, 4, 1, 5, 8]).unwrap_err().to_string();
    assert!(said.contains("the cache holds tokens already"), "{said}");
    cache.reset();
    assert_eq!(start(&mut cache, vec![8], vec![8]), Ok(()));
}
