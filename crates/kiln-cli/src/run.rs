//! `kiln run`

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kiln::{
    ArithmeticChoice, Completion, Error, GeneratedText, GenerationConfig, Model, Plan, Sequence, Stats,
    Steps, StopReason,
    expert::{ExpertTraffic, files},
};
use serde_json::Value;

use crate::{
    display, load,
    memory::{CacheArgs, Running},
    output::{Failure, Result, note, print, say, tell},
    place::PlaceArgs,
    settings::{self, SamplingArgs},
};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The text to continue; `-` or nothing reads it from standard input
    ///
    /// A newline at the end of a file or of standard input is not part of the prompt. With --load-cache the
    /// prompt may be left out.
    prompt: Option<String>,
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    memory: CacheArgs,
    /// Continue from a cache that --save-cache wrote
    ///
    /// The prompt, if any, follows the tokens in the cache. Without --cache, the kind of the saved cache is
    /// used.
    #[arg(long, value_name = "FILE")]
    load_cache: Option<PathBuf>,
    /// Save the cache after generation, to continue from it later
    ///
    /// With `-n 0`, only the prompt is cached.
    #[arg(long, value_name = "FILE")]
    save_cache: Option<PathBuf>,
    /// Prompt tokens per forward pass [default: as many as activations of 32 MiB allow]
    #[arg(long, hide_short_help = true, value_name = "N")]
    prefill_chunk: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// The negative prompt of --guidance-scale [default: the last token of the prompt]
    #[arg(long, hide_short_help = true, value_name = "TEXT")]
    negative_prompt: Option<String>,
    /// A smaller model that drafts tokens for the model to verify; the tokens stay the same
    #[arg(long, value_name = "MODEL")]
    draft: Option<PathBuf>,
    /// Print N sequences, with beams or sampling
    #[arg(long, value_name = "N")]
    num_return_sequences: Option<usize>,
    /// Print only the generated text, without the prompt
    #[arg(long)]
    no_echo: bool,
    /// Print times, rates and bytes to standard error
    #[arg(short, long)]
    verbose: bool,
    /// Print one JSON object instead of the text
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    // Errors in the arguments are reported before the model is loaded.
    let plan = args.memory.plan()?;
    // Without new tokens, only the prompt is cached.
    let caches_prompt = args.sampling.max_new_tokens == Some(0) && args.save_cache.is_some();
    let wanted = match caches_prompt {
        true => GenerationConfig::default(),
        false => {
            let mut wanted = settings::wanted(&args.sampling)?;
            wanted.num_return_sequences = args.num_return_sequences.or(wanted.num_return_sequences);
            wanted.resolve()?;
            wanted
        }
    };
    let running = Running::new(args.prefill_chunk, &args.memory)?;
    let grammar = settings::grammar(&args.sampling)?;
    let folder = load::folder(args.model.as_deref())?;
    args.save_cache.as_deref().map_or(Ok(()), files::check_writable)?;
    args.load_cache.as_deref().map(files::open).transpose()?;
    let prompt = prompt(args)?;
    if args.model.is_none() && looks_like_a_model(&prompt) {
        note(format_args!("note: `{prompt}` is the prompt; a model is named with --model MODEL"));
    }

    let least = usize::try_from(args.sampling.max_new_tokens.unwrap_or(0)).unwrap_or(0);
    let model = load::text_model(&folder, &args.place, load::open(&args.place)?, plan.as_ref(), least)?;
    fail_allocation(&model)?;
    // The draft model is small, and need not have experts.
    let draft_place = PlaceArgs {
        layers: None,
        offload_experts: None,
        // Proposals change no text.
        arithmetic: ArithmeticChoice::Auto,
        experts: None,
        lora: Vec::new(),
        ..args.place.clone()
    };
    let draft = args
        .draft
        .as_deref()
        .map(|named| {
            let folder = load::folder(Some(named))?;
            Ok::<_, Failure>(load::text_model(
                &folder,
                &draft_place,
                vec![model.opened().clone()],
                None,
                least,
            )?)
        })
        .transpose()?;
    let plan = match (plan, &args.load_cache) {
        (Some(plan), _) => plan,
        (None, Some(path)) => model.plan_of_saved(path)?,
        (None, None) => model.plan().clone(),
    };
    let plan = args.memory.offloaded(plan);
    if let Some(path) = &args.save_cache {
        model.check_saving(path, &plan)?;
    }
    let mut sequence = match &args.load_cache {
        Some(path) => Sequence::load(&model, &plan, path)?,
        None => Sequence::new(&model, &plan)?,
    };
    model.check_length(&prompt, sequence.cache())?;
    let mut ids = sequence.tokens().first().cloned().unwrap_or_default();
    ids.extend(match ids.is_empty() {
        true => model.encode(&prompt)?,
        // Tokens that begin a text, such as BOS, are added only once.
        false => model.encode_more(&prompt)?,
    });
    let asked = wanted.clone().merged_over(model.generation_config());
    let mut request = running.of(model.generate(ids)).config(wanted).grammar(grammar).sequence(&mut sequence);
    if let Some(negative) = &args.negative_prompt {
        request = request.negative_prompt(negative);
    }
    request = draft.iter().fold(request, |request, draft| request.draft(draft));
    let printed = if caches_prompt {
        request.prefill()?;
        Ok(())
    } else {
        let generated = match is_list(&asked, args) {
            true => print_completions(request.steps()?, &prompt, args)?,
            false => print_pieces(request.stream()?, &prompt, args)?,
        };
        report(args, &model, &plan, &sequence, &prompt, generated)
    };
    // The cache is saved even if the reader of the output has gone.
    if let Some(path) = &args.save_cache {
        sequence.save(&model, &plan, path)?;
    }
    printed.map(|()| ExitCode::SUCCESS)
}

