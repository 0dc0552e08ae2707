//! Keys and values in one buffer each, written in place.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    layer::{Feed, Footprint, KvSpan, Place},
    need::AttentionNeed,
    slot::{AnySlot, Slot, Touched},
    view::DenseKv,
};
use kiln_kernels::Kernels;

use crate::restored;

/// A buffer of keys and one of values, `[batch, kv_heads, slots, head_dim]`.
///
/// It is written through [`Kernels::kv_append`]: in place while nothing else holds it, else on a copy. So a snapshot
/// costs nothing until one of the two writes.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    kv: Slot<(Tensor<4>, Tensor<4>)>,
    /// Known also while the tensors are away.
    slots: usize,
    /// Position p is in slot (p - origin) mod slots.
    origin: usize,
    touched: Touched,
    need: AttentionNeed,
    kernels: Kernels,
}

impl Buffer {
    pub(crate) fn new(need: &AttentionNeed, kernels: &Kernels) -> Self {
        let touched = Touched::Nothing;
        Self { kv: Slot::Empty, slots: 0, origin: 0, touched, need: need.clone(), kernels: kernels.clone() }
    }

    /// An empty one, for positions from `origin` on.
    pub(crate) fn behind(&self, origin: usize) -> Self {
        Self { origin, ..Self::new(&self.need, &self.kernels) }
    }

    pub(crate) fn origin(&self) -> usize {
        self.origin
    }

    /// Takes over the tensors of a state; how many slots there are now.
    pub(crate) fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<usize> {
        let slots = restored::tokens(&host, &self.need)?;
        self.kv.restore(host, device)?;
        self.touched = Touched::Everything;
        self.slots = slots;
        Ok(slots)
    }

    pub(crate) fn need(&self) -> &AttentionNeed {
        &self.need
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Whether `keys` can follow what is here, of which `filled` slots count.
    ///
    /// # Errors
    /// [`Error::WrongRows`], [`Error::Exported`].
    pub(crate) fn check(&self, keys: &Tensor<4>, filled: usize) -> Result<()> {
        match self.kv.get()? {
            Some((here, _)) if filled > 0 && here.dims()[0] != keys.dims()[0] => {
                Err(Error::WrongRows { rows: here.dims()[0], given: keys.dims()[0] })
            }
            _ => Ok(()),
        }
    }

    /// Makes it `slots` slots long, for rows like those of `keys`; the first `filled` slots are kept.
    pub(crate) fn resize(
        &mut self,
        slots: usize,
        filled: usize,
        [keys, values]: [&Tensor<4>; 2],
        lives: Lives,
    ) -> Result<()> {
        let fits = |have: &Tensor<4>, new: &Tensor<4>| {
            let ([rows, heads, have, dim], [new_rows, new_heads, _, new_dim]) = (have.dims(), new.dims());
            [rows, heads, have, dim] == [new_rows, new_heads, slots, new_dim]
        };
        let old = self.kv.take()?;
        self.kv = Slot::Here(match old {
            Some((k, v)) if fits(&k, keys) && fits(&v, values) => (k, v),
            old => {
                self.touched = Touched::Everything;
                let (k, v) = old.filter(|_| filled > 0).unzip();
                (resized(k, slots, filled, keys, lives), resized(v, slots, filled, values, lives))
            }
        });
        self.slots = slots;
        Ok(())
    }

    /// Writes `keys` and `values` at `place` and behind it.
    pub(crate) fn write(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<()> {
        if let Some((k, v)) = self.kv.take()? {
            let first = place.first.saturating_sub(self.origin) % self.slots.max(1);
            let end = first + keys.dims()[2];
            self.touched.add(first..end.min(self.slots));
            self.touched.add(0..end.saturating_sub(self.slots));
            let [k, v] = self.kernels.kv_append([k, v], [keys, values], place.on_device.clone(), self.origin);
            self.kv = Slot::Here((k, v));
        }
        Ok(())
    }

    /// The whole buffers, slots that do not count included.
    pub(crate) fn get(&self) -> Result<(Tensor<4>, Tensor<4>)> {
        self.kv
            .get()?
            .cloned()
            .ok_or_else(|| Error::Execution("a cache was read before it was written".to_owned()))
    }

    /// The same, to be read from position `start` on.
    pub(crate) fn view(&self, start: usize) -> Result<DenseKv> {
        let (keys, values) = self.get()?;
        Ok(DenseKv { keys, values, start, origin: self.origin })
    }

    /// Keys and values of the positions in `span`.
    pub(crate) fn in_order(&self, span: KvSpan) -> Result<(Tensor<4>, Tensor<4>)> {
        Ok(self.view(span.start)?.in_order(span))
    }

    /// The same where `span` is not empty.
    pub(crate) fn dense(&self, span: KvSpan) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        if span.len == 0 { Ok(None) } else { self.in_order(span).map(Some) }
    }

    /// Keeps the first `slots` slots only.
    pub(crate) fn truncate(&mut self, slots: usize) {
        if slots == 0 {
            self.kv = Slot::Empty;
            self.slots = 0;
        } else if slots < self.slots
            && let Slot::Here((k, v)) = &mut self.kv
        {
            k.inplace(|k| k.narrow(2, 0, slots));
            v.inplace(|v| v.narrow(2, 0, slots));
            self.slots = slots;
        }
    }

    /// What it takes to be `slots` slots long for such a feed; one that grows is there twice meanwhile.
    pub(crate) fn footprint(&self, slots: usize, feed: &Feed) -> Footprint {
        let slot = self.need.token_bytes(feed.element).saturating_mul(feed.rows);
        let passing = if slots > self.slots { slot.saturating_mul(self.slots) } else { 0 };
        let held = slot.saturating_mul(slots.max(self.slots));
        Footprint { held, largest: held, passing }
    }

    /// What changed since this was asked before.
    pub(crate) fn touched(&mut self) -> Touched {
        std::mem::take(&mut self.touched)
    }

    /// The type of what it holds, also while that is away.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.kv.outlines().first().map(|&(_, dtype)| dtype)
    }

    pub(crate) fn slot(&self) -> &dyn AnySlot {
        &self.kv
    }

    pub(crate) fn slot_mut(&mut self) -> &mut dyn AnySlot {
        &mut self.kv
    }
}

/// How long a buffer of this length is going to be needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lives {
    UntilItGrows,
    /// Memory that is not taken from the pools, which would round it up.
    AsLongAsTheSequence,
}

fn resized(old: Option<Tensor<4>>, slots: usize, filled: usize, like: &Tensor<4>, lives: Lives) -> Tensor<4> {
    let [rows, heads, _, dim] = like.dims();
    let device = like.device();
    let allocate = |()| Tensor::<4>::zeros([rows, heads, slots, dim], (&device, like.dtype()));
    let new = match lives {
        Lives::UntilItGrows => allocate(()),
        Lives::AsLongAsTheSequence => device.memory_persistent_allocations((), allocate),
    };
    match old {
        Some(old) => new.slice_assign([0..rows, 0..heads, 0..filled, 0..dim], old.narrow(2, 0, filled)),
        None => new,
    }
}
