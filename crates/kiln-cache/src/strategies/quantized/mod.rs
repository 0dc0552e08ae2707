//! Keeps the history as codes of a few bits, and the latest tokens in full precision (KIVI, Liu et al., 2024,
//! <https://arxiv.org/abs/2402.02750>; transformers' `QuantizedCache`).
//!
//! By default a block of tokens is packed once and never packed again, and attention reads the codes.
//! `flush=requantize` selects transformers' rule instead.

mod append;
mod float8;
mod history;
mod requantize;
mod rotation;

use burn::tensor::DType;
use kiln_core::{
    Error, Result,
    layer::{CrossLayer, KvLayer},
    need::AttentionNeed,
    setters,
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use self::{append::AppendPolicy, float8::Float8Policy, requantize::RequantizePolicy};
use super::{
    CacheSettings, Compat, KvFactory, KvStrategy,
    settings::{check_count, word, write},
};
use crate::{
    CacheSpec,
    memory::{Memory, Once},
    quantizers::{Backend, CACHE_FORMATS, CacheFormat, Grouping, Optimizer, Recipe, fp8::FP8, words},
};

pub(super) static QUANTIZED: KvStrategy = KvStrategy {
    name: "quantized",
    aliases: &[],
    offloaded_aliases: &[],
    summary: "keeps history in 1 to 8 bits a number, and the latest tokens as they are",
    settings: &[
        ("k", "bits of a number in keys (default 4)"),
        ("v", "bits of a number in values (default 4)"),
        ("nbits", "sets both `k` and `v`"),
        ("format", "kivi (default), quanto, hqq or fp8; the last has no other settings"),
        ("backend", "transformers' name for `format`"),
        ("group", "numbers that share a scale (default 64)"),
        ("q_group_size", "transformers' name for `group`"),
        ("residual", "latest tokens that are not packed (default 128)"),
        ("residual_length", "transformers' name for `residual`"),
        ("axis_key", "axis that groups of keys lie along, as transformers counts: 0 or -1; for hqq 0 or 1"),
        ("axis_value", "axis that groups of values lie along, counted the same way"),
        (
            "rotate",
            "on rotates heads by a Hadamard matrix, so that no channel stands out; auto does so where keys are grouped by token (default off)",
        ),
        ("optimize", "hqq's solver: on (default), off, or 0.2.2 for the solver of that version"),
        (
            "flush",
            "append (default) packs a block once; requantize packs everything anew each time, as transformers does",
        ),
        ("compat", "4.47 counts chunks as transformers 4.47 did"),
    ],
    samples: &[
        "k=8,v=8,group=8,residual=8",
        "nbits=8,group=8,residual=5,format=hqq,axis_key=1,axis_value=1",
        "rotate=on",
        "nbits=8,group=8,residual=8,rotate=on",
        "group=8,residual=6,format=quanto,flush=requantize",
        "nbits=8,group=8,residual=6,format=hqq,optimize=off,flush=requantize,axis_key=1,axis_value=1",
        "format=fp8",
    ],
    windowed: None,
    read: CacheSpec::read::<QuantizedSettings>,
};

/// Settings of a `quantized` cache (transformers' `QuantizedCacheConfig`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct QuantizedSettings {
    /// Bits per element, in keys and in values.
    pub nbits: usize,
    /// Bits per element in keys; unset: `nbits`.
    pub k: Option<usize>,
    /// Bits per element in values; unset: `nbits`.
    pub v: Option<usize>,
    #[serde(alias = "backend")]
    pub format: &'static CacheFormat,
    /// Number of elements that share a scale.
    #[serde(alias = "q_group_size")]
    pub group: usize,
    /// Largest number of latest tokens that are kept in full precision.
    #[serde(alias = "residual_length")]
    pub residual: usize,
    /// Axis along which keys are grouped, numbered as in transformers; unset: the best one for the format.
    pub axis_key: Option<i64>,
    /// Axis along which values are grouped, numbered as in transformers; unset: the best one for the format.
    pub axis_value: Option<i64>,
    /// Whether heads are rotated before they are packed.
    pub rotate: Rotate,
    /// How scales are found; unset: the default of the format.
    pub optimize: Option<Optimizer>,
    pub flush: Flush,
    /// Version of transformers whose way of counting chunks is used.
    pub compat: Option<Compat>,
}

setters!(QuantizedSettings {
    nbits: usize,
    k: usize,
    v: usize,
    format: &'static CacheFormat,
    group: usize,
    residual: usize,
    axis_key: i64,
    axis_value: i64,
    rotate: Rotate,
    optimize: Optimizer,
    flush: Flush,
    compat: Compat,
});

