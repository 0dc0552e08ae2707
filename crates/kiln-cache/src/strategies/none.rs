//! Remembers nothing: every step recomputes the whole sequence (transformers' `use_cache=False`).
//!
//! The slow way that every other strategy is compared with.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::AnySlot,
    view::KvView,
};
use kiln_kernels::Kernels;

use super::{KvFactory, KvStrategy, Settings};
use crate::restored;

#[derive(Debug)]
pub(super) struct NoCache;

impl KvStrategy for NoCache {
    fn name(&self) -> &'static str {
        "none"
    }

    fn summary(&self) -> &'static str {
        "remembers nothing and recomputes the whole sequence at every step"
    }

    fn configure(&self, settings: Settings) -> Result<Arc<dyn KvFactory>> {
        settings.done()?;
        Ok(Arc::new(Self))
    }
}

impl KvFactory for NoCache {
    fn remembers(&self) -> bool {
        false
    }

    fn bytes(&self, _need: &AttentionNeed, _tokens: usize, _element: usize) -> usize {
        0
    }

    fn build(&self, _need: &AttentionNeed, _kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        Ok(Box::new(NoLayer))
    }
}

#[derive(Debug)]
struct NoLayer;

impl KvLayer for NoLayer {
    fn span(&self, n: usize) -> KvSpan {
        KvSpan { start: 0, len: n }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, _place: &Place) -> Result<KvView> {
        Ok(KvView::from_zero(keys, values))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        Ok(None)
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(Self)
    }
}

impl CacheLayer for NoLayer {
    fn name(&self) -> &'static str {
        "none"
    }

    fn seq_len(&self) -> usize {
        0
    }

    fn can_roll_back(&self, n: usize) -> bool {
        n == 0
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        Ok(())
    }

    fn keep_history(&mut self, _n: usize) {}

    fn reset(&mut self) {}

    fn counts(&self) -> Vec<usize> {
        Vec::new()
    }

    fn restore(&mut self, state: LayerState, _device: &Device) -> Result<()> {
        restored::parts::<0, 0>(state).map(|_| ())
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        Vec::new()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        Vec::new()
    }
}
