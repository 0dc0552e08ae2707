//! Memory of a single block.

use std::{fmt, ops::Range, sync::Arc};

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{
    Result,
    budget::Claim,
    need::Stream,
    read_back::{self, ReadBack},
    view::{DenseKv, KvView},
};

/// Memory of one block, of any kind.
///
/// **Invariant:** an operation that returns `Err` has changed nothing.
///
/// **Invariant:** a method that takes `&self` and only answers a question reads no tensor, so that a layer in
/// host memory can answer it. [`save`](Self::save) and [`gather`](KvLayer::gather) copy the tensors that they
/// are asked for.
pub trait CacheLayer: fmt::Debug + Send {
    /// Name of the strategy, for messages and profiles.
    fn name(&self) -> &'static str;

    /// Number of tokens seen so far, including those no longer stored. Always 0 for a stateless layer.
    fn seq_len(&self) -> usize;

    /// Number of rows of the batch; `None` while nothing is stored.
    fn rows(&self) -> Option<usize>;

    /// Checks that `tokens` more tokens of each row can be stored at once. `padded`: whether rows begin with
    /// padding.
    ///
    /// # Errors
    /// [`Error::Full`](crate::Error::Full), [`Error::TooManyAtOnce`](crate::Error::TooManyAtOnce),
    /// [`Error::Prompt`](crate::Error::Prompt).
    fn admits(&self, tokens: usize, padded: bool) -> Result<()>;

    /// Number of bytes on the device while `step` is stored.
    fn footprint(&self, step: &StepShape) -> Footprint;

    /// Returns the largest length of at most `at_most` that the layer can return to exactly. 0 is always
    /// possible.
    fn rewind_point(&self, at_most: usize) -> usize;

    /// Forgets all tokens after the first `len`, as if they had never been seen. Does nothing if there are no
    /// more.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`](crate::Error::CannotTruncate) if `len` is not a
    /// [`rewind_point`](Self::rewind_point).
    fn truncate(&mut self, len: usize) -> Result<()>;

    /// Promises that up to `tokens` tokens can be truncated at any time from the next update on. A larger
    /// earlier promise stays.
    fn keep_history(&mut self, tokens: usize);

    /// Whether the layer can go back after it was fed, as far as [`keep_history`](Self::keep_history)
    /// promised: to every length, or to the one before an update. [`rewind_point`](Self::rewind_point) says
    /// which lengths are possible.
    fn can_rewind(&self) -> bool;

    /// Hint: the sequence is going to reach `tokens` tokens.
    fn reserve(&mut self, tokens: usize);

    /// Forgets everything. Promises stay.
    fn reset(&mut self);

    /// Forgets everything, and drops the buffers that [`reset`](Self::reset) keeps: their contents cannot be
    /// read any more.
    fn discard(&mut self);

    /// Rebuilds the batch: new row `i` is old row `rows[i]`. Rows may be repeated and left out.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`](crate::Error::NoSuchRow).
    fn reorder(&mut self, rows: &[usize]) -> Result<()>;

    /// Whether a layer with a single row stores it once for all copies when [`reorder`](Self::reorder)
    /// repeats it.
    fn shares_row(&self) -> bool;

    /// How [`reorder_on_device`](Self::reorder_on_device) is done.
    fn reorders(&self) -> Reorders;

    /// Rebuilds the batch by row numbers that only the device knows: see [`Parents`].
    ///
    /// # Errors
    /// [`Error::Execution`](crate::Error::Execution) if the layer [cannot](Reorders::No) do it.
    fn reorder_on_device(&mut self, parents: &Parents) -> Result<()>;

    /// Starts to copy everything that a new layer needs to continue in place of this one.
    fn start_saving(&self) -> Result<LayerState<ReadBack>>;

    /// [`start_saving`](Self::start_saving), and waits for the copy.
    fn save(&self) -> Result<LayerState> {
        read_back::wait(self.start_saving()?.finish())
    }

    /// Replaces the contents with those of the layer that `state` was copied from.
    ///
    /// # Errors
    /// [`Error::Import`](crate::Error::Import) if the state belongs to another kind of layer or contradicts
    /// itself; [`Error::Full`](crate::Error::Full).
    fn restore(&mut self, state: LayerState) -> Result<()>;

    /// Moves all tensors to host memory. From then on they are on the device only while the layer is used.
    fn offload(&mut self) -> Result<()>;

