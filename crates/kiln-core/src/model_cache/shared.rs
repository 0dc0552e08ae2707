//! Buffers that rows of different lengths share, so that one launch serves all of them.
//!
//! Rows of one length have their keys in one tensor, and one launch appends to it or attends over it. Rows of
//! different lengths have layers of their own, which would cost one launch each. If the strategy keeps
//! position `p` in slot `p`, all rows of a block lie in one buffer instead,
//! `[1, heads, slots of all rows, width]`: position `p` of a row is in slot `base + p`. All blocks use
//! the same bases, because all of them have seen the same tokens. Rows that come take the room of rows that
//! left; if there is none, all move to a larger buffer.
//!
//! Layers lend their keys and values to that buffer, and still answer questions. Operations that need the
//! tensors of a layer give them back first.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{LayerCache, ModelCache, groups::RowGroup};
use crate::{
    Error, Result, gapless,
    layer::{Kv, KvLayer, StepShape},
};

/// Largest number of tokens of a row in a pass for which rows begin to share buffers: more tokens are a
/// prompt, whose launches take long anyway.
const FEW: usize = 16;

/// Buffers of the blocks whose rows share one.
#[derive(Debug, Default)]
pub(super) struct SharedBuffers {
    /// By block, `[1, heads, slots, width]`; `None` if rows have buffers of their own.
    pub(super) blocks: Vec<Option<Kv>>,
    /// Number of slots of each of these buffers.
    slots: usize,
}

/// Slots of a group of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// First slot of the group's first row.
    pub(super) base: usize,
    /// Number of slots per row; rows are adjacent.
    pub(super) slots: usize,
}

/// Finds a region of `slots` slots in a buffer of `capacity` slots, in the first gap between `taken` ranges
/// that is large enough.
fn gap(taken: &mut [Range<usize>], slots: usize, capacity: usize) -> Option<usize> {
    taken.sort_by_key(|range| range.start);
    let starts = std::iter::once(0).chain(taken.iter().map(|range| range.end));
    let ends = taken.iter().map(|range| range.start).chain([capacity]);
    starts.zip(ends).find(|(start, end)| start + slots <= *end).map(|(start, _)| start)
}

impl SharedBuffers {
    /// Number of bytes of these blocks.
    pub(super) fn bytes(&self, blocks: &Range<usize>) -> usize {
        self.by_block().filter(|(block, _)| blocks.contains(block)).map(|(_, bytes)| bytes).sum()
    }

    fn largest(&self) -> usize {
        self.by_block().map(|(_, bytes)| bytes).max().unwrap_or(0)
    }

    fn by_block(&self) -> impl Iterator<Item = (usize, usize)> {
        let bytes = |tensor: &Tensor<4>| tensor.shape().num_elements() * tensor.dtype().size();
        let shared = move |(block, kv): (usize, &Option<Kv>)| {
            let (keys, values) = kv.as_ref()?;
            Some((block, bytes(keys) + bytes(values)))
        };
        self.blocks.iter().enumerate().filter_map(shared)
    }
}