/// The result of a generation, and whether all of it could be printed.
struct Generated {
    text: String,
    stats: Stats,
    reason: Option<StopReason>,
    /// Settings for which the device has no kernel.
    on_host: Vec<&'static str>,
    /// All completions, if several were requested.
    completions: Vec<Completion>,
    printed: Result<()>,
}

/// Whether all completions are printed at the end, instead of one while it is generated.
fn is_list(asked: &GenerationConfig, args: &RunArgs) -> bool {
    let several = |number: Option<usize>| number.is_some_and(|number| number > 1);
    several(asked.num_return_sequences) || args.json && several(asked.num_beams)
}

/// Generates all completions, and prints them. Shows a progress bar on a terminal.
fn print_completions(mut steps: Steps<'_>, prompt: &str, args: &RunArgs) -> Result<Generated> {
    let bar = ProgressBar::new(steps.settings().max_new_tokens().map_or(0, |most| most as u64));
    if let Ok(style) = ProgressStyle::with_template("generating {wide_bar} {pos}/{len} tokens {eta}") {
        bar.set_style(style);
    }
    for step in steps.by_ref() {
        step?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let completions = steps.completions()?.into_iter().next().unwrap_or_default();
    let begin = if args.no_echo { "" } else { prompt };
    let mut printed = Ok(());
    for (i, completion) in completions.iter().enumerate().filter(|_| !args.json) {
        let score = completion.score.map(|score| format!(", score {score:.3}")).unwrap_or_default();
        let text = completion.text.as_deref().unwrap_or_default();
        printed = printed.and_then(|()| {
            print(format_args!("--- {} of {}{score} ---\n{begin}{text}\n", i + 1, completions.len()))
        });
    }
    let best = completions.first();
    Ok(Generated {
        text: best.and_then(|best| best.text.clone()).unwrap_or_default(),
        stats: steps.stats(),
        reason: best.and_then(|best| best.stop_reason),
        on_host: steps.processed_on_host(),
        completions,
        printed,
    })
}

/// Prints pieces as they are generated, until they end or the output is closed.
fn print_pieces(mut pieces: GeneratedText<'_>, prompt: &str, args: &RunArgs) -> Result<Generated> {
    let show = |text: &str| if args.json { Ok(()) } else { print(text) };
    let mut text = String::new();
    let mut shown = if args.no_echo { Ok(()) } else { show(prompt) };
    while shown.is_ok()
        && let Some(piece) = pieces.next()
    {
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => {
                // The error message begins on a line of its own.
                show("\n")?;
                return Err(error.into());
            }
        };
        text.push_str(&piece);
        shown = show(&piece);
    }
    let printed = shown.and_then(|()| show("\n"));
    let (stats, reason, on_host) = (pieces.stats(), pieces.stop_reason(), pieces.processed_on_host());
    Ok(Generated { text, stats, reason, on_host, completions: Vec::new(), printed })
}

