//! Storage for the tensors of layers. Moving, reordering and measuring tensors is implemented here, once.

use std::{any::TypeId, fmt, ops::Range};

use burn::tensor::{DType, Device, Float, Int, Tensor, TensorData, kind::Basic};

use crate::{
    Error, Result,
    packed::PackedBuffer,
    read_back::{self, ReadBack},
};

/// Shape and element type of a tensor.
pub type Outline = (Vec<usize>, DType);

/// A tensor, or a few related tensors. The first dimension is the batch.
pub trait Tensors: fmt::Debug + Clone + Send + Sized {
    /// Whether rows of each tensor can be selected independently, along its first dimension.
    const BY_ROWS: bool = true;

    /// Outlines of the tensors that [`from_host`](Tensors::from_host) must be given, in the order of
    /// [`start_reading`](Tensors::start_reading).
    fn outlines(&self) -> Vec<Outline>;
    fn rows(&self) -> usize;
    /// Size of dimension 2 of the first tensor, in most cases tokens. 0 if there is no such dimension.
    fn tokens(&self) -> usize;
    /// Element type of the first tensor.
    fn dtype(&self) -> DType;
    fn select_rows(self, rows: &[usize]) -> Self;
    /// Selects rows by numbers on the device, `[rows]`; `None` if rows of each tensor cannot be selected
    /// independently.
    fn select_rows_on_device(self, rows: &Tensor<1, Int>) -> Option<Self>;
    /// Starts copying the tensors to the host: completely, or only the entries `tokens` of dimension 2.
    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>);
    /// Creates the tensors from host data; `None` if tensors are missing, or of another rank or kind.
    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self>;
    fn bytes(&self) -> usize;
}

/// A place for tensors that records which entries were written since it was last asked.
#[derive(Clone, Debug)]
pub struct Slot<T> {
    state: State<T>,
    dirty: Dirty,
}

#[derive(Clone, Debug)]
enum State<T> {
    Empty,
    Device(T),
    /// In host memory; the caller that offloaded the tensors holds the copy.
    Offloaded {
        outlines: Vec<Outline>,
        rows: usize,
    },
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { state: State::Empty, dirty: Dirty::Nothing }
    }
}

impl<T> Slot<T> {
    /// Returns the tensors; `None` if the slot is empty.
    ///
    /// # Errors
    /// [`Error::Execution`] if they are in host memory: a layer must be brought to the device before it is
    /// used.
    pub fn get(&self) -> Result<Option<&T>> {
        match &self.state {
            State::Device(tensors) => Ok(Some(tensors)),
            State::Empty => Ok(None),
            State::Offloaded { .. } => Err(in_host_memory()),
        }
    }

    /// Takes the tensors out, so that the caller is their only owner and may write in place.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get).
    pub fn take(&mut self) -> Result<Option<T>> {
        match std::mem::replace(&mut self.state, State::Empty) {
            State::Device(tensors) => Ok(Some(tensors)),
            State::Empty => Ok(None),
            offloaded @ State::Offloaded { .. } => {
                self.state = offloaded;
                Err(in_host_memory())
            }
        }
    }

    /// Stores tensors whose entries are all new.
    pub fn set(&mut self, tensors: T) {
        *self = Self { state: State::Device(tensors), dirty: Dirty::Everything };
    }

    /// Stores tensors that were taken, after the ranges `written` of dimension 2 were written.
    pub fn set_written(&mut self, tensors: T, written: impl IntoIterator<Item = Range<usize>>) {
        self.state = State::Device(tensors);
        written.into_iter().for_each(|tokens| self.dirty.add(tokens));
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

// These are called several times per layer and step: nothing is allocated.
impl<T: Tensors> Slot<T> {
    /// Size of dimension 2 of the first tensor, in most cases tokens. 0 if the slot is empty.
    pub fn tokens(&self) -> usize {
        match &self.state {
            State::Empty => 0,
            State::Device(tensors) => tensors.tokens(),
            State::Offloaded { outlines, .. } => {
                outlines.first().and_then(|(shape, _)| shape.get(2).copied()).unwrap_or(0)
            }
        }
    }

    /// Element type of the first tensor; `None` if the slot is empty.
    pub fn dtype(&self) -> Option<DType> {
        match &self.state {
            State::Empty => None,
            State::Device(tensors) => Some(tensors.dtype()),
            State::Offloaded { outlines, .. } => outlines.first().map(|&(_, dtype)| dtype),
        }
    }
}

fn in_host_memory() -> Error {
    Error::Execution("a layer was used while its tensors were in host memory".to_owned())
}

/// The changed part of a slot's contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Dirty {
    #[default]
    Nothing,
    /// Ranges of dimension 2 of every tensor, in most cases tokens.
    Tokens(Vec<Range<usize>>),
    Everything,
}

impl Dirty {
    /// Largest number of ranges; more are not worth telling apart.
    const PIECES: usize = 4;

