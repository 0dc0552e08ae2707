//! The power spectrum of frames of 400 samples.

use std::{f64::consts::TAU, fmt, sync::Arc};

use realfft::{RealFftPlanner, RealToComplex};

/// Number of samples in a frame.
pub(super) const FRAME: usize = 400;
/// Number of frequency bins in the spectrum of a frame.
pub(super) const BINS: usize = FRAME / 2 + 1;

pub(super) struct Spectrum {
    /// The periodic Hann window
    window: Vec<f32>,
    fft: Arc<dyn RealToComplex<f32>>,
}

impl Spectrum {
    pub(super) fn new() -> Self {
        let angle = |n: usize| TAU * n as f64 / FRAME as f64;
        Self {
            window: (0..FRAME).map(|n| (0.5 - 0.5 * angle(n).cos()) as f32).collect(),
            fft: RealFftPlanner::new().plan_fft_forward(FRAME),
        }
    }

    /// Returns the power spectrum of a frame of 400 samples: the squared magnitudes of its bins.
    pub(super) fn power(&self, frame: &[f32]) -> Vec<f32> {
        let mut windowed: Vec<f32> = frame.iter().zip(&self.window).map(|(x, window)| x * window).collect();
        let mut spectrum = self.fft.make_output_vec();
        self.fft.process(&mut windowed, &mut spectrum).expect("both have the length of the transform");
        spectrum.iter().map(|number| number.norm_sqr()).collect()
    }
}

impl fmt::Debug for Spectrum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spectrum").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_equals_that_of_a_windowed_fourier_transform() {
        let spectrum = Spectrum::new();
        for seed in 0..8 {
            let frame: Vec<f32> =
                (0..FRAME).map(|n| ((n * n + 31 * seed * n) % 97) as f32 / 97.0 - 0.5).collect();
            let power = spectrum.power(&frame);
            assert_eq!(power.len(), BINS);
            for (k, got) in power.iter().enumerate() {
                let (mut re, mut im) = (0.0, 0.0);
                for (n, &x) in frame.iter().enumerate() {
                    let hann = 0.5 - 0.5 * (TAU * n as f64 / FRAME as f64).cos();
                    let angle = TAU * (k * n % FRAME) as f64 / FRAME as f64;
                    re += hann * f64::from(x) * angle.cos();
                    im -= hann * f64::from(x) * angle.sin();
                }
                // A bin is a sum of 400 terms of at most 0.5, each rounded twice in about twenty stages.
                let (got, want) = (f64::from(*got).sqrt(), re.hypot(im));
                assert!((got - want).abs() < 100.0 * 40.0 * 2f64.powi(-24), "{seed} {k}: {got} {want}");
            }
        }
    }
}
