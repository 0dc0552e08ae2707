//! Device memory of a cache, and the claims to it.

use std::ops::Range;

use super::{LayerCache, ModelCache, groups::RowGroup};
use crate::{
    Error, Result,
    budget::{Budget, Claim},
    layer::{CacheLayer, Footprint, Moved, StepShape},
    stages::Stages,
};

/// Memory of a part of a block while a step is stored, in all groups of rows together.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartFootprint {
    block: usize,
    pub(super) bytes: Footprint,
    is_offloaded: bool,
}

/// Memory of some blocks of a cache: all of them, or those of one stage.
#[derive(Debug)]
pub struct BlockMemory<'a> {
    cache: &'a ModelCache,
    blocks: Range<usize>,
}

impl BlockMemory<'_> {
    /// Largest number of bytes on the device while `step` is stored: the memory that layers hold, counting
    /// only the largest two adjacent ones of those offloaded, plus the memory that one of them takes in
    /// addition.
    pub fn bytes_for(&self, step: &StepShape) -> usize {
        at_most(&self.footprints(step))
    }

    /// [`bytes_for`](Self::bytes_for) if every layer were offloaded.
    pub fn bytes_offloaded(&self, step: &StepShape) -> usize {
        let mut parts = self.footprints(step);
        parts.iter_mut().for_each(|part| part.is_offloaded = true);
        at_most(&parts)
    }

    /// Number of additional bytes that the largest layer takes while its buffer doubles; 0 if buffers never
    /// grow.
    pub fn bytes_growing(&self, step: &StepShape) -> usize {
        let largest = self.footprints(step).iter().map(|part| part.bytes.largest).max().unwrap_or(0);
        // Keys and values of half the length, which together are at most as large as the larger is now.
        if self.cache.is_static() { 0 } else { largest }
    }

    /// Number of bytes held on the device, including room allocated ahead of need.
    pub fn device_bytes(&self) -> usize {
        let own = self.parts().map(|part| part.usage().device).sum::<usize>();
        own + self.cache.shared.bytes(&self.blocks)
    }

    /// Number of these bytes that snapshots hold too. The budget counts them once.
    pub fn shared_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().shared).sum()
    }

    fn footprints(&self, step: &StepShape) -> Vec<PartFootprint> {
        let mut parts = self.cache.footprints(step, &[]);
        parts.retain(|part| self.blocks.contains(&part.block));
        parts
    }

    fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        let layers = |group| RowGroup::layers_of(group, &self.blocks).iter();
        self.cache.groups.iter().flat_map(layers).flat_map(LayerCache::parts)
    }
}

impl ModelCache {
    /// Counts this cache in the budgets of the stages.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the cache holds more than is left.
    pub fn within(mut self, budgets: &Stages<Budget>) -> Result<Self> {
        self.claims = Some(budgets.try_map(|budget| budget.claim("the cache", 0))?);
        self.claim_held()?;
        Ok(self)
    }

    /// Claims the memory that feeding `step` takes at most, with `working` bytes of the model's own on each
    /// device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if less is left; those of [`check_buffers`](Self::check_buffers). Then nothing
    /// was changed.
    pub fn make_room(&mut self, step: &StepShape, working: usize) -> Result<()> {
        let parts = self.footprints(step, &[]);
        self.claim_for(&parts, working)
    }

    pub(super) fn claim_for(&mut self, parts: &[PartFootprint], working: usize) -> Result<()> {
        self.check_largest(parts)?;
        let budgets = self.budgets();
        self.claim_bytes(|_, blocks| {
            let own: Vec<_> = parts.iter().filter(|part| blocks.contains(&part.block)).copied().collect();
            // Stages on one device share a budget, and compute one after another.
            let is_first = budgets.as_ref().is_none_or(|budgets| budgets.is_first(blocks.start));
            at_most(&own).saturating_add(if is_first { working } else { 0 })
        })
    }

    /// Claims memory for each stage, without the bytes that snapshots hold too and that have claims of their
    /// own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; then no claim has grown.
    fn claim_bytes(&mut self, bytes: impl Fn(&Self, &Range<usize>) -> usize) -> Result<()> {
        let Some(mut claims) = self.claims.take() else { return Ok(()) };
        let wanted = self.without_apart(&claims, bytes);
        // What one stage gives up is there for another on the same device. A smaller claim is never refused.
        for (claim, bytes) in claims.iter_mut().zip(&wanted) {
            _ = claim.resize((*bytes).min(claim.bytes()));
        }
        let before = claims.map(Claim::bytes);
        let claimed = claims.iter_mut().zip(wanted).try_for_each(|(claim, bytes)| claim.resize(bytes));
        if claimed.is_err() {
            for (claim, bytes) in claims.iter_mut().zip(before.iter()) {
                _ = claim.resize(*bytes);
            }
        }
        self.claims = Some(claims);
        claimed
    }

