//! The loss of quantized caches on a model, and the recommended cache.

use std::process::ExitCode;

use kiln::{
    Error, Plan,
    expert::{
        memory::LayerNeed,
        probe::{BROKEN, PROBED, Probe, Probed, probe},
    },
};
use serde_json::Value;

use super::{
    COMPARED, ProbeArgs, Subject, bar,
    chart::{Chart, Point},
    compared, compared_json, loss, say_bounds, text,
};
use crate::{
    display, load,
    output::{Result, say},
};

/// Tokens per window, if the model has more positions.
const WINDOW: usize = 2048;

pub(super) fn run(args: &ProbeArgs) -> Result<ExitCode> {
    let asked = args.cache.iter().map(|text| Plan::named(text)).collect::<Result<Vec<Plan>, Error>>()?;
    let text = text(args)?;
    let devices = load::open(&args.place)?;
    let subject = Subject::load(args, &args.place, devices, text, WINDOW)?;
    let model = &subject.model;
    let needs = model.causal().needs();
    let plans = match asked.is_empty() {
        false => asked,
        true => known(&needs)?,
    };
    plans.iter().try_for_each(|plan| plan.check(&needs))?;
    let tokens = subject.tokens()?;

    let message = format!("probing {} caches", plans.len());
    let bar = bar(message, tokens.len().saturating_sub(1) as u64, "{msg} {wide_bar} {pos}/{len} {eta}");
    let probed = probe(model, &tokens, subject.window, &plans, &mut |fed| bar.set_position(fed as u64));
    bar.finish_and_clear();
    let probed = probed?;

    match args.json {
        true => say(format_args!("{:#}", json(&probed, &subject)))?,
        false => print(&probed, &subject)?,
    }
    subject.plot(&chart(&probed, model.name()))?;
    Ok(ExitCode::SUCCESS)
}

/// The caches that are probed by default, as far as they support a model with these needs.
fn known(needs: &[LayerNeed]) -> Result<Vec<Plan>> {
    let plans = PROBED.iter().map(|text| Plan::named(text)).collect::<Result<Vec<Plan>, Error>>()?;
    Ok(plans.into_iter().filter(|plan| plan.check(needs).is_ok()).collect())
}

fn print(probe: &Probe, subject: &Subject<'_>) -> Result<()> {
    subject.say(probe.tokens)?;
    let head = [&["cache", "bytes a token", "of dense"][..], &COMPARED, &["t/s", "loss"]].concat();
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    let dense = probe.dense();
    for (place, probed) in std::iter::once(dense).chain(probe.ranked()).enumerate() {
        let mut row = vec![
            probed.cache.clone(),
            format!("{:.0}", probed.bytes_per_token),
            format!("{:.3}", probed.bytes_per_token / dense.bytes_per_token),
        ];
        row.extend(compared(&probed.compared));
        row.push(format!("{:.1}", 1.0 / probed.step.as_secs_f64().max(1e-9)));
        row.push(if place == 0 { "none" } else { loss(&probed.compared) }.to_owned());
        rows.push(row);
    }
    say(format_args!("{}\n", display::table(&rows)))?;
    say_bounds()?;
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

/// The reason for which a cache breaks the model.
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

fn json(probe: &Probe, subject: &Subject<'_>) -> Value {
    let cache = |probed: &Probed| {
        let mut cache = compared_json(&probed.compared);
        cache["cache"] = probed.cache.clone().into();
        cache["bytes_per_token"] = probed.bytes_per_token.into();
        cache["tokens_per_second"] = (1.0 / probed.step.as_secs_f64().max(1e-9)).into();
        cache
    };
    let mut json = subject.json(probe.tokens);
    json.insert("caches".to_owned(), probe.caches.iter().map(cache).collect());
    let recommended = probe.recommended().map_or("dynamic", |best| &best.cache);
    json.insert("recommended".to_owned(), recommended.into());
    json.into()
}
