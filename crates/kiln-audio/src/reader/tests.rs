#![allow(clippy::unwrap_used, reason = "tests")]

use std::{f64::consts::TAU, fs};

use proptest::prelude::*;

use super::*;
use crate::LogMel;

mod lengths;
mod memory;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/audio").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    fs::read(path(name)).unwrap()
}

fn of_bytes(bytes: Vec<u8>) -> Result<AudioReader> {
    AudioReader::from_bytes("sound", bytes)
}

fn all(reader: &mut AudioReader) -> Vec<f32> {
    reader.by_ref().flat_map(Result::unwrap).collect()
}

#[track_caller]
fn refused(bytes: Vec<u8>, expected: &str) {
    let result = of_bytes(bytes).and_then(|reader| reader.collect::<Result<Vec<_>>>());
    let why = result.err().map_or_else(|| "it was taken".to_owned(), |error| error.to_string());
    assert!(why.contains(expected), "{why}");
}

/// Builds a WAV file with one channel.
fn wav(format: u16, bits: u16, rate: u32, data: &[u8]) -> Vec<u8> {
    let block = bits / 8;
    let mut wav = Vec::new();
    wav.extend(b"RIFF");
    wav.extend((36 + data.len() as u32).to_le_bytes());
    wav.extend(b"WAVEfmt \x10\0\0\0");
    wav.extend([format, 1].map(u16::to_le_bytes).concat());
    wav.extend([rate, rate * u32::from(block)].map(u32::to_le_bytes).concat());
    wav.extend([block, bits].map(u16::to_le_bytes).concat());
    wav.extend(b"data");
    wav.extend((data.len() as u32).to_le_bytes());
    wav.extend(data);
    wav
}

fn floats(samples: &[f32]) -> Vec<u8> {
    wav(3, 32, 16_000, &samples.iter().flat_map(|sample| sample.to_le_bytes()).collect::<Vec<_>>())
}

/// Returns the complex amplitude of a tone in samples that start `delay` samples late.
fn tone(samples: &[f32], hertz: f64, delay: f64) -> (f64, f64) {
    let (mut re, mut im) = (0.0, 0.0);
    for (n, &sample) in samples.iter().enumerate() {
        let angle = TAU * hertz * (n as f64 - delay) / SAMPLE_RATE as f64;
        re += f64::from(sample) * angle.sin();
        im += f64::from(sample) * angle.cos();
    }
    (2.0 * re / samples.len() as f64, 2.0 * im / samples.len() as f64)
}

/// File name, duration in seconds, samples of encoder delay that remain, maximum number of excess samples,
/// and tolerance of an amplitude.
const FILES: [(&str, f64, f64, usize, f64); 11] = [
    ("16k-mono-i16.wav", 0.25, 0.0, 0, 1e-4),
    ("8k-mono-u8.wav", 0.25, 0.0, 0, 5e-3),
    ("11k-mono-f32.wav", 0.25, 0.0, 0, 1e-4),
    ("24k-stereo-i24.wav", 0.25, 0.0, 0, 1e-4),
    ("16k-mono.mp3", 0.5, 0.0, 0, 2e-2),
    ("44k-stereo.mp3", 0.5, 0.0, 0, 2e-2),
    ("48k-mono.flac", 0.25, 0.0, 0, 1e-4),
    ("24k-stereo.flac", 0.25, 0.0, 0, 1e-4),
    ("44k-stereo.ogg", 0.5, 0.0, 0, 1e-2),
    ("44k-mono.m4a", 0.5, 1024.0 * 16_000.0 / 44_100.0, 800, 1e-2),
    ("48k-stereo.m4a", 0.25, 0.0, 0, 1e-4),
];

