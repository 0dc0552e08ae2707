//! Keeps the tensors of a layer in host memory while another layer is at work (transformers' `OffloadedCache` and
//! `OffloadedStaticCache`).
//!
//! The host's copy is the one that counts. A layer is brought to the device before it is used, and given up there as
//! soon as its keys were handed out; only what the use changed is copied back. So a step moves a layer up once, and its
//! new tokens down; and no more than two layers are on the device: the one in use, and the next one, on its way.
//!
//! **Invariant:** this knows the traits of a layer, and no strategy.

mod host;

use std::{cell::RefCell, fmt, str::FromStr};

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    budget::Claim,
    faults,
    layer::{
        CacheLayer, CrossLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Moved, Place, SsmState,
        StateLayer,
    },
    model_cache::{LayerCache, ModelCache},
    slot::{AnySlot, Touched},
    view::KvView,
};

use self::host::Host;

/// Which layers are kept in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    All,
    /// All but the last so many.
    AllBut(usize),
    /// None at first; as many as are asked for when memory runs out.
    AsNeeded,
}

impl FromStr for Offload {
    type Err = Error;

    /// `all`; `layers=N`: the last N stay on the device; `auto`.
    fn from_str(text: &str) -> Result<Self> {
        match (text, text.strip_prefix("layers=").map(str::parse)) {
            ("all", _) => Ok(Self::All),
            ("auto", _) => Ok(Self::AsNeeded),
            (_, Some(Ok(kept))) => Ok(Self::AllBut(kept)),
            _ => Err(Error::Unknown {
                what: "way to offload",
                name: text.to_owned(),
                known: ["all", "auto", "layers=N"].map(str::to_owned).into(),
            }),
        }
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::AsNeeded => f.write_str("auto"),
            Self::AllBut(kept) => write!(f, "layers={kept}"),
        }
    }
}

impl Offload {
    /// Layers of `layers` that are kept in host memory: the first ones.
    pub(crate) fn count(self, layers: usize) -> usize {
        match self {
            Self::All => layers,
            Self::AllBut(kept) => layers.saturating_sub(kept),
            Self::AsNeeded => 0,
        }
    }
}

/// Moves every layer of `cache` to host memory that `offload` names and that is not there yet.
///
/// # Errors
/// What the device says of reading a layer; that layer is lost then, and the cache can only be reset.
pub fn offload(cache: &mut ModelCache, offload: Offload, device: &Device) -> Result<()> {
    let layers = cache.layers_mut();
    let count = offload.count(layers.len());
    layers.iter_mut().take(count).try_for_each(|layer| park(layer, Some(device)))
}

/// The first layer of `cache` that is on the device is moved to host memory; whether there was one.
///
/// # Errors
/// Those of [`offload`].
pub fn offload_one(cache: &mut ModelCache, device: &Device) -> Result<bool> {
    let here = |layer: &&mut LayerCache| !matches!(layer, LayerCache::Nothing) && !layer.is_offloaded();
    match cache.layers_mut().iter_mut().find(here) {
        Some(layer) => park(layer, Some(device)).map(|()| true),
        None => Ok(false),
    }
}

/// Wraps a layer, unless it is.
pub(crate) fn park(layer: &mut LayerCache, device: Option<&Device>) -> Result<()> {
    if layer.is_offloaded() {
        return Ok(());
    }
    *layer = match std::mem::replace(layer, LayerCache::Nothing) {
        LayerCache::Attention(kv) => LayerCache::Attention(Box::new(Offloaded::parked(kv, device)?)),
        LayerCache::EncoderDecoder { decoder, encoder } => LayerCache::EncoderDecoder {
            decoder: Box::new(Offloaded::parked(decoder, device)?),
            encoder: Box::new(Offloaded::parked(encoder, device)?),
        },
        LayerCache::Recurrent(state) => LayerCache::Recurrent(Box::new(Offloaded::parked(state, device)?)),
        LayerCache::Nothing => LayerCache::Nothing,
    };
    Ok(())
}

/// `layer`, in host memory.
///
/// # Errors
/// What the device says of reading what the layer holds.
pub fn offloaded(layer: Box<dyn KvLayer>) -> Result<Box<dyn KvLayer>> {
    Ok(Box::new(Offloaded::parked(layer, None)?))
}

