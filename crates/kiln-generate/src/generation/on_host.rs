//! Steps whose scores are read back, so that the host chooses the tokens.

use burn::tensor::{Tensor, TensorData};
use kiln_core::{
    Error, Result,
    read_back::{self, ReadBack},
};

use kiln_kernels::TopLogprobs;

use super::{
    Generation, Next, dola,
    rows::Stopping,
    search::{Choice, Scored, Top},
};
use crate::{
    decode::{Output, Wanted},
    grammar::{Mask, Masks},
};

/// The scores of a step on their way to the host.
#[derive(Debug)]
pub(crate) struct Scores {
    rows: usize,
    vocab: usize,
    read: ScoresRead,
    /// Logits of the prompts that guidance moves away from.
    negative: Option<ReadBack>,
}

#[derive(Debug)]
enum ScoresRead {
    All(ReadBack),
    Likeliest { tokens: ReadBack, log_probs: ReadBack, most: usize },
}

impl Generation<'_> {
    pub(super) async fn choose_on_host(&mut self) -> Result<Choice> {
        let negative = match &mut self.guidance {
            Some(guidance) => {
                let logits = guidance.feed(&self.next, self.width, self.options.prefill_chunk).await?;
                Some(read_back::start(logits))
            }
            None => None,
        };
        let Output::Logits(logits) = self.feed().await? else {
            return Err(Error::Execution("a step kept its scores on the device".into()));
        };
        let scores = self.read_scores(logits, negative);
        self.choose_scored(scores).await
    }

    /// Starts to read `logits` `[rows, 1, vocab]`, or the likeliest tokens where they are all that is needed.
    pub(super) fn read_scores(&self, logits: Tensor<3>, negative: Option<ReadBack>) -> Scores {
        let [rows, _, vocab] = logits.dims();
        let read = match self.options.likeliest_wanted() {
            Some((kernels, most)) => {
                let most = most.min(vocab);
                let (tokens, log_probs) = kernels.run(TopLogprobs { logits, most });
                let (tokens, log_probs) = (read_back::start(tokens), read_back::start(log_probs));
                ScoresRead::Likeliest { tokens, log_probs, most }
            }
            None => ScoresRead::All(read_back::start(logits)),
        };
        Scores { rows, vocab, read, negative }
    }

    /// Chooses the next token of each row by its scores.
    pub(super) async fn choose_scored(&mut self, scores: Scores) -> Result<Choice> {
        let Scores { rows, vocab, read, negative } = scores;
        let (logits, top) = match read {
            ScoresRead::Likeliest { tokens, log_probs, most } => {
                let tokens = tokens.finish().await;
                let tokens = self.trusted(tokens)?.iter().collect();
                (Vec::new(), Some(Top { tokens, log_probs: self.read(log_probs).await?, most }))
            }
            ScoresRead::All(logits) => (self.read(logits).await?, None),
        };
        let negative = match negative {
            Some(reading) => Some(self.read(reading).await?),
            None => None,
        };
        self.feeder.refusals.none_since()?;
        self.clock.scored(&mut self.stats);
        let masks = self.masks.as_mut().map_or(Ok(Vec::new()), Masks::wait)?;
        let masks: Vec<Mask> = masks.into_iter().flatten().map(|next| next.mask).collect();
        let (logits, begin) = match &self.feeder.running.wanted {
            Wanted::Early(layers) => {
                let (logits, begin) = dola::contrast(&logits, layers.len(), vocab);
                (logits, Some(begin))
            }
            Wanted::Last | Wanted::Hidden => (logits, None),
        };
        let begin = match self.guidance.as_ref().zip(negative) {
            Some((guidance, negative)) => {
                Some(guidance.scores(begin.as_ref().unwrap_or(&logits), &negative, vocab))
            }
            None => begin,
        };
        let step = Scored {
            masks: &masks,
            options: &self.options,
            rows: &self.rows,
            generated: self.delivered,
            limit: self.limit,
            logits: &logits,
            begin: begin.as_deref(),
            top: top.as_ref(),
            found: None,
            vocab,
        };
        let stopping = Stopping {
            options: &self.options,
            out_of_time: self.clock.is_past(self.options.settings.max_time),
        };
        let chosen = self.search.choose(&step, stopping)?;
        if let Some(following) = &mut self.masks {
            following.advance(step.accepted(&chosen))?;
        }
        let tokens: Vec<i32> = chosen.tokens.iter().map(|&id| id as i32).collect();
        let tokens = Tensor::from_data(TensorData::new(tokens, [rows, 1]), &self.device);
        let moves = |parents: &Vec<usize>| !parents.iter().copied().eq(0..parents.len());
        self.next = Next::Tokens(tokens, chosen.parents.clone().filter(moves));
        Ok(chosen)
    }

    /// The numbers of a tensor whose reading was started.
    pub(super) async fn read(&mut self, reading: ReadBack) -> Result<Vec<f32>> {
        let read = reading.finish().await;
        let read = self.trusted(read)?;
        read.try_into_vec().map_err(|e| Error::Execution(e.to_string()))
    }
}
