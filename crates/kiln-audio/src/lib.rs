//! Decodes audio files to 16 kHz mono samples and computes Whisper's log-mel features.
//!
//! ```
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/audio/44k-stereo.mp3");
//! use kiln_audio::{AudioReader, LogMel};
//!
//! let mut samples = Vec::new();
//! for block in AudioReader::open(path)? {
//!     samples.extend(block?);
//! }
//! let features = LogMel::new(80)?.features(&samples, 30 * kiln_audio::SAMPLE_RATE)?;
//! assert_eq!(features.len(), 80 * 3000);
//! # Ok::<(), kiln_core::Error>(())
//! ```
//!
//! **Invariant:** this crate uses no tensors.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]
#![forbid(unsafe_code)]

mod log_mel;
mod reader;
mod resample;

pub use log_mel::{HOP, LogMel, LogMelStream, normalize};
pub use reader::AudioReader;

/// Sample rate in samples per second; Whisper was trained with it.
pub const SAMPLE_RATE: usize = 16_000;

/// Largest sample that is accepted: 1e12 times full scale. Its power is far below the limit of float32.
const LOUDEST: f32 = 1e12;

/// Checks that all `samples` are valid audio. The error describes the first one that is not, in a sentence
/// without its subject. `samples[0]` is sample number `start`, at `rate` samples per second.
fn check(samples: &[f32], start: u64, rate: u32) -> Result<(), String> {
    // False for NaN.
    let is_sound = |sample: &f32| sample.abs() <= LOUDEST;
    match samples.iter().position(|sample| !is_sound(sample)) {
        None => Ok(()),
        Some(at) => {
            let (value, seconds) = (samples[at], (start + at as u64) as f64 / f64::from(rate));
            Err(format!(
                "has a sample at {seconds:.3} s that is {value:e}; samples of sound are mostly from -1 to 1"
            ))
        }
    }
}
