//! Division of a model's blocks among several devices, which GPUs with too little memory need.

use std::{fmt, str::FromStr};

use burn::tensor::DType;
use kiln_cache::Plan;
use kiln_core::{Error, Result, budget::Budget, layer::StepShape, stages::Stages};
use kiln_kernels::{Kernels, Placement, device::Opened};
use kiln_models::{Configured, checkpoint::Checkpoint, configure, count_elements};

use super::{ModelBuilder, loading::WeightSource};
use crate::{
    folder::{generation_config, own_plan},
    out_of_memory::{OnOutOfMemory, takes},
};

/// The numbers of blocks that the devices of a model get: see [`ModelBuilder::devices`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layers {
    /// As many as fit, device by device, with caches for some thousand tokens; the last device gets the rest.
    #[default]
    Fill,
    /// The numbers of all devices but the last, which gets the rest.
    Numbers(Vec<usize>),
}

impl FromStr for Layers {
    type Err = Error;

    /// Parses `auto`, or numbers with commas between them. The last one may be `rest`.
    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Fill);
        }
        let numbers =
            text.strip_suffix(",rest").unwrap_or(text).split(',').map(|number| number.trim().parse());
        numbers.collect::<Result<_, _>>().map(Self::Numbers).map_err(|_| {
            let why = format!("is `{text}`; write `auto`, a number, or numbers such as `12,12,rest`");
            Error::Setting { name: "layers", why }
        })
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fill => f.write_str("auto"),
            Self::Numbers(numbers) => {
                numbers.iter().try_for_each(|number| write!(f, "{number},"))?;
                f.write_str("rest")
            }
        }
    }
}

/// Number of tokens for whose caches [`Layers::Fill`] leaves room, if the model has as many positions, and of
/// tokens of a prompt that are computed together.
const ROOM: [usize; 2] = [4096, 512];

impl ModelBuilder<'_> {
    /// Whether there are several devices to divide the blocks among.
    pub(super) fn is_divided(&self) -> bool {
        self.divided.as_ref().is_some_and(|(devices, _)| devices.len() > 1)
    }

    /// Opens the device of each stage.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Setting`] for a division that is not possible.
    pub(super) async fn open_all(&self) -> Result<Stages<Opened>> {
        let Some((devices, layers)) = &self.divided else {
            let stages = Stages::from(self.open().await?);
            let mut further = self.further_stages.iter().cloned();
            return further.try_fold(stages, |stages, (first, device)| stages.then(first, device));
        };
        let Some((first, others)) = devices.split_first() else {
            let why = "are none; name at least one".to_owned();
            return Err(Error::Setting { name: "devices", why });
        };
        let (numbers, blocks) = match layers {
            Layers::Numbers(numbers) if numbers.len() > others.len() => {
                let why = format!(
                    "has {} numbers, and the last of {} devices gets the rest",
                    numbers.len(),
                    devices.len()
                );
                return Err(Error::Setting { name: "layers", why });
            }
            _ if others.is_empty() => return Ok(first.clone().into()),
            Layers::Numbers(numbers) => (numbers.clone(), Subject::of(self, devices)?.blocks()),
            Layers::Fill => {
                let subject = Subject::of(self, devices)?;
                (subject.filled(devices)?, subject.blocks())
            }
        };
        divided(devices, &numbers, blocks)
    }
}

/// Gives each device a number of blocks, and the last one the rest. Devices without any are left out.
fn divided(devices: &[Opened], numbers: &[usize], blocks: usize) -> Result<Stages<Opened>> {
    let mut stages: Option<Stages<Opened>> = None;
    let mut first = 0;
    for (at, device) in devices.iter().enumerate() {
        let left = blocks - first;
        let own = if at + 1 == devices.len() { left } else { numbers.get(at).map_or(left, |&n| n.min(left)) };
        if own > 0 {
            stages = Some(match stages {
                None => device.clone().into(),
                Some(before) => before.then(first, device.clone())?,
            });
        }
        first += own;
    }
    stages.ok_or_else(|| Error::Setting { name: "layers", why: "leave no block for any device".to_owned() })
}

/// A model whose blocks are divided.
struct Subject<'a> {
    builder: &'a ModelBuilder<'a>,
    configured: Box<dyn Configured>,
    /// `None` for random weights
    checkpoint: Option<Checkpoint>,
    dtype: DType,
    plan: Plan,
}

