//! Memory of one block.

use crate::{
    Result,
    layer::{CacheLayer, CrossLayer, KvLayer, Limits, StateLayer},
};

/// Memory of one block: each kind that the block has. The kind matters to the model, hence fields; the
/// strategy does not, hence boxes.
#[derive(Debug, Default)]
pub struct LayerCache {
    /// Keys and values of the sequence.
    pub keys: Option<Box<dyn KvLayer>>,
    /// Keys and values of an encoder.
    pub encoder: Option<Box<dyn CrossLayer>>,
    pub state: Option<Box<dyn StateLayer>>,
}

impl LayerCache {
    /// Whether the block remembers anything.
    pub fn is_empty(&self) -> bool {
        self.parts().next().is_none()
    }

    /// Whether the layer is on the device only while it is used.
    pub fn is_offloaded(&self) -> bool {
        self.parts().any(CacheLayer::is_offloaded)
    }

    /// Moves the layer to host memory. From then on it is on the device only while it is used.
    pub fn offload(&mut self) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.offload())
    }

    /// Copies the layer lazily: tensors are shared until either copy writes.
    pub(super) fn snapshot(&self) -> Self {
        Self {
            keys: self.keys.as_ref().map(|keys| keys.snapshot()),
            encoder: self.encoder.as_ref().map(|encoder| encoder.snapshot()),
            state: self.state.as_ref().map(|state| state.snapshot()),
        }
    }

    /// Returns the limits of the layers that count the sequence's tokens.
    pub(super) fn limits(&self) -> impl Iterator<Item = Limits> {
        let keys = self.keys.iter().map(|keys| keys.limits());
        keys.chain(self.state.iter().map(|state| state.limits()))
    }

    /// See [`KvLayer::replayable`]; `None` if there is nothing to write.
    pub(super) fn replayable(&self) -> Option<usize> {
        if self.encoder.as_ref().is_some_and(|encoder| encoder.is_offloaded()) {
            return Some(0);
        }
        let keys = self.keys.iter().map(|keys| keys.replayable());
        keys.chain(self.state.iter().map(|state| state.replayable())).min()
    }

    /// Counts a token that a replayed step stored.
    pub(super) fn replayed(&mut self) {
        self.keys.iter_mut().for_each(|keys| keys.replayed());
        self.state.iter_mut().for_each(|state| state.replayed());
    }

    /// Returns the layers that count the sequence's tokens. An encoder's keys do not count them: decoding
    /// leaves no trace there.
    pub(super) fn timed(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        let keys = self.keys.as_deref().map(|keys| keys as &dyn CacheLayer);
        keys.into_iter().chain(self.state.as_deref().map(|state| state as &dyn CacheLayer))
    }

    pub(super) fn timed_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        let keys = self.keys.as_deref_mut().map(|keys| keys as &mut dyn CacheLayer);
        keys.into_iter().chain(self.state.as_deref_mut().map(|state| state as &mut dyn CacheLayer))
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.timed().chain(self.encoder.as_deref().map(|encoder| encoder as &dyn CacheLayer))
    }

    pub(super) fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        let keys = self.keys.as_deref_mut().map(|keys| keys as &mut dyn CacheLayer);
        let state = self.state.as_deref_mut().map(|state| state as &mut dyn CacheLayer);
        let encoder = self.encoder.as_deref_mut().map(|encoder| encoder as &mut dyn CacheLayer);
        [keys, state, encoder].into_iter().flatten()
    }
}