    /// Returns the bytes of each stage, without those that snapshots hold too and that have claims of their
    /// own.
    fn without_apart(
        &mut self,
        claims: &Stages<Claim>,
        bytes: impl Fn(&Self, &Range<usize>) -> usize,
    ) -> Vec<u64> {
        let blocks = self.blocks();
        let of_stage = |(blocks, claim): (Range<usize>, &Claim)| {
            let layers = self.groups.iter_mut().flat_map(|group| group.layers_of_mut(&blocks));
            let parts = layers.flat_map(LayerCache::parts_mut);
            let apart: usize = parts.map(|part| part.claimed_apart(claim)).sum();
            bytes(self, &blocks).saturating_sub(apart) as u64
        };
        claims.blocks(blocks).map(of_stage).collect()
    }

    /// Claims the memory that is held now.
    fn claim_held(&mut self) -> Result<()> {
        self.claim_bytes(held)
    }

    /// Claims memory that layers were given, as far as there is room: the rest is claimed when they are fed.
    pub(super) fn claim_given(&mut self) {
        let Some(mut claims) = self.claims.take() else { return };
        let held = self.without_apart(&claims, held);
        for (claim, held) in claims.iter_mut().zip(held) {
            _ = claim.resize(held);
        }
        self.claims = Some(claims);
    }

    /// Creates claims in the same budgets, for a cache that shares tensors with this one; further memory is
    /// claimed when it is fed.
    pub(super) fn further_claims(&self) -> Option<Stages<Claim>> {
        let claims = self.claims.as_ref()?;
        claims.try_map(|claim| claim.budget().claim("the cache", 0)).ok()
    }

    /// Counts an allocation within the claim of `block`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if this allocation is to fail, in tests.
    pub(super) fn allocates(&self, block: usize) -> Result<()> {
        self.claims.as_ref().map_or(Ok(()), |claims| claims.of(block).allocates())
    }

    /// Returns the blocks of a stage whose device lacks memory to feed `step`; `None` if all have room.
    pub fn stage_without_room(&self, step: &StepShape, working: usize) -> Option<Range<usize>> {
        let (claims, budgets) = (self.claims.as_ref()?, self.budgets()?);
        let is_short = |(blocks, claim): &(Range<usize>, &Claim)| {
            let working = if budgets.is_first(blocks.start) { working } else { 0 };
            let needed = self.memory_of(blocks.clone()).bytes_for(step).saturating_add(working) as u64;
            let left = claim.budget().available();
            left.is_some_and(|left| needed > left.saturating_add(claim.bytes()))
        };
        claims.blocks(self.blocks()).find(is_short).map(|(blocks, _)| blocks)
    }

    /// Returns the budgets that the cache is counted in, one for each stage.
    pub fn budgets(&self) -> Option<Stages<Budget>> {
        self.claims.as_ref().map(|claims| claims.map(|claim| claim.budget().clone()))
    }

    /// Claims the memory that is held now: to be called when layers hold less than before.
    pub fn recount(&mut self) {
        let Some(mut claims) = self.claims.take() else { return };
        let held = self.without_apart(&claims, held);
        for (claim, held) in claims.iter_mut().zip(held).filter(|(claim, held)| claim.bytes() > *held) {
            // A smaller claim is never refused.
            _ = claim.resize(held);
        }
        self.claims = Some(claims);
    }

