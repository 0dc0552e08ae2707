//! Positions of the tokens of a forward pass.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    batch::{Batch, PreparedSteps},
    layer::{CrossLayer, KvLayer, Positions, RowPosition, StateLayer},
    model_cache::{Pass, PassRows, RowPart, SharedPart},
    need::RotaryPairs,
    read_back::moved,
    view::KvView,
};

use super::rope::{Rope, RopeKind, Ropes};

/// Arrangement of the tokens of a pass in a tensor.
#[derive(Clone, Debug)]
enum Layout {
    /// `[rows, columns, ..]`: every row has a token in every column.
    Rectangle,
    /// `[1, tokens, ..]`: the tokens of one row after those of the other, without the columns that have no
    /// token. For each row the number of its first token, then the number of all tokens.
    Flat(Vec<usize>),
}

/// Adjacent batch rows that are at one position in a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    rows: Range<usize>,
    /// Number of the first token in a flat tensor; `None` in a rectangle.
    start: Option<usize>,
    /// Number of new tokens of each row.
    new: usize,
    /// Position of the first new token.
    first: usize,
    /// The slot of position 0 and the number of slots per row, if rows share a buffer.
    region: Option<(usize, usize)>,
}

impl Frame {
    /// Merges adjacent frames with equally many new tokens into one, for code that ignores positions.
    pub(crate) fn around(frames: &[Self]) -> Option<Self> {
        let (first, last) = (frames.first()?, frames.last()?);
        Some(Self { rows: first.rows.start..last.rows.end, ..first.clone() })
    }

    /// Returns the largest number of slots that a row has in a shared buffer.
    pub(crate) fn most_slots(frames: &[Self]) -> usize {
        frames.iter().filter_map(|frame| frame.region).map(|(_, slots)| slots).max().unwrap_or(0)
    }

    pub(crate) fn new_tokens(&self) -> usize {
        self.new
    }

    /// Moves the new tokens to later positions.
    pub(crate) fn ahead(&self, tokens: usize) -> Self {
        Self { first: self.first + tokens, ..self.clone() }
    }

    /// Whether there is one new token, and there are earlier ones.
    pub(crate) fn is_one_more(&self) -> bool {
        self.new == 1 && self.first > 0
    }

    /// Slices the frame's tokens `[rows, new tokens, width]` from the tokens of the pass.
    pub(crate) fn own(&self, x: &Tensor<3>) -> Tensor<3> {
        let [batch, _, width] = x.dims();
        match self.start {
            Some(start) => {
                let tokens = x.clone().narrow(1, start, self.rows.len() * self.new);
                tokens.reshape([self.rows.len(), self.new, width])
            }
            None if self.rows.len() == batch => x.clone(),
            None => x.clone().narrow(0, self.rows.start, self.rows.len()),
        }
    }

    /// Slices the frame's tokens `[rows, heads, new tokens, head_dim]` from those of the pass,
    /// `[.., heads, tokens, head_dim]`.
    pub(crate) fn own_heads(&self, x: &Tensor<4>) -> Tensor<4> {
        let [batch, heads, _, dim] = x.dims();
        let (rows, new) = (self.rows.len(), self.new);
        match self.start {
            Some(start) if rows == 1 => x.clone().narrow(2, start, new),
            Some(start) if new == 1 => x.clone().narrow(2, start, rows).swap_dims(0, 2),
            Some(start) => {
                x.clone().narrow(2, start, rows * new).reshape([heads, rows, new, dim]).swap_dims(0, 1)
            }
            None if rows == batch => x.clone(),
            None => x.clone().narrow(0, self.rows.start, rows),
        }
    }
}

/// Keys and values of some rows that later blocks of the pass attend to, too.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// The rows, which are adjacent.
    pub(super) frames: Vec<Frame>,
    pub(super) view: KvView,
    pub(super) positions: Positions,
}

