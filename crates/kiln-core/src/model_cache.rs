//! One memory per block.

mod block;
mod groups;
mod pass;

use std::sync::atomic::{AtomicBool, Ordering};

pub use block::LayerCache;
pub use pass::{Pass, RowPart};

use crate::{
    Error, Result,
    budget::{Budget, Claim},
    layer::{CacheLayer, Footprint, Kv, KvLayer, LayerState, Limits, Moved, Positions, StepShape},
};
use groups::RowGroup;

/// The memory of a whole model. Models index it by block; callers move it through time.
#[derive(Debug)]
pub struct ModelCache {
    /// At least one.
    groups: Vec<RowGroup>,
    /// To what the layers hold on the device; `None` where nobody counts.
    claim: Option<Claim>,
    /// Whether tensors were handed out since the last pass, which others may hold still: a captured step writes where it was
    /// recorded, also what they see.
    lent: AtomicBool,
    /// Whether a pass failed in the middle and could not be taken back.
    poisoned: bool,
}

/// More rows than any batch has. A file that says more is refused.
const MOST_ROWS: usize = 1 << 24;

/// A copy of a cache in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheState {
    /// Rows of each group of rows that have seen as many tokens; empty where all have.
    pub rows: Vec<usize>,
    /// The layers of the first group, then those of the next.
    pub layers: Vec<LayerState>,
}

impl ModelCache {
    pub fn new(layers: Vec<LayerCache>) -> Self {
        let groups = vec![RowGroup { rows: None, layers }];
        Self { groups, claim: None, lent: AtomicBool::new(false), poisoned: false }
    }

    /// Counts this cache in `budget`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where it holds more than is left.
    pub fn within(mut self, budget: &Budget) -> Result<Self> {
        self.claim = Some(budget.claim("the cache", self.device_bytes() as u64)?);
        Ok(self)
    }

    /// Claims the memory that feeding `step` takes at most, with `working` bytes of the model's own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where there is not as much; those of [`check_buffers`](Self::check_buffers). Then nothing was
    /// changed.
    pub fn make_room(&mut self, step: &StepShape, working: usize) -> Result<()> {
        let layers = self.footprints(step, &[]);
        self.claim_for(&layers, working)
    }

    fn claim_for(&mut self, layers: &[(Footprint, bool)], working: usize) -> Result<()> {
        self.check_largest(layers)?;
        let bytes = Self::at_most(layers).saturating_add(working);
        let bytes = bytes.saturating_sub(self.claimed_apart()) as u64;
        self.claim.as_mut().map_or(Ok(()), |claim| claim.resize(bytes))
    }

    /// Bytes of what snapshots hold, too, which have claims of their own.
    fn claimed_apart(&mut self) -> usize {
        let Some(claim) = &self.claim else { return 0 };
        self.groups.iter_mut().flat_map(RowGroup::parts_mut).map(|part| part.claimed_apart(claim)).sum()
    }

    /// Claims what layers were given, as far as there is room: what is missing is claimed when they are fed.
    fn claim_given(&mut self) {
        let bytes = self.device_bytes().saturating_sub(self.claimed_apart()) as u64;
        if let Some(claim) = &mut self.claim {
            _ = claim.resize(bytes);
        }
    }

    /// The budget that it is counted in.
    pub fn budget(&self) -> Option<&Budget> {
        self.claim.as_ref().map(Claim::budget)
    }

    /// Claims what is held now: to be called when layers hold less than they did.
    pub fn recount(&mut self) {
        let bytes = self.device_bytes().saturating_sub(self.claimed_apart()) as u64;
        if let Some(claim) = self.claim.as_mut().filter(|claim| claim.bytes() > bytes) {
            // Less is never refused.
            _ = claim.resize(bytes);
        }
    }

    /// Bytes on the device while `step` is stored, at most: what layers hold, of offloaded ones the largest two in a row,
    /// and what one of them takes besides.
    pub fn bytes_for(&self, step: &StepShape) -> usize {
        Self::at_most(&self.footprints(step, &[]))
    }

