//! What a cache takes on its device, and what of it is claimed.

use super::{ModelCache, groups::RowGroup};
use crate::{
    Error, Result,
    budget::{Budget, Claim},
    layer::{Footprint, Moved, StepShape},
};

impl ModelCache {
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

    pub(super) fn claim_for(&mut self, layers: &[(Footprint, bool)], working: usize) -> Result<()> {
        self.check_largest(layers)?;
        let bytes = Self::at_most(layers).saturating_add(working);
        let bytes = bytes.saturating_sub(self.claimed_apart()) as u64;
        self.claim.as_mut().map_or(Ok(()), |claim| claim.resize(bytes))
    }

    /// Bytes of what snapshots hold, too, which have claims of their own.
    pub(super) fn claimed_apart(&mut self) -> usize {
        let Some(claim) = &self.claim else { return 0 };
        self.groups.iter_mut().flat_map(RowGroup::parts_mut).map(|part| part.claimed_apart(claim)).sum()
    }

    /// Claims what layers were given, as far as there is room: what is missing is claimed when they are fed.
    pub(super) fn claim_given(&mut self) {
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
    pub(super) fn footprints(&self, step: &StepShape, tokens: &[usize]) -> Vec<(Footprint, bool)> {
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

    pub(super) fn at_most(layers: &[(Footprint, bool)]) -> usize {
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

    pub(super) fn check_largest(&self, layers: &[(Footprint, bool)]) -> Result<()> {
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

    /// Bytes held on the device, room allocated ahead of need included.
    pub fn device_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().device).sum::<usize>() + self.shared.bytes()
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
}
