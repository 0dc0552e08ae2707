//! Options of `kiln transcribe`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kiln::{Result, Task, Transcriber};

use crate::{memory::CacheArgs, place::PlaceArgs};

#[derive(Debug, Args)]
pub(crate) struct TranscribeArgs {
    /// Recordings: WAV, MP3, FLAC, Ogg Vorbis, M4A; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,
    /// Folder of a Whisper model, or ORG/NAME on the Hugging Face hub
    #[arg(short, long, env = "KILN_SPEECH_MODEL", value_name = "MODEL")]
    pub(super) model: PathBuf,
    /// Spoken language: a code such as `de`, or its English name [default: detected]
    #[arg(short, long)]
    pub(super) language: Option<String>,
    /// `transcribe`, or `translate` into English
    #[arg(long, value_enum, default_value_t)]
    pub(super) task: TaskArg,
    /// Format of the transcript
    #[arg(short, long, value_enum, default_value_t)]
    pub(super) format: Format,
    /// Write one file per recording into this folder, named after the recording
    #[arg(short, long, value_name = "DIR")]
    pub(super) output_dir: Option<PathBuf>,
    /// Add the times of words: to each segment in `json`, and as one cue per word in `srt` and `vtt`
    #[arg(long)]
    pub(super) word_times: bool,
    /// Do not ask the model for times: a recording is one segment of up to 30 seconds
    #[arg(long, hide_short_help = true, conflicts_with = "word_times")]
    pub(super) no_timestamps: bool,
    /// Text that precedes the transcript, to set names and style
    #[arg(long, value_name = "TEXT")]
    pub(super) prompt: Option<String>,
    /// Give the text of each 30 seconds to the model as the context of the next
    #[arg(long, hide_short_help = true)]
    pub(super) condition_on_prev_tokens: bool,
    /// Temperatures to try in turn until a text passes the thresholds
    #[arg(long, hide_short_help = true, value_delimiter = ',', default_values_t = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], value_name = "T,..")]
    pub(super) temperature: Vec<f32>,
    /// Decode again if the text compresses better than this, because it repeats itself
    #[arg(long, hide_short_help = true, default_value_t = 1.35, value_name = "RATIO")]
    pub(super) compression_ratio_threshold: f32,
    /// Decode again if the mean log-probability is below this
    #[arg(long, hide_short_help = true, default_value_t = -1.0, value_name = "LOGPROB", allow_negative_numbers = true)]
    pub(super) logprob_threshold: f32,
    /// Skip a window whose probability of silence exceeds this, if its log-probability is too low
    #[arg(long, hide_short_help = true, default_value_t = 0.6, value_name = "P")]
    pub(super) no_speech_threshold: f32,
    /// Number of beams at temperature 0
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) num_beams: u16,
    /// Number of recordings that are transcribed as one batch
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) batch: u16,
    /// Seed of the sampler at temperatures above 0
    #[arg(long, hide_short_help = true, default_value_t = 0)]
    pub(super) seed: u64,
    #[command(flatten)]
    pub(super) place: PlaceArgs,
    #[command(flatten)]
    pub(super) cache: CacheArgs,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum TaskArg {
    #[default]
    Transcribe,
    Translate,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// One line per segment
    #[default]
    Text,
    /// SubRip subtitles
    Srt,
    /// WebVTT subtitles
    Vtt,
    /// Segments with tokens, probabilities and words
    Json,
}

impl Format {
    /// Extension of the output files.
    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::Text => "txt",
            Self::Srt => "srt",
            Self::Vtt => "vtt",
            Self::Json => "json",
        }
    }
}

impl TranscribeArgs {
    /// Applies the options to `transcriber`.
    pub(super) fn applied(&self, transcriber: Transcriber) -> Result<Transcriber> {
        let mut transcriber = transcriber
            .task(match self.task {
                TaskArg::Transcribe => Task::Transcribe,
                TaskArg::Translate => Task::Translate,
            })?
            .word_times(self.word_times)?
            .timestamps(!self.no_timestamps)
            .temperatures(self.temperature.clone())?
            .compression_ratio_threshold(self.compression_ratio_threshold)
            .logprob_threshold(self.logprob_threshold)
            .no_speech_threshold(self.no_speech_threshold)
            .condition_on_prev_tokens(self.condition_on_prev_tokens)
            .num_beams(self.num_beams.into())?
            .seed(self.seed)
            .on_oom(self.cache.on_oom)
            .compile(self.cache.compile());
        if let Some(language) = &self.language {
            transcriber = transcriber.language(language)?;
        }
        if let Some(prompt) = &self.prompt {
            transcriber = transcriber.initial_prompt(prompt)?;
        }
        let plan = self.cache.plan()?.map(|plan| self.cache.offloaded(plan));
        match plan {
            Some(plan) => transcriber.plan(plan),
            None => Ok(transcriber),
        }
    }
}
