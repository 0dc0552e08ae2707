//! Decoding of all formats to mono samples at the file's own rate.
//!
//! **Only this file knows the symphonia crate's decoders.**

use std::io::ErrorKind;

use symphonia::{
    core::{
        codecs::audio::{
            AudioCodecParameters, AudioDecoder, AudioDecoderOptions, CODEC_ID_NULL_AUDIO,
            well_known::{CODEC_ID_AC3, CODEC_ID_EAC3, CODEC_ID_OPUS},
        },
        errors::Error,
        formats::{
            FormatReader, Track, TrackType,
            probe::Hint,
            well_known::{FORMAT_ID_FLAC, FORMAT_ID_ISOMP4, FORMAT_ID_MP3, FORMAT_ID_WAVE},
        },
        io::{MediaSource, MediaSourceStream},
        packet::Packet,
    },
    default::{get_codecs, get_probe},
};

use crate::check;

/// Supported sample rates, in samples per second.
const RATES: std::ops::RangeInclusive<u32> = 4000..=192_000;

/// Shortest gap that is filled, as a fraction of a second (1/50): a frame of MP3 or AAC is longer.
const SHORTEST_GAP: u32 = 50;
/// Longest gap that is filled, in seconds.
const LONGEST_GAP: u32 = 10;

const NOT_AUDIO: &str =
    "is not audio of a format that Kiln reads: WAV, MP3, FLAC, Ogg Vorbis, or M4A with AAC or ALAC";

pub(super) struct Decoder {
    format: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    track: u32,
    /// Samples per second, once known
    rate: Option<u32>,
    /// Number of samples per channel that were returned
    given: u64,
    /// Number of samples per channel that the file claims, if the claim is not an estimate
    promised: Option<u64>,
    seconds: Option<f64>,
    /// Time of the track, in samples, that corresponds to the first returned sample
    origin: Option<i128>,
    /// Packets that could not be decoded: the first reason, and their number
    failed: Option<(String, u64)>,
    /// Gaps that were filled with silence: the time of the first one, and their number
    gaps: Option<(f64, u64)>,
    /// Number of bytes after the audio data that are not read
    unknown: u64,
    /// The reason why reading stopped early
    broken: Option<String>,
    is_cut: bool,
    planes: Vec<Vec<f32>>,
}

impl Decoder {
    /// Finds the format and the first audio track. `extension` is a hint. `unknown` is the number of bytes
    /// after the audio data whose meaning is not known.
    ///
    /// # Errors
    /// A sentence without its subject.
    pub(super) fn new(
        source: Box<dyn MediaSource>,
        extension: Option<&str>,
        unknown: u64,
    ) -> Result<Self, String> {
        if source.byte_len() == Some(0) {
            return Err("is empty".to_owned());
        }
        let mut hint = Hint::new();
        extension.map(|extension| hint.with_extension(extension));
        let stream = MediaSourceStream::new(source, Default::default());
        let format = get_probe().probe(&hint, stream, Default::default(), Default::default());
        let format = format.map_err(|error| match error {
            Error::IoError(e) if e.kind() != ErrorKind::UnexpectedEof => format!("cannot be read: {e}"),
            _ => NOT_AUDIO.to_owned(),
        })?;
        let track = format.default_track(TrackType::Audio).ok_or("has no track of audio")?;
        let decoder = decoder_of(track)?;
        let is_exact = match format.format_info().format {
            FORMAT_ID_WAVE | FORMAT_ID_FLAC | FORMAT_ID_ISOMP4 => true,
            // Otherwise, the length is an estimate.
            FORMAT_ID_MP3 => track.delay.is_some(),
            _ => false,
        };
        let promised = track.num_frames.filter(|_| is_exact);
        let (track, seconds) = (track.id, seconds_of(track));
        Ok(Self {
            format,
            decoder,
            track,
            rate: None,
            given: 0,
            promised,
            seconds,
            origin: None,
            failed: None,
            gaps: None,
            unknown,
            broken: None,
            is_cut: false,
            planes: Vec::new(),
        })
    }

