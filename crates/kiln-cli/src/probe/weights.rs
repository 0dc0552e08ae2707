//! The loss of packed weights on a model, the tensors that lose most, and the recommended mixture.

use std::process::ExitCode;

use kiln::{
    Error, Mixture, Model,
    expert::probe::{
        Loss, MIXTURES, ProbedTensors, ProbedWeights, ROUNDING, TensorsProbe, UNSEEN, WeightsProbe,
        check_original, probe_tensors, probe_weights,
    },
};
use serde_json::{Value, json};

use super::{
    COMPARED, ProbeArgs, Subject, bar,
    chart::{Chart, Point},
    compared, compared_json, loss, say_bounds, text,
};
use crate::{
    display, load,
    output::{Result, say},
    place::PlaceArgs,
};

/// Tokens per window if the user gives none, as in `llama-perplexity`.
const WINDOW: usize = 512;

/// Number of tokens on which single tensors are measured.
const OF_TENSORS: usize = 512;

/// Number of single tensors that are measured.
const WORST: usize = 10;

/// Units of the progress bar.
const UNITS: f64 = 1000.0;

pub(super) fn run(args: &ProbeArgs, mixtures: &[Mixture]) -> Result<ExitCode> {
    if let Some(quant) = args.place.quant {
        let why = format!("packs a model on which caches are measured; write --weights={quant}");
        return Err(Error::Setting { name: "--quant", why }.into());
    }
    let mixtures = if mixtures.is_empty() { &MIXTURES } else { mixtures };
    let text = text(args)?;
    let folder = load::folder(args.model.as_deref())?;
    check_original(&folder)?;
    let devices = load::open(&args.place)?;
    let exact = PlaceArgs { exact: true, ..args.place.clone() };
    let subject = Subject::load(args, &exact, devices.clone(), text, WINDOW)?;
    let tokens = subject.tokens()?;

    let builder = || load::on(&args.place, devices.clone(), Model::builder(&folder));
    let share = |message: String| bar(message, UNITS as u64, "{msg} {wide_bar} {percent} % {eta}");
    let weights_bar = share(format!("probing {} mixtures", mixtures.len()));
    let mut on_progress = |share: f64| weights_bar.set_position((UNITS * share) as u64);
    let probed = probe_weights(&subject.model, &builder, &tokens, subject.window, mixtures, &mut on_progress);
    weights_bar.finish_and_clear();
    let probed = probed?;
    let smallest = probed.weights.iter().filter(|one| one.mixture.is_some()).min_by_key(|one| one.bytes);
    let smallest = smallest.and_then(|one| one.mixture);
    let tensors = match smallest.filter(|_| args.per_tensor) {
        Some(mixture) => {
            let bar = share(format!("probing tensors of {mixture}"));
            let tokens = &tokens[..tokens.len().min(OF_TENSORS)];
            let mut on_progress = |share: f64| bar.set_position((UNITS * share) as u64);
            let (model, window) = (&subject.model, subject.window);
            let tensors = probe_tensors(model, &builder, tokens, window, mixture, WORST, &mut on_progress);
            bar.finish_and_clear();
            Some(tensors?)
        }
        None => None,
    };

    match args.json {
        true => say(format_args!("{:#}", json(&probed, tensors.as_ref(), &subject)))?,
        false => print(&probed, tensors.as_ref(), &subject)?,
    }
    let names: Vec<String> = probed.ranked().into_iter().map(name).collect();
    subject.plot(&chart(&probed, &names, subject.model.name()))?;
    Ok(ExitCode::SUCCESS)
}

/// The value of `--quant` that loads these weights.
fn name(probed: &ProbedWeights) -> String {
    let exact = if probed.exact { " --exact" } else { "" };
    probed.mixture.map_or_else(|| "as stored".to_owned(), |mixture| format!("{mixture}{exact}"))
}

