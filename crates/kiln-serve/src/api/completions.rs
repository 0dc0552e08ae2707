//! `/v1/completions`

use std::sync::Arc;

use axum::{Extension, extract::State, response::Response};
use kiln::AnswerPart;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Body, Server,
    answer::{Answer, Form, Frame, Step},
    fields, logprobs,
    openai::{self, Counts},
    parsed,
    prompts::{Prompt, Prompts},
    reader::Reader,
    settings::{Choices, Settings},
};
use crate::{error::ApiError, fields as known, guard::Key, models::Served, worker::Make};

/// Most texts of a request: prompts times choices.
const MOST_TEXTS: usize = 128;

/// Most log-probabilities of prompts in an answer, which is whole in memory.
const MOST_LOGPROBS: usize = 4 << 20;

#[derive(Debug, Deserialize)]
struct Completion {
    prompt: Prompts,
    #[serde(default)]
    echo: bool,
}

pub(super) async fn complete(
    State(models): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[known::COMPLETIONS, known::COMMON])?;
    if !body.contains_key("prompt") {
        return Err(ApiError::field("prompt", "is missing"));
    }
    let settings = Settings::of(&body)?;
    let Completion { prompt, echo } = fields(&body)?;
    let served = models.get(Some(settings.model()?)).await?;
    let mut choices = settings.choices(&served, key)?;
    if body.get("logprobs").is_some_and(Value::is_boolean) {
        return Err(ApiError::field("logprobs", "must be a number"));
    }
    // Those of the prompt are told, too, if it is part of the text.
    choices.prompt_logprobs = choices.logprobs.filter(|_| echo);
    let prompts = prompt.list();
    let texts = prompts.len() * choices.n;
    if !(1..=MOST_TEXTS).contains(&texts) {
        let why = format!("asks for {texts} texts, must be from 1 to {MOST_TEXTS}");
        return Err(ApiError::field("prompt", why));
    }
    if let Some(top) = choices.prompt_logprobs {
        let tokens: usize = prompts.iter().map(|prompt| prompt.bytes().div_ceil(4)).sum();
        let told = tokens.saturating_mul(choices.n).saturating_mul(top + 1);
        if told > MOST_LOGPROBS {
            let why =
                format!("asks for about {told} of prompts, at most {MOST_LOGPROBS}; send fewer prompts");
            return Err(ApiError::field("logprobs", why));
        }
    }
    let start = |prompt: &Prompt| match prompt {
        _ if !echo => Ok(String::new()),
        Prompt::Tokens(tokens) => served.model.decode(tokens),
        Prompt::Text(text) => Ok(text.clone()),
    };
    let mut starts = Vec::new();
    for prompt in &prompts {
        starts.extend(vec![start(prompt)?; choices.n]);
    }
    let begins = |start: &String| if choices.prompt_logprobs.is_some() { 0 } else { start.chars().count() };
    let offsets = starts.iter().map(begins).collect();
    let form = Text { starts, offsets, counts: settings.counts() };
    begin(served, prompts, choices).await?.respond(form, settings.stream).await
}

/// Submits the choices of the texts that follow each prompt.
pub(super) async fn begin(
    served: Arc<Served>,
    prompts: Vec<Prompt>,
    choices: Choices,
) -> Result<Answer, ApiError> {
    served.check_text()?;
    let mut all: Vec<Make> = Vec::new();
    for prompt in prompts {
        for index in 0..choices.n {
            let (choices, prompt, of) = (choices.clone(), prompt.clone(), Arc::clone(&served));
            all.push(Box::new(move |model| {
                let tokens = match &prompt {
                    Prompt::Text(text) => {
                        // A text of megabytes would keep the engine from all others.
                        choices.check_length(text, model)?;
                        model.encode(text)?
                    }
                    Prompt::Tokens(tokens) => tokens.clone(),
                };
                let choices = choices.clone().after(tokens.len(), model)?;
                choices.of(model.generate(tokens), index, &of).stream()
            }));
        }
    }
    Answer::begin(served, all, &Reader::Plain, &choices).await
}

/// OpenAI's form of completions.
struct Text {
    /// The texts that the choices begin with, such as the prompt.
    starts: Vec<String>,
    /// Number of characters before the tokens of each choice whose log-probabilities are not told.
    offsets: Vec<usize>,
    counts: Counts,
}

impl Text {
    fn frame(answer: &Answer, choices: Vec<Value>) -> Value {
        openai::frame(answer, "cmpl", "text_completion", choices)
    }

    /// The log-probabilities of the next tokens of a choice; null if none were asked for.
    fn next_logprobs(&mut self, answer: &mut Answer, index: usize) -> Value {
        if !answer.logprobs {
            return Value::Null;
        }
        let tokens = answer.take_tokens(index);
        logprobs::of_text(&answer.served.model, &tokens, &mut self.offsets[index])
    }

    fn chunk(&mut self, answer: &mut Answer, index: usize, text: &str, reason: Option<&str>) -> Frame {
        let has_tokens = answer.has_tokens(index);
        let logprobs = if has_tokens { self.next_logprobs(answer, index) } else { Value::Null };
        let choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": reason, "text": text });
        openai::chunk(answer, Self::frame(answer, vec![choice]), self.counts)
    }
}

impl Form for Text {
    fn whole(mut self, mut answer: Answer) -> Value {
        let all = 0..answer.choices.len();
        let choice = |index| {
            let logprobs = self.next_logprobs(&mut answer, index);
            let text = format!("{}{}", self.starts[index], answer.choices[index].message.content);
            let reason = answer.finish_reason(index);
            json!({ "index": index, "logprobs": logprobs, "finish_reason": reason, "text": text })
        };
        let choices = all.map(choice).collect();
        let mut whole = Self::frame(&answer, choices);
        whole["usage"] = openai::usage(&answer.usage);
        whole
    }

    fn begin(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let starts = std::mem::take(&mut self.starts);
        let told = starts.iter().enumerate().filter(|(_, start)| !start.is_empty());
        told.map(|(index, start)| self.chunk(answer, index, start, None)).collect()
    }

    fn step(&mut self, answer: &mut Answer, Step { choice, parts, is_last, .. }: Step) -> Vec<Frame> {
        let mut frames: Vec<_> = parts
            .iter()
            .filter_map(|part| match part {
                AnswerPart::Content(text) => Some(self.chunk(answer, choice, text, None)),
                _ => None,
            })
            .collect();
        if is_last || (frames.is_empty() && answer.has_tokens(choice)) {
            let reason = answer.finish_reason(choice);
            frames.push(self.chunk(answer, choice, "", reason));
        }
        frames
    }

    fn end(&mut self, answer: &mut Answer) -> Vec<Frame> {
        openai::end(answer, Self::frame(answer, Vec::new()), self.counts)
    }

    fn error(&mut self, error: &ApiError) -> Vec<Frame> {
        openai::error(error)
    }
}
