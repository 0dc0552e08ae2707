//! `kiln bench`: prefill (pp) and decode (tg), measured and printed as llama-bench does.

use std::{fmt, path::Path, process::ExitCode, time::Instant};

use kiln::{
    Error, GenerationConfig, Model, ModelBuilder, Plan, Result, TokenId,
    device::CopyBandwidth,
    expert::{Batch, ConfigFile, ModelCache, memory::Moved, models, read_back},
};
use serde::Serialize;

pub(crate) use self::args::BenchArgs;
use self::args::BenchOutput;
use crate::{
    load,
    output::{self, say},
};

mod args;
mod peer;
mod print;
mod serve;

/// The results and the setup in which they were measured.
#[derive(Debug, Serialize)]
struct Report {
    tool: &'static str,
    version: &'static str,
    model: String,
    /// Number of parameters.
    params: u64,
    /// Size of the weights in bytes.
    bytes: u64,
    dtype: String,
    device: String,
    adapter: String,
    driver: String,
    threads: usize,
    /// Memory bandwidth of the device in bytes per second, measured in this run; `None` if only prefill is
    /// measured.
    bandwidth: Option<f64>,
    /// Bandwidth of copies between the host and the device, if a cache or experts are in host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    copies: Option<Copies>,
    results: Vec<Measured>,
}

/// Bandwidth of copies to the device (up) and from it (down), in bytes per second.
#[derive(Clone, Copy, Debug, Serialize)]
struct Copies {
    up: f64,
    down: f64,
}

/// The result of one test with one cache: a row of the table.
#[derive(Debug, Serialize)]
struct Measured {
    /// Name of the test: `pp256` (prefill of 256 tokens), `tg64` (decode of 64), `tg64@4096` (after 4096
    /// others), `tg64 t=0.8` (at this temperature), `tg64 x4` (in 4 rows).
    test: String,
    /// Label of the cache strategy, with what is special about the test.
    cache: String,
    /// Number of tokens that are fed or decoded in each row.
    n: usize,
    /// Mean of the samples.
    tokens_per_second: f64,
    /// Standard deviation of a sample.
    stddev: f64,
    /// Tokens per second of all rows together, of each repetition.
    samples: Vec<f64>,
    /// Number of bytes that a decode step must read; `None` for prefill, for several rows, and for a cache
    /// that stores nothing.
    #[serde(skip)]
    bytes: Option<f64>,
    /// Fraction of the memory bandwidth that decode reaches.
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    copied: Option<Copied>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<Steps>,
    /// Seconds that a run before the repetitions took. It compiles kernels and is not counted.
    warm_up: f64,
    /// Speed relative to the first cache in the same test.
    ratio: f64,
}

/// Number of bytes that a decode step copies to the device (up) and from it (down).
#[derive(Debug, Serialize)]
struct Copied {
    up: u64,
    down: u64,
    /// Fraction of the copy bandwidth that decode reaches.
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
}

/// Milliseconds per decode step, over all steps of all repetitions.
#[derive(Debug, Serialize)]
struct Steps {
    median: f64,
    p99: f64,
    longest: f64,
}

