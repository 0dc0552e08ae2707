//! A batch of tokens to feed to a model.

use std::{ops::Range, sync::Arc};

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::{
    Error, Result,
    layer::{Positions, RowPosition},
    model::{CausalModel, FeatureShape, TokenId},
    model_cache::ModelCache,
};

/// A batch of new tokens: one row per sequence, aligned at the last column.
///
/// Shorter rows have leading columns without tokens of their own. These columns are either padding that is
/// stored, as in transformers, and hidden ([`left_padded`](Self::left_padded)), or they are skipped, and the
/// rows differ in length ([`ragged`](Self::ragged)).
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[rows, tokens]`
    pub tokens: Tensor<2, Int>,
    /// Padding slots at the start of each row's sequence (not of this batch). Slots count padding, rotary
    /// positions do not.
    pub left_pad: Vec<usize>,
    /// Number of leading columns of each row in this batch that are skipped: nothing is stored for them.
    pub skip: Vec<usize>,
    /// Number of slots that each row is known to reach with this prompt; empty where that is not known.
    ///
    /// Rotary frequencies that depend on the length are chosen for this number, so that a prompt fed in
    /// chunks equals the prompt fed whole.
    pub horizon: Vec<usize>,
    /// Positions and tables that are on the device already, for a step of one token; `None`: the pass uploads
    /// its positions.
    pub steps: Option<PreparedSteps>,
    /// Input of the model's encoder, `[rows, bins, frames]` ([`CausalModel::features`]). `None` if the model
    /// has no encoder, or if the cache already holds the encoder's output.
    pub features: Option<Tensor<3>>,
}

/// Positions of the next one-token steps, uploaded once for many steps, so that a step uploads nothing and
/// can be captured.
#[derive(Clone, Debug)]
pub struct PreparedSteps {
    /// Positions of the next tokens; every step advances them on the device.
    pub positions: Positions,
    /// Increment that a step adds to the positions on the device, `[3, rows]`.
    one: Tensor<2, Int>,
    /// Number of steps taken, `[1]`, counted on the device.
    pub taken: Tensor<1, Int>,
    /// Number of steps that the tables still cover.
    left: usize,
    /// Cosines and sines `[1 or rows, steps, pairs]`, one pair for each kind of rotary positions of the
    /// model.
    pub tables: Vec<(Tensor<3>, Tensor<3>)>,
}

impl PreparedSteps {
    /// Prepares `number` steps for rows at the positions `rows`.
    pub fn new(model: &dyn CausalModel, rows: Vec<RowPosition>, number: usize, device: &Device) -> Self {
        let one = [vec![1i32; rows.len()], vec![0; 2 * rows.len()]].concat();
        Self {
            one: Tensor::<1, Int>::from_data(TensorData::new(one, [3 * rows.len()]), device)
                .reshape([3, rows.len()]),
            taken: Tensor::from_data(TensorData::new(vec![0i32], [1]), device),
            left: number,
            tables: model.rotary_tables(&rows, number, device),
            positions: Positions::new(rows, device),
        }
    }

    /// Whether the tables cover another step.
    pub fn has_next(&self) -> bool {
        self.left > 0
    }

    /// Advances the positions, on the device and on the host, after a step was launched.
    pub fn advance(&mut self) {
        self.replayed();
        let one = self.one.clone();
        self.positions.on_device.inplace(|positions| positions + one);
        self.taken.inplace(|taken| taken + 1);
    }

    /// Advances the counts on the host after a recorded step was replayed; the replay advances those on the
    /// device.
    pub fn replayed(&mut self) {
        self.left = self.left.saturating_sub(1);
        Arc::make_mut(&mut self.positions.on_host).iter_mut().for_each(|row| row.first += 1);
    }
}

impl Batch {
    /// Creates a batch from rows of equal length.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the rows are empty or differ in length.
    pub fn from_rows(rows: &[Vec<TokenId>], device: &Device) -> Result<Self> {
        let len = rows.first().map_or(0, Vec::len);
        if len == 0 || rows.iter().any(|row| row.len() != len) {
            return Err(Error::Prompt {
                why: "a batch needs rows of equal length, at least one token".into(),
            });
        }
        Ok(Self::new(upload(rows.iter().flatten(), rows.len(), len, device)))
    }

    /// Creates a batch from rows of any length, the shorter ones padded on the left with `pad`, as in
    /// transformers: padding is stored, and hidden.
    pub fn left_padded(rows: &[Vec<TokenId>], pad: TokenId, device: &Device) -> Result<Self> {
        let batch = Self::ragged(rows, pad, device)?;
        let horizon = vec![batch.len(); batch.rows()];
        Ok(Self { left_pad: batch.skip, skip: batch.left_pad, horizon, ..batch })
    }

    /// Creates a batch from rows of any length, each treated as if it were alone. `fill` is any token.
    pub fn ragged(rows: &[Vec<TokenId>], fill: TokenId, device: &Device) -> Result<Self> {
        if rows.is_empty() || rows.iter().any(Vec::is_empty) {
            return Err(Error::Prompt { why: "the prompt is empty; give at least one token".into() });
        }
        let len = rows.iter().map(Vec::len).max().unwrap_or(0);
        let skip: Vec<usize> = rows.iter().map(|row| len - row.len()).collect();
        let filled = rows.iter().zip(&skip).flat_map(|(row, &n)| std::iter::repeat_n(&fill, n).chain(row));
        let tokens = upload(filled, rows.len(), len, device);
        let horizon = rows.iter().map(Vec::len).collect();
        Ok(Self { skip, horizon, ..Self::new(tokens) })
    }

    /// Creates a batch from all of `tokens`, `[rows, tokens]`, that continues sequences without padding.
    pub fn new(tokens: Tensor<2, Int>) -> Self {
        let [rows, len] = tokens.dims();
        let none = || vec![0; rows];
        Self { tokens, left_pad: none(), skip: none(), horizon: vec![len; rows], steps: None, features: None }
    }

    /// Checks the per-row fields, and that there are tokens.
    ///
    /// # Errors
    /// [`Error::Prompt`] unless every per-row field has one entry per row and some row has a token.
    pub(crate) fn check(&self) -> Result<()> {
        let [rows, len] = self.tokens.dims();
        let (pads, skips) = (self.left_pad.len(), self.skip.len());
        if (pads, skips) != (rows, rows) {
            let why = format!("the batch has {rows} rows, paddings of {pads} and skipped columns of {skips}");
            return Err(Error::Prompt { why });
        }
        if rows == 0 || self.skip.iter().all(|&skip| skip >= len) {
            return Err(Error::Prompt { why: "the batch has no token".to_owned() });
        }
        Ok(())
    }

    /// Checks that the features are of the shape that the model takes ([`CausalModel::features`]), and that
    /// the cache does not hold the encoder's output already.
    ///
    /// # Errors
    /// [`Error::Prompt`] for features that are missing, or not of the model's shape;
    /// [`Error::AlreadyConditioned`].
    pub fn check_features(&self, wanted: Option<FeatureShape>, cache: &ModelCache) -> Result<()> {
        let why = match (&self.features, wanted) {
            (None, None) => return Ok(()),
            (None, Some(_)) if cache.is_conditioned() => return Ok(()),
            (None, Some(FeatureShape { bins, frames })) => {
                let rows = self.rows();
                format!(
                    "the model has an encoder and was given nothing to encode; give features [{rows}, {bins}, {frames}]"
                )
            }
            (Some(_), None) => "the model has no encoder; leave the features out".to_owned(),
            (Some(_), Some(_)) if cache.is_conditioned() => return Err(Error::AlreadyConditioned),
            (Some(features), Some(FeatureShape { bins, frames })) => {
                let (given, wanted) = (features.dims(), [self.rows(), bins, frames]);
                if given == wanted {
                    return Ok(());
                }
                format!("the encoder takes features {wanted:?} and was given {given:?}")
            }
        };
        Err(Error::Prompt { why })
    }

    /// Number of columns of this batch, which is the number of tokens of its longest row.
    #[allow(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        self.tokens.dims()[1]
    }

    pub fn rows(&self) -> usize {
        self.tokens.dims()[0]
    }

    /// Returns the columns of `range`.
    pub fn slice(&self, range: Range<usize>) -> Self {
        let tokens = self.tokens.clone().narrow(1, range.start, range.len());
        let skip = self.skip.iter().map(|skip| skip.saturating_sub(range.start).min(range.len())).collect();
        let (left_pad, horizon) = (self.left_pad.clone(), self.horizon.clone());
        // The encoder runs once, with the first tokens.
        let features = self.features.clone().filter(|_| range.start == 0);
        Self { tokens, left_pad, skip, horizon, steps: None, features }
    }

    /// Returns other columns for each row, aligned at the last column.
    pub fn columns(&self, of_rows: &[Range<usize>]) -> Self {
        let len = of_rows.iter().map(Range::len).max().unwrap_or(0);
        if let Some(first) = of_rows.first()
            && of_rows.iter().all(|columns| columns == first)
        {
            return self.slice(first.clone());
        }
        let row = |(row, columns): (usize, &Range<usize>)| {
            let tokens = self.tokens.clone().narrow(0, row, 1);
            let own = (!columns.is_empty()).then(|| tokens.clone().narrow(1, columns.start, columns.len()));
            // Any token will do as a filler.
            let fill = len - columns.len();
            let fill = (fill > 0).then(|| tokens.narrow(1, 0, 1).repeat(&[1, fill]));
            Tensor::cat(fill.into_iter().chain(own).collect(), 1)
        };
        let tokens = Tensor::cat(of_rows.iter().enumerate().map(row).collect(), 0);
        let skip = of_rows.iter().zip(&self.skip).map(|(columns, skip)| {
            len - columns.len() + skip.saturating_sub(columns.start).min(columns.len())
        });
        Self {
            tokens,
            skip: skip.collect(),
            left_pad: self.left_pad.clone(),
            horizon: self.horizon.clone(),
            steps: None,
            features: self.features.clone().filter(|_| of_rows.iter().any(|columns| columns.start == 0)),
        }
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
