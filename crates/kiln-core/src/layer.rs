//! Memory of a single block.

use std::{fmt, ops::Range, sync::Arc};

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{Result, budget::Claim, view::KvView};

/// Memory of one block, whatever it holds.
///
/// **Invariant:** an operation that returns `Err` has changed nothing.
///
/// **Invariant:** a question that takes `&self` is answered without reading a tensor, so that a layer in host memory can
/// answer it. [`save`](Self::save) and [`gather`](KvLayer::gather) copy what they are asked for.
pub trait CacheLayer: fmt::Debug + Send {
    /// Name of the strategy, for messages and profiles.
    fn name(&self) -> &'static str;

    /// Tokens seen so far, including those no longer stored. Always 0 for a stateless layer.
    fn seq_len(&self) -> usize;

    /// Rows of the batch; `None` while nothing is stored.
    fn rows(&self) -> Option<usize>;

    /// Whether `tokens` more tokens of each row can be stored at once. `padded`: whether rows begin with padding.
    ///
    /// # Errors
    /// [`Error::Full`](crate::Error::Full), [`Error::TooManyAtOnce`](crate::Error::TooManyAtOnce),
    /// [`Error::Prompt`](crate::Error::Prompt).
    fn admits(&self, tokens: usize, padded: bool) -> Result<()>;

    /// Bytes on the device while `step` is stored.
    fn footprint(&self, step: &StepShape) -> Footprint;

    /// The largest length, `at_most` or less, that the layer can return to exactly. 0 is always possible.
    fn rewind_point(&self, at_most: usize) -> usize;

    /// Forgets all tokens behind the first `len`, as if they had never been seen. Does nothing if there are no more.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`](crate::Error::CannotTruncate) where `len` is no [`rewind_point`](Self::rewind_point).
    fn truncate(&mut self, len: usize) -> Result<()>;

    /// Promises that up to `tokens` tokens can be truncated at any time from the next update on. A larger promise stays.
    fn keep_history(&mut self, tokens: usize);

    /// Whether it can go back after it was fed, as far as [`keep_history`](Self::keep_history) promised: to every length, or to the
    /// one before an update. [`rewind_point`](Self::rewind_point) says where to.
    fn can_rewind(&self) -> bool;

    /// Hint: the sequence is going to reach `tokens` tokens.
    fn reserve(&mut self, tokens: usize);

    /// Forgets everything. Promises stay.
    fn reset(&mut self);

    /// Forgets everything, and gives up buffers that [`reset`](Self::reset) keeps: what is in them cannot be read any more.
    fn discard(&mut self);

    /// Rebuilds the batch: new row `i` is old row `rows[i]`. Rows may be repeated and left out.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`](crate::Error::NoSuchRow).
    fn reorder(&mut self, rows: &[usize]) -> Result<()>;

    /// Whether its only row, repeated by [`reorder`](Self::reorder), is held once for all.
    fn shares_row(&self) -> bool;

    /// How [`reorder_on_device`](Self::reorder_on_device) is done.
    fn reorders(&self) -> Reorders;

    /// Rebuilds the batch by numbers that only the device knows: see [`Parents`].
    ///
    /// # Errors
    /// [`Error::Execution`](crate::Error::Execution) where it [cannot](Reorders::No) do it.
    fn reorder_on_device(&mut self, parents: &Parents) -> Result<()>;

    /// Copies all that a new layer needs to continue in this one's place.
    fn save(&self) -> Result<LayerState>;

    /// Becomes the layer that `state` was copied from.
    ///
    /// # Errors
    /// [`Error::Import`](crate::Error::Import) for the state of another kind of layer, and for one that contradicts itself;
    /// [`Error::Full`](crate::Error::Full).
    fn restore(&mut self, state: LayerState) -> Result<()>;

    /// Moves all tensors to host memory. From then on they are on the device only while the layer is used.
    fn offload(&mut self) -> Result<()>;

    /// Whether it is on the device only while it is used.
    fn is_offloaded(&self) -> bool;

    /// Hint: this layer is used next.
    fn prefetch(&mut self) -> Result<()>;

    /// Bytes held, and bytes moved so far.
    fn usage(&self) -> Usage;

    /// Called before a snapshot: gives what the snapshot may share a claim of its own, split off from `all`. The claim
    /// lives as long as anyone holds the shared tensors.
    fn claim_shared(&self, all: &Claim);

    /// Bytes held under such claims. A claim to what nobody else holds any more is returned to `all`.
    fn claimed_apart(&mut self, all: &Claim) -> usize;
}

/// Tokens that are about to be fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    pub rows: usize,
    /// Tokens of each row, at most.
    pub tokens: usize,
    /// Bytes of one number in keys and values.
    pub element: usize,
    /// Whether the sequence is known to end with them, whatever was reserved.
    pub last: bool,
}