pub(crate) fn run(args: &BenchArgs) -> output::Result<ExitCode> {
    if args.serve {
        return serve::run(args).map(|()| ExitCode::SUCCESS);
    }
    let plans: Vec<Plan> = args.cache.iter().map(|text| Plan::named(text)).collect::<Result<_>>()?;
    let random = args.random.as_deref().map(random).transpose()?;
    let peer = args.against.as_deref().map(peer::read).transpose()?;
    if args.repetitions == 0 {
        let why = "is 0, must be at least 1".to_owned();
        return Err(Error::Setting { name: "--repetitions", why }.into());
    }
    if args.num_beams.is_some_and(|beams| beams < 2) {
        let why = "is below 2, and one beam is no search".to_owned();
        return Err(Error::Setting { name: "--num-beams", why }.into());
    }
    let devices = load::open(&args.place)?;
    let model = match random {
        Some(config) => load::on(&args.place, devices, ModelBuilder::random(config)).load()?,
        None => {
            load::text_model(&load::folder(args.model.as_deref())?, &args.place, devices, plans.first(), 0)?
        }
    };
    let needs = model.causal().needs();
    plans.iter().try_for_each(|plan| plan.check(&needs))?;
    let deepest = args.depth.iter().max().copied().unwrap_or(0);
    let positions = model.sizes().positions;
    let longest = args.generate.iter().map(|n| n + deepest).chain(args.prompt.iter().copied()).max();
    if let Some(long) = longest.filter(|&n| n > positions) {
        let why = format!("{long} tokens are more than the model's {positions} positions");
        return Err(Error::Setting { name: "-p, -n, --depth", why }.into());
    }
    // The buffers of this measurement are large and would hide how much memory prefill needs.
    let decodes = args.generate.iter().any(|&n| n > 0);
    let floor = usize::try_from(model.multiplied_bytes()).unwrap_or(usize::MAX);
    // Several devices have no bandwidth in common.
    let measures = decodes && model.placement().count() == 1 && model.experts_device().is_none();
    let measure = || measures.then(|| model.opened().measure_bandwidth(floor)).transpose();
    let before = measure()?;
    let offloads = model.expert_traffic().is_some() || plans.iter().any(|plan| plan.offload.is_some());
    let copies = if decodes && offloads { model.opened().measure_copies()? } else { None };

    let mut results: Vec<Measured> = Vec::new();
    for plan in &plans {
        let bench = Bench {
            args,
            model: &model,
            plan,
            copies,
            cache: plan.label(&needs),
            snapshot: false,
            rows: Rows::One,
        };
        for &n in args.prompt.iter().filter(|&&n| n > 0) {
            results.push(bench.prefill(n)?);
        }
        for &n in args.generate.iter().filter(|&&n| n > 0) {
            for &depth in &args.depth {
                results.push(bench.decode(n, depth)?);
                // One token must be left to be fed.
                if args.snapshot && depth > 1 && plan.remembers(&needs) {
                    let cache = format!("{}, snapshot", bench.cache);
                    results.push(Bench { cache, snapshot: true, ..bench }.decode(n, depth)?);
                }
                if let Some(beams) = args.num_beams {
                    for rows in [Rows::Batch(beams), Rows::Beams(beams)] {
                        let cache = format!("{}, {rows}", bench.cache);
                        results.push(Bench { cache, rows, ..bench }.decode(n, depth)?);
                    }
                }
            }
        }
    }
    for i in 0..results.len() {
        let first = results.iter().find(|first| first.test == results[i].test);
        results[i].ratio = first.map_or(1.0, |first| results[i].tokens_per_second / first.tokens_per_second);
    }
    // Other load on the machine slows this measurement down, too. The best figure is closest to the hardware.
    let reached = |measured: &Measured| measures.then_some(measured.bytes? * measured.tokens_per_second);
    let bandwidth =
        before.into_iter().chain(measure()?).chain(results.iter().filter_map(reached)).reduce(f64::max);
    for measured in &mut results {
        measured.bandwidth_share = reached(measured).zip(bandwidth).map(|(reached, most)| reached / most);
    }
    let info = &model.opened().info;
    let report = Report {
        tool: "kiln",
        version: env!("CARGO_PKG_VERSION"),
        model: match &args.random {
            Some(config) => format!("random:{config}"),
            None => model.name().to_owned(),
        },
        params: model.parameters(),
        bytes: model.weight_bytes() + model.host_weight_bytes(),
        dtype: load::types(&model),
        device: model.device_names(),
        adapter: info.adapter.clone(),
        driver: info.driver.clone(),
        threads: kiln::device::threads(),
        bandwidth,
        copies: copies.map(|CopyBandwidth { up, down }| Copies { up, down }),
        results,
    };
    match args.output {
        BenchOutput::Json => say(print::json(&report))?,
        BenchOutput::Csv => say(print::csv(&report, peer.as_ref()).trim_end())?,
        BenchOutput::Md => {
            say(format_args!("{}\n", print::markdown(&report, peer.as_ref())))?;
            let warm_up: f64 = report.results.iter().map(|measured| measured.warm_up).sum();
            let memory = report.bandwidth.map_or_else(String::new, |bandwidth| {
                format!("{} of memory bandwidth, measured; ", print::rate(bandwidth))
            });
            let copies = report.copies.map_or_else(String::new, |Copies { up, down }| {
                format!("copies to it {}, from it {}; ", print::rate(up), print::rate(down))
            });
            say(format_args!("{}: {memory}{copies}warm-up {warm_up:.2} s, not counted", report.device))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The config of `--random`: pairs, a JSON file, or the folder or GGUF file that has one.
///
/// # Errors
/// [`Error::Setting`] and [`Error::File`] for a config that no text model can have.
fn random(text: &str) -> Result<ConfigFile> {
    let is_text = text.contains('=');
    let named = |error| match error {
        Error::File { why, .. } | Error::Setting { name: "config", why } if is_text => {
            Error::Setting { name: "--random", why }
        }
        other => other,
    };
    let path = Path::new(text);
    let config = match path.extension() {
        _ if is_text => text.parse().map_err(named)?,
        _ if !path.exists() => {
            let why = format!("`{text}` is no file or folder; give one with a config, or pairs KEY=VALUE,..");
            return Err(Error::Setting { name: "--random", why });
        }
        Some(extension) if extension == "json" => ConfigFile::from_file(path)?,
        _ => ConfigFile::read(path)?,
    };
    if models::configure(&config).map_err(named)?.features().is_some() {
        let why = "is a model of speech, which is not measured here; give one of text".to_owned();
        return Err(Error::Setting { name: "--random", why });
    }
    Ok(config)
}

/// Rows that are decoded together.
#[derive(Clone, Copy)]
enum Rows {
    One,
    Batch(usize),
    Beams(usize),
}

impl Rows {
    fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Batch(rows) | Self::Beams(rows) => rows,
        }
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One => f.write_str("one row"),
            Self::Batch(rows) => write!(f, "batch of {rows}"),
            Self::Beams(rows) => write!(f, "{rows} beams"),
        }
    }
}

