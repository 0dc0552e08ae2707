//! Tokens on their way into a model.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{
    Error, Result,
    layer::Positions,
    model::{CausalModel, TokenId},
};

/// Tokens of several rows, shorter rows padded on the left.
///
/// Slots count padding, rotary positions do not, masks hide it. So the padding travels with the tokens, and never
/// a bare tensor.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[rows, tokens]`
    pub tokens: Tensor<2, Int>,
    /// Padding slots at the start of each row's sequence (not of this batch).
    pub left_pad: Vec<usize>,
    /// Slots that the sequence is known to reach with this prompt, 0 if that is not known.
    ///
    /// Rotary frequencies that depend on the length are chosen for it, so that a prompt fed in chunks equals the
    /// prompt fed whole.
    pub horizon: usize,
    /// What is on the device already for a step of one token; `None`: the pass uploads its positions.
    pub steps: Option<Steps>,
}

/// Where the next steps of one token each stand, put on the device once for many of them: so a step uploads nothing,
/// and can be captured.
#[derive(Clone, Debug)]
pub struct Steps {
    /// Slot of the next token.
    pub next: usize,
    /// Positions of the next tokens; every step advances them on the device.
    pub positions: Positions,
    /// What a step adds to them there, `[2, rows]`.
    one: Tensor<2, Int>,
    /// Slots that the tables are for.
    pub slots: Range<usize>,
    /// Cosines and sines `[1 or rows, slots, pairs]`, for each kind of rotary positions that the model has.
    pub tables: Vec<(Tensor<3>, Tensor<3>)>,
}

impl Steps {
    /// Prepares the steps that feed `slots`.
    pub fn new(model: &dyn CausalModel, slots: Range<usize>, left_pad: &[usize], device: &Device) -> Self {
        let rows = left_pad.len();
        let one = [vec![1i32; rows], vec![0; rows]].concat();
        Self {
            next: slots.start,
            positions: Positions::even(slots.start, left_pad, device),
            one: Tensor::from_data(TensorData::new(one, [2, rows]), device),
            tables: model.rotary_tables(slots.clone(), left_pad, device),
            slots,
        }
    }

    /// Steps between the first slot of the tables and the next token, `[1]`.
    pub fn taken(&self) -> Tensor<1, Int> {
        self.positions.on_device.clone().slice([0..1, 0..1]).reshape([1]) - self.slots.start as i64
    }

    /// After a step was launched.
    pub fn advance(&mut self) {
        self.launched();
        let one = self.one.clone();
        self.positions.on_device.inplace(|positions| positions + one);
    }

    /// After a recorded step was replayed, which advances what is on the device.
    pub fn launched(&mut self) {
        self.next += 1;
        self.positions.on_host.iter_mut().for_each(|row| row.first += 1);
    }
}

impl Batch {
    /// Rows of equal length, nothing padded.
    pub fn from_rows(rows: &[Vec<TokenId>], device: &Device) -> Result<Self> {
        let len = rows.first().map_or(0, Vec::len);
        if len == 0 || rows.iter().any(|row| row.len() != len) {
            return Err(Error::Prompt {
                why: "a batch needs rows of equal length, at least one token".into(),
            });
        }
        Ok(Self {
            tokens: upload(rows.iter().flatten(), rows.len(), len, device),
            left_pad: vec![0; rows.len()],
            horizon: len,
            steps: None,
        })
    }

    /// Rows of any length, the shorter ones padded on the left with `pad`.
    pub fn left_padded(rows: &[Vec<TokenId>], pad: TokenId, device: &Device) -> Result<Self> {
        if rows.is_empty() || rows.iter().any(Vec::is_empty) {
            return Err(Error::Prompt { why: "the prompt is empty; give at least one token".into() });
        }
        let len = rows.iter().map(Vec::len).max().unwrap_or(0);
        let left_pad: Vec<usize> = rows.iter().map(|row| len - row.len()).collect();
        let padded = rows.iter().zip(&left_pad).flat_map(|(row, &n)| std::iter::repeat_n(&pad, n).chain(row));
        Ok(Self { tokens: upload(padded, rows.len(), len, device), left_pad, horizon: len, steps: None })
    }

    /// Tokens of each row in this batch.
    #[allow(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        self.tokens.dims()[1]
    }

    pub fn rows(&self) -> usize {
        self.tokens.dims()[0]
    }

    /// The same rows, with only the tokens of `range`.
    pub fn slice(&self, range: Range<usize>) -> Self {
        let tokens = self.tokens.clone().narrow(1, range.start, range.len());
        Self { tokens, left_pad: self.left_pad.clone(), horizon: self.horizon, steps: None }
    }
}

fn upload<'a>(
    tokens: impl Iterator<Item = &'a TokenId>,
    rows: usize,
    len: usize,
    device: &Device,
) -> Tensor<2, Int> {
    // Vocabularies are capped far below 2^31 where checkpoints are read.
    let tokens: Vec<i32> = tokens.map(|&t| t as i32).collect();
    Tensor::from_data(TensorData::new(tokens, [rows, len]), device)
}
