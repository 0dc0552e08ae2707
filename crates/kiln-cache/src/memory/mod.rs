//! Memory of one block of the model: a [`Policy`], which decides where tokens are stored and which stay, the
//! tensors that it decides about, and their location, on the device or on the host.
//!
//! Selection of rows, promises ([`Progress::history`] and [`Progress::horizon`]), saving, claims to the
//! memory budget, snapshots and offloading are implemented here, once for all strategies.

mod cross;
mod host;
mod policy;
mod recurrent;

use std::cell::RefCell;

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    budget::Claim,
    device_state::DeviceState,
    layer::{
        CacheLayer, Footprint, Kv, KvLayer, KvSpan, LayerState, Limits, Moved, Parents, Positions, Reorders,
        StepShape, Usage,
    },
    need::Stream,
    read_back::ReadBack,
    slot::{AnySlot, Slot},
    view::{DenseKv, KvView},
};

pub use self::policy::{KvPolicy, Policy, Progress, TensorTree};
pub(crate) use self::policy::{check, tensor_tree};
pub(crate) use self::{
    cross::{EncoderPolicy, Once, WriteOnce},
    recurrent::{Forgetful, Recurrent},
};

use self::host::Host;

/// Maximum count in a saved cache; no sequence has as many tokens. A file with a larger one is rejected.
const MOST_TOKENS: u64 = 1 << 40;

/// Memory of one block, managed by `policy`.
///
/// When it is offloaded ([`offload`](CacheLayer::offload)), the host's copy is authoritative: tensors are
/// brought to the device before they are used and dropped there right afterwards, and only changes are copied
/// back (transformers' `OffloadedCache` and `OffloadedStaticCache`).
#[derive(Debug)]
pub struct Memory<P: Policy> {
    policy: P,
    at: Progress<P::Counts>,
    tensors: P::Tensors,
    device: Device,
    /// Copy in host memory; `None`: the memory stays on the device. In a cell, because methods that take
    /// `&self` may have to wait for data in flight to the host, and then store them here.
    host: Option<RefCell<Host>>,
}

impl<P: Policy> Memory<P> {
    /// Creates an empty memory on `device`.
    pub fn new(policy: P, device: &Device) -> Self {
        let at = Progress::default();
        Self { tensors: policy.empty(&at.counts), policy, at, device: device.clone(), host: None }
    }

    /// Runs `work` with the tensors on the device: [fetches](Self::fetch) them first, and [parks](Self::park)
    /// them afterwards.
    fn on_device<T>(
        &mut self,
        work: impl FnOnce(&P, &mut Progress<P::Counts>, &mut P::Tensors) -> Result<T>,
    ) -> Result<T> {
        self.fetch()?;
        let done = work(&self.policy, &mut self.at, &mut self.tensors);
        self.park()?;
        done
    }

    /// Copies offloaded tensors from host memory to the device. Does nothing if the memory is not offloaded.
    fn fetch(&mut self) -> Result<()> {
        match &mut self.host {
            Some(host) => host.get_mut().fill(self.tensors.slots_mut(), &self.device),
            None => Ok(()),
        }
    }

    /// Copies changes to host memory and drops the device's tensors, if the memory is offloaded.
    fn park(&mut self) -> Result<()> {
        let Some(host) = &mut self.host else { return Ok(()) };
        if self.tensors.slots().into_iter().any(AnySlot::is_offloaded) {
            return Ok(());
        }
        let dirty: Vec<_> = self.tensors.slots_mut().into_iter().map(AnySlot::take_dirty).collect();
        host.get_mut().follow(&self.tensors.slots(), &dirty)?;
        self.tensors.slots_mut().into_iter().for_each(AnySlot::release);
        Ok(())
    }

    fn host_bytes(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.borrow().bytes())
    }

    /// Returns the tensors on the device: shared if they are there already, copied from the host otherwise.
    fn copied(&self) -> Result<P::Tensors> {
        let mut copy = self.tensors.clone();
        if let Some(host) = &self.host {
            host.borrow_mut().fill(copy.slots_mut(), &self.device)?;
        }
        Ok(copy)
    }
}

