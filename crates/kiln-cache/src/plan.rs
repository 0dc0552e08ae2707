//! From what a model needs to what it gets.

use kiln_core::{
    Error, Result,
    model_cache::{LayerCache, ModelCache},
    need::{AttentionNeed, LayerNeed},
};

use crate::{KvStrategy, STRATEGIES, cross::WriteOnceLayer, recurrent::RecurrentLayer};

/// Which strategy serves the attention blocks.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub attention: &'static dyn KvStrategy,
}

impl Plan {
    /// The plan called `name` on the command line.
    ///
    /// # Errors
    /// [`Error::Unknown`] with the known names.
    pub fn named(name: &str) -> Result<Self> {
        let attention =
            STRATEGIES.iter().copied().find(|s| s.name() == name).ok_or_else(|| Error::Unknown {
                what: "cache strategy",
                name: name.to_owned(),
                known: STRATEGIES.iter().map(|s| s.name().to_owned()).collect(),
            })?;
        Ok(Self { attention })
    }

    /// One memory per need.
    pub fn build(&self, needs: &[LayerNeed]) -> Result<ModelCache> {
        let attention = |need: &AttentionNeed| self.attention.build(need);
        let layers: Result<_> = needs
            .iter()
            .map(|need| {
                Ok(match need {
                    LayerNeed::Attention(need) => LayerCache::Attention(attention(need)?),
                    LayerNeed::EncoderDecoder(need) => LayerCache::EncoderDecoder {
                        decoder: attention(need)?,
                        encoder: Box::<WriteOnceLayer>::default(),
                    },
                    LayerNeed::Recurrent(_) => LayerCache::Recurrent(Box::<RecurrentLayer>::default()),
                    LayerNeed::Nothing => LayerCache::Nothing,
                })
            })
            .collect();
        Ok(ModelCache::new(layers?))
    }
}
