//! Options of a generation.

use std::sync::Arc;

use kiln_core::model::TokenId;
use kiln_kernels::Kernels;

use crate::{OomPolicy, grammar::Matcher, settings::Settings, stopping::StoppingCriterion};

/// The options of a generation: its settings, and how it runs.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub settings: Settings,
    /// Number of prompt tokens of each row in a forward pass; `None`: all.
    pub prefill_chunk: Option<usize>,
    /// Whether the host reads tokens one step later than the device chooses them. The tokens do not change. A
    /// device that computes in the background saves the wait; others compute one step too many.
    pub lookahead: bool,
    /// Whether each step carries the logits, and the scores after the processors. Either one copies a row of
    /// the vocabulary per step, and makes the host choose the tokens.
    pub keep_logits: bool,
    pub keep_scores: bool,
    /// Number of the likeliest tokens of each position of the prompt whose log-probabilities are told, beside
    /// that of the token that is there; `None`: none are.
    pub prompt_logprobs: Option<usize>,
    /// Whether the decode step is captured once and replayed, if the device has graphs and as long as the
    /// buffers of the cache stay the same. The tokens do not change.
    pub compile: bool,
    /// The scope within which an engine may begin this prompt with the cache of another one
    /// ([`Engine::with_prefixes`](crate::Engine::with_prefixes)): the same model and strategies of the cache,
    /// and users who may notice each other's prompts by their time; `None`: none.
    pub prefix_scope: Option<String>,
    /// The answer to an error of memory; `None`: the generation ends with the error.
    pub oom_policy: Option<Arc<dyn OomPolicy>>,
    /// The grammar that every text must match, compiled and at the beginning of a text. Scores are then
    /// processed on the host.
    pub grammar: Option<Matcher>,
    /// Whether tokens that a grammar forces are fed in one pass, if the cache can forget them. The tokens do
    /// not change.
    pub fast_forward: bool,
    /// The most tokens that are drafted by prompt lookup for a pass, where that changes no token: one
    /// sequence of one prompt, and a cache that can forget wrong drafts and does not depend on passes. An
    /// [`Engine`](crate::Engine) drafts only while it computes nothing else. `None`: drafts are made only if
    /// the settings ask for them.
    pub lookup_drafts: Option<usize>,
    /// The prompts that guidance (`guidance_scale`) moves away from: one for each prompt, or one for all.
    /// Default: the last token of each prompt.
    pub negative_prompts: Vec<Vec<TokenId>>,
    /// Conditions that end a row, beside the settings.
    pub stopping_criteria: Vec<StoppingCriterion>,
    /// The kernels of the model. If one of them samples tokens, scores stay on the device; `None`: the host
    /// samples.
    pub kernels: Option<Kernels>,
}

impl Options {
    /// Number of the likeliest tokens of each row that are enough to choose the next step, and the kernels
    /// that find them; `None`: the host needs all scores, or has them anyway.
    pub(super) fn likeliest_wanted(&self) -> Option<(Kernels, usize)> {
        let Options { settings, keep_logits, keep_scores, grammar, kernels, .. } = self;
        let beams = settings.beams.as_ref()?;
        let kernels = kernels.as_ref().filter(|kernels| kernels.implementation().is_on_gpu())?;
        let all = *keep_logits
            || *keep_scores
            || grammar.is_some()
            || settings.do_sample
            || settings.guidance_scale.is_some()
            || !settings.processors.is_empty()
            || !beams.force_words.is_empty();
        let most = beams.candidates(settings.eos_token_id.len()) + beams.penalized();
        (!all).then(|| (kernels.clone(), most))
    }
}
