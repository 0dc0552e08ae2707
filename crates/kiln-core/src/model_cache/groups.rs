//! Groups of rows of a batch that have seen the same number of tokens.
//!
//! A layer serves rows of one length. Rows of other lengths have layers of their own: a cache is a list of
//! groups, usually a single one. Groups are split when rows begin with prompts of different lengths, or are
//! truncated to different lengths; after that each group continues by itself.

use std::ops::Range;

use super::{LayerCache, shared::Region};
use crate::{
    Error, Result,
    layer::{CacheLayer, CrossLayer, KvLayer, Limits},
};

/// Adjacent rows that have seen the same number of tokens, with their layers for each block.
#[derive(Debug)]
pub(super) struct RowGroup {
    /// Number of rows; `None` for the only group, which is the whole batch.
    pub(super) rows: Option<usize>,
    pub(super) layers: Vec<LayerCache>,
    /// Whether a pass failed in the middle and could not be undone.
    pub(super) poisoned: bool,
    /// Slots of the group in buffers that rows share; `None` if its layers have their own.
    pub(super) region: Option<Region>,
}

impl RowGroup {
    /// Copies the group with only these of its rows. Tensors are shared until either copy writes.
    pub(super) fn select(&self, rows: &[usize]) -> Result<Self> {
        let mut group = self.snapshot();
        group.parts_mut().try_for_each(|part| part.reorder(rows))?;
        group.rows = Some(rows.len());
        Ok(group)
    }

    /// Splits the group into one group for each run of rows with equal entries in `keys`, which has one entry
    /// per row. This goes layer by layer, so that at most one layer exists twice.
    ///
    /// # Errors
    /// The device's error in copying a layer, with the remainder of the group.
    pub(super) fn split_by<K: PartialEq>(
        self,
        keys: &[K],
    ) -> std::result::Result<Vec<Self>, Box<(Error, Self)>> {
        let mut begin = 0;
        let runs = keys.chunk_by(PartialEq::eq).map(|run| {
            begin += run.len();
            (begin - run.len()..begin).collect::<Vec<usize>>()
        });
        let runs: Vec<Vec<usize>> = runs.collect();
        let new = |rows: &Vec<usize>| Self {
            rows: Some(rows.len()),
            layers: Vec::new(),
            poisoned: false,
            region: None,
        };
        let mut groups: Vec<Self> = runs.iter().map(new).collect();
        for layer in self.layers {
            for (group, rows) in groups.iter_mut().zip(&runs) {
                let mut own = layer.snapshot();
                let copied = own.parts_mut().try_for_each(|part| part.reorder(rows));
                group.layers.push(own);
                if let Err(error) = copied {
                    let layers = std::mem::take(&mut group.layers);
                    let left = Self { rows: self.rows, layers, poisoned: true, region: None };
                    return Err(Box::new((error, left)));
                }
            }
        }
        Ok(groups)
    }

    pub(super) fn snapshot(&self) -> Self {
        let layers = self.layers.iter().map(LayerCache::snapshot).collect();
        Self { rows: self.rows, layers, poisoned: self.poisoned, region: self.region }
    }

    /// Forgets everything.
    pub(super) fn reset(&mut self) {
        // A layer does not have the buffers that it would keep for the next sequence, because it lent them.
        if self.region.is_some() {
            return self.discard();
        }
        (self.rows, self.poisoned) = (None, false);
        self.parts_mut().for_each(|part| part.reset());
    }

    /// Forgets everything, and drops all buffers.
    pub(super) fn discard(&mut self) {
        (self.rows, self.poisoned, self.region) = (None, false, None);
        self.parts_mut().for_each(|part| part.discard());
    }

    /// Number of tokens seen so far. Always 0 for a stateless cache.
    pub(super) fn seq_len(&self) -> usize {
        self.timed().next().map_or(0, CacheLayer::seq_len)
    }

    /// Number of rows stored; `None` while nothing is stored.
    pub(super) fn stored_rows(&self) -> Option<usize> {
        self.parts().find_map(CacheLayer::rows)
    }

    /// Returns the largest length of at most `at_most` that every layer can return to exactly.
    pub(super) fn rewind_point(&self, at_most: usize) -> usize {
        let mut len = at_most.min(self.seq_len());
        loop {
            let shorter = self.timed().map(|layer| layer.rewind_point(len)).min().unwrap_or(len);
            if shorter == len {
                return len;
            }
            len = shorter;
        }
    }

    /// Name of a layer that cannot return to the first `len` tokens.
    pub(super) fn stuck_at(&self, len: usize) -> Option<&'static str> {
        let stuck = |layer: &&dyn CacheLayer| layer.seq_len() > len && layer.rewind_point(len) != len;
        self.timed().find(stuck).map(CacheLayer::name)
    }

    /// Checks that every layer can return to the first `len` tokens.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`] if a layer cannot.
    pub(super) fn check_rewind(&self, len: usize) -> Result<()> {
        self.stuck_at(len).map_or(Ok(()), |layer| Err(Error::CannotTruncate { layer, len }))
    }

    /// See [`ModelCache::admits`](super::ModelCache::admits).
    pub(super) fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.timed().try_for_each(|layer| layer.admits(tokens, padded))
    }

    /// Iterates over the layers that count the sequence's tokens.
    pub(super) fn timed(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().flat_map(LayerCache::timed)
    }

    pub(super) fn encoders(&self) -> impl Iterator<Item = &dyn CrossLayer> {
        self.layers.iter().filter_map(|layer| layer.encoder.as_deref())
    }

    pub(super) fn encoders_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn CrossLayer>> {
        self.layers.iter_mut().filter_map(|layer| layer.encoder.as_mut())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.layers.iter().filter_map(|layer| layer.keys.as_deref())
    }

    pub(super) fn limits(&self) -> impl Iterator<Item = Limits> {
        self.layers.iter().flat_map(LayerCache::limits)
    }

    /// Returns the layers of these blocks.
    pub(super) fn layers_of(&self, blocks: &Range<usize>) -> &[LayerCache] {
        let end = blocks.end.min(self.layers.len());
        &self.layers[blocks.start.min(end)..end]
    }

    pub(super) fn layers_of_mut(&mut self, blocks: &Range<usize>) -> &mut [LayerCache] {
        let end = blocks.end.min(self.layers.len());
        &mut self.layers[blocks.start.min(end)..end]
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().flat_map(LayerCache::parts)
    }

    pub(super) fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        self.layers.iter_mut().flat_map(LayerCache::parts_mut)
    }

    /// Forgets all tokens after the first `len`, in every layer that has seen more.
    pub(super) fn truncate(&mut self, len: usize) -> Result<()> {
        self.layers.iter_mut().flat_map(LayerCache::timed_mut).try_for_each(|layer| layer.truncate(len))
    }
}
