//! Comparison of a model on a device with itself on the CPU: each kind of block and the head, on few tokens
//! and on many. This covers everything that the model launches, including Burn's own kernels, in the shapes
//! and formats that the model has.

use std::{collections::BTreeSet, sync::Arc};

use burn::tensor::DType;
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    batch::Batch,
    budget::system_has,
    model::{CausalModel, Logits, TokenId},
    read_back,
};
use kiln_generate::{Generation, GenerationConfig, Options};
use kiln_kernels::{
    Arithmetic, Choice, Implementation, Kernels, RunCount,
    device::{self, DeviceClass, DeviceName, Opened},
};
use kiln_models::{
    Configured, ExpertPlace, LoadTarget,
    checkpoint::{Checkpoint, Loader},
};
use kiln_weights::Format;
use sha2::{Digest, Sha256};

use super::{CAPTURED, LOADING, MATRIX_UNITS, MODEL, record::Record};

/// Tokens of each pass, in order: as many as in a prompt, a short prompt, and a step.
const PASSES: [usize; 3] = [40, 3, 1];

/// Number of tokens that are generated with captured steps and without.
const GENERATED: usize = 12;

/// Maximum number of blocks that are compared, since loading them takes time.
const MOST_BLOCKS: usize = 6;

/// The agreement of a pass on the device with the CPU.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Agreement {
    pub tokens: usize,
    /// The minimum over positions of the cosine between the logits of device and CPU, each without their
    /// mean.
    pub cosine: f64,
    /// The largest error of a logit, relative to the allowed error.
    pub farthest: f64,
}

/// The result of comparing a model on a device with itself on the CPU.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelVerdict {
    /// The blocks that were compared, with at least one of each kind.
    pub blocks: Vec<usize>,
    pub dtype: DType,
    /// The formats of weights that stay packed.
    pub formats: Vec<Format>,
    pub passes: Vec<Agreement>,
    /// Kernels that were launched
    pub ran: Vec<RunCount>,
    /// Whether captured steps gave the tokens of launched ones; `None` if steps are not captured.
    pub captured: Option<bool>,
    /// The fault, in a sentence.
    pub why: Option<String>,
    /// The kernels, matrix units or captured steps without which the model is right. Empty if it is wrong
    /// even without all of them.
    pub without: BTreeSet<String>,
}

/// A device, its kernels and the number type.
#[derive(Clone, Debug)]
struct On {
    device: Opened,
    kernels: Kernels,
    dtype: DType,
}

/// A model reduced to some blocks between its embeddings and its head: the first, the last, and each kind of
/// block.
#[derive(Debug)]
pub(crate) struct Ends<'a> {
    checkpoint: &'a Checkpoint,
    configured: Box<dyn Configured>,
    blocks: Vec<usize>,
    /// Hash of the shapes, formats and kinds of the compared parts.
    signature: String,
    resident_experts: Option<usize>,
    largest_binding: usize,
}

impl<'a> Ends<'a> {
    /// Selects the blocks to compare. `None` for models whose blocks cannot be left out, and for models with
    /// too few positions.
    pub(crate) fn of(
        checkpoint: &'a Checkpoint,
        configured: &dyn Configured,
        resident_experts: Option<usize>,
        largest_binding: usize,
    ) -> Option<Self> {
        let (sizes, needs) = (configured.sizes(), configured.needs());
        if sizes.positions < PASSES.iter().sum::<usize>() + GENERATED || sizes.vocab < 2 {
            return None;
        }
        let stored = checkpoint.block_kinds(sizes.layers);
        let kinds: Vec<_> = stored.iter().zip(&needs).map(|(kind, need)| format!("{kind}{need:?}")).collect();
        let mut seen = BTreeSet::new();
        let last = kinds.len().checked_sub(1)?;
        let mut blocks: Vec<_> =
            kinds.iter().enumerate().filter(|(_, kind)| seen.insert(*kind)).map(|(i, _)| i).collect();
        blocks.truncate(MOST_BLOCKS - 1);
        if !blocks.contains(&last) {
            blocks.push(last);
        }
        let mut hash = Sha256::new();
        hash.update(format!("{sizes:?}"));
        blocks.iter().for_each(|block| hash.update(&kinds[*block]));
        hash.update(checkpoint.block_kinds(0).concat());
        let signature = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let configured = configured.only(&blocks)?;
        Some(Self { checkpoint, configured, blocks, signature, resident_experts, largest_binding })
    }

    /// The key of a verdict: these shapes and formats, in this number type, with these kernels.
    pub(super) fn key(&self, dtype: DType, without: &BTreeSet<String>) -> String {
        let without: Vec<_> = without.iter().map(String::as_str).collect();
        format!("{} | model {} | without {}", dtype.name(), self.signature, without.join(", "))
    }

