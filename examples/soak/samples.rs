//! Memory of the process and the device, sampled between rounds, and whether it grows.
#![allow(clippy::disallowed_methods, reason = "files of the system, not of a model")]

use std::{
    fs,
    time::{Duration, Instant},
};

use kiln::{Error, Model, Result};
use serde_json::{Map, Value};

/// Number of parts of a run; the second is compared with the last. The first is excluded because rare events
/// occur in it for the first time.
pub(crate) const FIFTHS: usize = 5;

const MIB: f64 = (1 << 20) as f64;

/// Measurements between two rounds. `None`: the system or the device does not report the value.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) seconds: f64,
    resident: Option<u64>,
    anonymous: Option<u64>,
    handles: Option<u64>,
    threads: Option<u64>,
    pool_in_use: Option<u64>,
    pool_reserved: Option<u64>,
    budget: u64,
    /// Duration of the previous round; `None` before the first.
    round: Option<Duration>,
}

impl Sample {
    /// Takes a sample after waiting for the device: launched kernels hold their inputs until they have
    /// finished.
    pub(crate) fn take(model: &Model, started: Instant, round: Option<Duration>) -> Result<Self> {
        let device = model.device();
        device.sync().map_err(Error::of_device)?;
        let pool = device.memory_pool_usage();
        let status = fs::read_to_string("/proc/self/status").ok();
        Ok(Self {
            seconds: started.elapsed().as_secs_f64(),
            resident: bytes(status.as_deref(), "VmRSS:"),
            anonymous: bytes(status.as_deref(), "RssAnon:"),
            handles: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            pool_in_use: pool.as_ref().map(|pool| pool.bytes_in_use),
            pool_reserved: pool.as_ref().map(|pool| pool.bytes_reserved),
            budget: model.budget().used(),
            round,
        })
    }

    pub(crate) fn json(&self) -> Value {
        let values = QUANTITIES.iter().map(|quantity| (quantity.name, (quantity.of)(self)));
        let named = [("seconds", Some(self.seconds))].into_iter().chain(values);
        Value::Object(named.map(|(name, value)| (name.to_owned(), value.into())).collect::<Map<_, _>>())
    }
}

/// Parses a line `NAME  12 kB` of `status`.
fn bytes(status: Option<&str>, name: &str) -> Option<u64> {
    let line = status?.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Counts the entries of a folder. Reading `/proc/self/fd` opens one more, always the same number.
fn entries(folder: &str) -> Option<u64> {
    fs::read_dir(folder).ok().map(|entries| entries.count() as u64)
}

/// A measured quantity.
pub(crate) struct Quantity {
    pub(crate) name: &'static str,
    pub(crate) of: fn(&Sample) -> Option<f64>,
    pub(crate) unit: Unit,
    pub(crate) may: May,
}

#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Bytes,
    Number,
    Seconds,
}

/// The increase of a quantity that is allowed at the end.
#[derive(Clone, Copy)]
pub(crate) enum May {
    /// None: the quantity is counted exactly, so one more is one too many.
    Not,
    /// By 8 MiB or 2 %, whichever is more: allocators keep a varying number of pages for reuse.
    ALittle,
    /// By any amount: it is a time, and other programs run at the same time.
    Anything,
}

pub(crate) const QUANTITIES: [Quantity; 8] = [
    Quantity { name: "resident memory", of: |s| number(s.resident), unit: Unit::Bytes, may: May::ALittle },
    Quantity { name: "anonymous memory", of: |s| number(s.anonymous), unit: Unit::Bytes, may: May::ALittle },
    Quantity { name: "open files", of: |s| number(s.handles), unit: Unit::Number, may: May::Not },
    Quantity { name: "threads", of: |s| number(s.threads), unit: Unit::Number, may: May::Not },
    Quantity {
        name: "device memory in use",
        of: |s| number(s.pool_in_use),
        unit: Unit::Bytes,
        may: May::ALittle,
    },
    Quantity {
        name: "device memory reserved",
        of: |s| number(s.pool_reserved),
        unit: Unit::Bytes,
        may: May::ALittle,
    },
    Quantity { name: "budget used", of: |s| number(Some(s.budget)), unit: Unit::Bytes, may: May::Not },
    Quantity {
        name: "time of a round",
        of: |s| s.round.map(|round| round.as_secs_f64()),
        unit: Unit::Seconds,
        may: May::Anything,
    },
];

/// Converts a byte count, which is exact because it is below 2^53.
fn number(value: Option<u64>) -> Option<f64> {
    value.map(|value| value as f64)
}

impl Quantity {
    /// Compares the second fifth of `samples` with the last; `None` if there is nothing to compare.
    pub(crate) fn judge(&self, samples: &[Sample]) -> Option<Verdict> {
        let values: Vec<f64> = samples.iter().map(self.of).collect::<Option<_>>()?;
        let fifth = |n: usize| values.get(n * values.len() / FIFTHS..(n + 1) * values.len() / FIFTHS);
        let (before, after) = (median(fifth(1)?)?, median(fifth(FIFTHS - 1)?)?);
        let bound = match self.may {
            May::Not => Some(0.0),
            May::ALittle => Some(f64::max(8.0 * MIB, 0.02 * before)),
            May::Anything => None,
        };
        Some(Verdict { before, after, bound })
    }

    /// Formats `value` for display.
    pub(crate) fn text(&self, value: f64) -> String {
        match self.unit {
            Unit::Bytes => format!("{:.1} MiB", value / MIB),
            Unit::Number => format!("{value:.0}"),
            Unit::Seconds => format!("{value:.2} s"),
        }
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// Two medians, and the allowed increase of the later one; `None` for any increase.
pub(crate) struct Verdict {
    pub(crate) before: f64,
    pub(crate) after: f64,
    pub(crate) bound: Option<f64>,
}

impl Verdict {
    pub(crate) fn is_flat(&self) -> bool {
        self.most().is_none_or(|most| self.after <= most)
    }

    /// Returns the largest allowed value of the later median; `None` for any.
    pub(crate) fn most(&self) -> Option<f64> {
        self.bound.map(|bound| self.before + bound)
    }

    /// Returns the verdict in one word.
    pub(crate) fn said(&self) -> &'static str {
        match (self.bound, self.is_flat()) {
            (None, _) => "not judged",
            (_, true) => "flat",
            (_, false) => "GREW",
        }
    }
}
