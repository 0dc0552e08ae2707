//! Rows of a batch that have seen different numbers of tokens.
//!
//! A memory serves rows of one length. Rows of other lengths have memories of their own: a cache is a list of groups, and
//! usually of one. Groups are split when rows begin with prompts of different lengths, or are truncated to different
//! lengths; each then goes on by itself.

use super::LayerCache;
use crate::{
    Result,
    layer::{CacheLayer, KvLayer, StepShape},
};

/// Neighbouring rows that have seen as many tokens, with their memory of each block.
#[derive(Debug)]
pub(super) struct RowGroup {
    /// How many rows; `None`: the whole batch, whatever it is.
    pub(super) rows: Option<usize>,
    pub(super) layers: Vec<LayerCache>,
}

impl RowGroup {
    /// A copy with those of its rows. Tensors are shared until one of the two writes.
    pub(super) fn select(&self, rows: &[usize]) -> Result<Self> {
        let mut group = self.snapshot();
        group.parts_mut().try_for_each(|part| part.reorder(rows))?;
        group.rows = Some(rows.len());
        Ok(group)
    }

    /// A copy for each run of rows that have the same entry in `keys`, which has one a row.
    pub(super) fn split_by<K: PartialEq>(&self, keys: &[K]) -> Result<Vec<Self>> {
        let mut begin = 0;
        let runs = keys.chunk_by(PartialEq::eq).map(|run| {
            let rows: Vec<usize> = (begin..begin + run.len()).collect();
            begin += run.len();
            self.select(&rows)
        });
        runs.collect()
    }

    pub(super) fn snapshot(&self) -> Self {
        Self { rows: self.rows, layers: self.layers.iter().map(LayerCache::snapshot).collect() }
    }

    /// `step` for its rows.
    pub(super) fn step(&self, step: &StepShape) -> StepShape {
        StepShape { rows: self.rows.unwrap_or(step.rows), ..*step }
    }

    /// Tokens seen so far. Always 0 for a stateless cache.
    pub(super) fn seq_len(&self) -> usize {
        self.timed().next().map_or(0, CacheLayer::seq_len)
    }

    /// Rows of what is stored; `None` while nothing is.
    pub(super) fn stored_rows(&self) -> Option<usize> {
        self.parts().find_map(CacheLayer::rows)
    }

    /// The largest length, `at_most` or less, that every layer can return to exactly.
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

    /// The name of a layer that cannot return to the first `len` tokens.
    pub(super) fn stuck_at(&self, len: usize) -> Option<&'static str> {
        let stuck = |layer: &&dyn CacheLayer| layer.seq_len() > len && layer.rewind_point(len) != len;
        self.timed().find(stuck).map(CacheLayer::name)
    }

    /// See [`ModelCache::admits`](super::ModelCache::admits).
    pub(super) fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.timed().try_for_each(|layer| layer.admits(tokens, padded))
    }

    /// The layers that count the sequence's tokens.
    pub(super) fn timed(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().filter_map(LayerCache::timed)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.layers.iter().filter_map(LayerCache::keys)
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().flat_map(LayerCache::parts)
    }

    pub(super) fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        self.layers.iter_mut().flat_map(LayerCache::parts_mut)
    }

    /// Forgets all tokens behind the first `len`, in every layer that has seen more.
    pub(super) fn truncate(&mut self, len: usize) -> Result<()> {
        self.layers.iter_mut().filter_map(LayerCache::timed_mut).try_for_each(|layer| layer.truncate(len))
    }
}
