//! A recording as windows of log-mel features.

use kiln_audio::{AudioReader, HOP, LogMel, LogMelStream, SAMPLE_RATE, normalize};
use kiln_core::Result;

/// Frames per second.
pub(super) const FRAME_RATE: usize = SAMPLE_RATE / HOP;

/// The input of a transcription: a file, a stream, or samples.
#[derive(Debug)]
pub enum Audio {
    Reader(Box<AudioReader>),
    /// 16 kHz mono, from -1 to 1.
    Samples(Vec<f32>),
}

impl From<AudioReader> for Audio {
    fn from(reader: AudioReader) -> Self {
        Self::Reader(Box::new(reader))
    }
}

impl From<Vec<f32>> for Audio {
    fn from(samples: Vec<f32>) -> Self {
        Self::Samples(samples)
    }
}

/// Number of samples that are read at once from memory.
const BLOCK: usize = 1 << 16;

impl Audio {
    /// The next samples after the first `read`, if there are any.
    fn block(&mut self, read: usize) -> Result<Option<Vec<f32>>> {
        match self {
            Self::Reader(reader) => reader.next().transpose(),
            Self::Samples(samples) => {
                let left = samples.get(read..).unwrap_or_default();
                Ok((!left.is_empty()).then(|| left[..left.len().min(BLOCK)].to_vec()))
            }
        }
    }

    fn rewind(&mut self) -> Result<()> {
        match self {
            Self::Reader(reader) => reader.rewind(),
            Self::Samples(_) => Ok(()),
        }
    }
}

/// A window of features.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// `[bins, frames]`, as the encoder takes them
    pub(super) features: Vec<f32>,
    /// Whether the window is completely silent.
    pub(super) is_silent: bool,
}

/// A recording that is read from beginning to end. Frames before the current window are dropped.
#[derive(Debug)]
pub(super) struct Recording {
    audio: Audio,
    mel: LogMel,
    /// `None` after everything was read.
    stream: Option<LogMelStream>,
    /// Number of samples read so far.
    read: usize,
    /// The maximum over all frames; features are relative to it.
    loudest: f32,
    /// Logarithms from frame `start` on, `[frames, bins]`.
    kept: Vec<f32>,
    start: usize,
    /// Number of frames per window.
    window: usize,
    /// Number of frames in all windows: those of the recording, or of one window if the recording is shorter.
    pub(super) frames: usize,
    /// Number of frames in the recording.
    pub(super) heard: usize,
}

impl Recording {
    /// Reads all of the recording once, because its maximum must be known first.
    pub(super) fn new(mut audio: Audio, mel: &LogMel, window: usize) -> Result<Self> {
        let mut stream = mel.stream();
        let (mut read, mut kept) = (0, Vec::new());
        while let Some(block) = audio.block(read)? {
            read += block.len();
            let frames = stream.push(&block)?;
            // A recording longer than a window is read a second time.
            if read <= window * HOP {
                kept.extend(frames);
            }
        }
        let mut recording = Self {
            audio,
            mel: mel.clone(),
            stream: None,
            read,
            loudest: 0.0,
            kept,
            start: 0,
            window,
            frames: read / HOP,
            heard: read.div_ceil(HOP),
        };
        if read <= window * HOP {
            // Pads the recording with silence to the length of a window.
            recording.kept.extend(stream.push(&vec![0.0; window * HOP - read])?);
            let (rest, loudest) = stream.finish();
            recording.kept.extend(rest);
            (recording.loudest, recording.frames) = (loudest, window);
        } else {
            recording.loudest = stream.finish().1;
            recording.audio.rewind()?;
            recording.kept.clear();
            (recording.stream, recording.read) = (Some(mel.stream()), 0);
        }
        Ok(recording)
    }

    /// A description of damaged or missing data, if there are any.
    pub(super) fn damage(&self) -> Option<String> {
        match &self.audio {
            Audio::Reader(reader) => reader.damage(),
            Audio::Samples(_) => None,
        }
    }

    /// The window from frame `seek` on, which must not be before an earlier window. Features after the last
    /// frame are 0.
    pub(super) fn window(&mut self, seek: usize) -> Result<Window> {
        let bins = self.mel.bins();
        let wanted = self.window.min(self.frames.saturating_sub(seek));
        let passed = (seek - self.start).min(self.kept.len() / bins);
        self.kept.drain(..passed * bins);
        self.start += passed;
        while self.start < seek || self.kept.len() < wanted * bins {
            let more = match (self.audio.block(self.read)?, self.stream.take()) {
                (Some(block), Some(mut stream)) => {
                    self.read += block.len();
                    let frames = stream.push(&block)?;
                    self.stream = Some(stream);
                    frames
                }
                (None, Some(stream)) => stream.finish().0,
                (_, None) => break,
            };
            self.kept.extend(more);
            let passed = (seek - self.start).min(self.kept.len() / bins);
            self.kept.drain(..passed * bins);
            self.start += passed;
        }
        let mut own = self.kept[..self.kept.len().min(wanted * bins)].to_vec();
        // The logarithm of silence.
        let is_silent = own.iter().all(|&logarithm| logarithm <= -9.99);
        normalize(&mut own, self.loudest);
        let mut features = vec![0.0; bins * self.window];
        for (frame, numbers) in own.chunks_exact(bins).enumerate() {
            for (bin, &number) in numbers.iter().enumerate() {
                features[bin * self.window + frame] = number;
            }
        }
        Ok(Window { features, is_silent })
    }
}
