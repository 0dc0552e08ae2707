//! `kiln probe`: the loss of quantized caches or packed weights on a model, and the recommended one.

use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use kiln::{
    Error, Model, TokenId,
    device::Opened,
    expert::{
        files,
        probe::{BROKEN, Comparison, Loss, UNSEEN, UNSEEN_AGREEMENT, own_text},
    },
};

pub(crate) use self::args::ProbeArgs;
use self::chart::Chart;
use crate::{
    load,
    output::{Result, say},
    place::PlaceArgs,
};

mod args;
mod caches;
mod chart;
mod weights;

pub(crate) fn run(args: &ProbeArgs) -> Result<ExitCode> {
    match &args.weights {
        Some(mixtures) => weights::run(args, mixtures),
        None => caches::run(args),
    }
}

/// The model and the text that are measured.
struct Subject<'a> {
    args: &'a ProbeArgs,
    model: Model,
    /// Tokens per sequence.
    window: usize,
    /// `None`: the model writes one.
    text: Option<String>,
}

/// Checks the arguments before anything is loaded: that the chart can be written and that there are tokens
/// enough. Returns the text, if one was given.
fn text(args: &ProbeArgs) -> Result<Option<String>> {
    let text = args.text.as_deref().map(files::read_input).transpose()?;
    args.plot.as_deref().map_or(Ok(()), files::check_writable)?;
    if args.tokens < 2 {
        let why = format!("is {}, must be at least 2", args.tokens);
        return Err(Error::Setting { name: "--tokens", why }.into());
    }
    Ok(text)
}

impl<'a> Subject<'a> {
    /// Loads the model. `window`: tokens per sequence if the user gives none and the model has as many
    /// positions.
    fn load(
        args: &'a ProbeArgs,
        place: &PlaceArgs,
        devices: Vec<Opened>,
        text: Option<String>,
        window: usize,
    ) -> Result<Self> {
        let model = load::text_model(&load::folder(args.model.as_deref())?, place, devices, None, 0)?;
        let positions = model.sizes().positions;
        let window = args.ctx.unwrap_or(positions.min(window));
        if !(2..=positions).contains(&window) {
            let why = format!("{window} is not between 2 and the model's {positions} positions");
            return Err(Error::Setting { name: "--ctx", why }.into());
        }
        Ok(Self { args, model, window, text })
    }

    /// The tokens of the text.
    fn tokens(&self) -> Result<Vec<TokenId>> {
        Ok(match &self.text {
            Some(text) => self.model.encode(text)?.into_iter().take(self.args.tokens).collect(),
            None => own_text(&self.model, self.args.tokens, self.window, 0)?,
        })
    }

    /// Prints which model and text were measured.
    fn say(&self, tokens: usize) -> Result<()> {
        say(format_args!(
            "{} on {}: {tokens} tokens{}, in windows of {}\n",
            self.model.name(),
            self.model.opened().info.name,
            if self.text.is_none() { " that the model made itself" } else { "" },
            self.window
        ))
    }

    /// Writes the chart, if one was requested.
    fn plot(&self, chart: &Chart<'_>) -> Result<()> {
        match &self.args.plot {
            Some(path) => Ok(files::write(path, chart.svg().as_bytes())?),
            None => Ok(()),
        }
    }

    fn json(&self, tokens: usize) -> serde_json::Map<String, serde_json::Value> {
        let device = self.model.opened().info.name.to_string();
        [
            ("model", self.model.name().into()),
            ("device", device.into()),
            ("tokens", tokens.into()),
            ("window", self.window.into()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into_iter()
        .collect()
    }
}

/// A progress bar for `units` of work.
fn bar(message: String, units: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(units);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_message(message)
}

/// Description of a loss in the table.
fn loss(compared: &Comparison) -> &'static str {
    match compared.loss() {
        Loss::Unseen => "not seen",
        Loss::Seen => "seen",
        Loss::Broken => "breaks the model",
    }
}

/// The column headers of [`compared`].
const COMPARED: [&str; 4] = ["KL divergence", "largest", "same token", "perplexity"];

/// The cells of a table row.
fn compared(compared: &Comparison) -> [String; 4] {
    [
        format!("{:.2e}", compared.divergence),
        format!("{:.2e}", compared.largest_divergence),
        format!("{:.2} %", 100.0 * compared.agreement),
        format!("{:.3}", compared.perplexity),
    ]
}

/// The fields of a JSON object.
fn compared_json(compared: &Comparison) -> serde_json::Value {
    serde_json::json!({
        "kl_divergence": compared.divergence,
        "largest_kl_divergence": compared.largest_divergence,
        "same_token": compared.agreement,
        "perplexity": compared.perplexity,
    })
}

/// Prints the meaning of the words of [`loss`].
fn say_bounds() -> Result<()> {
    let same = 100.0 * UNSEEN_AGREEMENT;
    say(format_args!(
        "not seen: at most {UNSEEN} nats and the same likeliest token at {same} % of places or more; \
         breaks the model: more than {BROKEN} nats"
    ))
}
