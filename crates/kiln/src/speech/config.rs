//! A folder's settings for transcription.

use std::collections::BTreeMap;

use kiln_core::{Error, Result, model::TokenId};
use kiln_generate::Tokenizer;
use kiln_models::{ConfigFile, checkpoint::Checkpoint};
use serde::Deserialize;
use serde_json::Value;

use super::{Task, languages};

/// The fields of `generation_config.json` that only speech models have.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpeechConfig {
    decoder_start_token_id: Option<TokenId>,
    no_timestamps_token_id: Option<TokenId>,
    prev_sot_token_id: Option<TokenId>,
    max_initial_timestamp_index: Option<usize>,
    is_multilingual: Option<bool>,
    lang_to_id: Option<BTreeMap<String, TokenId>>,
    task_to_id: Option<BTreeMap<String, TokenId>>,
    alignment_heads: Option<Vec<(usize, usize)>>,
    /// `eos_token_id` of `config.json`, or the tokenizer's end token.
    #[serde(skip)]
    end: Option<TokenId>,
    /// `median_filter_width` of `config.json`.
    #[serde(skip)]
    filter_width: Option<usize>,
}

impl SpeechConfig {
    /// Reads `generation_config.json`, if there is one.
    ///
    /// # Errors
    /// [`Error::File`] for a field of the wrong type.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self> {
        const FILE: &str = "generation_config.json";
        let wrong = |e| Error::File { path: checkpoint.path_of(FILE), why: format!("cannot be used: {e}") };
        let speech: Self = match checkpoint.text(FILE)? {
            Some(text) => serde_json::from_str(&text).map_err(wrong)?,
            None => Self::default(),
        };
        let width = checkpoint.config.get("median_filter_width").and_then(Value::as_u64);
        Ok(Self { filter_width: width.map(|width| width as usize), ..speech })
    }

    /// Completes missing fields from the tokenizer and from `config.json`: old folders have no
    /// `generation_config.json`, or one without these fields.
    pub(crate) fn complete(&mut self, config: &ConfigFile, tokenizer: &Tokenizer, vocab: usize) {
        /// Minimum vocabulary size of a multilingual model. (`Whisper.is_multilingual`)
        const MULTILINGUAL: usize = 51_865;

        let id_of = |token: &str| tokenizer.id_of(token);
        let own = |name: &str| config.get(name).and_then(Value::as_u64).map(|id| id as TokenId);
        let start = own("decoder_start_token_id");
        self.decoder_start_token_id =
            self.decoder_start_token_id.or(start).or_else(|| id_of("<|startoftranscript|>"));
        self.end = own("eos_token_id").or_else(|| id_of("<|endoftext|>"));
        self.no_timestamps_token_id = self.no_timestamps_token_id.or_else(|| id_of("<|notimestamps|>"));
        self.prev_sot_token_id = self.prev_sot_token_id.or_else(|| id_of("<|startofprev|>"));
        // The first forced token names a language, if there are several.
        let forced = config.get("forced_decoder_ids").and_then(|forced| forced.pointer("/0/1")).cloned();
        let names_language = forced.map(|id| id.as_u64() != self.no_timestamps_token_id.map(u64::from));
        let is_multilingual = self
            .is_multilingual
            .unwrap_or_else(|| self.lang_to_id.is_some() || names_language.unwrap_or(vocab >= MULTILINGUAL));
        self.is_multilingual = Some(is_multilingual);
        if !is_multilingual {
            return;
        }
        let by_token = |token: String| id_of(&token).map(|id| (token, id));
        let languages = || languages::codes().filter_map(|code| by_token(format!("<|{code}|>"))).collect();
        self.lang_to_id.get_or_insert_with(languages);
        let task = |task: Task| Some((task.name().to_owned(), id_of(&format!("<|{}|>", task.name()))?));
        let tasks = || [Task::Transcribe, Task::Translate].into_iter().filter_map(task).collect();
        self.task_to_id.get_or_insert_with(tasks);
    }

    /// Width of the median filter over positions, which is applied to attention before words are located.
    pub(super) fn filter_width(&self) -> usize {
        self.filter_width.unwrap_or(7).clamp(1, 1001)
    }

    /// The special tokens, checked.
    ///
    /// # Errors
    /// [`Error::Setting`] for one that is missing, or not in the vocabulary.
    pub(super) fn tokens(&self, eos: Option<TokenId>, vocab: usize) -> Result<SpecialTokens> {
        let token = |name: &'static str, id: Option<TokenId>| match id {
            Some(id) if (id as usize) < vocab => Ok(id),
            Some(id) => {
                Err(Error::Setting { name, why: format!("is {id}, and the vocabulary has {vocab} tokens") })
            }
            None => {
                let why = "is missing in the model folder: in generation_config.json, and in its tokenizer; transcribing needs it, \
                           so take the files of the original model";
                Err(Error::Setting { name, why: why.to_owned() })
            }
        };
        let all = |ids: &Option<BTreeMap<String, TokenId>>| ids.clone().unwrap_or_default();
        let (languages, tasks) = (all(&self.lang_to_id), all(&self.task_to_id));
        languages.values().try_for_each(|&id| token("lang_to_id", Some(id)).map(drop))?;
        tasks.values().try_for_each(|&id| token("task_to_id", Some(id)).map(drop))?;
        let no_timestamps = token("no_timestamps_token_id", self.no_timestamps_token_id)?;
        let eos = token("eos_token_id", eos.or(self.end))?;
        if eos > no_timestamps {
            let why = format!("is {eos}, behind the first timestamp; transcribing needs it before");
            return Err(Error::Setting { name: "eos_token_id", why });
        }
        Ok(SpecialTokens {
            start: token("decoder_start_token_id", self.decoder_start_token_id)?,
            eos,
            no_timestamps,
            no_speech: no_timestamps.saturating_sub(1),
            previous: self.prev_sot_token_id.filter(|&id| (id as usize) < vocab),
            max_initial_timestamp: self.max_initial_timestamp_index,
            languages,
            tasks,
            is_multilingual: self.is_multilingual.unwrap_or(self.lang_to_id.is_some()),
        })
    }

    /// The heads of the decoder whose attention follows the audio, as pairs of layer and head.
    pub(super) fn alignment_heads(&self) -> Option<&[(usize, usize)]> {
        self.alignment_heads.as_deref().filter(|heads| !heads.is_empty())
    }
}

