//! Keeps history as codes of a few bits, and the latest tokens as they are (KIVI, Liu et al., 2024,
//! <https://arxiv.org/abs/2402.02750>; transformers' `QuantizedCache`).
//!
//! By default a block of tokens is packed once and never touched again, and attention reads the codes.
//! `flush=requantize` is transformers' rule instead.

mod append;
mod history;
mod requantize;
mod rotation;

use std::sync::Arc;

use burn::tensor::DType;
use kiln_core::{Error, Result, layer::KvLayer, need::AttentionNeed};
use kiln_kernels::Kernels;

use self::{append::AppendPolicy, requantize::RequantizePolicy};
use super::{KvFactory, KvStrategy, Settings};
use crate::{
    memory::Memory,
    quantizers::{Backend, FORMATS, Format, Grouping, Optimizer, Recipe, format},
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
        ("format", "kivi (default), quanto or hqq"),
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
    ],
    windowed: None,
    configure: |mut settings| {
        let settled = Settled::read(&mut settings)?;
        settings.done()?;
        Ok(Arc::new(settled))
    },
};

/// The settings of a quantized cache. Pairs are of keys and of values.
#[derive(Clone, Debug)]
struct Settled {
    format: &'static Format,
    bits: [usize; 2],
    axes: [i64; 2],
    group: usize,
    /// Latest tokens that are kept as they are, at most.
    residual: usize,
    optimizer: Optimizer,
    /// What computes it, if the whole history is packed anew each time.
    requantize: Option<&'static dyn Backend>,
    rotate: Rotate,
    compat: bool,
}

/// Whether heads are rotated before they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rotate {
    Off,
    On,
    /// Where it was measured to help: keys that share a scale with the other channels of their token, as far as the size of
    /// heads allows it.
    Auto,
}

impl Settled {
    /// Whether a block of this need rotates.
    fn rotates(&self, need: &AttentionNeed) -> bool {
        match self.rotate {
            Rotate::Off => false,
            Rotate::On => true,
            Rotate::Auto => {
                let by_token = self.grouping(0) == Grouping::Neighbours;
                by_token && self.requantize.is_none() && rotation::block(need.head_dim).is_ok()
            }
        }
    }

    fn read(settings: &mut Settings) -> Result<Self> {
        let format = match settings.either("format", "backend")? {
            Some(name) => format(&name)?,
            None => FORMATS[0],
        };
        let nbits = settings.positive("nbits")?;
        let mut bits = [0; 2];
        for (bits, key) in bits.iter_mut().zip(["k", "v"]) {
            *bits = settings.positive(key)?.or(nbits).unwrap_or(4);
            if !format.bits.contains(bits) {
                let known = list(format.bits);
                return Err(
                    settings.wrong(format!("{} has no codes of {bits} bits; known: {known}", format.name))
                );
            }
        }
        let mut axes = format.default_axes;
        for (axis, key) in axes.iter_mut().zip(["axis_key", "axis_value"]) {
            let Some(text) = settings.take(key) else { continue };
            let known: Vec<i64> = format.axes.iter().map(|(axis, _)| *axis).collect();
            match text.parse().ok().filter(|axis| known.contains(axis)) {
                Some(given) => *axis = given,
                None => {
                    let known = list(&known);
                    return Err(
                        settings.wrong(format!("`{key}={text}` is none of {}'s axes: {known}", format.name))
                    );
                }
            }
        }
        let group = settings.positive_of("group", "q_group_size")?.unwrap_or(64);
        let residual = settings.positive_of("residual", "residual_length")?.unwrap_or(128);
        let optimizers = format.optimizers;
        let names: Vec<&str> = optimizers.iter().map(|optimizer| optimizer.name()).collect();
        let optimizer = optimizers[settings.one_of("optimize", &names)?];
        let requantize = match settings.one_of("flush", &["append", "requantize"])? {
            0 => None,
            _ => Some(format.backend.ok_or_else(|| {
                settings.wrong(format!(
                    "`flush=requantize` is transformers' rule, which has no format `{}`; use quanto or hqq",
                    format.name
                ))
            })?),
        };
        let rotate = settings.one_of("rotate", &["off", "on", "auto"])?;
        let rotate = [Rotate::Off, Rotate::On, Rotate::Auto][rotate];
        let compat = match settings.take("compat").as_deref() {
            None => false,
            Some("4.47") => true,
            Some(other) => return Err(settings.wrong(format!("`compat={other}` is unknown; known: 4.47"))),
        };
        let settled = Self { format, bits, axes, group, residual, optimizer, requantize, rotate, compat };
        settled.fits_together().map_err(|why| settings.wrong(why))?;
        Ok(settled)
    }

