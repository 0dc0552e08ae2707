//! From a request to the generation that it asks for.

use kiln_cache::Plan;
use kiln_core::{Error, Result, batch::Batch, model::TokenId, model_cache::ModelCache};
use kiln_generate::{CacheHandle, DraftModel, Generation, Options as GenerationOptions, StoppingCriterion};

use super::{Memory, Request};
use crate::{
    Model,
    chat::Answer,
    sequence::{Reuse, Steps},
};

impl<'a> Request<'a> {
    /// `ends_rows`: whether stop strings end rows. If not, whoever reads the text looks for them, unless there are beams.
    pub(super) fn start(self, ends_rows: bool) -> Result<(Steps<'a>, Option<Answer<'a>>)> {
        let Self { model, prompt, config, memory, draft, run, answer, negative_prompt, features } = self;
        let grammar = run.grammar.clone();
        let completed = |mut options: GenerationOptions| -> Result<GenerationOptions> {
            if let Some(grammar) = &grammar {
                let table = model.token_table(&options.settings.eos_token_id)?;
                options.grammar = Some(grammar.compile(&table)?);
            }
            let strings = options.settings.stop_strings.clone();
            if !strings.is_empty() && (ends_rows || options.settings.width() > 1) {
                let tokenizer = model.tokenizer()?.clone();
                options.stopping_criteria.push(StoppingCriterion::stop_strings(tokenizer, strings));
            }
            Ok(options)
        };
        let tokenizer = model.tokenizer().ok().cloned();
        let longest = |rows: &[Vec<TokenId>]| rows.iter().map(Vec::len).max().unwrap_or(0);
        let config = |cache: &ModelCache, tokens| match &answer {
            Some(answer) => answer.config(&config, &model, cache, tokens),
            None => config.clone(),
        };
        let negative = |cache: &ModelCache| -> Result<Vec<Vec<TokenId>>> {
            let Some(prompt) = negative_prompt else { return Ok(Vec::new()) };
            let rows = prompt.rows(&model, cache, false)?;
            model.room(cache, longest(&rows))?;
            Ok(rows)
        };
        let cache: CacheHandle<'a> = match memory {
            Memory::Own(plan) => model.cache(plan.as_ref().unwrap_or(model.plan()))?.into(),
            Memory::Cache(cache) => cache,
            Memory::Sequence(sequence) => {
                let rows = prompt.rows(&model, sequence.cache(), false)?;
                let tokens = longest(&rows);
                let config = config(sequence.cache(), tokens);
                let mut options =
                    completed(model.options(&config, &run, sequence.cache(), rows.len(), tokens)?)?;
                options.negative_prompts = negative(sequence.cache())?;
                let reuse = sequence.rewind(&rows, options.settings.contrastive.is_none())?;
                let batch = Batch { features, ..sequence.rest(&rows, &options.settings, &model)? };
                let (cache, held) = sequence.split();
                let generation = Generation::new(model.causal().clone(), cache, batch, rows, options)?;
                let generation = drafted(generation, &model, draft)?;
                return Ok((Steps::new(generation, Some(held), reuse, tokenizer), answer));
            }
        };
        let rows = prompt.rows(&model, &cache, cache.seq_len() > 0)?;
        if cache.seq_len() > 0 && rows.len() > 1 {
            // The cache does not know how its rows were padded.
            let why =
                "several rows cannot be continued here; use a Sequence, which knows how they were padded";
            return Err(Error::Prompt { why: why.to_owned() });
        }
        let tokens = longest(&rows) + cache.seq_len();
        let mut options =
            completed(model.options(&config(&cache, tokens), &run, &cache, rows.len(), tokens)?)?;
        options.negative_prompts = negative(&cache)?;
        let batch = Batch { features, ..model.batch(&rows, &options.settings, &cache)? };
        let generation =
            drafted(Generation::new(model.causal().clone(), cache, batch, rows, options)?, &model, draft)?;
        let reuse = Reuse { fed: generation.stats().prompt_tokens, ..Reuse::default() };
        Ok((Steps::new(generation, None, reuse, tokenizer), answer))
    }
}

/// Has `draft` propose the tokens of `generation`, where there is one.
///
/// # Errors
/// [`Error::Setting`] for a draft model whose tokenizer has nothing in common with that of the model.
fn drafted<'a>(generation: Generation<'a>, model: &Model, draft: Option<Model>) -> Result<Generation<'a>> {
    let Some(draft) = draft else { return Ok(generation) };
    let (cache, rows) = (draft.cache(&Plan::dynamic())?, generation.stats().rows);
    let device = draft.device().clone();
    let mut drafts = DraftModel::new(draft.causal().clone(), cache, device, draft.largest_chunk(rows));
    if let (Ok(own), Ok(other)) = (model.tokenizer(), draft.tokenizer())
        && (model.sizes().vocab != draft.sizes().vocab || !own.has_vocabulary_of(other))
    {
        if !own.shares_tokens_with(other) {
            let why =
                "has a tokenizer that has no token in common with that of the model; use another draft model";
            return Err(Error::Setting { name: "draft", why: why.to_owned() });
        }
        drafts = drafts.translated(other.clone(), own.clone());
    }
    generation.with_draft(drafts)
}
