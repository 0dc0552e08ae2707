//! What a Hugging Face folder holds, without loading its weights.

use std::{collections::BTreeMap, path::Path};

use kiln_cache::STRATEGIES;
use kiln_core::{Result, need::LayerNeed};
use kiln_models::{Sizes, checkpoint::Checkpoint, configure};

/// Facts about a checkpoint, read from its config and headers.
#[derive(Clone, Debug)]
pub struct Inspection {
    pub model_type: String,
    pub sizes: Sizes,
    /// Elements of all weights
    pub parameters: u64,
    /// Elements and bytes by the name of the type they are stored as
    pub by_dtype: BTreeMap<String, (u64, u64)>,
    /// Files that hold weights
    pub shards: usize,
    needs: Vec<LayerNeed>,
}

impl Inspection {
    /// # Errors
    /// What [`Checkpoint::open`] and [`configure`] say.
    pub fn of(folder: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(folder)?;
        let configured = configure(&checkpoint.config)?;
        let by_dtype = checkpoint.by_dtype();
        Ok(Self {
            model_type: checkpoint.config.model_type()?,
            sizes: configured.sizes(),
            parameters: by_dtype.values().map(|(elements, _)| elements).sum(),
            by_dtype,
            shards: checkpoint.shards(),
            needs: configured.needs(),
        })
    }

    /// Bytes a row of `tokens` tokens takes with each cache strategy, held in elements of `element` bytes.
    pub fn cache_bytes(&self, tokens: usize, element: usize) -> Vec<(&'static str, usize)> {
        let bytes = |strategy: &dyn kiln_cache::KvStrategy| {
            let block = |need: &LayerNeed| match need {
                LayerNeed::Attention(need) | LayerNeed::EncoderDecoder(need) => {
                    strategy.bytes(need, tokens, element)
                }
                LayerNeed::Recurrent(need) => need.channels * (need.conv_width + need.state_dim) * element,
                LayerNeed::Nothing => 0,
            };
            self.needs.iter().map(block).fold(0, usize::saturating_add)
        };
        STRATEGIES.iter().map(|strategy| (strategy.name(), bytes(*strategy))).collect()
    }
}