/// The settings of a measurement: one model with one cache.
struct Bench<'a> {
    args: &'a BenchArgs,
    model: &'a Model,
    plan: &'a Plan,
    /// Label of the cache in the table.
    cache: String,
    copies: Option<CopyBandwidth>,
    /// Whether decode continues in a snapshot of the cache that holds the first `depth` tokens.
    snapshot: bool,
    rows: Rows,
}

impl Bench<'_> {
    /// Measures the time from feeding `n` tokens to an empty cache to the choice of the next token.
    fn prefill(&self, n: usize) -> Result<Measured> {
        let model = self.model;
        let batch = Batch::from_rows(&[self.ids(n)], model.device())?;
        // The chunk size is the default, so that a long prompt needs no more memory here than it does for
        // users.
        let chunk = Some(model.largest_chunk(batch.rows()));
        let once = || {
            let mut cache = model.cache(self.plan)?;
            let start = Instant::now();
            let logits = read_back::block_on(kiln::expert::prefill(
                model.causal().clone(),
                &mut cache,
                &batch,
                chunk,
            ))?;
            read_back::read(logits.argmax(2))?;
            Ok(start.elapsed().as_secs_f64())
        };
        let warm_up = once()?;
        let samples = (0..self.args.repetitions).map(|_| Ok(n as f64 / once()?)).collect::<Result<_>>()?;
        tracing::debug!(target: "kiln::memory", usage = ?model.device().memory_pool_usage(), "prefilled {n}");
        Ok(self.measured(format!("pp{n}"), n, samples, warm_up))
    }

    /// Measures decoding `n` tokens per row after `depth` others, with the decode loop that users call.
    fn decode(&self, n: usize, depth: usize) -> Result<Measured> {
        let mut steps = Vec::new();
        let (warm_up, moved) = self.tokens(n, depth, &mut steps)?;
        steps.clear();
        let samples = (0..self.args.repetitions)
            .map(|_| Ok((n * self.rows.count()) as f64 / self.tokens(n, depth, &mut steps)?.0))
            .collect::<Result<_>>()?;
        steps.sort_by(f64::total_cmp);
        let at = |share: f64| steps.get(((steps.len() - 1) as f64 * share).round() as usize).copied();
        let mut name = if depth == 0 { format!("tg{n}") } else { format!("tg{n}@{depth}") };
        if !matches!(self.rows, Rows::One) {
            name.push_str(&format!(" x{}", self.rows.count()));
        }
        if let Some(temperature) = self.args.temperature {
            name.push_str(&format!(" t={temperature}"));
        }
        let mut measured = self.measured(name, n, samples, warm_up);
        if self.plan.remembers(&self.model.causal().needs()) && matches!(self.rows, Rows::One) {
            measured.bytes = Some(self.bytes_a_token(depth + n / 2));
        }
        if let Some(Moved { up, down }) = moved.filter(|moved| *moved != Moved::default()) {
            let floor = |copies: CopyBandwidth| up as f64 / copies.up + down as f64 / copies.down;
            let bandwidth_share = self.copies.map(|copies| floor(copies) * measured.tokens_per_second);
            measured.copied = Some(Copied { up, down, bandwidth_share });
        }
        measured.steps = at(0.5).zip(at(0.99)).zip(at(1.0)).map(|((median, p99), longest)| Steps {
            median: 1e3 * median,
            p99: 1e3 * p99,
            longest: 1e3 * longest,
        });
        Ok(measured)
    }

    /// Decodes one token after the prompt, and then `n` more. Returns the seconds that the `n` tokens took,
    /// and the mean number of bytes per token that were copied between host and device (`None` for fewer than
    /// three tokens). Appends the seconds of each of the `n` tokens to `steps`.
    fn tokens(&self, n: usize, depth: usize, steps: &mut Vec<f64>) -> Result<(f64, Option<Moved>)> {
        let mut cache = self.model.cache(self.plan)?;
        let mut wanted = GenerationConfig::new()
            .max_new_tokens(n + 1)
            .do_sample(self.args.temperature.is_some())
            .top_k(50)
            .top_p(1.0)
            .min_p(0.0)
            .seed(0)
            .repetition_penalty(1.0)
            .eos_token_id(Vec::new());
        wanted.temperature = self.args.temperature;
        if let Rows::Beams(beams) = self.rows {
            wanted = wanted.num_beams(beams);
        }
        let mut prompt = self.ids(depth.max(1));
        let _trunk = match self.snapshot {
            false => None,
            true => {
                let last = prompt.split_off(depth - 1);
                let one = wanted.clone().max_new_tokens(1);
                let held = std::mem::replace(&mut prompt, last);
                self.model
                    .generate(held)
                    .cache(&mut cache)
                    .config(one.clone())
                    .compile(self.args.compile())
                    .steps()?
                    .try_for_each(|step| step.map(drop))?;
                let snapshot = cache.snapshot();
                Some(std::mem::replace(&mut cache, snapshot))
            }
        };
        let mut generation = self
            .model
            .generate(match self.rows {
                Rows::Batch(rows) => vec![prompt; rows],
                Rows::One | Rows::Beams(_) => vec![prompt],
            })
            .cache(&mut cache)
            .config(wanted.clone())
            .compile(self.args.compile())
            .steps()?;
        generation.next().transpose()?;
        // Copies that the prompt left in flight are not counted, nor is the last step, which prefetches
        // nothing.
        let (mut before, mut after) = (Moved::default(), Moved::default());
        let start = Instant::now();
        let mut last = start;
        for i in 1..=n {
            generation.next().transpose()?;
            let now = Instant::now();
            steps.push((now - last).as_secs_f64());
            last = now;
            match i {
                1 => before = self.moved(generation.cache()),
                _ if i + 1 == n => after = self.moved(generation.cache()),
                _ => {}
            }
        }
        let a_step =
            |before: u64, after: u64| after.saturating_sub(before) / (n as u64).saturating_sub(2).max(1);
        let moved = Moved { up: a_step(before.up, after.up), down: a_step(before.down, after.down) };
        Ok(((last - start).as_secs_f64(), (n > 2).then_some(moved)))
    }

    /// Number of bytes of the cache and of experts that were copied between host and device so far.
    fn moved(&self, cache: &ModelCache) -> Moved {
        let experts = self.model.expert_traffic().map_or(0, |traffic| traffic.bytes);
        let Moved { up, down } = cache.moved();
        Moved { up: up + experts, down }
    }

    /// Returns `n` token ids of a prompt: 0, 1, 2, .. up to the vocabulary, repeated.
    fn ids(&self, n: usize) -> Vec<TokenId> {
        (0..n).map(|i| (i % self.model.sizes().vocab) as TokenId).collect()
    }

    /// Creates the result of a test from the tokens per second of each repetition.
    fn measured(&self, test: String, n: usize, samples: Vec<f64>, warm_up: f64) -> Measured {
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        let squares: f64 = samples.iter().map(|s| (s - mean).powi(2)).sum();
        Measured {
            test,
            cache: self.cache.clone(),
            n,
            tokens_per_second: mean,
            stddev: (squares / (samples.len().max(2) - 1) as f64).sqrt(),
            samples,
            bytes: None,
            bandwidth_share: None,
            copied: None,
            steps: None,
            warm_up,
            ratio: 1.0,
        }
    }

    /// Bytes that a decode step must read with `tokens` tokens in the cache: the weights that it multiplies
    /// by, and the cached keys, values and states.
    fn bytes_a_token(&self, tokens: usize) -> f64 {
        let cache = self.plan.bytes(&self.model.causal().needs(), tokens, self.model.dtype().size());
        (self.model.multiplied_bytes() + cache as u64) as f64
    }
}
