//! The loss of packed weights on a model: the model is loaded in each mixture of formats, reads a text, and
//! is compared with itself in the stored format.
//!
//! Up to three models are in memory: the original, and a mixture twice, with exact and with rounded
//! activations. At 8.5 bits per weight, these two take about as much as the original in 16 bits.

use std::path::Path;

use kiln_core::{Error, Result, model::TokenId};
use kiln_models::{Mixture, checkpoint::Checkpoint, configure};

use super::{
    Comparison, Loss, UNSEEN,
    comparison::{Lossy, ranked, recommended},
    reading::{Reading, compare, decode_speed},
    windows::Windows,
};
use crate::{Model, ModelBuilder, model::check_quant};

/// The mixtures that are probed by default: the most downloaded ones, from 8.5 bits per weight down to 2.6.
pub const MIXTURES: [Mixture; 8] = [
    Mixture::Q8_0,
    Mixture::Q6K,
    Mixture::Q5KM,
    Mixture::Q4KM,
    Mixture::Q4_0,
    Mixture::Iq4Nl,
    Mixture::Q3KM,
    Mixture::Q2K,
];

/// Maximum mean divergence, in nats, from the same mixture with exact activations, for which rounding
/// activations to 8 bits is worthwhile.
///
/// SmolLM2-135M-Instruct stays below it in each of [`MIXTURES`] (`docs/measurements/weight-loss.md` has the
/// figures), so rounding is the default.
pub const ROUNDING: f64 = 0.01;

/// The measurements of one format of the weights.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProbedWeights {
    /// The mixture in which weights are packed; `None`: the stored format.
    pub mixture: Option<Mixture>,
    /// Whether activations are exact, where the builder would round them ([`ModelBuilder::exact`]).
    pub exact: bool,
    /// Bytes of all weights on the device.
    pub bytes: u64,
    /// Mean number of bits per weight.
    pub bits: f64,
    /// The model's predictions, compared with those of the original.
    pub compared: Comparison,
    /// The model's predictions, compared with those with the same weights and exact activations; `None` if
    /// activations are exact.
    pub rounding: Option<Comparison>,
    /// Prefill speed in tokens per second, in the fastest window.
    pub prefill: f64,
    /// Decoding speed in tokens per second.
    pub decode: f64,
}

/// The result of [`probe_weights`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WeightsProbe {
    /// Number of tokens that were fed to each model.
    pub tokens: usize,
    /// Number of tokens per sequence.
    pub window: usize,
    /// The original, followed by mixtures in the requested order: each with exact activations, and, if the
    /// device rounds them, with rounded ones.
    pub weights: Vec<ProbedWeights>,
}

impl ProbedWeights {
    /// The severity of the measured loss.
    pub fn loss(&self) -> Loss {
        self.compared.loss()
    }
}

impl Lossy for ProbedWeights {
    fn bytes(&self) -> f64 {
        self.bytes as f64
    }

    fn compared(&self) -> &Comparison {
        &self.compared
    }

    /// Judges by divergence only, because even with 8 bits the likeliest token changes at about one position
    /// in a hundred, where two tokens are about equally likely. Judges the default mode only, because exact
    /// activations always lose less and are slower.
    fn is_good(&self) -> bool {
        !self.exact && self.compared.divergence <= UNSEEN
    }
}

impl WeightsProbe {
    /// The weights in the stored format.
    pub fn original(&self) -> &ProbedWeights {
        &self.weights[0]
    }

    /// The mixtures, in ascending order of loss.
    pub fn ranked(&self) -> Vec<&ProbedWeights> {
        ranked(&self.weights[1..])
    }

    /// The smallest mixture that loses at most [`UNSEEN`] nats in the default mode; `None` if no such mixture
    /// is smaller than the original.
    pub fn recommended(&self) -> Option<&ProbedWeights> {
        recommended(&self.weights[1..], self.original().bytes as f64)
    }

    /// The mixture for which rounded activations cost most; `None` if the device does not round.
    pub fn most_rounded(&self) -> Option<(&ProbedWeights, &Comparison)> {
        let rounded = self.weights.iter().filter_map(|one| Some((one, one.rounding.as_ref()?)));
        rounded.max_by(|(_, a), (_, b)| a.divergence.total_cmp(&b.divergence))
    }
}

/// Checks from the headers of a model's files that the loss of its weights can be measured.
///
/// # Errors
/// [`Error::File`] for weights that are packed already, and for models that [`quantize`](crate::quantize())
/// does not support; [`Error::Setting`] for speech models.
pub fn check_original(model: impl AsRef<Path>) -> Result<()> {
    check_unpacked(Checkpoint::open(model.as_ref())?)
}

