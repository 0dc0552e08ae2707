//! What packed weights cost on a model: it is loaded in each mixture of formats, reads a text, and is compared with itself as it is
//! stored.
//!
//! Up to three models are in memory: the original, and a mixture twice, with exact and with rounded activations. In 8.5 bits a weight,
//! these two take about as much as the original in 16 bits.

use std::path::Path;

use kiln_core::{Error, Result, model::TokenId};
use kiln_kernels::device::DeviceClass;
use kiln_models::{Mixture, checkpoint::Checkpoint, configure};

use super::{
    Comparison, Loss, UNSEEN,
    comparison::{Lossy, ranked, recommended},
    reading::{Reading, compare, decode_speed},
    windows::Windows,
};
use crate::{Model, ModelBuilder, model::check_quant};

/// The mixtures that are probed unasked: those that are downloaded most, from 8.5 bits a weight down to 2.6.
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

/// Mean divergence, in nats, from the same mixture with exact activations, up to which it is worth to round activations to 8 bits.
///
/// SmolLM2-135M-Instruct stays within it in each of [`MIXTURES`] (`docs/measurements/weight-loss.md` has the figures), so rounding is the default.
pub const ROUNDING: f64 = 0.01;

/// What was measured of weights.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProbedWeights {
    /// What they are packed in; `None`: they are as they are stored.
    pub mixture: Option<Mixture>,
    /// Whether [`ModelBuilder::exact`] was asked for, on a device that rounds activations otherwise.
    pub exact: bool,
    /// Bytes of all weights on the device.
    pub bytes: u64,
    /// Bits of a weight, on average.
    pub bits: f64,
    /// What the model says, beside what the original says.
    pub compared: Comparison,
    /// What the model says, beside what it says with the same weights and exact activations; `None` where activations are exact.
    pub rounding: Option<Comparison>,
    /// Tokens of the text that are read a second, in the fastest window.
    pub prefill: f64,
    /// Tokens that are decoded a second.
    pub decode: f64,
}

/// What [`probe_weights`] measured.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WeightsProbe {
    /// Tokens of text that were fed to each model.
    pub tokens: usize,
    /// Tokens of a sequence.
    pub window: usize,
    /// The original first, then mixtures as they were asked for: each with exact activations, and, where the device rounds them, with rounded
    /// ones.
    pub weights: Vec<ProbedWeights>,
}

impl ProbedWeights {
    /// What the measured loss means.
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

    /// By its divergence alone. Even in 8 bits, the likeliest token changes at some places in a hundred, those where two are about as
    /// likely. And as it runs by default: exact activations always lose less, and are slower.
    fn is_good(&self) -> bool {
        !self.exact && self.compared.divergence <= UNSEEN
    }
}

impl WeightsProbe {
    /// The weights as they are stored.
    pub fn original(&self) -> &ProbedWeights {
        &self.weights[0]
    }

    /// The mixtures, those that lose least first.
    pub fn ranked(&self) -> Vec<&ProbedWeights> {
        ranked(&self.weights[1..])
    }

    /// The smallest mixture that loses at most [`UNSEEN`] nats as it runs by default; `None` where there is none that is smaller than the original.
    pub fn recommended(&self) -> Option<&ProbedWeights> {
        recommended(&self.weights[1..], self.original().bytes as f64)
    }

    /// The one in which rounded activations cost most; `None` where the device rounds none.
    pub fn most_rounded(&self) -> Option<(&ProbedWeights, &Comparison)> {
        let rounded = self.weights.iter().filter_map(|one| Some((one, one.rounding.as_ref()?)));
        rounded.max_by(|(_, a), (_, b)| a.divergence.total_cmp(&b.divergence))
    }
}

/// Says why the loss of a model's weights cannot be measured, if so, from the headers of its files.
///
/// # Errors
/// [`Error::File`] for weights that were packed before, and for models that [`quantize`](crate::quantize()) does not write;
/// [`Error::Setting`] for models of speech.
pub fn check_original(model: impl AsRef<Path>) -> Result<()> {
    let mut checkpoint = Checkpoint::open(model.as_ref())?;
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

/// Measures what mixtures lose: feeds `text` in windows of `window` tokens to `original`, and to the models that `builder` loads in
/// each of `mixtures`. `on_progress` is told the share of the work that is done, from 0 to 1.
///
/// `builder` makes the builder that `original` was loaded with; its `quant` and `exact` are set here.
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
/// Those of [`check_original`] and of [`ModelBuilder::load`]; a text of fewer than two tokens, a window that the model has no
/// positions for, mixtures that the device does not compute from, a model whose own scores are not finite numbers.
pub fn probe_weights<'b>(
    original: &Model,
    builder: &dyn Fn() -> ModelBuilder<'b>,
    text: &[TokenId],
    window: usize,
    mixtures: &[Mixture],
    on_progress: &mut dyn FnMut(f64),
) -> Result<WeightsProbe> {
    check_original(builder().path()?)?;
    let windows = Windows::of(text, window, original)?;
    let info = &original.opened().info;
    for mixture in mixtures {
        check_quant(*mixture, original.kernels(), original.dtype(), info)?;
    }
    let rounds = |mixture: &Mixture| info.class == DeviceClass::Cpu && mixture.format().block() > 1;
    let tokens = windows.tokens();
    let models = 1 + mixtures.iter().map(|mixture| 1 + usize::from(rounds(mixture))).sum::<usize>();
    // Each is read, and each is compared.
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
        let load = |exact| builder().quant(*mixture).exact(exact).load();
        let exact_model = load(true)?;
        let exact = Reading::of(&exact_model, windows, &mut progress)?;
        if !rounds(mixture) {
            let [compared] = compare(&[&right, &exact], [[0, 1]], windows, &mut progress)?;
            weights.push(probed(&exact, Some(*mixture), false, compared, None)?);
            continue;
        }
        let rounded_model = load(false)?;
        let rounded = Reading::of(&rounded_model, windows, &mut progress)?;
        let [of_exact, of_rounded, rounding] =
            compare(&[&right, &exact, &rounded], [[0, 1], [0, 2], [1, 2]], windows, &mut |places| {
                progress(2 * places);
            })?;
        weights.push(probed(&exact, Some(*mixture), true, of_exact, None)?);
        weights.push(probed(&rounded, Some(*mixture), false, of_rounded, Some(rounding))?);
    }
    Ok(WeightsProbe { tokens, window, weights })
}
