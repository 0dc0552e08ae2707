//! The memory of a whole model: one layer per block.

mod block;
mod groups;
mod memory;
mod pass;
mod rows;
mod saving;
mod shared;

use std::sync::atomic::{AtomicBool, Ordering};

pub use block::LayerCache;
pub use memory::BlockMemory;
pub use pass::{BlockKeys, Pass, PassRows, RowPart, SharedPart, SharedRows};
pub use saving::CacheState;

use crate::{
    Error, Result,
    budget::Claim,
    layer::{CacheLayer, KvLayer, Limits, Parents, Reorders, StepShape},
    stages::Stages,
};
use groups::RowGroup;
use shared::SharedBuffers;

/// The memory of a whole model. Models index it by block; callers advance, truncate and reorder it.
#[derive(Debug)]
pub struct ModelCache {
    /// Groups of rows; at least one.
    groups: Vec<RowGroup>,
    /// Number of rows of the last pass, for layers that store nothing; `None` before the first pass.
    rows: Option<usize>,
    /// Buffers that rows of different lengths share.
    shared: SharedBuffers,
    /// Whether each row keeps its own buffers, because rows are moved between passes, or because there is no
    /// memory for shared ones.
    keeps_apart: bool,
    /// Claims to the device memory of the layers, one for each stage; `None` if it is not counted.
    claims: Option<Stages<Claim>>,
    /// Whether tensors were handed out since the last pass and may still be held by others: a captured step
    /// writes to the buffers that it was recorded with, even if others see them.
    lent: AtomicBool,
}

impl ModelCache {
    pub fn new(layers: Vec<LayerCache>) -> Self {
        let groups = vec![RowGroup { rows: None, layers, poisoned: false, region: None }];
        Self {
            groups,
            rows: None,
            shared: SharedBuffers::default(),
            keeps_apart: false,
            claims: None,
            lent: AtomicBool::new(false),
        }
    }

