//! Number formats of quantized caches: small codes, and a scale and a zero point for each group of neighbours.

use std::fmt;

use burn::tensor::{DType, Int, Tensor};
use kiln_core::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

mod grouping;
mod hqq;
mod kivi;
mod quanto;
mod rounding;
pub(crate) mod words;

pub use {grouping::Grouping, rounding::rounded};

/// A number format of quantized caches.
#[derive(Debug)]
pub struct Format {
    /// Its name; transformers' `backend`.
    pub name: &'static str,
    /// What it does, in a phrase.
    pub summary: &'static str,
    /// Bits that a code may have.
    pub bits: &'static [usize],
    /// Transformers' names of the axes it can group along, with the groups that each means.
    pub axes: &'static [(i64, Grouping)],
    /// The axes of keys and of values where the user does not say.
    pub default_axes: [i64; 2],
    /// How it can find scales and zero points; the first is the default.
    pub optimizers: &'static [Optimizer],
    /// The backend of that name in transformers, where there is one: its rule, which packs the whole history again and
    /// again, computes with it.
    pub backend: Option<&'static dyn Backend>,
    /// Scales and offsets of `x` `[groups, group]`, each `[groups, 1]`, for codes that mean `code · scale + offset`; `None`
    /// where they are those of the smallest and the largest number.
    pub refined: fn(Tensor<2>, &Recipe) -> Option<[Tensor<2>; 2]>,
}

/// Formats are known by their names.
impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Serialize for Format {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for &'static Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        format(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// A format as transformers computes it.
pub trait Backend: fmt::Debug + Sync {
    /// Codes, scales and zero points of `x` `[groups, group]`, each step rounded to `recipe.dtype`.
    fn quantize(&self, x: Tensor<2>, recipe: &Recipe) -> Quantized;

    /// What [`quantize`](Backend::quantize) came from, as near as its codes are.
    fn dequantize(&self, quantized: &Quantized, recipe: &Recipe) -> Tensor<2>;
}

/// Every format. A line here makes it selectable.
pub static FORMATS: &[&Format] = &[&kivi::KIVI, &quanto::QUANTO, &hqq::HQQ];

/// The format of that name.
///
/// # Errors
/// [`Error::Unknown`] with the known names.
pub fn format(name: &str) -> Result<&'static Format> {
    let found = FORMATS.iter().find(|format| format.name.eq_ignore_ascii_case(name));
    found.copied().ok_or_else(|| Error::Unknown {
        what: "number format",
        name: name.to_owned(),
        known: FORMATS.iter().map(|format| format.name.to_owned()).collect(),
    })
}

/// How a tensor becomes codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    pub bits: usize,
    pub optimizer: Optimizer,
    /// The type that each step is computed in, where the format does not compute in float32.
    pub dtype: DType,
}

impl Recipe {
    /// The largest code.
    pub(crate) fn largest(&self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }
}

/// How scales and zero points are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// From the smallest and the largest number alone: what hqq up to 0.2.6 does unasked. Ranges have no lower bound.
    Off,
    /// Refined by hqq's proximal solver, as it does from 0.2.7 on.
    On,
    /// Refined as hqq 0.2.2 did where it was asked to: its steps become smaller.
    #[serde(rename = "0.2.2")]
    Legacy,
}

/// Codes of some groups.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `[groups, group]`, from 0 to the largest code
    pub codes: Tensor<2, Int>,
    /// Float32, `[groups, 1]`; what they mean is the format's business
    pub scale: Tensor<2>,
    pub zero: Tensor<2>,
}

/// `[groups, 1]`: the smallest and the largest number of each.
fn range(x: &Tensor<2>) -> [Tensor<2>; 2] {
    [x.clone().min_dim(1), x.clone().max_dim(1)]
}