    /// Returns the memory of these blocks.
    pub fn memory_of(&self, blocks: Range<usize>) -> BlockMemory<'_> {
        BlockMemory { cache: self, blocks }
    }

    fn memory(&self) -> BlockMemory<'_> {
        self.memory_of(0..self.blocks())
    }

    /// See [`BlockMemory::bytes_for`].
    pub fn bytes_for(&self, step: &StepShape) -> usize {
        self.memory().bytes_for(step)
    }

    /// Footprint of each part of each block while `step` is stored, with the room in shared buffers that no
    /// row has. `tokens`: how many of the tokens each group stores, if that is fewer.
    pub(super) fn footprints(&self, step: &StepShape, tokens: &[usize]) -> Vec<PartFootprint> {
        let mut parts = self.footprints_of_layers(step, tokens);
        for own in parts.chunk_by_mut(|a, b| a.block == b.block) {
            // The first part of a block has its keys.
            if let [keys, ..] = own {
                keys.bytes.held = keys.bytes.held.max(self.shared.bytes(&(keys.block..keys.block + 1)));
            }
        }
        parts
    }

    /// [`footprints`](Self::footprints) without that room.
    pub(super) fn footprints_of_layers(&self, step: &StepShape, tokens: &[usize]) -> Vec<PartFootprint> {
        let mut all: Vec<PartFootprint> = Vec::new();
        for (i, group) in self.groups.iter().enumerate() {
            let rows = group.rows.unwrap_or(step.rows);
            let step = StepShape { rows, tokens: tokens.get(i).copied().unwrap_or(step.tokens), ..*step };
            let parts = group
                .layers
                .iter()
                .enumerate()
                .flat_map(|(block, layer)| layer.parts().map(move |part| (block, part)));
            for (i, (block, part)) in parts.enumerate() {
                let bytes = part.footprint(&step);
                match all.get_mut(i) {
                    Some(PartFootprint { bytes: sum, .. }) => {
                        sum.held = sum.held.saturating_add(bytes.held);
                        sum.largest = sum.largest.max(bytes.largest);
                        // Groups are fed one after another.
                        sum.passing = sum.passing.max(bytes.passing);
                    }
                    None => all.push(PartFootprint { block, bytes, is_offloaded: part.is_offloaded() }),
                }
            }
        }
        all
    }

    /// Checks that the device supports buffers as large as layers need to store `step`.
    ///
    /// # Errors
    /// [`Error::BufferTooLarge`]. A buffer that is too large does not fail at its allocation: wgpu refuses to
    /// bind it.
    pub fn check_buffers(&self, step: &StepShape) -> Result<()> {
        self.check_largest(&self.footprints(step, &[]))
    }

    fn check_largest(&self, parts: &[PartFootprint]) -> Result<()> {
        parts.iter().try_for_each(|part| {
            let needed = part.bytes.largest as u64;
            match self.largest_buffer(part.block) {
                Some(largest) if needed > largest => Err(Error::BufferTooLarge { needed, largest }),
                _ => Ok(()),
            }
        })
    }

    /// Size in bytes of the largest buffer that the device of `block` supports; `None`: unlimited.
    pub(super) fn largest_buffer(&self, block: usize) -> Option<u64> {
        self.claims.as_ref()?.of(block).budget().largest_buffer()
    }

    /// Number of bytes held on devices, including room allocated ahead of need.
    pub fn device_bytes(&self) -> usize {
        self.memory().device_bytes()
    }

    /// Number of these bytes that snapshots hold too. The budget counts them once.
    pub fn shared_bytes(&self) -> usize {
        self.memory().shared_bytes()
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

/// Number of bytes that the layers of `blocks` hold on their device now.
fn held(cache: &ModelCache, blocks: &Range<usize>) -> usize {
    cache.memory_of(blocks.clone()).device_bytes()
}

/// Largest number of bytes that adjacent blocks hold on one device while they are used one after another.
fn at_most(parts: &[PartFootprint]) -> usize {
    // Saturating, because users may ask for any number of tokens.
    let sum = |bytes: &mut dyn Iterator<Item = usize>| bytes.fold(0, usize::saturating_add);
    let offloaded = |part: &&PartFootprint| part.is_offloaded;
    let stay = sum(&mut parts.iter().filter(|part| !part.is_offloaded).map(|part| part.bytes.held));
    // Bytes of a block that are on the device while it is used, and those that one of its parts takes in
    // addition.
    let blocks: Vec<(usize, usize)> = parts
        .chunk_by(|a, b| a.block == b.block)
        .map(|own| {
            let in_use = sum(&mut own.iter().filter(offloaded).map(|part| part.bytes.held));
            (in_use, own.iter().map(|part| part.bytes.passing).max().unwrap_or(0))
        })
        .collect();
    let pair = |(i, &(in_use, passing)): (usize, &(usize, usize))| match blocks.get((i + 1) % blocks.len()) {
        Some((next, _)) if blocks.len() > 1 => in_use.saturating_add(*next).saturating_add(passing),
        _ => in_use.saturating_add(passing),
    };
    stay.saturating_add(blocks.iter().enumerate().map(pair).max().unwrap_or(0))
}
