//! From a checkpoint's bytes to tensors on a device.

use std::{collections::BTreeSet, ops::Range};

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::{Error, Result};

use super::{Checkpoint, Entry, convert::convert};
use crate::Weights;

/// Bytes that may be on their way to the device before the loader waits for it: what is under way is host memory.
const IN_FLIGHT: usize = 32 << 20;

/// Loads the tensors of a checkpoint one by one, and remembers which it was asked for.
///
/// Host memory beyond the map is at most one tensor (or block of rows), and what is in flight.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    dtype: DType,
    largest_binding: usize,
    on_progress: &'a mut dyn FnMut(u64),
    used: BTreeSet<String>,
    in_flight: usize,
    parameters: u64,
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("folder", &self.checkpoint.folder).field("dtype", &self.dtype).finish()
    }
}

impl<'a> Loader<'a> {
    /// `on_progress` is told the bytes of the file that were read, each time some were.
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &'a Device,
        dtype: DType,
        largest_binding: usize,
        on_progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        let used = BTreeSet::new();
        Self { checkpoint, device, dtype, largest_binding, on_progress, used, in_flight: 0, parameters: 0 }
    }

    /// Says whether every tensor of the checkpoint found its place; returns how many elements were loaded.
    ///
    /// # Errors
    /// [`Error::File`] naming those left over: the config then describes another model than the weights.
    pub fn finish(self) -> Result<u64> {
        // Tables that old versions stored and every version recomputes, and a head that is tied to the embedding.
        let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight";
        let left: Vec<_> = (self.checkpoint.tensors.keys())
            .filter(|name| !self.used.contains(*name) && !harmless(name))
            .collect();
        let Some(first) = left.first() else { return Ok(self.parameters) };
        let why = format!(
            "the weights hold {} tensors that config.json has no place for, such as `{first}`; they belong to another \
             config",
            left.len()
        );
        Err(Error::File { path: self.checkpoint.folder.join("config.json"), why })
    }

    fn entry(&mut self, name: &str, shape: &[usize]) -> Result<&'a Entry> {
        let checkpoint = self.checkpoint;
        let Some(entry) = checkpoint.tensors.get(name) else {
            let why = format!("the weights have no tensor `{name}`, which config.json asks for");
            return Err(Error::File { path: checkpoint.folder.clone(), why });
        };
        if entry.shape != shape {
            let why = format!("`{name}` has shape {:?}, and config.json asks for {shape:?}", entry.shape);
            return Err(Error::File { path: checkpoint.path(entry), why });
        }
        self.used.insert(name.to_owned());
        Ok(entry)
    }

    fn upload<const D: usize>(
        &mut self,
        name: &str,
        entry: &Entry,
        bytes: &[u8],
        shape: [usize; D],
    ) -> Result<Tensor<D>> {
        let data = convert(bytes, entry.dtype, self.dtype, shape.to_vec())
            .map_err(|why| Error::File { path: self.checkpoint.path(entry), why: format!("`{name}` {why}") })?;
        let device = self.device;
        let dtype = self.dtype;
        self.parameters += shape.iter().product::<usize>() as u64;
        self.in_flight += shape.iter().product::<usize>() * dtype.size();
        let tensor = device.memory_persistent_allocations(data, |data: TensorData| {
            Tensor::<D>::from_data(data, (device, dtype))
        });
        if self.in_flight > IN_FLIGHT {
            self.in_flight = 0;
            device.sync().map_err(|e| Error::Execution(e.to_string()))?;
        }
        (self.on_progress)(bytes.len() as u64);
        Ok(tensor)
    }
}

impl Weights for Loader<'_> {
    fn vector(&mut self, name: &str, len: usize) -> Result<Tensor<1>> {
        let entry = self.entry(name, &[len])?;
        self.upload(name, entry, self.checkpoint.data(entry), [len])
    }

    fn matrix_rows(&mut self, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<Tensor<2>> {
        let entry = self.entry(name, &shape)?;
        let data = self.checkpoint.data(entry);
        // The header was checked to give the tensor as many bytes as its shape needs.
        let row = data.len() / shape[0].max(1);
        let bytes = data.get(range.start * row..range.end * row).unwrap_or_default();
        self.upload(name, entry, bytes, [range.len(), shape[1]])
    }

    fn largest_binding(&self) -> usize {
        self.largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }
}
