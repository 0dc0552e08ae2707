//! Positions of the tokens of a forward pass.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_core::{
    batch::{Batch, Steps},
    layer::{KvLayer, Positions, RowPosition, StateLayer},
    model_cache::{Pass, PassRows, RowPart, SharedPart},
};

use super::rope::{Rope, Ropes};

/// Adjacent batch rows that are at one position in a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    rows: Range<usize>,
    /// Number of columns before the first new token.
    skip: usize,
    /// Number of all columns.
    columns: usize,
    /// Position of the first new token.
    first: usize,
    /// The slot of position 0 and the number of slots per row, if rows share a buffer.
    region: Option<(usize, usize)>,
}

impl Frame {
    pub(crate) fn of(part: &RowPart<'_, dyn KvLayer>, columns: usize) -> Self {
        let new = columns - part.skip;
        let first = part.layer.span(new).query(new);
        Self { rows: part.rows.clone(), skip: part.skip, columns, first, region: None }
    }

    pub(crate) fn of_shared(part: &SharedPart<'_>, columns: usize) -> Self {
        let new = columns - part.skip;
        let first = part.layer.span(new).query(new);
        let region = Some((part.base, part.slots));
        Self { rows: part.rows.clone(), skip: part.skip, columns, first, region }
    }

    /// Merges adjacent frames with equally many new tokens into one, for code that ignores positions.
    pub(crate) fn around(frames: &[Self]) -> Option<Self> {
        let (first, last) = (frames.first()?, frames.last()?);
        Some(Self { rows: first.rows.start..last.rows.end, ..first.clone() })
    }

    /// Returns the largest number of slots that a row has in a shared buffer.
    pub(crate) fn most_slots(frames: &[Self]) -> usize {
        frames.iter().filter_map(|frame| frame.region).map(|(_, slots)| slots).max().unwrap_or(0)
    }

    /// Creates the frame of a part of a recurrent layer.
    pub(crate) fn of_state(part: &RowPart<'_, dyn StateLayer>, columns: usize) -> Self {
        Self { rows: part.rows.clone(), skip: part.skip, columns, first: part.layer.seq_len(), region: None }
    }

    pub(crate) fn new_tokens(&self) -> usize {
        self.columns - self.skip
    }

    /// Slices the frame's rows and new tokens from `[batch, .., columns, width]`.
    pub(crate) fn own<const D: usize>(&self, x: &Tensor<D>) -> Tensor<D> {
        let x = match self.rows.len() == x.dims()[0] {
            true => x.clone(),
            false => x.clone().narrow(0, self.rows.start, self.rows.len()),
        };
        if self.skip == 0 { x } else { x.narrow(D - 2, self.skip, self.new_tokens()) }
    }

    /// Pads `[rows, .., new tokens, width]` to all columns; columns without a token are 0.
    pub(crate) fn whole<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if self.skip == 0 { x } else { Tensor::cat(vec![self.nothing(&x), x], D - 2) }
    }

    /// Returns zeros for the columns without a token, otherwise in the shape and type of `x`.
    pub(crate) fn nothing<const D: usize>(&self, x: &Tensor<D>) -> Tensor<D> {
        let mut shape = x.dims();
        (shape[0], shape[D - 2]) = (self.rows.len(), self.skip);
        Tensor::zeros(shape, (&x.device(), x.dtype()))
    }
}

/// Positions and rotary tables of one forward pass, computed once for all layers with equal positions.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    batch: &'a Batch,
    /// Rotary positions; `None` if keys are not rotated.
    ropes: Option<&'a Ropes>,
    device: Device,
    positions: Vec<(Vec<Frame>, Positions)>,
    /// Layer and head of each requested alignment. `alignments` collects the attention of these heads to the
    /// encoder, one tensor `[rows, heads, tokens, positions]` per layer so far.
    pub(crate) aligned: &'a [(usize, usize)],
    pub(crate) alignments: Vec<Tensor<4>>,
    /// Positions of queries that see all keys of an encoder, by the number of rows and of keys.
    encoded: Vec<(usize, usize, Positions)>,
    /// Rotary tables by the kind of rope and the frames.
    tables: Vec<(usize, Vec<Frame>, Tables)>,
}

/// Cosines and sines, `[1 or batch, new, rotated / 2]`.
pub(super) type Tables = (Tensor<3>, Tensor<3>);

impl<'a> Places<'a> {
    pub(crate) fn new(batch: &'a Batch, ropes: Option<&'a Ropes>) -> Self {
        let device = batch.tokens.device();
        Self {
            batch,
            ropes,
            device,
            positions: Vec::new(),
            aligned: &[],
            alignments: Vec::new(),
            encoded: Vec::new(),
            tables: Vec::new(),
        }
    }

    /// Returns the positions of the new tokens in adjacent frames.
    pub(crate) fn positions(&mut self, frames: &[Frame]) -> Positions {
        if let Some((_, positions)) = self.positions.iter().find(|(known, _)| known == frames) {
            return positions.clone();
        }
        let of_frame = |frame: &Frame| {
            let (base, slots) = frame.region.unwrap_or_default();
            let (first, left_pad) = (frame.first, self.batch.left_pad[frame.rows.clone()].to_vec());
            let row =
                move |(row, visible_from)| RowPosition { first, visible_from, base: base + row * slots };
            left_pad.into_iter().enumerate().map(row)
        };
        let rows: Vec<RowPosition> = frames.iter().flat_map(of_frame).collect();
        let range = frames.first().map_or(0, |frame| frame.rows.start)
            ..frames.last().map_or(0, |frame| frame.rows.end);
        let prepared = frames.iter().all(|frame| self.steps(frame).is_some());
        let steps = self.batch.steps.as_ref().filter(|_| prepared).map(|steps| steps.positions.narrow(range));
        let positions = match steps {
            Some(steps) if steps.on_host[..] == rows => steps,
            // Rows share buffers in other blocks. Computed on the device, so that a captured step can do it.
            Some(steps) if frames.iter().all(|frame| frame.region.is_none()) => {
                let places = steps.on_device.clone().narrow(0, 0, 2);
                let bases = Tensor::<2, Int>::zeros([1, rows.len()], (&self.device, DType::I32));
                Positions { on_device: Tensor::cat(vec![places, bases], 0), on_host: rows.into() }
            }
            _ => Positions::new(rows, &self.device),
        };
        self.positions.push((frames.to_vec(), positions.clone()));
        positions
    }

