//! Speech to text, as in the work of Whisper's authors (Radford et al., 2022,
//! <https://arxiv.org/abs/2212.04356>) and transformers' `WhisperForConditionalGeneration.generate`: windows
//! of 30 seconds, one after the other, each of which begins where the last complete segment ended.

mod config;
mod languages;
mod recording;
mod rules;
mod segments;
mod subtitles;
mod transcripts;
mod window;
mod words;

use std::collections::VecDeque;

use kiln_audio::LogMel;
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    model::{FeatureShape, TokenId},
};
use kiln_models::Sizes;

pub(crate) use self::config::SpeechConfig;
use self::{config::SpecialTokens, recording::Recording, transcripts::Track};
pub use self::{
    recording::Audio,
    subtitles::{SubtitleFormat, Subtitles},
    transcripts::{Transcript, Transcripts},
};
use crate::{Model, OnOutOfMemory};

/// The task of a transcription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Task {
    /// Text in the spoken language.
    #[default]
    Transcribe,
    /// Text in English.
    Translate,
}

impl Task {
    fn name(self) -> &'static str {
        match self {
            Self::Transcribe => "transcribe",
            Self::Translate => "translate",
        }
    }
}

/// A part of a transcript.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Segment {
    /// Seconds from the beginning of the recording.
    pub start: f64,
    /// Seconds from the beginning of the recording.
    pub end: f64,
    pub text: String,
    /// The tokens of the text and its timestamps.
    pub tokens: Vec<TokenId>,
    /// The words with their times; empty unless [requested](Transcriber::word_times).
    pub words: Vec<Word>,
    /// Code of the language, such as `de`; `None` if the model knows only one.
    pub language: Option<String>,
    /// The temperature at which the window of the segment was decoded.
    pub temperature: f32,
    /// The mean log-probability of the tokens of the window.
    pub avg_logprob: f32,
    /// A measure of repetition in the window: the bytes of its tokens over their size when compressed by
    /// zlib.
    pub compression_ratio: f32,
    /// The probability that the window has no speech; `None` if it was not computed.
    pub no_speech_prob: Option<f32>,
}

/// A word of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// The word with the space before it, and punctuation.
    pub text: String,
    /// Seconds from the beginning of the recording.
    pub start: f64,
    /// Seconds from the beginning of the recording.
    pub end: f64,
}

