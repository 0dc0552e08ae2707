//! The interface between the generation loop and a model.

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

/// Which positions of the batch get logits. Each position costs a row as long as the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits<'a> {
    Last,
    All,
    /// Logits of the last position from earlier layers, followed by the model's own:
    /// `[rows, layers + 1, vocab]`. Layer 0 is the embeddings, and layer `n` is the output of the first `n`
    /// blocks; the head is applied to it without the final norm. Layers must be ascending.
    Early(&'a [usize]),
    /// The inputs of the head instead of logits: the hidden states of all positions after the last norm,
    /// `[rows, tokens, hidden]`, in the type of the activations. [`CausalModel::head`] turns them into
    /// logits.
    Hidden,
    /// The attention of each token over the positions of the encoder instead of logits, for the given
    /// `(layer, head)` pairs: `[rows · heads, tokens, positions]` in float32, with the heads of a row next to
    /// each other, ordered by layer. Rows have equally many tokens.
    Alignment(&'a [(usize, usize)]),
}

/// A change of a matrix: it becomes itself plus `b a` (LoRA; Hu et al., 2021,
/// <https://arxiv.org/abs/2106.09685>).
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    /// Rows of `a`, and columns of `b`.
    pub rank: usize,
    /// `[rank, in]`
    pub a: Vec<f32>,
    /// `[out, rank]`, with its factor.
    pub b: Vec<f32>,
}

/// Changes of matrices by the names of their modules.
pub trait LowRankSource {
    /// Takes the change of the matrix `[out, in]` of a module; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::File`] for a change of a matrix of another shape.
    fn take(&mut self, module: &str, shape: [usize; 2]) -> Result<Option<LowRank>>;
}

/// Sizes of weights in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// On the device.
    pub held: usize,
    /// In host memory: experts that are copied to the device when tokens are routed to them, or that the CPU
    /// computes.
    pub in_host_memory: usize,
    /// Weights that each step reads: all except embeddings, of which a few rows are looked up, and experts
    /// that no token is routed to.
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

/// Copies of experts from host memory since the model was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertTraffic {
    /// Number of experts that tokens were routed to: each counts once per block and forward pass.
    pub used: u64,
    /// Number of these experts that were copied to the device, because they were not there.
    pub copied: u64,
    /// Number of bytes that were copied to the device.
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

/// Shape of the encoder's input for each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureShape {
    /// Number of elements per frame.
    pub bins: usize,
    /// Number of frames; always the same.
    pub frames: usize,
}

fn takes_no_changes() -> Error {
    Error::Setting { name: "adapter", why: "is given, and this kind of model takes none".to_owned() }
}

/// A decoder. It holds only weights: all state lives in the cache, so one model serves many sequences.
pub trait CausalModel: fmt::Debug + Send + Sync {
    /// Returns one entry per block, derived from the config alone.
    fn needs(&self) -> Vec<LayerNeed>;

    /// Size of the vocabulary; token ids are below it.
    fn vocab(&self) -> usize;

    /// Bytes per element of the keys and values that the model produces.
    fn element_bytes(&self) -> usize {
        4
    }

    /// Sizes of the model's weights.
    fn weight_bytes(&self) -> WeightBytes {
        WeightBytes::default()
    }

    /// Copies of experts from host memory so far; `None` if all experts are on the device.
    fn expert_traffic(&self) -> Option<ExpertTraffic> {
        None
    }

    /// The most rows of which each, in a pass with one token of every row, has the logits that it has alone,
    /// bit for bit. A model that does not say promises it of one.
    fn exact_rows(&self) -> usize {
        1
    }

    /// Whether the launches of a pass follow from shapes alone, so that a step can be captured.
    fn can_be_captured(&self) -> bool {
        true
    }

    /// Devices of blocks besides the device of the first block, to which tokens and features are fed. Logits
    /// are on the device of the last block.
    fn further_devices(&self) -> Vec<Device> {
        Vec::new()
    }

