//! Memory of a single block.

use std::fmt;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{
    Error, Result,
    budget::Claim,
    slot::{AnySlot, Touched, checked_rows},
    view::KvView,
};

/// What every memory can do, whatever it holds.
///
/// **Invariant:** an operation that returns `Err` has changed nothing.
pub trait CacheLayer: fmt::Debug + Send {
    /// Name of the strategy, for messages and profiles.
    fn name(&self) -> &'static str;

    /// Tokens seen so far, including those no longer stored.
    fn seq_len(&self) -> usize;

    /// Whether the latest `n` tokens can be forgotten exactly.
    fn can_roll_back(&self, n: usize) -> bool;

    /// Forgets the latest `n` tokens, as if they had never been seen.
    fn roll_back(&mut self, n: usize) -> Result<()>;

    /// Promise: from the next update on, up to `n` tokens can be forgotten. An earlier, larger promise stays.
    fn keep_history(&mut self, n: usize);

    /// Back to the state of a new layer.
    fn reset(&mut self);

    /// Everything this layer stores, always in the same order.
    fn slots(&self) -> Vec<&dyn AnySlot>;
    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot>;

    /// Rebuilds the batch: new row `i` is old row `rows[i]`.
    ///
    /// Beam search permutes and repeats rows, pruning passes fewer, fan-out passes more.
    fn select_rows(&mut self, rows: &[usize]) -> Result<()> {
        self.check_rows(rows)?;
        self.slots_mut().into_iter().for_each(|slot| slot.select_rows(rows));
        Ok(())
    }

    /// Whether the batch can be rebuilt so.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`]; [`Error::Exported`].
    fn check_rows(&self, rows: &[usize]) -> Result<()> {
        checked_rows(&self.slots(), rows)
    }

    /// What changed in each slot since this was asked before, so that a copy elsewhere can follow at little cost. Where
    /// the shape of a tensor changed, all of it did, whatever is said here.
    fn touched(&mut self) -> Vec<Touched> {
        vec![Touched::Everything; self.slots().len()]
    }

    /// Moves all tensors to host memory; only [`import`] may change the layer next.
    ///
    /// **Invariant:** every `&self` question but `device_bytes` is answered as before. So layers keep counts, and
    /// never ask a tensor for its shape to answer one.
    ///
    /// [`import`]: CacheLayer::import
    fn export(&mut self) -> Result<Vec<TensorData>> {
        let host = self.read()?;
        self.release();
        Ok(host)
    }

    /// The first half of [`export`](CacheLayer::export): copies all tensors to the host; they stay.
    fn read(&mut self) -> Result<Vec<TensorData>> {
        self.compact();
        let mut host = Vec::new();
        self.slots().into_iter().try_for_each(|slot| slot.read(&mut host))?;
        Ok(host)
    }

    /// The second half: gives up the device's copy of what was read.
    fn release(&mut self) {
        self.slots_mut().into_iter().for_each(|slot| slot.release());
    }

    /// Puts back what [`export`](CacheLayer::export) returned.
    ///
    /// # Errors
    /// What [`check`](CacheLayer::check) says.
    fn import(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()> {
        self.check(&host)?;
        let mut host = host.into_iter();
        self.slots_mut().into_iter().for_each(|slot| slot.import(&mut host, device));
        Ok(())
    }

    /// Whether `host` is what was exported.
    ///
    /// # Errors
    /// [`Error::Import`] where the data are not as many, or not of the shape and type, that were.
    fn check(&self, mut host: &[TensorData]) -> Result<()> {
        self.slots().into_iter().try_for_each(|slot| slot.check(&mut host))?;
        match host.len() {
            0 => Ok(()),
            left => Err(Error::Import { why: format!("{left} tensors are left over") }),
        }
    }

    /// Copies all that a new layer needs to go on in this one's place.
    fn save(&mut self) -> Result<LayerState> {
        self.compact();
        let slots = self.slots().into_iter().map(|slot| {
            let mut host = Vec::new();
            slot.read(&mut host).map(|()| host)
        });
        Ok(LayerState { slots: slots.collect::<Result<_>>()?, counts: self.counts() })
    }

    /// The numbers that a layer keeps beside its tensors.
    fn counts(&self) -> Vec<usize>;

    /// Becomes the layer that `state` was copied from. To be called on a new layer.
    ///
    /// # Errors
    /// [`Error::Import`] where it is the state of another kind of layer, or of none.
    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()>;

    /// Gives up room that was allocated ahead of need.
    fn compact(&mut self) {}

    /// Whether `n` more tokens of each row will be taken at once. `padded`: whether rows begin with padding.
    ///
    /// # Errors
    /// What an update of such tokens would refuse them with.
    fn admits(&self, _n: usize, _padded: bool) -> Result<()> {
        Ok(())
    }

    /// What it is going to hold on the device while `feed` is stored.
    fn footprint(&self, _feed: &Feed) -> Footprint {
        let held = self.device_bytes();
        Footprint { held, largest: held, passing: 0 }
    }

    /// Hint: the sequence is going to reach `tokens` tokens.
    fn reserve(&mut self, _tokens: usize) {}

    /// Bytes held on the device, room allocated ahead of need included.
    fn device_bytes(&self) -> usize {
        self.slots().into_iter().map(AnySlot::device_bytes).sum()
    }

    /// Of [`device_bytes`](CacheLayer::device_bytes), those that snapshots hold too.
    fn shared_bytes(&self) -> usize {
        0
    }

    /// A snapshot is about to be taken: what it may share for long gets a claim of its own, split off from `all`, which
    /// lives for as long as anyone holds it.
    fn claim_shared(&self, _all: &Claim) {}

    /// Bytes it holds that are claimed apart; the claim to what nobody shares any more becomes a part of `all`.
    fn claimed_apart(&mut self, _all: &Claim) -> usize {
        0
    }

    /// Bytes held in host memory, in place of the device's.
    fn host_bytes(&self) -> usize {
        0
    }

    /// Whether it is on the device only while it is used.
    fn is_offloaded(&self) -> bool {
        false
    }

    /// Bytes that went between the host and the device so far.
    fn moved(&self) -> Moved {
        Moved::default()
    }

    /// Hint: this layer is used next.
    fn prefetch(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Tokens that are about to be fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feed {
    pub rows: usize,
    /// Of each row.
    pub tokens: usize,
    /// Bytes of a number of the keys.
    pub element: usize,
    /// Whether they are known to be the last of the sequence, whatever was reserved.
    pub last: bool,
}

/// Bytes of a layer on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Held until the layer changes again, room allocated ahead of need included; of an offloaded layer only while it is in
    /// use, or the one before it is.
    pub held: usize,
    /// Of these, what is in the largest buffer of keys and the one of values.
    pub largest: usize,
    /// Held besides, while the layer is in use.
    pub passing: usize,
}

/// Bytes that were copied between the host and a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// To the device.
    pub up: u64,
    /// To the host.
    pub down: u64,
}

impl std::iter::Sum for Moved {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, moved| Self { up: sum.up + moved.up, down: sum.down + moved.down })
    }
}