impl Default for QuantizedSettings {
    fn default() -> Self {
        Self {
            nbits: 4,
            k: None,
            v: None,
            format: CACHE_FORMATS[0],
            group: 64,
            residual: 128,
            axis_key: None,
            axis_value: None,
            rotate: Rotate::Off,
            optimize: None,
            flush: Flush::Append,
            compat: None,
        }
    }
}

/// Whether heads are rotated before they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rotate {
    Off,
    On,
    /// Where measurements showed that it helps: for keys that share a scale with the other channels of their
    /// token, if the size of heads allows it.
    Auto,
}

/// When tokens are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// A block of tokens is packed once.
    Append,
    /// Everything is packed again each time, as in transformers.
    Requantize,
}

impl CacheSettings for QuantizedSettings {
    const STRATEGY: &'static KvStrategy = &QUANTIZED;

    fn validate(&self) -> Result<(), String> {
        let Self { format, group, residual, .. } = *self;
        if self.is_fp8() {
            return self.validate_fp8();
        }
        check_count("group", group)?;
        check_count("residual", residual)?;
        if let Some(bits) = self.bits().into_iter().find(|bits| !format.bits.contains(bits)) {
            return Err(format!("{} has no codes of {bits} bits; known: {}", format.name, list(format.bits)));
        }
        let known: Vec<i64> = format.axes.iter().map(|(axis, _)| *axis).collect();
        for (key, axis) in ["axis_key", "axis_value"].into_iter().zip(self.axes()) {
            if !known.contains(&axis) {
                return Err(format!("`{key}={axis}` is none of {}'s axes: {}", format.name, list(&known)));
            }
        }
        if !format.optimizers.contains(&self.optimizer()) {
            let known: Vec<String> = format.optimizers.iter().map(word).collect();
            let optimizer = word(&self.optimizer());
            return Err(format!("{} has no `optimize={optimizer}`; known: {}", format.name, list(&known)));
        }
        match self.flush {
            Flush::Append => self.validate_append(),
            Flush::Requantize if format.backend.is_none() => Err(format!(
                "`flush=requantize` is transformers' rule, which has no format `{}`; use quanto or hqq",
                format.name
            )),
            Flush::Requantize if self.rotate == Rotate::On => {
                Err("`rotate=on` needs `flush=append`".to_owned())
            }
            Flush::Requantize => Ok(()),
        }
    }
}

/// Pairs hold keys first, then values.
impl QuantizedSettings {
    fn is_fp8(&self) -> bool {
        *self.format == FP8
    }

    fn validate_fp8(&self) -> Result<(), String> {
        let others = Self { format: Self::default().format, ..self.clone() };
        match &*write(&QUANTIZED, &others) {
            "" => Ok(()),
            others => Err(format!(
                "`format=fp8` has one scale for all tokens, and no other settings; leave out `{others}`"
            )),
        }
    }

    fn validate_append(&self) -> Result<(), String> {
        let Self { group, residual, .. } = *self;
        if self.compat.is_some() {
            return Err("`compat=4.47` applies to `flush=requantize` only".to_owned());
        }
        append::packings(self).map_err(|error| match error {
            Error::Setting { why, .. } => why,
            other => other.to_string(),
        })?;
        if (0..2).any(|which| self.grouping(which) != Grouping::Neighbours) && !residual.is_multiple_of(group)
        {
            let below = residual / group * group;
            let possible = [below, below + group].into_iter().filter(|&n| n > 0).collect::<Vec<_>>();
            return Err(format!(
                "groups of {group} tokens do not divide a residual of {residual}; possible: {}",
                list(&possible)
            ));
        }
        Ok(())
    }

    fn bits(&self) -> [usize; 2] {
        [self.k, self.v].map(|bits| bits.unwrap_or(self.nbits))
    }

    fn axes(&self) -> [i64; 2] {
        let [keys, values] = self.format.default_axes;
        [self.axis_key.unwrap_or(keys), self.axis_value.unwrap_or(values)]
    }

    fn optimizer(&self) -> Optimizer {
        self.optimize.unwrap_or(self.format.optimizers[0])
    }

