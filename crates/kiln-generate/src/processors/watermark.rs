//! The processor that embeds a watermark.

use kiln_core::{Result, model::TokenId};

use super::{
    Processor, RowState,
    repetition::{padded, padding},
};
use crate::{
    config::GenerationConfig,
    watermark::{GreenList, SynthId, WatermarkingConfig},
};

/// Favors the tokens that a key selects. Padding counts, as in transformers. (`WatermarkLogitsProcessor`,
/// `SynthIDTextWatermarkLogitsProcessor`)
///
/// A step takes as many random numbers as there are green tokens (`lefthash`), 40 times as many (`selfhash`),
/// or, for SynthID, a hash for each key and possible token, and `context_history_size * ngram_len` more.
#[derive(Debug)]
pub(super) struct Watermark {
    scheme: Scheme,
    pad: Option<TokenId>,
}

#[derive(Debug)]
enum Scheme {
    GreenList(GreenList),
    SynthId(SynthId),
}

impl Watermark {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let scheme = match &config.watermarking_config {
            Some(WatermarkingConfig::GreenList(green_list)) => Scheme::GreenList(GreenList::new(green_list)?),
            Some(WatermarkingConfig::SynthId(synth_id)) => Scheme::SynthId(SynthId::new(synth_id)?),
            None => return Ok(None),
        };
        Ok(Some(Self { scheme, pad: padding(config) }))
    }
}

impl Processor for Watermark {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        match &self.scheme {
            Scheme::GreenList(green_list) => {
                green_list.apply(&padded(row.ids, row, self.pad), row.len, scores);
            }
            Scheme::SynthId(synth_id) => synth_id.apply(&row.ids[row.prompt().len()..], scores),
        }
    }
}