    /// [`bytes_for`](Self::bytes_for) if every layer were offloaded.
    pub fn bytes_offloaded(&self, step: &StepShape) -> usize {
        let mut layers = self.footprints(step, &[]);
        layers.iter_mut().for_each(|(_, offloaded)| *offloaded = true);
        Self::at_most(&layers)
    }

    /// What each layer takes while `step` is stored, in all groups together, and whether it is offloaded. `tokens`: how many
    /// of them each group stores, if that is less.
    fn footprints(&self, step: &StepShape, tokens: &[usize]) -> Vec<(Footprint, bool)> {
        let mut all: Vec<(Footprint, bool)> = Vec::new();
        for (i, group) in self.groups.iter().enumerate() {
            let rows = group.rows.unwrap_or(step.rows);
            let step = StepShape { rows, tokens: tokens.get(i).copied().unwrap_or(step.tokens), ..*step };
            for (i, part) in group.parts().enumerate() {
                let Footprint { held, largest, passing } = part.footprint(&step);
                match all.get_mut(i) {
                    Some((sum, _)) => {
                        sum.held = sum.held.saturating_add(held);
                        sum.largest = sum.largest.max(largest);
                        // Groups are fed one after the other.
                        sum.passing = sum.passing.max(passing);
                    }
                    None => all.push((Footprint { held, largest, passing }, part.is_offloaded())),
                }
            }
        }
        all
    }

    fn at_most(layers: &[(Footprint, bool)]) -> usize {
        let here = |&(layer, away): &(Footprint, bool)| if away { 0 } else { layer.held };
        let in_use = |&(layer, away): &(Footprint, bool)| if away { layer.held } else { 0 };
        let pair = |(i, layer): (usize, &(Footprint, bool))| match layers.get((i + 1) % layers.len()) {
            Some(next) if layers.len() > 1 => {
                in_use(layer).saturating_add(in_use(next)).saturating_add(layer.0.passing)
            }
            _ => in_use(layer).saturating_add(layer.0.passing),
        };
        // Users ask for any number of tokens.
        let stay = layers.iter().map(here).fold(0, usize::saturating_add);
        stay.saturating_add(layers.iter().enumerate().map(pair).max().unwrap_or(0))
    }

    /// Whether the device has buffers as large as layers need to store `step`.
    ///
    /// # Errors
    /// [`Error::BufferTooLarge`]. What is too large does not fail as an allocation does: wgpu refuses to bind it.
    pub fn check_buffers(&self, step: &StepShape) -> Result<()> {
        self.check_largest(&self.footprints(step, &[]))
    }

    fn check_largest(&self, layers: &[(Footprint, bool)]) -> Result<()> {
        let Some(largest) = self.budget().and_then(Budget::largest_buffer) else { return Ok(()) };
        // Of a layer's keys, or its values.
        let needed = layers.iter().map(|(layer, _)| layer.largest / 2).max().unwrap_or(0) as u64;
        if needed <= largest { Ok(()) } else { Err(Error::BufferTooLarge { needed, largest }) }
    }

    /// What the largest layer takes besides while its buffer doubles; 0 where buffers never grow.
    pub fn bytes_growing(&self, step: &StepShape) -> usize {
        let largest = self.footprints(step, &[]).iter().map(|(part, _)| part.largest).max().unwrap_or(0);
        if self.is_static() { 0 } else { largest / 2 }
    }

