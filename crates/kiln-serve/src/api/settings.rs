//! The settings of a request, in OpenAI's names and vLLM's.

use std::collections::BTreeMap;

use kiln::{
    GenerationConfig, Grammar, Model, Plan, Processor, ReasoningBudget, Request, RowState, Share, TokenId,
    expert::UNTIL_IT_ENDS,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{fields, openai::Counts};
use crate::{error::ApiError, guard::Key, models::Served};

/// Most of the likeliest tokens whose log-probabilities are told, as OpenAI has it.
const MOST_LOGPROBS: u64 = 20;

/// Longest `cache_salt`, in bytes: it is kept with each prompt.
const LONGEST_SALT: usize = 256;

/// Most stop strings, and their bytes: each piece of an answer is searched for them.
const MOST_STOPS: usize = 64;
const LONGEST_STOP: usize = 1024;

/// Most choices of a request.
const MOST_CHOICES: usize = 16;

/// Settings of an answer, in the words of OpenAI's API.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Settings {
    pub(super) model: Option<String>,
    #[serde(default)]
    pub(super) stream: bool,
    pub(super) stream_options: Option<StreamOptions>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f32>,
    pub(super) typical_p: Option<f32>,
    pub(super) seed: Option<i64>,
    pub(super) stop: Option<OneOrMany>,
    pub(super) max_tokens: Option<usize>,
    pub(super) max_completion_tokens: Option<usize>,
    pub(super) min_tokens: Option<usize>,
    /// Most tokens of the prompt and the answer, in ollama's API.
    #[serde(skip)]
    pub(super) context: Option<usize>,
    #[serde(default)]
    pub(super) ignore_eos: bool,
    pub(super) n: Option<usize>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) logit_bias: Option<BTreeMap<String, f32>>,
    pub(super) response_format: Option<ResponseFormat>,
    /// In a chat, whether log-probabilities are told; else, of how many tokens beside the chosen one.
    pub(super) logprobs: Option<Value>,
    pub(super) top_logprobs: Option<u64>,
    pub(super) cache_salt: Option<String>,
    pub(super) priority: Option<i64>,
    pub(super) skip_special_tokens: Option<bool>,
    pub(super) kiln: Option<Own>,
}

/// Settings that other servers do not have.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Own {
    /// The kind of cache.
    cache: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    /// vLLM's: every chunk counts tokens, too.
    #[serde(default)]
    continuous_usage_stats: bool,
    /// Chunks are never padded.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: JsonSchema },
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JsonSchema {
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    /// Answers always match the schema.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
    schema: Option<Value>,
}

impl ResponseFormat {
    /// JSON that matches a schema.
    pub(super) fn schema(schema: Value) -> Self {
        Self::JsonSchema { json_schema: JsonSchema { schema: Some(schema), ..JsonSchema::default() } }
    }
}

/// `presence_penalty` and `frequency_penalty`, by OpenAI's formula, of tokens that were generated.
#[derive(Clone, Copy, Debug)]
struct Penalties {
    presence: f32,
    frequency: f32,
}

impl Processor for Penalties {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let mut counts: BTreeMap<TokenId, f32> = BTreeMap::new();
        for &token in row.ids.iter().skip(row.ids.len().saturating_sub(row.generated)) {
            *counts.entry(token).or_default() += 1.0;
        }
        for (token, count) in counts {
            if let Some(score) = scores.get_mut(token as usize) {
                *score -= self.presence + self.frequency * count;
            }
        }
    }
}

/// The settings of each choice of a request.
#[derive(Clone, Debug)]
pub(super) struct Choices {
    config: GenerationConfig,
    pub(super) grammar: Option<Grammar>,
    /// Whether the names of special tokens are part of the text.
    pub(super) special_tokens: bool,
    penalties: Option<Penalties>,
    /// An end to reasoning.
    pub(super) budget: Option<ReasoningBudget>,
    plan: Option<Plan>,
    /// Whose the choices are, and how urgent.
    pub(super) share: Share,
    /// The name under which prompts share their beginnings.
    scope: String,
    /// Most tokens of the prompt and the answer.
    context: Option<usize>,
    /// Number of the likeliest tokens whose log-probabilities are told; `None`: none are.
    pub(super) logprobs: Option<usize>,
    /// Number of the likeliest tokens at each place of the prompt; `None`: none are told.
    pub(super) prompt_logprobs: Option<usize>,
    pub(super) n: usize,
}

impl Settings {
    pub(super) fn of(body: &Map<String, Value>) -> Result<Self, ApiError> {
        fields(body)
    }

    /// The name of the model.
    pub(super) fn model(&self) -> Result<&str, ApiError> {
        self.model.as_deref().ok_or_else(|| ApiError::field("model", "is missing"))
    }

    /// The chunks of a stream that count tokens.
    pub(super) fn counts(&self) -> Counts {
        match &self.stream_options {
            Some(StreamOptions { include_usage: true, continuous_usage_stats: true, .. }) => Counts::Always,
            Some(StreamOptions { include_usage: true, .. }) => Counts::AtEnd,
            _ => Counts::Never,
        }
    }

