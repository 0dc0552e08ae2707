//! The copy of an offloaded layer in host memory.

use std::{ops::Range, sync::Arc};

use burn::tensor::{DType, Device, TensorData};
use kiln_core::{
    Error, Result,
    device_state::DeviceState,
    host_data,
    layer::Moved,
    read_back::{self, ReadBack},
    slot::{AnySlot, Dirty, Outline},
};

/// Maximum number of bytes of unfinished reads: the device holds them until they have arrived. If there are
/// more, the host waits for all.
const UNDER_WAY: usize = 256 << 10;

/// Copies of the tensors in every slot of a layer, and the reads from the device that have not finished.
#[derive(Debug, Default)]
pub(super) struct Host {
    /// The tensors of each slot.
    slots: Vec<Vec<HostTensor>>,
    arriving: Vec<Arriving>,
    moved: Moved,
    /// The error of a read that failed. The copy lacks its data, so every later use fails with this error.
    lost: Option<Error>,
}

/// A tensor of a slot, or a part of it, that is being read from the device.
#[derive(Debug)]
struct Arriving {
    /// Index of the slot.
    slot: usize,
    /// Index of the tensor in the slot.
    tensor: usize,
    /// Entries of dimension 2; `None`: all.
    tokens: Option<Range<usize>>,
    read: ReadBack,
}

impl Host {
    /// Starts to update the copy from the device: reads the entries that changed, and whole tensors whose
    /// shape or type changed. `dirty`: the changes in each slot.
    ///
    /// # Errors
    /// The device's error in reading, now or before.
    pub(super) fn follow(&mut self, slots: &[&dyn AnySlot], dirty: &[Dirty]) -> Result<()> {
        self.settle()?;
        self.slots.resize(slots.len(), Vec::new());
        for (i, slot) in slots.iter().enumerate() {
            let outlines = slot.outlines();
            let known = self.slots[i].iter().map(HostTensor::outline).eq(outlines.iter().cloned());
            match dirty.get(i) {
                Some(Dirty::Nothing) if known => {}
                Some(Dirty::Tokens(pieces)) if known => {
                    pieces.iter().try_for_each(|piece| self.expect(i, *slot, Some(piece)))?;
                }
                _ => {
                    self.slots[i] = outlines.into_iter().map(HostTensor::awaited).collect();
                    self.expect(i, *slot, None)?;
                }
            }
        }
        let bytes =
            |arriving: &Arriving| self.slots[arriving.slot][arriving.tensor].bytes_of(&arriving.tokens);
        if self.arriving.iter().map(bytes).sum::<usize>() > UNDER_WAY {
            self.settle()?;
        }
        Ok(())
    }

    /// Starts to read the tensors of slot `i`; `tokens`: entries of dimension 2, or all.
    fn expect(&mut self, i: usize, slot: &dyn AnySlot, tokens: Option<&Range<usize>>) -> Result<()> {
        let reads = slot.start_reading(tokens)?.into_iter().enumerate();
        let arriving =
            reads.map(|(tensor, read)| Arriving { slot: i, tensor, tokens: tokens.cloned(), read });
        self.arriving.extend(arriving);
        Ok(())
    }

    /// Waits for all unfinished reads, and stores their data.
    ///
    /// # Errors
    /// The device's error in a read. Later calls return it again, until the copy is [emptied](Self::empty).
    fn settle(&mut self) -> Result<()> {
        for Arriving { slot, tensor, tokens, read } in std::mem::take(&mut self.arriving) {
            match (
                read_back::wait(read.finish()),
                self.slots.get_mut(slot).and_then(|slot| slot.get_mut(tensor)),
            ) {
                (Ok(data), Some(here)) => {
                    self.moved.down += data.as_bytes().len() as u64;
                    here.write(tokens, data);
                }
                (Ok(_), None) => {}
                (Err(error), _) => self.lost = Some(error),
            }
        }
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// Copies tensors back to the device, into those of `slots` that are offloaded.
    ///
    /// # Errors
    /// The device's error in an earlier read.
    pub(super) fn fill(&mut self, slots: Vec<&mut dyn AnySlot>, device: &Device) -> Result<()> {
        self.settle()?;
        let state = DeviceState::of(device);
        for (slot, here) in slots.into_iter().zip(&self.slots).filter(|(slot, _)| slot.is_offloaded()) {
            self.moved.up += here.iter().map(|tensor| tensor.len() as u64).sum::<u64>();
            state.uploading(|| slot.fill(&mut here.iter().map(HostTensor::to_data), device));
        }
        Ok(())
    }

    /// Drops the copies of slots that are not offloaded.
    ///
    /// # Errors
    /// The device's error in reading the others; then all are dropped.
    pub(super) fn forget(&mut self, slots: &[&dyn AnySlot]) -> Result<()> {
        let settled = self.settle();
        if settled.is_err() {
            self.empty();
        }
        for (i, here) in self.slots.iter_mut().enumerate() {
            if !slots.get(i).is_some_and(|slot| slot.is_offloaded()) {
                here.clear();
            }
        }
        settled
    }

    /// Drops everything except the counts of moved bytes.
    pub(super) fn empty(&mut self) {
        *self = Self { moved: self.moved, ..Self::default() };
    }

    /// Returns a copy for a snapshot. Tensors are shared until either copy changes.
    pub(super) fn share(&mut self) -> Self {
        // An error is stored in `lost`, and reported when either copy is used.
        _ = self.settle();
        let (slots, lost) = (self.slots.clone(), self.lost.clone());
        Self { slots, arriving: Vec::new(), moved: Moved::default(), lost }
    }

    /// Selects rows of every tensor: new row `i` is old row `rows[i]`.
    pub(super) fn select_rows(&mut self, rows: &[usize]) -> Result<()> {
        self.settle()?;
        self.slots.iter_mut().flatten().for_each(|tensor| tensor.select_rows(rows));
        Ok(())
    }

    /// Size of all tensors in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.slots.iter().flatten().map(HostTensor::len).sum()
    }

