//! Audio files as 16 kHz mono samples, and Whisper's log-mel features of them.
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
#![forbid(unsafe_code)]

mod log_mel;
mod reader;
mod resample;

pub use log_mel::{HOP, LogMel, LogMelStream, normalize};
pub use reader::AudioReader;

/// Samples a second: what Whisper was trained with.
pub const SAMPLE_RATE: usize = 16_000;

/// The largest sample that is taken: a million million times full scale. Its power is far from the end of float32.
const LOUDEST: f32 = 1e12;

/// The first of `samples` that cannot be sound, in a sentence without its subject. The first of them is sample `start` of
/// `rate` a second.
fn check(samples: &[f32], start: u64, rate: u32) -> Result<(), String> {
    // False of what is no number.
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