    /// Forgets all tokens after the first `len`, in every layer or in none. Layers that have seen no more are
    /// unchanged, so this also undoes a forward pass that failed in the middle.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`] if a layer cannot return to `len`: see [`rewind_point`](Self::rewind_point).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.check_usable()?;
        self.each_group(|group| group.check_rewind(len))?;
        self.rows = self.rows.filter(|_| len > 0);
        self.groups.iter_mut().try_for_each(|group| group.truncate(len))
    }

    /// Forgets all tokens of each row after its first `lens[row]`, in every layer or in none. Rows that have
    /// seen no more are unchanged. From then on rows may differ in length.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`] if a layer cannot return to one of the lengths; [`Error::WrongRows`] unless
    /// `lens` has one entry per row.
    pub fn truncate_rows(&mut self, lens: &[usize]) -> Result<()> {
        self.check_usable()?;
        self.check_rows(lens.len())?;
        if lens.is_empty() || self.seq_len() == 0 {
            return Ok(());
        }
        let lens: Vec<usize> =
            lens.iter().zip(self.seq_lens(lens.len())).map(|(&len, seen)| len.min(seen)).collect();
        let mut row = 0;
        for group in &self.groups {
            for &len in &lens[row..row + group.rows.unwrap_or(lens.len())] {
                group.check_rewind(len).map_err(|error| self.in_row(row, error))?;
                row += 1;
            }
        }
        self.split_by(&lens)?;
        let mut row = 0;
        for group in &mut self.groups {
            group.truncate(lens[row])?;
            row += group.rows.unwrap_or(lens.len());
        }
        self.recount();
        Ok(())
    }

    /// Returns the largest length of at most `at_most` that every longer row can return to exactly. 0 is
    /// always possible.
    pub fn rewind_point(&self, at_most: usize) -> usize {
        let mut len = at_most.min(self.seq_len());
        loop {
            let longer = self.groups.iter().filter(|group| group.seq_len() > len);
            let shorter = longer.map(|group| group.rewind_point(len)).min().unwrap_or(len);
            if shorter == len {
                return len;
            }
            len = shorter;
        }
    }

    /// Returns, for each row, the largest length of at most `at_most[row]` that every layer can return to
    /// exactly.
    pub fn rewind_points(&self, at_most: &[usize]) -> Vec<usize> {
        let mut row = 0;
        let mut points = Vec::with_capacity(at_most.len());
        for group in &self.groups {
            let rows = group.rows.unwrap_or(at_most.len()).min(at_most.len() - row);
            points.extend(at_most[row..row + rows].iter().map(|&len| group.rewind_point(len)));
            row += rows;
        }
        points.resize(at_most.len(), 0);
        points
    }

    pub fn blocks(&self) -> usize {
        self.groups.first().map_or(0, |group| group.layers.len())
    }

    /// Iterates over the layers, to wrap or replace them, with the numbers of their blocks. A block has
    /// several layers if rows differ in length.
    pub fn layers_mut(&mut self) -> impl Iterator<Item = (usize, &mut LayerCache)> {
        // If this fails, the cache is poisoned.
        _ = self.give_back_all();
        self.groups.iter_mut().flat_map(|group| group.layers.iter_mut().enumerate())
    }

    /// Number of tokens that the longest row has seen so far. Always 0 for a stateless cache, and for one
    /// that can only be reset.
    pub fn seq_len(&self) -> usize {
        if self.is_poisoned() {
            return 0;
        }
        self.groups.iter().map(RowGroup::seq_len).max().unwrap_or(0)
    }

    /// Number of tokens that each of `rows` rows has seen so far; 0 for rows that failed.
    pub fn seq_lens(&self, rows: usize) -> Vec<usize> {
        let of_group = |group: &RowGroup| {
            let seen = if group.poisoned { 0 } else { group.seq_len() };
            std::iter::repeat_n(seen, group.rows.unwrap_or(rows))
        };
        self.groups.iter().flat_map(of_group).collect()
    }

    /// Begins a forward pass that stores `step`, with `working` bytes of the model's own. The first
    /// `skip[row]` tokens of each row are fillers and are not stored. `padded`: whether rows begin with
    /// padding, which is stored.
    ///
    /// # Errors
    /// The errors of [`admits`](Self::admits) and [`make_room`](Self::make_room); [`Error::WrongRows`];
    /// [`Error::Poisoned`]. Then nothing was changed. If the device fails while rows are moved into layers of
    /// their own, the cache is poisoned.
    pub fn begin(
        &mut self,
        step: &StepShape,
        skip: &[usize],
        padded: bool,
        working: usize,
    ) -> Result<Pass<'_>> {
        self.check_usable()?;
        if skip.len() != step.rows {
            return Err(Error::WrongRows { rows: step.rows, given: skip.len() });
        }
        if self.groups.len() > 1 && self.groups.iter().all(|group| group.seq_len() == 0) {
            // A cache that holds nothing takes any number of rows.
            self.groups.truncate(1);
            self.groups[0].rows = None;
        }
        let ragged = self.groups.len() > 1 || skip.iter().any(|&skip| skip > 0);
        if ragged {
            self.check_rows(step.rows)?;
        }
        // The largest number of tokens that a row of each group stores.
        let mut tokens = Vec::with_capacity(self.groups.len());
        let mut row = 0;
        for group in &self.groups {
            let rows = group.rows.unwrap_or(step.rows);
            let own = skip[row..row + rows].iter().map(|&skip| step.tokens.saturating_sub(skip));
            own.clone()
                .try_for_each(|tokens| group.admits(tokens, padded))
                .map_err(|error| self.in_row(row, error))?;
            tokens.push(own.max().unwrap_or(0));
            row += rows;
        }
        let layers = self.footprints(step, &tokens);
        // While a layer is split, two copies of it exist.
        let splits = ragged && skip.windows(2).any(|pair| pair[0] != pair[1]);
        let split = layers.iter().map(|part| part.bytes.held).max().filter(|_| splits).unwrap_or(0);
        self.claim_for(&layers, working.max(split))?;
        if ragged {
            self.split_by(skip)?;
            if self.groups.iter().any(|group| group.region.is_none()) {
                self.give_back_all()?;
            }
        }
        let mut groups = Vec::with_capacity(self.groups.len());
        let mut row = 0;
        for group in &self.groups {
            let skip = skip.get(row).copied().unwrap_or(0);
            groups.push((skip.min(step.tokens), group.seq_len()));
            row += group.rows.unwrap_or(step.rows);
        }
        let conditioned = self.is_conditioned();
        Ok(Pass { cache: self, rows: step.rows, tokens: step.tokens, groups, conditioned, committed: false })
    }

    /// Checks that the cache can hold `given` rows.
    ///
    /// # Errors
    /// [`Error::WrongRows`] if the cache holds another number of rows.
    pub fn check_rows(&self, given: usize) -> Result<()> {
        let known = match &self.groups[..] {
            [group] => group.stored_rows(),
            groups if groups.iter().all(|group| group.seq_len() == 0) => None,
            groups => Some(groups.iter().filter_map(|group| group.rows).sum()),
        };
        match known.filter(|&rows| rows != given) {
            Some(rows) => Err(Error::WrongRows { rows, given }),
            None => Ok(()),
        }
    }

    /// Splits groups so that the rows of each have equal entries in `keys`, which has one entry per row.
    fn split_by<K: PartialEq>(&mut self, keys: &[K]) -> Result<()> {
        let mut begin = 0;
        for group in 0..self.groups.len() {
            let keys = &keys[begin..begin + self.groups[group].rows.unwrap_or(keys.len())];
            begin += keys.len();
            if keys.windows(2).any(|pair| pair[0] != pair[1]) {
                self.give_back(group)?;
            }
        }
        begin = 0;
        let mut groups = Vec::with_capacity(self.groups.len());
        for group in std::mem::take(&mut self.groups) {
            let keys = &keys[begin..begin + group.rows.unwrap_or(keys.len())];
            begin += keys.len();
            match keys.windows(2).all(|pair| pair[0] == pair[1]) {
                true => groups.push(group),
                false => match group.split_by(keys) {
                    Ok(split) => groups.extend(split),
                    Err(failed) => {
                        let (error, group) = *failed;
                        groups.push(group);
                        self.groups = groups;
                        self.poison();
                        return Err(error);
                    }
                },
            }
        }
        self.groups = groups;
        Ok(())
    }

    /// Marks the contents as invalid: only [`reset`](Self::reset) can follow.
    pub fn poison(&mut self) {
        self.groups.iter_mut().for_each(|group| group.poisoned = true);
    }

    /// Whether a row failed in the middle of a pass. The cache can be [reset](Self::reset), or the row can
    /// [leave](Self::leave).
    pub fn is_poisoned(&self) -> bool {
        self.groups.iter().any(|group| group.poisoned)
    }

    fn check_usable(&self) -> Result<()> {
        self.each_group(|group| if group.poisoned { Err(Error::Poisoned) } else { Ok(()) })
    }

    /// Applies `ask` to every group. If there are several, an error names the first row of the group.
    fn each_group(&self, ask: impl Fn(&RowGroup) -> Result<()>) -> Result<()> {
        let mut row = 0;
        for group in &self.groups {
            ask(group).map_err(|error| self.in_row(row, error))?;
            row += group.rows.unwrap_or(0);
        }
        Ok(())
    }

    /// Attaches the row to an error if there are several groups.
    fn in_row(&self, row: usize, error: Error) -> Error {
        match self.groups.len() {
            1 => error,
            _ => Error::Row { row, why: Box::new(error) },
        }
    }

    /// Checks that every layer can store `tokens` more tokens of each row at once. `padded`: whether rows
    /// begin with padding.
    ///
    /// # Errors
    /// The error of the first layer that cannot. This is checked before a forward pass, so that no layer gets
    /// a step ahead of another.
    pub fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.each_group(|group| group.admits(tokens, padded))
    }

    /// Largest number of tokens that the sequence can have; `None`: unlimited.
    pub fn capacity(&self) -> Option<usize> {
        self.limits().filter_map(|limits| limits.capacity).min()
    }

    /// Hint: the sequence is going to reach `tokens` tokens.
    pub fn reserve(&mut self, tokens: usize) {
        self.parts_mut().for_each(|part| part.reserve(tokens));
    }

    /// Largest number of tokens that a forward pass may feed now; `None`: unlimited.
    pub fn at_once(&self) -> Option<usize> {
        self.limits().filter_map(|limits| limits.at_once).min()
    }

    /// Largest number of tokens of each row that a forward pass may feed now; `usize::MAX`: unlimited.
    pub fn at_once_by_row(&self, rows: usize) -> Vec<usize> {
        let of_group = |group: &RowGroup| {
            let most = group.limits().filter_map(|limits| limits.at_once).min();
            std::iter::repeat_n(most.unwrap_or(usize::MAX), group.rows.unwrap_or(rows))
        };
        self.groups.iter().flat_map(of_group).collect()
    }

    /// Whether the sequence may go on forever, because rotary positions stay below a bound.
    pub fn is_endless(&self) -> bool {
        self.limits().next().is_some() && self.limits().all(|limits| limits.endless)
    }

    /// Whether no buffer ever grows, so that every step has the same launches.
    pub fn is_static(&self) -> bool {
        self.limits().next().is_some() && self.limits().all(|limits| limits.fixed_buffers)
    }

    /// Whether the keys that a query sees depend on how the tokens were divided into passes.
    pub fn is_by_pass(&self) -> bool {
        self.limits().any(|limits| limits.by_pass)
    }

    /// Number of the next one-token steps that one captured step can be replayed for. See
    /// [`KvLayer::replayable`].
    pub fn replayable(&self) -> usize {
        if self.lent.load(Ordering::Relaxed) {
            return 0;
        }
        let of_group = |group: &RowGroup| {
            let of_layer =
                |(block, layer): (usize, &LayerCache)| match (self.shared.blocks.get(block), group.region) {
                    (Some(Some(_)), Some(region)) => {
                        let keys = region.slots.saturating_sub(group.seq_len());
                        Some(layer.state.as_ref().map_or(keys, |state| state.replayable().min(keys)))
                    }
                    _ => layer.replayable(),
                };
            group.layers.iter().enumerate().filter_map(of_layer).min()
        };
        self.groups.iter().filter_map(of_group).min().unwrap_or(0)
    }

    /// Counts a token that a replayed step stored in every layer.
    pub fn replayed(&mut self) {
        let layers = self.groups.iter_mut().flat_map(|group| &mut group.layers);
        layers.for_each(LayerCache::replayed);
    }

    /// Copies the cache lazily: tensors are shared until either copy writes to them.
    ///
    /// One prompt can serve many continuations this way.
    pub fn snapshot(&self) -> Self {
        self.lent.store(true, Ordering::Relaxed);
        if let Some(claims) = &self.claims {
            let layers = self.groups.iter().flat_map(|group| group.layers.iter().enumerate());
            let claimed = |(block, layer): (usize, &LayerCache)| {
                layer.parts().for_each(|part| part.claim_shared(claims.of(block)));
            };
            layers.for_each(claimed);
        }
        let claims = self.further_claims();
        let groups = self.groups.iter().map(|group| self.snapshot_of(group)).collect();
        let mut snapshot = Self {
            groups,
            rows: self.rows,
            shared: SharedBuffers::default(),
            keeps_apart: self.keeps_apart,
            claims,
            lent: AtomicBool::new(true),
        };
        if self.groups.iter().any(|group| group.region.is_some()) {
            // These are real copies, which nobody else holds.
            snapshot.claim_given();
        }
        snapshot
    }

    /// Name of a layer that cannot go back after it was fed; `None` if all layers can.
    pub fn cannot_rewind(&self) -> Option<&'static str> {
        let layers = self.groups.iter().flat_map(RowGroup::timed);
        layers.filter(|layer| !layer.can_rewind()).map(CacheLayer::name).next()
    }

    pub fn keep_history(&mut self, n: usize) {
        self.parts_mut().for_each(|part| part.keep_history(n));
    }

    /// Rebuilds the batch, in every layer or in none: new row `i` is old row `rows[i]`. Rows may be repeated
    /// and left out.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`].
    pub fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        self.give_back_all()?;
        self.keeps_apart = true;
        if let [group] = &mut self.groups[..] {
            for have in group.parts().filter_map(CacheLayer::rows) {
                check_row(rows, have)?;
            }
            group.parts_mut().try_for_each(|part| part.reorder(rows))?;
            self.rows = self.rows.map(|_| rows.len());
            return Ok(());
        }
        // The place of each row: its group, and its number within the group.
        let of_group = |(i, group): (usize, &RowGroup)| (0..group.rows.unwrap_or(0)).map(move |row| (i, row));
        let places: Vec<(usize, usize)> = self.groups.iter().enumerate().flat_map(of_group).collect();
        check_row(rows, places.len())?;
        let places: Vec<(usize, usize)> = rows.iter().map(|&row| places[row]).collect();
        let select = |run: &[(usize, usize)]| {
            self.groups[run[0].0].select(&run.iter().map(|(_, row)| *row).collect::<Vec<_>>())
        };
        let mut groups: Vec<_> = places.chunk_by(|a, b| a.0 == b.0).map(select).collect::<Result<_>>()?;
        match &mut groups[..] {
            [] => self.reset(),
            [only] => {
                only.rows = None;
                self.groups = groups;
            }
            _ => self.groups = groups,
        }
        Ok(())
    }

    /// Gives each row its own layer if the strategy can store a repeated row once.
    ///
    /// # Errors
    /// [`Error::WrongRows`]. If the device fails, the cache is poisoned.
    pub fn separate_rows(&mut self, rows: usize) -> Result<()> {
        self.check_usable()?;
        self.check_rows(rows)?;
        let shares = self.keys().any(|layer| layer.shares_row());
        match shares {
            true => self.split_by(&(0..rows).collect::<Vec<_>>()),
            false => Ok(()),
        }
    }

    /// Whether the cache holds an encoder's output for a row.
    pub fn is_conditioned(&self) -> bool {
        !self.is_poisoned()
            && self.groups.iter().any(|group| group.encoders().any(|layer| layer.seq_len() > 0))
    }

    /// Whether any layer is on the device only while it is used.
    pub fn is_offloaded(&self) -> bool {
        self.parts().any(CacheLayer::is_offloaded)
    }

    /// How [`reorder_on_device`](Self::reorder_on_device) is done: as by the least capable layer.
    pub fn reorders(&self) -> Reorders {
        self.parts().map(CacheLayer::reorders).min().unwrap_or(Reorders::No)
    }

    /// Makes each row continue from its parent within the same prompt, by row numbers that only the device
    /// knows.
    ///
    /// # Errors
    /// [`Error::Execution`] if a layer [cannot](Reorders::No) do it. Then nothing was changed.
    pub fn reorder_on_device(&mut self, parents: &Parents) -> Result<()> {
        if self.reorders() == Reorders::No {
            return Err(Error::Execution("a cache cannot reorder its rows on the device".to_owned()));
        }
        self.give_back_all()?;
        self.keeps_apart = true;
        let all = parents.positions.rows();
        let mut begin = 0;
        for group in &mut self.groups {
            let rows = begin..begin + group.rows.unwrap_or(all);
            begin = rows.end;
            let own = parents.narrow(rows);
            group.parts_mut().try_for_each(|part| part.reorder_on_device(&own))?;
        }
        Ok(())
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.forget_rows();
        self.groups.iter_mut().for_each(RowGroup::reset);
        self.recount();
    }

    /// Forgets everything, and drops all buffers: a device that failed may refuse to read them from then on.
    pub fn discard(&mut self) {
        self.forget_rows();
        self.groups.iter_mut().for_each(RowGroup::discard);
        self.recount();
    }

    fn forget_rows(&mut self) {
        (self.rows, self.shared, self.keeps_apart) = (None, SharedBuffers::default(), false);
        self.groups.truncate(1);
    }

    /// Iterates over the names of the strategies for each block's own keys and values; `None` for blocks
    /// without any.
    pub fn strategies(&self) -> impl Iterator<Item = Option<&'static str>> {
        let blocks = self.groups.iter().take(1).flat_map(|group| &group.layers);
        blocks.map(|layer| layer.keys.as_ref().map(|keys| keys.name()))
    }

    fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.groups.iter().flat_map(RowGroup::keys)
    }

    fn limits(&self) -> impl Iterator<Item = Limits> {
        self.groups.iter().flat_map(RowGroup::limits)
    }

    fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.groups.iter().flat_map(RowGroup::parts)
    }

    fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        self.groups.iter_mut().flat_map(RowGroup::parts_mut)
    }
}

fn check_row(rows: &[usize], have: usize) -> Result<()> {
    match rows.iter().find(|&&row| row >= have) {
        Some(&row) => Err(Error::NoSuchRow { row, rows: have }),
        None => Ok(()),
    }
}