    /// Whether the tensors are on the device only while the layer is used.
    fn is_offloaded(&self) -> bool;

    /// Hint: this layer is used next.
    fn prefetch(&mut self) -> Result<()>;

    /// Number of bytes held, and of bytes moved so far.
    fn usage(&self) -> Usage;

    /// Splits a claim off from `all` for the tensors that a snapshot may share. Called before a snapshot. The
    /// new claim lives as long as anyone holds the shared tensors.
    fn claim_shared(&self, all: &Claim);

    /// Number of bytes held under such split-off claims. A claim to tensors that nobody else holds any more
    /// is returned to `all`.
    fn claimed_apart(&mut self, all: &Claim) -> usize;
}

/// Shape of the tokens that are about to be fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    pub rows: usize,
    /// Largest number of tokens of a row.
    pub tokens: usize,
    /// Bytes per element of keys and values.
    pub element: usize,
    /// Whether the sequence is known to end with these tokens, whatever was reserved.
    pub last: bool,
}

/// Device memory of a layer in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Held until the layer changes again, including room allocated ahead of need. An offloaded layer holds
    /// it only while it is in use, or the layer before it is.
    pub held: usize,
    /// Size of the largest buffer.
    pub largest: usize,
    /// Held in addition while the layer is in use.
    pub passing: usize,
}

/// Number of bytes that were copied between the host and a device.
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

/// Current memory of a layer in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// On the device, including room allocated ahead of need.
    pub device: usize,
    /// The part of `device` that is shared with snapshots.
    pub shared: usize,
    /// In host memory, instead of on the device.
    pub host: usize,
    /// Copied between the host and the device so far.
    pub moved: Moved,
}

/// A copy of a layer in host memory. `LayerState<ReadBack>` is a copy that was started and has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState<T = TensorData> {
    /// Number of tokens seen.
    pub seq_len: usize,
    /// Number of tokens that can be truncated at any time.
    pub history: usize,
    /// Further counters of the strategy, by name.
    pub counts: serde_json::Value,
    /// The tensors of each slot.
    pub slots: Vec<Vec<T>>,
}

impl LayerState<ReadBack> {
    /// Waits for the data.
    ///
    /// # Errors
    /// The device's error in a read.
    pub async fn finish(self) -> Result<LayerState> {
        let Self { seq_len, history, counts, slots: reads } = self;
        let mut slots = Vec::with_capacity(reads.len());
        for reads in reads {
            slots.push(read_back::all(reads).await?);
        }
        Ok(LayerState { seq_len, history, counts, slots })
    }
}

/// Keys and values, each `[batch, heads, tokens, width]`. They may differ in heads and width.
pub type Kv = (Tensor<4>, Tensor<4>);

/// Keys and values of one attention block. Tensors are `[batch, heads, tokens, width]`.
pub trait KvLayer: CacheLayer {
    /// Heads and widths of the keys and the values that the layer takes; `None` if it takes any.
    fn streams(&self) -> Option<[Stream; 2]>;

    /// Positions of the keys that an update of `n` tokens will return ("mask sizes").
    fn span(&self, n: usize) -> KvSpan;

    /// Limits of the layer.
    fn limits(&self) -> Limits;

    /// Stores new tokens at `positions`, and returns everything that attention may look at.
    ///
    /// **Invariant:** the view covers exactly `self.span(n)`, asked before the call.
    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, positions: &Positions) -> Result<KvView>;

    /// Number of slots in a buffer for the sequence and `tokens` more tokens, with position `p` in slot `p`;
    /// `None` if keys are kept in another way, or in host memory. Rows of layers that return a number can
    /// share a buffer.
    fn slots_for(&self, tokens: usize) -> Option<usize>;

    /// Gives up keys and values, `[rows, heads, slots, width]`, to be held in a buffer that rows share;
    /// `None` if nothing is stored. Position `p` is in slot `p` where [`slots_for`](Self::slots_for) returns
    /// a number. Until [`take_back`](Self::take_back), the layer still answers questions, and
    /// [`stored`](Self::stored) counts its tokens.
    fn lend(&mut self) -> Result<Option<Kv>>;

    /// Gives up keys and values if an [`update`](Self::update) with `keys` would only write into slots of
    /// their single buffer; `None` if not. The caller writes the new ones at `positions`,
    /// [gives the buffer back](Self::take_back) and has the tokens [counted](Self::stored), before it asks
    /// the layer for anything else.
    ///
    /// # Errors
    /// [`Error::Full`](crate::Error::Full) and others, if [`update`](Self::update) would fail, too.
    fn lend_to_write(&mut self, keys: &Tensor<4>, positions: &Positions) -> Result<Option<DenseKv>>;

    /// Takes back keys and values that were [lent](Self::lend), with as many slots as they come in.
    fn take_back(&mut self, kv: Kv);

    /// Counts tokens that were stored in the buffer to which keys are [lent](Self::lend).
    fn stored(&mut self, tokens: usize);

    /// Copies the stored keys and values in the order of their positions: exactly `self.span(0)`; `None` if
    /// nothing is stored.
    fn gather(&self) -> Result<Option<Kv>>;

    /// Number of the next one-token updates that repeat the launches of the first of them: the same buffers,
    /// shapes, `start` and `origin` of the view, at another position. One captured step can be replayed for
    /// all of them.
    fn replayable(&self) -> usize;

    /// Counts a token that a replayed step stored.
    fn replayed(&mut self);

    /// Copies the layer lazily: tensors are shared until either copy writes.
    fn snapshot(&self) -> Box<dyn KvLayer>;
}

