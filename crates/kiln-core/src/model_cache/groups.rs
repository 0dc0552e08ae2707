//! Rows of a batch that have seen different numbers of tokens.
//!
//! A memory serves rows of one length. Rows of other lengths have memories of their own: a cache is a list of groups, and
//! usually of one. Groups are split when rows begin with prompts of different lengths, or are truncated to different
//! lengths; each then goes on by itself.

use super::{LayerCache, shared::Region};
use crate::{
    Error, Result,
    layer::{CacheLayer, CrossLayer, KvLayer, Limits},
};

/// Neighbouring rows that have seen as many tokens, with their memory of each block.
#[derive(Debug)]
pub(super) struct RowGroup {
    /// How many rows; `None` for the only group, which is the whole batch.
    pub(super) rows: Option<usize>,
    pub(super) layers: Vec<LayerCache>,
    /// Whether a pass failed in the middle and could not be taken back.
    pub(super) poisoned: bool,
    /// Its slots in buffers that rows share; `None` where its layers have their own.
    pub(super) region: Option<Region>,
}

impl RowGroup {
    /// A copy with those of its rows. Tensors are shared until one of the two writes.
    pub(super) fn select(&self, rows: &[usize]) -> Result<Self> {
        let mut group = self.snapshot();
        group.parts_mut().try_for_each(|part| part.reorder(rows))?;
        group.rows = Some(rows.len());
        Ok(group)
    }

    /// A group for each run of rows that have the same entry in `keys`, which has one a row. Layer by layer, so that no more
    /// than one of them is there twice.
    ///
    /// # Errors
    /// What the device says of copying a layer, with what is left of the group.
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
        // Buffers that a layer keeps for the next sequence are not there, where it lent them.
        if self.region.is_some() {
            return self.discard();
        }
        (self.rows, self.poisoned) = (None, false);
        self.parts_mut().for_each(|part| part.reset());
    }

    /// Forgets everything, and gives up all buffers.
    pub(super) fn discard(&mut self) {
        (self.rows, self.poisoned, self.region) = (None, false, None);
        self.parts_mut().for_each(|part| part.discard());
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

    /// # Errors
    /// [`Error::CannotTruncate`] where a layer cannot return to the first `len` tokens.
    pub(super) fn check_rewind(&self, len: usize) -> Result<()> {
        self.stuck_at(len).map_or(Ok(()), |layer| Err(Error::CannotTruncate { layer, len }))
    }

    /// See [`ModelCache::admits`](super::ModelCache::admits).
    pub(super) fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.timed().try_for_each(|layer| layer.admits(tokens, padded))
    }

    /// The layers that count the sequence's tokens.
    pub(super) fn timed(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().filter_map(LayerCache::timed)
    }

    pub(super) fn encoders(&self) -> impl Iterator<Item = &dyn CrossLayer> {
        self.layers.iter().filter_map(|layer| match layer {
            LayerCache::EncoderDecoder { encoder, .. } => Some(&**encoder),
            _ => None,
        })
    }

    pub(super) fn encoders_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn CrossLayer>> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerCache::EncoderDecoder { encoder, .. } => Some(encoder),
            _ => None,
        })
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.layers.iter().filter_map(LayerCache::keys)
    }

    pub(super) fn limits(&self) -> impl Iterator<Item = Limits> {
        self.layers.iter().filter_map(LayerCache::limits)
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
