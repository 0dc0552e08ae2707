//! Where layers keep tensors. Moving, reordering and measuring them is written here, once.

use std::{fmt, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData, kind::Basic};

use crate::{
    Error, Result,
    packed::PackedBuffer,
    read_back::{self, ReadBack},
};

/// Shape and type of a tensor that is away.
pub type Outline = (Vec<usize>, DType);

/// A tensor, or a few that belong together, first dimension the batch.
pub trait Tensors: fmt::Debug + Clone + Send + Sized {
    /// Whether rows can be selected of each tensor by itself, along its first dimension.
    const BY_ROWS: bool = true;

    /// What [`from_host`](Tensors::from_host) must be given back, in the order of [`to_host`](Tensors::to_host).
    fn outlines(&self) -> Vec<Outline>;
    fn rows(&self) -> usize;
    fn select_rows(self, rows: &[usize]) -> Self;
    fn to_host(&self, host: &mut Vec<TensorData>) -> Result<()>;
    /// Starts copying them to the host, each whole or only these entries of its dimension 2.
    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>);
    /// `None` where there are too few, or of another rank.
    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self>;
    fn bytes(&self) -> usize;
}

/// A place for tensors that may not be there yet, or be away on the host.
#[derive(Clone, Debug, Default)]
pub enum Slot<T> {
    #[default]
    Empty,
    Here(T),
    Away(Vec<Outline>),
}

impl<T> Slot<T> {
    /// Takes the tensors out, so that the caller is their only owner and may write in place.
    ///
    /// `None` if there are none yet.
    ///
    /// # Errors
    /// [`Error::Exported`] if they are on the host: an exported layer is imported before it is used.
    pub fn take(&mut self) -> Result<Option<T>> {
        match std::mem::take(self) {
            Self::Here(tensors) => Ok(Some(tensors)),
            Self::Empty => Ok(None),
            Self::Away(outlines) => {
                *self = Self::Away(outlines);
                Err(Error::Exported)
            }
        }
    }

    /// The tensors, or `None` if there are none yet.
    ///
    /// # Errors
    /// [`Error::Exported`] if they are on the host.
    pub fn get(&self) -> Result<Option<&T>> {
        match self {
            Self::Here(tensors) => Ok(Some(tensors)),
            Self::Empty => Ok(None),
            Self::Away(_) => Err(Error::Exported),
        }
    }
}

impl<T> From<Option<T>> for Slot<T> {
    fn from(tensors: Option<T>) -> Self {
        tensors.map_or(Self::Empty, Self::Here)
    }
}

/// What changed of what a slot holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Touched {
    #[default]
    Nothing,
    /// These entries of dimension 2 of every tensor: tokens, in most.
    Tokens(Vec<Range<usize>>),
    Everything,
}

impl Touched {
    /// More pieces than a few are not worth telling apart.
    const PIECES: usize = 4;