/// Prints the requested JSON and statistics.
fn report(
    args: &RunArgs,
    model: &Model,
    plan: &Plan,
    sequence: &Sequence,
    prompt: &str,
    Generated { text, stats, reason, on_host, completions, printed }: Generated,
) -> Result<()> {
    let report = Report {
        model,
        stats: &stats,
        reason,
        on_host,
        completions,
        cache: plan.label(&model.causal().needs()),
        cache_bytes: sequence.cache().device_bytes() as u64,
        host_bytes: sequence.cache().host_bytes() as u64,
    };
    let printed = match args.json {
        true => printed.and_then(|()| say(format_args!("{:#}", report.json(prompt, &text)))),
        false => printed,
    };
    let told = if args.verbose { tell(report.text()) } else { Ok(()) };
    printed.and(told)
}

/// Makes the Nth allocation fail if `KILN_FAIL_ALLOC_AT=N` is set, to test an out-of-memory error.
fn fail_allocation(model: &Model) -> Result<()> {
    const NAME: &str = "KILN_FAIL_ALLOC_AT";

    let Ok(text) = std::env::var(NAME) else { return Ok(()) };
    let why = |_| Error::Setting { name: NAME, why: format!("`{text}` is not a number") };
    let number = text.parse().map_err(why)?;
    model.budget().fail_allocation(number);
    Ok(())
}

/// Reads the prompt from the argument, a file or standard input. It may be empty only if a saved cache is
/// continued.
fn prompt(args: &RunArgs) -> Result<String> {
    let continued = args.load_cache.is_some();
    let text = match (&args.prompt, &args.file) {
        (None, None) if continued && io::stdin().is_terminal() => String::new(),
        (prompt, file) => load::text(prompt.as_deref(), file.as_deref(), "prompt")?,
    };
    if text.is_empty() && !continued {
        let why = "the prompt is empty; give it as an argument, with --file, or on standard input".to_owned();
        return Err(Error::Prompt { why }.into());
    }
    Ok(text)
}

/// Whether a prompt is more likely meant as the name of a model, which other tools take in this place.
fn looks_like_a_model(prompt: &str) -> bool {
    const FAMILIES: [&str; 12] = [
        "llama",
        "mistral",
        "mixtral",
        "qwen",
        "gemma",
        "phi",
        "smollm",
        "tinyllama",
        "deepseek",
        "falcon",
        "gpt",
        "codellama",
    ];

    let one_word = !prompt.is_empty() && !prompt.contains(char::is_whitespace);
    let lower = prompt.to_ascii_lowercase();
    let name = lower.rsplit('/').next().unwrap_or(&lower);
    // A family followed by a version, such as llama3, qwen2.5:7b or gemma-2-2b.
    let version = |family: &str| {
        let behind = name.strip_prefix(family)?.trim_start_matches(['-', '_', ':']);
        behind.chars().next().filter(char::is_ascii_digit)
    };
    one_word
        && (FAMILIES.iter().any(|family| version(family).is_some())
            || name.ends_with(".gguf")
            || name.ends_with(".safetensors")
            || Path::new(prompt).join("config.json").is_file())
}

/// A line about experts in host memory.
fn experts(ExpertTraffic { used, copied, bytes }: ExpertTraffic) -> String {
    let share = 100.0 * copied as f64 / used.max(1) as f64;
    let bytes = display::bytes(bytes);
    format!("\nexperts  {copied} of {used} used ({share:.0} %) were copied to the device, {bytes}")
}

