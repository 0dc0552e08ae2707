//! What the generation loop knows about a model.

use std::{fmt, ops::Add};

use burn::tensor::{Device, Tensor};

use crate::{
    Error, Result,
    batch::Batch,
    layer::{RowPosition, StepShape},
    model_cache::{ModelCache, Pass},
    need::LayerNeed,
};

pub type TokenId = u32;

/// Which positions of the batch get logits. Each costs a row of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits<'a> {
    Last,
    All,
    /// Of the last position those of earlier layers, then the model's own: `[rows, layers + 1, vocab]`. Layer 0 is the embeddings,
    /// layer `n` what the first `n` blocks give; the head is applied to it without the norm in front. Layers are ascending.
    Early(&'a [usize]),
    /// No logits, but what the head is applied to: the hidden states of all positions behind the last norm, `[rows, tokens, hidden]`, in the
    /// type of the activations. [`CausalModel::head`] makes logits of them.
    Hidden,
    /// No logits, but how the attention of each token is divided among the positions of the encoder, in these heads, each with its
    /// layer: `[rows · heads, tokens, positions]` in float32, the heads of a row next to each other, by layers.
    Alignment(&'a [(usize, usize)]),
}

/// Bytes of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// On the device.
    pub held: usize,
    /// In host memory: experts that are copied to the device when tokens go to them.
    pub in_host_memory: usize,
    /// Those that each step reads: all but embeddings of which a few rows are looked up, and experts that no token goes to.
    pub multiplied: usize,
}

impl Add for WeightBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            held: self.held + other.held,
            in_host_memory: self.in_host_memory + other.in_host_memory,
            multiplied: self.multiplied + other.multiplied,
        }
    }
}

/// What experts in host memory have cost since the model was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertTraffic {
    /// Experts that tokens went to: each counts once a block and forward pass.
    pub used: u64,
    /// Those of them that were copied to the device, because they were not there.
    pub copied: u64,
    /// Bytes that were copied to the device.
    pub bytes: u64,
}

impl Add for ExpertTraffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            used: self.used + other.used,
            copied: self.copied + other.copied,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// What an encoder is given of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureShape {
    /// Numbers of a frame.
    pub bins: usize,
    /// Frames, always as many.
    pub frames: usize,
}

/// A decoder. Weights only: all state lives in the cache, so one model serves many sequences.
pub trait CausalModel: fmt::Debug + Send + Sync {
    /// One entry per block, from the config alone.
    fn needs(&self) -> Vec<LayerNeed>;

    /// Tokens of the vocabulary; ids are below it.
    fn vocab(&self) -> usize;

    /// Bytes of a number of the keys and values that it makes.
    fn element_bytes(&self) -> usize {
        4
    }

    /// Bytes of its weights.
    fn weight_bytes(&self) -> WeightBytes {
        WeightBytes::default()
    }

    /// What experts in host memory have cost so far; `None` where all are on the device.
    fn expert_traffic(&self) -> Option<ExpertTraffic> {
        None
    }

    /// Whether what a pass launches follows from shapes alone, so that a step can be captured.
    fn can_be_captured(&self) -> bool {
        true
    }

    /// Whether its attention reads buffers that rows share ([`BlockKeys::Shared`](crate::model_cache::BlockKeys)).
    fn reads_shared_buffers(&self) -> bool {
        false
    }

    /// Whether the head has the weights of the embeddings.
    fn ties_embeddings(&self) -> bool {
        false
    }

    /// What its encoder is given with the first tokens of a sequence; `None` where it has none.
    fn features(&self) -> Option<FeatureShape> {
        None
    }

    /// Tokens that a sequence can have at all, where positions are looked up in a table.
    fn max_positions(&self) -> Option<usize> {
        None
    }

    /// Bytes that its encoder takes for `rows` rows, with what it writes to the cache; an estimate.
    fn encoding_bytes(&self, _rows: usize) -> usize {
        0
    }

    /// Bytes that a forward pass over `tokens` tokens of `rows` rows takes beside weights and cache, at most; an estimate.
    fn working_bytes(&self, _rows: usize, _tokens: usize) -> usize {
        0
    }

    /// Cosines and sines for `steps` tokens that are fed one at a time to rows that stand there, `[1 or rows, steps, pairs]`,
    /// for each kind of rotary positions that the model has.
    fn rotary_tables(
        &self,
        _rows: &[RowPosition],
        _steps: usize,
        _device: &Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        Vec::new()
    }

    /// Logits `[rows, 1 or tokens, vocab]` in float32, after feeding `batch`; see [`Logits`] for more of them. What that takes is claimed first, in the
    /// cache's budget.
    ///
    /// # Errors
    /// The cache is as it was before; where it cannot be, it is poisoned and can only be reset.
    fn forward(&self, batch: &Batch, logits: Logits<'_>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        batch.check()?;
        batch.check_features(self.features(), cache)?;
        let (rows, tokens) = (batch.rows(), batch.len());
        if let Some(capacity) = self.max_positions() {
            let needed = cache.seq_len() + tokens;
            if needed > capacity {
                return Err(Error::Full { capacity, needed });
            }
        }
        let step = StepShape { rows, tokens, element: self.element_bytes(), last: false };
        // In float32, before and after a softcap.
        let others = match logits {
            Logits::Last | Logits::Hidden | Logits::Alignment(_) => 0,
            Logits::All => tokens.saturating_sub(1),
            Logits::Early(layers) => layers.len(),
        };
        let others = 2 * 4 * self.vocab() * rows * others;
        let encoding = batch.features.as_ref().map_or(0, |_| self.encoding_bytes(rows));
        let working = self.working_bytes(rows, tokens).saturating_add(others).saturating_add(encoding);
        if self.reads_shared_buffers() {
            cache.share_buffers(&step, working)?;
        }
        let mut pass = cache.begin(&step, &batch.skip, batch.left_pad.iter().any(|&pad| pad > 0), working)?;
        let logits = self.compute(batch, logits, &mut pass)?;
        pass.commit();
        Ok(logits)
    }

    /// Logits `[rows, tokens, vocab]` in float32 of hidden states `[rows, tokens, hidden]`; see [`Logits::Hidden`].
    fn head(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// The computation of [`forward`](Self::forward), which has begun the pass and commits it.
    fn compute(&self, batch: &Batch, logits: Logits<'_>, pass: &mut Pass<'_>) -> Result<Tensor<3>>;
}