    /// The parts that make the model wrong; only [`MODEL`] if it is wrong even without everything that can be
    /// left out.
    ///
    /// # Errors
    /// Errors of the file and of memory; [`Error::DeviceLost`].
    pub(super) async fn distrusted(
        &self,
        record: &Record,
        kernels: &Kernels,
        device: &Opened,
        dtype: DType,
    ) -> Result<BTreeSet<String>> {
        let mark = record.clone();
        let watched = kernels.clone().watched(move |kernel| mark.mark(kernel));
        let verdict = self.verdict(&watched, kernels, device, dtype, |step| record.mark(step)).await?;
        record.clear();
        match verdict.why {
            None => Ok(BTreeSet::new()),
            Some(why) => {
                tracing::debug!(target: "kiln", why, without = ?verdict.without);
                match verdict.without.is_empty() {
                    true => Ok([MODEL.to_owned()].into()),
                    false => Ok(verdict.without),
                }
            }
        }
    }

    /// Compares a device with the CPU, and searches for the fault. `watched` are the kernels for the first
    /// comparison; `about_to` is called with the name of each following step.
    ///
    /// # Errors
    /// Errors of the file and of memory; [`Error::DeviceLost`].
    pub(crate) async fn verdict(
        &self,
        watched: &Kernels,
        kernels: &Kernels,
        device: &Opened,
        dtype: DType,
        about_to: impl Fn(&str),
    ) -> Result<ModelVerdict> {
        let want = self.wanted(dtype).await?;
        about_to(LOADING);
        let on = |kernels: &Kernels| On { device: device.clone(), kernels: kernels.clone(), dtype };
        let (passes, mut why) = self.agreement(&on(watched), &want).await?;
        let ran = kernels.ran();
        let (mut without, mut captured) = (BTreeSet::new(), None);
        if why.is_some() {
            without = self.culprits(&on(kernels), &want, &ran).await?;
        } else {
            about_to(CAPTURED);
            captured = self.captured(&on(kernels)).await?;
            if captured == Some(false) {
                why = Some("captured steps give other tokens than launched ones".to_owned());
                without.insert(CAPTURED.to_owned());
            }
        }
        let formats = self.checkpoint.packed_formats(kernels, dtype);
        Ok(ModelVerdict { blocks: self.blocks.clone(), dtype, formats, passes, ran, captured, why, without })
    }

    /// The reference logits from the CPU.
    async fn wanted(&self, dtype: DType) -> Result<Vec<Vec<f32>>> {
        let device = device::open(DeviceName::Cpu)?;
        let kernels = Kernels::new(Choice::Auto, &device.device)?;
        let held = |dtype| self.checkpoint.held_bytes_of(&self.blocks, &kernels, dtype);
        // Codes stay packed only in float32. Other weights have the device's number type, as far as the CPU
        // supports it.
        let dtype = match dtype {
            DType::F16 if held(DType::F16) < held(DType::F32) => DType::F16,
            _ => DType::F32,
        };
        if !system_has(2 * held(dtype)) {
            return Err(Error::refused("a copy of some blocks in host memory"));
        }
        let on = On { device, kernels, dtype };
        self.logits(&on, &*self.load(&on)?).await
    }

    fn load(&self, on: &On) -> Result<Box<dyn CausalModel>> {
        let largest = match on.device.info.class {
            DeviceClass::Cpu => usize::MAX,
            _ => self.largest_binding,
        };
        let copied = on.device.is_asynchronous();
        let (kernels, arithmetic) = (on.kernels.clone(), Arithmetic::Floats);
        let target = LoadTarget { kernels, arithmetic, largest_binding: largest, copied };
        let mut ignore = |_| {};
        let mut loader = Loader::new(self.checkpoint, target.into(), on.dtype, &mut ignore);
        if let Some(resident) = self.resident_experts.filter(|_| on.device.info.class != DeviceClass::Cpu) {
            loader.place_experts(ExpertPlace::HostMemory { resident });
        }
        self.configured.load(&mut loader, &on.kernels.clone().into())
    }

    /// Tokens that do not repeat soon.
    fn tokens(&self) -> Vec<TokenId> {
        let vocab = self.configured.sizes().vocab;
        (0..PASSES.iter().sum()).map(|i| ((i * 7919 + 13) % vocab) as TokenId).collect()
    }