impl ModelCache {
    /// Moves the keys of rows of different lengths into shared buffers, in the blocks whose strategy allows
    /// it, before a pass that feeds `step`. Models whose attention reads
    /// [`BlockKeys::Shared`](super::BlockKeys) call it.
    ///
    /// If there is no memory for that, or the device has no buffer as large, rows keep buffers of their own.
    ///
    /// # Errors
    /// The device's error in copying; then the cache is poisoned.
    pub fn share_buffers(&mut self, step: &StepShape, working: usize) -> Result<()> {
        let is_shared = self.groups.iter().any(|group| group.region.is_some());
        if self.is_poisoned() || self.groups.len() < 2 && !is_shared {
            return Ok(());
        }
        let wanted = if self.keeps_apart || step.tokens > FEW && !is_shared {
            Vec::new()
        } else {
            self.shareable(step.tokens)
        };
        if wanted.is_empty() {
            return self.give_back_all();
        }
        let has_room = |group: &RowGroup| {
            group.region.is_some_and(|region| group.seq_len() + step.tokens <= region.slots)
        };
        let known =
            (0..self.blocks()).filter(|&block| self.shared.blocks.get(block).is_some_and(Option::is_some));
        let is_arranged = known.eq(wanted.iter().copied()) && self.groups.iter().all(has_room);
        // Room of rows that left is given up where memory is short.
        let is_tight = self.has_gaps() && self.claim_for(&self.footprints(step, &[]), working).is_err();
        if is_arranged && !is_tight {
            return Ok(());
        }
        // While a block is moved, two copies of it exist.
        let layers = self.footprints_of_layers(step, &[]);
        let held = layers.iter().map(|part| part.bytes.held).max().unwrap_or(0);
        // Keys of all rows are one buffer, and so are their values.
        let widest = self.widest(step) as u64;
        let is_too_large = |largest: u64| widest > largest;
        if (0..self.blocks()).any(|block| self.largest_buffer(block).is_some_and(is_too_large)) {
            return self.give_back_all();
        }
        let moved = held.max(self.shared.largest());
        if self.claim_for(&layers, working.max(moved)).is_err() {
            self.keeps_apart = true;
            return self.give_back_all();
        }
        self.rearrange(&wanted, step.tokens, is_tight).inspect_err(|_| self.poison())
    }

    /// Size of the largest buffer that all rows would share while `step` is stored.
    fn widest(&self, step: &StepShape) -> usize {
        let mut by_part: Vec<usize> = Vec::new();
        for group in &self.groups {
            let step = StepShape { rows: group.rows.unwrap_or(step.rows), ..*step };
            for (i, part) in group.parts().enumerate() {
                by_part.resize(by_part.len().max(i + 1), 0);
                by_part[i] = by_part[i].saturating_add(part.footprint(&step).largest);
            }
        }
        by_part.into_iter().max().unwrap_or(0)
    }

    /// Returns the first slot of each row in buffers that rows share; 0 for rows that share none.
    pub fn bases(&self, rows: usize) -> Vec<usize> {
        let of_group = |group: &RowGroup| {
            let Region { base, slots } = group.region.unwrap_or(Region { base: 0, slots: 0 });
            (0..group.rows.unwrap_or(rows)).map(move |row| base + row * slots)
        };
        self.groups.iter().flat_map(of_group).collect()
    }

    /// Returns the blocks whose rows can share a buffer while each row stores `tokens` more tokens.
    fn shareable(&self, tokens: usize) -> Vec<usize> {
        if self.groups.iter().any(|group| group.seq_len() == 0 && group.region.is_none()) {
            return Vec::new();
        }
        let can = |&block: &usize| {
            let mut layers = self.groups.iter().map(|group| group.layers[block].keys.as_ref());
            layers.all(|keys| keys.is_some_and(|keys| keys.slots_for(tokens).is_some()))
        };
        (0..self.blocks()).filter(can).collect()
    }

    /// Gives each group whose rows have no room in the buffers of the `wanted` blocks a region with as many
    /// slots as its layers ask for. `anew`: all groups move to buffers without gaps.
    fn rearrange(&mut self, wanted: &[usize], tokens: usize, anew: bool) -> Result<()> {
        let kept: Vec<bool> = (0..self.blocks()).map(|block| wanted.contains(&block)).collect();
        if kept.iter().zip(&self.shared.blocks).any(|(kept, buffer)| !kept && buffer.is_some()) {
            self.give_back_all()?;
        }
        let known = wanted.iter().all(|&block| matches!(self.shared.blocks.get(block), Some(Some(_))));
        let regions = (known && !anew).then(|| self.regions_between(wanted, tokens)).flatten();
        let in_place = regions.is_some();
        let (regions, slots) = match regions {
            Some(regions) => (regions, self.shared.slots),
            None => self.regions_anew(wanted, tokens),
        };
        self.shared.blocks.resize_with(self.blocks(), || None);
        for &block in wanted {
            let old = self.shared.blocks[block].take();
            let mut moved = Vec::new();
            for (group, region) in self.groups.iter_mut().zip(&regions) {
                if in_place && group.region == Some(*region) {
                    continue;
                }
                let (len, rows) = (group.seq_len(), group.rows.or(self.rows).unwrap_or(1));
                let from = match (&old, group.region) {
                    (Some(old), Some(own)) => {
                        let part = |row| part(old, own.base + row * own.slots, len);
                        // A view would keep the buffer from being written in place.
                        (0..rows).map(part).map(|part| if in_place { apart(&part) } else { part }).collect()
                    }
                    _ => lent(keys_of(&mut group.layers[block])?, len)?,
                };
                let first = |row: usize| region.base + row * region.slots;
                moved.extend(from.into_iter().enumerate().map(|(row, kv)| (first(row), kv)));
            }
            let mut new = old.filter(|_| in_place);
            for (first, (keys, values)) in moved {
                let (k, v) = new.take().unwrap_or_else(|| (zeros(&keys, slots), zeros(&values, slots)));
                new = Some((written(k, keys, first), written(v, values, first)));
            }
            self.shared.blocks[block] = new;
        }
        self.shared.slots = slots;
        for (group, region) in self.groups.iter_mut().zip(regions) {
            group.region = Some(region);
        }
        Ok(())
    }