    /// Number of bytes that were copied between the host and the device so far.
    pub(super) fn moved(&self) -> Moved {
        self.moved
    }
}

/// The error of offloading in a browser.
pub(super) fn unavailable() -> Error {
    let why = "needs reads that the host waits for, and a browser cannot wait; leave it out".to_owned();
    Error::Setting { name: "offload", why }
}

/// A tensor in host memory, in row-major order. Clones share its bytes until one of them is written.
#[derive(Clone, Debug)]
pub(super) struct HostTensor {
    bytes: Arc<Vec<u8>>,
    shape: Vec<usize>,
    dtype: DType,
}

impl HostTensor {
    fn new(data: TensorData) -> Self {
        let (shape, dtype) = (data.shape().to_vec(), data.dtype());
        Self { bytes: Arc::new(data.as_bytes().to_vec()), shape, dtype }
    }

    /// Creates a tensor whose data have not arrived yet.
    fn awaited((shape, dtype): Outline) -> Self {
        Self { bytes: Arc::default(), shape, dtype }
    }

    fn outline(&self) -> Outline {
        (self.shape.clone(), self.dtype)
    }

    /// Size in bytes, including data that have not arrived yet.
    fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Size in bytes of the entries `tokens` of dimension 2, or of everything.
    fn bytes_of(&self, tokens: &Option<Range<usize>>) -> usize {
        match (tokens, self.shape.get(2)) {
            (Some(tokens), Some(&all)) => self.len() / all.max(1) * tokens.len(),
            _ => self.len(),
        }
    }

    /// Returns tensor data that share the bytes. If this tensor is written before they are on the device, the
    /// bytes are copied in host memory first.
    fn to_data(&self) -> TensorData {
        host_data::shared(Arc::clone(&self.bytes), self.shape.clone(), self.dtype)
    }

    /// Replaces the entries `tokens` of dimension 2, or everything.
    fn write(&mut self, tokens: Option<Range<usize>>, data: TensorData) {
        let Some(tokens) = tokens.filter(|_| self.shape.len() > 2) else {
            *self = Self::new(data);
            return;
        };
        let entry = self.shape[3..].iter().product::<usize>() * self.dtype.size();
        let (whole, piece) = (self.shape[2] * entry, tokens.len() * entry);
        if whole == 0 || piece == 0 {
            return;
        }
        let bytes = Arc::make_mut(&mut self.bytes);
        for (to, from) in bytes.chunks_exact_mut(whole).zip(data.as_bytes().chunks_exact(piece)) {
            to[tokens.start * entry..tokens.end * entry].copy_from_slice(from);
        }
    }

    /// Selects rows: new row `i` is old row `rows[i]`; all of them must exist.
    fn select_rows(&mut self, rows: &[usize]) {
        let Some(have) = self.shape.first_mut() else { return };
        let row = self.bytes.len() / (*have).max(1);
        let old = &self.bytes;
        let new: Vec<u8> = rows.iter().flat_map(|&i| &old[i * row..(i + 1) * row]).copied().collect();
        *have = rows.len();
        self.bytes = Arc::new(new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor() -> HostTensor {
        // [2, 1, 3, 2]
        HostTensor::new(TensorData::new((0..12).map(|i| i as f32).collect(), [2, 1, 3, 2]))
    }

    fn numbers(tensor: &HostTensor) -> Vec<f32> {
        tensor.to_data().iter::<f32>().collect()
    }

    #[test]
    fn a_write_does_not_change_a_clone() {
        let mut one = tensor();
        let other = one.clone();
        one.write(Some(1..2), TensorData::new(vec![50f32, 51.0, 60.0, 61.0], [2, 1, 1, 2]));
        assert_eq!(numbers(&one), [0., 1., 50., 51., 4., 5., 6., 7., 60., 61., 10., 11.]);
        assert_eq!(numbers(&other), numbers(&tensor()));
    }

    #[test]
    fn rows_are_repeated_and_reordered() {
        let mut one = tensor();
        one.select_rows(&[1, 0, 1]);
        assert_eq!(one.outline(), (vec![3, 1, 3, 2], DType::F32));
        assert_eq!(numbers(&one)[..8], [6., 7., 8., 9., 10., 11., 0., 1.]);
        one.select_rows(&[]);
        assert_eq!((one.shape[0], one.bytes.len()), (0, 0));
    }
}
