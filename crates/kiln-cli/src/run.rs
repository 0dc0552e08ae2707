//! `kiln run`

use std::{
    fs,
    io::{self, IsTerminal, Read, Write},
    process::ExitCode,
};

use kiln::{
    Error, GenerationConfig, Model, Offload, OnOutOfMemory, Result, RunOptions, Sequence, Stats, StopReason,
};

use crate::{
    args::{CacheArgs, RunArgs, SamplingArgs},
    display, load,
};

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    // What can be wrong with the words is said before the model is loaded.
    let plan = args.memory.plan()?;
    let wanted = wanted(&args.sampling)?;
    let options = options(args.prefill_chunk, &args.memory)?;
    let folder = load::folder(args.model.as_deref())?;
    let prompt = prompt(args)?;

    let least = args.sampling.max_new_tokens.unwrap_or(0);
    let model = load::model(&folder, &args.place, load::open(&args.place)?, plan.as_ref(), least)?;
    fail_allocation(&model)?;
    let plan = args.memory.offloaded(plan.map_or_else(|| model.plan(), Ok)?);
    let mut sequence = match &args.load_cache {
        Some(path) => Sequence::load(&model, &plan, path)?,
        None => Sequence::new(&model, &plan)?,
    };
    let mut ids = sequence.tokens().first().cloned().unwrap_or_default();
    ids.extend(match ids.is_empty() {
        true => model.encode(&prompt)?,
        // What begins a text begins it once.
        false => model.encode_more(&prompt)?,
    });
    let mut pieces = model.continue_text(&mut sequence, ids, &wanted, options)?;

    let mut out = io::stdout().lock();
    let mut show =
        |text: &str| args.json || out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok();
    let mut heard = args.no_echo || show(&prompt);
    let mut text = String::new();
    for piece in &mut pieces {
        let piece = piece?;
        heard = heard && show(&piece);
        text.push_str(&piece);
        // The reader went away (`| head`): nobody wants the rest.
        if !heard {
            break;
        }
    }
    show("\n");
    let (stats, reason) = (pieces.stats(), pieces.stop_reason());
    drop(pieces);
    if let Some(path) = &args.save_cache {
        sequence.save(&model, &plan, path)?;
    }
    let report = Report {
        model: &model,
        stats: &stats,
        reason,
        cache: plan.label(&model.causal().needs()),
        cache_bytes: sequence.cache().device_bytes() as u64,
        host_bytes: sequence.cache().host_bytes() as u64,
    };
    if args.json {
        display::say(format_args!("{:#}", report.json(&prompt, &text)));
    }
    if args.verbose {
        eprint!("{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

/// For tests of what happens when memory runs out: `KILN_FAIL_ALLOC_AT=N` has the Nth allocation fail.
fn fail_allocation(model: &Model) -> Result<()> {
    const NAME: &str = "KILN_FAIL_ALLOC_AT";

    let Ok(text) = std::env::var(NAME) else { return Ok(()) };
    let why = |_| Error::Setting { name: NAME, why: format!("`{text}` is not a number") };
    model.budget().fail_allocation(text.parse().map_err(why)?);
    Ok(())
}

/// The prompt from wherever it was given.
fn prompt(args: &RunArgs) -> Result<String> {
    let text = match (&args.prompt, &args.file) {
        (_, Some(path)) => {
            fs::read_to_string(path).map_err(|e| Error::File { path: path.clone(), why: e.to_string() })?
        }
        (Some(text), None) if text != "-" => text.clone(),
        _ => {
            if io::stdin().is_terminal() {
                eprintln!("reading the prompt from the terminal; end it with Ctrl-D");
            }
            let mut text = String::new();
            let why = |e: io::Error| Error::Prompt { why: format!("standard input: {e}") };
            io::stdin().read_to_string(&mut text).map_err(why)?;
            text
        }
    };
    if text.is_empty() {
        let why = "the prompt is empty; give it as an argument, with --file, or on standard input".to_owned();
        return Err(Error::Prompt { why });
    }
    Ok(text)
}

pub(crate) fn options(prefill_chunk: Option<usize>, memory: &CacheArgs) -> Result<RunOptions> {
    let on_oom = match memory.offload {
        Some(Offload::AsNeeded) => OnOutOfMemory::Offload,
        _ => memory.on_oom,
    };
    match prefill_chunk {
        Some(0) => {
            Err(Error::Setting { name: "--prefill-chunk", why: "is 0, must be at least 1".to_owned() })
        }
        _ => Ok(RunOptions { prefill_chunk, compile: memory.compile(), on_oom, ..RunOptions::default() }),
    }
}

/// Only what was asked for; the rest is the folder's to say.
///
/// # Errors
/// What [`GenerationConfig::resolve`] says.
pub(crate) fn wanted(args: &SamplingArgs) -> Result<GenerationConfig> {
    // Whoever names a setting of sampling wants to sample.
    let sampling = args.temperature.is_some()
        || args.top_k.is_some()
        || args.top_p.is_some()
        || args.min_p.is_some()
        || args.seed.is_some();
    let wanted = GenerationConfig {
        max_new_tokens: args.max_new_tokens,
        do_sample: if args.greedy { Some(false) } else { sampling.then_some(true) },
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
        stop_strings: (!args.stop.is_empty()).then(|| args.stop.clone()),
        ..GenerationConfig::default()
    };
    wanted.resolve().map(|_| wanted)
}

struct Report<'a> {
    model: &'a Model,
    stats: &'a Stats,
    reason: Option<StopReason>,
    cache: String,
    cache_bytes: u64,
    host_bytes: u64,
}

impl Report<'_> {
    fn text(&self) -> String {
        let (model, stats) = (self.model, self.stats);
        let info = &model.opened().info;
        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
        let (prefill, decode) = (stats.prefill_time.as_secs_f64(), stats.decode_time.as_secs_f64());
        let kernels: Vec<String> = model
            .kernels()
            .ran()
            .iter()
            .map(|ran| format!("{} {} x{}", ran.kernel, ran.path, ran.count))
            .collect();
        format!(
            "\ndevice   {} {} ({}), {}\nload     {:.2} s, {} parameters, {}\nprefill  {} tokens in {:.3} s, {:.1} tokens/s\n\
             decode   {} tokens in {:.3} s, {:.1} tokens/s\ncache    {}, {} on the device{}\nkernels  {}\nseed     {}\n",
            info.name,
            info.adapter,
            info.api,
            model.dtype().name(),
            model.load_time().as_secs_f64(),
            display::count(model.parameters()),
            display::bytes(model.weight_bytes()),
            stats.prompt_tokens,
            prefill,
            rate(stats.prompt_tokens, prefill),
            stats.decoded(),
            decode,
            rate(stats.decoded(), decode),
            self.cache,
            display::bytes(self.cache_bytes),
            match self.host_bytes {
                0 => String::new(),
                bytes => format!(", {} on the host", display::bytes(bytes)),
            },
            kernels.join(", "),
            stats.seed.map_or_else(|| "none, greedy".to_owned(), |seed| seed.to_string()),
        )
    }

    fn json(&self, prompt: &str, text: &str) -> serde_json::Value {
        let (model, stats) = (self.model, self.stats);
        serde_json::json!({
            "model": model.name(),
            "device": model.opened().info.name.to_string(),
            "adapter": model.opened().info.adapter,
            "dtype": model.dtype().name(),
            "cache": self.cache,
            "prompt": prompt,
            "text": text,
            "stop_reason": match self.reason {
                Some(StopReason::EndOfText) => "end_of_text",
                Some(StopReason::StopString) => "stop_string",
                Some(StopReason::Length) | None => "length",
            },
            "seed": stats.seed,
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generated,
            "load_seconds": model.load_time().as_secs_f64(),
            "prefill_seconds": stats.prefill_time.as_secs_f64(),
            "decode_seconds": stats.decode_time.as_secs_f64(),
            "cache_bytes": self.cache_bytes,
            "cache_host_bytes": self.host_bytes,
        })
    }
}
