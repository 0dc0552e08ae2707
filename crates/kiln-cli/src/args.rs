//! What can be asked for.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kiln::{
    DtypeChoice, Error, Mixture, Offload, OnOutOfMemory, Plan, Result,
    device::DeviceName,
    expert::{STRATEGIES, kernels::Choice},
};

use crate::{doctor::DoctorArgs, quantize::QuantizeArgs, transcribe::TranscribeArgs};

#[derive(Debug, Parser)]
#[command(
    name = "kiln",
    version,
    about = "Runs language models on the GPU you own",
    arg_required_else_help = true,
    // The last of a repeated option wins, so that an alias or a script can be overridden.
    args_override_self = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt
    Run(RunArgs),
    /// Talk with a model
    Chat(ChatArgs),
    /// List the devices of this machine
    Devices(DevicesArgs),
    /// Compare the kernels of a device with their references, and time it: for a bug report
    Doctor(DoctorArgs),
    /// Describe the caches and their settings
    Caches(CachesArgs),
    /// Show what a model folder holds, and what fits into memory
    Inspect(InspectArgs),
    /// Check the tokens and logits against recordings of transformers
    Conformance(ConformanceArgs),
    /// Measure prefill and decode
    Bench(BenchArgs),
    /// Measure the loss of quantized caches or packed weights on a model, and recommend one
    Probe(ProbeArgs),
    /// Write a model as a GGUF file with packed weights
    Quantize(QuantizeArgs),
    /// Turn speech into text
    Transcribe(TranscribeArgs),
    /// Look for a watermark in a text
    Detect(DetectArgs),
    /// Download a model from the Hugging Face hub
    #[cfg(feature = "hub")]
    Pull(crate::hub::PullArgs),
    /// List the models from the hub that are on this machine
    #[cfg(feature = "hub")]
    List(crate::hub::ListArgs),
    /// Remove a model from the hub from this machine
    #[cfg(feature = "hub")]
    Remove(crate::hub::RemoveArgs),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// Print a manual page, to be read with `man -l -`
    Man {
        /// A command, such as run; without it, the page of kiln itself
        command: Option<String>,
    },
}

/// Where a model runs, and in what.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArgs {
    /// auto, cpu, wgpu[:INDEX] or cuda[:INDEX]; see `kiln devices`
    #[arg(short, long, env = "KILN_DEVICE", default_value_t, value_name = "DEVICE")]
    pub(crate) device: DeviceName,
    /// auto, f32, f16 or bf16
    ///
    /// `auto` is f16 on a GPU that computes it, else f32.
    #[arg(long, default_value_t, value_name = "TYPE")]
    pub(crate) dtype: DtypeChoice,
    /// Which implementation of each kernel runs: auto, reference, wgsl or cube
    #[arg(long, hide_short_help = true, default_value = "auto", value_name = "WHICH")]
    pub(crate) kernels: Choice,
    /// Compute with packed weights in float32 on the CPU, and round no activation to 8 bits
    ///
    /// Slower. By default, activations are rounded to 8 bits, with a scale for each 32 numbers, where they meet packed weights.
    #[arg(long)]
    pub(crate) exact: bool,
    /// Pack the weights when they are loaded, such as q8_0, q4_k_m or nf4; see `kiln quantize --help`
    ///
    /// A file that `kiln quantize` wrote loads faster, with the same numbers. nf4, the format of bitsandbytes, is in no file.
    #[arg(long, value_name = "NAME", value_parser = crate::quantize::mixture)]
    pub(crate) quant: Option<Mixture>,
    /// Memory of the device to use at most, such as `6GiB` [default: 90 % of what it has]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// Keep the experts of a mixture in host memory, but for the last N used of each block
    ///
    /// A larger model fits on the device. Experts that a token goes to are copied there in every step, unless they are among the N.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) offload_experts: Option<usize>,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
}