    /// Whether the model's attention reads buffers that rows share
    /// ([`BlockKeys::Shared`](crate::model_cache::BlockKeys)).
    fn reads_shared_buffers(&self) -> bool {
        false
    }

    /// Whether tokens see later ones, so that the model needs a whole text in one pass, and cannot continue
    /// it.
    fn is_bidirectional(&self) -> bool {
        false
    }

    /// Whether the model can turn hidden states into logits. Others return [`Logits::Hidden`] alone.
    fn has_head(&self) -> bool {
        true
    }

    /// Checks that the model can continue a text.
    ///
    /// # Errors
    /// [`Error::Setting`] if it only turns texts into embeddings.
    fn check_generative(&self) -> Result<()> {
        let reason = match (self.is_bidirectional(), self.has_head()) {
            (false, true) => return Ok(()),
            (true, _) => "its tokens see later ones",
            (false, false) => "its folder has no head",
        };
        let why = format!("cannot continue a text, because {reason}; it makes embeddings (`kiln embed`)");
        Err(Error::Setting { name: "model", why })
    }

    /// Whether the head uses the weights of the embeddings.
    fn ties_embeddings(&self) -> bool {
        false
    }

    /// Shape of the encoder's input, given with the first tokens of a sequence; `None` if the model has no
    /// encoder.
    fn features(&self) -> Option<FeatureShape> {
        None
    }

    /// Largest number of tokens in a sequence, if positions are looked up in a table.
    fn max_positions(&self) -> Option<usize> {
        None
    }

    /// Estimate of the bytes that the encoder takes for `rows` rows, including what it writes to the cache.
    fn encoding_bytes(&self, _rows: usize) -> usize {
        0
    }

    /// Estimate of the bytes that a forward pass over `tokens` tokens of `rows` rows takes at most, besides
    /// weights and cache.
    fn working_bytes(&self, _rows: usize, _tokens: usize) -> usize {
        0
    }

    /// Computes cosines and sines for `steps` tokens that are fed one at a time to rows at the given
    /// positions, `[1 or rows, steps, pairs]`, one pair for each kind of rotary positions of the model.
    fn rotary_tables(
        &self,
        _rows: &[RowPosition],
        _steps: usize,
        _device: &Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        Vec::new()
    }

    /// Changes matrices. `merges`: dense ones are replaced by their sums with the changes, one by one;
    /// otherwise, and for packed ones, changes are products of their own. After an error, some are changed.
    ///
    /// # Errors
    /// [`Error::Setting`] if the model takes no changes; the errors of `source`.
    fn adapt(&mut self, _source: &mut dyn LowRankSource, _merges: bool) -> Result<()> {
        Err(takes_no_changes())
    }

    /// Returns another model with the same weights, which it shares, to be [changed](Self::adapt).
    ///
    /// # Errors
    /// [`Error::Setting`] if the model takes no changes.
    fn another(&self) -> Result<Box<dyn CausalModel>> {
        Err(takes_no_changes())
    }

    /// Feeds `batch`, and returns logits `[rows, 1 or tokens, vocab]` in float32; see [`Logits`] for other
    /// outputs. The memory that the pass takes is claimed first, in the cache's budget.
    ///
    /// # Errors
    /// After an error the cache is unchanged; if it cannot be restored, it is poisoned and can only be reset.
    fn forward(&self, batch: &Batch, logits: Logits<'_>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        batch.check()?;
        batch.check_features(self.features(), cache)?;
        if logits != Logits::Hidden || self.is_bidirectional() && cache.seq_len() > 0 {
            self.check_generative()?;
        }
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

    /// Computes logits `[rows, tokens, vocab]` in float32 from hidden states `[rows, tokens, hidden]`; see
    /// [`Logits::Hidden`].
    fn head(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// The computation of [`forward`](Self::forward), which begins the pass and commits it.
    fn compute(&self, batch: &Batch, logits: Logits<'_>, pass: &mut Pass<'_>) -> Result<Tensor<3>>;
}
