//! A conversation with a server.

use std::time::Instant;

use kiln::{Conversation, Error, GenerationConfig, Message, expert::files};
use serde_json::{Map, Value, json};

use super::{ChatArgs, Partner};
use crate::{
    client::{Client, Delta, Usage},
    interrupt::Interruptible,
    output::{Result, note, print},
    settings::wanted,
};

/// A model of a server.
pub(super) struct Remote {
    client: Client,
    conversation: Conversation,
    /// The settings of each request.
    settings: Map<String, Value>,
    latest: Option<Latest>,
    /// Whether a person sees the output.
    watched: bool,
}

/// The latest answer.
struct Latest {
    usage: Usage,
    /// Seconds to the first piece, and from there to the end.
    first: f64,
    rest: f64,
}

impl Remote {
    /// Finds the model. `watched`: whether a person sees the output.
    pub(super) fn open(args: &ChatArgs, url: &str, watched: bool) -> Result<Self> {
        let settings = settings(args)?;
        let model = args.model.as_ref().map(|name| name.to_string_lossy().into_owned());
        let client = Client::find(url, args.api_key.clone(), model)?;
        if watched {
            let (model, url) = (&client.model, &client.url);
            note(format_args!("{model} at {url}. /help lists what can be typed beside messages."));
        }
        Ok(Self { client, conversation: Conversation::default(), settings, latest: None, watched })
    }
}

/// The settings in the words of OpenAI's API, and of servers that know more.
fn settings(args: &ChatArgs) -> Result<Map<String, Value>> {
    let wanted = wanted(&args.sampling)?;
    wanted.clone().resolve()?;
    let mut settings = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            settings.insert(name.to_owned(), value);
        }
    };
    let greedy = (wanted.do_sample == Some(false)).then_some(0.0);
    set("temperature", wanted.temperature.or(greedy).map(Value::from));
    set("top_k", wanted.top_k.map(Value::from));
    set("top_p", wanted.top_p.map(Value::from));
    set("min_p", wanted.min_p.map(Value::from));
    set("typical_p", wanted.typical_p.map(Value::from));
    set("repetition_penalty", wanted.repetition_penalty.map(Value::from));
    set("min_tokens", wanted.min_new_tokens.map(Value::from));
    set("seed", wanted.seed.map(Value::from));
    set("stop", wanted.stop_strings.clone().map(Value::from));
    let most = args.sampling.max_new_tokens.filter(|&most| most >= 0);
    set("max_completion_tokens", most.map(Value::from));
    if let Some(path) = &args.sampling.json_schema {
        let text = files::read_input(path)?;
        let schema: Value = serde_json::from_str(&text)
            .map_err(|error| Error::File { path: path.clone(), why: format!("is no JSON: {error}") })?;
        let named = json!({ "name": "answer", "schema": schema });
        set("response_format", Some(json!({ "type": "json_schema", "json_schema": named })));
    }
    // The rest is told to nobody.
    let mut rest = wanted;
    rest.do_sample = None;
    rest.temperature = None;
    rest.top_k = None;
    rest.top_p = None;
    rest.min_p = None;
    rest.typical_p = None;
    rest.repetition_penalty = None;
    rest.min_new_tokens = None;
    rest.max_new_tokens = None;
    rest.seed = None;
    rest.stop_strings = None;
    if rest != GenerationConfig::new() {
        let why = "takes the settings of OpenAI's API; leave out the others".to_owned();
        return Err(Error::Setting { name: "--url", why }.into());
    }
    Ok(settings)
}

impl Partner for Remote {
    fn conversation(&mut self) -> &mut Conversation {
        &mut self.conversation
    }

    fn set_system(&mut self, text: &str) -> Result<()> {
        let messages = &mut self.conversation.messages;
        messages.retain(|message| message.role() != "system");
        messages.insert(0, Message::new("system", text));
        Ok(())
    }

    fn forget(&mut self) {
        self.latest = None;
    }

    fn answer(&mut self, text: &str) -> Result<()> {
        let mut messages = self.conversation.messages.clone();
        messages.push(Message::new("user", text));
        let mut body = self.settings.clone();
        body.insert("messages".to_owned(), json!(messages));
        let (begun, mut first) = (Instant::now(), None);
        let printing = Interruptible::begin();
        let mut answer = String::new();
        let (mut usage, mut reason, mut stopped) = (Usage::default(), String::new(), false);
        for delta in self.client.chat(body)? {
            match delta? {
                Delta::Text(piece) => {
                    first.get_or_insert_with(|| begun.elapsed());
                    print(&piece)?;
                    answer.push_str(&piece);
                }
                Delta::Reasoning => _ = first.get_or_insert_with(|| begun.elapsed()),
                Delta::Usage(own) => usage = own,
                Delta::End(own) => reason = own,
            }
            stopped = printing.came();
            if stopped {
                break;
            }
        }
        print("\n")?;
        let first = first.unwrap_or_default();
        let rest = begun.elapsed().saturating_sub(first);
        self.latest = Some(Latest { usage, first: first.as_secs_f64(), rest: rest.as_secs_f64() });
        match reason.as_str() {
            _ if stopped => note("(stopped)"),
            "length" if self.watched => {
                note(format_args!("(cut off after {} tokens; -n allows more)", usage.generated));
            }
            _ => {}
        }
        if !answer.is_empty() {
            messages.push(Message::new("assistant", &answer));
            self.conversation.messages = messages;
        }
        Ok(())
    }

    fn stats(&self) -> String {
        let Some(Latest { usage, first, rest }) = &self.latest else {
            return "nothing was answered yet".to_owned();
        };
        let rate = usage.generated.saturating_sub(1) as f64 / rest.max(1e-9);
        format!(
            "prompt   {} tokens: {} reused\nfirst    token after {first:.3} s\n\
             decode   {} tokens in {rest:.3} s, {rate:.1} tokens/s\n{}",
            usage.prompt,
            usage.cached,
            usage.generated,
            self.cache(),
        )
    }

    fn cache(&self) -> String {
        format!("cache    is at {}", self.client.url)
    }
}