#[test]
fn every_format_is_decoded_with_its_tones_at_the_right_time() {
    for (name, seconds, delay, more, tolerance) in FILES {
        let mut reader = AudioReader::open(path(name)).unwrap();
        let claimed = reader.seconds().unwrap();
        let samples = all(&mut reader);
        assert_eq!(reader.damage(), None, "{name}");
        assert!((claimed - seconds).abs() < 0.1, "{name}: {claimed}");
        let wanted = (seconds * SAMPLE_RATE as f64) as usize;
        assert!((wanted..=wanted + more).contains(&samples.len()), "{name}: {} samples", samples.len());
        // 1600 samples are a whole number of periods of both tones.
        let inner = &samples[1600..3200];
        for (hertz, amplitude) in [(440.0, 0.3), (3000.0, 0.2)] {
            let (re, im) = tone(inner, hertz, delay - 1600.0);
            assert!(
                (re - amplitude).abs() < tolerance && im.abs() < tolerance,
                "{name}: {hertz} Hz is {re} {im}"
            );
        }
        reader.rewind().unwrap();
        assert_eq!(all(&mut reader), samples, "{name}");
        let mut stream = AudioReader::from_stream("standard input", &bytes(name)[..]).unwrap();
        assert_eq!(all(&mut stream), samples, "{name}");
    }
}

#[test]
fn samples_of_16_bits_are_exact() {
    let data = bytes("16k-mono-i16.wav")[44..].to_vec();
    let wanted: Vec<f32> =
        data.chunks(2).map(|b| f32::from(i16::from_le_bytes([b[0], b[1]])) / 32768.0).collect();
    assert_eq!(all(&mut AudioReader::open(path("16k-mono-i16.wav")).unwrap()), wanted);
}