/// Tokens that are not text.
#[derive(Clone, Debug)]
pub(super) struct SpecialTokens {
    /// Begins a transcript.
    pub(super) start: TokenId,
    /// Ends a transcript. Tokens below this one are text.
    pub(super) eos: TokenId,
    pub(super) no_timestamps: TokenId,
    /// Follows `start` if there is no speech.
    pub(super) no_speech: TokenId,
    /// Begins the text before the window.
    pub(super) previous: Option<TokenId>,
    /// The latest time at which a window may begin, in steps of 20 ms.
    pub(super) max_initial_timestamp: Option<usize>,
    /// Tokens of languages, by their text, such as `<|de|>`
    pub(super) languages: BTreeMap<String, TokenId>,
    tasks: BTreeMap<String, TokenId>,
    pub(super) is_multilingual: bool,
}

impl SpecialTokens {
    /// The token of 0 seconds. Each following token is 20 ms later.
    pub(super) fn first_timestamp(&self) -> TokenId {
        self.no_timestamps + 1
    }

    /// The token and the code of a language.
    ///
    /// # Errors
    /// [`Error::Unknown`] for a language that Whisper does not know; [`Error::Setting`] for one that this
    /// model does not.
    pub(super) fn language(&self, language: &str) -> Result<(TokenId, &'static str)> {
        let wrong = |why: &str| Err(Error::Setting { name: "language", why: why.to_owned() });
        if !self.is_multilingual {
            return wrong("cannot be chosen: the model knows English alone; leave it out");
        }
        let Some(code) = languages::code(language) else {
            let known =
                self.languages.keys().map(|key| key.trim_matches(['<', '|', '>']).to_owned()).collect();
            return Err(Error::Unknown { what: "language", name: language.to_owned(), known });
        };
        match self.languages.get(&format!("<|{code}|>")) {
            Some(&id) => Ok((id, code)),
            None => wrong(&format!("is `{code}`, which this model does not know")),
        }
    }

    /// The token that asks for a task, if the model supports several.
    ///
    /// # Errors
    /// [`Error::Setting`] if it cannot translate.
    pub(super) fn task(&self, task: Task) -> Result<Option<TokenId>> {
        let id = self.tasks.get(task.name()).copied().filter(|_| self.is_multilingual);
        match (task, id) {
            (Task::Translate, None) => {
                let why = "is `translate`, and the model knows English alone; use a multilingual one";
                Err(Error::Setting { name: "task", why: why.to_owned() })
            }
            (_, id) => Ok(id),
        }
    }
}