/// [`check_original`] of a checkpoint that is open.
pub(super) fn check_unpacked(mut checkpoint: Checkpoint) -> Result<()> {
    if let Some((tensor, stored)) = checkpoint.packed_before() {
        let why = format!(
            "`{tensor}` is stored as {stored}, so a part of the model is lost already; name the original, in float32, float16 or \
             bfloat16"
        );
        return Err(Error::File { path: checkpoint.folder, why });
    }
    let configured = configure(&checkpoint.config)?;
    if configured.features().is_some() {
        let why = "is a model of speech; only those of text are probed".to_owned();
        return Err(Error::Setting { name: "model", why });
    }
    checkpoint.pack_as(Mixture::default(), None)
}

/// Measures the loss of mixtures: feeds `text` in windows of `window` tokens to `original`, and to the models
/// that `builder` loads in each of `mixtures`. Calls `on_progress` with the share of the work that is done,
/// from 0 to 1.
///
/// `builder` creates the builder that `original` was loaded with; this function sets its `quant`, and loads
/// each mixture that it would compute in integers in floats, too.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{Mixture, Model, expert::probe::probe_weights};
///
/// let builder = || Model::builder(folder).device(kiln::device::DeviceName::Cpu);
/// let original = builder().exact(true).load()?;
/// let text = original.encode("Friends, Romans, countrymen, lend me your ears; I come to bury Caesar.")?;
/// let probe = probe_weights(&original, &builder, &text, 16, &[Mixture::Q8_0, Mixture::Q4_0], &mut |_| ())?;
/// for probed in probe.ranked() {
///     println!("{:?}: {:.2} bits, {:.4} nats lost", probed.mixture, probed.bits, probed.compared.divergence);
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
///
/// # Errors
/// The errors of [`check_original`] and of [`ModelBuilder::load`]; a text of fewer than two tokens, a window
/// longer than the model's positions, mixtures that the device does not support, a model whose own scores are
/// not finite numbers.
pub fn probe_weights<'b>(
    original: &Model,
    builder: &dyn Fn() -> ModelBuilder<'b>,
    text: &[TokenId],
    window: usize,
    mixtures: &[Mixture],
    on_progress: &mut dyn FnMut(f64),
) -> Result<WeightsProbe> {
    check_unpacked(builder().checkpoint()?)?;
    let windows = Windows::of(text, window, original)?;
    let info = &original.opened().info;
    for mixture in mixtures {
        check_quant(*mixture, original.kernels(), original.dtype(), info)?;
    }
    let choice = builder().arithmetic_choice();
    let rounds = |mixture: &Mixture| {
        choice.may_be_integers_on(info.class) && original.kernels().multiplies_in_integers(mixture.format())
    };
    let tokens = windows.tokens();
    let models = 1 + mixtures.iter().map(|mixture| 1 + usize::from(rounds(mixture))).sum::<usize>();
    // Each model reads, and each is compared.
    let (mut done, total) = (0, (2 * tokens * models) as f64);
    let mut progress = |tokens: usize| {
        done += tokens;
        on_progress(done as f64 / total);
    };
    let probed = |reading: &Reading<'_>, mixture, exact, compared, rounding| {
        let model = reading.model();
        let bytes = model.weight_bytes();
        Ok(ProbedWeights {
            mixture,
            exact,
            bytes,
            bits: 8.0 * bytes as f64 / model.parameters().max(1) as f64,
            compared,
            rounding,
            prefill: reading.prefill,
            decode: decode_speed(model, windows)?,
        })
    };
    let right = Reading::of(original, windows, &mut progress)?;
    let [compared] = compare(&[&right], [[0, 0]], windows, &mut progress)?;
    let mut weights = vec![probed(&right, None, false, compared, None)?];
    for mixture in mixtures {
        let exact_model = builder().quant(*mixture).exact(true).load()?;
        let exact = Reading::of(&exact_model, windows, &mut progress)?;
        if !rounds(mixture) {
            let [compared] = compare(&[&right, &exact], [[0, 1]], windows, &mut progress)?;
            weights.push(probed(&exact, Some(*mixture), false, compared, None)?);
            continue;
        }
        let rounded_model = builder().quant(*mixture).load()?;
        let rounded = Reading::of(&rounded_model, windows, &mut progress)?;
        let [of_exact, of_rounded, rounding] =
            compare(&[&right, &exact, &rounded], [[0, 1], [0, 2], [1, 2]], windows, &mut |places| {
                progress(2 * places);
            })?;
        weights.push(probed(&exact, Some(*mixture), true, of_exact, None)?);
        let mut with_rounding = probed(&rounded, Some(*mixture), false, of_rounded, Some(rounding))?;
        if rounded.is_in_steps() {
            // Prompts are computed as those of the exact model are.
            with_rounding.prefill = exact.prefill;
        }
        weights.push(with_rounding);
    }
    Ok(WeightsProbe { tokens, window, weights })
}
