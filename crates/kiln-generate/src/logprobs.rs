//! Log-probabilities of tokens.

use burn::tensor::Tensor;
use kiln_core::{
    Error, Result,
    model::{CausalModel, TokenId},
    read_back,
};

/// Log-probabilities of a position, by the model's logits before any setting changes them: their
/// `log_softmax`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Logprobs {
    /// That of the token that was chosen, or is there in a prompt.
    pub chosen: f32,
    /// The likeliest tokens, the likeliest first.
    pub top: Vec<(TokenId, f32)>,
}

impl Logprobs {
    /// Computes the log-probabilities of `chosen` and of the `top` likeliest tokens from the `logits` of a
    /// position.
    pub fn of(logits: &[f32], chosen: TokenId, top: usize) -> Self {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
        let log_prob = |logit: f32| (f64::from(logit) - f64::from(most) - sum.ln()) as f32;
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        // Equal ones in the order of their numbers.
        let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let top = top.min(ids.len());
        if top < ids.len() {
            ids.select_nth_unstable_by(top, by_logit);
        }
        ids.truncate(top);
        ids.sort_unstable_by(by_logit);
        Self {
            chosen: logits.get(chosen as usize).map_or(f32::NEG_INFINITY, |&logit| log_prob(logit)),
            top: ids.into_iter().map(|id| (id as TokenId, log_prob(logits[id]))).collect(),
        }
    }
}

/// The log-probabilities of the tokens of a prompt, as far as it was fed.
#[derive(Debug)]
pub(crate) struct PromptLogprobs {
    prompt: Vec<TokenId>,
    /// Number of the likeliest tokens of each position.
    top: usize,
    /// Of each token of the prompt; `None` for the first, which follows nothing.
    pub(crate) found: Vec<Option<Logprobs>>,
}

impl PromptLogprobs {
    pub(crate) fn new(prompt: Vec<TokenId>, top: usize) -> Self {
        let found = vec![None; prompt.len()];
        Self { prompt, top, found }
    }

    /// Takes the hidden states `[1, tokens, hidden]` of the tokens before `end`. Returns the logits `[1, 1,
    /// vocab]` of the last.
    pub(crate) async fn take(
        &mut self,
        hidden: Tensor<3>,
        end: usize,
        model: &dyn CausalModel,
    ) -> Result<Tensor<3>> {
        /// Positions whose logits are in memory at once.
        const AT_ONCE: usize = 32;

        let fed = hidden.dims()[1];
        let mut scored = end - fed;
        // The last token of the prompt is followed by one that is still to be chosen.
        let last = end.min(self.prompt.len().saturating_sub(1));
        while scored < last {
            let positions = AT_ONCE.min(last - scored);
            let logits = model.head(hidden.clone().narrow(1, scored + fed - end, positions));
            let vocab = logits.dims()[2];
            let logits: Vec<f32> = read_back::start(logits)
                .finish()
                .await?
                .try_into_vec()
                .map_err(|e| Error::Execution(e.to_string()))?;
            for (row, position) in logits.chunks_exact(vocab).zip(scored + 1..) {
                self.found[position] = Some(Logprobs::of(row, self.prompt[position], self.top));
            }
            scored += positions;
        }
        Ok(model.head(hidden.narrow(1, fed - 1, 1)))
    }
}