/// The KV cache, and where it is.
#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]", help = caches())]
    pub(crate) cache: Option<String>,
    /// Cache of the layers that see only a window [default: `sliding` beside `dynamic` and `static`]
    #[arg(long, hide_short_help = true, value_name = "NAME[:KEY=VALUE,..]")]
    pub(crate) cache_windowed: Option<String>,
    /// Count positions in a sink cache as this version of transformers did: 4.47
    #[arg(long, hide_short_help = true, value_name = "VERSION")]
    pub(crate) compat: Option<String>,
    /// Keep the cache in host memory
    ///
    /// A layer is on the device only while it computes. `all` is the default; `layers=N` keeps the last N layers on the
    /// device; `auto` moves layers when memory runs out.
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub(crate) offload: Option<Offload>,
    /// When memory runs out: offload, quantize or fail
    ///
    /// `offload` moves layers of the cache to host memory: the tokens stay the same. `quantize` packs the cache in 4 bits a
    /// number: the tokens change. `fail` ends with an error.
    #[arg(long, default_value_t, value_name = "WHAT")]
    pub(crate) on_oom: OnOutOfMemory,
    /// Capture the decode step once and replay it, where the device supports it [default]
    #[arg(long, hide_short_help = true, conflicts_with = "no_compile")]
    pub(crate) compile: bool,
    /// Launch each kernel of each step
    #[arg(long, hide_short_help = true)]
    pub(crate) no_compile: bool,
}

impl CacheArgs {
    /// The plan, with what is to be kept in host memory.
    pub(crate) fn offloaded(&self, plan: Plan) -> Plan {
        match self.offload {
            Some(offload) => plan.offloaded(offload),
            None => plan,
        }
    }

    /// The plan that was asked for; `None`: the model's own.
    pub(crate) fn plan(&self) -> Result<Option<Plan>> {
        let windowed = self.cache_windowed.as_deref().map(|text| self.named(text)).transpose()?;
        if self.cache.is_none() && windowed.is_none() && self.compat.is_none() {
            return Ok(None);
        }
        let plan = self.named(self.cache.as_deref().unwrap_or("dynamic"))?;
        Ok(Some(match windowed {
            Some(windowed) => plan.windowed(windowed),
            None => plan,
        }))
    }

    fn named(&self, text: &str) -> Result<Plan> {
        let plan = Plan::named(text)?;
        match &self.compat {
            Some(version) if plan.global.strategy.settings.iter().any(|(key, _)| *key == "compat") => {
                let (global, rest) = text.split_at(text.find(" + ").unwrap_or(text.len()));
                let separator = if global.contains(':') { ',' } else { ':' };
                Plan::named(&format!("{global}{separator}compat={version}{rest}"))
            }
            Some(_) => Err(Error::Setting {
                name: "--compat",
                why: format!(
                    "`{}` is the same in every version; it goes with --cache sink",
                    plan.global.strategy.name
                ),
            }),
            None => Ok(plan),
        }
    }

    /// Whether to capture; `None`: as the cache is made for.
    pub(crate) fn compile(&self) -> Option<bool> {
        compile(self.compile, self.no_compile)
    }
}

/// Bytes from `800MB`, `6GiB`, `1.5g` or a plain number.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size; write it as 800MB, 6GiB or a number of bytes");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(wrong()),
    };
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit;
    if bytes >= 1.0 && bytes < 2f64.powi(63) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// A number of tokens, where 0 means all.
fn count(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a number of tokens; give a whole number above 0, or 0 for all"))
}

