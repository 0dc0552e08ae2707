//! `kiln probe`: what lossy caches cost on a model, and which to take.

use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use kiln::{
    Error, Model, Plan, files,
    memory::LayerNeed,
    probe::{BROKEN, Loss, PROBED, Probe, Probed, UNSEEN, UNSEEN_AGREEMENT, own_text, probe},
};

use self::chart::{Chart, Point};
use crate::{
    args::ProbeArgs,
    display, load,
    output::{Result, say},
};

mod chart;

/// Tokens of a window, where the model has more positions.
const WINDOW: usize = 2048;

pub(crate) fn run(args: &ProbeArgs) -> Result<ExitCode> {
    let asked = args.cache.iter().map(|text| Plan::named(text)).collect::<Result<Vec<Plan>, Error>>()?;
    let text = args.text.as_deref().map(files::read_input).transpose()?;
    args.plot.as_deref().map_or(Ok(()), files::check_writable)?;
    if args.tokens < 2 {
        let why = format!("is {}, must be at least 2", args.tokens);
        return Err(Error::Setting { name: "--tokens", why }.into());
    }
    let device = load::open(&args.place)?;
    let model = load::text_model(&load::folder(args.model.as_deref())?, &args.place, device, None, 0)?;
    let window = args.ctx.unwrap_or(model.sizes().positions.min(WINDOW));
    let positions = model.sizes().positions;
    if !(2..=positions).contains(&window) {
        let why = format!("{window} is not between 2 and the model's {positions} positions");
        return Err(Error::Setting { name: "--ctx", why }.into());
    }
    let needs = model.causal().needs();
    let plans = match asked.is_empty() {
        false => asked,
        true => known(&needs)?,
    };
    plans.iter().try_for_each(|plan| plan.check(&needs))?;
    let tokens = match text {
        Some(text) => model.encode(&text)?.into_iter().take(args.tokens).collect(),
        None => own_text(&model, args.tokens, window, 0)?,
    };

    let bar = ProgressBar::new(tokens.len().saturating_sub(1) as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    bar.set_message(format!("probing {} caches", plans.len()));
    let probed = probe(&model, &tokens, window, &plans, &mut |fed| bar.set_position(fed as u64));
    bar.finish_and_clear();
    let probed = probed?;

    match args.json {
        true => say(format_args!("{:#}", json(&probed, &model)))?,
        false => print(&probed, &model, args.text.is_none())?,
    }
    if let Some(path) = &args.plot {
        files::write(path, chart(&probed, model.name()).svg().as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The caches that are probed unasked, as far as they can serve a model of these needs.
fn known(needs: &[LayerNeed]) -> Result<Vec<Plan>> {
    let plans = PROBED.iter().map(|text| Plan::named(text)).collect::<Result<Vec<Plan>, Error>>()?;
    Ok(plans.into_iter().filter(|plan| plan.check(needs).is_ok()).collect())
}

fn print(probe: &Probe, model: &Model, own: bool) -> Result<()> {
    let text = if own { " that the model made itself" } else { "" };
    say(format_args!(
        "{} on {}: {} tokens{text}, in windows of {}\n",
        model.name(),
        model.opened().info.name,
        probe.tokens,
        probe.window
    ))?;
    let head = [
        "cache",
        "bytes a token",
        "of dense",
        "KL divergence",
        "largest",
        "same token",
        "perplexity",
        "t/s",
        "loss",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let dense = probe.dense();
    for (place, probed) in std::iter::once(dense).chain(probe.ranked()).enumerate() {
        let loss = match probed.loss() {
            _ if place == 0 => "none",
            Loss::Unseen => "not seen",
            Loss::Seen => "seen",
            Loss::Broken => "breaks the model",
        };
        rows.push(vec![
            probed.cache.clone(),
            format!("{:.0}", probed.bytes_per_token),
            format!("{:.3}", probed.bytes_per_token / dense.bytes_per_token),
            format!("{:.2e}", probed.compared.divergence),
            format!("{:.2e}", probed.compared.largest_divergence),
            format!("{:.2} %", 100.0 * probed.compared.agreement),
            format!("{:.3}", probed.compared.perplexity),
            format!("{:.1}", 1.0 / probed.step.as_secs_f64().max(1e-9)),
            loss.to_owned(),
        ]);
    }
    say(format_args!("{}\n", display::table(&rows)))?;
    let same = 100.0 * UNSEEN_AGREEMENT;
    say(format_args!(
        "not seen: at most {UNSEEN} nats and the same likeliest token at {same} % of places or more; \
         breaks the model: more than {BROKEN} nats"
    ))?;
    for probed in probe.broken() {
        say(format_args!("warning: `{}` breaks this model: {}", probed.cache, because(probe, probed)))?;
    }
    match probe.recommended() {
        Some(best) => say(format_args!(
            "recommended: --cache {} ({:.1} times smaller than dense)",
            best.cache,
            dense.bytes_per_token / best.bytes_per_token
        )),
        None => say("recommended: --cache dynamic (the loss of every smaller cache is seen)"),
    }
}

/// What it is that breaks.
fn because(probe: &Probe, broken: &Probed) -> String {
    let kinder =
        |other: &&Probed| other.compared.divergence < BROKEN / 10.0 && !other.cache.contains("format=");
    let per_token = broken.cache.contains("format=") && !broken.cache.contains("axis_key=-1");
    match probe.ranked().into_iter().filter(|_| per_token).find(kinder) {
        Some(kind) => format!(
            "some channels of its keys stand out, and take the others' precision; `{}` gives them scales of their own",
            kind.cache
        ),
        None => "its keys and values need more bits".to_owned(),
    }
}

fn chart<'a>(probe: &'a Probe, model: &str) -> Chart<'a> {
    let dense = probe.dense().bytes_per_token.max(1.0);
    let point = |probed: &'a Probed| Point {
        name: probed.cache.trim_start_matches("quantized:"),
        share: probed.bytes_per_token / dense,
        divergence: probed.compared.divergence,
    };
    Chart {
        title: format!("{model}: what a token's bytes cost"),
        across: "bytes, of those of a dense cache",
        up: "KL divergence from a dense cache, nats",
        points: probe.ranked().into_iter().map(point).collect(),
    }
}

fn json(probe: &Probe, model: &Model) -> serde_json::Value {
    let caches: Vec<_> = probe
        .caches
        .iter()
        .map(|probed| {
            serde_json::json!({
                "cache": probed.cache,
                "bytes_per_token": probed.bytes_per_token,
                "kl_divergence": probed.compared.divergence,
                "largest_kl_divergence": probed.compared.largest_divergence,
                "same_token": probed.compared.agreement,
                "perplexity": probed.compared.perplexity,
                "tokens_per_second": 1.0 / probed.step.as_secs_f64().max(1e-9),
            })
        })
        .collect();
    serde_json::json!({
        "model": model.name(),
        "device": model.opened().info.name.to_string(),
        "tokens": probe.tokens,
        "window": probe.window,
        "caches": caches,
        "recommended": probe.recommended().map_or("dynamic", |best| &best.cache),
    })
}
