//! Device memory of a cache, and the claim to it.

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
    /// [`Error::OutOfMemory`] if the cache holds more than is left.
    pub fn within(mut self, budget: &Budget) -> Result<Self> {
        self.claim = Some(budget.claim("the cache", self.device_bytes() as u64)?);
        Ok(self)
    }

    /// Claims the memory that feeding `step` takes at most, with `working` bytes of the model's own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if less is left; those of [`check_buffers`](Self::check_buffers). Then nothing
    /// was changed.
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

    /// Number of bytes that snapshots hold too, and that have claims of their own.
    pub(super) fn claimed_apart(&mut self) -> usize {
        let Some(claim) = &self.claim else { return 0 };
        self.groups.iter_mut().flat_map(RowGroup::parts_mut).map(|part| part.claimed_apart(claim)).sum()
    }

    /// Claims memory that layers were given, as far as there is room: the rest is claimed when they are fed.
    pub(super) fn claim_given(&mut self) {
        let bytes = self.device_bytes().saturating_sub(self.claimed_apart()) as u64;
        if let Some(claim) = &mut self.claim {
            _ = claim.resize(bytes);
        }
    }

    /// Returns the budget that the cache is counted in.
    pub fn budget(&self) -> Option<&Budget> {
        self.claim.as_ref().map(Claim::budget)
    }

    /// Claims the memory that is held now: to be called when layers hold less than before.
    pub fn recount(&mut self) {
        let bytes = self.device_bytes().saturating_sub(self.claimed_apart()) as u64;
        if let Some(claim) = self.claim.as_mut().filter(|claim| claim.bytes() > bytes) {
            // A smaller claim is never refused.
            _ = claim.resize(bytes);
        }
    }

    /// Largest number of bytes on the device while `step` is stored: the memory that layers hold, counting
    /// only the largest two adjacent ones of those offloaded, plus the memory that one of them takes in
    /// addition.
    pub fn bytes_for(&self, step: &StepShape) -> usize {
        Self::at_most(&self.footprints(step, &[]))
    }

    /// [`bytes_for`](Self::bytes_for) if every layer were offloaded.
    pub fn bytes_offloaded(&self, step: &StepShape) -> usize {
        let mut layers = self.footprints(step, &[]);
        layers.iter_mut().for_each(|(_, offloaded)| *offloaded = true);
        Self::at_most(&layers)
    }

    /// Footprint of each layer while `step` is stored, in all groups together, and whether the layer is
    /// offloaded. `tokens`: how many of the tokens each group stores, if that is fewer.
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
                        // Groups are fed one after another.
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
        // Saturating, because users may ask for any number of tokens.
        let stay = layers.iter().map(here).fold(0, usize::saturating_add);
        stay.saturating_add(layers.iter().enumerate().map(pair).max().unwrap_or(0))
    }

    /// Checks that the device supports buffers as large as layers need to store `step`.
    ///
    /// # Errors
    /// [`Error::BufferTooLarge`]. A buffer that is too large does not fail at its allocation: wgpu refuses to
    /// bind it.
    pub fn check_buffers(&self, step: &StepShape) -> Result<()> {
        self.check_largest(&self.footprints(step, &[]))
    }

    pub(super) fn check_largest(&self, layers: &[(Footprint, bool)]) -> Result<()> {
        let Some(largest) = self.budget().and_then(Budget::largest_buffer) else { return Ok(()) };
        // `largest` counts the keys and the values of a layer together.
        let needed = layers.iter().map(|(layer, _)| layer.largest / 2).max().unwrap_or(0) as u64;
        if needed <= largest { Ok(()) } else { Err(Error::BufferTooLarge { needed, largest }) }
    }

    /// Number of additional bytes that the largest layer takes while its buffer doubles; 0 if buffers never
    /// grow.
    pub fn bytes_growing(&self, step: &StepShape) -> usize {
        let largest = self.footprints(step, &[]).iter().map(|(part, _)| part.largest).max().unwrap_or(0);
        if self.is_static() { 0 } else { largest / 2 }
    }

    /// Number of bytes held on the device, including room allocated ahead of need.
    pub fn device_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().device).sum::<usize>() + self.shared.bytes()
    }

    /// Number of these bytes that snapshots hold too. The budget counts them once.
    pub fn shared_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().shared).sum()
    }

    /// Number of bytes held in host memory, instead of on the device.
    pub fn host_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().host).sum()
    }

    /// Number of bytes copied between the host and the device so far.
    pub fn moved(&self) -> Moved {
        self.parts().map(|part| part.usage().moved).sum()
    }
}