    /// Checks the settings of a request that came with this key.
    pub(super) fn choices(&self, served: &Served, key: Key) -> Result<Choices, ApiError> {
        if self.stream_options.is_some() && !self.stream {
            return Err(ApiError::field("stream_options", "goes with `stream`"));
        }
        if self.max_tokens.is_some() && self.max_completion_tokens.is_some() {
            return Err(ApiError::field(
                "max_tokens",
                "is another name of `max_completion_tokens`; give one",
            ));
        }
        let positions = served.model.sizes().positions;
        if let Some(context) = self.context.filter(|context| *context > positions) {
            let why = format!("is {context}, and the model has {positions} positions");
            return Err(ApiError::field("options.num_ctx", why));
        }
        let n = self.n.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&n) {
            return Err(ApiError::field("n", format!("is {n}, must be from 1 to {MOST_CHOICES}")));
        }
        let within = |name, value: Option<f32>, [least, most]: [f32; 2]| match value {
            Some(value) if !(least..=most).contains(&value) => {
                Err(ApiError::field(name, format!("is {value}, must be from {least} to {most}")))
            }
            _ => Ok(()),
        };
        within("temperature", self.temperature, [0.0, 2.0])?;
        within("presence_penalty", self.presence_penalty, [-2.0, 2.0])?;
        within("frequency_penalty", self.frequency_penalty, [-2.0, 2.0])?;

        let own = served.model.generation_config();
        let mut config = GenerationConfig::new();
        // OpenAI's defaults: all tokens are drawn from, at a temperature of 1.
        config.temperature = self.temperature.or(own.temperature).or(Some(1.0));
        config.do_sample = match self.temperature {
            Some(temperature) => Some(temperature > 0.0),
            None => own.do_sample.or(Some(true)),
        };
        config.top_k = match self.top_k {
            Some(-1) => Some(0),
            Some(k) => Some(usize::try_from(k).map_err(|_| ApiError::field("top_k", format!("is {k}")))?),
            None => own.top_k.or(Some(0)),
        };
        config.top_p = self.top_p;
        config.min_p = self.min_p;
        config.typical_p = self.typical_p;
        config.repetition_penalty = self.repetition_penalty;
        config.min_new_tokens = self.min_tokens;
        config.eos_token_id = self.ignore_eos.then(Vec::new);
        config.max_new_tokens = self.max_tokens.or(self.max_completion_tokens).or(Some(UNTIL_IT_ENDS));
        if config.max_new_tokens == Some(0) {
            return Err(ApiError::field("max_tokens", "is 0, must be at least 1"));
        }
        config.seed = self.seed.map(i64::cast_unsigned);
        config.stop_strings = match &self.stop {
            None => None,
            Some(OneOrMany::One(text)) => Some(vec![text.clone()]),
            Some(OneOrMany::Many(texts)) => Some(texts.clone()),
        };
        let stops = config.stop_strings.as_deref().unwrap_or_default();
        if stops.iter().any(String::is_empty) {
            return Err(ApiError::field("stop", "has an empty text, which would end any answer"));
        }
        if stops.len() > MOST_STOPS || stops.iter().any(|stop| stop.len() > LONGEST_STOP) {
            let why = format!("may have {MOST_STOPS} texts, each of {LONGEST_STOP} bytes");
            return Err(ApiError::field("stop", why));
        }
        config.sequence_bias =
            Some(self.biases(served.model.sizes().vocab)?).filter(|biases| !biases.is_empty());
        // Faults of settings are found before anything is queued.
        config.clone().merged_over(own).resolve()?;
        let penalties = Penalties {
            presence: self.presence_penalty.unwrap_or(0.0),
            frequency: self.frequency_penalty.unwrap_or(0.0),
        };
        if self.cache_salt.as_ref().is_some_and(|salt| salt.len() > LONGEST_SALT) {
            return Err(ApiError::field("cache_salt", format!("is longer than {LONGEST_SALT} bytes")));
        }
        let has_penalties = penalties.presence != 0.0 || penalties.frequency != 0.0;
        Ok(Choices {
            config,
            grammar: self.grammar()?,
            special_tokens: self.skip_special_tokens == Some(false),
            penalties: has_penalties.then_some(penalties),
            budget: None,
            context: self.context,
            plan: self.plan(served)?,
            share: Share { user: key.0.unwrap_or(0), priority: self.priority.unwrap_or(0) },
            scope: format!("{:?} {:?}", key.0, self.cache_salt.as_deref().unwrap_or_default()),
            logprobs: self.logprobs()?,
            prompt_logprobs: None,
            n,
        })
    }

    /// The kind of cache; `None`: that of the model.
    fn plan(&self, served: &Served) -> Result<Option<Plan>, ApiError> {
        let Some(name) = self.kiln.as_ref().and_then(|own| own.cache.as_deref()) else {
            return Ok(served.plan.clone());
        };
        let wrong = |why: String| ApiError::field("kiln.cache", why);
        let plan = Plan::named(name).map_err(|error| wrong(kiln::expert::plain(&error.to_string())))?;
        let default = served.plan.as_ref().unwrap_or(served.model.plan());
        match plan == *default || served.plans.contains(&plan) {
            true => Ok(Some(plan)),
            false => Err(wrong(format!(
                "the server does not allow `{plan}`; `/props` lists the caches that it does"
            ))),
        }
    }

    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        let count = |name, count: u64| match count {
            0..=MOST_LOGPROBS => Ok(Some(count as usize)),
            _ => Err(ApiError::field(name, format!("is {count}, must be from 0 to {MOST_LOGPROBS}"))),
        };
        match (&self.logprobs, self.top_logprobs) {
            (Some(Value::Bool(true)), top) => count("top_logprobs", top.unwrap_or(0)),
            (None | Some(Value::Bool(false)), Some(top)) if top > 0 => {
                Err(ApiError::field("top_logprobs", "goes with `logprobs`"))
            }
            (None | Some(Value::Bool(false)), _) => Ok(None),
            (Some(number), _) => match number.as_u64() {
                Some(top) => count("logprobs", top),
                None => Err(ApiError::field("logprobs", format!("is {number}, must be a whole number"))),
            },
        }
    }

    fn biases(&self, vocab: usize) -> Result<Vec<(Vec<TokenId>, f32)>, ApiError> {
        let bias = |(token, bias): (&String, &f32)| match token.parse::<TokenId>() {
            Ok(id) if (id as usize) < vocab && (-100.0..=100.0).contains(bias) => Ok((vec![id], *bias)),
            Ok(id) if (id as usize) < vocab => Err(ApiError::field(
                "logit_bias",
                format!("is {bias} for token {id}, must be from -100 to 100"),
            )),
            _ => Err(ApiError::field(
                "logit_bias",
                format!("`{token}` is no token of this model, which has {vocab}"),
            )),
        };
        self.logit_bias.iter().flatten().map(bias).collect()
    }

    fn grammar(&self) -> Result<Option<Grammar>, ApiError> {
        let mut schema = match &self.response_format {
            None | Some(ResponseFormat::Text) => return Ok(None),
            Some(ResponseFormat::JsonObject) => json!({ "type": "object" }),
            Some(ResponseFormat::JsonSchema { json_schema: JsonSchema { schema: Some(schema), .. } }) => {
                schema.clone()
            }
            Some(ResponseFormat::JsonSchema { .. }) => {
                return Err(ApiError::field("response_format.json_schema.schema", "is missing"));
            }
        };
        if let Value::Object(schema) = &mut schema {
            // Small models go on with white space, where any is allowed.
            let guidance = json!({ "whitespace_flexible": true, "whitespace_pattern": "[ \\n]{0,20}" });
            schema.entry("x-guidance").or_insert(guidance);
        }
        Ok(Some(Grammar::json_schema(&schema.to_string())?))
    }
}