    /// Logits of all positions of each pass; the hidden states of a model that only makes embeddings.
    async fn logits(&self, on: &On, model: &dyn CausalModel) -> Result<Vec<Vec<f32>>> {
        let mut cache = Plan::dynamic().build(&self.configured.needs(), &on.kernels.clone().into())?;
        let tokens = self.tokens();
        let mut rest = &tokens[..];
        let mut of_passes = Vec::new();
        let output = if model.check_generative().is_ok() { Logits::All } else { Logits::Hidden };
        for n in PASSES {
            let (now, after) = rest.split_at(n);
            rest = after;
            let batch = Batch::from_rows(&[now.to_vec()], &on.device.device)?;
            if model.is_bidirectional() {
                cache.reset();
            }
            let logits = model.forward(&batch, output, &mut cache)?;
            of_passes.push(read_back::start(logits).finish().await?.iter::<f32>().collect());
        }
        Ok(of_passes)
    }

    /// The agreement of a device, and its fault. Errors that are not about memory or the device count as
    /// wrong results.
    async fn agreement(&self, on: &On, want: &[Vec<f32>]) -> Result<(Vec<Agreement>, Option<String>)> {
        let got = match self.load(on) {
            Ok(model) => self.logits(on, &*model).await,
            Err(error) => Err(error),
        };
        let got = match got {
            Ok(got) => got,
            Err(Error::Execution(why)) => {
                on.device.check()?;
                return Ok((Vec::new(), Some(why)));
            }
            Err(error) => return Err(error),
        };
        let sizes = self.configured.sizes();
        let passes = PASSES.iter().zip(got.iter().zip(want));
        let passes: Vec<_> =
            passes.map(|(&tokens, (got, want))| compared(tokens, got, want, on.dtype)).collect();
        // If two experts are almost equally likely, rounding decides between them. This changes the results
        // of a few tokens.
        let allowed = if sizes.experts.is_some() { PASSES.iter().sum::<usize>() / 4 } else { 0 };
        let wrong = passes.iter().map(|(_, wrong)| wrong).sum::<usize>();
        let worst =
            passes.iter().map(|(agreement, _)| agreement).max_by(|a, b| a.farthest.total_cmp(&b.farthest));
        let why = worst.filter(|_| wrong > allowed).map(|worst| {
            format!(
                "of {} positions {wrong} have other logits than on the CPU: a cosine of {:.4}, one logit {:.1} times as far off as is allowed",
                PASSES.iter().sum::<usize>(),
                worst.cosine,
                worst.farthest
            )
        });
        Ok((passes.into_iter().map(|(agreement, _)| agreement).collect(), why))
    }

    /// The parts without which the device agrees: one kernel, the matrix units, or all kernels. Empty if it
    /// does not agree even without all of them.
    async fn culprits(&self, on: &On, want: &[Vec<f32>], ran: &[RunCount]) -> Result<BTreeSet<String>> {
        let names: Vec<_> = ran
            .iter()
            .filter(|ran| ran.implementation != Implementation::Reference)
            .map(|ran| ran.kernel)
            .collect();
        let is_right = async |kernels: Kernels| -> Result<bool> {
            Ok(self.agreement(&On { kernels, ..on.clone() }, want).await?.1.is_none())
        };
        for name in &names {
            if is_right(on.kernels.clone().and_without([*name])).await? {
                return Ok([(*name).to_owned()].into());
            }
        }
        if let Some(units) = on.device.info.matrix_units {
            on.device.clone().with_matrix_units(None);
            let helps = is_right(on.kernels.clone()).await;
            on.device.clone().with_matrix_units(Some(units));
            if helps? {
                return Ok([MATRIX_UNITS.to_owned()].into());
            }
        }
        Ok(match is_right(on.kernels.clone().and_without(names.iter().copied())).await? {
            true => names.into_iter().map(str::to_owned).collect(),
            false => BTreeSet::new(),
        })
    }

    /// Whether captured steps give the tokens of launched ones; `None` if steps are not captured.
    async fn captured(&self, on: &On) -> Result<Option<bool>> {
        let model: Arc<dyn CausalModel> = self.load(on)?.into();
        if !model.can_be_captured() || model.check_generative().is_err() {
            return Ok(None);
        }
        let tokens = async |compile| -> Result<Vec<Option<TokenId>>> {
            let cache = Plan::dynamic().build(&self.configured.needs(), &on.kernels.clone().into())?;
            let prompt = self.tokens();
            let batch = Batch::from_rows(std::slice::from_ref(&prompt), &on.device.device)?;
            let config = GenerationConfig::new().max_new_tokens(GENERATED).do_sample(false);
            let settings = config.eos_token_id(Vec::new()).resolve()?;
            let kernels = Some(on.kernels.clone());
            let options = Options { settings, lookahead: true, compile, kernels, ..Options::default() };
            let mut steps = Generation::new(model.clone(), cache, batch, vec![prompt], options)?;
            let mut tokens = Vec::new();
            while let Some(step) = steps.next_step().await {
                tokens.push(step?.tokens.first().copied().flatten());
            }
            Ok(tokens)
        };
        let launched = match tokens(false).await {
            // The comparison of logits reports those that are not numbers.
            Err(Error::Execution(_)) => return Ok(None),
            launched => launched?,
        };
        match tokens(true).await {
            Ok(captured) => Ok(Some(captured == launched)),
            Err(Error::Execution(_)) => Ok(Some(false)),
            Err(error) => Err(error),
        }
    }
}

