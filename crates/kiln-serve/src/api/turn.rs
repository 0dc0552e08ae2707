//! The next turn of a conversation: the prompt, and how the answer is read. All APIs of chats come here.

use std::{collections::BTreeMap, sync::Arc};

use kiln::{
    AnswerFormat, ChatTemplate, Conversation, Message,
    expert::{Data, RenderOptions},
};
use serde_json::Value;

use super::{
    answer::Answer,
    apart,
    reader::Reader,
    settings::Choices,
    tools::{Calls, Tools},
};
use crate::{error::ApiError, models::Served, worker::Make};

/// Most messages of a conversation.
const MOST_MESSAGES: usize = 2048;

/// A conversation that asks for an answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    pub(super) messages: Vec<Message>,
    /// More variables of the chat template.
    pub(super) variables: BTreeMap<String, Value>,
    pub(super) documents: Option<Vec<Value>>,
    /// As OpenAI's chat has them.
    pub(super) tools: Vec<Value>,
    pub(super) tool_choice: Option<Value>,
    pub(super) parallel_tool_calls: Option<bool>,
    /// How much the model reasons, in the words of its template; `none`: not at all.
    pub(super) effort: Option<String>,
    /// Whether the model reasons; `None`: as it likes.
    pub(super) thinks: Option<bool>,
    /// Number of tokens after which reasoning is ended.
    pub(super) budget: Option<usize>,
    /// Whether a new message begins.
    pub(super) adds_prompt: Option<bool>,
    /// Whether the last message is continued.
    pub(super) continues: bool,
}

/// A turn for one model.
struct Prepared {
    template: ChatTemplate,
    tools: Tools,
    prompt: String,
}

impl Turn {
    /// The rendered conversation.
    pub(super) async fn prompt(self, served: &Arc<Served>) -> Result<String, ApiError> {
        let served = served.clone();
        apart(move || Ok(self.prepare(&served)?.prompt)).await
    }

    /// Submits the choices of the answer.
    pub(super) async fn begin(self, served: Arc<Served>, mut choices: Choices) -> Result<Answer, ApiError> {
        served.check_text()?;
        let budget = self.budget;
        let own = served.clone();
        let Prepared { template, tools, prompt } = apart(move || self.prepare(&own)).await?;
        let format = AnswerFormat::of(&template);
        let forced = tools.grammar(&format, |mark| served.model.special_token(mark))?;
        if forced.is_some() && choices.grammar.is_some() {
            let why = "goes without a tool that must be called, and without strict tools";
            return Err(ApiError::field("response_format", why));
        }
        let reader = match (&tools.calls, &forced) {
            (Calls::Named(name), _) => Reader::Forced { name: Some(name.clone()), text: String::new() },
            (Calls::Required, _) => Reader::Forced { name: None, text: String::new() },
            // The grammar has no marks.
            (Calls::None | Calls::Auto, _) if choices.grammar.is_some() || !format.is_marked() => {
                Reader::Plain
            }
            (calls, _) => {
                let list = if *calls == Calls::Auto { &tools.list[..] } else { &[] };
                choices.special_tokens = true;
                Reader::Marked { parser: format.parser(&prompt, list), one_call: !tools.parallel, calls: 0 }
            }
        };
        // An answer in JSON has no reasoning.
        if let Some(tokens) =
            budget.filter(|_| choices.grammar.is_none() && !matches!(reader, Reader::Forced { .. }))
        {
            let encode = |text: &str| served.model.encode_more(text);
            choices.budget = format.reasoning_budget(&prompt, tokens, encode)?;
            if choices.budget.is_none() {
                let why = "the model does not mark its reasoning in a way that could be ended; leave it out";
                return Err(ApiError::field("thinking_token_budget", why));
            }
        }
        choices.grammar = forced.or(choices.grammar);
        let of_choice = |index: usize| -> Make {
            let (template, prompt) = (template.clone(), prompt.clone());
            let (choices, served) = (choices.clone(), Arc::clone(&served));
            Box::new(move |model| {
                choices.check_length(&prompt, model)?;
                let tokens = model.encode_more(&prompt)?;
                let choices = choices.clone().after(tokens.len(), model)?;
                choices.of(model.answer_rendered(&template, tokens), index, &served).stream()
            })
        };
        let all = (0..choices.n).map(of_choice).collect();
        Answer::begin(served.clone(), all, &reader, &choices).await
    }

