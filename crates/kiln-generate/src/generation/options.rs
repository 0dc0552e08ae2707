//! Options of a generation.

use std::sync::Arc;

use kiln_core::model::TokenId;
use kiln_kernels::Kernels;

use crate::{OomPolicy, grammar::Matcher, settings::Settings, stopping::StoppingCriterion};

/// The options of a generation: its settings, and how it is run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub settings: Settings,
    /// Prompt tokens of each row that a forward pass takes; `None`: all.
    pub prefill_chunk: Option<usize>,
    /// Whether tokens are read one step behind the device. It changes no token; on a device that computes while the host
    /// goes on it saves the wait, on others it costs a step at the end.
    pub lookahead: bool,
    /// Whether each step carries the logits, and the scores after the processors. Either costs a row of the vocabulary
    /// a step, and the choice on the device.
    pub keep_logits: bool,
    pub keep_scores: bool,
    /// Whether the decode step is captured once and replayed, where the device has graphs and as long as the cache's
    /// buffers stay the same. It changes no token.
    pub compile: bool,
    /// What is done when memory runs out; `None`: the generation ends with the error.
    pub oom_policy: Option<Arc<dyn OomPolicy>>,
    /// What every text must match, compiled and at the beginning of a text. Scores are then processed on the host.
    pub grammar: Option<Matcher>,
    /// Whether tokens that a grammar forces are fed in one pass, where the cache can take them back. It changes no token.
    pub fast_forward: bool,
    /// The prompts that guidance (`guidance_scale`) moves away from: one for each prompt, or one for all. Without any, each is the
    /// last token of the prompt.
    pub negative_prompts: Vec<Vec<TokenId>>,
    /// What ends a row beside the settings.
    pub stopping_criteria: Vec<StoppingCriterion>,
    /// The model's kernels. Where one of them draws tokens, scores stay on the device; `None`: the host draws.
    pub kernels: Option<Kernels>,
}

impl Options {
    /// How many of the likeliest tokens of each row are all that the next step is chosen by, and the kernels that find them; `None`: the
    /// host needs all scores, or has them anyway.
    pub(super) fn likeliest_wanted(&self) -> Option<(Kernels, usize)> {
        let Options { settings, keep_logits, keep_scores, grammar, kernels, .. } = self;
        let beams = settings.beams.as_ref()?;
        let kernels = kernels.as_ref().filter(|kernels| kernels.path().is_on_gpu())?;
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