/// Copies lazily: tensors are shared until either copy writes. The copy of an offloaded memory is offloaded.
impl<P: Policy> Clone for Memory<P> {
    fn clone(&self) -> Self {
        let mut tensors = self.tensors.clone();
        let host = self.host.as_ref().map(|host| {
            tensors.slots_mut().into_iter().for_each(AnySlot::release);
            RefCell::new(host.borrow_mut().share())
        });
        Self { policy: self.policy.clone(), at: self.at.clone(), tensors, device: self.device.clone(), host }
    }
}

impl<P: Policy> CacheLayer for Memory<P> {
    fn name(&self) -> &'static str {
        P::NAME
    }

    fn seq_len(&self) -> usize {
        self.at.seq_len
    }

    fn rows(&self) -> Option<usize> {
        // Buffers that were kept at a reset belong to rows that are gone.
        if self.at.seq_len > 0 { self.tensors.batch_rows() } else { None }
    }

    fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.policy.admits(&self.at, tokens, padded)
    }

    fn footprint(&self, step: &StepShape) -> Footprint {
        let Footprint { held, largest, passing } = self.policy.footprint(&self.at, &self.tensors, step);
        // The estimate of a policy may be the size of its tensors on the device, which is 0 while they are in
        // host memory. They will need as much as the host's copy.
        Footprint { held: held.max(self.host_bytes()), largest, passing }
    }

    fn rewind_point(&self, at_most: usize) -> usize {
        // Every layer can return to 0, by a reset.
        self.policy.rewind_point(&self.at, at_most.min(self.at.seq_len)).unwrap_or(0)
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if len >= self.at.seq_len {
            return Ok(());
        }
        match self.policy.rewind_point(&self.at, len) {
            Some(point) if point == len => {
                self.on_device(|policy, at, tensors| policy.rewind(at, tensors, len))?;
                self.at.seq_len = len;
                // Tensors being uploaded are held until they have arrived, and the next layer follows at
                // once.
                self.host.as_ref().map_or(Ok(()), |_| DeviceState::of(&self.device).sync())
            }
            _ if len == 0 => {
                let horizon = self.at.horizon;
                self.reset();
                self.at.horizon = horizon;
                Ok(())
            }
            _ => Err(Error::CannotTruncate { layer: self.name(), len }),
        }
    }

    fn keep_history(&mut self, tokens: usize) {
        self.at.history = self.at.history.max(tokens);
    }

    fn can_rewind(&self) -> bool {
        self.policy.can_rewind()
    }

    fn reserve(&mut self, tokens: usize) {
        self.at.horizon = tokens;
    }

    fn reset(&mut self) {
        self.at = Progress { history: self.at.history, ..Progress::default() };
        self.policy.reset(&mut self.tensors);
        if let Some(host) = &mut self.host
            && host.get_mut().forget(&self.tensors.slots()).is_err()
        {
            // The host's copy is lost, and the tensors that it was made from are gone.
            self.tensors.slots_mut().into_iter().for_each(AnySlot::clear);
        }
    }

    fn discard(&mut self) {
        self.reset();
        self.tensors.slots_mut().into_iter().for_each(AnySlot::clear);
    }

    fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        let Some(have) = self.rows() else { return Ok(()) };
        if let Some(&row) = rows.iter().find(|&&row| row >= have) {
            return Err(Error::NoSuchRow { row, rows: have });
        }
        // Tensors in host memory are reordered there, without a copy to the device. The exceptions are groups
        // that span several rows, and rows that share a tensor.
        self.park()?;
        match &mut self.host {
            Some(host)
                if self.tensors.has_all_rows()
                    && self.tensors.slots().into_iter().all(AnySlot::is_by_rows) =>
            {
                host.get_mut().select_rows(rows)?;
                self.tensors.slots_mut().into_iter().for_each(|slot| slot.select_rows(rows));
                Ok(())
            }
            _ => self.on_device(|_, at, tensors| {
                tensors.reorder(rows, at.seq_len);
                Ok(())
            }),
        }
    }

    fn shares_row(&self) -> bool {
        self.host.is_none() && self.policy.shares_row(&self.at, &self.tensors)
    }

    /// An offloaded layer reorders by copy at best: its tensors are copied to the device and back. A layer
    /// without tensors cannot reorder, because only its caller has the tokens.
    fn reorders(&self) -> Reorders {
        let slots = self.tensors.slots();
        match slots.is_empty() || slots.into_iter().any(|slot| !slot.is_by_rows()) {
            true => Reorders::No,
            false if self.host.is_some() => self.policy.reorders(&self.tensors).min(Reorders::ByCopy),
            false => self.policy.reorders(&self.tensors),
        }
    }

    fn reorder_on_device(&mut self, parents: &Parents) -> Result<()> {
        self.on_device(|policy, _, tensors| policy.reorder_on_device(tensors, parents))
    }

    fn start_saving(&self) -> Result<LayerState<ReadBack>> {
        let (mut at, mut tensors) = (self.at.clone(), self.copied()?);
        self.policy.trim(&mut at, &mut tensors)?;
        let counts = serde_json::to_value(at.counts).map_err(|e| wrong(&e.to_string()))?;
        let slots = tensors.slots().into_iter().map(|slot| slot.start_reading(None));
        let slots = slots.collect::<Result<_>>()?;
        Ok(LayerState { seq_len: at.seq_len, history: at.history, counts, slots })
    }

    fn restore(&mut self, state: LayerState) -> Result<()> {
        let LayerState { seq_len, history, counts, slots } = state;
        let other = |_| wrong("it is the state of another kind of cache");
        check_counts(&counts)?;
        check(seq_len as u64 <= MOST_TOKENS)?;
        let counts: P::Counts = serde_json::from_value(counts).map_err(other)?;
        let mut tensors = self.policy.empty(&counts);
        let places = tensors.slots_mut();
        if places.len() != slots.len() {
            return Err(wrong("it is the state of another kind of cache"));
        }
        for (place, host) in places.into_iter().zip(slots) {
            place.restore(host, &self.device)?;
        }
        let mut rows = tensors.slots().into_iter().filter_map(AnySlot::rows);
        let first = rows.next();
        if rows.any(|rows| Some(rows) != first) {
            return Err(wrong("its tensors are of different batches"));
        }
        // A forged file may contain any history, and buffers are allocated for it: no history exceeds the
        // longest tensor of the file.
        let tokens =
            |slot: &dyn AnySlot| slot.outlines().first().and_then(|(shape, _)| shape.get(2).copied());
        let longest = tensors.slots().into_iter().filter_map(tokens).max().unwrap_or(0);
        let history = self.at.history.max(history.min(longest));
        let at = Progress { seq_len, history, counts, ..self.at.clone() };
        self.policy.validate(&at, &tensors)?;
        (self.at, self.tensors) = (at, tensors);
        if let Some(host) = &mut self.host {
            host.get_mut().empty();
        }
        self.park()
    }

    fn offload(&mut self) -> Result<()> {
        if cfg!(target_family = "wasm") {
            return Err(host::unavailable());
        }
        self.host.get_or_insert_default();
        self.park()
    }

    fn is_offloaded(&self) -> bool {
        self.host.is_some()
    }

    fn prefetch(&mut self) -> Result<()> {
        self.fetch()
    }

    fn usage(&self) -> Usage {
        let device = self.tensors.slots().into_iter().map(AnySlot::device_bytes).sum();
        let host = self.host.as_ref().map(RefCell::borrow);
        Usage {
            device,
            shared: if host.is_some() { 0 } else { self.tensors.shared_bytes() },
            host: self.host_bytes(),
            moved: host.as_ref().map_or(Moved::default(), |host| host.moved()),
        }
    }

    fn claim_shared(&self, all: &Claim) {
        if self.host.is_none() {
            self.tensors.claim_shared(all);
        }
    }

    fn claimed_apart(&mut self, all: &Claim) -> usize {
        self.tensors.claimed_apart(all)
    }
}

