//! Conversion of a request into a generation.

use kiln_cache::Plan;
use kiln_core::{Error, Result, batch::Batch, model::TokenId, model_cache::ModelCache};
use kiln_generate::{CacheHandle, DraftModel, Generation, Options, StoppingCriterion};

use super::{Memory, Request};
use crate::{
    Model,
    chat::Answer,
    sequence::{Reuse, Steps},
};

impl<'a> Request<'a> {
    /// Starts the generation. `ends_rows`: whether stop strings end rows. If not, the reader of the text
    /// looks for them, unless there are beams.
    pub(super) fn start(self, ends_rows: bool) -> Result<(Steps<'a>, Option<Answer<'a>>)> {
        let Self {
            model,
            prompt,
            config,
            memory,
            draft,
            options,
            on_oom,
            processors,
            allowed_tokens,
            grammar,
            ending,
            answer,
            negative_prompt,
            features,
            logprobs: _,
            special_tokens: _,
        } = self;
        model.causal().check_generative()?;
        let tokenizer = model.tokenizer().ok().cloned();
        let longest = |rows: &[Vec<TokenId>]| rows.iter().map(Vec::len).max().unwrap_or(0);
        let config = config.merged_over(model.generation_config());
        let mut prefix_scope = options.prefix_scope.clone();
        // All options, for `rows` rows of `tokens` tokens each in `cache`.
        let complete = |cache: &ModelCache, rows: usize, tokens: usize| -> Result<Options> {
            let config = match &ending {
                Some(ending) => ending.config(config, &model, cache, tokens),
                None => config,
            };
            let mut settings = config.resolve()?;
            model.name_what_is_not_applied(&config);
            allowed_tokens.into_iter().for_each(|allowed| settings.add_allowed_tokens(allowed));
            processors.into_iter().for_each(|own| settings.add_processor(own));
            let mut options = model.fitted(Options { settings, ..options }, on_oom, cache, rows, tokens)?;
            if let Some(grammar) = grammar {
                let table = model.token_table(options.settings.eos_token_id())?;
                options.grammar = Some(grammar.compile(&table)?);
            }
            let strings = options.settings.stop_strings().to_vec();
            if !strings.is_empty() && (ends_rows || options.settings.width() > 1) {
                let tokenizer = model.tokenizer()?.clone();
                options.stopping_criteria.push(StoppingCriterion::stop_strings(tokenizer, strings));
            }
            if let Some(prompt) = negative_prompt {
                options.negative_prompts = prompt.rows(&model, cache, false)?;
                model.room(cache, longest(&options.negative_prompts))?;
            }
            Ok(options)
        };
        let cache: CacheHandle<'a> = match memory {
            Memory::Own(plan) => {
                let plan = plan.as_ref().unwrap_or(model.plan());
                prefix_scope = prefix_scope.map(|name| format!("{plan} {name}"));
                model.cache(plan)?.into()
            }
            Memory::Cache(cache) => cache,
            Memory::Sequence(sequence) => {
                let rows = prompt.rows(&model, sequence.cache(), false)?;
                let options = complete(sequence.cache(), rows.len(), longest(&rows))?;
                let reuse = sequence.rewind(&rows, !options.settings.is_contrastive())?;
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
        let options = complete(&cache, rows.len(), longest(&rows) + cache.seq_len())?;
        let options = Options { prefix_scope: prefix_scope.filter(|_| cache.rows().is_none()), ..options };
        let batch = Batch { features, ..model.batch(&rows, &options.settings, &cache)? };
        let generation = Generation::new(model.causal().clone(), cache, batch, rows, options)?;
        let generation = drafted(generation, &model, draft)?;
        let reuse = Reuse { fed: generation.stats().prompt_tokens, ..Reuse::default() };
        Ok((Steps::new(generation, None, reuse, tokenizer), answer))
    }
}

/// Makes `draft`, if there is one, the draft model of `generation`.
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
