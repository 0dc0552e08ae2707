//! A check of the tensors that a model requests, without reading any.

use std::{collections::BTreeSet, ops::Range};

use burn::tensor::{DType, Device, Tensor};
use kiln_core::{Result, stages::Stages};
use kiln_kernels::{Kernels, Placement};

use super::Checkpoint;
use crate::{HostMatrix, Part, Weights, configure};

impl Checkpoint {
    /// Checks for the weights what loading would report at the end: each tensor that the model requests
    /// exists in the right shape, and each stored tensor is requested.
    ///
    /// The model is loaded on `device` without reading any numbers, as if it ran on `kernels`.
    ///
    /// # Errors
    /// The errors of loading with a [`Loader`](super::Loader).
    pub fn check_places(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        let mut places = Places::new(self, device);
        configure(&self.config)?.load(&mut places, &kernels.clone().into())?;
        self.check_used(&places.used.into_iter().map(|(name, _)| name).collect())
    }

    /// Returns the size in bytes of the loaded weights of each stage: see [`held_bytes`](Self::held_bytes).
    ///
    /// # Errors
    /// The errors of loading with a [`Loader`](super::Loader).
    pub fn held_bytes_by_stage(&self, placement: &Placement, dtype: DType) -> Result<Stages<u64>> {
        let mut places = Places::new(self, placement.first().device());
        configure(&self.config)?.load(&mut places, placement)?;
        let mut bytes = placement.map(|_| 0);
        let stages: Vec<_> = placement.blocks(usize::MAX).map(|(blocks, _)| blocks).collect();
        let used = |(name, block): &(String, usize)| {
            let stage = stages.iter().find(|stage| stage.contains(block)).map_or(0, |stage| stage.start);
            (name.clone(), stage)
        };
        for (name, block) in places.used.iter().map(used).collect::<BTreeSet<_>>() {
            let held = |entry| self.held(&name, entry, placement.of(block), dtype);
            *bytes.of_mut(block) += self.tensors.get(&name).map_or(0, held);
        }
        Ok(bytes)
    }
}

/// Records the requested tensors, and returns stand-ins of the same shapes that take no memory: one expanded
/// number.
struct Places<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    /// The block that is loaded
    block: usize,
    /// Names in the files of the tensors that were requested, and the blocks that requested them
    used: BTreeSet<(String, usize)>,
}

impl<'a> Places<'a> {
    fn new(checkpoint: &'a Checkpoint, device: &'a Device) -> Self {
        Self { checkpoint, device, block: 0, used: BTreeSet::new() }
    }

    fn find(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        self.used.insert((self.checkpoint.locate(name, shape)?.name, self.block));
        Ok(())
    }

    fn zeros<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        Tensor::<D>::zeros([1; D], (self.device, DType::F32)).expand(shape)
    }
}

impl Weights for Places<'_> {
    fn begin_block(&mut self, block: usize) {
        self.block = block;
    }

    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        parts.iter().try_for_each(|part| self.find(&part.name, &[part.rows]))?;
        Ok(self.zeros([parts.iter().map(|part| part.rows).sum()]))
    }

    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        parts.iter().try_for_each(|part| self.find(&part.name, &[part.rows, width]))?;
        Ok(self.zeros([range.len(), width]))
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        self.dense_matrix(parts, width, range).map(|matrix| HostMatrix::dense(matrix.into_data()))
    }

    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        self.find(name, shape)?;
        Ok(self.zeros([shape.iter().product()]))
    }

    fn largest_binding(&self) -> usize {
        usize::MAX
    }

    fn element_bytes(&self) -> usize {
        DType::F32.size()
    }
}
