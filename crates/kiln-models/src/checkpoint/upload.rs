//! Uploading: how tensors travel to the device.

use burn::tensor::{DType, Device, Tensor, TensorData, kind::Basic, s};
use kiln_core::{Result, device_state::DeviceState, gapless};

use super::locate::Piece;
use crate::LoadTarget;

/// Number of bytes that may be in flight to a GPU before the loader waits for it. Bytes in flight take host
/// memory twice: the decoded weights, and the driver's staging buffer. Therefore larger tensors also travel
/// in blocks of rows.
const IN_FLIGHT: usize = 4 << 20;

/// Decodes pieces to a tensor of a shape.
type Decode<'a, const D: usize> = &'a mut dyn FnMut(&[Piece<'_>], [usize; D]) -> Result<TensorData>;

/// Uploads tensors to a device.
pub(super) struct Uploader {
    device: Device,
    /// Whether tensors are copied to memory that the device owns.
    copied: bool,
    in_flight: usize,
}

impl Uploader {
    pub(super) fn new(target: &LoadTarget) -> Self {
        Self { device: target.device().clone(), copied: target.copied, in_flight: 0 }
    }

    /// Uploads to this device from now on.
    pub(super) fn load_to(&mut self, target: &LoadTarget) {
        if *target.device() != self.device {
            *self = Self::new(target);
        }
    }

    /// Uploads `pieces` as one tensor, which travels in slices of its first dimension.
    pub(super) fn upload<const D: usize, K: Basic + 'static>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        dtype: DType,
        decode: Decode<'_, D>,
    ) -> Result<Tensor<D, K>> {
        let row = shape[1..].iter().product::<usize>() * dtype.size();
        let rows = if self.copied { (IN_FLIGHT / row.max(1)).max(1) } else { shape[0] };
        if rows >= shape[0] {
            return self.send(decode(pieces, shape)?, shape, dtype);
        }
        let device = &self.device.clone();
        let mut whole =
            device.memory_persistent_allocations(shape, |shape| gapless::empty(shape, (device, dtype)));
        let mut start = 0;
        for piece in pieces {
            for first in (0..piece.rows).step_by(rows) {
                let mut part_shape = shape;
                part_shape[0] = rows.min(piece.rows - first);
                let end = start + part_shape[0];
                let block = Piece { rows: part_shape[0], first: piece.first + first, ..*piece };
                let part = self.send(decode(&[block], part_shape)?, part_shape, dtype)?;
                // In place, because the tensor has no other owner.
                whole = whole.slice_assign(s![start..end], part);
                self.wait()?;
                start = end;
            }
        }
        Ok(whole)
    }

    /// Starts the transfer of a tensor.
    fn send<const D: usize, K: Basic + 'static>(
        &mut self,
        data: TensorData,
        shape: [usize; D],
        dtype: DType,
    ) -> Result<Tensor<D, K>> {
        let device = &self.device;
        let tensor = device.memory_persistent_allocations(data, |data: TensorData| {
            gapless::from_data(data, (device, dtype))
        });
        self.in_flight += shape.iter().product::<usize>() * dtype.size();
        if self.in_flight >= IN_FLIGHT {
            self.wait()?;
        }
        Ok(tensor)
    }

    fn wait(&mut self) -> Result<()> {
        self.in_flight = 0;
        DeviceState::of(&self.device).sync()
    }
}
