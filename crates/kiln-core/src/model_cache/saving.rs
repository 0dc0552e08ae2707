//! Copies of a cache: all of it, or keys and values in transformers' legacy format.

use std::sync::atomic::Ordering;

use burn::tensor::Tensor;

use super::{ModelCache, groups::RowGroup};
use crate::{
    Error, Result,
    layer::{CacheLayer, Kv, LayerState, Positions},
    need::Stream,
};

/// A number of rows that no batch reaches. A file with more is refused.
const MOST_ROWS: usize = 1 << 24;

/// A copy of a cache in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheState {
    /// Number of rows of each group of equal length; empty if all rows have the same length.
    pub rows: Vec<usize>,
    /// Layers of the first group, then those of the next.
    pub layers: Vec<LayerState>,
}

impl CacheState {
    /// Number of bytes of all tensors.
    pub fn bytes(&self) -> usize {
        let slots = self.layers.iter().flat_map(|layer| &layer.slots);
        slots.flatten().map(|tensor| tensor.bytes().len()).sum()
    }
}

impl ModelCache {
    /// Copies the keys and values of every attention block, `[batch, heads, tokens, width]`, one token
    /// after the other: transformers' legacy format. Keys are rotated as they are held; layers that hold
    /// nothing are left out.
    ///
    /// # Errors
    /// [`Error::Import`] if rows differ in length.
    pub fn to_legacy(&self) -> Result<Vec<Kv>> {
        if self.groups.len() > 1 {
            return Err(Error::Import { why: "rows of different lengths have no legacy format".to_owned() });
        }
        if self.has_regions() {
            return self.snapshot().to_legacy();
        }
        self.lent.store(true, Ordering::Relaxed);
        self.keys().filter_map(|layer| layer.gather().transpose()).collect()
    }

    /// Takes over keys and values in transformers' legacy format, as if they had been fed. To be called on a
    /// new cache.
    ///
    /// They must start at position 0: a sliding window that has dropped tokens cannot be taken over this way,
    /// but saved and restored.
    ///
    /// # Errors
    /// [`Error::Import`] for another number of blocks, or tensors that do not fit each other; after an error
    /// the cache can only be reset.
    pub fn from_legacy(&mut self, layers: Vec<Kv>) -> Result<()> {
        let wrong = |why: String| Err(Error::Import { why });
        let blocks = self.keys().count();
        if self.seq_len() > 0 || self.groups.len() > 1 {
            return wrong("the cache is not empty; reset it".to_owned());
        }
        if layers.len() != blocks {
            return wrong(format!("{} layers are given for {blocks} attention blocks", layers.len()));
        }
        let [rows, _, tokens, _] = layers.first().map_or([0; 4], |(keys, _)| keys.dims());
        for ((keys, values), layer) in layers.iter().zip(self.keys()) {
            let shapes = [keys.dims(), values.dims()];
            let is_even = shapes.iter().all(|&[r, _, t, _]| (r, t) == (rows, tokens));
            let fits = |streams: [Stream; 2]| streams.iter().zip(&shapes).all(|(one, x)| one.fits(x));
            if !is_even || !layer.streams().is_none_or(fits) {
                return wrong(format!("keys {:?} and values {:?} do not fit", keys.dims(), values.dims()));
            }
        }
        self.check_rows(rows)?;
        self.admits(tokens, false)?;
        let own = self.groups.iter_mut().flat_map(|group| &mut group.layers);
        for (layer, (keys, values)) in own.filter_map(|layer| layer.keys.as_mut()).zip(layers) {
            let first = layer.span(tokens).query(tokens);
            let positions = Positions::all_at(first, rows, &keys.device());
            layer.update(keys, values, &positions)?;
        }
        self.claim_given();
        Ok(())
    }

    /// Copies the keys and values that an encoder wrote, by block: the second half of the tuples that
    /// transformers' legacy format has for a model with an encoder. [`to_legacy`](Self::to_legacy) returns
    /// the first half.
    ///
    /// # Errors
    /// [`Error::Import`] if rows differ in length.
    pub fn encoder_to_legacy(&self) -> Result<Vec<Kv>> {
        if self.groups.len() > 1 {
            return Err(Error::Import { why: "rows of different lengths have no legacy format".to_owned() });
        }
        let encoders = self.groups.iter().flat_map(RowGroup::encoders);
        encoders.filter_map(|layer| layer.gather().transpose()).collect()
    }