    fn add(&mut self, tokens: Range<usize>) {
        match self {
            _ if tokens.is_empty() => {}
            Self::Nothing => *self = Self::Tokens(vec![tokens]),
            Self::Tokens(pieces) => match (pieces.len(), pieces.last_mut()) {
                (_, Some(last)) if last.end == tokens.start => last.end = tokens.end,
                (Self::PIECES, _) => *self = Self::Everything,
                _ => pieces.push(tokens),
            },
            Self::Everything => {}
        }
    }
}

/// A [`Slot`] of any type.
pub trait AnySlot {
    /// Shapes and element types of the slot's tensors, wherever they are.
    fn outlines(&self) -> Vec<Outline>;
    /// Number of rows of the batch; `None` if the slot is empty.
    fn rows(&self) -> Option<usize>;
    /// See [`Tensors::BY_ROWS`].
    fn is_by_rows(&self) -> bool;
    fn is_offloaded(&self) -> bool;
    /// Selects rows on the device; for tensors in host memory, only the new number of rows is recorded.
    fn select_rows(&mut self, rows: &[usize]);
    /// Selects rows on the device, by numbers there.
    ///
    /// # Errors
    /// [`Error::Execution`] if the tensors are in host memory, or not [by rows](Self::is_by_rows).
    fn select_rows_on_device(&mut self, rows: &Tensor<1, Int>) -> Result<()>;
    /// Starts copying the tensors to the host: completely, or only the entries `tokens` of dimension 2. The
    /// slot keeps them.
    fn start_reading(&self, tokens: Option<&Range<usize>>) -> Result<Vec<ReadBack>>;
    /// Returns the changes since the last call. If a shape changed, everything changed, whatever this
    /// returns.
    fn take_dirty(&mut self) -> Dirty;
    /// Marks everything as changed.
    fn mark_dirty(&mut self);
    /// Drops the device's tensors, which were copied to the host.
    fn release(&mut self);
    /// Restores the released tensors from the front of `host`.
    fn fill(&mut self, host: &mut dyn Iterator<Item = TensorData>, device: &Device);
    /// Replaces the contents with `host`, or with nothing if it is empty.
    ///
    /// # Errors
    /// [`Error::Import`] if the number of tensors or their number of dimensions differs from the slot's type.
    fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()>;
    fn clear(&mut self);
    fn device_bytes(&self) -> usize;
}

impl<T: Tensors> AnySlot for Slot<T> {
    fn outlines(&self) -> Vec<Outline> {
        match &self.state {
            State::Empty => Vec::new(),
            State::Device(tensors) => tensors.outlines(),
            State::Offloaded { outlines, .. } => outlines.clone(),
        }
    }

    fn rows(&self) -> Option<usize> {
        match &self.state {
            State::Empty => None,
            State::Device(tensors) => Some(tensors.rows()),
            State::Offloaded { rows, .. } => Some(*rows),
        }
    }

    fn is_by_rows(&self) -> bool {
        T::BY_ROWS
    }

    fn is_offloaded(&self) -> bool {
        matches!(self.state, State::Offloaded { .. })
    }

    fn select_rows(&mut self, rows: &[usize]) {
        match std::mem::replace(&mut self.state, State::Empty) {
            State::Empty => {}
            State::Device(tensors) => self.set(tensors.select_rows(rows)),
            State::Offloaded { mut outlines, .. } => {
                outlines.iter_mut().filter_map(|(shape, _)| shape.first_mut()).for_each(|n| *n = rows.len());
                self.state = State::Offloaded { outlines, rows: rows.len() };
            }
        }
    }

    fn select_rows_on_device(&mut self, rows: &Tensor<1, Int>) -> Result<()> {
        let Some(tensors) = self.take()? else { return Ok(()) };
        let selected = tensors.select_rows_on_device(rows);
        let why = || Error::Execution("rows of a layer cannot be selected on the device".to_owned());
        self.set(selected.ok_or_else(why)?);
        Ok(())
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>) -> Result<Vec<ReadBack>> {
        let mut reads = Vec::new();
        if let Some(tensors) = self.get()? {
            tensors.start_reading(tokens, &mut reads);
        }
        Ok(reads)
    }

    fn take_dirty(&mut self) -> Dirty {
        std::mem::take(&mut self.dirty)
    }

    fn mark_dirty(&mut self) {
        self.dirty = Dirty::Everything;
    }

    fn release(&mut self) {
        if let State::Device(tensors) = &self.state {
            self.state = State::Offloaded { outlines: tensors.outlines(), rows: tensors.rows() };
        }
    }

