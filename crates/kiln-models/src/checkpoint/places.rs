//! A check of the tensors that a model requests, without reading any.

use std::{collections::BTreeSet, ops::Range};

use burn::tensor::{DType, Device, Tensor};
use kiln_core::Result;
use kiln_kernels::Kernels;

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
        let mut places = Places { checkpoint: self, device, used: BTreeSet::new() };
        configure(&self.config)?.load(&mut places, kernels)?;
        self.check_used(&places.used)
    }
}

/// Records the requested tensors, and returns stand-ins of the same shapes that take no memory: one expanded
/// number.
struct Places<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    used: BTreeSet<String>,
}

impl Places<'_> {
    fn find(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        self.used.insert(self.checkpoint.locate(name, shape)?.name);
        Ok(())
    }

    fn zeros<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        Tensor::<D>::zeros([1; D], (self.device, DType::F32)).expand(shape)
    }
}

impl Weights for Places<'_> {
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
