//! A [`Buffer`]: keys and values in one tensor each, written in place. Most strategies store tokens in it.

use burn::tensor::{DType, Tensor};
use kiln_core::{
    Error, Result, gapless,
    layer::{Footprint, Kv, KvSpan, Parents, Positions, StepShape},
    need::AttentionNeed,
    slot::{AnySlot, Slot},
    view::{DenseKv, KvView},
};
use kiln_kernels::{Kernels, KvAppend, KvReorder};

use crate::memory::TensorTree;

/// A buffer of keys and one of values, each `[batch, heads, slots, width]`.
///
/// The kernel [`KvAppend`] writes into the tensors if nothing else holds them, and into copies otherwise. A
/// snapshot therefore costs nothing until it or the original is written.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffer {
    kv: Slot<Kv>,
    /// Position `p` is in slot `(p - origin) mod slots`.
    origin: usize,
}

impl Buffer {
    /// Creates an empty buffer for positions from `origin` on.
    pub(crate) fn behind(origin: usize) -> Self {
        Self { origin, ..Self::default() }
    }

    /// Position in slot 0, before the buffer wraps around.
    pub(crate) fn origin(&self) -> usize {
        self.origin
    }

    /// Number of rows of the batch; `None` while the buffer is empty.
    pub(crate) fn rows(&self) -> Option<usize> {
        self.kv.rows()
    }

    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        self.kv.select_rows(rows);
    }

    /// The place of the tensors.
    pub(crate) fn slot(&mut self) -> &mut Slot<Kv> {
        &mut self.kv
    }

    /// Number of slots; 0 while the buffer is empty.
    pub(crate) fn slots(&self) -> usize {
        self.kv.tokens()
    }

    /// Replaces the contents with these keys and values, from the first slot on.
    pub(crate) fn set(&mut self, kv: Kv) {
        self.kv.set(kv);
    }

    /// Resizes the buffer to `slots` slots, with the batch, heads, width and type of the given keys and
    /// values. The contents of the first `filled` slots are kept.
    ///
    /// # Errors
    /// [`Error::Execution`] if the buffer is in host memory.
    pub(crate) fn resize(
        &mut self,
        slots: usize,
        filled: usize,
        (keys, values): &Kv,
        lives: Lifetime,
    ) -> Result<()> {
        let fits = |have: &Tensor<4>, new: &Tensor<4>| {
            let ([rows, heads, have, dim], [new_rows, new_heads, _, new_dim]) = (have.dims(), new.dims());
            [rows, heads, have, dim] == [new_rows, new_heads, slots, new_dim]
        };
        match self.kv.take()? {
            Some((k, v)) if fits(&k, keys) && fits(&v, values) => self.kv.set_written((k, v), []),
            old => {
                let (k, v) = old.filter(|_| filled > 0).unzip();
                self.kv
                    .set((resized(k, slots, filled, keys, lives), resized(v, slots, filled, values, lives)));
            }
        }
        Ok(())
    }

    /// Writes tokens, each `[batch, heads, tokens, width]`, from `positions` on. Does nothing to an empty
    /// buffer: [`resize`](Self::resize) comes first.
    ///
    /// # Errors
    /// [`Error::Execution`] if the buffer is in host memory.
    pub(crate) fn write(
        &mut self,
        kernels: &Kernels,
        (keys, values): Kv,
        positions: &Positions,
    ) -> Result<()> {
        let slots = self.slots();
        if let Some((k, v)) = self.kv.take()? {
            let n = keys.dims()[2];
            let (positions, origin) = (positions.clone(), self.origin);
            let firsts = positions.on_host.clone();
            let append = KvAppend { buffers: [k, v], new: [keys, values], positions, origin };
            let [k, v] = kernels.run(append);
            // The slots that were written, for the copy in host memory. A range may wrap around.
            let mut firsts: Vec<usize> = firsts.iter().map(|row| row.first).collect();
            firsts.dedup();
            let written = firsts.into_iter().flat_map(|first| {
                let first = first.saturating_sub(self.origin) % slots.max(1);
                [first..(first + n).min(slots), 0..(first + n).saturating_sub(slots)]
            });
            self.kv.set_written((k, v), written);
        }
        Ok(())
    }

    /// Replaces the tokens of each row after the prompt by those of its parent, for a beam search.
    pub(crate) fn reorder_on_device(&mut self, kernels: &Kernels, parents: &Parents) -> Result<()> {
        if let Some((keys, values)) = self.kv.take()? {
            let Parents { rows, width, positions, behind, .. } = parents.clone();
            let reorder = KvReorder {
                buffers: [keys, values],
                parents: rows,
                width,
                positions,
                latest: behind,
                origin: self.origin,
            };
            let [keys, values] = kernels.run(reorder);
            self.kv.set((keys, values));
        }
        Ok(())
    }

    /// Writes the tokens `new` from position `first` on, in all rows.
    pub(crate) fn write_from(&mut self, kernels: &Kernels, new: Kv, first: usize) -> Result<()> {
        let positions = Positions::all_at(first, new.0.dims()[0], kernels.device());
        self.write(kernels, new, &positions)
    }

    /// Returns the whole tensors, of which positions from `start` on are to be read. Slots of other positions
    /// may have any contents.
    ///
    /// # Errors
    /// [`Error::Execution`] if the buffer is empty, or in host memory.
    pub(crate) fn dense(&self, start: usize) -> Result<DenseKv> {
        let kv = self.kv.get()?.cloned();
        let (keys, values) =
            kv.ok_or_else(|| Error::Execution("a cache was read before it was written".to_owned()))?;
        Ok(DenseKv { keys, values, start, origin: self.origin, shared: None })
    }

    /// Returns [`dense`](Self::dense) as a view for attention.
    pub(crate) fn view(&self, start: usize) -> Result<KvView> {
        self.dense(start).map(KvView::Dense)
    }

    /// Returns the keys and values of the positions in `span`, in their order.
    pub(crate) fn in_order(&self, span: KvSpan) -> Result<Kv> {
        Ok(self.dense(span.start)?.in_order(span))
    }

    /// Like [`in_order`](Self::in_order), but `None` for an empty span.
    pub(crate) fn gather(&self, span: KvSpan) -> Result<Option<Kv>> {
        if span.len == 0 { Ok(None) } else { self.in_order(span).map(Some) }
    }

    /// Keeps only the first `slots` slots.
    pub(crate) fn truncate(&mut self, slots: usize) -> Result<()> {
        if slots == 0 {
            self.kv.clear();
        } else if slots < self.slots()
            && let Some(kv) = self.kv.take()?
        {
            self.kv.set(narrow(&kv, 0, slots));
        }
        Ok(())
    }

    /// Element type of the keys; `None` while the buffer is empty.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.kv.dtype()
    }

    /// Number of slots of a buffer that was read from a file, after checking that it fits a block with this
    /// need.
    ///
    /// # Errors
    /// [`Error::Import`] if it does not fit.
    pub(crate) fn validate(&self, need: &AttentionNeed) -> Result<usize> {
        validate(&self.kv, need)
    }

    pub(crate) fn device_bytes(&self) -> usize {
        self.kv.device_bytes()
    }
}

