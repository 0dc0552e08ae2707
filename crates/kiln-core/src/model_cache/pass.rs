//! A forward pass, as a transaction on the cache.

use std::{ops::Range, thread};

use super::{LayerCache, ModelCache};
use crate::{
    Error, Result,
    budget::Claim,
    layer::{CrossLayer, Kv, KvLayer, StateLayer},
};

/// A forward pass under way: it reaches the layers. Dropped before it is committed, it is taken back; where that cannot be,
/// the cache is poisoned.
#[derive(Debug)]
pub struct Pass<'a> {
    pub(super) cache: &'a mut ModelCache,
    /// Of the batch.
    pub(super) rows: usize,
    /// Columns of the batch.
    pub(super) tokens: usize,
    /// For each group of rows, columns of the batch that are no tokens of it, and tokens that it had seen.
    pub(super) groups: Vec<(usize, usize)>,
    /// Whether an encoder had been run before.
    pub(super) conditioned: bool,
    pub(super) committed: bool,
}

/// Neighbouring rows of the batch that have seen as many tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassRows {
    pub rows: Range<usize>,
    /// Columns of the batch before their first token.
    pub skip: usize,
    /// Tokens before it.
    pub seen: usize,
}

/// Memory of a block, for some rows of the batch.
#[derive(Debug)]
pub struct RowPart<'a, L: ?Sized> {
    pub rows: Range<usize>,
    /// Columns of the batch before the first token of these rows: they are not stored.
    pub skip: usize,
    pub layer: &'a mut L,
}

/// Keys and values of a block, for all rows of the batch.
#[derive(Debug)]
pub enum BlockKeys<'a> {
    /// In one part for all rows, or one for each length that rows have.
    Apart(Vec<RowPart<'a, dyn KvLayer>>),
    /// In one buffer for all rows.
    Shared(SharedRows<'a>),
}

/// Keys and values of rows that share a buffer.
#[derive(Debug)]
pub struct SharedRows<'a> {
    /// `[1, kv_heads, slots of all rows, head_dim]`. To be taken out, written at the positions of each part, and put back; then each
    /// layer is to be [told](KvLayer::stored).
    pub buffers: &'a mut Option<Kv>,
    pub parts: Vec<SharedPart<'a>>,
}

/// Neighbouring rows of one length in a buffer that rows share.
#[derive(Debug)]
pub struct SharedPart<'a> {
    pub rows: Range<usize>,
    /// Columns of the batch before the first token of these rows: they are not stored.
    pub skip: usize,
    /// The slot of position 0 of the first row
    pub base: usize,
    /// Slots of each row; rows follow each other.
    pub slots: usize,
    pub layer: &'a mut dyn KvLayer,
}

impl Pass<'_> {
    /// The keys and values of block `layer`: one part for all rows, or one for each length that rows have.
    pub fn attention(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn KvLayer>>> {
        self.cache.give_back_all()?;
        self.parts_of_keys(layer)
    }

    fn parts_of_keys(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn KvLayer>>> {
        self.parts(layer, "attention", |cache| match cache {
            LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } => Some(&mut **kv),
            _ => None,
        })
    }

    /// The keys and values of block `layer`: of rows that share a buffer, or as [`attention`](Self::attention) gives them.
    pub fn keys(&mut self, layer: usize) -> Result<BlockKeys<'_>> {
        if !self.cache.shared.blocks.get(layer).is_some_and(Option::is_some) {
            return self.parts_of_keys(layer).map(BlockKeys::Apart);
        }
        self.cache.claim.as_ref().map_or(Ok(()), Claim::allocates)?;
        let ModelCache { groups, shared, .. } = &mut *self.cache;
        let mut parts = Vec::with_capacity(groups.len());
        let mut row = 0;
        for (group, &(skip, _)) in groups.iter_mut().zip(&self.groups) {
            let rows = row..row + group.rows.unwrap_or(self.rows);
            row = rows.end;
            let wanted = Error::WrongMemory { layer, wanted: "attention" };
            let (Some(region), Some(own)) =
                (group.region, group.layers.get_mut(layer).and_then(LayerCache::keys_mut))
            else {
                return Err(wanted);
            };
            parts.push(SharedPart { rows, skip, base: region.base, slots: region.slots, layer: own });
        }
        Ok(BlockKeys::Shared(SharedRows { buffers: &mut shared.blocks[layer], parts }))
    }

    /// Where the new tokens of rows stand: neighbouring rows that have seen as many tokens.
    pub fn rows(&self) -> impl Iterator<Item = PassRows> {
        let mut row = 0;
        self.cache.groups.iter().zip(&self.groups).map(move |(group, &(skip, seen))| {
            let rows = row..row + group.rows.unwrap_or(self.rows);
            row = rows.end;
            PassRows { rows, skip, seen }
        })
    }

    /// The encoder's keys and values for block `layer`.
    pub fn encoder(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn CrossLayer>>> {
        self.parts(layer, "encoder", |cache| match cache {
            LayerCache::EncoderDecoder { encoder, .. } => Some(&mut **encoder),
            _ => None,
        })
    }

    /// The recurrent state of block `layer`.
    pub fn recurrent(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn StateLayer>>> {
        self.parts(layer, "recurrent", |cache| match cache {
            LayerCache::Recurrent(state) => Some(&mut **state),
            _ => None,
        })
    }

    /// The pass counts.
    pub fn commit(mut self) {
        self.committed = true;
        self.cache.rows = Some(self.rows);
        // It has written behind whatever was handed out.
        *self.cache.lent.get_mut() = false;
    }

    /// A layer, which is used now, while the next one is brought to the device.
    fn parts<L: ?Sized>(
        &mut self,
        layer: usize,
        wanted: &'static str,
        of: impl Fn(&mut LayerCache) -> Option<&mut L>,
    ) -> Result<Vec<RowPart<'_, L>>> {
        self.cache.claim.as_ref().map_or(Ok(()), Claim::allocates)?;
        let mut parts = Vec::with_capacity(self.groups.len());
        let mut row = 0;
        for (group, &(skip, _)) in self.cache.groups.iter_mut().zip(&self.groups) {
            let layers = &mut group.layers;
            let next = (layer + 1) % layers.len().max(1);
            // What stores nothing is not used, and stays where it is.
            if let Some(next) = layers.get_mut(next).filter(|_| skip < self.tokens) {
                next.parts_mut().try_for_each(|part| part.prefetch())?;
            }
            let rows = row..row + group.rows.unwrap_or(self.rows);
            row = rows.end;
            let layer = layers.get_mut(layer).and_then(&of).ok_or(Error::WrongMemory { layer, wanted })?;
            parts.push(RowPart { rows, skip, layer });
        }
        Ok(parts)
    }

    /// Takes back what was stored. Rows that cannot return are poisoned.
    fn undo(&mut self) {
        for (group, &(_, before)) in self.cache.groups.iter_mut().zip(&self.groups) {
            if !self.conditioned {
                group.encoders_mut().for_each(|layer| layer.reset());
            }
            group.poisoned |= group.stuck_at(before).is_some() || group.truncate(before).is_err();
        }
        if self.cache.is_poisoned() {
            self.cache.rows = Some(self.rows);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        // A layer that panicked may have lost its tensors.
        match self.committed {
            true => {}
            false if thread::panicking() => self.cache.poison(),
            false => self.undo(),
        }
        self.cache.recount();
    }
}
