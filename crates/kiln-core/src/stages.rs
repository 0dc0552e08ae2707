//! Values of the stages of a model: consecutive blocks that are on one device.

use std::ops::Range;

use crate::{Error, Result};

/// A value for each stage of a model: consecutive blocks that are on one device, with a memory budget and
/// kernels of its own. There is at least one stage. The embeddings belong to the first stage; the last norm
/// and the head belong to the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages<T> {
    /// By stage, the number of its first block; ascending from 0.
    list: Vec<(usize, T)>,
}

impl<T> From<T> for Stages<T> {
    /// Creates a single stage of all blocks.
    fn from(only: T) -> Self {
        Self { list: vec![(0, only)] }
    }
}

impl<T> Stages<T> {
    /// Appends a stage that begins with block `first`.
    ///
    /// # Errors
    /// [`Error::Setting`] unless the block comes after the first block of the stage before.
    pub fn then(mut self, first: usize, value: T) -> Result<Self> {
        let before = self.list.last().map_or(0, |(first, _)| *first);
        if first <= before {
            let why = format!("begin a stage with block {first}, and the stage before begins with {before}");
            return Err(Error::Setting { name: "stages", why });
        }
        self.list.push((first, value));
        Ok(self)
    }

    /// The value of the stage that `block` belongs to.
    pub fn of(&self, block: usize) -> &T {
        &self.list[self.at(block)].1
    }

    pub fn of_mut(&mut self, block: usize) -> &mut T {
        let at = self.at(block);
        &mut self.list[at].1
    }

    /// Number of the stage that `block` belongs to.
    fn at(&self, block: usize) -> usize {
        self.list.partition_point(|(first, _)| *first <= block) - 1
    }

    pub fn first(&self) -> &T {
        &self.list[0].1
    }

    pub fn last(&self) -> &T {
        &self.list[self.list.len() - 1].1
    }

    /// Iterates over the values of the stages.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.list.iter().map(|(_, value)| value)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.list.iter_mut().map(|(_, value)| value)
    }

    /// Number of stages.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Iterates over the stages of a model with `blocks` blocks, with the blocks of each.
    pub fn blocks(&self, blocks: usize) -> impl Iterator<Item = (Range<usize>, &T)> {
        let ends = self.list.iter().skip(1).map(|(first, _)| *first).chain([usize::MAX]);
        let range = move |first: usize, end: usize| first.min(blocks)..end.min(blocks);
        self.list.iter().zip(ends).map(move |((first, value), end)| (range(*first, end), value))
    }

    /// Converts the value of each stage.
    pub fn map<U>(&self, mut convert: impl FnMut(&T) -> U) -> Stages<U> {
        Stages { list: self.list.iter().map(|(first, value)| (*first, convert(value))).collect() }
    }

    /// Combines the values of each stage with those of `others`, which has the same stages.
    pub fn zip<U, V>(&self, others: Stages<U>, mut combine: impl FnMut(&T, U) -> V) -> Stages<V> {
        let both = self.list.iter().zip(others.list);
        Stages { list: both.map(|((first, one), (_, other))| (*first, combine(one, other))).collect() }
    }

    /// Converts the value of each stage.
    ///
    /// # Errors
    /// The first error of `convert`.
    pub fn try_map<U>(&self, mut convert: impl FnMut(&T) -> Result<U>) -> Result<Stages<U>> {
        let list = self.list.iter().map(|(first, value)| Ok((*first, convert(value)?)));
        Ok(Stages { list: list.collect::<Result<_>>()? })
    }

    /// The stages with converted values, one conversion after the other.
    ///
    /// # Errors
    /// The first error of `convert`.
    pub async fn try_map_async<U>(&self, mut convert: impl AsyncFnMut(&T) -> Result<U>) -> Result<Stages<U>> {
        let mut list = Vec::with_capacity(self.list.len());
        for (first, value) in &self.list {
            list.push((*first, convert(value).await?));
        }
        Ok(Stages { list })
    }
}

impl<T: PartialEq> Stages<T> {
    /// Whether no stage before that of `block` has an equal value.
    pub fn is_first(&self, block: usize) -> bool {
        let own = self.at(block);
        self.list[..own].iter().all(|(_, value)| *value != self.list[own].1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use super::*;

    #[test]
    fn every_block_belongs_to_one_stage() {
        let stages = Stages::from('a').then(2, 'b').unwrap().then(3, 'c').unwrap();
        let by_block: String = (0..5).map(|block| *stages.of(block)).collect();
        assert_eq!(by_block, "aabcc");
        let ranges: Vec<_> = stages.blocks(5).map(|(blocks, value)| (blocks, *value)).collect();
        assert_eq!(ranges, [(0..2, 'a'), (2..3, 'b'), (3..5, 'c')]);
        assert_eq!((*stages.first(), *stages.last(), stages.count()), ('a', 'c', 3));
        let ranges: Vec<_> = stages.blocks(2).map(|(blocks, _)| blocks.len()).collect();
        assert_eq!(ranges, [2, 0, 0], "stages beyond the last block are empty");
        let again = Stages::from('a').then(2, 'b').unwrap().then(3, 'a').unwrap();
        assert_eq!([0, 2, 3].map(|block| again.is_first(block)), [true, true, false]);
    }

    #[test]
    fn stages_that_do_not_ascend_are_refused() {
        assert!(Stages::from('a').then(0, 'b').is_err());
        assert!(Stages::from('a').then(2, 'b').unwrap().then(2, 'c').is_err());
    }
}