/// Positions and rotary tables of one forward pass, computed once for all layers with equal positions.
#[derive(Debug)]
pub(crate) struct Places<'a> {
    batch: &'a Batch,
    layout: Layout,
    /// Rotary positions; `None` if no block rotates keys.
    ropes: Option<&'a Ropes>,
    device: Device,
    positions: Vec<(Vec<Frame>, Positions)>,
    /// Chunks of the new tokens by their length and the frames.
    chunks: Vec<(usize, Vec<Frame>, Vec<Chunk>)>,
    /// Layer and head of each requested alignment. `alignments` collects the attention of these heads to the
    /// encoder, one tensor `[rows, heads, tokens, positions]` per layer so far.
    pub(crate) aligned: &'a [(usize, usize)],
    pub(crate) alignments: Vec<Tensor<4>>,
    /// Factors of queries, `[rows, 1, columns, 1]` or `[1, 1, tokens, 1]`; `None` if all are 1.
    temperature: Option<Tensor<4>>,
    /// Positions of queries that see all keys of an encoder, by the number of rows and of keys.
    encoded: Vec<(usize, usize, Positions)>,
    /// Rotary tables by the index of the rope and the frames.
    tables: Vec<(usize, Vec<Frame>, Tables)>,
    kept: Vec<(RopeKind, Kept)>,
}

/// Tokens of a pass that lie in one chunk of their rows, counted from the first new one, and their positions.
type Chunk = (Range<usize>, Positions);

/// A factor of queries that grows with their position: `1 + growth · ln(1 + ⌊position / length⌋)`. It keeps
/// attention sharp in long sequences (Llama 4, and Ministral 3).
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryTemperature {
    pub(crate) growth: f64,
    pub(crate) length: usize,
    /// Position of the first token.
    pub(crate) first: usize,
    /// Whether padding counts.
    pub(crate) counts_padding: bool,
}

/// Cosines and sines, `[1 or batch, new, rotated / 2]`, or of a flat pass `[1, tokens, rotated / 2]`.
pub(super) type Tables = (Tensor<3>, Tensor<3>);