/// Limits of a layer of keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Number of tokens that it can hold in total; `None`: unlimited.
    pub capacity: Option<usize>,
    /// Number of tokens that one update takes; `None`: unlimited.
    pub at_once: Option<usize>,
    /// Whether positions stay below a bound, however many tokens are seen.
    pub endless: bool,
    /// Whether buffers never grow beyond what was allocated for the whole sequence.
    pub fixed_buffers: bool,
    /// Whether the keys that a query sees depend on how the tokens were divided into passes.
    pub by_pass: bool,
}

/// Positions of the new tokens of one pass in each row, for every layer that counts positions in the usual
/// way.
#[derive(Clone, Debug)]
pub struct Positions {
    /// `[3, rows]`: the position of the first new token of each row, the first position that the row may see,
    /// and the row's first slot. Kernels read them on the device, so that a captured step can be replayed for
    /// the next token.
    pub on_device: Tensor<2, Int>,
    /// These numbers on the host, by row.
    pub on_host: Arc<[RowPosition]>,
}

/// Position of the new tokens of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowPosition {
    /// Position of the first new token.
    pub first: usize,
    /// First position that is not padding.
    pub visible_from: usize,
    /// First slot of the row, which holds position 0, in a buffer that rows share. 0 if each row has its own
    /// slots.
    pub base: usize,
}

impl Positions {
    /// Uploads the positions of each row.
    pub fn new(on_host: Vec<RowPosition>, device: &Device) -> Self {
        let of: [fn(&RowPosition) -> usize; 3] = [|row| row.first, |row| row.visible_from, |row| row.base];
        let numbers: Vec<i32> = of.iter().flat_map(|of| on_host.iter().map(|row| of(row) as i32)).collect();
        // In one piece: some devices would put padding between several.
        let on_device = Tensor::<1, Int>::from_data(TensorData::new(numbers, [3 * on_host.len()]), device);
        Self { on_device: on_device.reshape([3, on_host.len()]), on_host: on_host.into() }
    }

    /// Creates positions of rows that all continue at `first`; `left_pad`: padding at the start of each.
    pub fn even(first: usize, left_pad: &[usize], device: &Device) -> Self {
        let row = |&visible_from: &usize| RowPosition { first, visible_from, base: 0 };
        Self::new(left_pad.iter().map(row).collect(), device)
    }

    /// Creates positions of `rows` rows without padding that all continue at `first`.
    pub fn all_at(first: usize, rows: usize, device: &Device) -> Self {
        Self::even(first, &vec![0; rows], device)
    }

    pub fn rows(&self) -> usize {
        self.on_host.len()
    }

    /// Returns the positions of `rows`.
    pub fn narrow(&self, rows: Range<usize>) -> Self {
        if rows.len() == self.rows() {
            return self.clone();
        }
        let on_device = self.on_device.clone().narrow(1, rows.start, rows.len());
        Self { on_device, on_host: self.on_host[rows].into() }
    }

    /// Whether any row begins with padding.
    pub fn is_padded(&self) -> bool {
        self.on_host.iter().any(|row| row.visible_from > 0)
    }