    /// Whether shared buffers have slots that belong to no row.
    fn has_gaps(&self) -> bool {
        let of_group = |group: &RowGroup| group.region.map_or(0, |own| own.slots * self.rows_of(group));
        self.groups.iter().map(of_group).sum::<usize>() < self.shared.slots
    }

    /// Number of slots that each row of a group asks for.
    fn slots_of(&self, group: &RowGroup, wanted: &[usize], tokens: usize) -> usize {
        let of_block =
            |&block: &usize| group.layers[block].keys.as_ref().and_then(|keys| keys.slots_for(tokens));
        wanted.iter().filter_map(of_block).max().unwrap_or(0).max(group.seq_len() + tokens)
    }

    fn rows_of(&self, group: &RowGroup) -> usize {
        group.rows.or(self.rows).unwrap_or(1)
    }

    /// Regions in the present buffers: groups that have room stay, and others get gaps. `None` if a group
    /// fits in no gap, or if the buffers would stay more than half empty.
    fn regions_between(&self, wanted: &[usize], tokens: usize) -> Option<Vec<Region>> {
        let capacity = self.shared.slots;
        let stays = |group: &RowGroup| group.region.filter(|own| group.seq_len() + tokens <= own.slots);
        let range = |group: &RowGroup, own: Region| own.base..own.base + own.slots * self.rows_of(group);
        let mut taken: Vec<_> =
            self.groups.iter().filter_map(|group| stays(group).map(|own| range(group, own))).collect();
        let mut regions = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            regions.push(match stays(group) {
                Some(own) => own,
                None => {
                    let slots = self.slots_of(group, wanted, tokens);
                    let base = gap(&mut taken, slots * self.rows_of(group), capacity)?;
                    let new = Region { base, slots };
                    taken.push(range(group, new));
                    new
                }
            });
        }
        let used: usize = taken.iter().map(ExactSizeIterator::len).sum();
        (2 * used >= capacity).then_some(regions)
    }

    /// Regions one after the other, and the number of all slots.
    fn regions_anew(&self, wanted: &[usize], tokens: usize) -> (Vec<Region>, usize) {
        let mut base = 0;
        let mut region = |group: &RowGroup| {
            let slots = self.slots_of(group, wanted, tokens);
            base += slots * self.rows_of(group);
            Region { base: base - slots * self.rows_of(group), slots }
        };
        let regions = self.groups.iter().map(&mut region).collect();
        (regions, base)
    }

    /// Gives all layers their keys and values back.
    pub(super) fn give_back_all(&mut self) -> Result<()> {
        (0..self.groups.len()).try_for_each(|group| self.give_back(group))?;
        self.shared = SharedBuffers::default();
        Ok(())
    }

    /// Gives the layers of a group their keys and values back. If the device fails, the cache is poisoned.
    pub(super) fn give_back(&mut self, group: usize) -> Result<()> {
        let rows = self.rows;
        let Some(group) = self.groups.get_mut(group) else { return Ok(()) };
        let Some(region) = group.region.take() else { return Ok(()) };
        let rows = group.rows.or(rows).unwrap_or(1);
        let returned = self.shared.blocks.iter().zip(&mut group.layers).try_for_each(|(shared, layer)| {
            shared.as_ref().map_or(Ok(()), |shared| {
                keys_of(layer)?.take_back(copied(shared, region, rows));
                Ok(())
            })
        });
        returned.inspect_err(|_| self.poison())
    }

    /// Copies the layers of a group, with keys and values of their own.
    pub(super) fn snapshot_of(&self, group: &RowGroup) -> RowGroup {
        let mut copy = group.snapshot();
        if let Some(region) = copy.region.take() {
            let rows = self.rows_of(group);
            for (shared, layer) in self.shared.blocks.iter().zip(&mut copy.layers) {
                if let (Some(shared), Some(keys)) = (shared, &mut layer.keys) {
                    keys.take_back(copied(shared, region, rows));
                }
            }
        }
        copy
    }
}

