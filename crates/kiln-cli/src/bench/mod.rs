//! `kiln bench`: prefill (pp) and decode (tg), as llama-bench measures and prints them.

use std::{process::ExitCode, time::Instant};

use burn::tensor::{Int, Tensor, TensorData};
use kiln::{
    Batch, Error, GenerationConfig, LoadOptions, Logits, Model, ModelCache, Plan, RandomLlama, Result,
    RunOptions, TokenId, read_back,
};
use serde::Serialize;

use crate::{
    args::{BenchArgs, BenchOutput},
    display, load,
};

mod peer;
mod print;

/// What was measured, and on what.
#[derive(Debug, Serialize)]
struct Report {
    tool: &'static str,
    version: &'static str,
    model: String,
    params: u64,
    /// Of the weights
    bytes: u64,
    dtype: String,
    device: String,
    adapter: String,
    driver: String,
    threads: usize,
    cache: String,
    /// Bytes a second that the device's memory gives, measured in this run
    bandwidth: f64,
    results: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Measured {
    /// `pp256`, `tg64`, `generate64`
    test: String,
    n: usize,
    tokens_per_second: f64,
    stddev: f64,
    samples: Vec<f64>,
    /// Of the memory bandwidth, that decode reaches
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let plan = Plan::named(&args.cache)?;
    let random = args.random.as_deref().map(sizes).transpose()?;
    let peer = args.against.as_deref().map(peer::read).transpose()?;
    if args.repetitions == 0 {
        return Err(Error::Setting { name: "--repetitions", why: "is 0, must be at least 1".to_owned() });
    }
    let device = load::open(&args.place)?;
    let model = match random {
        Some(sizes) => {
            let options = LoadOptions {
                dtype: args.place.dtype,
                kernels: args.place.kernels,
                ..LoadOptions::on(device)
            };
            Model::random(&sizes, options)?
        }
        None => load::model(&load::folder(args.model.as_deref())?, &args.place, device)?,
    };
    let bandwidth = model.opened().measure_bandwidth()?;

    let mut results = Vec::new();
    let positions = model.sizes().positions;
    if let Some(long) = args.prompt.iter().chain(&args.generate).find(|&&n| n > positions) {
        let why = format!("{long} tokens are more than the model's {positions} positions");
        return Err(Error::Setting { name: "-p, -n", why });
    }
    for &n in args.prompt.iter().filter(|&&n| n > 0) {
        let ids: Vec<TokenId> = (0..n).map(|i| (i % model.sizes().vocab) as TokenId).collect();
        let batch = Batch::from_rows(&[ids], model.device())?;
        results.push(measure(args, format!("pp{n}"), n, None, || prefill(&model, &plan, &batch))?);
    }
    for &n in args.generate.iter().filter(|&&n| n > 0) {
        let floor = plan.global.factory.remembers().then(|| bytes_a_token(&model, &plan, n) / bandwidth);
        // Steps of one token mean nothing to a cache that forgets it.
        if plan.global.factory.remembers() {
            results.push(measure(args, format!("tg{n}"), n, floor, || decode(&model, &plan, n))?);
        }
        results.push(measure(args, format!("generate{n}"), n, floor, || generate(&model, &plan, n))?);
    }
    let info = &model.opened().info;
    let report = Report {
        tool: "kiln",
        version: env!("CARGO_PKG_VERSION"),
        model: args
            .random
            .as_ref()
            .map_or_else(|| model.name().to_owned(), |sizes| format!("random:{sizes}")),
        params: model.parameters(),
        bytes: model.weight_bytes(),
        dtype: model.dtype().name().to_owned(),
        device: info.name.to_string(),
        adapter: info.adapter.clone(),
        driver: info.driver.clone(),
        threads: kiln::device::threads(),
        cache: args.cache.clone(),
        bandwidth,
        results,
    };
    match args.output {
        BenchOutput::Json => display::say(print::json(&report)),
        BenchOutput::Csv => display::say(print::csv(&report, peer.as_ref()).trim_end()),
        BenchOutput::Md => {
            display::say(format_args!("{}\n", print::markdown(&report, peer.as_ref())));
            display::say(format_args!(
                "{}: {} of memory bandwidth, measured",
                info.name,
                print::rate(bandwidth)
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,VOCAB`
fn sizes(text: &str) -> Result<RandomLlama> {
    let numbers: Option<Vec<usize>> = text.split(',').map(|n| n.trim().parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[layers, hidden, heads, kv_heads, intermediate, vocab]) => {
            Ok(RandomLlama { layers, hidden, heads, kv_heads, intermediate, vocab })
        }
        _ => Err(Error::Setting {
            name: "--random",
            why: format!("`{text}` is not six numbers LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,VOCAB"),
        }),
    }
}

/// One repetition that is not counted, then as many as were asked for. `floor`: seconds a token that memory needs.
fn measure(
    args: &BenchArgs,
    test: String,
    n: usize,
    floor: Option<f64>,
    mut once: impl FnMut() -> Result<f64>,
) -> Result<Measured> {
    once()?;
    let samples: Vec<f64> = (0..args.repetitions).map(|_| Ok(n as f64 / once()?)).collect::<Result<_>>()?;
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let squares: f64 = samples.iter().map(|s| (s - mean).powi(2)).sum();
    let stddev = (squares / (samples.len().max(2) - 1) as f64).sqrt();
    Ok(Measured {
        test,
        n,
        tokens_per_second: mean,
        stddev,
        samples,
        bandwidth_share: floor.map(|f| f * mean),
    })
}

/// Seconds to feed `batch` to an empty cache and have the next token.
fn prefill(model: &Model, plan: &Plan, batch: &Batch) -> Result<f64> {
    let mut cache = model.cache(plan)?;
    let start = Instant::now();
    // In the chunks that users get, so that a long prompt asks for no more memory than it does there.
    let chunk = Some(model.largest_chunk(batch.rows(), batch.len()));
    let logits = read_back::block_on(kiln::prefill(model.causal(), &mut cache, batch, chunk))?;
    read_back::read(likeliest(logits))?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds for `n` steps of one token each, from an empty cache, tokens read one step behind.
fn decode(model: &Model, plan: &Plan, n: usize) -> Result<f64> {
    let mut cache = model.cache(plan)?;
    let first = TensorData::new(vec![1i32.min(model.sizes().vocab as i32 - 1)], [1, 1]);
    let mut tokens = Tensor::<2, Int>::from_data(first, model.device());
    let mut reading = None;
    let start = Instant::now();
    for _ in 0..n {
        tokens = step(model, &mut cache, tokens)?;
        if let Some(previous) = reading.replace(read_back::start(tokens.clone())) {
            read_back::block_on(read_back::ReadBack::finish(previous))?;
        }
    }
    if let Some(last) = reading {
        read_back::block_on(last.finish())?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn step(model: &Model, cache: &mut ModelCache, tokens: Tensor<2, Int>) -> Result<Tensor<2, Int>> {
    let batch = Batch { tokens, left_pad: vec![0], horizon: 0, steps: None };
    Ok(likeliest(model.causal().forward(&batch, Logits::Last, cache)?))
}

fn likeliest(logits: Tensor<3>) -> Tensor<2, Int> {
    let [rows, _, vocab] = logits.dims();
    logits.reshape([rows, vocab]).argmax(1)
}

/// Seconds for `n` greedy tokens after one, through the loop that users call.
fn generate(model: &Model, plan: &Plan, n: usize) -> Result<f64> {
    let mut cache = model.cache(plan)?;
    let wanted = GenerationConfig {
        max_new_tokens: Some(n),
        do_sample: Some(false),
        repetition_penalty: Some(1.0),
        eos_token_id: Some(Vec::new()),
        ..GenerationConfig::default()
    };
    let start = Instant::now();
    for step in model.generate(&mut cache, vec![vec![0]], &wanted, RunOptions::default())?.steps() {
        step?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Bytes that a step of decode must read: the weights it multiplies by, and the cache, on average over `n` steps.
fn bytes_a_token(model: &Model, plan: &Plan, n: usize) -> f64 {
    let element = model.dtype().size();
    let cache: usize = (model.causal().needs().iter())
        .map(|need| match need {
            kiln::memory::LayerNeed::Attention(need) => plan.spec(need).factory.bytes(need, n / 2, element),
            _ => 0,
        })
        .sum();
    (model.multiplied_bytes() + cache as u64) as f64
}