    fn prepare(mut self, served: &Served) -> Result<Prepared, ApiError> {
        let templates = served.model.chat_templates();
        let template = match &served.template {
            Some(template) => template.clone(),
            None if templates.by_name.is_empty() => ChatTemplate::chatml(),
            None => templates.choose(!self.tools.is_empty())?,
        };
        let list = std::mem::take(&mut self.tools);
        let tools = Tools::of(list, self.tool_choice.take(), self.parallel_tool_calls, &template)?;
        let options = self.options()?;
        let conversation = self.conversation(&tools, &template)?;
        let prompt = template.render(&conversation, &templates.special_tokens, &options)?;
        check_rendered(&conversation, &prompt)?;
        Ok(Prepared { template, tools, prompt })
    }

    fn conversation(self, tools: &Tools, template: &ChatTemplate) -> Result<Conversation, ApiError> {
        if self.messages.is_empty() || self.messages.len() > MOST_MESSAGES {
            let why = format!("are {}, must be from 1 to {MOST_MESSAGES}", self.messages.len());
            return Err(ApiError::field("messages", why));
        }
        let data = |value: &Value| Data::new(value);
        let mut variables: BTreeMap<String, Data> =
            self.variables.iter().map(|(name, value)| (name.clone(), data(value))).collect();
        // The name that templates have for it.
        let thinking = ["enable_thinking", "thinking"].into_iter().find(|name| template.reads(name));
        if let Some(thinks) = self.thinks {
            match thinking {
                Some(name) => _ = variables.insert(name.to_owned(), Data::new(thinks)),
                None if thinks == AnswerFormat::of(template).has_reasoning() => {}
                None => {
                    let why = if thinks { "the model does not reason" } else { "the model always reasons" };
                    return Err(ApiError::field("thinking", why));
                }
            }
        }
        if let Some(effort) = &self.effort {
            if template.reads("reasoning_effort") {
                variables.insert("reasoning_effort".to_owned(), Data::new(effort));
            } else if let Some(name) = thinking {
                variables.insert(name.to_owned(), Data::new(effort != "none"));
            } else if effort != "none" {
                let why = "the model's chat template has no setting for it; leave it out";
                return Err(ApiError::field("reasoning_effort", why));
            }
        }
        let tools = (tools.calls != Calls::None).then(|| tools.list.iter().map(data).collect());
        let documents = self.documents.as_ref().map(|list| list.iter().map(data).collect());
        Ok(Conversation { tools, messages: self.messages, documents, variables })
    }

    fn options(&self) -> Result<RenderOptions, ApiError> {
        let adds = self.adds_prompt.unwrap_or(!self.continues);
        if adds && self.continues {
            let why =
                "goes without `add_generation_prompt`: the last message is continued, or another begins";
            return Err(ApiError::field("continue_final_message", why));
        }
        Ok(RenderOptions {
            add_generation_prompt: adds,
            continue_final: self.continues.then(|| "content".to_owned()),
            ..RenderOptions::default()
        })
    }
}

/// Checks that no system message is left out, as the templates of some models do without a word.
fn check_rendered(conversation: &Conversation, prompt: &str) -> Result<(), ApiError> {
    let is_lost = |message: &Message| {
        message.role() == "system" && !prompt.contains(message.content().unwrap_or_default().trim())
    };
    match conversation.messages.iter().position(is_lost) {
        Some(at) => {
            let why = "the model's chat template leaves out system messages; say it in the first message";
            Err(ApiError::field(&format!("messages[{at}].content"), why))
        }
        None => Ok(()),
    }
}