/// The minimum cosine of logits that count as equal.
///
/// The error of a product of rounded numbers is about the rounding error of its type, and a few blocks
/// accumulate about ten times that: 1 % in float16, 8 % in bfloat16, nothing in float32. A relative error e
/// gives a cosine of 1 - e²/2. These bounds allow several times as much: 4.5 %, 14 % and 1.4 %. A wrong
/// kernel changes everything, or a few numbers by far, which [`FARTHEST`] finds.
fn least_cosine(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 0.9999,
        DType::BF16 => 0.99,
        _ => 0.999,
    }
}

/// Maximum error of one logit, in units of the root mean square error that the cosine allows: among a million
/// numbers, none is off by six times that by chance. Logits that are farther apart than twice that keep their
/// order, and so does the likeliest of them.
const FARTHEST: f64 = 6.0;

/// The agreement of a pass, and the number of positions that do not agree.
fn compared(tokens: usize, got: &[f32], want: &[f32], dtype: DType) -> (Agreement, usize) {
    let width = want.len() / tokens;
    let share = (2.0 * (1.0 - least_cosine(dtype))).sqrt();
    let mut agreement = Agreement { tokens, cosine: 1.0, farthest: 0.0 };
    let mut wrong = tokens.saturating_sub(got.len() / width);
    for (got, want) in got.chunks(width).zip(want.chunks(width)) {
        // A common offset of all logits does not affect tokens.
        let centered = |logits: &[f32]| -> Vec<f64> {
            let mean = logits.iter().map(|logit| f64::from(*logit)).sum::<f64>() / logits.len() as f64;
            logits.iter().map(|logit| f64::from(*logit) - mean).collect()
        };
        let (got, want) = (centered(got), centered(want));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let [square, other] = [dot(&want, &want), dot(&got, &got)];
        let cosine = match square > 0.0 || other > 0.0 {
            true => dot(&got, &want) / (square * other).sqrt(),
            false => 1.0,
        };
        let allowed = FARTHEST * share * (square / width as f64).sqrt() + f64::from(f32::MIN_POSITIVE);
        let off = got.iter().zip(&want).map(|(got, want)| (got - want).abs());
        let farthest =
            off.fold(0.0, |most: f64, off| if off.is_nan() { f64::INFINITY } else { most.max(off) });
        let farthest = farthest / allowed;
        // NaN is wrong, too.
        let is_right = cosine >= least_cosine(dtype) && farthest <= 1.0;
        wrong += usize::from(!is_right);
        agreement.cosine = if cosine.is_nan() { f64::NEG_INFINITY } else { agreement.cosine.min(cosine) };
        agreement.farthest = agreement.farthest.max(farthest);
    }
    (agreement, wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits with the spread of a model's logits and an offset.
    fn logits(n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 10.0 * scale - 20.0).collect()
    }

    #[test]
    fn comparisons_accept_rounding_and_reject_faults() {
        let vocab = 1000;
        let want = logits(vocab, 1.0);
        let wrong = |got: &[f32], dtype| compared(1, got, &want, dtype).1;
        let noise = |share: f32| -> Vec<f32> {
            let noise = |i: usize| ((i * 104_729 % 2003) as f32 / 2003.0 - 0.5) * 3.5 * 2.9 * share;
            want.iter().enumerate().map(|(i, logit)| logit + noise(i)).collect()
        };
        assert_eq!([wrong(&want, DType::F32), wrong(&noise(0.01), DType::F16)], [0, 0]);
        assert_eq!([wrong(&noise(0.08), DType::BF16), wrong(&noise(0.08), DType::F16)], [0, 1]);
        assert_eq!(wrong(&noise(0.001), DType::F32), 0);
        let shifted: Vec<f32> = want.iter().map(|logit| logit + 3.0).collect();
        assert_eq!(wrong(&shifted, DType::F32), 0, "the distribution is the same");
        // With one wrong row of the head, the cosine hardly changes.
        let mut one = want.clone();
        one[500] += 9.0;
        let (agreement, positions) = compared(1, &one, &want, DType::F16);
        assert!(agreement.cosine > 0.99 && positions == 1, "{agreement:?}");
        for bad in [f32::NAN, f32::INFINITY] {
            one[500] = bad;
            assert_eq!(wrong(&one, DType::F16), 1, "{bad}");
        }
        assert_eq!(wrong(&[], DType::F16), 1, "nothing was computed");
    }
}