#[test]
fn a_file_of_24_khz_in_stereo_has_the_features_of_transformers() {
    let samples = all(&mut AudioReader::open(path("chirp-24k-stereo.flac")).unwrap());
    let features = LogMel::new(80).unwrap().features(&samples, 8000).unwrap();
    let wanted: Vec<f32> = bytes("chirp-24k-stereo.mel80.f32")
        .chunks(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    assert_eq!(features.len(), wanted.len());
    // The first and last frames contain the abrupt beginning and end, which each filter reproduces
    // differently.
    let inner = (0..80 * 50).filter(|at| (6..44).contains(&(at % 50)));
    let off = inner.map(|at| (features[at] - wanted[at]).abs()).fold(0.0, f32::max);
    assert!(off < 0.02, "{off}");
}

#[test]
fn files_without_supported_audio_are_errors() {
    refused(Vec::new(), "sound: is empty");
    refused(
        b"Four score and seven years ago\n".repeat(100),
        "sound: is not audio of a format that Kiln reads",
    );
    refused(bytes("no-audio.mp4"), "has no track of audio");
    refused(bytes("48k-mono.opus.ogg"), "has audio that is Opus; convert it");
    refused(wav(1, 16, 1000, &[1; 4000]), "has 1000 samples a second");
    let why = AudioReader::open(path("none.wav")).unwrap_err().to_string();
    assert!(why.contains("none.wav: there is no such file"), "{why}");
    let why = AudioReader::open(path("")).unwrap_err().to_string();
    assert!(why.contains("is a folder"), "{why}");
}

#[test]
fn an_empty_recording_gives_no_blocks() {
    let mut reader = of_bytes(wav(1, 16, 16_000, &[])).unwrap();
    assert!(reader.next().is_none());
    assert_eq!((reader.damage(), reader.seconds()), (None, Some(0.0)));
}

#[test]
fn samples_that_are_not_finite_or_too_large_are_errors_with_their_time() {
    for wrong in [f32::NAN, f32::INFINITY, 1e30] {
        let mut samples = vec![0.5; 40_000];
        samples[24_000] = wrong;
        refused(floats(&samples), "sound: has a sample at 1.500 s that is");
    }
    assert_eq!(all(&mut of_bytes(floats(&[3.0, -7.5])).unwrap()), [3.0, -7.5]);
}

#[test]
fn a_truncated_file_is_read_up_to_its_end_or_is_an_error() {
    for (name, seconds, _, _, _) in FILES {
        let mut cut = bytes(name);
        // FLAC begins with 8 KiB of padding reserved for tags; Ogg Vorbis with 4 KiB of tables.
        let part = if name.ends_with(".flac") || name.ends_with(".ogg") { 0.85 } else { 0.6 };
        cut.truncate((cut.len() as f64 * part) as usize);
        let result = of_bytes(cut);
        if name.ends_with(".m4a") {
            // The tables of M4A are at the end.
            assert!(result.is_err());
            continue;
        }
        let mut reader = result.unwrap();
        let samples = all(&mut reader).len() as f64 / SAMPLE_RATE as f64;
        assert!(samples > 0.3 * seconds && samples < 0.8 * seconds, "{name}: {samples}");
        // An Ogg page states its own end, but nothing states the number of pages.
        if !name.ends_with(".ogg") {
            let damage = reader.damage().unwrap();
            assert!(damage.contains("sound: is cut short: 0."), "{name}: {damage}");
        }
    }
}

#[test]
fn a_stream_without_a_length_is_read_to_its_end() {
    let mut wav = bytes("16k-mono-i16.wav");
    let whole = all(&mut of_bytes(wav.clone()).unwrap());
    wav[4..8].fill(0xff);
    wav[40..44].fill(0xff);
    let mut reader = of_bytes(wav).unwrap();
    assert_eq!(reader.seconds(), Some(0.25));
    assert_eq!(all(&mut reader), whole);
    assert_eq!(reader.damage(), None);
}

#[test]
fn a_change_of_the_sample_rate_is_an_error() {
    let both = [bytes("44k-stereo.ogg"), bytes("16k-mono.ogg")].concat();
    refused(both, "changes from 44100 to 16000 samples a second at 0.5 s");
    let same = [bytes("44k-stereo.ogg"), bytes("44k-stereo.ogg")].concat();
    let mut reader = of_bytes(same).unwrap();
    assert_eq!((all(&mut reader).len(), reader.damage()), (16_000, None));
}

#[test]
fn samples_after_damage_keep_their_time_except_in_mp3() {
    // Three hundred bytes of audio data are overwritten from this position on; the tables are not touched.
    for (name, part) in [("48k-mono.flac", 0.8), ("44k-stereo.ogg", 0.8), ("44k-mono.m4a", 0.4)] {
        let (mut damaged, whole) = (bytes(name), all(&mut of_bytes(bytes(name)).unwrap()));
        let from = (damaged.len() as f64 * part) as usize;
        damaged[from..from + 300].fill(0xff);
        let mut reader = of_bytes(damaged).unwrap();
        let samples = all(&mut reader);
        assert_eq!(samples.len(), whole.len(), "{name}");
        let damage = reader.damage().unwrap();
        assert!(
            damage.starts_with("sound: is damaged at 0.") && damage.contains("silence"),
            "{name}: {damage}"
        );
        // The resampler's filter reaches into the gap from both sides.
        let silent = samples.iter().filter(|sample| sample.abs() < 1e-4).count();
        assert!((100..whole.len() / 2).contains(&silent), "{name}: {silent} samples are silent");
        // The last 10 ms are unchanged.
        let last = whole.len() - 160;
        let off = samples[last..].iter().zip(&whole[last..]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 0.1, "{name}: {off}");
    }
    let mut damaged = bytes("16k-mono.mp3");
    damaged[1500..1800].fill(0);
    let mut reader = of_bytes(damaged).unwrap();
    assert!(all(&mut reader).len() > 4000);
    // MP3 has no timestamps: lost frames shorten the audio.
    let damage = reader.damage().unwrap();
    assert!(damage.contains("is cut short: 0.3 s of 0.5 s"), "{damage}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn damaged_files_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u8), 0..20),
        end in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        for (name, ..) in FILES {
            let mut bytes = bytes(name);
            if cut {
                bytes.truncate(end.index(bytes.len()));
            }
            for (at, bit) in &flips {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] ^= 1 << bit;
                }
            }
            if let Ok(reader) = of_bytes(bytes) {
                let samples: usize = reader.map_while(Result::ok).map(|block| block.len()).sum();
                prop_assert!(samples < 10_000_000);
            }
        }
    }
}