fn compile(yes: bool, no: bool) -> Option<bool> {
    match (yes, no) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

impl InspectArgs {
    pub(crate) fn plan(&self) -> Result<Option<Plan>> {
        self.cache.as_deref().map(Plan::named).transpose()
    }
}

impl BenchArgs {
    /// Whether to capture; `None`: as the cache is made for.
    pub(crate) fn compile(&self) -> Option<bool> {
        compile(self.compile, self.no_compile)
    }
}

/// The help of `--cache`.
fn caches() -> String {
    let names: Vec<&str> = STRATEGIES.iter().map(|strategy| strategy.name).collect();
    format!(
        "KV cache: {}; `kiln caches` describes them [default: the model's, else dynamic]",
        names.join(", ")
    )
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The text to continue; `-` or nothing reads it from standard input
    ///
    /// A newline at the end of a file or of standard input is not part of the prompt. With --load-cache the prompt may be
    /// left out.
    pub(crate) prompt: Option<String>,
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) memory: CacheArgs,
    /// Go on from a cache that --save-cache left
    ///
    /// The prompt, if there is one, follows what the cache holds. Without --cache it is the kind of cache that was saved.
    #[arg(long, value_name = "FILE")]
    pub(crate) load_cache: Option<PathBuf>,
    /// Save the cache with what was generated, to go on from it later
    ///
    /// With `-n 0` it is the prompt that is cached.
    #[arg(long, value_name = "FILE")]
    pub(crate) save_cache: Option<PathBuf>,
    /// Prompt tokens per forward pass [default: as many as activations of 32 MiB allow]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) prefill_chunk: Option<usize>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// The text that --guidance-scale moves away from [default: the last token of the prompt]
    #[arg(long, hide_short_help = true, value_name = "TEXT")]
    pub(crate) negative_prompt: Option<String>,
    /// A smaller model proposes tokens, which the model checks; the tokens stay the same
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft: Option<PathBuf>,
    /// Print N sequences, with beams or sampling
    #[arg(long, value_name = "N")]
    pub(crate) num_return_sequences: Option<usize>,
    /// Print only what was generated, without the prompt
    #[arg(long)]
    pub(crate) no_echo: bool,
    /// Print times, rates and bytes to standard error
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print one JSON object instead of the text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// What the model is told before anything else
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// The chat template: a Jinja file, or the name of one of the model's own [default: the model's, else ChatML]
    #[arg(long, value_name = "FILE|NAME")]
    pub(crate) template: Option<String>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) memory: CacheArgs,
    /// Prompt tokens per forward pass [default: as many as activations of 32 MiB allow]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) prefill_chunk: Option<usize>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// What overrides the folder's generation_config.json.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate; -1: until the text ends [default: the model's, else -1]
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    pub(crate) max_new_tokens: Option<i64>,
    /// Always take the likeliest token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "typical_p"])]
    pub(crate) greedy: bool,
    /// Flatten (above 1) or sharpen (below 1) the distribution; 0 is greedy
    #[arg(short, long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Sample from the K likeliest tokens; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = count)]
    pub(crate) top_k: Option<usize>,
    /// Sample from the likeliest tokens that together reach probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Drop tokens below P times the likeliest token's probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Sample from tokens of typical information that together reach probability P
    #[arg(long, hide_short_help = true, value_name = "P", allow_negative_numbers = true)]
    pub(crate) typical_p: Option<f32>,
    /// Only generate JSON that a schema in a file accepts
    #[arg(long, value_name = "FILE", conflicts_with_all = ["regex", "grammar"])]
    pub(crate) json_schema: Option<PathBuf>,
    /// Only generate text that matches a regular expression
    #[arg(long, value_name = "REGEX", conflicts_with = "grammar")]
    pub(crate) regex: Option<String>,
    /// Only generate text that a Lark grammar in a file accepts
    #[arg(long, hide_short_help = true, value_name = "FILE")]
    pub(crate) grammar: Option<PathBuf>,
    /// Follow N sequences at once and take the likeliest (beam search)
    #[arg(long, value_name = "N")]
    pub(crate) num_beams: Option<usize>,
    /// Divide the beams into N groups that avoid each other's tokens; needs --set diversity_penalty=P
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) num_beam_groups: Option<usize>,
    /// Choose what is likelier after the prompt than after the negative prompt, by the factor G; 1 is off
    #[arg(long, hide_short_help = true, value_name = "G", allow_negative_numbers = true)]
    pub(crate) guidance_scale: Option<f32>,
    /// Propose up to N tokens at once that followed the same tokens before; the tokens stay the same
    #[arg(long, alias = "prompt-lookup-num-tokens", value_name = "N")]
    pub(crate) prompt_lookup: Option<usize>,
    /// Divide the scores of tokens that were already seen; 1 is off
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Never repeat a sequence of N tokens; 0 is off
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) no_repeat_ngram_size: Option<usize>,
    /// Choose no token that ends the text before N tokens were generated
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) min_new_tokens: Option<usize>,
    /// Stop after this many seconds
    #[arg(long, hide_short_help = true, value_name = "SECONDS", allow_negative_numbers = true)]
    pub(crate) max_time: Option<f32>,
    /// A setting of generation_config.json, such as `suppress_tokens=[1,2]`; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// Repeat a sampled run exactly
    #[arg(short, long, value_name = "SEED")]
    pub(crate) seed: Option<u64>,
    /// End at this text; may be given several times
    #[arg(long, alias = "stop-strings", value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CachesArgs {
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub
    pub(crate) model: PathBuf,
    /// Tokens to compute the cache for [default: the model's positions]
    #[arg(long, value_name = "N")]
    pub(crate) ctx: Option<usize>,
    /// Rows of the batch
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    pub(crate) batch: usize,
    /// Only this cache [default: every one that the model can have]
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    pub(crate) cache: Option<String>,
    /// The device whose memory counts
    #[arg(short, long, env = "KILN_DEVICE", default_value_t, value_name = "DEVICE")]
    pub(crate) device: DeviceName,
    /// Memory to use at most, such as `6GiB` [default: 90 % of the device's, where that is known]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConformanceArgs {
    /// A folder of fixtures: cases.json, tensors.safetensors, models/
    pub(crate) folder: PathBuf,
    #[command(flatten)]
    pub(crate) place: ConformancePlaceArgs,
    /// Run the cases of the `dynamic` cache with this cache; the results must be the same
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    pub(crate) cache: Option<String>,
    /// Keep layers in host memory: `all`, or `layers=N` for all but the last N; the results must be the same
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub(crate) offload: Option<Offload>,
    /// Keep the experts of mixtures in host memory, but for the last N used of each block; the results must be the same
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) offload_experts: Option<usize>,
    /// Run only the cases whose MODEL/CASE contains this
    #[arg(long, default_value = "", value_name = "SUBSTRING")]
    pub(crate) filter: String,
    /// Write the report to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Where cases run. Always in float32: the recordings are.