    /// Takes over the keys and values that an encoder wrote, by block. To be called on a new cache, before or
    /// after [`from_legacy`](Self::from_legacy).
    ///
    /// # Errors
    /// [`Error::Import`] for another number of blocks, or tensors that do not fit them or each other;
    /// [`Error::WrongRows`]; [`Error::AlreadyConditioned`]. After an error the cache can only be reset.
    pub fn encoder_from_legacy(&mut self, layers: Vec<Kv>) -> Result<()> {
        let wrong = |why: String| Err(Error::Import { why });
        if self.is_conditioned() {
            return Err(Error::AlreadyConditioned);
        }
        let blocks: usize = self.groups.iter().map(|group| group.encoders().count()).sum();
        if layers.len() != blocks || self.groups.len() > 1 {
            return wrong(format!("{} layers are given for {blocks} blocks with an encoder", layers.len()));
        }
        let [rows, _, frames, _] = layers.first().map_or([0; 4], |(keys, _)| keys.dims());
        let is_even = |x: &Tensor<4>| (x.dims()[0], x.dims()[2]) == (rows, frames);
        if let Some((keys, values)) = layers.iter().find(|(k, v)| !is_even(k) || !is_even(v)) {
            return wrong(format!(
                "keys {:?} and values {:?} are not of {rows} rows and {frames} positions",
                keys.dims(),
                values.dims()
            ));
        }
        self.check_rows(rows)?;
        let own = self.groups.iter_mut().flat_map(RowGroup::encoders_mut);
        own.zip(layers).try_for_each(|(layer, (keys, values))| layer.fill(keys, values))?;
        self.claim_given();
        Ok(())
    }

    /// Copies everything that a new cache needs to continue in place of this one.
    ///
    /// # Errors
    /// The device's error in a read.
    pub fn save(&self) -> Result<CacheState> {
        self.check_usable()?;
        if self.has_regions() {
            return self.snapshot().save();
        }
        let layers = self.parts().map(CacheLayer::save).collect::<Result<_>>()?;
        Ok(CacheState { rows: self.rows_by_group(), layers })
    }

    /// [`save`](Self::save), which awaits the device, layer by layer.
    ///
    /// # Errors
    /// The device's error in a read.
    pub async fn save_async(&mut self) -> Result<CacheState> {
        self.check_usable()?;
        let mut copy = self.has_regions().then(|| self.snapshot());
        let cache = copy.as_mut().unwrap_or(self);
        let mut layers = Vec::new();
        for part in cache.parts_mut() {
            let started = part.start_saving()?;
            layers.push(started.finish().await?);
        }
        Ok(CacheState { rows: cache.rows_by_group(), layers })
    }

    fn has_regions(&self) -> bool {
        self.groups.iter().any(|group| group.region.is_some())
    }

    fn rows_by_group(&self) -> Vec<usize> {
        self.groups.iter().filter_map(|group| group.rows).collect()
    }

    /// Replaces the contents with those of the cache that `state` was copied from. To be called on a new
    /// cache of the same plan; after an error it can only be reset.
    ///
    /// # Errors
    /// [`Error::Import`] if the state belongs to another kind of cache, or is invalid.
    pub fn restore(&mut self, state: CacheState) -> Result<()> {
        let wrong = |why: String| Error::Import { why };
        let CacheState { rows, layers } = state;
        self.groups.truncate(1);
        let (parts, groups) = (self.parts().count(), rows.len().max(1));
        let all = rows.iter().try_fold(0usize, |all, &rows| all.checked_add(rows));
        if rows.len() == 1 || rows.contains(&0) || all.is_none_or(|all| all > MOST_ROWS) {
            return Err(wrong("its rows are impossible".to_owned()));
        }
        if Some(layers.len()) != parts.checked_mul(groups) {
            return Err(wrong(format!("{} layers stand where {parts} were", layers.len())));
        }
        self.groups.extend((1..groups).map(|_| self.groups[0].snapshot()).collect::<Vec<_>>());
        for (group, rows) in self.groups.iter_mut().zip(rows) {
            group.rows = Some(rows);
        }
        self.parts_mut().zip(layers).try_for_each(|(part, state)| part.restore(state))?;
        self.claim_given();
        for group in &self.groups {
            // Layers are fed together, so they have seen the same number of tokens.
            let lens: Vec<usize> = group.timed().map(CacheLayer::seq_len).collect();
            if lens.windows(2).any(|pair| pair[0] != pair[1]) {
                return Err(wrong("its layers have seen different numbers of tokens".to_owned()));
            }
            if group.rows.is_some_and(|rows| group.stored_rows().is_some_and(|have| have != rows)) {
                return Err(wrong("its tensors are of another number of rows".to_owned()));
            }
        }
        Ok(())
    }

    /// Whether the stored contents have exactly `rows` rows.
    pub fn is_of_rows(&self, rows: usize) -> bool {
        let is_whole = |group: &RowGroup| {
            let rows = group.rows.unwrap_or(rows);
            group.parts().all(|part| part.rows().map_or(part.seq_len() == 0, |have| have == rows))
        };
        self.check_rows(rows).is_ok() && self.groups.iter().all(is_whole)
    }
}
