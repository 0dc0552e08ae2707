//! Pooling: the vectors of all tokens of a text become one.

use std::{fmt, ops::Range, str::FromStr};

use burn::tensor::{Tensor, TensorData};
use kiln_core::{Error, Result};
use kiln_kernels::product;

/// How the vectors of the tokens of a text become one vector (`Pooling` of sentence-transformers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The vector of the first token
    Cls,
    /// The vector of the last token
    LastToken,
    /// The largest number of each channel
    Max,
    /// The mean
    Mean,
    /// The sum, divided by the root of the number of tokens
    MeanSqrtLen,
    /// The mean with weights 1, 2, 3 and so on
    WeightedMean,
}

impl Pooling {
    /// Names, as in sentence-transformers.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("mean", Self::Mean),
        ("cls", Self::Cls),
        ("lasttoken", Self::LastToken),
        ("max", Self::Max),
        ("mean_sqrt_len_tokens", Self::MeanSqrtLen),
        ("weightedmean", Self::WeightedMean),
    ];

    /// The weight of token `i` of a text of `len` tokens, of which the first `skipped` do not count. The
    /// weights of [`Max`](Self::Max) are not used.
    fn weight(self, i: usize, skipped: usize, len: usize) -> f32 {
        let counted = len.saturating_sub(skipped).max(1) as f64;
        let weight = match self {
            Self::Cls => f64::from(i == 0),
            Self::LastToken => f64::from(i + 1 == len),
            _ if i < skipped => 0.0,
            Self::Max => 0.0,
            Self::Mean => 1.0 / counted,
            Self::MeanSqrtLen => 1.0 / counted.sqrt(),
            Self::WeightedMean => (i + 1) as f64 / (counted * (skipped + 1 + len) as f64 / 2.0),
        };
        weight as f32
    }
}

impl FromStr for Pooling {
    type Err = Error;

    /// Parses a name of sentence-transformers.
    ///
    /// # Errors
    /// [`Error::Unknown`] with the known names.
    fn from_str(text: &str) -> Result<Self> {
        let found = Self::NAMES.iter().find(|(name, _)| *name == text).map(|(_, pooling)| *pooling);
        found.ok_or_else(|| Error::Unknown {
            what: "pooling",
            name: text.to_owned(),
            known: Self::NAMES.map(|(name, _)| name.to_owned()).into(),
        })
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, pooling)| pooling == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// The tokens of a text in a pass.
pub(super) struct Span {
    /// Their columns.
    pub(super) columns: Range<usize>,
    /// Number of the first of them in the text.
    pub(super) first: usize,
    /// Number of tokens at the beginning of the text that do not count.
    pub(super) skipped: usize,
    /// Number of tokens of the whole text.
    pub(super) len: usize,
}

/// Vectors that are pooled, pass by pass.
pub(super) struct Pooled {
    poolings: Vec<Pooling>,
    /// The vector of each pooling, `[texts, 1, hidden]`.
    so_far: Option<Vec<Tensor<3>>>,
}

impl Pooled {
    pub(super) fn new(poolings: &[Pooling]) -> Self {
        Self { poolings: poolings.to_vec(), so_far: None }
    }

    /// Adds hidden states `[texts, columns, hidden]`.
    pub(super) fn add(&mut self, hidden: Tensor<3>, spans: &[Span]) {
        let of_pass = self.poolings.iter().map(|pooling| match pooling {
            Pooling::Max => largest(&hidden, spans),
            _ => weighted(&hidden, spans, *pooling),
        });
        let of_pass: Vec<_> = of_pass.collect();
        self.so_far = Some(match self.so_far.take() {
            None => of_pass,
            Some(before) => {
                let both = before.into_iter().zip(of_pass).zip(&self.poolings);
                let joined = |((before, new), pooling): ((Tensor<3>, _), &Pooling)| match pooling {
                    Pooling::Max => before.max_pair(new),
                    _ => before + new,
                };
                both.map(joined).collect()
            }
        });
    }

    /// Returns all vectors, one after the other, `[texts, poolings · hidden]`.
    ///
    /// # Errors
    /// [`Error::Prompt`] if nothing was added.
    pub(super) fn finish(self) -> Result<Tensor<2>> {
        let pooled = self.so_far.ok_or_else(|| Error::Prompt { why: "there is no text".to_owned() })?;
        Ok(Tensor::cat(pooled, 2).squeeze_dim(1))
    }
}

fn weighted(hidden: &Tensor<3>, spans: &[Span], pooling: Pooling) -> Tensor<3> {
    let [texts, columns, _] = hidden.dims();
    let mut weights = vec![0.0f32; texts * columns];
    for (weights, span) in weights.chunks_mut(columns).zip(spans) {
        for (i, weight) in weights[span.columns.clone()].iter_mut().enumerate() {
            *weight = pooling.weight(span.first + i, span.skipped, span.len);
        }
    }
    let weights = TensorData::new(weights, [texts, 1, columns]);
    product(Tensor::<3>::from_data(weights, &hidden.device()), hidden.clone())
}

fn largest(hidden: &Tensor<3>, spans: &[Span]) -> Tensor<3> {
    let of_text = |(text, span): (usize, &Span)| {
        let skipped = span.skipped.saturating_sub(span.first).min(span.columns.len());
        let (first, len) = (span.columns.start + skipped, span.columns.len() - skipped);
        let own = hidden.clone().narrow(0, text, 1);
        if len == 0 {
            return own.narrow(1, 0, 1).full_like(f32::MIN);
        }
        own.narrow(1, first, len).max_dim(1)
    };
    Tensor::cat(spans.iter().enumerate().map(of_text).collect(), 0)
}