#[derive(Debug, Args)]
pub(crate) struct ConformancePlaceArgs {
    /// auto, cpu, wgpu[:INDEX] or cuda[:INDEX]; see `kiln devices`
    #[arg(short, long, env = "KILN_DEVICE", default_value_t, value_name = "DEVICE")]
    pub(crate) device: DeviceName,
    /// Which implementation of each kernel runs: auto, reference, wgsl or cube
    #[arg(long, default_value = "auto", value_name = "WHICH")]
    pub(crate) kernels: Choice,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// A Llama of random weights made up on the device
    #[arg(long, value_name = "LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,VOCAB", conflicts_with = "model")]
    pub(crate) random: Option<String>,
    /// A Mamba of random weights made up on the device
    #[arg(long, value_name = "LAYERS,HIDDEN,STATE,VOCAB", conflicts_with_all = ["model", "random"])]
    pub(crate) random_mamba: Option<String>,
    /// A Mixtral of random weights made up on the device
    #[arg(long, value_name = "LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,EXPERTS,CHOSEN,VOCAB")]
    #[arg(conflicts_with_all = ["model", "random", "random_mamba"])]
    pub(crate) random_mixtral: Option<String>,
    /// A Jamba of random weights made up on the device
    #[arg(long, value_name = "LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,EXPERTS,VOCAB")]
    #[arg(conflicts_with_all = ["model", "random", "random_mamba", "random_mixtral"])]
    pub(crate) random_jamba: Option<String>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Caches to measure, one after the other; the ratio is to the first; see `kiln caches`
    #[arg(short, long, default_value = "dynamic", value_name = "NAME[:KEY=VALUE,..]")]
    pub(crate) cache: Vec<String>,
    /// Capture the decode step once and replay it, where the device supports it [default]
    #[arg(long, conflicts_with = "no_compile")]
    pub(crate) compile: bool,
    /// Launch each kernel of each step
    #[arg(long)]
    pub(crate) no_compile: bool,
    /// Prompt lengths to measure prefill at; 0 for none
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "256", value_name = "N,..")]
    pub(crate) prompt: Vec<usize>,
    /// Numbers of tokens to measure decode at; 0 for none
    #[arg(short = 'n', long, value_delimiter = ',', default_value = "64", value_name = "N,..")]
    pub(crate) generate: Vec<usize>,
    /// Tokens that the cache holds before decode is measured
    #[arg(long, value_delimiter = ',', default_value = "0", value_name = "N,..")]
    pub(crate) depth: Vec<usize>,
    /// Also measure decode in a copy of the cache (a snapshot) that shares the tokens of --depth
    #[arg(long, requires = "depth")]
    pub(crate) snapshot: bool,
    /// Also measure a beam search of N beams, beside a batch of N rows; the ratio is to the batch
    #[arg(long, value_name = "N")]
    pub(crate) num_beams: Option<usize>,
    /// Draw the tokens of decode at this temperature, from the 50 likeliest [default: the likeliest token]
    #[arg(short, long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Repetitions to count; one more runs first, compiles kernels and is reported as warm-up
    #[arg(short, long, default_value_t = 5, value_name = "N")]
    pub(crate) repetitions: usize,
    /// Format of the report
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    pub(crate) output: BenchOutput,
    /// Print the figures of another runtime beside these: a file of tools/bench_transformers.py
    #[arg(long, value_name = "FILE")]
    pub(crate) against: Option<PathBuf>,
}