/// Transcribes speech with a Whisper model.
///
/// Defaults: the language is detected, segments have timestamps, and a window whose text is unlikely or
/// repeats itself is decoded again at a higher temperature. A window without speech has no text.
///
/// ```no_run
/// use kiln::{AudioReader, Model, Transcriber};
///
/// let model = Model::load("whisper-tiny.en")?;
/// for segment in Transcriber::new(&model)?.transcribe(AudioReader::open("speech.mp3")?)? {
///     let segment = segment?;
///     println!("[{:.2} - {:.2}]{}", segment.start, segment.end, segment.text);
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Transcriber {
    model: Model,
    tokens: SpecialTokens,
    mel: LogMel,
    /// Number of frames per window.
    window: usize,
    plan: Plan,
    language: Option<(TokenId, &'static str)>,
    task: Task,
    has_timestamps: bool,
    has_word_times: bool,
    temperatures: Vec<f32>,
    compression_ratio_threshold: Option<f32>,
    logprob_threshold: Option<f32>,
    no_speech_threshold: Option<f32>,
    condition_on_prev_tokens: bool,
    prompt: Vec<TokenId>,
    num_beams: usize,
    seed: u64,
    on_oom: OnOutOfMemory,
    compile: Option<bool>,
}

impl Transcriber {
    /// Creates a transcriber with default settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that is not a speech model, or whose folder lacks something that
    /// transcription needs; [`Error::Prompt`] without a tokenizer.
    pub fn new(model: &Model) -> Result<Self> {
        let wrong = |why: &str| Error::Setting { name: "model", why: format!("{} {why}", model.name()) };
        let FeatureShape { bins, frames } = model
            .causal()
            .features()
            .ok_or_else(|| wrong("takes text and no sound; load a Whisper model"))?;
        let speech =
            model.speech().ok_or_else(|| wrong("is made up, so it knows no words; load a folder"))?;
        model.tokenizer()?;
        let eos = model.generation_config().eos_token_id.as_ref().and_then(|ids| ids.first()).copied();
        Ok(Self {
            model: model.clone(),
            tokens: speech.tokens(eos, model.sizes().vocab)?,
            mel: LogMel::new(bins)?,
            window: frames,
            plan: model.plan().clone(),
            language: None,
            task: Task::default(),
            has_timestamps: true,
            has_word_times: false,
            temperatures: vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            compression_ratio_threshold: Some(1.35),
            logprob_threshold: Some(-1.0),
            no_speech_threshold: Some(0.6),
            condition_on_prev_tokens: false,
            prompt: Vec::new(),
            num_beams: 1,
            seed: 0,
            on_oom: OnOutOfMemory::default(),
            compile: None,
        })
    }

    /// Sets the spoken language: its code or its English name. Default: detected in the first window of each
    /// recording.
    ///
    /// # Errors
    /// [`Error::Unknown`] for a language that Whisper does not know; [`Error::Setting`] for one that the
    /// model does not.
    pub fn language(self, language: &str) -> Result<Self> {
        Ok(Self { language: Some(self.tokens.language(language)?), ..self })
    }

    /// Sets the task. Default: [`Task::Transcribe`].
    ///
    /// # Errors
    /// [`Error::Setting`] if the model cannot translate.
    pub fn task(self, task: Task) -> Result<Self> {
        self.tokens.task(task)?;
        Ok(Self { task, ..self })
    }

    /// Whether the model predicts the start and end of segments. Without timestamps, a recording is one
    /// segment of up to 30 seconds. Default: true.
    pub fn timestamps(self, has_timestamps: bool) -> Self {
        Self { has_timestamps, ..self }
    }

    /// Whether segments contain the times of words, which takes another pass over each window. Default:
    /// false.
    ///
    /// # Errors
    /// [`Error::Setting`] if the folder does not name the `alignment_heads` that the times are computed from,
    /// or names heads that the model does not have.
    pub fn word_times(self, has_word_times: bool) -> Result<Self> {
        let wrong = |why| Err(Error::Setting { name: "alignment_heads", why });
        let Sizes { layers, heads, .. } = *self.model.sizes();
        match self.alignment_heads() {
            _ if !has_word_times => {}
            None => {
                let why = "are missing in the model folder's generation_config.json, and the times of words need them";
                return wrong(why.to_owned());
            }
            Some(named) => {
                if let Some((layer, head)) =
                    named.iter().find(|(layer, head)| *layer >= layers || *head >= heads)
                {
                    return wrong(format!(
                        "of the model folder's generation_config.json name head {head} of layer {layer}, and the model has {layers} \
                         layers of {heads} heads"
                    ));
                }
            }
        }
        Ok(Self { has_word_times, ..self })
    }

    /// Sets the temperatures at which a window is decoded until one passes the thresholds; 0 takes the
    /// likeliest tokens. Default: 0, 0.2, 0.4, 0.6, 0.8 and 1.
    ///
    /// # Errors
    /// [`Error::Setting`] for none, for negative ones, and for more than 16: a window that passes at none of
    /// them is decoded at each.
    pub fn temperatures(self, temperatures: impl Into<Vec<f32>>) -> Result<Self> {
        const MOST: usize = 16;

        let temperatures = temperatures.into();
        if temperatures.len() > MOST {
            let why = format!(
                "has {} values; a window is decoded at each, so give {MOST} at most",
                temperatures.len()
            );
            return Err(Error::Setting { name: "temperature", why });
        }
        if temperatures.is_empty() || temperatures.iter().any(|t| !t.is_finite() || *t < 0.0) {
            let why = format!("is {temperatures:?}; give one or more that are not negative");
            return Err(Error::Setting { name: "temperature", why });
        }
        Ok(Self { temperatures, ..self })
    }

    /// Sets the compression ratio above which a window counts as repetitive and is decoded again. Default:
    /// 1.35; `None`: no limit.
    pub fn compression_ratio_threshold(self, ratio: impl Into<Option<f32>>) -> Self {
        Self { compression_ratio_threshold: ratio.into(), ..self }
    }

    /// Sets the mean log-probability below which a window is decoded again. Default: -1; `None`: no limit.
    pub fn logprob_threshold(self, logprob: impl Into<Option<f32>>) -> Self {
        Self { logprob_threshold: logprob.into(), ..self }
    }

    /// Sets the probability of no speech above which a window has no text, if its mean log-probability is
    /// below the threshold, too. Default: 0.6; `None`: all windows have text.
    pub fn no_speech_threshold(self, probability: impl Into<Option<f32>>) -> Self {
        Self { no_speech_threshold: probability.into(), ..self }
    }

    /// Whether the text of a window is the prompt of the next. Default: false. It makes text more consistent,
    /// but repeats errors.
    pub fn condition_on_prev_tokens(self, condition: bool) -> Self {
        Self { condition_on_prev_tokens: condition, ..self }
    }

    /// Sets a text that precedes the transcript, to set names and style. Default: none.
    ///
    /// # Errors
    /// [`Error::Prompt`] for text that the tokenizer cannot encode; [`Error::Setting`] if the model has no
    /// place for it.
    pub fn initial_prompt(self, text: &str) -> Result<Self> {
        if self.tokens.previous.is_none() {
            let why = "is missing in the model folder's generation_config.json, and a prompt needs it";
            return Err(Error::Setting { name: "prev_sot_token_id", why: why.to_owned() });
        }
        let prompt = self.model.encode_more(&format!(" {}", text.trim()))?;
        Ok(Self { prompt, ..self })
    }

    /// Sets the plan of the decoder's KV cache. Default: the folder's plan, else `dynamic`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a plan that does not suit the model.
    pub fn plan(self, plan: Plan) -> Result<Self> {
        plan.check(&self.model.causal().needs())?;
        Ok(Self { plan, ..self })
    }

    /// Sets the number of beams at temperature 0. Default: 1.
    ///
    /// # Errors
    /// [`Error::Setting`] for 0.
    pub fn num_beams(self, beams: usize) -> Result<Self> {
        if beams == 0 {
            let why = "is 0, must be at least 1".to_owned();
            return Err(Error::Setting { name: "num_beams", why });
        }
        Ok(Self { num_beams: beams, ..self })
    }

    /// Sets the seed of the sampler: the same seed samples the same tokens. Default: 0.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Sets the remedy when memory runs out. Default: layers of the cache move to host memory.
    pub fn on_oom(self, on_oom: OnOutOfMemory) -> Self {
        Self { on_oom, ..self }
    }

    /// Whether the decode step is captured once and replayed, if the device supports it. Default: true.
    pub fn compile(self, compile: impl Into<Option<bool>>) -> Self {
        Self { compile: compile.into(), ..self }
    }

    /// Transcribes a recording, segment by segment. The recording is read once before the first segment, to
    /// find its loudest sound.
    ///
    /// ```no_run
    /// use kiln::{AudioReader, Model, Transcriber, expert::read_back};
    ///
    /// # read_back::block_on(async {
    /// let transcriber = Transcriber::new(&Model::load("whisper-tiny.en")?)?;
    /// let mut transcript = transcriber.transcribe(AudioReader::open("speech.mp3")?)?;
    /// // In an async program; without one, a transcript is an iterator.
    /// while let Some(segment) = transcript.next_segment().await {
    ///     println!("{}", segment?.text);
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// # })?;
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] and [`Error::Audio`] for input that cannot be read as audio.
    pub fn transcribe(&self, audio: impl Into<Audio>) -> Result<Transcript> {
        let all = self.transcribe_all(vec![audio.into()])?;
        Ok(Transcript { all })
    }

    /// Transcribes several recordings at once: their windows go through the model as one batch. Items are the
    /// index of the recording and one of its segments. The text of each recording is the same as if it were
    /// transcribed alone.
    ///
    /// # Errors
    /// [`Error::File`] and [`Error::Audio`] for input that cannot be read as audio.
    pub fn transcribe_all(&self, recordings: Vec<Audio>) -> Result<Transcripts> {
        let tracks = recordings.into_iter().map(|audio| {
            Ok(Track {
                recording: Recording::new(audio, &self.mel, self.window)?,
                seek: 0,
                tokens: Vec::new(),
                is_conditioned: self.condition_on_prev_tokens,
                language: self.language,
            })
        });
        Ok(Transcripts {
            transcriber: self.clone(),
            tracks: tracks.collect::<Result<_>>()?,
            cache: self.model.cache(&self.plan)?,
            ready: VecDeque::new(),
            is_over: false,
        })
    }

    fn alignment_heads(&self) -> Option<&[(usize, usize)]> {
        self.model.speech().and_then(SpeechConfig::alignment_heads)
    }
}