fn print(probe: &WeightsProbe, tensors: Option<&TensorsProbe>, subject: &Subject<'_>) -> Result<()> {
    subject.say(probe.tokens)?;
    let original = probe.original();
    let head =
        [&["--quant", "size", "bits", "of stored"][..], &COMPARED, &["prefill t/s", "decode t/s", "loss"]];
    let mut rows = vec![head.concat().into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for (place, probed) in std::iter::once(original).chain(probe.ranked()).enumerate() {
        let mut row = vec![
            name(probed),
            display::bytes(probed.bytes),
            format!("{:.2}", probed.bits),
            format!("{:.3}", probed.bytes as f64 / original.bytes.max(1) as f64),
        ];
        row.extend(compared(&probed.compared));
        row.push(format!("{:.0}", probed.prefill));
        row.push(format!("{:.1}", probed.decode));
        row.push(if place == 0 { "none" } else { loss(&probed.compared) }.to_owned());
        rows.push(row);
    }
    say(format_args!("{}\n", display::table(&rows)))?;
    say_bounds()?;
    if let Some((most, rounding)) = probe.most_rounded() {
        let (name, lost) = (name(most), rounding.divergence);
        say(format_args!(
            "without --exact, activations are rounded to 8 bits, which costs {lost:.2e} nats at most (in {name})"
        ))?;
        if lost.is_nan() || lost > ROUNDING {
            say(format_args!("warning: that is more than {ROUNDING} nats; use --exact with this model"))?;
        }
    }
    for probed in probe.ranked().into_iter().filter(|probed| probed.loss() == Loss::Broken) {
        say(format_args!("warning: `{}` breaks this model: its weights need more bits", name(probed)))?;
    }
    match probe.recommended() {
        Some(best) => say(format_args!(
            "recommended: --quant {} ({:.1} times smaller, and at most {UNSEEN} nats are lost)",
            name(best),
            original.bytes as f64 / best.bytes.max(1) as f64
        ))?,
        None => {
            say(format_args!("recommended: none, for each loses more than {UNSEEN} nats, or is not smaller"))?
        }
    }
    tensors.map_or(Ok(()), print_tensors)
}

fn print_tensors(probe: &TensorsProbe) -> Result<()> {
    let TensorsProbe { mixture, tokens, kinds, worst, .. } = probe;
    let table = |name: &str, all: &[ProbedTensors]| {
        let head = [&[name, "tensors", "formats", "size", "relative error"][..], &COMPARED[..3]].concat();
        let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
        for probed in all {
            let mut row = vec![
                probed.name.clone(),
                probed.tensors.to_string(),
                probed.formats.join(", "),
                display::bytes(probed.bytes),
                format!("{:.2e}", probed.relative_error),
            ];
            row.extend(compared(&probed.compared).into_iter().take(3));
            rows.push(row);
        }
        display::table(&rows)
    };
    say(format_args!(
        "\nkinds of tensors of {mixture}, each packed alone, on {tokens} tokens:\n\n{}",
        table("kind", kinds)
    ))?;
    say(format_args!("\nthe tensors that cost most, each packed alone:\n\n{}", table("tensor", worst)))
}

fn chart<'a>(probe: &WeightsProbe, names: &'a [String], model: &str) -> Chart<'a> {
    let original = probe.original().bytes.max(1) as f64;
    let points = probe.ranked().into_iter().zip(names).filter(|(probed, _)| !probed.exact);
    let point = |(probed, name): (&ProbedWeights, &'a String)| Point {
        name,
        share: probed.bytes as f64 / original,
        divergence: probed.compared.divergence,
    };
    Chart {
        title: format!("{model}: what bytes of weights cost"),
        across: "bytes, of those of the weights as they are stored",
        up: "KL divergence from the weights as they are stored, nats",
        points: points.map(point).collect(),
    }
}

fn json(probe: &WeightsProbe, tensors: Option<&TensorsProbe>, subject: &Subject<'_>) -> Value {
    let weights = |probed: &ProbedWeights| {
        let mut weights = compared_json(&probed.compared);
        weights["quant"] = probed.mixture.map(Mixture::name).into();
        weights["exact"] = probed.exact.into();
        weights["bytes"] = probed.bytes.into();
        weights["bits_per_weight"] = probed.bits.into();
        weights["rounding"] = probed.rounding.as_ref().map_or(Value::Null, compared_json);
        weights["prefill_tokens_per_second"] = probed.prefill.into();
        weights["decode_tokens_per_second"] = probed.decode.into();
        weights
    };
    let mut json = subject.json(probe.tokens);
    json.insert("weights".to_owned(), probe.weights.iter().map(weights).collect());
    json.insert("recommended".to_owned(), probe.recommended().map(name).into());
    if let Some(TensorsProbe { mixture, tokens, kinds, worst, .. }) = tensors {
        let all = |all: &[ProbedTensors]| all.iter().map(tensors_json).collect::<Vec<_>>();
        let tensors =
            json!({"quant": mixture.name(), "tokens": tokens, "kinds": all(kinds), "worst": all(worst)});
        json.insert("tensors".to_owned(), tensors);
    }
    json.into()
}

fn tensors_json(probed: &ProbedTensors) -> Value {
    let mut json = compared_json(&probed.compared);
    json["name"] = probed.name.clone().into();
    json["tensors"] = probed.tensors.into();
    json["formats"] = json!(probed.formats);
    json["bytes"] = probed.bytes.into();
    json["relative_error"] = probed.relative_error.into();
    json
}