const WEIGHTS: &str = "The model is compared with itself as it is stored: name the original, in 16 or 32 bits. On the CPU, mixtures \
                       with packed formats are measured with --exact and without. Up to three models are in memory.";

fn weights_help() -> String {
    let default = kiln::expert::probe::MIXTURES.map(Mixture::name).join(",");
    format!(
        "Measure packed weights instead of caches, in these mixtures, or in nf4; see `kiln quantize --help` [default: {default}]"
    )
}

#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Text to measure on [default: the model writes one]
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Maximum number of tokens to measure on
    #[arg(long, default_value_t = 2048, value_name = "N")]
    pub(crate) tokens: usize,
    /// Tokens of one sequence; the cache is reset after them [default: the model's positions, at most 2048, or 512 with --weights]
    #[arg(long, alias = "window", value_name = "N")]
    pub(crate) ctx: Option<usize>,
    /// Caches to measure; see `kiln caches` [default: each format at each width]
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    pub(crate) cache: Vec<String>,
    #[arg(long, value_name = "NAME,..", num_args = 0..=1, require_equals = true, value_delimiter = ',')]
    #[arg(value_parser = crate::quantize::mixture, conflicts_with_all = ["cache", "exact", "offload_experts"])]
    #[arg(help = weights_help(), long_help = format!("{}\n\n{WEIGHTS}", weights_help()))]
    pub(crate) weights: Option<Vec<Mixture>>,
    /// Also measure which kinds of tensors, and which ten tensors, lose most in the smallest of the mixtures
    #[arg(long, requires = "weights")]
    pub(crate) per_tensor: bool,
    /// Write a chart of loss against bytes to this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DetectArgs {
    /// The text, without its prompt; `-` or nothing reads it from standard input
    pub(crate) text: Option<String>,
    /// The model that may have written it [default: the demo model that comes with Kiln]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub(crate) file: Option<PathBuf>,
    /// The watermarking_config that it was written with: JSON, or a file of it [default: the model's]
    #[arg(short, long, value_name = "JSON|FILE")]
    pub(crate) watermark: Option<String>,
    /// The z-score above which a text has the watermark
    #[arg(long, default_value_t = 3.0, value_name = "Z", allow_negative_numbers = true)]
    pub(crate) z_threshold: f64,
    /// Count a sequence of tokens once, however often it occurs; SynthID always does
    #[arg(long)]
    pub(crate) ignore_repeated_ngrams: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchOutput {
    /// A Markdown table
    Md,
    /// Comma-separated values
    Csv,
    /// One JSON object
    Json,
}
