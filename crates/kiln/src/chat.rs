//! Chat: the chat templates of a model, and a conversation that is fed turn by turn.

use std::collections::BTreeMap;

use kiln_cache::Plan;
use kiln_core::{Error, Result, model::TokenId, model_cache::ModelCache};
use kiln_generate::{ChatTemplate, ChatTemplates, Conversation, GenerationConfig, Message, RenderOptions};
use kiln_models::checkpoint::Checkpoint;
use serde_json::Value;

use crate::{
    Model,
    folder::{json, tokenizer_config},
    request::{Prompt, Request},
    sequence::Sequence,
};

/// Reads the templates and special tokens of a model from the places that transformers reads:
/// `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, or else `chat_template` in
/// `tokenizer_config.json`, one or several.
pub(crate) fn chat_templates(checkpoint: &Checkpoint) -> Result<ChatTemplates> {
    let config = json(checkpoint, "tokenizer_config.json")?;
    let mut by_name = BTreeMap::new();
    if let Some(source) = checkpoint.text("chat_template.jinja")? {
        by_name.insert("default".to_owned(), source);
    }
    const MORE: &str = "additional_chat_templates";
    for file in checkpoint.names(MORE) {
        if let Some(name) = file.strip_suffix(".jinja").filter(|name| !name.is_empty()) {
            let source = checkpoint.text(&format!("{MORE}/{file}"))?;
            by_name.extend(source.map(|source| (name.to_owned(), source)));
        }
    }
    if by_name.is_empty() {
        by_name = templates_of(config.get("chat_template"));
    }
    Ok(ChatTemplates { by_name, special_tokens: tokenizer_config(checkpoint)?.names() })
}

/// Parses one template, a list of `{"name": .., "template": ..}`, or an object of templates.
fn templates_of(value: Option<&Value>) -> BTreeMap<String, String> {
    let owned = |name: &str, source: &Value| Some((name.to_owned(), source.as_str()?.to_owned()));
    match value {
        Some(source @ Value::String(_)) => owned("default", source).into_iter().collect(),
        Some(Value::Array(list)) => {
            list.iter().filter_map(|one| owned(one.get("name")?.as_str()?, one.get("template")?)).collect()
        }
        Some(Value::Object(map)) => map.iter().filter_map(|(name, source)| owned(name, source)).collect(),
        _ => BTreeMap::new(),
    }
}

impl Model {
    /// Tokenizes a conversation. The template writes all special tokens itself, so none are added.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`], and the errors of [`encode`](Self::encode).
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        options: &RenderOptions,
    ) -> Result<Vec<TokenId>> {
        let prompt = template.render(conversation, &self.chat_templates().special_tokens, options)?;
        self.encode_more(&prompt)
    }

    /// Requests an answer to a conversation, which is not kept. The answer ends where the template, an end
    /// token or the model's last position ends it. For a conversation of several turns, [`Chat`] computes
    /// only what is new.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{ChatTemplate, Conversation, Message, Model, expert::RenderOptions};
    ///
    /// let model = Model::load(folder)?;
    /// let messages = vec![Message::new("user", "What news from Rome?")];
    /// let conversation = Conversation { messages, ..Conversation::default() };
    /// let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    /// let request = model.answer(&ChatTemplate::chatml(), &conversation, &options)?;
    /// println!("{}", request.max_new_tokens(9).text()?);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template rejects the conversation.
    pub fn answer(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        options: &RenderOptions,
    ) -> Result<Request<'static>> {
        let prompt = template.render(conversation, &self.chat_templates().special_tokens, options)?;
        Ok(self.answer_rendered(template, Prompt::Rendered(prompt)))
    }

    /// As [`answer`](Self::answer), of a conversation that `template` has rendered already.
    pub fn answer_rendered(&self, template: &ChatTemplate, prompt: impl Into<Prompt>) -> Request<'static> {
        let request = Request::new(self.clone(), prompt.into());
        request.ending(Ending::of(template, &self.chat_templates().special_tokens))
    }
}

/// A conversation with a model. Each turn renders all of it, and computes only tokens that are not in the
/// cache.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{Chat, ChatTemplate, Model};
///
/// let model = Model::load(folder)?;
/// // The demo model has no template of its own; `model.chat_templates().choose(false)` is that of a chat model.
/// let mut chat = Chat::new(&model, ChatTemplate::chatml(), model.plan())?;
/// let answer = chat.say("What news from Rome?")?.max_new_tokens(9).text()?;
/// assert_eq!(chat.conversation().messages[1].content(), Some(answer));
/// # Ok::<(), kiln::Error>(())
/// ```
#[derive(Debug)]
pub struct Chat {
    model: Model,
    template: ChatTemplate,
    ending: Ending,
    conversation: Conversation,
    sequence: Sequence,
}

