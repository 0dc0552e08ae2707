//! A forward pass, as a transaction on the cache.

use std::thread;

use super::{LayerCache, ModelCache};
use crate::{
    Error, Result,
    budget::Claim,
    layer::{CrossLayer, KvLayer, StateLayer},
};

/// A forward pass under way: it reaches the layers. Dropped before it is committed, it is taken back; where that cannot be,
/// the cache is poisoned.
#[derive(Debug)]
pub struct Pass<'a> {
    pub(super) cache: &'a mut ModelCache,
    /// Tokens that had been seen.
    pub(super) before: usize,
    pub(super) committed: bool,
}

impl Pass<'_> {
    /// The keys and values of block `layer`.
    pub fn attention(&mut self, layer: usize) -> Result<&mut dyn KvLayer> {
        match self.layer(layer)? {
            Some(LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. }) => Ok(&mut **kv),
            _ => Err(Error::WrongMemory { layer, wanted: "attention" }),
        }
    }

    /// The encoder's keys and values for block `layer`.
    pub fn encoder(&mut self, layer: usize) -> Result<&mut dyn CrossLayer> {
        match self.layer(layer)? {
            Some(LayerCache::EncoderDecoder { encoder, .. }) => Ok(&mut **encoder),
            _ => Err(Error::WrongMemory { layer, wanted: "encoder" }),
        }
    }

    /// The recurrent state of block `layer`.
    pub fn recurrent(&mut self, layer: usize) -> Result<&mut dyn StateLayer> {
        match self.layer(layer)? {
            Some(LayerCache::Recurrent(state)) => Ok(&mut **state),
            _ => Err(Error::WrongMemory { layer, wanted: "recurrent" }),
        }
    }

    /// The pass counts.
    pub fn commit(mut self) {
        self.committed = true;
        // It has written behind whatever was handed out.
        *self.cache.lent.get_mut() = false;
    }

    /// A layer, which is used now, while the next one is brought to the device.
    fn layer(&mut self, layer: usize) -> Result<Option<&mut LayerCache>> {
        self.cache.claim.as_ref().map_or(Ok(()), Claim::allocates)?;
        let layers = &mut self.cache.layers;
        let next = (layer + 1) % layers.len().max(1);
        layers.get_mut(next).map_or(Ok(()), |next| next.parts_mut().try_for_each(|part| part.prefetch()))?;
        Ok(layers.get_mut(layer))
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        // A layer that panicked may have lost its tensors.
        if !self.committed && (thread::panicking() || self.cache.truncate(self.before).is_err()) {
            self.cache.poison();
        }
        self.cache.recount();
    }
}
