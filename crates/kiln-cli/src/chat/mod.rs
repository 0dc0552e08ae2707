//! `kiln chat`

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use kiln::{
    Chat, ChatTemplate, Error, GenerationConfig, Grammar, Model, Plan, Reuse, Stats, StopReason,
    expert::files,
};

use crate::{
    display,
    interrupt::Interruptible,
    load,
    memory::{CacheArgs, Running},
    output::{Failure, Result, note, plain, print, say},
    place::PlaceArgs,
    settings::{SamplingArgs, grammar, wanted},
};

mod command;
mod input;

use command::Command;
use input::Input;

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
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

pub(crate) fn run(args: &ChatArgs) -> Result<ExitCode> {
    // Errors in the arguments are reported before the model is loaded.
    let plan = args.memory.plan()?;
    let mut wanted = wanted(&args.sampling)?;
    wanted.resolve()?;
    let running = Running::new(args.prefill_chunk, &args.memory)?;
    let grammar = grammar(&args.sampling)?;
    let folder = load::folder(args.model.as_deref())?;
    let given = args.template.as_deref().map(given_template).transpose()?.flatten();

    let model = load::text_model(&folder, &args.place, load::open(&args.place)?, plan.as_ref(), 0)?;
    let plan = args.memory.offloaded(plan.unwrap_or_else(|| model.plan().clone()));
    let template = match given {
        Some(template) => template,
        None => own_template(&model, args.template.as_deref())?,
    };
    let mut input = Input::new()?;
    if input.is_terminal() {
        let place = &model.opened().info.name;
        note(format_args!(
            "{} on {place}, {}. /help lists what can be typed beside messages.",
            model.name(),
            model.dtype().name()
        ));
    }
    if args.model.is_none() {
        if input.is_terminal() {
            note(
                "It is a small base model, trained on plays and two old books: it goes on in their manner, and knows nothing.",
            );
        }
        // In the texts that the demo model was trained on, an empty line ends a speech. In JSON it ends
        // nothing.
        if grammar.is_none() {
            wanted.stop_strings.get_or_insert_with(|| vec!["\n\n".to_owned()]);
        }
    }
    let mut session = Session {
        chat: Chat::new(&model, template, &plan)?,
        model: &model,
        plan,
        wanted,
        grammar,
        running,
        latest: None,
        watched: input.is_terminal(),
    };
    session.tell_system(args.system.as_deref())?;
    while let Some(line) = input.next()? {
        match session.take(&line) {
            Ok(true) => {}
            Ok(false) => break,
            // A script must not continue as if nothing had happened; a person can.
            Err(Failure::Kiln(error @ Error::Prompt { .. })) if session.watched => {
                note(format_args!("error: {}; /reset begins a new conversation", plain(&error)));
            }
            Err(Failure::Kiln(error)) if session.watched => note(format_args!("error: {}", plain(&error))),
            Err(failure) => return Err(failure),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the template from a file, if `name` is a file.
fn given_template(name: &str) -> Result<Option<ChatTemplate>> {
    let path = Path::new(name);
    match path.exists() {
        true => {
            let source = files::read_input(path)?;
            Ok(Some(ChatTemplate::new(&source)?))
        }
        false => Ok(None),
    }
}

/// The model's own template, by name or the default one.
fn own_template(model: &Model, name: Option<&str>) -> Result<ChatTemplate> {
    let own = model.chat_templates();
    match name {
        Some(name) if own.by_name.is_empty() => Err(file(name.as_ref(), "there is no such file").into()),
        Some(name) => Ok(own.named(name)?),
        None if own.by_name.is_empty() => {
            note(format_args!(
                "{} has no chat template: using ChatML, as llama.cpp does; --template FILE gives another",
                model.name()
            ));
            Ok(ChatTemplate::chatml())
        }
        None => Ok(own.choose(false)?),
    }
}

fn file(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::File { path: path.to_owned(), why: error.to_string() }
}

/// A conversation and its settings.
struct Session<'m> {
    chat: Chat,
    model: &'m Model,
    plan: Plan,
    wanted: GenerationConfig,
    /// Grammar that answers must match.
    grammar: Option<Grammar>,
    running: Running,
    latest: Option<(Stats, Reuse)>,
    /// Whether a person sees the output.
    watched: bool,
}

impl Session<'_> {
    /// Handles a message or a command. Returns whether to continue.
    fn take(&mut self, line: &str) -> Result<bool> {
        if !line.starts_with('/') {
            if !line.trim().is_empty() {
                self.answer(line)?;
            }
            return Ok(true);
        }
        match line.parse()? {
            Command::Help => say(command::help())?,
            Command::Reset => {
                self.chat.conversation_mut().messages.retain(|message| message.role() == "system");
                self.latest = None;
            }
            Command::Save(path) => {
                let text =
                    serde_json::to_string_pretty(self.chat.conversation()).map_err(|e| file(&path, e))?;
                files::write(&path, (text + "\n").as_bytes())?;
            }
            Command::Load(path) => {
                let text = files::read_input(&path)?;
                let conversation = serde_json::from_str(&text)
                    .map_err(|e| file(&path, format!("is no conversation: {e}")))?;
                *self.chat.conversation_mut() = conversation;
            }
            Command::Stats => say(self.stats())?,
            Command::Cache => say(self.cache())?,
            Command::System(None) => {
                say(self.system().unwrap_or_else(|| "no system message".to_owned()))?;
            }
            Command::System(text) => self.tell_system(text.as_deref())?,
            Command::Exit => return Ok(false),
        }
        Ok(true)
    }

    fn system(&self) -> Option<String> {
        self.chat.conversation().messages.iter().find(|message| message.role() == "system")?.content()
    }

    /// Sets the system prompt.
    fn tell_system(&mut self, text: Option<&str>) -> Result<()> {
        Ok(text.map_or(Ok(()), |text| self.chat.set_system(text))?)
    }

    /// Sends `text`, and prints the answer as it is generated, until it ends or Ctrl-C is pressed.
    fn answer(&mut self, text: &str) -> Result<()> {
        let request = self.running.of(self.chat.say(text)?).config(self.wanted.clone());
        let printing = Interruptible::begin();
        let mut answer = request.grammar(self.grammar.clone()).stream()?;
        let mut stopped = false;
        while !stopped {
            let Some(piece) = answer.next() else { break };
            print(piece?)?;
            stopped = printing.came();
        }
        print("\n")?;
        self.latest = Some((answer.stats(), answer.reuse()));
        match answer.stop_reason() {
            Some(StopReason::Length) if self.watched => {
                note(format_args!("(cut off after {} tokens; -n allows more)", answer.stats().generated));
            }
            Some(StopReason::Time) if self.watched => note("(cut off after the time of --max-time)"),
            _ if stopped => note("(stopped)"),
            _ => {}
        }
        Ok(())
    }

    fn stats(&self) -> String {
        let Some((stats, reuse)) = self.latest else { return "nothing was answered yet".to_owned() };
        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
        let (prefill, decode) = (stats.prefill_time.as_secs_f64(), stats.decode_time.as_secs_f64());
        let anew = if reuse.reset { ", because the cache could not forget less" } else { "" };
        format!(
            "prompt   {} tokens: {} reused, {} fed, {} forgotten{anew}\nfirst    token after {:.3} s\n\
             prefill  {} tokens in {prefill:.3} s, {:.1} tokens/s\ndecode   {} tokens in {decode:.3} s, {:.1} tokens/s\n{}",
            reuse.reused + reuse.fed,
            reuse.reused,
            reuse.fed,
            reuse.forgotten,
            stats.time_to_first_token.as_secs_f64(),
            reuse.fed,
            rate(reuse.fed, prefill),
            stats.decoded(),
            rate(stats.decoded(), decode),
            self.cache(),
        )
    }

    fn cache(&self) -> String {
        let sequence = self.chat.sequence();
        let positions = match sequence.cache().is_endless() {
            true => "tokens seen".to_owned(),
            false => format!("of {} positions", self.model.sizes().positions),
        };
        format!(
            "cache    {}, {} {positions}, {}",
            self.plan.label(&self.model.causal().needs()),
            sequence.len(),
            display::bytes(sequence.cache().device_bytes() as u64)
        )
    }
}
