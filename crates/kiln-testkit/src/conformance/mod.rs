//! Runs a folder of recordings of transformers and reports where this build differs.
//!
//! The format is that of the recorder: `cases.json`, `tensors.safetensors`, `models/<name>/`. A case is
//! skipped only if it needs a feature that Kiln does not support yet, which is then given as the reason.

use std::{fmt, sync::Arc};

use kiln::{
    DtypeChoice, Error, Layers, Model, ModelBuilder, Offload, Plan, Result,
    device::{DeviceName, Opened},
    expert::{ConfigFile, kernels::Choice, models::configure, source::Source},
};
use serde::Serialize;

mod beams;
mod case;
mod embeddings;
mod encoder;
mod folder;
mod forward;
mod generate;
mod mel;
mod processors;
mod quant;
mod sensitive;
mod transcribe;

use case::Case;
pub use folder::Folder;

/// Largest difference of logits that a different order of float32 operations explains, for logits that span a
/// range of 10. The tolerance is proportional for larger ranges.
pub const TOLERANCE: f64 = 2e-4;

/// The result of a case.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub enum Outcome {
    Ok {
        max_dlogit: f64,
    },
    Failed {
        max_dlogit: Option<f64>,
        why: String,
    },
    Skipped {
        reason: String,
    },
    /// The reference was wrong here and was later corrected, or the right result cannot be determined.
    Differs {
        reason: String,
    },
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// `MODEL/CASE`
    pub name: String,
    /// The cache strategy that the case ran with
    pub cache: String,
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<44}  {:<8}  ", self.name, self.cache)?;
        match &self.outcome {
            Outcome::Ok { max_dlogit } => write!(f, "{max_dlogit:>9.1e}  ok"),
            Outcome::Failed { max_dlogit: Some(d), why } => write!(f, "{d:>9.1e}  FAILED: {why}"),
            Outcome::Failed { max_dlogit: None, why } => write!(f, "{:>9}  FAILED: {why}", "-"),
            Outcome::Skipped { reason } => write!(f, "{:>9}  skipped: {reason}", "-"),
            Outcome::Differs { reason } => write!(f, "{:>9}  differs, as it must: {reason}", "-"),
        }
    }
}

/// Number of cases per outcome. Displays as the last line of the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
    /// Number of cases that differ where the reference is known to be wrong, or where a rounding error
    /// decides.
    pub differ: usize,
}

impl Summary {
    pub fn count(&mut self, line: &Line) {
        match line.outcome {
            Outcome::Ok { .. } => self.passed += 1,
            Outcome::Failed { .. } => self.failed += 1,
            Outcome::Skipped { .. } => self.skipped += 1,
            Outcome::Differs { .. } => self.differ += 1,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)?;
        match self.differ {
            0 => Ok(()),
            differ => write!(f, ", {differ} differ as they must"),
        }
    }
}

/// Device, kernels and cache settings with which cases run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub device: Opened,
    /// Devices after the first. Each device computes one block, and the last one the rest.
    pub further: Vec<Opened>,
    pub kernels: Choice,
    /// A cache for every case that names none, or names `dynamic`: the results must be the same.
    pub cache: Option<Plan>,
    /// The part of each cache that is offloaded to host memory: it must not change the results.
    pub offload: Option<Offload>,
    /// Number of experts of each block that stay on the device, if experts are kept in host memory: it must
    /// not change the results.
    pub resident_experts: Option<usize>,
    /// The device that computes experts, if it is another one: it must not change the results.
    pub experts_on: Option<DeviceName>,
}

impl Setup {
    /// Creates a setup that runs the cases as recorded.
    pub fn on(device: &Opened) -> Self {
        Self {
            device: device.clone(),
            further: Vec::new(),
            kernels: Choice::Auto,
            cache: None,
            offload: None,
            resident_experts: None,
            experts_on: None,
        }
    }

    /// Loads a model in float32, the type in which the recordings were computed.
    async fn load(&self, folder: Arc<dyn Source>, adapter: Option<Arc<dyn Source>>) -> kiln::Result<Model> {
        let config = || ConfigFile::from_source(&*folder);
        let has_experts = || Ok(configure(&config()?)?.sizes().experts.is_some());
        let resident = match self.resident_experts {
            Some(resident) if has_experts()? => Some(resident),
            _ => None,
        };
        let experts_on = match self.experts_on {
            Some(device) if has_experts()? => Some(device),
            _ => None,
        };
        let devices = [&self.device].into_iter().chain(&self.further).cloned();
        let model = ModelBuilder::from_source(folder).kernels(self.kernels);
        let model = model.devices(devices, Layers::Numbers(vec![1; self.further.len()]));
        let model = adapter.into_iter().fold(model, |model, adapter| model.adapter_from_source(adapter, 1.0));
        let model = model.offload_experts(resident).experts_on(experts_on);
        model.dtype(DtypeChoice::F32).exact(true).load_async().await
    }
}

/// Runs every case of `folder` whose name, `MODEL/CASE`, is `wanted`, and passes each line to `report` once
/// it is known.
///
/// # Errors
/// A folder that does not contain fixtures, and any error of `report`. A failed case is a line, not an error.
pub async fn run<E: From<Error>>(
    folder: Arc<dyn Source>,
    wanted: &mut dyn FnMut(&str) -> bool,
    setup: &Setup,
    report: &mut dyn FnMut(&Line) -> Result<(), E>,
) -> Result<Summary, E> {
    let folder = Folder::open(folder)?;
    let mut summary = Summary::default();
    // The cases of a model are adjacent, so only one model is loaded at a time.
    let mut loaded: Option<(String, Model)> = None;
    for case in &folder.cases {
        let name = format!("{}/{}", case.model, case.case);
        if !wanted(&name) {
            continue;
        }
        let (cache, outcome) = run_case(&folder, case, setup, &mut loaded).await;
        let line = Line { name, cache, outcome };
        summary.count(&line);
        report(&line)?;
    }
    Ok(summary)
}