fn keys_of(layer: &mut LayerCache) -> Result<&mut dyn KvLayer> {
    match &mut layer.keys {
        Some(keys) => Ok(&mut **keys),
        None => Err(Error::Execution("a block without keys shares a buffer".to_owned())),
    }
}

/// Makes a layer give up its keys and values, and returns the first `len` positions of each row.
fn lent(layer: &mut dyn KvLayer, len: usize) -> Result<Vec<Kv>> {
    let kv = layer.lend()?.ok_or_else(|| Error::Execution("a layer has no keys to lend".to_owned()))?;
    let rows = kv.0.dims()[0];
    let row = |row: usize| {
        let own = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1).narrow(2, 0, len);
        (own(&kv.0), own(&kv.1))
    };
    Ok((0..rows).map(row).collect())
}

/// Returns `len` slots from `first` on.
fn part((keys, values): &Kv, first: usize, len: usize) -> Kv {
    (keys.clone().narrow(2, first, len), values.clone().narrow(2, first, len))
}

/// Copies keys and values.
fn apart((keys, values): &Kv) -> Kv {
    let copy = |tensor: &Tensor<4>| written(zeros(tensor, tensor.dims()[2]), tensor.clone(), 0);
    (copy(keys), copy(values))
}

fn zeros(like: &Tensor<4>, slots: usize) -> Tensor<4> {
    let [_, heads, _, dim] = like.dims();
    gapless::zeros([1, heads, slots, dim], (&like.device(), like.dtype()))
}

/// Writes `new` to the slots from `first` on.
fn written(buffer: Tensor<4>, new: Tensor<4>, first: usize) -> Tensor<4> {
    let [_, heads, len, dim] = new.dims();
    if len == 0 {
        return buffer;
    }
    buffer.slice_assign([0..1, 0..heads, first..first + len, 0..dim], new)
}

/// Copies the rows of a region into tensors of their own, `[rows, heads, slots, width]`.
fn copied((keys, values): &Kv, Region { base, slots }: Region, rows: usize) -> Kv {
    let own = |tensor: &Tensor<4>| {
        let [_, heads, _, dim] = tensor.dims();
        let rows = (0..rows).map(|row| tensor.clone().narrow(2, base + row * slots, slots));
        // Copied into new memory: a view would keep the whole buffer from being written in place.
        let new = gapless::zeros([rows.len(), heads, slots, dim], (&tensor.device(), tensor.dtype()));
        rows.enumerate()
            .fold(new, |new, (row, own)| new.slice_assign([row..row + 1, 0..heads, 0..slots, 0..dim], own))
    };
    (own(keys), own(values))
}

#[cfg(test)]
mod tests {
    use super::gap;

    #[test]
    fn the_first_gap_that_is_large_enough_is_taken() {
        let taken = || vec![40..50, 0..10, 12..30];
        assert_eq!(gap(&mut taken(), 2, 60), Some(10));
        assert_eq!(gap(&mut taken(), 3, 60), Some(30));
        assert_eq!(gap(&mut taken(), 10, 60), Some(30));
        assert_eq!(gap(&mut taken(), 11, 61), Some(50));
        assert_eq!(gap(&mut taken(), 11, 60), None);
        assert_eq!(gap(&mut [], 8, 8), Some(0));
        assert_eq!(gap(&mut [], 9, 8), None);
    }
}
