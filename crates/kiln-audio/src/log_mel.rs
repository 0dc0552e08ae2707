//! Log-mel features as used to train Whisper.
//!
//! Source: `WhisperFeatureExtractor` of Transformers, in float32 as on its PyTorch path.

mod filters;
mod spectrum;

use std::sync::Arc;

use kiln_core::{Error, Result};

use crate::{SAMPLE_RATE, check};
use filters::Filters;
use spectrum::{BINS, FRAME, Spectrum};

/// Number of samples from the start of one frame to the next.
pub const HOP: usize = 160;

/// The base-10 logarithm of silence: powers below 1e-10 count as 1e-10.
const FLOOR: f32 = -10.0;

/// Number of samples that a frame extends to either side of its center.
const HALF: usize = FRAME / 2;

/// Computes log-mel features of 16 kHz samples.
///
/// A frame is 400 samples under a Hann window, and the next frame begins 160 samples later. The first frame
/// is centered on the first sample; before the beginning and after the end, the audio is mirrored. A feature
/// is the logarithm of the power in a band of the mel scale (Slaney's, 0 to 8000 Hz).
#[derive(Clone, Debug)]
pub struct LogMel {
    tables: Arc<Tables>,
}

/// Tables that do not depend on the audio.
#[derive(Debug)]
struct Tables {
    filters: Filters,
    spectrum: Spectrum,
}

impl LogMel {
    /// Creates an extractor with `bins` bands: 80 in most Whisper models, 128 in large-v3.
    ///
    /// # Errors
    /// [`Error::Setting`] if `bins` is 0 or more than 201, the number of bins of a spectrum.
    pub fn new(bins: usize) -> Result<Self> {
        if bins == 0 || bins > BINS {
            let why = format!("{bins} bands are asked for, and there can be 1 to {BINS}");
            return Err(Error::Setting { name: "num_mel_bins", why });
        }
        Ok(Self { tables: Arc::new(Tables { filters: Filters::new(bins), spectrum: Spectrum::new() }) })
    }

    /// Returns the number of bands, which is the number of features in a frame.
    pub fn bins(&self) -> usize {
        self.tables.filters.len()
    }

    /// Begins a stream of audio that arrives in pieces.
    pub fn stream(&self) -> LogMelStream {
        LogMelStream { mel: self.clone(), buffer: Vec::new(), received: 0, next: 0, loudest: FLOOR }
    }

    /// Returns the features of `samples`, padded with silence or cut to `length` samples: `[bins, length /
    /// 160]`, normalized.
    ///
    /// # Errors
    /// The errors of [`LogMelStream::push`].
    pub fn features(&self, samples: &[f32], length: usize) -> Result<Vec<f32>> {
        let mut stream = self.stream();
        let samples = &samples[..samples.len().min(length)];
        let mut frames = stream.push(samples)?;
        frames.extend(stream.push(&vec![0.0; length - samples.len()])?);
        let (rest, loudest) = stream.finish();
        frames.extend(rest);
        normalize(&mut frames, loudest);
        let (bins, count) = (self.bins(), length / HOP);
        let by_bin = (0..bins).flat_map(|bin| (0..count).map(move |frame| frame * bins + bin));
        Ok(by_bin.map(|at| frames[at]).collect())
    }

    /// Returns the logarithms of frames, `[frames, bins]`: frame `f` covers 400 samples from sample `160 f`
    /// on.
    fn logarithms(&self, samples: &[f32], frames: usize) -> Vec<f32> {
        let mut logarithms = Vec::with_capacity(frames * self.bins());
        for frame in samples.windows(FRAME).step_by(HOP).take(frames) {
            let power = self.tables.spectrum.power(frame);
            logarithms.extend(self.tables.filters.apply(&power).map(|sum| sum.max(1e-10).log10()));
        }
        logarithms
    }
}

/// Computes log-mel features of audio that arrives in pieces. The result does not depend on how the audio is
/// divided, to the last bit.
#[derive(Debug)]
pub struct LogMelStream {
    mel: LogMel,
    /// Samples from the start of frame `next` on; all samples until the 201st has arrived.
    buffer: Vec<f32>,
    received: u64,
    /// Number of frames returned so far
    next: u64,
    loudest: f32,
}

impl LogMelStream {
    /// Adds 16 kHz samples. Returns the newly completed frames as base-10 logarithms, `[frames, bins]`.
    ///
    /// # Errors
    /// [`Error::Audio`] if a sample is not finite or its magnitude exceeds 1e12. The stream is then
    /// unchanged.
    pub fn push(&mut self, samples: &[f32]) -> Result<Vec<f32>> {
        check(samples, self.received, SAMPLE_RATE as u32).map_err(|why| Error::Audio { why })?;
        let begins = self.received <= HALF as u64 && self.received + samples.len() as u64 > HALF as u64;
        self.received += samples.len() as u64;
        self.buffer.extend(samples);
        if begins {
            let mirrored: Vec<f32> = self.buffer[1..=HALF].iter().rev().copied().collect();
            self.buffer.splice(..0, mirrored);
        }
        if self.received <= HALF as u64 {
            return Ok(Vec::new());
        }
        let complete = (self.buffer.len() + HOP).saturating_sub(FRAME) / HOP;
        Ok(self.take(complete))
    }

    /// Ends the audio. Returns the remaining frames, `[frames, bins]`, and the largest logarithm of the whole
    /// audio (-10, that of silence, if there were no frames). The total number of frames is the number of
    /// samples divided by 160, rounded down.
    pub fn finish(mut self) -> (Vec<f32>, f32) {
        let frames = (self.received / HOP as u64 - self.next) as usize;
        if frames == 0 {
            return (Vec::new(), self.loudest);
        }
        let (end, needed) = (self.buffer.len(), (frames - 1) * HOP + FRAME);
        if self.received <= HALF as u64 {
            // Too short to be mirrored once: mirrored repeatedly, back and forth.
            let period = 2 * (end - 1);
            let mirrored = (0..needed).map(|at| (at + HALF * (period - 1)) % period);
            self.buffer = mirrored.map(|at| self.buffer[at.min(period - at)]).collect();
        } else {
            for at in end..needed {
                self.buffer.push(self.buffer[2 * (end - 1) - at]);
            }
        }
        (self.take(frames), self.loudest)
    }

    fn take(&mut self, frames: usize) -> Vec<f32> {
        let logarithms = self.mel.logarithms(&self.buffer, frames);
        self.buffer.drain(..frames * HOP);
        self.next += frames as u64;
        self.loudest = logarithms.iter().copied().fold(self.loudest, f32::max);
        logarithms
    }
}

/// Turns logarithms into features, given the largest one of the whole audio: values more than 80 dB below it
/// are clamped, and the result is scaled to lie around 0.
pub fn normalize(logarithms: &mut [f32], loudest: f32) {
    for x in logarithms {
        *x = (x.max(loudest - 8.0) + 4.0) / 4.0;
    }
}

#[cfg(test)]
mod tests;
