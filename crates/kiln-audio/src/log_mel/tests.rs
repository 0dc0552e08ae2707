#![allow(clippy::unwrap_used, reason = "tests")]

use std::f32::consts::FRAC_PI_8;

use proptest::prelude::*;

use super::*;

/// Deterministic noise from -1 to 1.
fn noise(len: usize) -> Vec<f32> {
    (0..len as u64).map(|n| (n * n * 2_654_435_761 % 1009) as f32 / 504.5 - 1.0).collect()
}

/// Returns the frames of a stream that gets `pieces` one after another, `[frames, bins]`, and its largest
/// logarithm.
fn frames(mel: &LogMel, pieces: &[&[f32]]) -> (Vec<f32>, f32) {
    let mut stream = mel.stream();
    let mut frames: Vec<f32> = pieces.iter().flat_map(|piece| stream.push(piece).unwrap()).collect();
    let (rest, loudest) = stream.finish();
    frames.extend(rest);
    (frames, loudest)
}

#[test]
fn silence_gives_the_smallest_feature() {
    let features = LogMel::new(80).unwrap().features(&[], 480_000).unwrap();
    // Whisper's normalization of the smallest logarithm: (-10 + 4) / 4.
    assert_eq!(features, vec![-1.5; 80 * 3000]);
}

#[test]
fn a_tone_is_loudest_in_its_band() {
    let mel = LogMel::new(80).unwrap();
    // 1000 Hz: one period in 16 samples.
    let tone: Vec<f32> = (0..16_000).map(|n| (n as f32 * FRAC_PI_8).sin()).collect();
    let features = mel.features(&tone, 16_000).unwrap();
    let loudest = (0..80).max_by(|&a, &b| features[a * 100 + 50].total_cmp(&features[b * 100 + 50]));
    // On Slaney's mel scale, 1000 Hz is 15 mel, and 8000 Hz is 45.245 mel. Band `b` of 80 is centered at
    // `b + 1` of 81 equal steps. Frame 50 of 100 is in the middle of the tone.
    assert_eq!(loudest, Some((15.0_f64 / (45.245 / 81.0)).round() as usize - 1));
}

#[test]
fn audio_shorter_than_its_padding_is_reflected_repeatedly() {
    let mel = LogMel::new(80).unwrap();
    for len in [0, 1, 159] {
        assert_eq!(frames(&mel, &[&noise(len)]), (Vec::new(), FLOOR));
    }
    // Up to 200 samples, the mirrored audio before and after them is longer than the audio itself.
    for len in [160, 200, 201, 399, 400, 401] {
        let samples = noise(len);
        let period = 2 * (len as i64 - 1);
        let mirrored = |at: i64| {
            let at = at.rem_euclid(period);
            samples[at.min(period - at) as usize]
        };
        let count = len / HOP;
        let padded: Vec<f32> = (0..count * HOP + FRAME).map(|at| mirrored(at as i64 - 200)).collect();
        assert_eq!(frames(&mel, &[&samples]).0, mel.logarithms(&padded, count), "{len}");
    }
}

#[test]
fn samples_that_are_not_finite_or_too_large_are_errors() {
    let mel = LogMel::new(80).unwrap();
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e13] {
        let mut samples = noise(20_000);
        samples[16_000] = wrong;
        let why = mel.features(&samples, 30_000).unwrap_err().to_string();
        assert!(why.contains("at 1.000 s"), "{why}");
    }
    let features = mel.features(&[1e12; 1000], 1000).unwrap();
    assert!(features.iter().all(|x| x.is_finite()));
    for bins in [0, 202] {
        assert!(matches!(LogMel::new(bins), Err(Error::Setting { .. })));
    }
    assert_eq!(LogMel::new(201).unwrap().features(&noise(500), 480).unwrap().len(), 201 * 3);
}

proptest! {
    #[test]
    fn features_do_not_depend_on_how_audio_is_divided(cuts in prop::collection::vec(0..4000_usize, 0..6)) {
        let (mel, samples) = (LogMel::new(20).unwrap(), noise(4000));
        let mut cuts = cuts;
        cuts.extend([0, 4000]);
        cuts.sort_unstable();
        let pieces: Vec<&[f32]> = cuts.windows(2).map(|cut| &samples[cut[0]..cut[1]]).collect();
        prop_assert_eq!(frames(&mel, &pieces), frames(&mel, &[&samples]));
    }
}
