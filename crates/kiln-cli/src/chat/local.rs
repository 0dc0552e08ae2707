//! A conversation with a model of this process.

use std::path::Path;

use kiln::{
    Chat, ChatTemplate, Conversation, GenerationConfig, Grammar, Model, Plan, Reuse, Stats, StopReason,
    expert::files,
};

use super::{ChatArgs, Partner, file};
use crate::{
    display,
    interrupt::Interruptible,
    load,
    memory::Running,
    output::{Result, note, print},
    settings::{grammar, wanted},
};

/// A model, its cache and settings.
pub(super) struct Local {
    chat: Chat,
    model: Model,
    plan: Plan,
    wanted: GenerationConfig,
    /// Grammar that answers must match.
    grammar: Option<Grammar>,
    running: Running,
    latest: Option<(Stats, Reuse)>,
    /// Whether a person sees the output.
    watched: bool,
}

impl Local {
    /// Loads the model. `watched`: whether a person sees the output.
    pub(super) fn load(args: &ChatArgs, watched: bool) -> Result<Self> {
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
        if watched {
            let place = model.device_names();
            note(format_args!(
                "{} on {place}, {}. /help lists what can be typed beside messages.",
                model.name(),
                load::types(&model)
            ));
        }
        if args.model.is_none() {
            if watched {
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
        let chat = Chat::new(&model, template, &plan)?;
        Ok(Self { chat, model, plan, wanted, grammar, running, latest: None, watched })
    }
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

impl Partner for Local {
    fn conversation(&mut self) -> &mut Conversation {
        self.chat.conversation_mut()
    }

    fn set_system(&mut self, text: &str) -> Result<()> {
        Ok(self.chat.set_system(text)?)
    }

    fn forget(&mut self) {
        self.latest = None;
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