/// A layer that is on the device only while it is used.
#[derive(Debug)]
struct Offloaded<L: ?Sized> {
    inner: Box<L>,
    /// Of every slot. Behind a cell, because what is on its way to it is also awaited where the layer is only asked.
    host: RefCell<Host>,
    /// Where it is brought; known from the first use on.
    device: Option<Device>,
    /// Rows of the batch, as far as there are any.
    rows: Option<usize>,
    /// Whether the tensors were given to the caller.
    exported: bool,
}

impl<L: CacheLayer + ?Sized> Offloaded<L> {
    fn parked(inner: Box<L>, device: Option<&Device>) -> Result<Self> {
        let mut layer =
            Self { inner, host: RefCell::default(), device: device.cloned(), rows: None, exported: false };
        layer.park()?;
        Ok(layer)
    }

    /// The same memory once more, made of a snapshot of the inner layer. What the host holds is shared until it changes.
    fn shared(&self, mut inner: Box<L>) -> Self {
        inner.release();
        let host = RefCell::new(self.host.borrow_mut().share());
        Self { inner, host, device: self.device.clone(), rows: self.rows, exported: self.exported }
    }

    fn is_parked(&self) -> bool {
        self.inner.slots().into_iter().any(AnySlot::is_away)
    }

    /// Brings the tensors to the device.
    fn fetch(&mut self) -> Result<()> {
        match (self.exported, &self.device) {
            (true, _) => Err(Error::Exported),
            (false, Some(device)) => self.host.get_mut().fill(self.inner.slots_mut(), device),
            (false, None) => Ok(()),
        }
    }

    /// Copies what changed to the host, and gives up the device's copy.
    fn park(&mut self) -> Result<()> {
        if self.exported || self.is_parked() {
            return Ok(());
        }
        let touched = self.inner.touched();
        self.rows = self.inner.slots().into_iter().filter_map(|slot| slot.rows().ok().flatten()).min();
        self.host.get_mut().follow(&self.inner.slots(), &touched)?;
        self.inner.release();
        Ok(())
    }

    /// Does with the tensors on the device what has to be done there.
    fn brought_in<T>(&mut self, work: impl FnOnce(&mut L) -> Result<T>) -> Result<T> {
        self.fetch()?;
        let done = work(&mut self.inner);
        self.park()?;
        done
    }
}

