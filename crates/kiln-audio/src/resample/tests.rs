#![allow(clippy::unwrap_used, reason = "tests")]

use std::f64::consts::PI;

use super::*;

const RATES: [u32; 9] = [8000, 11_025, 12_000, 22_050, 24_000, 44_100, 48_000, 96_000, 192_000];

fn tone(hertz: f64, rate: u32, seconds: f64) -> Vec<f32> {
    let angle = |n: usize| 2.0 * PI * hertz * n as f64 / f64::from(rate);
    (0..(seconds * f64::from(rate)) as usize).map(|n| angle(n).sin() as f32).collect()
}

fn resampled(samples: &[f32], rate: u32, piece: usize) -> Vec<f32> {
    let mut resampler = Resampler::new(rate).unwrap();
    let mut all: Vec<f32> = samples.chunks(piece).flat_map(|piece| resampler.push(piece).unwrap()).collect();
    all.extend(resampler.finish().unwrap());
    all
}

#[test]
fn resampling_keeps_the_frequency_and_phase_of_a_tone() {
    for rate in RATES {
        // Up to nine tenths of the Nyquist frequency of both rates.
        let highest = 0.9 * f64::from(rate.min(SAMPLE_RATE as u32)) / 2.0;
        for hertz in [100.0, 1000.0, highest] {
            let got = resampled(&tone(hertz, rate, 0.25), rate, 1000);
            let want = tone(hertz, SAMPLE_RATE as u32, 0.25);
            assert_eq!(got.len(), want.len());
            // The tones begin and end abruptly, which no filter reproduces. The longest filter here reaches
            // 640 samples, at 11025 Hz.
            let inner = 640..got.len() - 640;
            let off = inner.map(|n| (got[n] - want[n]).abs()).fold(0.0, f32::max);
            assert!(off < 1e-4, "{hertz} Hz at {rate} Hz: {off}");
        }
    }
}

#[test]
fn tones_above_half_the_new_rate_are_removed() {
    for rate in [24_000, 44_100, 96_000] {
        let got = resampled(&tone(8100.0, rate, 0.25), rate, 4096);
        let largest = got[300..got.len() - 300].iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        assert!(largest < 1e-4, "{rate} Hz: {largest}");
    }
}

#[test]
fn samples_do_not_depend_on_how_audio_is_divided() {
    let samples = tone(700.0, 44_100, 0.1);
    let whole = resampled(&samples, 44_100, usize::MAX);
    for piece in [1, 7, 441, 2000] {
        assert_eq!(resampled(&samples, 44_100, piece), whole);
    }
}

#[test]
fn the_number_of_samples_is_scaled_by_the_rates_and_rounded() {
    for rate in [4000, 8000, 11_025, 24_000, 44_100, 176_400] {
        for given in [0, 1, 2, 5, 6, 100, 10_000] {
            let wanted = (given as f64 * SAMPLE_RATE as f64 / f64::from(rate)).round() as usize;
            assert_eq!(resampled(&vec![1.0; given], rate, 999).len(), wanted, "{given} at {rate} Hz");
        }
    }
    // The rate has no common factor with 16000: a block is one second.
    assert_eq!(resampled(&[0.5; 50_000], 44_101, 999).len(), 18_140);
}