    /// Forgets all tokens behind the first `len`, in every layer or in none. Layers that have seen no more stay as they are:
    /// so this also takes back a forward pass that failed in the middle.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`] where a layer cannot return to `len`: see [`rewind_point`](Self::rewind_point).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.check_usable()?;
        if let Some(layer) = self.groups.iter().find_map(|group| group.stuck_at(len)) {
            return Err(Error::CannotTruncate { layer, len });
        }
        self.groups.iter_mut().try_for_each(|group| group.truncate(len))
    }

    /// Forgets all tokens of each row behind its first `lens[row]`, in every layer or in none. Rows that have seen no more
    /// stay as they are. From then on rows may be of different lengths.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`] where a layer cannot return to one of the lengths; [`Error::WrongRows`] unless there is one
    /// for each row.
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
                if let Some(layer) = group.stuck_at(len) {
                    return Err(Error::CannotTruncate { layer, len });
                }
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

    /// The largest length, `at_most` or less, that every row that is longer can return to exactly. 0 is always possible.
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

    /// For each row, the largest length, `at_most[row]` or less, that every layer can return to exactly.
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

    /// The layers, to wrap or replace them, with the numbers of their blocks. A block has several where rows are of
    /// different lengths.
    pub fn layers_mut(&mut self) -> impl Iterator<Item = (usize, &mut LayerCache)> {
        self.groups.iter_mut().flat_map(|group| group.layers.iter_mut().enumerate())
    }

    /// Tokens that the longest row has seen so far. Always 0 for a stateless cache, and for one that can only be reset.
    pub fn seq_len(&self) -> usize {
        if self.poisoned {
            return 0;
        }
        self.groups.iter().map(RowGroup::seq_len).max().unwrap_or(0)
    }

    /// Tokens that each of `rows` rows has seen so far.
    pub fn seq_lens(&self, rows: usize) -> Vec<usize> {
        if self.poisoned {
            return vec![0; rows];
        }
        let of_group = |group: &RowGroup| std::iter::repeat_n(group.seq_len(), group.rows.unwrap_or(rows));
        self.groups.iter().flat_map(of_group).collect()
    }

    /// Begins a forward pass that stores `step`, with `working` bytes of the model's own. Of the tokens of each row, the
    /// first `skip[row]` are none and are not stored. `padded`: whether rows begin with padding that is.
    ///
    /// # Errors
    /// Those of [`admits`](Self::admits) and [`make_room`](Self::make_room); [`Error::WrongRows`]; [`Error::Poisoned`]. Then
    /// nothing was changed.
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
            // What holds nothing is of any rows.
            self.groups.truncate(1);
            self.groups[0].rows = None;
        }
        let ragged = self.groups.len() > 1 || skip.iter().any(|&skip| skip > 0);
        if ragged {
            self.check_rows(step.rows)?;
        }
        // The most tokens that a row of each group stores.
        let mut tokens = Vec::with_capacity(self.groups.len());
        let mut row = 0;
        for group in &self.groups {
            let rows = group.rows.unwrap_or(step.rows);
            let own = skip[row..row + rows].iter().map(|&skip| step.tokens.saturating_sub(skip));
            own.clone().try_for_each(|tokens| group.admits(tokens, padded))?;
            tokens.push(own.max().unwrap_or(0));
            row += rows;
        }
        let layers = self.footprints(step, &tokens);
        // A layer is there twice while it is split.
        let splits = ragged && skip.windows(2).any(|pair| pair[0] != pair[1]);
        let split = layers.iter().map(|(layer, _)| layer.held).max().filter(|_| splits).unwrap_or(0);
        self.claim_for(&layers, working.max(split))?;
        if ragged {
            self.split_by(skip)?;
        }
        let mut groups = Vec::with_capacity(self.groups.len());
        let mut row = 0;
        for group in &self.groups {
            groups.push((skip[row].min(step.tokens), group.seq_len()));
            row += group.rows.unwrap_or(step.rows);
        }
        Ok(Pass { cache: self, rows: step.rows, tokens: step.tokens, groups, committed: false })
    }

    /// # Errors
    /// [`Error::WrongRows`] where the cache holds another number of rows.
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

    /// Splits groups, so that the rows of each have the same entry in `keys`, which has one a row.
    fn split_by<K: PartialEq>(&mut self, keys: &[K]) -> Result<()> {
        let mut begin = 0;
        let mut groups = Vec::with_capacity(self.groups.len());
        for group in std::mem::take(&mut self.groups) {
            let keys = &keys[begin..begin + group.rows.unwrap_or(keys.len())];
            begin += keys.len();
            match keys.windows(2).all(|pair| pair[0] == pair[1]) {
                true => groups.push(group),
                false => match group.split_by(keys) {
                    Ok(split) => groups.extend(split),
                    Err((error, group)) => {
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

    /// Says that what is held cannot be trusted: nothing but [`reset`](Self::reset) can follow.
    pub fn poison(&mut self) {
        self.poisoned = true;
    }

    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    fn check_usable(&self) -> Result<()> {
        if self.poisoned { Err(Error::Poisoned) } else { Ok(()) }
    }

    /// Whether every layer can store `tokens` more tokens of each row at once. `padded`: whether rows begin with padding.
    ///
    /// # Errors
    /// That of the first layer that cannot. Asked before a forward pass, so that no layer is a step ahead of another.
    pub fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.groups.iter().try_for_each(|group| group.admits(tokens, padded))
    }

    /// The most tokens that the sequence can have; `None`: any number.
    pub fn capacity(&self) -> Option<usize> {
        self.limits().filter_map(|limits| limits.capacity).min()
    }

    /// Hint: the sequence is going to reach `tokens` tokens.
    pub fn reserve(&mut self, tokens: usize) {
        self.parts_mut().for_each(|part| part.reserve(tokens));
    }

    /// The most tokens that a forward pass may feed now; `None`: any number.
    pub fn at_once(&self) -> Option<usize> {
        self.limits().filter_map(|limits| limits.at_once).min()
    }

    /// The most tokens of each row that a forward pass may feed now; `usize::MAX`: any number.
    pub fn at_once_by_row(&self, rows: usize) -> Vec<usize> {
        let of_group = |group: &RowGroup| {
            let most = group.keys().filter_map(|layer| layer.limits().at_once).min();
            std::iter::repeat_n(most.unwrap_or(usize::MAX), group.rows.unwrap_or(rows))
        };
        self.groups.iter().flat_map(of_group).collect()
    }

    /// Whether the sequence may go on for ever: rotary positions stay below a bound.
    pub fn is_endless(&self) -> bool {
        self.limits().next().is_some() && self.limits().all(|limits| limits.endless)
    }

    /// Whether no buffer ever grows, so that a step is the same launches for ever.
    pub fn is_static(&self) -> bool {
        self.limits().next().is_some() && self.limits().all(|limits| limits.fixed_buffers)
    }

    /// How many of the next one-token steps one captured step can be replayed for. See [`KvLayer::replayable`].
    pub fn replayable(&self) -> usize {
        if self.lent.load(Ordering::Relaxed) {
            return 0;
        }
        let mut layers = self.groups.iter().flat_map(|group| &group.layers);
        let only_keys = layers.all(|layer| matches!(layer, LayerCache::Attention(_) | LayerCache::Nothing));
        if only_keys { self.keys().map(KvLayer::replayable).min().unwrap_or(0) } else { 0 }
    }

    /// Counts a token that a replayed step stored in every layer.
    pub fn replayed(&mut self) {
        let layers = self.groups.iter_mut().flat_map(|group| &mut group.layers);
        layers.filter_map(LayerCache::keys_mut).for_each(KvLayer::replayed);
    }

    /// A copy that costs nothing: tensors are shared until one of the two writes to them.
    ///
    /// One prompt serves many continuations this way.
    pub fn snapshot(&self) -> Self {
        self.lent.store(true, Ordering::Relaxed);
        if let Some(claim) = &self.claim {
            self.parts().for_each(|part| part.claim_shared(claim));
        }
        // What it holds besides is claimed when it is fed.
        let claim = self.claim.as_ref().and_then(|claim| claim.budget().claim("the cache", 0).ok());
        let groups = self.groups.iter().map(RowGroup::snapshot).collect();
        Self { groups, claim, lent: AtomicBool::new(true), poisoned: self.poisoned }
    }

    pub fn keep_history(&mut self, n: usize) {
        self.parts_mut().for_each(|part| part.keep_history(n));
    }

    /// Rebuilds the batch, in every layer or in none: new row `i` is old row `rows[i]`. Rows may be repeated and left out.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`].
    pub fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        if let [group] = &mut self.groups[..] {
            for have in group.parts().filter_map(CacheLayer::rows) {
                check_row(rows, have)?;
            }
            return group.parts_mut().try_for_each(|part| part.reorder(rows));
        }
        // Where each row is: its group, and the number that it has there.
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

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.poisoned = false;
        self.groups.truncate(1);
        self.groups.iter_mut().for_each(|group| group.rows = None);
        self.parts_mut().for_each(|part| part.reset());
        self.recount();
    }

    /// The keys and values of every attention block, `[batch, kv_heads, tokens, head_dim]`, one token after the other:
    /// transformers' legacy format. Keys are rotated as they are held; where nothing is held, nothing is returned.
    ///
    /// # Errors
    /// [`Error::Import`] where rows are of different lengths.
    pub fn to_legacy(&self) -> Result<Vec<Kv>> {
        if self.groups.len() > 1 {
            return Err(Error::Import { why: "rows of different lengths have no legacy format".to_owned() });
        }
        self.lent.store(true, Ordering::Relaxed);
        self.keys().filter_map(|layer| layer.gather().transpose()).collect()
    }

    /// Takes over keys and values in transformers' legacy format, as if they had been fed. To be called on a new cache.
    ///
    /// They must stand at positions from 0 on: a sliding window that has left tokens behind cannot be taken over this
    /// way, but saved and restored.
    ///
    /// # Errors
    /// [`Error::Import`] for another number of blocks, or tensors that do not fit each other; after an error the cache can
    /// only be reset.
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
        for (keys, values) in &layers {
            let ([r, heads, t, _], [vr, vheads, vt, _]) = (keys.dims(), values.dims());
            if (r, t) != (rows, tokens) || (vr, vheads, vt) != (rows, heads, tokens) {
                return wrong(format!("keys {:?} and values {:?} do not fit", keys.dims(), values.dims()));
            }
        }
        self.admits(tokens, false)?;
        let own = self.groups.iter_mut().flat_map(|group| &mut group.layers);
        for (layer, (keys, values)) in own.filter_map(LayerCache::keys_mut).zip(layers) {
            let first = layer.span(tokens).query(tokens);
            let positions = Positions::all_at(first, rows, &keys.device());
            layer.update(keys, values, &positions)?;
        }
        self.claim_given();
        Ok(())
    }

    /// Copies all that a new cache needs to go on in this one's place.
    pub fn save(&self) -> Result<CacheState> {
        self.check_usable()?;
        let rows = self.groups.iter().filter_map(|group| group.rows).collect();
        Ok(CacheState { rows, layers: self.parts().map(CacheLayer::save).collect::<Result<_>>()? })
    }

    /// Becomes the cache that `state` was copied from. To be called on a new cache of the same plan; after an error it
    /// can only be reset.
    ///
    /// # Errors
    /// [`Error::Import`] where it is the state of another kind of cache, or of none.
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
            // Layers are fed together, so they have seen as much.
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

    /// Whether what it holds is of that many rows.
    pub fn is_of_rows(&self, rows: usize) -> bool {
        let is_whole = |group: &RowGroup| {
            let rows = group.rows.unwrap_or(rows);
            group.parts().all(|part| part.rows().map_or(part.seq_len() == 0, |have| have == rows))
        };
        self.check_rows(rows).is_ok() && self.groups.iter().all(is_whole)
    }

    /// The name of the strategy that serves each block's own keys and values; `None` for blocks without any.
    pub fn strategies(&self) -> impl Iterator<Item = Option<&'static str>> {
        let blocks = self.groups.iter().take(1).flat_map(|group| &group.layers);
        blocks.map(|layer| layer.keys().map(CacheLayer::name))
    }

    /// Bytes held on the device, room allocated ahead of need included.
    pub fn device_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().device).sum()
    }

    /// Of these, the bytes that snapshots hold too. The budget counts them once.
    pub fn shared_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().shared).sum()
    }

    /// Bytes held in host memory, in place of the device's.
    pub fn host_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().host).sum()
    }

    /// Bytes that went between the host and the device so far.
    pub fn moved(&self) -> Moved {
        self.parts().map(|part| part.usage().moved).sum()
    }

    fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.groups.iter().flat_map(RowGroup::keys)
    }

    fn limits(&self) -> impl Iterator<Item = Limits> {
        self.keys().map(KvLayer::limits)
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