impl<L: CacheLayer + ?Sized> CacheLayer for Offloaded<L> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn seq_len(&self) -> usize {
        self.inner.seq_len()
    }

    fn can_roll_back(&self, n: usize) -> bool {
        self.inner.can_roll_back(n)
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        // Some only count back, others cut or move what they hold; who knows.
        self.brought_in(|inner| inner.roll_back(n))?;
        // What is on its way up is held until it is there, and the next layer comes right behind.
        self.device.as_ref().map_or(Ok(()), faults::sync)
    }

    fn keep_history(&mut self, n: usize) {
        self.inner.keep_history(n);
    }

    fn reset(&mut self) {
        self.inner.reset();
        let lost = self.host.get_mut().forget(&self.inner.slots()).is_err();
        if self.exported || lost {
            // What is gone does not come back; neither does the room for it.
            self.inner.slots_mut().into_iter().for_each(|slot| slot.clear());
            self.exported = false;
        }
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        self.inner.slots()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.inner.slots_mut()
    }

    fn check_rows(&self, rows: &[usize]) -> Result<()> {
        match (self.exported, self.is_parked(), self.rows) {
            (true, ..) => Err(Error::Exported),
            (false, true, Some(have)) => match rows.iter().find(|&&row| row >= have) {
                Some(&row) => Err(Error::NoSuchRow { row, rows: have }),
                None => Ok(()),
            },
            (false, true, None) => Ok(()),
            (false, false, _) => self.inner.check_rows(rows),
        }
    }

    /// On the host, where every tensor has a dimension of rows: nothing has to be brought in for it.
    fn select_rows(&mut self, rows: &[usize]) -> Result<()> {
        self.check_rows(rows)?;
        self.park()?;
        if !self.inner.slots().into_iter().all(AnySlot::is_by_rows) {
            return self.brought_in(|inner| inner.select_rows(rows));
        }
        self.rows = self.rows.map(|_| rows.len());
        self.host.get_mut().select_rows(rows)
    }

    fn touched(&mut self) -> Vec<Touched> {
        self.inner.touched()
    }

    fn read(&mut self) -> Result<Vec<TensorData>> {
        self.brought_in(|inner| inner.read())
    }

    fn release(&mut self) {
        self.inner.release();
        self.host.get_mut().empty();
        self.exported = true;
    }

    fn import(&mut self, data: Vec<TensorData>, device: &Device) -> Result<()> {
        self.check(&data)?;
        if self.exported {
            self.host.get_mut().take_over(&self.inner.slots(), data);
            (self.exported, self.device) = (false, Some(device.clone()));
        }
        Ok(())
    }

    fn save(&mut self) -> Result<LayerState> {
        self.brought_in(|inner| inner.save())
    }

    fn counts(&self) -> Vec<usize> {
        self.inner.counts()
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        self.inner.restore(state, device)?;
        self.host.get_mut().empty();
        (self.exported, self.device) = (false, Some(device.clone()));
        self.park()
    }

    fn admits(&self, n: usize, padded: bool) -> Result<()> {
        self.inner.admits(n, padded)
    }

    fn reserve(&mut self, tokens: usize) {
        self.inner.reserve(tokens);
    }

    fn footprint(&self, feed: &Feed) -> Footprint {
        let Footprint { held, largest, passing } = self.inner.footprint(feed);
        // What the host holds is an estimate where the layer has none of its own.
        Footprint { held: held.max(self.host_bytes()), largest, passing }
    }

    fn device_bytes(&self) -> usize {
        self.inner.device_bytes()
    }

    fn claimed_apart(&mut self, all: &Claim) -> usize {
        self.inner.claimed_apart(all)
    }

    fn host_bytes(&self) -> usize {
        self.host.borrow().bytes()
    }

    fn moved(&self) -> Moved {
        self.host.borrow().moved()
    }

    fn is_offloaded(&self) -> bool {
        true
    }

    fn prefetch(&mut self) -> Result<()> {
        if self.exported { Ok(()) } else { self.fetch() }
    }
}

impl KvLayer for Offloaded<dyn KvLayer> {
    fn span(&self, n: usize) -> KvSpan {
        self.inner.span(n)
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        self.device = Some(keys.device());
        self.brought_in(|inner| inner.update(keys, values, place))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        match &self.device {
            Some(device) if self.is_parked() && !self.exported => {
                let mut copy = self.inner.snapshot();
                self.host.borrow_mut().fill(copy.slots_mut(), device)?;
                copy.dense()
            }
            _ => self.inner.dense(),
        }
    }

    fn at_once(&self) -> Option<usize> {
        self.inner.at_once()
    }

    fn is_endless(&self) -> bool {
        self.inner.is_endless()
    }

    fn capacity(&self) -> Option<usize> {
        self.inner.capacity()
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.shared(self.inner.snapshot()))
    }
}

impl CrossLayer for Offloaded<dyn CrossLayer> {
    fn snapshot(&self) -> Box<dyn CrossLayer> {
        Box::new(self.shared(self.inner.snapshot()))
    }

    fn view(&mut self) -> Result<Option<KvView>> {
        self.brought_in(|inner| inner.view())
    }

    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()> {
        let device = keys.device();
        if self.is_parked() {
            return Err(if self.exported { Error::Exported } else { Error::AlreadyConditioned });
        }
        self.device = Some(device);
        self.brought_in(|inner| inner.fill(keys, values))
    }
}

impl StateLayer for Offloaded<dyn StateLayer> {
    fn snapshot(&self) -> Box<dyn StateLayer> {
        Box::new(self.shared(self.inner.snapshot()))
    }

    /// The layer stays on the device until the new state is stored.
    fn state(&mut self) -> Result<Option<SsmState>> {
        self.fetch()?;
        self.inner.state()
    }

    fn store(&mut self, state: SsmState, tokens: usize) -> Result<()> {
        self.device = Some(state.0.device());
        self.brought_in(|inner| inner.store(state, tokens))
    }
}