impl<P: KvPolicy> KvLayer for Memory<P> {
    fn streams(&self) -> Option<[Stream; 2]> {
        self.policy.streams()
    }

    fn span(&self, n: usize) -> KvSpan {
        self.policy.span(&self.at, n)
    }

    fn limits(&self) -> Limits {
        let limits = self.policy.limits(&self.at);
        Limits { fixed_buffers: limits.fixed_buffers && self.host.is_none(), ..limits }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, positions: &Positions) -> Result<KvView> {
        let [given, _, tokens, _] = keys.dims();
        if let Some(rows) = self.rows().filter(|&rows| rows != given) {
            return Err(Error::WrongRows { rows, given });
        }
        self.admits(tokens, positions.is_padded())?;
        self.on_device(|policy, at, tensors| {
            let view = policy.append(at, tensors, (keys, values), positions)?;
            policy.advance(at, tensors, tokens);
            Ok(view)
        })
    }

    fn slots_for(&self, tokens: usize) -> Option<usize> {
        if self.host.is_some() { None } else { self.policy.slots_for(&self.at, &self.tensors, tokens) }
    }

    fn lend(&mut self) -> Result<Option<Kv>> {
        let Some(slot) = self.policy.buffer(&mut self.tensors) else { return Ok(None) };
        let kv = slot.get()?.cloned();
        AnySlot::release(slot);
        Ok(kv)
    }