/// A layer on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    pub counts: Vec<usize>,
    /// What each slot holds.
    pub slots: Vec<Vec<TensorData>>,
}

/// Keys and values of one attention block. Tensors are `[batch, kv_heads, tokens, head_dim]`.
pub trait KvLayer: CacheLayer {
    /// Where the keys returned by an update of `n` tokens will sit in the sequence ("mask sizes").
    fn span(&self, n: usize) -> KvSpan;

    /// Stores `n` new tokens, which stand at `place`, and returns everything attention may look at.
    ///
    /// **Invariant:** the view is exactly `self.span(n)`, asked before the call.
    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView>;

    /// What it holds now, one position after the other: exactly `self.span(0)`, `[batch, kv_heads, len, head_dim]`; `None`
    /// where it holds nothing.
    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>>;

    /// The most tokens that an update takes; `None`: any number.
    fn at_once(&self) -> Option<usize> {
        None
    }

    /// Whether its buffers never grow, so that a step is the same launches for ever.
    fn is_static(&self) -> bool {
        false
    }

    /// Whether positions stay below a bound, however many tokens are seen.
    fn is_endless(&self) -> bool {
        false
    }

    /// The most tokens it can hold in all; `None`: any number.
    fn capacity(&self) -> Option<usize> {
        None
    }

    /// How many of the next updates, of one token each, will be the very launches of the next one: the same buffers and
    /// shapes, and nothing different but the position on the device. A captured step can stand for as many.
    fn repeats(&self) -> usize {
        0
    }

    /// Counts a token that a captured step stored.
    fn repeated(&mut self) {}

    /// The same memory once more. Tensors are shared until one of the two writes.
    fn snapshot(&self) -> Box<dyn KvLayer>;
}

/// Where the new tokens of one pass stand, for every layer that counts positions alike.
#[derive(Clone, Debug)]
pub struct Place {
    /// Position of the first.
    pub first: usize,
    /// The same, `[1]`, for kernels: they read it on the device, so that a captured step can be repeated for the next
    /// token.
    pub on_device: Tensor<1, Int>,
    /// `[batch]`: positions below it are padding in that row; `None` where nothing is padded.
    pub left_pad: Option<Tensor<1, Int>>,
}

impl Place {
    /// The place of the token that stands `n` behind the first.
    pub fn behind(&self, n: usize) -> Self {
        match n {
            0 => self.clone(),
            n => Self {
                first: self.first + n,
                on_device: self.on_device.clone() + n as i64,
                left_pad: self.left_pad.clone(),
            },
        }
    }

    /// A place whose numbers are uploaded now.
    pub fn new(first: usize, left_pad: &[usize], device: &Device) -> Self {
        let upload = |numbers: Vec<i32>| {
            let len = numbers.len();
            Tensor::<1, Int>::from_data(TensorData::new(numbers, [len]), device)
        };
        let padded = left_pad.iter().any(|&pad| pad > 0);
        Self {
            first,
            on_device: upload(vec![first as i32]),
            left_pad: padded.then(|| upload(left_pad.iter().map(|&pad| pad as i32).collect())),
        }
    }
}

/// Keys and values an encoder wrote once; `None` until then.
pub trait CrossLayer: CacheLayer {
    fn snapshot(&self) -> Box<dyn CrossLayer>;
    fn view(&mut self) -> Result<Option<KvView>>;
    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()>;
}

/// Constant-size state of a recurrent block; `None` before the first token.
pub trait StateLayer: CacheLayer {
    fn snapshot(&self) -> Box<dyn StateLayer>;

    fn state(&mut self) -> Result<Option<SsmState>>;

    /// Replaces the state with the one reached after `tokens` more tokens.
    fn store(&mut self, state: SsmState, tokens: usize) -> Result<()>;
}

/// Positions of the keys in a view. The cache knows where keys are; the model knows which to mask.
///
/// Models take rotary positions from here, never from `seq_len`: a layer that closes the gaps it leaves counts
/// positions of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSpan {
    pub start: usize,
    pub len: usize,
}

impl KvSpan {
    /// Position of the first of `n` new tokens.
    pub fn query(&self, n: usize) -> usize {
        (self.start + self.len).saturating_sub(n)
    }
}

/// State of one Mamba block: convolution inputs `[batch, channels, conv_width]` and recurrence
/// `[batch, channels, state_dim]`.
pub type SsmState = (Tensor<3>, Tensor<3>);
