//! Triangular filters on the mel scale, as in `mel_filter_bank` of Transformers with `norm="slaney",
//! mel_scale="slaney"`.

use super::spectrum::BINS;

/// Upper frequency limit, in hertz.
const HIGHEST: f64 = 8000.0;

/// Slaney's mel scale is linear up to this frequency and logarithmic above it.
const KNEE: f64 = 1000.0;
const KNEE_MEL: f64 = 15.0;
/// Number of mels per factor of e above the knee: 27 per factor of 6.4.
fn mels_per_e() -> f64 {
    27.0 / 6.4_f64.ln()
}

fn mel(hertz: f64) -> f64 {
    match hertz < KNEE {
        true => hertz * KNEE_MEL / KNEE,
        false => KNEE_MEL + (hertz / KNEE).ln() * mels_per_e(),
    }
}

fn hertz(mel: f64) -> f64 {
    match mel < KNEE_MEL {
        true => mel * KNEE / KNEE_MEL,
        false => KNEE * ((mel - KNEE_MEL) / mels_per_e()).exp(),
    }
}

/// The filters of all bands.
#[derive(Debug)]
pub(super) struct Filters(Vec<Filter>);

/// Weights of consecutive bins of a spectrum; all other weights are 0.
#[derive(Debug)]
struct Filter {
    first: usize,
    weights: Vec<f32>,
}

impl Filters {
    pub(super) fn new(bands: usize) -> Self {
        let step = mel(HIGHEST) / (bands + 1) as f64;
        let corner = |band: usize| hertz(step * band as f64);
        let filter = |band: usize| {
            let [low, middle, high] = [corner(band), corner(band + 1), corner(band + 2)];
            let weight = |bin: usize| {
                let hertz = HIGHEST * bin as f64 / (BINS - 1) as f64;
                let triangle = ((hertz - low) / (middle - low)).min((high - hertz) / (high - middle));
                (triangle.max(0.0) * 2.0 / (high - low)) as f32
            };
            let weights: Vec<f32> = (0..BINS).map(weight).collect();
            let first = weights.iter().position(|&weight| weight > 0.0).unwrap_or(0);
            let last = weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0);
            Filter { first, weights: weights[first..=last].to_vec() }
        };
        Self((0..bands).map(filter).collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the power in each band.
    pub(super) fn apply(&self, power: &[f32]) -> impl Iterator<Item = f32> {
        self.0.iter().map(|Filter { first, weights }| {
            weights.iter().zip(&power[*first..]).map(|(weight, power)| weight * power).sum()
        })
    }
}