    fn lend_to_write(&mut self, keys: &Tensor<4>, positions: &Positions) -> Result<Option<DenseKv>> {
        let [given, _, tokens, _] = keys.dims();
        if self.host.is_some() || self.rows() != Some(given) {
            return Ok(None);
        }
        self.admits(tokens, positions.is_padded())?;
        let Some(start) = self.policy.start_in_place(&self.at, &self.tensors, tokens) else {
            return Ok(None);
        };
        let kv = self.policy.buffer(&mut self.tensors).map(Slot::take).transpose()?.flatten();
        Ok(kv.map(|(keys, values)| DenseKv { keys, values, start, origin: 0, shared: None }))
    }

    fn take_back(&mut self, kv: Kv) {
        if let Some(slot) = self.policy.buffer(&mut self.tensors) {
            slot.set(kv);
        }
    }

    fn stored(&mut self, tokens: usize) {
        self.policy.advance(&mut self.at, &self.tensors, tokens);
    }

    fn gather(&self) -> Result<Option<Kv>> {
        self.policy.gather(&self.at, &self.copied()?)
    }

    /// Always 0 for an offloaded memory: a captured step uses the same buffers whenever it is replayed, but
    /// these are allocated anew for each step.
    fn replayable(&self) -> usize {
        if self.host.is_some() { 0 } else { self.policy.replayable(&self.at, &self.tensors) }
    }

    fn replayed(&mut self) {
        self.policy.advance(&mut self.at, &self.tensors, 1);
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

/// The error of a saved state that this memory cannot take.
fn wrong(why: &str) -> Error {
    Error::Import { why: why.to_owned() }
}

/// Checks that all numbers in the counters of a file are at most [`MOST_TOKENS`], so that sums of them do not
/// overflow.
///
/// # Errors
/// [`Error::Import`] if one is larger, negative or not an integer.
fn check_counts(counts: &serde_json::Value) -> Result<()> {
    match counts {
        serde_json::Value::Number(number) if number.as_u64().is_none_or(|number| number > MOST_TOKENS) => {
            Err(wrong("a count is out of range"))
        }
        serde_json::Value::Array(all) => all.iter().try_for_each(check_counts),
        serde_json::Value::Object(all) => all.values().try_for_each(check_counts),
        _ => Ok(()),
    }
}