/// Bytes of a layer on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Held until the layer changes again, room allocated ahead of need included; of an offloaded layer only while it is in
    /// use, or the one before it is.
    pub held: usize,
    /// Of `held`: the largest buffer of keys, and the one of values beside it.
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

/// Bytes of a layer, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// On the device, room allocated ahead of need included.
    pub device: usize,
    /// Of these, shared with snapshots.
    pub shared: usize,
    /// In host memory, in place of the device's.
    pub host: usize,
    /// Copied between the host and the device so far.
    pub moved: Moved,
}

/// A copy of a layer in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    /// Tokens seen.
    pub seq_len: usize,
    /// Tokens that can be truncated at any time.
    pub history: usize,
    /// What the strategy counts besides, by name.
    pub counts: serde_json::Value,
    /// The tensors of each slot.
    pub slots: Vec<Vec<TensorData>>,
}

/// Keys and values, both `[batch, kv_heads, tokens, head_dim]`.
pub type Kv = (Tensor<4>, Tensor<4>);

/// Keys and values of one attention block. Tensors are `[batch, kv_heads, tokens, head_dim]`.
pub trait KvLayer: CacheLayer {
    /// Positions of the keys that an update of `n` tokens will return ("mask sizes").
    fn span(&self, n: usize) -> KvSpan;

    /// What the layer can take.
    fn limits(&self) -> Limits;

    /// Stores new tokens, which stand at `positions`, and returns everything attention may look at.
    ///
    /// **Invariant:** the view is exactly `self.span(n)`, asked before the call.
    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, positions: &Positions) -> Result<KvView>;

    /// Slots of a buffer for the sequence and `tokens` more tokens, with position `p` in slot `p`; `None` where keys are kept in another
    /// way, or in host memory. Rows of such layers can share a buffer.
    fn slots_for(&self, tokens: usize) -> Option<usize>;

    /// Gives up keys and values, `[rows, kv_heads, slots, head_dim]`, with position `p` in slot `p`, to be held in a buffer that rows
    /// share; `None` if nothing is stored. Until [`take_back`](Self::take_back), the layer answers questions, and
    /// [`stored`](Self::stored) counts for it.
    fn lend(&mut self) -> Result<Option<Kv>>;

    /// Holds keys and values again that were [lent](Self::lend), in as many slots as they come in.
    fn take_back(&mut self, kv: Kv);

    /// Counts tokens that were stored where keys are [lent](Self::lend).
    fn stored(&mut self, tokens: usize);

    /// The stored keys and values in the order of their positions: exactly `self.span(0)`; `None` if nothing is stored.
    fn gather(&self) -> Result<Option<Kv>>;

    /// How many of the next one-token updates repeat the launches of the next one: the same buffers, shapes, `start` and `origin`
    /// of the view, at another position. One captured step can be replayed for all of them.
    fn replayable(&self) -> usize;

    /// Counts a token that a replayed step stored.
    fn replayed(&mut self);

    /// A copy of this layer. The two share tensors until one of them writes.
    fn snapshot(&self) -> Box<dyn KvLayer>;
}

/// What a layer of keys and values can take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Tokens it can hold in all; `None`: any number.
    pub capacity: Option<usize>,
    /// Tokens that one update takes; `None`: any number.
    pub at_once: Option<usize>,
    /// Whether positions stay below a bound, however many tokens are seen.
    pub endless: bool,
    /// Whether buffers never grow beyond what was allocated for the whole sequence.
    pub fixed_buffers: bool,
    /// Whether what a query sees depends on how the tokens were divided into passes.
    pub by_pass: bool,
}

/// Where the new tokens of one pass stand in each row, for every layer that counts positions alike.
#[derive(Clone, Debug)]
pub struct Positions {
    /// `[3, rows]`: the position of the first new token of each row, then the first position that the row may see, then
    /// the row's first slot. Kernels read them on the device, so that a captured step can be replayed for the next token.
    pub on_device: Tensor<2, Int>,
    /// These numbers on the host, by row.
    pub on_host: Arc<[RowPosition]>,
}

/// Where the new tokens of one row stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowPosition {
    /// Position of the first new token.
    pub first: usize,
    /// Positions before it are padding.
    pub visible_from: usize,
    /// The first slot of the row in a buffer that rows share: that of position 0. 0 where each row has slots of its own.
    pub base: usize,
}

impl Positions {
    /// Uploads the positions of each row.
    pub fn new(on_host: Vec<RowPosition>, device: &Device) -> Self {
        let of: [fn(&RowPosition) -> usize; 3] = [|row| row.first, |row| row.visible_from, |row| row.base];
        let numbers: Vec<i32> = of.iter().flat_map(|of| on_host.iter().map(|row| of(row) as i32)).collect();
        // In one piece: some devices would put space between them.
        let on_device = Tensor::<1, Int>::from_data(TensorData::new(numbers, [3 * on_host.len()]), device);
        Self { on_device: on_device.reshape([3, on_host.len()]), on_host: on_host.into() }
    }

