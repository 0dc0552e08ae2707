//! Talking with a model: its chat templates, and a conversation that is fed turn by turn.

use std::{collections::BTreeMap, fs};

use kiln_cache::Plan;
use kiln_core::{Error, Result, files, model::TokenId, model_cache::ModelCache};
use kiln_generate::{ChatTemplate, ChatTemplates, Conversation, GenerationConfig, Message, RenderOptions};
use kiln_models::checkpoint::Checkpoint;
use serde_json::Value;

use crate::{
    Model,
    folder::{json, tokenizer_config},
    request::{Prompt, Request},
    sequence::Sequence,
};

/// The templates and special tokens of a model, from where transformers takes them: `chat_template.jinja` and
/// `additional_chat_templates/NAME.jinja`, or else `chat_template` in `tokenizer_config.json`, one or several.
pub(crate) fn chat_templates(checkpoint: &Checkpoint) -> Result<ChatTemplates> {
    let config = json(checkpoint, "tokenizer_config.json")?;
    let mut by_name = BTreeMap::new();
    if let Some(source) = checkpoint.text("chat_template.jinja")? {
        by_name.insert("default".to_owned(), source);
    }
    for entry in fs::read_dir(checkpoint.path_of("additional_chat_templates")).into_iter().flatten().flatten()
    {
        let path = entry.path();
        if let (Some("jinja"), Some(name)) = (path.extension().and_then(|e| e.to_str()), path.file_stem()) {
            by_name.extend(
                files::try_read_text(&path)?.map(|source| (name.to_string_lossy().into_owned(), source)),
            );
        }
    }
    if by_name.is_empty() {
        by_name = templates_of(config.get("chat_template"));
    }
    Ok(ChatTemplates { by_name, special_tokens: tokenizer_config(checkpoint)?.names() })
}

/// One template, or a list of `{"name": .., "template": ..}`, or an object of them.
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
    /// The tokens of a conversation. The template writes all special tokens itself, so none are added.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`], and those of [`encode`](Self::encode).
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        options: &RenderOptions,
    ) -> Result<Vec<TokenId>> {
        let prompt = template.render(conversation, &self.chat_templates().special_tokens, options)?;
        self.encode_more(&prompt)
    }
}

/// A conversation with a model. Each turn renders it whole, and computes what is not in the cache yet.
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
    /// What the template writes after an answer. It may be a special token that does not end texts for this model, or text, which a model
    /// writes letter by letter that was given a template that is not its own.
    end: Option<String>,
    conversation: Conversation,
    sequence: Sequence,
}

impl Chat {
    /// `template` is one of [`Model::chat_templates`], or another.
    ///
    /// # Errors
    /// Those of [`Sequence::new`].
    pub fn new(model: &Model, template: ChatTemplate, plan: &Plan) -> Result<Self> {
        let sequence = Sequence::new(model, plan)?;
        let end = end_of_answers(&template, &model.chat_templates().special_tokens);
        Ok(Self { model: model.clone(), template, end, conversation: Conversation::default(), sequence })
    }

    /// What was said so far.
    pub fn conversation(&self) -> &Conversation {
        &self.conversation
    }

    /// The conversation, to be changed at will: what the cache holds of it is found out with the next turn.
    pub fn conversation_mut(&mut self) -> &mut Conversation {
        &mut self.conversation
    }

    /// The cache of the conversation and its tokens.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Tells the model `text` before anything else, in place of what it was told before.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] where the template refuses system messages or leaves them out. Nothing is changed then.
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

    /// Says `text` as the user, and asks the model for an answer.
    ///
    /// The answer becomes part of the conversation as its [text](Request::stream) is read, up to where that is dropped. Without
    /// a word of it, and where the request fails, it is as if nothing had been said. It ends where the template ends it, and
    /// where the model's positions do, however long it was to be.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] where the template refuses the conversation.
    pub fn say(&mut self, text: &str) -> Result<Request<'_>> {
        let Self { model, template, end, conversation, sequence } = self;
        conversation.messages.push(Message::new("user", text));
        let answer = Answer { conversation, text: String::new(), complete: false, end: end.clone() };
        let rendering = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let special_tokens = &model.chat_templates().special_tokens;
        let prompt = template.render(answer.conversation, special_tokens, &rendering)?;
        Ok(Request::new(model.clone(), Prompt::Rendered(prompt)).sequence(sequence).answering(answer))
    }
}

/// The first line with more than white space that `template` writes after what an assistant says, if there is one.
fn end_of_answers(template: &ChatTemplate, special_tokens: &BTreeMap<String, String>) -> Option<String> {
    const SAID: &str = "what an assistant says";
    let messages = vec![Message::new("user", "a question"), Message::new("assistant", SAID)];
    let conversation = Conversation { messages, ..Conversation::default() };
    let text = template.render(&conversation, special_tokens, &RenderOptions::default()).ok()?;
    let (_, behind) = text.rsplit_once(SAID)?;
    behind.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

/// An answer that becomes a part of its conversation. The question is taken back where nothing answers it.
#[derive(Debug)]
pub(crate) struct Answer<'a> {
    conversation: &'a mut Conversation,
    text: String,
    complete: bool,
    /// See [`Chat`].
    end: Option<String>,
}

impl Answer<'_> {
    /// `config` for an answer to `tokens` tokens: it ends where the template or a token ends it, and where the model's positions do.
    pub(crate) fn config(
        &self,
        mut config: GenerationConfig,
        model: &Model,
        cache: &ModelCache,
        tokens: usize,
    ) -> GenerationConfig {
        config.stop_strings.get_or_insert_default().extend(self.end.clone());
        // A template that writes nothing behind an answer needs a token that ends it, and a folder may name none for generation.
        let named = || {
            let token = model.chat_templates().special_tokens.get("eos_token")?;
            Some(vec![model.tokenizer().ok()?.id_of(token)?])
        };
        config.eos_token_id = config.eos_token_id.or_else(named);
        // No room at all is what the generation refuses.
        if let Ok(Some(room)) = model.room(cache, tokens) {
            config.max_new_tokens = config.max_new_tokens.map(|most| most.min(room));
        }
        config
    }

    pub(crate) fn push(&mut self, piece: &str) {
        self.text.push_str(piece);
    }

    /// Nothing follows: also an empty text is an answer.
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
