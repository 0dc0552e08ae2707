//! The power spectrum of frames of 400 samples.
//!
//! A transform of 400 points is two passes of transforms of 20 points (Cooley and Tukey, 1965), each of them a sum of 20
//! products. That is twice the arithmetic of the fastest algorithms, but eight frames are transformed at once, one in each lane of
//! a vector, so that every operation is eight wide on any machine.

use std::{array::from_fn, f64::consts::TAU};

/// Samples in a frame.
pub(super) const FRAME: usize = 400;
/// Numbers in the spectrum of a frame.
pub(super) const BINS: usize = FRAME / 2 + 1;
/// Frames that are transformed at once.
pub(super) const LANES: usize = 8;
/// A number of each frame.
pub(super) type Lanes = [f32; LANES];

const SIDE: usize = 20;
/// Transforms of real numbers are symmetric, so half of the first pass says all.
const HALF: usize = SIDE / 2 + 1;

/// A real and an imaginary part.
type Complex = [f32; 2];

#[derive(Debug)]
pub(super) struct Spectrum {
    /// The periodic Hann window
    window: [f32; FRAME],
    /// `exp(-2πi a c / 20)`, both below 20
    turns: [[Complex; SIDE]; SIDE],
    /// `exp(-2πi c b / 400)`
    twiddles: [[Complex; SIDE]; HALF],
}

impl Spectrum {
    pub(super) fn new() -> Self {
        let angle = |n: usize| TAU * (n % FRAME) as f64 / FRAME as f64;
        let root = |n: usize| [angle(n).cos() as f32, -angle(n).sin() as f32];
        Self {
            window: from_fn(|n| (0.5 - 0.5 * angle(n).cos()) as f32),
            turns: from_fn(|a| from_fn(|c| root(SIDE * a * c))),
            twiddles: from_fn(|c| from_fn(|b| root(c * b))),
        }
    }

    /// Squares of the absolute values of the spectra of `count` frames, at most [`LANES`]; other lanes are 0.
    pub(super) fn power<'a>(&self, count: usize, frame: impl Fn(usize) -> &'a [f32]) -> [Lanes; BINS] {
        let mut samples = [[0.0; LANES]; FRAME];
        for lane in 0..count {
            for ((to, sample), window) in samples.iter_mut().zip(frame(lane)).zip(&self.window) {
                to[lane] = sample * window;
            }
        }
        // Sample n = 20 a + b; number k = c + 20 d of the spectrum. First the sums over a.
        let mut halfway = [[[[0.0; LANES]; 2]; SIDE]; HALF];
        for (c, row) in halfway.iter_mut().enumerate() {
            for (b, to) in row.iter_mut().enumerate() {
                let (mut re, mut im) = ([0.0; LANES], [0.0; LANES]);
                for (a, [cos, sin]) in self.turns[c].iter().enumerate() {
                    let x = &samples[SIDE * a + b];
                    for lane in 0..LANES {
                        re[lane] += cos * x[lane];
                        im[lane] += sin * x[lane];
                    }
                }
                let [cos, sin] = self.twiddles[c][b];
                for lane in 0..LANES {
                    to[0][lane] = re[lane] * cos - im[lane] * sin;
                    to[1][lane] = re[lane] * sin + im[lane] * cos;
                }
            }
        }
        // Then those over b. Number 400 - k is the conjugate of number k.
        let mut power = [[0.0; LANES]; BINS];
        for (c, row) in halfway.iter().enumerate() {
            for d in 0..SIDE {
                let k = c + SIDE * d;
                let k = if k < BINS || c == 0 || c == HALF - 1 { k } else { FRAME - k };
                let Some(to) = power.get_mut(k) else { continue };
                let (mut re, mut im) = ([0.0; LANES], [0.0; LANES]);
                for ([x, y], [cos, sin]) in row.iter().zip(&self.turns[d]) {
                    for lane in 0..LANES {
                        re[lane] += cos * x[lane] - sin * y[lane];
                        im[lane] += cos * y[lane] + sin * x[lane];
                    }
                }
                for lane in 0..LANES {
                    to[lane] = re[lane] * re[lane] + im[lane] * im[lane];
                }
            }
        }
        power
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_definition() {
        let frames: Vec<Vec<f32>> = (0..LANES)
            .map(|lane| (0..FRAME).map(|n| ((n * n + 31 * lane * n) % 97) as f32 / 97.0 - 0.5).collect())
            .collect();
        let power = Spectrum::new().power(LANES, |lane| &frames[lane]);
        for (lane, frame) in frames.iter().enumerate() {
            for (k, got) in power.iter().enumerate() {
                let (mut re, mut im) = (0.0, 0.0);
                for (n, &x) in frame.iter().enumerate() {
                    let hann = 0.5 - 0.5 * (TAU * n as f64 / FRAME as f64).cos();
                    let angle = TAU * (k * n % FRAME) as f64 / FRAME as f64;
                    re += hann * f64::from(x) * angle.cos();
                    im -= hann * f64::from(x) * angle.sin();
                }
                // An amplitude is a sum of 400 terms of at most a half, rounded twice twenty times.
                let (got, want) = (f64::from(got[lane]).sqrt(), re.hypot(im));
                assert!((got - want).abs() < 100.0 * 40.0 * 2f64.powi(-24), "{lane} {k}: {got} {want}");
            }
        }
    }

    #[test]
    fn lanes_do_not_change_each_other() {
        let frame: Vec<f32> = (0..FRAME).map(|n| (n * 7 % 13) as f32 - 6.0).collect();
        let (alone, all) = (Spectrum::new().power(1, |_| &frame), Spectrum::new().power(LANES, |_| &frame));
        for (alone, all) in alone.iter().zip(&all) {
            assert_eq!(all, &[alone[0]; LANES]);
        }
        assert_eq!(alone[0][1], 0.0);
    }
}
