//! `kiln bench --serve`: a server under load, by the number of clients.

use std::{
    fmt::Write as _,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kiln::{Error, Plan, expert::files};
use kiln_serve::{ServeOptions, ServedModel};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{BenchArgs, BenchOutput, print};
use crate::{
    client::{Client, Delta, Usage},
    load,
    output::{Result, say},
};

/// Words of prompts.
const WORDS: [&str; 12] =
    ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "near", "old", "river"];

/// Requests of each client, one after the other.
const REQUESTS: usize = 4;

#[derive(Debug, Serialize)]
struct Report {
    tool: &'static str,
    version: &'static str,
    model: String,
    url: String,
    prompt_words: usize,
    generate: usize,
    results: Vec<Measured>,
}

/// The figures with this many clients.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    clients: usize,
    requests: usize,
    /// Tokens of answers, all clients together.
    tokens_per_second: f64,
    /// Relative to the first number of clients.
    ratio: f64,
    /// Milliseconds to the first piece of an answer, and between two pieces: medians and 99th percentiles.
    first: Percentiles,
    between: Percentiles,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Percentiles {
    median: f64,
    p99: f64,
}

/// A server of this process, which ends when dropped.
struct Own {
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

impl Drop for Own {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        _ = self.thread.take().map(JoinHandle::join);
    }
}

pub(super) fn run(args: &BenchArgs) -> Result<()> {
    let [words] = args.prompt[..] else { return Err(one("-p").into()) };
    let [generate] = args.generate[..] else { return Err(one("-n").into()) };
    if generate == 0 || args.clients.contains(&0) {
        let why = "is 0, must be at least 1".to_owned();
        return Err(Error::Setting { name: "-n, --clients", why }.into());
    }
    let own = if args.url.is_none() { Some(own(args)?) } else { None };
    let url = match (&args.url, &own) {
        (None, Some(own)) => format!("http://{}", own.address),
        (url, _) => url.clone().unwrap_or_default(),
    };
    let model = args.model.as_ref().filter(|_| own.is_none()).map(|name| name.display().to_string());
    let client = Client::find(&url, args.api_key.clone(), model)?;
    let load = Load { client: &client, words, generate, number: AtomicUsize::new(0) };
    // Kernels are compiled, and are not counted.
    load.of(1, 1)?;
    let mut results: Vec<Measured> = Vec::new();
    for &clients in &args.clients {
        let mut measured = load.of(clients, REQUESTS)?;
        let first = results.first().map_or(measured.tokens_per_second, |first| first.tokens_per_second);
        measured.ratio = measured.tokens_per_second / first;
        results.push(measured);
    }
    let report = Report {
        tool: "kiln",
        version: env!("CARGO_PKG_VERSION"),
        model: client.model.clone(),
        url: args.url.clone().unwrap_or_else(|| "own".to_owned()),
        prompt_words: words,
        generate,
        results,
    };
    if let Some(path) = &args.plot {
        files::write(path, report.svg().as_bytes())?;
    }
    say(match args.output {
        BenchOutput::Md => report.markdown(),
        BenchOutput::Csv => report.csv(),
        BenchOutput::Json => serde_json::to_string_pretty(&report)
            .map_err(|error| Error::Execution(format!("the report cannot be written: {error}")))?,
    })
}

fn one(name: &'static str) -> Error {
    Error::Setting { name, why: "takes one number with --serve".to_owned() }
}

/// Starts a server in this process.
fn own(args: &BenchArgs) -> Result<Own> {
    let [cache] = &args.cache[..] else { return Err(one("--cache").into()) };
    let plan = Plan::named(cache)?;
    let folder = load::folder(args.model.as_deref())?;
    let model = load::text_model(&folder, &args.place, load::open(&args.place)?, Some(&plan), 0)?;
    let name = model.name().to_owned();
    let options = ServeOptions { plan: Some(plan), drain: Duration::ZERO, ..ServeOptions::default() };
    let server = kiln_serve::Server::new(vec![ServedModel::loaded(name, model)], options, "127.0.0.1:0")?;
    let (address, stops) = (server.address(), Arc::new(AtomicBool::new(false)));
    let stop = stops.clone();
    // A failure of the network shows in the requests.
    let thread = thread::spawn(move || _ = server.run(|| stop.load(Ordering::Relaxed)));
    Ok(Own { stops, thread: Some(thread), address })
}

/// The requests of a measurement.
struct Load<'a> {
    client: &'a Client,
    words: usize,
    generate: usize,
    /// Number of prompts so far. No two begin alike, so that none is reused.
    number: AtomicUsize,
}

/// The times of one answer, in milliseconds.
#[derive(Default)]
struct Times {
    first: f64,
    between: Vec<f64>,
    tokens: u64,
}