impl TensorTree for Buffer {
    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![&self.kv]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![&mut self.kv]
    }
}

/// Returns the tokens `old`, if there are any, followed by the new ones.
pub(crate) fn behind(old: Option<Kv>, (keys, values): Kv) -> Kv {
    match old {
        Some((k, v)) => (Tensor::cat(vec![k, keys], 2), Tensor::cat(vec![v, values], 2)),
        None => (keys, values),
    }
}

/// Returns the keys and values in `len` slots from slot `from` on.
pub(crate) fn narrow((keys, values): &Kv, from: usize, len: usize) -> Kv {
    (keys.clone().narrow(2, from, len), values.clone().narrow(2, from, len))
}

/// Number of tokens in keys and values that were read from a file, after checking that they fit a block with
/// this need; 0 if there are none.
///
/// # Errors
/// [`Error::Import`] if they do not fit.
pub(crate) fn validate(kv: &Slot<Kv>, need: &AttentionNeed) -> Result<usize> {
    let outlines = kv.outlines();
    let [(keys, dtype), (values, value_dtype)] = &outlines[..] else { return Ok(0) };
    match keys[..] {
        [rows, _, tokens, _]
            if rows > 0
                && tokens > 0
                && keys[..] == need.keys.shape(rows, tokens)
                && values[..] == need.values.shape(rows, tokens)
                && dtype == value_dtype
                && dtype.is_float() =>
        {
            Ok(tokens)
        }
        _ => Err(Error::Import { why: "keys and values do not have the model's shape".to_owned() }),
    }
}

/// Footprint of resizing a buffer from `have` to `slots` slots; while it grows, two copies exist.
pub(crate) fn footprint(need: &AttentionNeed, have: usize, slots: usize, step: &StepShape) -> Footprint {
    let slot = need.token_bytes(step.element).saturating_mul(step.rows);
    let passing = if slots > have { slot.saturating_mul(have) } else { 0 };
    let slots = slots.max(have);
    let largest = need.largest_bytes(step.element).saturating_mul(step.rows).saturating_mul(slots);
    Footprint { held: slot.saturating_mul(slots), largest, passing }
}

/// Lifetime of a buffer of this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// Until it is replaced by a longer one.
    UntilItGrows,
    /// Until the sequence ends. The buffer is allocated outside of the device's memory pools, which round
    /// sizes up.
    AsLongAsTheSequence,
}

/// Creates a buffer like `like`, but with `slots` slots, of which the first `filled` are those of `old`, and
/// the others 0.
fn resized(
    old: Option<Tensor<4>>,
    slots: usize,
    filled: usize,
    like: &Tensor<4>,
    lives: Lifetime,
) -> Tensor<4> {
    let [rows, heads, _, dim] = like.dims();
    let device = like.device();
    let allocate = |()| gapless::zeros([rows, heads, slots, dim], (&device, like.dtype()));
    let new = match lives {
        Lifetime::UntilItGrows => allocate(()),
        Lifetime::AsLongAsTheSequence => device.memory_persistent_allocations((), allocate),
    };
    match old {
        Some(old) => new.slice_assign([0..rows, 0..heads, 0..filled, 0..dim], old.narrow(2, 0, filled)),
        None => new,
    }
}