    /// Returns the position of every token, `[rows, columns]`, not counting padding: the index into a table
    /// of learned positions. Columns without a token have an arbitrary position.
    pub(crate) fn learned(&self, pass: &Pass<'_>) -> Tensor<2, Int> {
        let rows = self.batch.rows();
        let frames = pass.rows().map(|PassRows { rows, skip, seen }| Frame {
            rows,
            skip,
            columns: self.batch.len(),
            first: seen,
            region: None,
        });
        let frames: Vec<Frame> = frames.collect();
        if let Some(steps) = frames.iter().map(|frame| self.steps(frame)).collect::<Option<Vec<_>>>()
            && let Some(steps) = steps.first()
        {
            let [first, visible_from] =
                [0, 1].map(|which| steps.positions.on_device.clone().narrow(0, which, 1));
            return (first - visible_from).clamp_min(0).reshape([rows, 1]);
        }
        let mut positions: Vec<i32> = Vec::with_capacity(rows * self.batch.len());
        for frame in &frames {
            for pad in &self.batch.left_pad[frame.rows.clone()] {
                let before = frame.skip + pad;
                let columns = frame.first..frame.first + frame.columns;
                positions.extend(columns.map(|slot| slot.saturating_sub(before) as i32));
            }
        }
        Tensor::from_data(TensorData::new(positions, [rows, self.batch.len()]), &self.device)
    }

    /// Returns the positions of `rows` rows of queries that all see `keys` keys.
    pub(crate) fn behind(&mut self, rows: usize, keys: usize) -> Positions {
        if let Some((.., positions)) = self.encoded.iter().find(|(r, k, _)| (*r, *k) == (rows, keys)) {
            return positions.clone();
        }
        let last = RowPosition { first: keys.saturating_sub(1), ..RowPosition::default() };
        // Computed on the device, so that a captured step can do it.
        let numbers =
            |number: usize| Tensor::<2, Int>::full([1, rows], number as i64, (&self.device, DType::I32));
        let on_device = Tensor::cat(vec![numbers(last.first), numbers(0), numbers(0)], 0);
        let positions = Positions { on_device, on_host: vec![last; rows].into() };
        self.encoded.push((rows, keys, positions.clone()));
        positions
    }

    /// Returns the rotary tables of all columns, for a block with this window; `None` if keys are not
    /// rotated.
    pub(crate) fn rotary(&mut self, frames: &[Frame], window: Option<usize>) -> Option<Tables> {
        let ropes = self.ropes?;
        let kind = ropes.kind(window);
        let known = |(of, at, _): &&(usize, Vec<Frame>, Tables)| *of == kind && at[..] == *frames;
        if let Some((.., tables)) = self.tables.iter().find(known) {
            return Some(tables.clone());
        }
        let steps = frames.iter().map(|frame| self.steps(frame)).collect::<Option<Vec<_>>>();
        let prepared = steps.and_then(|steps| {
            let steps = steps.first()?;
            let (cos, sin) = steps.tables.get(kind)?;
            let taken = steps.taken.clone();
            Some((cos.clone().select(1, taken.clone()), sin.clone().select(1, taken)))
        });
        let tables = prepared.unwrap_or_else(|| self.upload(frames, ropes.of(window)));
        self.tables.push((kind, frames.to_vec(), tables.clone()));
        Some(tables)
    }

    /// Returns the precomputed steps on the device, if they match this frame.
    fn steps(&self, frame: &Frame) -> Option<&'a Steps> {
        let steps = self.batch.steps.as_ref().filter(|_| frame.columns == 1 && frame.skip == 0)?;
        let rows = &steps.positions.on_host[frame.rows.clone()];
        rows.iter().all(|row| row.first == frame.first).then_some(steps)
    }

    fn upload(&self, frames: &[Frame], rope: &Rope) -> Tables {
        let mut rows = Vec::with_capacity(self.batch.rows());
        for frame in frames {
            let left_pad = &self.batch.left_pad[frame.rows.clone()];
            let shortest_pad = left_pad.iter().min().copied().unwrap_or(0);
            let end = frame.first + frame.new_tokens();
            for (row, pad) in frame.rows.clone().zip(left_pad) {
                // Slots count padding, but rotary positions do not.
                let before = frame.skip + pad;
                let columns = frame.first..frame.first + frame.columns;
                let horizon = self.batch.horizon.get(row).copied().unwrap_or(0);
                let len = end.max(horizon).saturating_sub(shortest_pad);
                rows.push((columns.map(|slot| slot.saturating_sub(before)).collect::<Vec<_>>(), len));
            }
        }
        // If all rows are equal, they share one table.
        if rows.windows(2).all(|pair| pair[0] == pair[1]) {
            rows.truncate(1);
        }
        rope.tables(&rows, &self.device)
    }
}
