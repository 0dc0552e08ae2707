//! A forward pass, as a transaction on the cache.

use std::{ops::Range, thread};

use super::{LayerCache, ModelCache};
use crate::{
    Error, Result,
    layer::{CrossLayer, Kv, KvLayer, StateLayer},
};

/// A forward pass in progress, through which the layers are reached. If it is dropped before it is committed,
/// it is undone; if that is impossible, the cache is poisoned.
#[derive(Debug)]
pub struct Pass<'a> {
    pub(super) cache: &'a mut ModelCache,
    /// Number of rows of the batch.
    pub(super) rows: usize,
    /// Number of columns of the batch.
    pub(super) tokens: usize,
    /// For each group of rows, the number of leading columns of the batch that hold no tokens of the group,
    /// and the number of tokens that it had seen.
    pub(super) groups: Vec<(usize, usize)>,
    /// Whether an encoder had been run before the pass.
    pub(super) conditioned: bool,
    pub(super) committed: bool,
}

/// Adjacent rows of the batch that have seen the same number of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassRows {
    pub rows: Range<usize>,
    /// Number of columns of the batch before the rows' first token.
    pub skip: usize,
    /// Number of tokens seen before this pass.
    pub seen: usize,
}

/// Layer of a block, for some rows of the batch.
#[derive(Debug)]
pub struct RowPart<'a, L: ?Sized> {
    pub rows: Range<usize>,
    /// Number of columns of the batch before the first token of these rows; they are not stored.
    pub skip: usize,
    pub layer: &'a mut L,
}

/// Keys and values of a block, for all rows of the batch.
#[derive(Debug)]
pub enum BlockKeys<'a> {
    /// One part for all rows, or one for each length of rows.
    Apart(Vec<RowPart<'a, dyn KvLayer>>),
    /// One buffer for all rows.
    Shared(SharedRows<'a>),
}

/// Keys and values of rows that share a buffer.
#[derive(Debug)]
pub struct SharedRows<'a> {
    /// `[1, heads, slots of all rows, width]`. The caller takes the buffers out, writes at the
    /// positions of each part, and puts them back; then it [tells](KvLayer::stored) each layer.
    pub buffers: &'a mut Option<Kv>,
    pub parts: Vec<SharedPart<'a>>,
}

/// Adjacent rows of one length in a buffer that rows share.
#[derive(Debug)]
pub struct SharedPart<'a> {
    pub rows: Range<usize>,
    /// Number of columns of the batch before the first token of these rows; they are not stored.
    pub skip: usize,
    /// Slot of position 0 of the first row.
    pub base: usize,
    /// Number of slots per row; rows are adjacent.
    pub slots: usize,
    pub layer: &'a mut dyn KvLayer,
}

impl Pass<'_> {
    /// Returns the keys and values of block `layer`: one part for all rows, or one for each length of rows.
    pub fn attention(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn KvLayer>>> {
        self.cache.give_back_all()?;
        self.parts_of_keys(layer)
    }

    fn parts_of_keys(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn KvLayer>>> {
        self.parts(layer, "attention", |cache| cache.keys.as_deref_mut())
    }

    /// Returns the keys and values of block `layer`: in a buffer that rows share, or as
    /// [`attention`](Self::attention) returns them.
    pub fn keys(&mut self, layer: usize) -> Result<BlockKeys<'_>> {
        if !self.cache.shared.blocks.get(layer).is_some_and(Option::is_some) {
            return self.parts_of_keys(layer).map(BlockKeys::Apart);
        }
        self.cache.allocates(layer)?;
        let ModelCache { groups, shared, .. } = &mut *self.cache;
        let mut parts = Vec::with_capacity(groups.len());
        let mut row = 0;
        for (group, &(skip, _)) in groups.iter_mut().zip(&self.groups) {
            let rows = row..row + group.rows.unwrap_or(self.rows);
            row = rows.end;
            let wanted = Error::WrongMemory { layer, wanted: "attention" };
            let (Some(region), Some(own)) =
                (group.region, group.layers.get_mut(layer).and_then(|layer| layer.keys.as_deref_mut()))
            else {
                return Err(wanted);
            };
            parts.push(SharedPart { rows, skip, base: region.base, slots: region.slots, layer: own });
        }
        Ok(BlockKeys::Shared(SharedRows { buffers: &mut shared.blocks[layer], parts }))
    }

    /// Iterates over the groups of adjacent rows that have seen the same number of tokens, with the places of
    /// their new tokens.
    pub fn rows(&self) -> impl Iterator<Item = PassRows> {
        let mut row = 0;
        self.cache.groups.iter().zip(&self.groups).map(move |(group, &(skip, seen))| {
            let rows = row..row + group.rows.unwrap_or(self.rows);
            row = rows.end;
            PassRows { rows, skip, seen }
        })
    }

    /// Returns the encoder's keys and values for block `layer`.
    pub fn encoder(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn CrossLayer>>> {
        self.parts(layer, "encoder", |cache| cache.encoder.as_deref_mut())
    }

    /// Returns the recurrent state of block `layer`.
    pub fn recurrent(&mut self, layer: usize) -> Result<Vec<RowPart<'_, dyn StateLayer>>> {
        self.parts(layer, "recurrent", |cache| cache.state.as_deref_mut())
    }

    /// Makes the pass permanent.
    pub fn commit(mut self) {
        self.committed = true;
        self.cache.rows = Some(self.rows);
        // The pass wrote after tensors were handed out, so others do not hold the buffers written now.
        *self.cache.lent.get_mut() = false;
    }

    /// Returns the parts of a layer that is used now, and starts to bring the next one to the device.
    fn parts<L: ?Sized>(
        &mut self,
        layer: usize,
        wanted: &'static str,
        of: impl Fn(&mut LayerCache) -> Option<&mut L>,
    ) -> Result<Vec<RowPart<'_, L>>> {
        self.cache.allocates(layer)?;
        let mut parts = Vec::with_capacity(self.groups.len());
        let mut row = 0;
        for (group, &(skip, _)) in self.cache.groups.iter_mut().zip(&self.groups) {
            let layers = &mut group.layers;
            let next = (layer + 1) % layers.len().max(1);
            // A layer that stores nothing in this pass is not used, and stays where it is.
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

    /// Undoes the pass. Rows that cannot return to their earlier length are poisoned.
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
