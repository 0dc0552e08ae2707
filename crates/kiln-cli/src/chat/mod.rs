//! `kiln chat`

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use kiln::{Conversation, Error, expert::files};

use crate::{
    memory::CacheArgs,
    output::{Failure, Result, note, plain, say},
    place::{OPTIONS, PlaceArgs},
    settings::SamplingArgs,
};

mod command;
mod input;
mod local;
mod remote;

use command::Command;
use input::Input;
use local::Local;
use remote::Remote;

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Chat with a server that speaks OpenAI's API, such as http://127.0.0.1:8080, instead of a model here
    ///
    /// --model is then the name of a model of the server [default: its first]. The server has the cache.
    #[arg(long, value_name = "URL", conflicts_with_all = OF_MODELS, conflicts_with_all = OPTIONS)]
    url: Option<String>,
    /// Key for --url
    #[arg(long, env = "KILN_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Chat template: a Jinja file, or the name of one of the model's templates [default: the model's, else
    /// ChatML]
    #[arg(long, value_name = "FILE|NAME")]
    template: Option<String>,
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    memory: CacheArgs,
    /// Prompt tokens per forward pass [default: as many as activations of 32 MiB allow]
    #[arg(long, hide_short_help = true, value_name = "N")]
    prefill_chunk: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Options of chats that are a server's own.
const OF_MODELS: [&str; 11] = [
    "template",
    "prefill_chunk",
    "cache",
    "cache_windowed",
    "compat",
    "offload",
    "on_oom",
    "compile",
    "no_compile",
    "regex",
    "grammar",
];

pub(crate) fn run(args: &ChatArgs) -> Result<ExitCode> {
    let mut input = Input::new()?;
    let watched = input.is_terminal();
    let partner: Box<dyn Partner> = match &args.url {
        Some(url) => Box::new(Remote::open(args, url, watched)?),
        None => Box::new(Local::load(args, watched)?),
    };
    let mut session = Session { partner, watched };
    if let Some(text) = &args.system {
        session.partner.set_system(text)?;
    }
    while let Some(line) = input.next()? {
        match session.take(&line) {
            Ok(true) => {}
            Ok(false) => break,
            // A script must not continue as if nothing had happened; a person can.
            Err(Failure::Kiln(error @ (Error::Prompt { .. } | Error::TooLong { .. }))) if session.watched => {
                note(format_args!("error: {}; /reset begins a new conversation", plain(&error)));
            }
            Err(Failure::Kiln(error)) if session.watched => note(format_args!("error: {}", plain(&error))),
            Err(failure) => return Err(failure),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn file(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::File { path: path.to_owned(), why: error.to_string() }
}

/// Whoever answers: a model here, or a server.
trait Partner {
    fn conversation(&mut self) -> &mut Conversation;

    /// Sets the system prompt.
    fn set_system(&mut self, text: &str) -> Result<()>;

    /// Forgets the figures of the latest answer.
    fn forget(&mut self);

    /// Sends `text`, and prints the answer as it comes, until it ends or Ctrl-C is pressed.
    fn answer(&mut self, text: &str) -> Result<()>;

    fn stats(&self) -> String;

    fn cache(&self) -> String;
}

/// A conversation.
struct Session {
    partner: Box<dyn Partner>,
    /// Whether a person sees the output.
    watched: bool,
}

impl Session {
    /// Handles a message or a command. Returns whether to continue.
    fn take(&mut self, line: &str) -> Result<bool> {
        if !line.starts_with('/') {
            if !line.trim().is_empty() {
                self.partner.answer(line)?;
            }
            return Ok(true);
        }
        match line.parse()? {
            Command::Help => say(command::help())?,
            Command::Reset => {
                self.partner.conversation().messages.retain(|message| message.role() == "system");
                self.partner.forget();
            }
            Command::Save(path) => {
                let text =
                    serde_json::to_string_pretty(self.partner.conversation()).map_err(|e| file(&path, e))?;
                files::write(&path, (text + "\n").as_bytes())?;
            }
            Command::Load(path) => {
                let text = files::read_input(&path)?;
                let conversation = serde_json::from_str(&text)
                    .map_err(|e| file(&path, format!("is no conversation: {e}")))?;
                *self.partner.conversation() = conversation;
            }
            Command::Stats => say(self.partner.stats())?,
            Command::Cache => say(self.partner.cache())?,
            Command::System(None) => {
                say(self.system().unwrap_or_else(|| "no system message".to_owned()))?;
            }
            Command::System(Some(text)) => self.partner.set_system(&text)?,
            Command::Exit => return Ok(false),
        }
        Ok(true)
    }

    fn system(&mut self) -> Option<String> {
        let messages = &self.partner.conversation().messages;
        messages.iter().find(|message| message.role() == "system")?.content()
    }
}