impl<'a> Subject<'a> {
    fn of(builder: &'a ModelBuilder<'a>, devices: &[Opened]) -> Result<Self> {
        let (configured, mut checkpoint) = match &builder.weights {
            WeightSource::Random(config) => (configure(config)?, None),
            _ => {
                let checkpoint = builder.checkpoint()?;
                (configure(&checkpoint.config)?, Some(checkpoint))
            }
        };
        let all = divided(devices, &vec![1; devices.len() - 1], devices.len())?;
        let dtype = builder.dtype_of(&all, &*configured)?;
        let plan = match (&builder.plan, &mut checkpoint) {
            (Some(plan), _) => plan.clone(),
            (None, Some(checkpoint)) => own_plan(&generation_config(checkpoint)?),
            (None, None) => Plan::dynamic(),
        };
        if let Some(checkpoint) = &mut checkpoint {
            builder.pack(checkpoint, &all, dtype)?;
        }
        Ok(Self { builder, configured, checkpoint, dtype, plan })
    }

    fn blocks(&self) -> usize {
        self.configured.needs().len()
    }

    /// Bytes of the weights of each stage.
    fn weights(&self, placement: &Placement) -> Result<Stages<u64>> {
        match &self.checkpoint {
            Some(checkpoint) => checkpoint.held_bytes_by_stage(placement, self.dtype),
            None => {
                let claim = Budget::new(None).claim("weights", 0)?;
                let elements = count_elements(&*self.configured, placement, claim)?;
                Ok(elements.map(|elements| elements.saturating_mul(self.dtype.size() as u64)))
            }
        }
    }

    /// The number of blocks of each device but the last: as many as fit.
    fn filled(&self, devices: &[Opened]) -> Result<Vec<usize>> {
        let (blocks, mut numbers) = (self.blocks(), Vec::new());
        for (at, device) in devices.iter().enumerate().take(devices.len() - 1) {
            let Some(limit) = self.builder.budget(device).available() else {
                let why = format!(
                    "cannot be chosen, because {} does not tell its memory; say how many blocks it gets, or give its memory",
                    device.info.name
                );
                return Err(Error::Setting { name: "layers", why });
            };
            let left = blocks - numbers.iter().sum::<usize>();
            let fits = |number: usize| self.fits(devices, &[&numbers[..], &[number]].concat(), at, limit);
            // All of the blocks, or the largest number of them.
            let number = match fits(left) {
                true => left,
                false => {
                    let (mut few, mut many) = (0, left);
                    while few + 1 < many {
                        let middle = usize::midpoint(few, many);
                        if fits(middle) { few = middle } else { many = middle }
                    }
                    few
                }
            };
            numbers.push(number);
        }
        Ok(numbers)
    }

    /// Whether device `at`, with as many bytes as `limit`, holds its part of the model. Some models cannot be
    /// cut everywhere.
    fn fits(&self, devices: &[Opened], numbers: &[usize], at: usize, limit: u64) -> bool {
        let needed = || -> Result<u64> {
            let first: usize = numbers[..at].iter().sum();
            let own = first..first + numbers[at];
            let stages = divided(devices, numbers, self.blocks())?;
            let placement = stages.try_map(|device| Kernels::new(self.builder.kernels, &device.device))?;
            let weights = self.weights(&placement)?;
            let cache = self.plan.build(&self.configured.needs(), &placement)?;
            let sizes = self.configured.sizes();
            let [tokens, chunk] = ROOM.map(|room| room.min(sizes.positions));
            let step = StepShape { rows: 1, tokens: 0, element: self.dtype.size(), last: false };
            let working = sizes.working_bytes(1, chunk, self.dtype.size());
            let tokens = tokens.max(self.builder.tokens);
            Ok(takes(&cache, own.clone(), tokens, &step, working, OnOutOfMemory::Fail)
                + *weights.of(own.start))
        };
        numbers[at] == 0 || needed().is_ok_and(|needed| needed <= limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_written_as_they_are_read() {
        for (text, layers, written) in [
            ("auto", Layers::Fill, "auto"),
            ("20", Layers::Numbers(vec![20]), "20,rest"),
            ("12, 8,rest", Layers::Numbers(vec![12, 8]), "12,8,rest"),
        ] {
            assert_eq!(text.parse::<Layers>().expect("they are layers"), layers);
            assert_eq!(layers.to_string(), written);
            assert_eq!(written.parse::<Layers>().expect("they are layers"), layers);
        }
        for text in ["", "all", "rest", "3,rest,4", "-1", "1.5"] {
            let error = text.parse::<Layers>().expect_err("they are no layers").to_string();
            assert!(error.contains("write `auto`"), "{error}");
        }
    }
}