    pub(super) fn seconds(&self) -> Option<f64> {
        self.seconds
    }

    /// Describes the damaged or missing parts, in a sentence without its subject.
    pub(super) fn damage(&self) -> Option<String> {
        let read = self.time();
        let gaps = self.gaps.map(|(first, count)| match count {
            1 => format!("is damaged at {first:.1} s; silence stands there"),
            _ => format!("is damaged at {first:.1} s and {} more places; silence stands there", count - 1),
        });
        let ended = match (&self.broken, self.is_cut, self.rate.zip(self.promised)) {
            (Some(why), ..) => Some(format!("cannot be decoded further than {read:.1} s ({why})")),
            (None, true, Some((rate, promised))) => {
                let promised = promised as f64 / f64::from(rate);
                Some(format!("is cut short: {read:.1} s of {promised:.1} s are there"))
            }
            (None, true, None) => Some(format!("is cut short after {read:.1} s")),
            (None, false, _) if self.unknown > 0 => Some(format!(
                "ends after {read:.1} s by its header, and {} more bytes are not read",
                self.unknown
            )),
            (None, false, _) => None,
        };
        match (gaps, ended) {
            (Some(gaps), Some(ended)) => Some(format!("{gaps}; it {ended}")),
            (None, None) if self.failed.is_some() => Some("has parts that cannot be decoded".to_owned()),
            (gaps, ended) => gaps.or(ended),
        }
    }

    /// Returns the next samples, averaged over all channels, and their rate. `None` marks the end.
    ///
    /// # Errors
    /// A sentence without its subject.
    pub(super) fn next(&mut self) -> Result<Option<(Vec<f32>, u32)>, String> {
        loop {
            let packet = match self.format.next_packet() {
                Ok(Some(packet)) if packet.track_id == self.track => packet,
                Ok(Some(_)) => continue,
                Ok(None) => return self.end(None),
                // Another stream follows in the same file.
                Err(Error::ResetRequired) => {
                    let track =
                        self.format.default_track(TrackType::Audio).ok_or("has a part without audio")?;
                    self.decoder = decoder_of(track)?;
                    (self.track, self.origin) = (track.id, None);
                    continue;
                }
                Err(error) => return self.end(Some(error)),
            };
            match self.decoder.decode(&packet) {
                Ok(buffer) => {
                    let (rate, frames) = (buffer.spec().rate(), buffer.frames());
                    if frames == 0 {
                        continue;
                    }
                    buffer.copy_to_vecs_planar(&mut self.planes);
                    self.check_rate(rate)?;
                    let gap = self.gap(&packet, rate);
                    let mut samples = vec![0.0; gap];
                    samples.extend(mean(&self.planes, frames));
                    check(&samples, self.given, rate)?;
                    self.given += samples.len() as u64;
                    return Ok(Some((samples, rate)));
                }
                // The gap is filled with silence before the next packet.
                Err(error) => self.failed.get_or_insert_with(|| (error.to_string(), 0)).1 += 1,
            }
        }
    }

    /// Returns the duration in seconds of the samples returned so far.
    fn time(&self) -> f64 {
        self.given as f64 / f64::from(self.rate.unwrap_or(1))
    }

    fn check_rate(&mut self, rate: u32) -> Result<(), String> {
        match self.rate {
            None if !RATES.contains(&rate) => {
                let (least, most) = (RATES.start(), RATES.end());
                Err(format!("has {rate} samples a second, and {least} to {most} are supported"))
            }
            Some(before) if before != rate => {
                let time = self.time();
                Err(format!(
                    "changes from {before} to {rate} samples a second at {time:.1} s; convert it to one rate"
                ))
            }
            _ => {
                self.rate = Some(rate);
                Ok(())
            }
        }
    }