impl Load<'_> {
    /// Sends `requests` requests from each of this many clients at once.
    fn of(&self, clients: usize, requests: usize) -> Result<Measured> {
        let begun = Instant::now();
        let answers: Result<Vec<Vec<Times>>> = thread::scope(|scope| {
            let client = || scope.spawn(|| (0..requests).map(|_| self.ask()).collect::<Result<Vec<_>>>());
            let running: Vec<_> = (0..clients).map(|_| client()).collect();
            let failed = |_| Error::Execution("a client failed".to_owned());
            running.into_iter().map(|client| client.join().map_err(failed)?).collect()
        });
        let seconds = begun.elapsed().as_secs_f64();
        let answers: Vec<Times> = answers?.into_iter().flatten().collect();
        let tokens: u64 = answers.iter().map(|times| times.tokens).sum();
        Ok(Measured {
            clients,
            requests: answers.len(),
            tokens_per_second: tokens as f64 / seconds,
            ratio: 1.0,
            first: percentiles(answers.iter().map(|times| times.first).collect()),
            between: percentiles(answers.iter().flat_map(|times| times.between.iter().copied()).collect()),
        })
    }

    fn ask(&self) -> Result<Times> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let words = (0..self.words).map(|at| WORDS[(number * 7 + at * (number % 5 + 1)) % WORDS.len()]);
        let prompt = std::iter::once(format!("{number}")).chain(words.map(str::to_owned));
        let body = json!({
            "prompt": prompt.collect::<Vec<_>>().join(" "),
            "max_tokens": self.generate,
            "temperature": 0,
            "ignore_eos": true,
        });
        let body: Map<String, Value> = serde_json::from_value(body).unwrap_or_default();
        let (begun, mut last, mut times) = (Instant::now(), None, Times::default());
        let milliseconds = |time: Duration| 1000.0 * time.as_secs_f64();
        for delta in self.client.stream("completions", body)? {
            match delta? {
                Delta::Text(_) => {
                    let now = Instant::now();
                    match last.replace(now) {
                        None => times.first = milliseconds(now - begun),
                        Some(before) => times.between.push(milliseconds(now - before)),
                    }
                }
                Delta::Usage(Usage { generated, .. }) => times.tokens = generated,
                Delta::Reasoning | Delta::End(_) => {}
            }
        }
        Ok(times)
    }
}

fn percentiles(mut values: Vec<f64>) -> Percentiles {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = (share * values.len() as f64).ceil() as usize;
        values.get(index.saturating_sub(1)).copied().unwrap_or_default()
    };
    Percentiles { median: at(0.5), p99: at(0.99) }
}

impl Report {
    fn markdown(&self) -> String {
        let head = ["clients", "tokens/s", "ratio", "first token: median, p99", "between: median, p99"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for own in &self.results {
            let times = |times: Percentiles| format!("{:.1}, {:.1} ms", times.median, times.p99);
            rows.push(vec![
                own.clients.to_string(),
                format!("{:.2}", own.tokens_per_second),
                format!("{:.2}", own.ratio),
                times(own.first),
                times(own.between),
            ]);
        }
        print::table(&rows)
    }

    fn csv(&self) -> String {
        let mut text =
            "clients,requests,tokens_per_second,ratio,first_median_ms,first_p99_ms,between_median_ms,\
                        between_p99_ms"
                .to_owned();
        for own in &self.results {
            let Measured { clients, requests, tokens_per_second, ratio, first, between } = own;
            _ = write!(
                text,
                "\n{clients},{requests},{tokens_per_second:.4},{ratio:.4},{:.4},{:.4},{:.4},{:.4}",
                first.median, first.p99, between.median, between.p99
            );
        }
        text
    }

    /// Tokens a second against the number of clients.
    fn svg(&self) -> String {
        const LEFT: f64 = 90.0;
        const RIGHT: f64 = 960.0;
        const TOP: f64 = 60.0;
        const BOTTOM: f64 = 500.0;
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let clients = most(&mut self.results.iter().map(|own| own.clients as f64));
        let rate = 1.1 * most(&mut self.results.iter().map(|own| own.tokens_per_second));
        let x = |clients_: usize| LEFT + (RIGHT - LEFT) * clients_ as f64 / clients;
        let y = |rate_: f64| BOTTOM - (BOTTOM - TOP) * rate_ / rate;
        let model = self.model.replace('&', "&amp;").replace('<', "&lt;");
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 560\" font-family=\"sans-serif\" \
             font-size=\"16\">\n<rect width=\"1000\" height=\"560\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"35\" font-size=\"20\">{model}: tokens a second by the number of clients</text>\n\
             <path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke=\"black\"/>\n"
        );
        let points: Vec<String> = self
            .results
            .iter()
            .map(|own| format!("{:.1},{:.1}", x(own.clients), y(own.tokens_per_second)))
            .collect();
        _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#b5482a\" stroke-width=\"3\"/>",
            points.join(" ")
        );
        for own in &self.results {
            let (x, y) = (x(own.clients), y(own.tokens_per_second));
            _ = writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"#b5482a\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
                 text-anchor=\"middle\">{:.1}</text><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                y - 12.0,
                own.tokens_per_second,
                BOTTOM + 25.0,
                own.clients
            );
        }
        svg + "</svg>\n"
    }
}
