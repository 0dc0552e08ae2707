//! Speech to text, as Whisper's authors do it (Radford et al., 2022, <https://arxiv.org/abs/2212.04356>) and transformers'
//! `WhisperForConditionalGeneration.generate`: windows of 30 seconds, one after the other, each of which begins where the last
//! complete segment ended.

mod config;
mod languages;
mod recording;
mod rules;
mod segments;
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
    transcripts::{Transcript, Transcripts},
};
use crate::{Model, OnOutOfMemory};

/// What is made of speech.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Task {
    /// Text in the language that is spoken.
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
    /// Seconds from the beginning of the recording on.
    pub start: f64,
    /// Seconds from the beginning of the recording on.
    pub end: f64,
    pub text: String,
    /// The tokens of the text and its timestamps.
    pub tokens: Vec<TokenId>,
    /// When each word was spoken; empty unless [asked for](Transcriber::word_times).
    pub words: Vec<Word>,
    /// Code of the language, such as `de`; `None` where the model knows one alone.
    pub language: Option<String>,
    /// The temperature at which the window of the segment was decoded.
    pub temperature: f32,
    /// The mean log-probability of the tokens of the window.
    pub avg_logprob: f32,
    /// How often the tokens of the window repeat themselves: their bytes over those that zlib makes of them.
    pub compression_ratio: f32,
    /// How likely it is that nobody speaks in the window; `None` where it was not computed.
    pub no_speech_prob: Option<f32>,
}

/// A word of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// With the space before it, and punctuation.
    pub text: String,
    /// Seconds from the beginning of the recording on.
    pub start: f64,
    /// Seconds from the beginning of the recording on.
    pub end: f64,
}

/// Turns speech into text with a Whisper model.
///
/// Defaults: the language is detected, segments have timestamps, and a window whose text is unlikely or repeats itself is decoded
/// again at a higher temperature. Where nobody speaks there is no text.
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
    /// Frames of a window.
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
    /// # Errors
    /// [`Error::Setting`] for a model that is not one of speech, or whose folder lacks what transcribing needs; [`Error::Prompt`]
    /// without a tokenizer.
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

    /// The language that is spoken: its code or its English name. Default: it is detected in the first window of each recording.
    ///
    /// # Errors
    /// [`Error::Unknown`] for a language that Whisper does not know; [`Error::Setting`] for one that the model does not.
    pub fn language(self, language: &str) -> Result<Self> {
        Ok(Self { language: Some(self.tokens.language(language)?), ..self })
    }

    /// What is made of it. Default: [`Task::Transcribe`].
    ///
    /// # Errors
    /// [`Error::Setting`] where the model cannot translate.
    pub fn task(self, task: Task) -> Result<Self> {
        self.tokens.task(task)?;
        Ok(Self { task, ..self })
    }

    /// Whether the model says when segments begin and end. Without, a recording is one segment of up to 30 seconds. Default: it does.
    pub fn timestamps(self, has_timestamps: bool) -> Self {
        Self { has_timestamps, ..self }
    }

    /// Whether segments say when each word was spoken, which takes another pass over each window. Default: they do not.
    ///
    /// # Errors
    /// [`Error::Setting`] where the folder does not name the `alignment_heads` that this is read off, or names heads that the model does
    /// not have.
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

    /// The temperatures at which a window is decoded until one passes the thresholds; 0 takes the likeliest tokens. Default: 0, 0.2,
    /// 0.4, 0.6, 0.8 and 1.
    ///
    /// # Errors
    /// [`Error::Setting`] for none, for negative ones, and for more than 16: a window that passes at none of them is decoded at each.
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

    /// A window whose tokens compress better than this repeats itself and is decoded again. Default: 1.35; `None`: any will do.
    pub fn compression_ratio_threshold(self, ratio: impl Into<Option<f32>>) -> Self {
        Self { compression_ratio_threshold: ratio.into(), ..self }
    }

    /// A window whose mean log-probability is below this is decoded again. Default: -1; `None`: any will do.
    pub fn logprob_threshold(self, logprob: impl Into<Option<f32>>) -> Self {
        Self { logprob_threshold: logprob.into(), ..self }
    }

    /// A window in which nobody speaks, likelier than this, has no text if its mean log-probability is below the threshold, too.
    /// Default: 0.6; `None`: all have text.
    pub fn no_speech_threshold(self, probability: impl Into<Option<f32>>) -> Self {
        Self { no_speech_threshold: probability.into(), ..self }
    }

    /// Whether the text of a window is the prompt of the next. Default: it is not. It makes text more consistent, and errors
    /// repeat.
    pub fn condition_on_prev_tokens(self, condition: bool) -> Self {
        Self { condition_on_prev_tokens: condition, ..self }
    }

    /// Text that stands before the transcript, for names and style. Default: none.
    ///
    /// # Errors
    /// [`Error::Prompt`] for text that the tokenizer cannot encode; [`Error::Setting`] where the model has no place for it.
    pub fn initial_prompt(self, text: &str) -> Result<Self> {
        if self.tokens.previous.is_none() {
            let why = "is missing in the model folder's generation_config.json, and a prompt needs it";
            return Err(Error::Setting { name: "prev_sot_token_id", why: why.to_owned() });
        }
        let prompt = self.model.encode_more(&format!(" {}", text.trim()))?;
        Ok(Self { prompt, ..self })
    }

    /// How the keys and values of the decoder are kept. Default: what the folder asks for, else `dynamic`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a plan that does not suit the model.
    pub fn plan(self, plan: Plan) -> Result<Self> {
        plan.check(&self.model.causal().needs())?;
        Ok(Self { plan, ..self })
    }

    /// Beams at temperature 0. Default: 1.
    ///
    /// # Errors
    /// [`Error::Setting`] for none.
    pub fn num_beams(self, beams: usize) -> Result<Self> {
        if beams == 0 {
            let why = "is 0, must be at least 1".to_owned();
            return Err(Error::Setting { name: "num_beams", why });
        }
        Ok(Self { num_beams: beams, ..self })
    }

    /// Where tokens are drawn, the same seed draws the same tokens. Default: 0.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// What is done when memory runs out. Default: layers of the cache move to host memory.
    pub fn on_oom(self, on_oom: OnOutOfMemory) -> Self {
        Self { on_oom, ..self }
    }

    /// Whether the decode step is captured once and replayed, where the device can do so. Default: it is.
    pub fn compile(self, compile: impl Into<Option<bool>>) -> Self {
        Self { compile: compile.into(), ..self }
    }

    /// Transcribes a recording, segment by segment. It is read once before the first segment: its loudest sound counts.
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
    /// [`Error::File`] and [`Error::Audio`] for what cannot be read as sound.
    pub fn transcribe(&self, audio: impl Into<Audio>) -> Result<Transcript> {
        let all = self.transcribe_all(vec![audio.into()])?;
        Ok(Transcript { all })
    }

    /// Transcribes several recordings at once: their windows go through the model side by side. Items are the number of the
    /// recording and a segment of it. The text of each is what it would be alone.
    ///
    /// # Errors
    /// [`Error::File`] and [`Error::Audio`] for what cannot be read as sound.
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