async fn run_case(
    folder: &Folder,
    case: &Case,
    setup: &Setup,
    loaded: &mut Option<(String, Model)>,
) -> (String, Outcome) {
    if let Some(reason) = case.not_yet(folder) {
        return ("-".to_owned(), Outcome::Skipped { reason });
    }
    let result = match &*case.model {
        "proc" => Some(processors::run(folder, case)),
        "quant" => Some(quant::run(folder, case, setup).await),
        "mel" => Some(mel::run(folder, case)),
        _ => None,
    };
    if let Some(result) = result {
        return ("-".to_owned(), outcome(result));
    }
    let cache = match (case.cache(folder), &setup.cache) {
        (named, Some(other)) if named == "dynamic" => other.to_string(),
        (named, _) => named,
    };
    let run = async {
        let plan = Plan::named(&cache)?;
        let plan = setup.offload.iter().fold(plan, |plan, offload| plan.offloaded(*offload));
        let key = format!("{}{}", case.model, case.adapter().unwrap_or_default());
        let model = match loaded.take().filter(|(name, _)| *name == key) {
            Some((_, model)) => model,
            None => {
                let adapter = case.adapter().map(|name| folder.adapter(name));
                setup.load(folder.model(&case.model), adapter).await?
            }
        };
        *loaded = Some((key, model.clone()));
        Ok((model, plan))
    };
    let (model, plan) = match run.await {
        Ok(ready) => ready,
        Err(error) => return (cache, outcome(Err(error))),
    };
    let result = if case.embeddings.is_some() {
        embeddings::run(folder, case, &model).await
    } else if case.wave.is_some() {
        transcribe::run(folder, case, &model, &plan).await
    } else if !case.prompt.is_empty() {
        encoder::run(folder, case, &model, &plan).await
    } else if case.chunks.is_empty() {
        generate::run(folder, case, &model, setup, &plan).await
    } else {
        forward::run(folder, case, &model, &plan).await
    };
    let outcome = match (outcome(result), case.known_to_differ(folder)) {
        (Outcome::Failed { max_dlogit, why }, None) if packs_as_transformers(&cache) => {
            match sensitive::turns_on_a_rounding(folder, case, &model, setup, &plan).await {
                Ok(Some(reason)) => Outcome::Differs { reason },
                _ => Outcome::Failed { max_dlogit, why },
            }
        }
        (outcome, None) => outcome,
        (Outcome::Failed { .. }, Some(reason)) => Outcome::Differs { reason },
        (_, Some(reason)) => Outcome::Failed {
            max_dlogit: None,
            why: format!("agrees, where it was known to differ: {reason}"),
        },
    };
    (cache, outcome)
}

/// Whether every number is rounded to a code as Transformers does it.
fn packs_as_transformers(cache: &str) -> bool {
    ["requantize", "fp8"].iter().any(|rule| cache.contains(rule))
}

/// The reason why a case did not pass.
#[derive(Debug)]
pub(crate) struct Mismatch {
    max_dlogit: Option<f64>,
    why: String,
}

impl From<Error> for Mismatch {
    fn from(error: Error) -> Self {
        Self { max_dlogit: None, why: error.to_string() }
    }
}

impl Mismatch {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { max_dlogit: None, why: why.into() }
    }
}

fn outcome(result: Result<f64, Mismatch>) -> Outcome {
    match result {
        Ok(max_dlogit) if max_dlogit <= TOLERANCE => Outcome::Ok { max_dlogit },
        Ok(max_dlogit) => Outcome::Failed {
            max_dlogit: Some(max_dlogit),
            why: format!("logits differ by more than {TOLERANCE:e}"),
        },
        Err(Mismatch { max_dlogit, why }) => Outcome::Failed { max_dlogit, why },
    }
}

/// Returns the largest difference of the logits of a token; relative if they span a range of more than 10.
pub(crate) fn difference_of_logits(got: &[f32], want: &[f32]) -> Result<f64, Mismatch> {
    let kept = || want.iter().copied().filter(|&want| want > -1e29).map(f64::from);
    let (least, most) = (kept().fold(f64::INFINITY, f64::min), kept().fold(f64::NEG_INFINITY, f64::max));
    Ok(difference(got, want)? / ((most - least) / 10.0).max(1.0))
}

/// Returns the largest absolute difference. Removed tokens (-inf, recorded as -1e30) must be the same on both
/// sides.
pub(crate) fn difference(got: &[f32], want: &[f32]) -> Result<f64, Mismatch> {
    if got.len() != want.len() {
        return Err(Mismatch::new(format!("{} numbers, {} were recorded", got.len(), want.len())));
    }
    let mut largest: f64 = 0.0;
    for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (removed, expected) = (got <= -1e29, want <= -1e29);
        // Infinities and NaN match nothing, not even themselves: no recording contains them.
        if removed != expected || !(removed || (got - want).is_finite()) {
            return Err(Mismatch::new(format!("number {at} is {got}, {want} was recorded")));
        }
        if !removed {
            largest = largest.max((f64::from(got) - f64::from(want)).abs());
        }
    }
    Ok(largest)
}