    /// Rows that all stand at `first`; `left_pad`: padding at the start of each.
    pub fn even(first: usize, left_pad: &[usize], device: &Device) -> Self {
        let row = |&visible_from: &usize| RowPosition { first, visible_from, base: 0 };
        Self::new(left_pad.iter().map(row).collect(), device)
    }

    /// `rows` rows without padding that all stand at `first`.
    pub fn all_at(first: usize, rows: usize, device: &Device) -> Self {
        Self::even(first, &vec![0; rows], device)
    }

    pub fn rows(&self) -> usize {
        self.on_host.len()
    }

    /// Those of some rows.
    pub fn narrow(&self, rows: Range<usize>) -> Self {
        if rows.len() == self.rows() {
            return self.clone();
        }
        let on_device = self.on_device.clone().narrow(1, rows.start, rows.len());
        Self { on_device, on_host: self.on_host[rows].into() }
    }

    /// Whether a row begins with padding.
    pub fn is_padded(&self) -> bool {
        self.on_host.iter().any(|row| row.visible_from > 0)
    }

    /// Positions of the tokens that stand `n` behind the first.
    pub fn behind(&self, n: usize) -> Self {
        if n == 0 {
            return self.clone();
        }
        let row = |row: &RowPosition| RowPosition { first: row.first + n, ..*row };
        Self::new(self.on_host.iter().map(row).collect(), &self.on_device.device())
    }
}

/// The rows that rows go on as, chosen on the device: a step of a beam search. Each takes over what a row of its prompt holds.
#[derive(Clone, Debug)]
pub struct Parents {
    /// `[rows]`: for each row, a row of its prompt, counted from the first of the prompt.
    pub rows: Tensor<1, Int>,
    /// `[rows]`: the first row of the prompt that each row belongs to.
    pub firsts: Tensor<1, Int>,
    /// Rows of each prompt, which follow each other.
    pub width: usize,
    /// Where the latest token of each row stands.
    pub positions: Positions,
    /// `[1]`: tokens of each row behind its prompt, which all rows of the prompt have in common.
    pub behind: Tensor<1, Int>,
}

impl Parents {
    /// For each row, the row that it goes on as, `[rows]`.
    pub fn absolute(&self) -> Tensor<1, Int> {
        self.rows.clone() + self.firsts.clone()
    }

    /// Those of the rows of some prompts, as if there were no others.
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

/// How a layer has rows take over what others hold, where only the device knows which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reorders {
    /// It cannot.
    No,
    /// What it holds is copied, into other buffers.
    ByCopy,
    /// What is behind the prompt is moved within its buffers, so that a captured step can do it.
    InPlace,
}

/// Keys and values an encoder wrote once; `None` until then.
pub trait CrossLayer: CacheLayer {
    fn snapshot(&self) -> Box<dyn CrossLayer>;
    fn view(&mut self) -> Result<Option<KvView>>;
    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()>;

    /// What was written, `[batch, kv_heads, positions, head_dim]`, unpacked; `None` if nothing was.
    fn gather(&self) -> Result<Option<Kv>>;
}

/// States of a recurrent block, which are of constant size. Kernels of the model write them.
pub trait StateLayer: CacheLayer {
    /// A copy of this layer. The two share tensors until one of them writes.
    fn snapshot(&self) -> Box<dyn StateLayer>;

    /// Hands out the rings, to be written in place by a pass over `inputs` `[rows, tokens, channels]`, the inputs of the
    /// convolution. The new tokens stand at [`seq_len`](CacheLayer::seq_len). The rings must be given back to
    /// [`store`](Self::store).
    ///
    /// # Errors
    /// [`Error::WrongRows`](crate::Error::WrongRows). Then nothing was handed out.
    fn take(&mut self, inputs: &Tensor<3>) -> Result<StateRings>;

    /// Stores what [`take`](Self::take) gave, behind `tokens` more tokens of each row.
    fn store(&mut self, rings: StateRings, tokens: usize) -> Result<()>;

    /// What the layer can take: any number of tokens.
    fn limits(&self) -> Limits {
        Limits { endless: true, fixed_buffers: !self.is_offloaded(), ..Limits::default() }
    }

    /// See [`KvLayer::replayable`].
    fn replayable(&self) -> usize;

    /// See [`KvLayer::replayed`].
    fn replayed(&mut self);
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

/// Memory of a state-space mixer. It consists of rings: a sequence can be truncated to the latest lengths, and each step writes
/// the same buffers.
#[derive(Clone, Debug)]
pub struct StateRings {
    /// Inputs of the convolution, `[rows, 1, slots, channels]`: that of position `p` is in slot `p mod slots`.
    pub inputs: Tensor<4>,
    /// States in float32, `[rows, state_dim, slots, channels]`: that behind `n` tokens is in slot `n mod slots`. Behind none it is 0,
    /// and in no slot.
    pub states: Tensor<4>,
}