/// Lines about tokens that were drafted, and about tokens that the grammar forced.
fn proposals(stats: &Stats) -> String {
    let share = 100.0 * stats.accepted as f64 / stats.proposed.max(1) as f64;
    let proposed =
        format!("\nproposed {} tokens, {} accepted ({share:.0} %)", stats.proposed, stats.accepted);
    let forced = format!("\nforced   {} tokens by the grammar", stats.forced);
    [(stats.proposed, proposed), (stats.forced, forced)]
        .into_iter()
        .filter_map(|(tokens, line)| (tokens > 0).then_some(line))
        .collect()
}

struct Report<'a> {
    model: &'a Model,
    stats: &'a Stats,
    reason: Option<StopReason>,
    on_host: Vec<&'static str>,
    completions: Vec<Completion>,
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
            .map(|ran| format!("{} {} x{}", ran.kernel, ran.implementation, ran.count))
            .collect();
        format!(
            "\ndevice   {} {} ({}), {}\nload     {:.2} s, {} parameters, {}{}\nprefill  {} tokens in {:.3} s, {:.1} tokens/s\n\
             decode   {} tokens in {:.3} s, {:.1} tokens/s{}{}\ncache    {}, {} on the device{}\nkernels  {}\nseed     {}\n",
            model.device_names(),
            info.adapter,
            info.api,
            load::types(model),
            model.load_time().as_secs_f64(),
            display::count(model.parameters()),
            display::bytes(model.weight_bytes()),
            match model.host_weight_bytes() {
                0 => String::new(),
                bytes => format!(" on the device, {} of experts in host memory", display::bytes(bytes)),
            },
            stats.prompt_tokens,
            prefill,
            rate(stats.prompt_tokens, prefill),
            stats.decoded(),
            decode,
            rate(stats.decoded(), decode),
            proposals(stats),
            model.expert_traffic().map_or_else(String::new, experts),
            self.cache,
            display::bytes(self.cache_bytes),
            match self.host_bytes {
                0 => String::new(),
                bytes => format!(", {} on the host", display::bytes(bytes)),
            },
            match self.on_host.is_empty() {
                true => kernels.join(", "),
                false => format!(
                    "{}\nhost     the scores of each step are read back for {}",
                    kernels.join(", "),
                    self.on_host.join(", ")
                ),
            },
            stats.seed.map_or_else(|| "none, greedy".to_owned(), |seed| seed.to_string()),
        )
    }

    fn json(&self, prompt: &str, text: &str) -> Value {
        let (model, stats) = (self.model, self.stats);
        let mut json = serde_json::json!({
            "model": model.name(),
            "device": model.device_names(),
            "adapter": model.opened().info.adapter,
            "dtype": load::types(model),
            "cache": self.cache,
            "prompt": prompt,
            "text": text,
            "stop_reason": self.reason.unwrap_or(StopReason::Length).to_string(),
            "seed": stats.seed,
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generated,
            "proposed_tokens": stats.proposed,
            "accepted_tokens": stats.accepted,
            "forced_tokens": stats.forced,
            "load_seconds": model.load_time().as_secs_f64(),
            "prefill_seconds": stats.prefill_time.as_secs_f64(),
            "decode_seconds": stats.decode_time.as_secs_f64(),
            "cache_bytes": self.cache_bytes,
            "cache_host_bytes": self.host_bytes,
        });
        if let Some(ExpertTraffic { used, copied, bytes }) = model.expert_traffic() {
            json["experts"] = serde_json::json!({
                "host_bytes": model.host_weight_bytes(), "used": used, "copied": copied, "copied_bytes": bytes,
            });
        } else if let Some(device) = model.experts_device() {
            json["experts"] = serde_json::json!({
                "host_bytes": model.host_weight_bytes(), "device": device.info.name.to_string(),
            });
        }
        if !self.completions.is_empty() {
            let completion = |completion: &Completion| {
                serde_json::json!({
                    "text": completion.text,
                    "tokens": completion.tokens,
                    "score": completion.score,
                    "stop_reason": completion.stop_reason.map(|reason| reason.to_string()),
                })
            };
            json["completions"] = self.completions.iter().map(completion).collect();
        }
        json
    }
}
