//! Streaming sample rate conversion, with [`rubato`].

use std::error::Error;

use rubato::{Fft, FixedSync, Resampler as _, audioadapter_buffers::direct::SequentialSlice};

use crate::SAMPLE_RATE;

/// Number of samples in a block at the lower of the two rates, unless the ratio of the rates requires more.
/// The filter is as long as a block.
///
/// With 512, tones up to 0.94 of the Nyquist frequency of the lower rate keep their amplitude.
const BLOCK: usize = 512;

/// Resamples audio to 16 kHz without delay. The signal is taken as silent before its beginning and after its
/// end.
#[derive(Debug)]
pub(crate) struct Resampler {
    fft: Fft<f32>,
    rate: u64,
    /// Samples that are not resampled yet: less than a block
    buffer: Vec<f32>,
    received: u64,
    made: u64,
    /// Whether the first output block, which precedes the audio, was dropped
    has_begun: bool,
}

impl Resampler {
    /// Creates a resampler from `rate` samples per second.
    ///
    /// # Errors
    /// A sentence without its subject, if `rate` is 0.
    pub(crate) fn new(rate: u32) -> Result<Self, String> {
        let rate = rate as usize;
        let block = BLOCK * rate.max(SAMPLE_RATE) / SAMPLE_RATE;
        let fft = Fft::new(rate, SAMPLE_RATE, block, 1, FixedSync::Both);
        let fft = fft.map_err(|e| format!("cannot be converted from {rate} samples a second: {e}"))?;
        // The filter delays by half a block, rounded down to a whole sample. Leading silence makes it exactly
        // one block.
        let buffer = vec![0.0; fft.input_frames_next().div_ceil(2)];
        Ok(Self { fft, rate: rate as u64, buffer, received: 0, made: 0, has_begun: false })
    }

    /// Adds samples. Returns the output samples that are final.
    ///
    /// # Errors
    /// A sentence without its subject, if the filter fails.
    pub(crate) fn push(&mut self, samples: &[f32]) -> Result<Vec<f32>, String> {
        self.received += samples.len() as u64;
        self.buffer.extend(samples);
        self.take().map_err(|e| format!("cannot be converted from {} samples a second: {e}", self.rate))
    }

    /// Ends the audio. Returns the remaining output. The total output is as long as the input, to the nearest
    /// sample.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push).
    pub(crate) fn finish(&mut self) -> Result<Vec<f32>, String> {
        let all = (2 * self.received * SAMPLE_RATE as u64 + self.rate) / (2 * self.rate);
        let left = (all - self.made) as usize;
        // The filter delays by less than two blocks.
        let mut rest = self.push(&vec![0.0; 2 * self.fft.input_frames_next()])?;
        rest.truncate(left);
        Ok(rest)
    }

    /// Resamples the complete blocks of the buffer.
    fn take(&mut self) -> Result<Vec<f32>, Box<dyn Error>> {
        let block = self.fft.input_frames_next();
        let mut made = Vec::new();
        let blocks = self.buffer.chunks_exact(block);
        let rest = blocks.remainder().to_vec();
        for samples in blocks {
            let resampled = self.fft.process(&SequentialSlice::new(samples, 1, block)?, None)?;
            if self.has_begun {
                made.extend(resampled.take_data());
            }
            self.has_begun = true;
        }
        self.buffer = rest;
        self.made += made.len() as u64;
        Ok(made)
    }
}

#[cfg(test)]
mod tests;
