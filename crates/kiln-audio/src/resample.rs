//! Samples at another rate, piece by piece.
//!
//! Each sample of the result is a sum of the samples around its time, weighted by a sinc function under a Kaiser window (Smith, Digital
//! Audio Resampling, 1984). The times repeat: the result has `L` samples in the time of `M` given ones, both without a common factor, so `L`
//! lists of weights are enough, and times are exact however long the sound is.

use std::f64::consts::PI;

use crate::SAMPLE_RATE;

/// Periods of the lower of both rates that are summed to each side.
const REACH: usize = 64;

/// What would be mirrored into the result is damped by this many dB: the step of 16 bits.
const DAMPING: f64 = 96.0;

/// Where the filter has fallen to a half, as a part of the highest frequency of the lower rate. It ends there, by Kaiser's
/// formula for the width of its edge.
fn cutoff() -> f64 {
    1.0 - (DAMPING - 7.95) / (14.36 * 2.0 * REACH as f64)
}

/// Makes 16 kHz samples of samples at another rate. Nothing is delayed: before the beginning and behind the end there is
/// silence.
#[derive(Debug)]
pub(crate) struct Resampler {
    /// `[phases, taps]`: the weights of the samples around a time, for each fraction of a sample that times have
    weights: Vec<f32>,
    taps: usize,
    /// Results (L) in the time of given samples (M)
    phases: u64,
    given: u64,
    /// The samples that are still needed
    buffer: Vec<f32>,
    /// The fraction of a sample, in units of `1 / phases`, that the next result lies behind the middle of the first `taps`
    phase: u64,
    received: u64,
    made: u64,
}

impl Resampler {
    /// `rate` is not 0.
    pub(crate) fn new(rate: u32) -> Self {
        let (rate, wanted) = (u64::from(rate), SAMPLE_RATE as u64);
        let common = gcd(rate, wanted);
        let (phases, given) = (wanted / common, rate / common);
        // Given samples in a period of the lower rate.
        let period = (rate as f64 / wanted as f64).max(1.0);
        let half = (REACH as f64 * period).ceil() as usize;
        let taps = 2 * half;
        let mut weights = Vec::with_capacity(taps * phases as usize);
        for phase in 0..phases {
            let from = weights.len();
            let middle = (half - 1) as f64 + phase as f64 / phases as f64;
            weights.extend((0..taps).map(|tap| kernel((tap as f64 - middle) / period) as f32));
            // A constant stays as it is.
            let sum: f64 = weights[from..].iter().copied().map(f64::from).sum();
            weights[from..].iter_mut().for_each(|weight| *weight = (f64::from(*weight) / sum) as f32);
        }
        let buffer = vec![0.0; half - 1];
        Self { weights, taps, phases, given, buffer, phase: 0, received: 0, made: 0 }
    }

    /// Adds samples. Returns those of the result that are known now.
    pub(crate) fn push(&mut self, samples: &[f32]) -> Vec<f32> {
        self.received += samples.len() as u64;
        self.buffer.extend(samples);
        self.take(u64::MAX)
    }

    /// Ends the sound. Returns what is left; the whole result is as long as what was given, to the nearest sample.
    pub(crate) fn finish(&mut self) -> Vec<f32> {
        let all = (2 * self.received * self.phases + self.given) / (2 * self.given);
        self.buffer.resize(self.buffer.len() + self.taps, 0.0);
        self.take(all - self.made)
    }

    fn take(&mut self, most: u64) -> Vec<f32> {
        let (mut made, mut from) = (Vec::new(), 0);
        while from + self.taps <= self.buffer.len() && (made.len() as u64) < most {
            let weights = &self.weights[self.phase as usize * self.taps..][..self.taps];
            made.push(dot(weights, &self.buffer[from..][..self.taps]));
            self.phase += self.given;
            from += (self.phase / self.phases) as usize;
            self.phase %= self.phases;
        }
        self.buffer.drain(..from);
        self.made += made.len() as u64;
        made
    }
}

/// The filter at a time in periods of the lower rate, up to a factor: a sinc function under a Kaiser window.
fn kernel(time: f64) -> f64 {
    let beta = 0.1102 * (DAMPING - 8.7);
    let inside = 1.0 - (time / REACH as f64).powi(2);
    if inside < 0.0 {
        return 0.0;
    }
    let angle = PI * time * cutoff();
    let sinc = if angle == 0.0 { 1.0 } else { angle.sin() / angle };
    sinc * bessel(beta * inside.sqrt())
}

/// The modified Bessel function of the first kind, of order 0: the sum of `((x/2)^k / k!)^2`.
fn bessel(x: f64) -> f64 {
    let (mut sum, mut term, mut k) = (1.0, 1.0, 1.0);
    while term > 1e-12 * sum {
        term *= (x / (2.0 * k)).powi(2);
        sum += term;
        k += 1.0;
    }
    sum
}

/// A sum of products, in sixteen partial sums so that it is computed in vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests;