    /// Notes that `tokens` changed, too.
    pub fn add(&mut self, tokens: Range<usize>) {
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

/// A [`Slot`] of whatever.
pub trait AnySlot {
    /// Rows of the batch, where the slot holds any; an error where it is on the host.
    fn rows(&self) -> Result<Option<usize>>;
    fn select_rows(&mut self, rows: &[usize]);
    /// Copies the tensors to the host; they stay.
    fn read(&self, host: &mut Vec<TensorData>) -> Result<()>;
    /// Starts copying the tensors to the host, each whole or only these entries of its dimension 2.
    ///
    /// # Errors
    /// [`Error::Exported`] if they are there already.
    fn start_reading(&self, tokens: Option<&Range<usize>>) -> Result<Vec<ReadBack>>;
    /// Shapes and types of what it holds, here or away.
    fn outlines(&self) -> Vec<Outline>;
    fn is_away(&self) -> bool;
    /// See [`Tensors::BY_ROWS`].
    fn is_by_rows(&self) -> bool;
    /// Gives up the device's copy of what was read.
    fn release(&mut self);
    /// Holds nothing from now on.
    fn clear(&mut self);
    /// Takes from the front of `host` what [`import`](AnySlot::import) would, or says why it cannot.
    fn check(&self, host: &mut &[TensorData]) -> Result<()>;
    fn import(&mut self, host: &mut dyn Iterator<Item = TensorData>, device: &Device);
    /// Holds `host`, or nothing if it is empty.
    ///
    /// # Errors
    /// [`Error::Import`] if these are not as many tensors, or not of as many dimensions, as the slot holds.
    fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()>;
    fn device_bytes(&self) -> usize;
}

impl<T: Tensors> AnySlot for Slot<T> {
    fn rows(&self) -> Result<Option<usize>> {
        Ok(self.get()?.map(T::rows))
    }

    fn select_rows(&mut self, rows: &[usize]) {
        *self = match std::mem::take(self) {
            Self::Here(tensors) => Self::Here(tensors.select_rows(rows)),
            other => other,
        };
    }

    fn read(&self, host: &mut Vec<TensorData>) -> Result<()> {
        self.get()?.map_or(Ok(()), |tensors| tensors.to_host(host))
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>) -> Result<Vec<ReadBack>> {
        let mut reads = Vec::new();
        if let Some(tensors) = self.get()? {
            tensors.start_reading(tokens, &mut reads);
        }
        Ok(reads)
    }

    fn outlines(&self) -> Vec<Outline> {
        match self {
            Self::Empty => Vec::new(),
            Self::Here(tensors) => tensors.outlines(),
            Self::Away(outlines) => outlines.clone(),
        }
    }

    fn is_away(&self) -> bool {
        matches!(self, Self::Away(_))
    }

    fn is_by_rows(&self) -> bool {
        T::BY_ROWS
    }

    fn release(&mut self) {
        if let Self::Here(tensors) = self {
            *self = Self::Away(tensors.outlines());
        }
    }

    fn clear(&mut self) {
        *self = Self::Empty;
    }

    fn check(&self, host: &mut &[TensorData]) -> Result<()> {
        let Self::Away(outlines) = self else { return Ok(()) };
        let (mine, rest) = host
            .split_at_checked(outlines.len())
            .ok_or_else(|| Error::Import { why: "tensors are missing".to_owned() })?;
        for (data, (shape, dtype)) in mine.iter().zip(outlines) {
            if data.shape().as_slice() != shape || data.dtype() != *dtype {
                let (got, is) = (data.shape(), data.dtype().name());
                let why =
                    format!("{is} of shape {got:?} stands where {} of shape {shape:?} was", dtype.name());
                return Err(Error::Import { why });
            }
        }
        *host = rest;
        Ok(())
    }

    fn import(&mut self, host: &mut dyn Iterator<Item = TensorData>, device: &Device) {
        if matches!(self, Self::Away(_)) {
            *self = T::from_host(host, device).into();
        }
    }

    fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()> {
        let why = || Error::Import { why: "tensors are missing, or of the wrong rank".to_owned() };
        *self = match host.is_empty() {
            true => Self::Empty,
            false => {
                let mut host = host.into_iter();
                let tensors = T::from_host(&mut host, device).ok_or_else(why)?;
                if host.next().is_some() {
                    return Err(Error::Import { why: "tensors are left over".to_owned() });
                }
                Self::Here(tensors)
            }
        };
        Ok(())
    }

    fn device_bytes(&self) -> usize {
        match self {
            Self::Here(tensors) => tensors.bytes(),
            Self::Empty | Self::Away(_) => 0,
        }
    }
}

/// Says whether `rows` can be taken from what the slots hold.
pub(crate) fn checked_rows(slots: &[&dyn AnySlot], rows: &[usize]) -> Result<()> {
    for slot in slots {
        if let Some(have) = slot.rows()?
            && let Some(&row) = rows.iter().find(|&&row| row >= have)
        {
            return Err(Error::NoSuchRow { row, rows: have });
        }
    }
    Ok(())
}

impl<const D: usize, K: Basic + 'static> Tensors for Tensor<D, K> {
    fn outlines(&self) -> Vec<Outline> {
        vec![(self.dims().to_vec(), self.dtype())]
    }

    fn rows(&self) -> usize {
        self.dims()[0]
    }

    fn select_rows(self, rows: &[usize]) -> Self {
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let len = rows.len();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [len]), &self.device());
        self.select(0, rows)
    }

    fn to_host(&self, host: &mut Vec<TensorData>) -> Result<()> {
        host.push(read_back::read(self.clone())?);
        Ok(())
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>) {
        reads.push(read_back::start(match tokens {
            Some(tokens) => self.clone().narrow(2, tokens.start, tokens.len()),
            None => self.clone(),
        }));
    }

    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self> {
        host.next().filter(|data| data.shape().rank() == D).map(|data| {
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

    fn select_rows(self, rows: &[usize]) -> Self {
        (self.0.select_rows(rows), self.1.select_rows(rows))
    }

    fn to_host(&self, host: &mut Vec<TensorData>) -> Result<()> {
        self.0.to_host(host)?;
        self.1.to_host(host)
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

    fn select_rows(self, rows: &[usize]) -> Self {
        Self { codes: self.codes.select_rows(rows), scales: self.scales.select_rows(rows) }
    }

    fn to_host(&self, host: &mut Vec<TensorData>) -> Result<()> {
        self.codes.to_host(host)?;
        self.scales.to_host(host)
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