    /// Returns the backend of transformers, if the whole history is packed again each time.
    fn backend(&self) -> Option<&'static dyn Backend> {
        self.format.backend.filter(|_| self.flush == Flush::Requantize)
    }

    /// Whether a block with this need rotates heads.
    fn rotates(&self, need: &AttentionNeed) -> bool {
        match self.rotate {
            Rotate::Off => false,
            Rotate::On => true,
            Rotate::Auto => {
                let by_token = self.grouping(0) == Grouping::Neighbours;
                by_token
                    && self.flush == Flush::Append
                    && need.streams().iter().all(|stream| rotation::block(stream.width).is_ok())
            }
        }
    }

    /// Returns the grouping of keys (`which` = 0) or values (1).
    fn grouping(&self, which: usize) -> Grouping {
        let of = |(axis, grouping): &(i64, Grouping)| (*axis == self.axes()[which]).then_some(*grouping);
        self.format.axes.iter().find_map(of).unwrap_or(Grouping::Neighbours)
    }

    /// Returns the recipes for keys and values of type `dtype`.
    fn recipes(&self, dtype: DType) -> [Recipe; 2] {
        self.bits().map(|bits| Recipe { bits, optimizer: self.optimizer(), dtype })
    }
}

fn list<T: ToString>(known: &[T]) -> String {
    known.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

impl KvFactory for QuantizedSettings {
    fn exact(&self) -> bool {
        false
    }

    fn check(&self, need: &AttentionNeed) -> Result<()> {
        let group = self.group;
        if self.is_fp8() {
            let why = "`format=fp8` serves blocks that see everything, and this model has some with a window; \
                       use another format";
            return need.window.map_or(Ok(()), |_| Err(QUANTIZED.wrong(why.to_owned())));
        }
        if self.rotate == Rotate::On {
            need.streams().iter().try_for_each(|stream| rotation::block(stream.width).map(|_| ()))?;
        }
        if self.flush == Flush::Append {
            return Ok(());
        }
        if need.window.is_some() {
            let why = "`flush=requantize` serves blocks that see everything, and this model has some with a window; \
                       use `flush=append`";
            return Err(QUANTIZED.wrong(why.to_owned()));
        }
        let refuse = |what: String| {
            Err(QUANTIZED.wrong(format!(
                "groups of {group} do not divide {what}; use `flush=append`, or another group"
            )))
        };
        for (which, stream) in need.streams().into_iter().enumerate() {
            match self.grouping(which) {
                Grouping::PerChannel if !stream.heads.is_multiple_of(group) => {
                    return refuse(format!("any number of tokens of {} heads", stream.heads));
                }
                _ if !stream.numbers().is_multiple_of(group) => {
                    return refuse(format!("the {} numbers of a token", stream.numbers()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        if self.is_fp8() {
            return float8::bytes(need, tokens).into_iter().fold(0, usize::saturating_add);
        }
        match self.backend() {
            Some(_) => {
                let [keys, values] = self.repacked_bytes(need, tokens, element);
                keys.saturating_add(values)
            }
            None => append::bytes(self, need, tokens, element),
        }
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        self.check(need)?;
        if self.is_fp8() {
            let policy = Float8Policy { need: need.clone(), kernels: kernels.clone() };
            return Ok(Box::new(Memory::new(policy, kernels.device())));
        }
        Ok(match self.backend() {
            Some(backend) => {
                let policy = RequantizePolicy { settings: self.clone(), backend, need: need.clone() };
                Box::new(Memory::new(policy, kernels.device()))
            }
            None => Box::new(Memory::new(AppendPolicy::new(self, need, kernels)?, kernels.device())),
        })
    }

    fn check_encoder(&self) -> Result<()> {
        if self.is_fp8() {
            return Err(QUANTIZED.wrong("keys of an encoder have groups; use another format".to_owned()));
        }
        match self.backend() {
            None => Ok(()),
            Some(_) => {
                Err(QUANTIZED.wrong("keys of an encoder are packed once; use `flush=append`".to_owned()))
            }
        }
    }

    fn build_encoder(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn CrossLayer>> {
        self.check_encoder()?;
        Ok(Box::new(Memory::new(Once(AppendPolicy::new(self, need, kernels)?), kernels.device())))
    }
}

impl QuantizedSettings {
    /// Number of bytes of keys and of values: the codes of all tokens except the recent ones, plus a scale
    /// and a zero point per group, plus the recent tokens.
    fn repacked_bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> [usize; 2] {
        let recent = tokens.min(self.residual);
        let (streams, bits) = (need.streams(), self.bits());
        [0, 1].map(|which| {
            let numbers = (tokens - recent).saturating_mul(streams[which].numbers());
            let codes = words::count(numbers, bits[which]).saturating_mul(4);
            let scales = (numbers / self.group).saturating_mul(2 * element);
            let recent = streams[which].token_bytes(element).saturating_mul(recent);
            recent.saturating_add(codes).saturating_add(scales)
        })
    }
}