impl Chat {
    /// Creates an empty conversation. `template` may be one of [`Model::chat_templates`] or any other.
    ///
    /// # Errors
    /// The errors of [`Sequence::new`].
    pub fn new(model: &Model, template: ChatTemplate, plan: &Plan) -> Result<Self> {
        let sequence = Sequence::new(model, plan)?;
        let ending = Ending::of(&template, &model.chat_templates().special_tokens);
        Ok(Self { model: model.clone(), template, ending, conversation: Conversation::default(), sequence })
    }

    /// The messages so far.
    pub fn conversation(&self) -> &Conversation {
        &self.conversation
    }

    /// The messages, for arbitrary changes. The next turn finds out how much of the cache is still valid.
    pub fn conversation_mut(&mut self) -> &mut Conversation {
        &mut self.conversation
    }

    /// The cache of the conversation and its tokens.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Sets the system prompt to `text`, in place of the previous one.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template rejects system messages or leaves them out. Nothing is changed
    /// in this case.
    pub fn set_system(&mut self, text: &str) -> Result<()> {
        const SAID: &str = "what the system says";
        let messages = vec![Message::new("system", SAID), Message::new("user", "a question")];
        let conversation = Conversation { messages, ..Conversation::default() };
        let rendering = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let special_tokens = &self.model.chat_templates().special_tokens;
        if !self.template.render(&conversation, special_tokens, &rendering)?.contains(SAID) {
            let why = "it leaves out the system message; say it in the first message instead".to_owned();
            return Err(Error::ChatTemplate { why });
        }
        let messages = &mut self.conversation.messages;
        messages.retain(|message| message.role() != "system");
        messages.insert(0, Message::new("system", text));
        Ok(())
    }

    /// Adds `text` as a message of the user, and requests an answer from the model.
    ///
    /// The answer is appended to the conversation while its [text](Request::stream) is read; the rest is lost
    /// if the stream is dropped. If not a word was read, or the request fails, the conversation stays as it
    /// was before. The answer ends where the template or the model's last position ends it, regardless of its
    /// maximum length.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template rejects the conversation.
    pub fn say(&mut self, text: &str) -> Result<Request<'_>> {
        let Self { model, template, ending, conversation, sequence } = self;
        conversation.messages.push(Message::new("user", text));
        let answer = Answer { conversation, text: String::new(), complete: false };
        let rendering = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let special_tokens = &model.chat_templates().special_tokens;
        let prompt = template.render(answer.conversation, special_tokens, &rendering)?;
        let request = Request::new(model.clone(), Prompt::Rendered(prompt)).ending(ending.clone());
        Ok(request.sequence(sequence).answering(answer))
    }
}

/// The end of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    /// The text that the template writes after an answer. It may be a special token that does not end texts
    /// for this model, or plain text, which a model spells out if the template is not its own.
    text: Option<String>,
}

impl Ending {
    /// The first line that is not blank among those that `template` writes after a message of the assistant,
    /// if there is one.
    fn of(template: &ChatTemplate, special_tokens: &BTreeMap<String, String>) -> Self {
        const SAID: &str = "what an assistant says";
        let messages = vec![Message::new("user", "a question"), Message::new("assistant", SAID)];
        let conversation = Conversation { messages, ..Conversation::default() };
        let first_line = |text: &str| {
            let (_, after) = text.rsplit_once(SAID)?;
            after.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
        };
        let rendered = template.render(&conversation, special_tokens, &RenderOptions::default());
        Self { text: rendered.ok().as_deref().and_then(first_line) }
    }

    /// Completes `config` for an answer to `tokens` tokens: the answer ends at the template's end, at an end
    /// token, or at the model's last position.
    pub(crate) fn config(
        &self,
        mut config: GenerationConfig,
        model: &Model,
        cache: &ModelCache,
        tokens: usize,
    ) -> GenerationConfig {
        config.stop_strings.get_or_insert_default().extend(self.text.clone());
        // If a template writes nothing after an answer, a token must end it, but the generation config of a
        // folder may name none.
        let named = || {
            let token = model.chat_templates().special_tokens.get("eos_token")?;
            Some(vec![model.tokenizer().ok()?.id_of(token)?])
        };
        config.eos_token_id = config.eos_token_id.or_else(named);
        // If there is no room at all, the generation reports the error.
        if let Ok(Some(room)) = model.room(cache, tokens) {
            config.max_new_tokens = config.max_new_tokens.map(|most| most.min(room));
        }
        config
    }
}

/// An answer that becomes part of its conversation. If there is no answer, the question is removed.
#[derive(Debug)]
pub(crate) struct Answer<'a> {
    conversation: &'a mut Conversation,
    text: String,
    complete: bool,
}

impl Answer<'_> {
    pub(crate) fn push(&mut self, piece: &str) {
        self.text.push_str(piece);
    }

    /// Marks the answer as complete: an empty text is an answer, too.
    pub(crate) fn complete(&mut self) {
        self.complete = true;
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        let messages = &mut self.conversation.messages;
        match self.complete || !self.text.is_empty() {
            true => messages.push(Message::new("assistant", &self.text)),
            false => _ = messages.pop(),
        }
    }
}