    fn fits_together(&self) -> Result<(), String> {
        let &Self { group, residual, .. } = self;
        if self.requantize.is_some() {
            return match self.rotate {
                Rotate::On => Err("`rotate=on` needs `flush=append`".to_owned()),
                Rotate::Off | Rotate::Auto => Ok(()),
            };
        }
        if self.compat {
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

    /// How keys (0) or values (1) are grouped.
    fn grouping(&self, which: usize) -> Grouping {
        let of = |(axis, grouping): &(i64, Grouping)| (*axis == self.axes[which]).then_some(*grouping);
        self.format.axes.iter().find_map(of).unwrap_or(Grouping::Neighbours)
    }

    /// For keys and for values of type `dtype`.
    fn recipes(&self, dtype: DType) -> [Recipe; 2] {
        self.bits.map(|bits| Recipe { bits, optimizer: self.optimizer, dtype })
    }

    fn wrong(why: String) -> Error {
        Error::Setting { name: "cache", why: format!("quantized: {why}") }
    }
}

fn list<T: ToString>(known: &[T]) -> String {
    known.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

impl KvFactory for Settled {
    fn exact(&self) -> bool {
        false
    }

    fn check(&self, need: &AttentionNeed) -> Result<()> {
        let (numbers, group) = (need.kv_heads * need.head_dim, self.group);
        if self.rotate == Rotate::On {
            rotation::block(need.head_dim)?;
        }
        if self.requantize.is_none() {
            return Ok(());
        }
        if need.window.is_some() {
            let why = "`flush=requantize` serves blocks that see everything, and this model has some with a window; \
                       use `flush=append`";
            return Err(Self::wrong(why.to_owned()));
        }
        let refuse = |what: String| {
            Err(Self::wrong(format!(
                "groups of {group} do not divide {what}; use `flush=append`, or another group"
            )))
        };
        for which in 0..2 {
            match self.grouping(which) {
                Grouping::PerChannel if !need.kv_heads.is_multiple_of(group) => {
                    return refuse(format!("any number of tokens of {} heads", need.kv_heads));
                }
                _ if !numbers.is_multiple_of(group) => {
                    return refuse(format!("the {numbers} numbers of a token"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        match self.requantize {
            Some(_) => self.repacked_bytes(need, tokens, element),
            None => append::bytes(self, need, tokens, element),
        }
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        self.check(need)?;
        Ok(match self.requantize {
            Some(backend) => {
                let policy = RequantizePolicy { settled: self.clone(), backend, need: need.clone() };
                Box::new(Memory::new(policy, kernels.device()))
            }
            None => Box::new(Memory::new(AppendPolicy::new(self, need, kernels)?, kernels.device())),
        })
    }
}

impl Settled {
    /// Codes, and a scale and a zero point a group, of all but the recent tokens.
    fn repacked_bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        let recent = tokens.min(self.residual);
        let numbers = (tokens - recent).saturating_mul(need.kv_heads * need.head_dim);
        let codes = self.bits.map(|bits| crate::quantizers::Words::count(numbers, bits).saturating_mul(4));
        let scales = (numbers / self.group).saturating_mul(4 * element);
        need.token_bytes(element)
            .saturating_mul(recent)
            .saturating_add(codes[0])
            .saturating_add(codes[1])
            .saturating_add(scales)
    }
}
