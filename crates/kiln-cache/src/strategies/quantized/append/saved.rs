//! What was saved, and may have been altered since.

use burn::tensor::{DType, Device, TensorData};
use kiln_core::{Result, layer::LayerState, slot::AnySlot};

use super::AppendLayer;
use crate::restored;

impl AppendLayer {
    /// Takes a state that was saved, if it is one that this layer could have been in.
    pub(super) fn restored(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([seq_len, end, written, copied, oldest, history], [packed, recent]) = restored::parts(state)?;
        let room = restored::tokens(&recent, self.need())?;
        let slots = self.packed_slots(&packed)?;
        let (block, window) = (self.settled.residual, self.need().window);
        let rows = |tensors: &[TensorData]| tensors.first().map(|data| data.shape()[0]);
        let counts = end.is_multiple_of(block)
            && end <= seq_len
            && end <= written
            && written.is_multiple_of(block)
            && oldest <= seq_len
            && (oldest <= end || end == seq_len)
            && (room == 0) == (seq_len == 0 && recent.is_empty())
            && seq_len - oldest <= room
            && room < block + history.max(1);
        let places = match window {
            None => slots >= written,
            Some(window) => {
                let visible = (seq_len + 1).saturating_sub(window);
                slots.is_multiple_of(block) && written.saturating_sub(slots).max(copied) <= visible.min(end)
            }
        };
        let alike = packed.is_empty() || rows(&packed) == rows(&recent);
        restored::check(counts && places && alike)?;
        self.packed.restore(packed, device)?;
        self.recent.restore(recent, device)?;
        (self.seq_len, self.end, self.written, self.oldest) = (seq_len, end, written, oldest);
        // No more is promised than there is room for already: a file may ask for any amount.
        let history = history.min((room + 1).saturating_sub(block));
        (self.slots, self.copied, self.history) = (slots, copied, history.max(self.history));
        if let Ok((keys, _)) = self.recent.get() {
            self.prepare_rotation(&keys)?;
        }
        Ok(())
    }

    /// Slots of a packed part that was read; 0 for none.
    fn packed_slots(&self, host: &[TensorData]) -> Result<usize> {
        let wrong = || restored::wrong("packed keys and values do not have the model's shape");
        let Some(codes) = host.first() else { return Ok(0) };
        let &[rows, heads, slots, _] = codes.shape().as_slice() else { return Err(wrong()) };
        let (need, together) = (self.need(), self.packings.map(|packing| packing.slots_together()));
        let whole = rows > 0 && slots > 0 && together.iter().all(|&together| slots.is_multiple_of(together));
        if !whole || heads != need.kv_heads {
            return Err(wrong());
        }
        let shape = [rows, heads, slots, need.head_dim];
        let wanted = self.packings.iter().flat_map(|p| [p.codes_shape(shape), p.scales_shape(shape)]);
        let fits = host.len() == 4
            && host
                .iter()
                .zip(wanted)
                .all(|(data, shape)| data.dtype() == DType::I32 && data.shape().as_slice() == shape);
        if fits { Ok(slots) } else { Err(wrong()) }
    }
}
