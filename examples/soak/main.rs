//! Soak test: simulates hours of a server in one process, with repeated chats, generations, snapshots, files
//! and refused allocations. Every round must give the results of the first one, and nothing may grow.
//! `cargo run --release --example soak -- --device wgpu --minutes 30 --report soak.json --plot soak.svg`

mod plot;
mod rounds;
mod samples;

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use kiln::{Model, device::DeviceName, expert::files};
use serde_json::{Value, json};

use crate::{
    rounds::{Ledger, Rounds},
    samples::{FIFTHS, QUANTITIES, Quantity, Sample, Verdict},
};

const USAGE: &str =
    "usage: soak [--device NAME] [--minutes NUMBER] [--model FOLDER] [--report JSON] [--plot SVG]";

/// Rounds that are not judged: kernels are compiled in them, and pools reach their size.
const WARM_UP: usize = 3;

/// Minimum number of rounds: with fewer, a fifth would have no sample.
const FEWEST: usize = WARM_UP + FIFTHS;

struct Arguments {
    device: DeviceName,
    minutes: f64,
    model: PathBuf,
    report: Option<PathBuf>,
    plot: Option<PathBuf>,
}

impl Arguments {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let mut read = Self { device: DeviceName::Cpu, minutes: 1.0, model, report: None, plot: None };
        while let Some(name) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{name} needs a value; {USAGE}"));
            match name.as_str() {
                "--device" => read.device = value()?.parse()?,
                "--minutes" => read.minutes = value()?.parse().map_err(|e| format!("--minutes: {e}"))?,
                "--model" => read.model = value()?.into(),
                "--report" => read.report = Some(value()?.into()),
                "--plot" => read.plot = Some(value()?.into()),
                _ => return Err(format!("`{name}` is not known; {USAGE}").into()),
            }
        }
        Ok(read)
    }

    fn time(&self) -> Result<Duration, Box<dyn Error>> {
        Ok(Duration::try_from_secs_f64(self.minutes * 60.0).map_err(|e| format!("--minutes: {e}"))?)
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments = Arguments::read(std::env::args().skip(1))?;
    let time = arguments.time()?;
    // Checked now rather than after hours.
    for path in arguments.report.iter().chain(&arguments.plot) {
        files::check_writable(path)?;
    }
    let date = format!("{:.0}", jiff::Timestamp::now());
    let model = Model::builder(&arguments.model).device(arguments.device).load()?;
    let info = &model.opened().info;
    let title = format!("{} on {} ({})", model.name(), info.name, info.adapter);
    println!("{title}: {} minutes with", arguments.minutes);

    let mut ledger = Ledger::default();
    let rounds = Rounds::new(&model)?;
    println!("{}", rounds.caches().collect::<Vec<_>>().join("\n"));
    let started = Instant::now();
    let (mut samples, mut made) = (Vec::new(), 0);
    let mut last = None;
    while made < FEWEST || started.elapsed() < time {
        samples.push(Sample::take(&model, started, last)?);
        let start = Instant::now();
        rounds.make(made as u64, &mut ledger);
        last = Some(start.elapsed());
        // Shows progress, and how far the run got if the process ends.
        eprintln!("round {made}: {:.1?}, {} wrong", start.elapsed(), ledger.wrong);
        made += 1;
    }
    samples.push(Sample::take(&model, started, last)?);

    let verdicts =
        QUANTITIES.each_ref().map(|quantity| quantity.judge(samples.get(WARM_UP..).unwrap_or(&[])));
    let flat = verdicts.iter().flatten().all(Verdict::is_flat);
    table(&samples, &verdicts);
    println!("{made} rounds, {} outcomes compared, {} of them wrong", ledger.compared, ledger.wrong);
    ledger.problems.iter().for_each(|problem| println!("WRONG: {problem}"));
    println!("{}", if flat { "nothing grew" } else { "something grew" });

    let passed = flat && ledger.wrong == 0;
    if let Some(path) = &arguments.report {
        let report = json!({
            "date": date,
            "passed": passed,
            "model": model.name(),
            "dtype": model.dtype().name(),
            "device": info.name.to_string(),
            "adapter": info.adapter,
            "driver": info.driver,
            "api": info.api,
            "caches": rounds.caches().collect::<Vec<_>>(),
            "seconds": started.elapsed().as_secs_f64(),
            "rounds": made,
            "warm_up": WARM_UP,
            "compared": ledger.compared,
            "wrong": ledger.wrong,
            "problems": ledger.problems,
            "first_round": format!("{:016x}", ledger.first_round),
            "verdicts": QUANTITIES.iter().zip(&verdicts).map(|(quantity, verdict)| said(quantity, verdict)).collect::<Vec<_>>(),
            "samples": samples.iter().map(Sample::json).collect::<Vec<_>>(),
        });
        files::write(path, format!("{report}\n").as_bytes())?;
    }
    if let Some(path) = &arguments.plot {
        files::write(path, plot::svg(&title, &samples, WARM_UP, &verdicts).as_bytes())?;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn said(quantity: &Quantity, verdict: &Option<Verdict>) -> Value {
    json!({
        "quantity": quantity.name,
        "second_fifth": verdict.as_ref().map(|verdict| verdict.before),
        "last_fifth": verdict.as_ref().map(|verdict| verdict.after),
        "bound": verdict.as_ref().and_then(|verdict| verdict.bound),
        "flat": verdict.as_ref().map(Verdict::is_flat),
    })
}

fn table(samples: &[Sample], verdicts: &[Option<Verdict>]) {
    println!("\n{:<24}{:>12}{:>12}{:>12}{:>12}  verdict", "", "first", "warmed up", "last", "may grow by");
    let mut missing = Vec::new();
    for (quantity, verdict) in QUANTITIES.iter().zip(verdicts) {
        let at = |sample: Option<&Sample>| {
            sample
                .and_then(|sample| (quantity.of)(sample))
                .map_or("-".to_owned(), |value| quantity.text(value))
        };
        let Some(verdict) = verdict else {
            missing.push(quantity.name);
            continue;
        };
        let [first, warm, last] = [samples.first(), samples.get(WARM_UP), samples.last()].map(at);
        let bound = verdict.bound.map_or("-".to_owned(), |bound| quantity.text(bound));
        let said = verdict.said();
        let medians = [verdict.before, verdict.after].map(|median| quantity.text(median));
        let [before, after] = medians;
        println!(
            "{:<24}{first:>12}{warm:>12}{last:>12}{bound:>12}  {said} ({before} to {after})",
            quantity.name
        );
    }
    if !missing.is_empty() {
        println!("not measured, because this system or device does not say: {}", missing.join(", "));
    }
    println!();
}