    fn fill(&mut self, host: &mut dyn Iterator<Item = TensorData>, device: &Device) {
        if self.is_offloaded() {
            self.state = T::from_host(host, device).map_or(State::Empty, State::Device);
        }
    }

    fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()> {
        let wrong = |why: &str| Error::Import { why: why.to_owned() };
        if host.iter().any(|data| data.shape().num_elements() == 0) {
            return Err(wrong("a tensor is empty"));
        }
        if host.is_empty() {
            self.clear();
            return Ok(());
        }
        let mut host = host.into_iter();
        let tensors = T::from_host(&mut host, device);
        let tensors = tensors.ok_or_else(|| wrong("tensors are missing, or of the wrong rank or type"))?;
        match host.next() {
            None => self.set(tensors),
            Some(_) => return Err(wrong("tensors are left over")),
        }
        Ok(())
    }

    fn clear(&mut self) {
        Self::clear(self);
    }

    fn device_bytes(&self) -> usize {
        match &self.state {
            State::Device(tensors) => tensors.bytes(),
            State::Empty | State::Offloaded { .. } => 0,
        }
    }
}

impl<const D: usize, K: Basic + 'static> Tensors for Tensor<D, K> {
    fn outlines(&self) -> Vec<Outline> {
        vec![(self.dims().to_vec(), self.dtype())]
    }

    fn rows(&self) -> usize {
        self.dims()[0]
    }

    fn tokens(&self) -> usize {
        self.dims().get(2).copied().unwrap_or(0)
    }

    fn dtype(&self) -> DType {
        Self::dtype(self)
    }

    fn select_rows(self, rows: &[usize]) -> Self {
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let len = rows.len();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [len]), &self.device());
        self.select(0, rows)
    }

    fn select_rows_on_device(self, rows: &Tensor<1, Int>) -> Option<Self> {
        Some(self.select(0, rows.clone()))
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>) {
        reads.push(read_back::start(match tokens {
            Some(tokens) => self.clone().narrow(2, tokens.start, tokens.len()),
            None => self.clone(),
        }));
    }

    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self> {
        let is_float = TypeId::of::<K>() == TypeId::of::<Float>();
        let fits = |data: &TensorData| data.shape().rank() == D && data.dtype().is_float() == is_float;
        host.next().filter(fits).map(|data| {
            let dtype = data.dtype();
            Tensor::from_data(data, (device, dtype))
        })
    }

    fn bytes(&self) -> usize {
        self.shape().num_elements() * self.dtype().size()
    }
}

impl<A: Tensors, B: Tensors> Tensors for (A, B) {
    const BY_ROWS: bool = A::BY_ROWS && B::BY_ROWS;

    fn outlines(&self) -> Vec<Outline> {
        [self.0.outlines(), self.1.outlines()].concat()
    }

    fn rows(&self) -> usize {
        self.0.rows()
    }

    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn select_rows(self, rows: &[usize]) -> Self {
        (self.0.select_rows(rows), self.1.select_rows(rows))
    }

    fn select_rows_on_device(self, rows: &Tensor<1, Int>) -> Option<Self> {
        Some((self.0.select_rows_on_device(rows)?, self.1.select_rows_on_device(rows)?))
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>) {
        self.0.start_reading(tokens, reads);
        self.1.start_reading(tokens, reads);
    }

    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self> {
        Some((A::from_host(host, device)?, B::from_host(host, device)?))
    }

    fn bytes(&self) -> usize {
        self.0.bytes() + self.1.bytes()
    }
}

impl Tensors for PackedBuffer {
    fn outlines(&self) -> Vec<Outline> {
        [self.codes.outlines(), self.scales.outlines()].concat()
    }

    fn rows(&self) -> usize {
        self.codes.rows()
    }

    fn tokens(&self) -> usize {
        self.codes.tokens()
    }

    fn dtype(&self) -> DType {
        self.codes.dtype()
    }

    fn select_rows(self, rows: &[usize]) -> Self {
        Self { codes: self.codes.select_rows(rows), scales: self.scales.select_rows(rows) }
    }

    fn select_rows_on_device(self, rows: &Tensor<1, Int>) -> Option<Self> {
        let codes = self.codes.select_rows_on_device(rows)?;
        Some(Self { codes, scales: self.scales.select_rows_on_device(rows)? })
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>) {
        self.codes.start_reading(tokens, reads);
        self.scales.start_reading(tokens, reads);
    }

    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self> {
        Some(Self { codes: Tensor::from_host(host, device)?, scales: Tensor::from_host(host, device)? })
    }

    fn bytes(&self) -> usize {
        self.codes.bytes() + self.scales.bytes()
    }
}