impl<'a> Places<'a> {
    /// Creates the positions of a pass for blocks on `device`.
    pub(crate) fn new(batch: &'a Batch, ropes: Option<&'a Ropes>, pass: &Pass<'_>, device: &Device) -> Self {
        let skips = || pass.rows().flat_map(|PassRows { rows, skip, .. }| rows.map(move |_| skip));
        let layout = if skips().all(|skip| skip == 0) {
            Layout::Rectangle
        } else {
            let mut ends = vec![0];
            for skip in skips() {
                ends.push(ends.last().copied().unwrap_or(0) + batch.len() - skip);
            }
            Layout::Flat(ends)
        };
        Self {
            batch,
            layout,
            ropes,
            device: device.clone(),
            positions: Vec::new(),
            chunks: Vec::new(),
            aligned: &[],
            alignments: Vec::new(),
            temperature: None,
            encoded: Vec::new(),
            tables: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Keeps keys and values for later blocks with this rotation.
    pub(super) fn keep(&mut self, rope: RopeKind, kept: Kept) {
        self.kept.push((rope, kept));
    }

    /// Returns what an earlier block with this rotation [kept](Self::keep), in the order of the rows.
    pub(super) fn kept(&self, rope: RopeKind) -> Vec<Kept> {
        self.kept.iter().filter(|(of, _)| *of == rope).map(|(_, kept)| kept.clone()).collect()
    }

    /// Restricts the pass to the last token of each row, for blocks that only attend to what earlier ones
    /// [kept](Self::keep). Every row must have a token.
    pub(crate) fn keep_last(&mut self) {
        self.layout = Layout::Rectangle;
        for (_, Kept { frames, positions, .. }) in &mut self.kept {
            let before = frames.first().map_or(0, |frame| frame.new.saturating_sub(1));
            *positions = positions.behind(before);
            for frame in frames {
                *frame = Frame { start: None, new: 1, first: frame.first + before, ..frame.clone() };
            }
        }
    }

    /// Creates the frame of a part of attention.
    pub(crate) fn frame(&self, part: &RowPart<'_, dyn KvLayer>) -> Frame {
        let new = self.batch.len() - part.skip;
        self.frame_of(part.rows.clone(), part.skip, part.layer.span(new).query(new))
    }

    /// Creates the frame of a part of attention in a buffer that rows share.
    pub(crate) fn shared_frame(&self, part: &SharedPart<'_>) -> Frame {
        let new = self.batch.len() - part.skip;
        let frame = self.frame_of(part.rows.clone(), part.skip, part.layer.span(new).query(new));
        Frame { region: Some((part.base, part.slots)), ..frame }
    }

    /// Creates the frame of a part of a recurrent layer.
    pub(crate) fn state_frame(&self, part: &RowPart<'_, dyn StateLayer>) -> Frame {
        self.frame_of(part.rows.clone(), part.skip, part.layer.seq_len())
    }

    /// Creates the frame of a part of attention to an encoder, where tokens have no positions.
    pub(crate) fn encoder_frame(&self, part: &RowPart<'_, dyn CrossLayer>) -> Frame {
        self.frame_of(part.rows.clone(), part.skip, 0)
    }

    /// Keeps the attention of a layer to the encoder, `[rows, heads, tokens, positions]` of each frame.
    pub(crate) fn align(&mut self, parts: Vec<Tensor<4>>) {
        if !parts.is_empty() {
            self.alignments.push(Tensor::cat(parts, 0));
        }
    }

    /// Checks that all rows have equally many new tokens.
    ///
    /// # Errors
    /// [`Error::Prompt`] if they have not.
    pub(crate) fn check_even(&self) -> Result<()> {
        match self.layout {
            Layout::Rectangle => Ok(()),
            Layout::Flat(_) => {
                let why = "alignments need rows with equally many tokens; feed the rows one after another";
                Err(Error::Prompt { why: why.to_owned() })
            }
        }
    }

    fn frame_of(&self, rows: Range<usize>, skip: usize, first: usize) -> Frame {
        let start = match &self.layout {
            Layout::Rectangle => None,
            Layout::Flat(ends) => Some(ends[rows.start]),
        };
        Frame { rows, start, new: self.batch.len() - skip, first, region: None }
    }

    /// Returns the tokens of the pass, `[rows, columns]` or `[1, tokens]`.
    ///
    /// # Errors
    /// The errors of [`moved`].
    pub(crate) fn tokens(&self) -> Result<Tensor<2, Int>> {
        let tokens = moved(self.batch.tokens.clone(), &self.device)?;
        let Layout::Flat(ends) = &self.layout else { return Ok(tokens) };
        let [rows, columns] = tokens.dims();
        let of_row = |row: usize| (row + 1) * columns - (ends[row + 1] - ends[row])..(row + 1) * columns;
        let numbers = (0..rows).flat_map(of_row).collect();
        Ok(tokens.reshape([1, rows * columns]).select(1, self.numbers(numbers)))
    }

    /// Returns the last token of each row, `[rows, 1, width]`.
    pub(crate) fn last(&self, x: Tensor<3>) -> Tensor<3> {
        let [_, tokens, width] = x.dims();
        let Layout::Flat(ends) = &self.layout else { return x.narrow(1, tokens - 1, 1) };
        let rows = ends.len() - 1;
        // A row without tokens gets any.
        let last = ends[1..].iter().map(|end| end.saturating_sub(1)).collect();
        x.select(1, self.numbers(last)).reshape([rows, 1, width])
    }

    /// Returns `[rows, columns, width]`; columns without a token are 0.
    pub(crate) fn whole(&self, x: Tensor<3>) -> Tensor<3> {
        let Layout::Flat(ends) = &self.layout else { return x };
        let (columns, width) = (self.batch.len(), x.dims()[2]);
        let mut parts = Vec::new();
        for row in ends.windows(2) {
            let own = row[1] - row[0];
            if own < columns {
                parts.push(Tensor::zeros([1, columns - own, width], (&x.device(), x.dtype())));
            }
            if own > 0 {
                parts.push(x.clone().narrow(1, row[0], own));
            }
        }
        Tensor::cat(parts, 1).reshape([ends.len() - 1, columns, width])
    }

    /// Joins the results of the frames that have new tokens, `[rows, new tokens, width]` each.
    pub(crate) fn joined(&self, mut parts: Vec<Tensor<3>>) -> Tensor<3> {
        match self.layout {
            Layout::Rectangle if parts.len() == 1 => parts.remove(0),
            Layout::Rectangle => Tensor::cat(parts, 0),
            Layout::Flat(_) => {
                let flat = parts.into_iter().map(|part| {
                    let [rows, new, width] = part.dims();
                    part.reshape([1, rows * new, width])
                });
                Tensor::cat(flat.collect(), 1)
            }
        }
    }

    /// Joins the results of attention of the frames that have new tokens, `[rows, heads, new tokens,
    /// head_dim]` each, and the heads of each token.
    pub(crate) fn joined_heads(&self, mut parts: Vec<Tensor<4>>) -> Tensor<3> {
        let heads_of = |part: Tensor<4>| {
            let [rows, heads, new, dim] = part.dims();
            part.swap_dims(1, 2).reshape([rows, new, heads * dim])
        };
        match self.layout {
            Layout::Rectangle if parts.len() == 1 => heads_of(parts.remove(0)),
            Layout::Rectangle => heads_of(Tensor::cat(parts, 0)),
            Layout::Flat(_) => self.joined(parts.into_iter().map(heads_of).collect()),
        }
    }

    fn numbers(&self, numbers: Vec<usize>) -> Tensor<1, Int> {
        let numbers: Vec<i32> = numbers.into_iter().map(|number| number as i32).collect();
        let len = numbers.len();
        Tensor::from_data(TensorData::new(numbers, [len]), &self.device)
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

    /// Divides the new tokens of adjacent frames, equally many in each, where a chunk of `len` tokens begins
    /// in any row. Each part has positions from which a row sees only its own chunk.
    pub(super) fn chunks(&mut self, frames: &[Frame], len: usize) -> Vec<Chunk> {
        if let Some((.., chunks)) = self.chunks.iter().find(|(of, known, _)| *of == len && known == frames) {
            return chunks.clone();
        }
        let positions = self.positions(frames);
        let begin = |row: &RowPosition, token: usize| {
            let seen = (row.first + token).saturating_sub(row.visible_from);
            row.visible_from + seen / len * len
        };
        let new = frames.first().map_or(0, Frame::new_tokens);
        let rows = &positions.on_host;
        let changes = |token: &usize| rows.iter().any(|row| begin(row, *token) != begin(row, token - 1));
        let cuts: Vec<usize> =
            std::iter::once(0).chain((1..new).filter(changes)).chain(std::iter::once(new)).collect();
        let at = |token: usize| {
            let place = |row: &RowPosition| RowPosition {
                first: row.first + token,
                visible_from: begin(row, token),
                ..*row
            };
            let on_host: Vec<RowPosition> = rows.iter().map(place).collect();
            if on_host[..] == rows[..] {
                return positions.clone();
            }
            match frames.iter().all(|frame| self.steps(frame).is_some()) {
                // Computed on the device, so that a captured step can do it.
                true => {
                    let [first, padding, base] =
                        [0, 1, 2].map(|which| positions.on_device.clone().narrow(0, which, 1));
                    let seen = (first.clone() - padding.clone()).clamp_min(0);
                    let visible_from = padding + seen.div_scalar(len as i64).mul_scalar(len as i64);
                    let on_device = Tensor::cat(vec![first, visible_from, base], 0);
                    Positions { on_device, on_host: on_host.into() }
                }
                false => Positions::new(on_host, &self.device),
            }
        };
        let chunks: Vec<Chunk> = cuts.windows(2).map(|cut| (cut[0]..cut[1], at(cut[0]))).collect();
        self.chunks.push((len, frames.to_vec(), chunks.clone()));
        chunks
    }

    /// Computes the factors of queries.
    pub(crate) fn set_temperature(&mut self, temperature: QueryTemperature, pass: &Pass<'_>) {
        let QueryTemperature { growth, length, first, counts_padding } = temperature;
        let end = |PassRows { skip, seen, .. }| first + seen + self.batch.len() - skip;
        // The positions of prepared steps grow.
        if self.batch.steps.is_none() && pass.rows().map(end).all(|end| end <= length) {
            return;
        }
        let positions = self.token_positions(pass, counts_padding).add_scalar(first as i64);
        let turns = positions.div_scalar(length as i64).float().cast(DType::F32);
        let [rows, tokens] = turns.dims();
        self.temperature = Some(((turns.log1p() * growth) + 1.0).reshape([rows, 1, tokens, 1]));
    }

    /// Multiplies queries, `[.., heads, tokens, head_dim]`, by their factors.
    pub(crate) fn tempered(&self, queries: Tensor<4>) -> Tensor<4> {
        match &self.temperature {
            Some(factors) => {
                let factors = factors.clone().cast(queries.dtype());
                queries * factors
            }
            None => queries,
        }
    }

    /// Returns the position of every token, `[rows, columns]` or `[1, tokens]`.
    pub(crate) fn token_positions(&self, pass: &Pass<'_>, counts_padding: bool) -> Tensor<2, Int> {
        let rows = self.batch.rows();
        let frames: Vec<Frame> =
            pass.rows().map(|PassRows { rows, skip, seen }| self.frame_of(rows, skip, seen)).collect();
        if let Some(steps) = frames.iter().map(|frame| self.steps(frame)).collect::<Option<Vec<_>>>()
            && let Some(steps) = steps.first()
        {
            let [first, visible_from] =
                [0, 1].map(|which| steps.positions.on_device.clone().narrow(0, which, 1));
            let positions = if counts_padding { first } else { (first - visible_from).clamp_min(0) };
            return positions.reshape([rows, 1]);
        }
        let all = |frame: &Frame| -> Vec<usize> {
            let own = frame.first..frame.first + frame.new;
            frame.rows.clone().flat_map(|_| own.clone()).collect()
        };
        let unpadded =
            |frame| self.unpadded(frame).into_iter().flat_map(|(_, positions)| positions).collect();
        let positions: Vec<i32> = frames
            .iter()
            .flat_map(|frame| if counts_padding { all(frame) } else { unpadded(frame) })
            .map(|position| position as i32)
            .collect();
        let shape = match self.layout {
            Layout::Rectangle => [rows, self.batch.len()],
            Layout::Flat(_) => [1, positions.len()],
        };
        Tensor::from_data(TensorData::new(positions, shape), &self.device)
    }

    /// Returns each row of a frame with the positions of its new tokens, not counting padding.
    fn unpadded(&self, frame: &Frame) -> Vec<(usize, Vec<usize>)> {
        let of_row = |row: usize| {
            let slots = frame.first..frame.first + frame.new;
            (row, slots.map(|slot| slot.saturating_sub(self.batch.left_pad[row])).collect())
        };
        frame.rows.clone().map(of_row).collect()
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

    /// Returns the dimensions that a block with this rotation rotates together.
    pub(crate) fn pairs(&self, rope: Option<RopeKind>) -> RotaryPairs {
        self.ropes.zip(rope).map_or(RotaryPairs::Halves, |(ropes, kind)| ropes.of(kind).pairs())
    }

    /// Returns the rotary tables of all columns, for a block with this rotation; `None` if it has none.
    pub(crate) fn rotary(&mut self, frames: &[Frame], rope: Option<RopeKind>) -> Option<Tables> {
        let (ropes, rope) = self.ropes.zip(rope)?;
        let kind = ropes.index(rope);
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
        let tables = prepared.unwrap_or_else(|| self.upload(frames, ropes.of(rope)));
        self.tables.push((kind, frames.to_vec(), tables.clone()));
        Some(tables)
    }

    /// Returns the precomputed steps on the device, if they match this frame.
    fn steps(&self, frame: &Frame) -> Option<&'a PreparedSteps> {
        let steps = self.batch.steps.as_ref().filter(|_| frame.new == 1 && frame.start.is_none())?;
        if steps.taken.device() != self.device {
            return None;
        }
        let rows = &steps.positions.on_host[frame.rows.clone()];
        rows.iter().all(|row| row.first == frame.first).then_some(steps)
    }

    fn upload(&self, frames: &[Frame], rope: &Rope) -> Tables {
        let mut rows = Vec::with_capacity(self.batch.rows());
        for frame in frames {
            let left_pad = &self.batch.left_pad[frame.rows.clone()];
            let shortest_pad = left_pad.iter().min().copied().unwrap_or(0);
            let end = frame.first + frame.new;
            for (row, positions) in self.unpadded(frame) {
                let horizon = self.batch.horizon.get(row).copied().unwrap_or(0);
                rows.push((positions, end.max(horizon).saturating_sub(shortest_pad)));
            }
        }
        match self.layout {
            Layout::Rectangle => {
                // If all rows are equal, they share one table.
                if rows.windows(2).all(|pair| pair[0] == pair[1]) {
                    rows.truncate(1);
                }
                rope.tables(&rows, &self.device)
            }
            Layout::Flat(_) => rope.flat_tables(&rows, &self.device),
        }
    }
}