    /// Returns the number of samples that are missing before a packet, according to its timestamp. Packets
    /// that could not be decoded leave such a gap.
    fn gap(&mut self, packet: &Packet, rate: u32) -> usize {
        let track = self.format.tracks().iter().find(|track| track.id == self.track);
        let Some(base) = track.and_then(|track| track.time_base) else { return 0 };
        let (numerator, denominator) = (i128::from(base.numer.get()), i128::from(base.denom.get()));
        // Timestamps of the encoder delay are negative.
        let ticks = i128::from(packet.pts.get().max(0));
        let time = ticks * numerator * i128::from(rate) / denominator;
        let given = i128::from(self.given);
        let gap = time - *self.origin.get_or_insert(time - given) - given;
        // Smaller gaps are rounding errors, and larger ones are wrong timestamps.
        let filled = i128::from(rate / SHORTEST_GAP)..=i128::from(rate * LONGEST_GAP);
        if !filled.contains(&gap) {
            return 0;
        }
        let now = self.time();
        self.gaps.get_or_insert((now, 0)).1 += 1;
        gap as usize
    }

    /// Records how the file ended. A file without any decodable audio is an error.
    fn end<T>(&mut self, error: Option<Error>) -> Result<Option<T>, String> {
        let is_eof = |e: &std::io::Error| e.kind() == ErrorKind::UnexpectedEof;
        match error {
            None => {}
            // A stream of unknown length ends this way.
            Some(Error::IoError(e)) if is_eof(&e) => self.is_cut = self.promised.is_some(),
            Some(Error::IoError(e)) => return Err(format!("cannot be read: {e}")),
            Some(error) => self.broken = Some(error.to_string()),
        }
        let missing = self
            .rate
            .zip(self.promised)
            .map(|(rate, promised)| promised.saturating_sub(self.given) > u64::from(rate / SHORTEST_GAP));
        // The rate may be unknown before the first sample.
        let nothing = self.given == 0 && self.promised.is_some_and(|promised| promised > 0);
        self.is_cut |= missing.unwrap_or(nothing);
        let failed = self.failed.as_ref().map(|(why, _)| why);
        match (self.given, failed.or(self.broken.as_ref())) {
            (0, Some(why)) => Err(format!("has no audio that can be decoded ({why})")),
            (0, None) if self.is_cut => Err("is cut short before its first sample".to_owned()),
            _ => Ok(None),
        }
    }
}

fn decoder_of(track: &Track) -> Result<Box<dyn AudioDecoder>, String> {
    let params = track.codec_params.as_ref().and_then(|params| params.audio());
    let params: &AudioCodecParameters =
        params.ok_or("has a track of audio that says nothing about its format")?;
    let decoder = get_codecs().make_audio_decoder(params, &AudioDecoderOptions::default());
    decoder.map_err(|error| {
        let name = match params.codec {
            CODEC_ID_OPUS => "Opus",
            CODEC_ID_AC3 | CODEC_ID_EAC3 => "Dolby Digital",
            CODEC_ID_NULL_AUDIO => "of a format that is unknown",
            _ if get_codecs().get_audio_decoder(params.codec).is_some() => {
                return format!("has audio that cannot be decoded ({error})");
            }
            _ => "of a format that is not supported",
        };
        format!("has audio that is {name}; convert it to FLAC, WAV or MP3 first")
    })
}

fn seconds_of(track: &Track) -> Option<f64> {
    let rate = track.codec_params.as_ref()?.audio()?.sample_rate.filter(|&rate| rate > 0)?;
    Some(track.num_frames? as f64 / f64::from(rate))
}

/// Averages all channels.
fn mean(planes: &[Vec<f32>], frames: usize) -> Vec<f32> {
    let mut sums = vec![0.0; frames];
    for plane in planes {
        for (sum, sample) in sums.iter_mut().zip(plane) {
            *sum += sample;
        }
    }
    if planes.len() > 1 {
        let count = planes.len() as f32;
        sums.iter_mut().for_each(|sum| *sum /= count);
    }
    sums
}