impl Choices {
    /// Rejects a text that is certainly too long before it is tokenized.
    pub(super) fn check_length(&self, text: &str, model: &Model) -> kiln::Result<()> {
        model.check_length(text, &model.cache(self.plan.as_ref().unwrap_or(model.plan()))?)
    }

    /// The settings for a prompt of this many tokens: an answer ends where the model's positions do.
    pub(super) fn after(mut self, prompt: usize, model: &Model) -> kiln::Result<Self> {
        let room = model.sizes().positions.saturating_sub(prompt);
        let most = &mut self.config.max_new_tokens;
        match self.context {
            Some(context) if context <= prompt => {
                let why = format!("is {context}, and the prompt has {prompt} tokens");
                return Err(kiln::Error::Setting { name: "num_ctx", why });
            }
            Some(context) => *most = most.map(|most| most.min(context - prompt)),
            None => {}
        }
        if most.is_some_and(|most| most > room) {
            *most = Some(UNTIL_IT_ENDS);
        }
        Ok(self)
    }

    /// Gives a request the settings of the choice `index`.
    pub(super) fn of(&self, request: Request<'static>, index: usize, served: &Served) -> Request<'static> {
        let mut config = self.config.clone();
        // Each choice has random numbers of its own; the first has those of a single one.
        config.seed = config.seed.map(|seed| seed.wrapping_add(index as u64));
        let mut request = request.config(config).grammar(self.grammar.clone());
        if let Some(penalties) = self.penalties {
            request = request.processor(penalties);
        }
        if let Some(budget) = &self.budget {
            request = request.processor(budget.clone());
        }
        request = request.prompt_logprobs(self.prompt_logprobs);
        if let Some(logprobs) = self.logprobs {
            request = request.logprobs(logprobs);
        }
        request = request
            .special_tokens(self.special_tokens)
            .prefill_chunk(served.chunk)
            .prefix_scope(self.scope.as_str())
            .lookup_drafts(served.lookup_drafts);
        match &self.plan {
            Some(plan) => request.plan(plan.clone()),
            None => request,
        }
    }
}
