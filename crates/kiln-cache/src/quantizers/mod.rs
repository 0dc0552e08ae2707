//! Number formats of quantized caches: small codes, with a scale and a zero point for each group.

use std::fmt;

use burn::tensor::{DType, Int, Tensor};
use kiln_core::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(crate) mod fp8;
mod grouping;
mod hqq;
mod kivi;
mod quanto;
mod rounding;
pub(crate) mod words;

pub use {grouping::Grouping, rounding::rounded};

/// A number format of quantized caches.
#[derive(Debug)]
pub struct CacheFormat {
    /// Name of the format; transformers' `backend`.
    pub name: &'static str,
    /// One phrase of help text.
    pub summary: &'static str,
    /// Supported numbers of bits per code.
    pub bits: &'static [usize],
    /// Supported axes by their names in transformers, each with the grouping that it means.
    pub axes: &'static [(i64, Grouping)],
    /// Default axes of keys and of values.
    pub default_axes: [i64; 2],
    /// Supported ways to find scales and zero points; the first is the default.
    pub optimizers: &'static [Optimizer],
    /// The backend of that name in transformers, if there is one. It is used for transformers' rule, which
    /// packs the whole history repeatedly.
    pub backend: Option<&'static dyn Backend>,
    /// Finds scales and offsets of `x` `[groups, group]`, each `[groups, 1]`, for codes that mean
    /// `code · scale + offset`; `None` if they follow from the smallest and the largest element.
    pub refined: fn(Tensor<2>, &Recipe) -> Option<[Tensor<2>; 2]>,
}

/// Formats are identified by their names.
impl PartialEq for CacheFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Serialize for CacheFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for &'static CacheFormat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        format(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// A format as computed by transformers.
pub trait Backend: fmt::Debug + Sync {
    /// Computes codes, scales and zero points of `x` `[groups, group]`, with each step rounded to
    /// `recipe.dtype`.
    fn quantize(&self, x: Tensor<2>, recipe: &Recipe) -> Quantized;

    /// Reconstructs the input of [`quantize`](Backend::quantize), as closely as the codes allow.
    fn dequantize(&self, quantized: &Quantized, recipe: &Recipe) -> Tensor<2>;
}

/// Every format. A new entry here makes a format selectable.
pub static CACHE_FORMATS: &[&CacheFormat] = &[&kivi::KIVI, &quanto::QUANTO, &hqq::HQQ, &fp8::FP8];

/// Finds the format with this name.
///
/// # Errors
/// [`Error::Unknown`] with the known names.
pub fn format(name: &str) -> Result<&'static CacheFormat> {
    let found = CACHE_FORMATS.iter().find(|format| format.name.eq_ignore_ascii_case(name));
    found.copied().ok_or_else(|| Error::Unknown {
        what: "number format",
        name: name.to_owned(),
        known: CACHE_FORMATS.iter().map(|format| format.name.to_owned()).collect(),
    })
}

/// How a tensor is quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    pub bits: usize,
    pub optimizer: Optimizer,
    /// Element type that each step is computed in, unless the format computes in float32.
    pub dtype: DType,
}

impl Recipe {
    /// Largest code.
    pub(crate) fn largest(&self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }
}

/// How scales and zero points are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// From the smallest and the largest element alone, as in hqq up to 0.2.6 by default. Ranges have no
    /// lower bound.
    Off,
    /// Refined by hqq's proximal solver, as from 0.2.7 on.
    On,
    /// Refined as in hqq 0.2.2 on request: its steps become smaller.
    #[serde(rename = "0.2.2")]
    Legacy,
}

/// Codes of some groups, with scales and zero points.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `[groups, group]`, from 0 to the largest code.
    pub codes: Tensor<2, Int>,
    /// Float32, `[groups, 1]`, like `zero`; the meaning depends on the format.
    pub scale: Tensor<2>,
    pub zero: Tensor<2>,
}

/// Returns the smallest and the largest element of each group, each `[groups, 1]`.
fn range(x: &Tensor<2>) -> [Tensor<2>; 2] {
    [x.clone().min_dim(1), x.clone().max_dim(1)]
}