    /// Returns the positions of the tokens `n` places after the first new ones.
    pub fn behind(&self, n: usize) -> Self {
        if n == 0 {
            return self.clone();
        }
        let row = |row: &RowPosition| RowPosition { first: row.first + n, ..*row };
        Self::new(self.on_host.iter().map(row).collect(), &self.on_device.device())
    }
}

/// Parents of the rows in a step of a beam search, chosen on the device: each row continues from a row of its
/// prompt.
#[derive(Clone, Debug)]
pub struct Parents {
    /// `[rows]`: parent of each row, counted from the first row of its prompt.
    pub rows: Tensor<1, Int>,
    /// `[rows]`: first row of the prompt that each row belongs to.
    pub firsts: Tensor<1, Int>,
    /// Number of rows per prompt; the rows of a prompt are adjacent.
    pub width: usize,
    /// Position of the latest token of each row.
    pub positions: Positions,
    /// `[1]`: number of tokens after the prompt, equal for all rows of the prompt.
    pub behind: Tensor<1, Int>,
}

impl Parents {
    /// Returns the parent of each row, counted from the first row of the batch, `[rows]`.
    pub fn absolute(&self) -> Tensor<1, Int> {
        self.rows.clone() + self.firsts.clone()
    }

    /// Restricts the parents to `rows`, which are those of whole prompts, renumbered from 0.
    pub(crate) fn narrow(&self, rows: Range<usize>) -> Self {
        let own = |ints: &Tensor<1, Int>| ints.clone().narrow(0, rows.start, rows.len());
        match rows.len() == self.positions.rows() {
            true => self.clone(),
            false => Self {
                rows: own(&self.rows),
                firsts: own(&self.firsts) - rows.start as i64,
                positions: self.positions.narrow(rows.clone()),
                ..self.clone()
            },
        }
    }
}

/// How a layer reorders rows by numbers that only the device knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reorders {
    /// The layer cannot reorder on the device.
    No,
    /// The layer copies its contents into other buffers.
    ByCopy,
    /// The layer moves the tokens after the prompt within its buffers, so that a captured step can do it.
    InPlace,
}

/// Keys and values that an encoder writes once; `None` until then.
pub trait CrossLayer: CacheLayer {
    fn snapshot(&self) -> Box<dyn CrossLayer>;
    fn view(&mut self) -> Result<Option<KvView>>;
    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()>;

    /// Copies the written keys and values, `[batch, kv_heads, positions, head_dim]`, unpacked; `None` if
    /// there are none.
    fn gather(&self) -> Result<Option<Kv>>;
}

/// States of a recurrent block, which have constant size. Kernels of the model write them.
pub trait StateLayer: CacheLayer {
    /// Copies the layer lazily: tensors are shared until either copy writes.
    fn snapshot(&self) -> Box<dyn StateLayer>;

    /// Hands out the rings, to be written in place by a pass over `inputs`, `[rows, tokens, width]`, whose
    /// type is that of the activations. The first new token is at [`seq_len`](CacheLayer::seq_len). The
    /// rings must be given back to [`store`](Self::store).
    ///
    /// # Errors
    /// [`Error::WrongRows`](crate::Error::WrongRows). Then nothing was handed out.
    fn take(&mut self, inputs: &Tensor<3>) -> Result<Rings>;

    /// Stores the rings from [`take`](Self::take) after `tokens` more tokens of each row were written.
    fn store(&mut self, rings: Rings, tokens: usize) -> Result<()>;

    /// Number of latest tokens that the [older state](crate::need::RingEntries::OlderState) in the rings that
    /// were taken has not seen. They are in the [journal](crate::need::RingEntries::Journal).
    fn journaled(&self) -> usize;

    /// Limits of the layer: it takes any number of tokens.
    fn limits(&self) -> Limits {
        Limits { endless: true, fixed_buffers: !self.is_offloaded(), ..Limits::default() }
    }

    /// See [`KvLayer::replayable`].
    fn replayable(&self) -> usize;

    /// See [`KvLayer::replayed`].
    fn replayed(&mut self);
}

/// Range of the positions of the keys in a view. The cache knows where keys are; the model knows which to
/// mask.
///
/// Models take rotary positions from here, never from `seq_len`: a layer that closes the gaps it leaves
/// counts its own positions.
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

/// Ring buffers of a recurrent mixer, in the order of its [`RecurrentNeed`](crate::need::RecurrentNeed): a
/// sequence can be truncated to the latest lengths, and each step writes the same buffers.
pub type Rings = Vec<Tensor<4>>;
