//! Options of `kiln bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::{
    memory,
    place::{OPTIONS, PlaceArgs},
};

/// Options that a server has no use for.
const OF_STEPS: [&str; 9] = [
    "random",
    "depth",
    "snapshot",
    "num_beams",
    "temperature",
    "repetitions",
    "against",
    "compile",
    "no_compile",
];

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    pub(super) model: Option<PathBuf>,
    /// Random weights for a config: KEY=VALUE,.. as in config.json, such as
    /// `model_type=llama,hidden_size=64,..`, or a file or folder
    ///
    /// Any text architecture. The file is a config.json, or a GGUF file whose weights are not read. Missing
    /// keys take the defaults of Transformers, where there are any.
    #[arg(long, value_name = "CONFIG", conflicts_with = "model")]
    pub(super) random: Option<String>,
    #[command(flatten)]
    pub(super) place: PlaceArgs,
    /// Caches to measure, one after the other; the ratio is to the first; see `kiln caches`
    #[arg(short, long, default_value = "dynamic", value_name = "NAME[:KEY=VALUE,..]")]
    pub(super) cache: Vec<String>,
    /// Capture the decode step once and replay it, where the device supports it [default]
    #[arg(long, conflicts_with = "no_compile")]
    pub(super) compile: bool,
    /// Do not capture the decode step
    #[arg(long)]
    pub(super) no_compile: bool,
    /// Prompt lengths to measure prefill at; 0 skips prefill
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "256", value_name = "N,..")]
    pub(super) prompt: Vec<usize>,
    /// Numbers of tokens to measure decode at; 0 skips decode
    #[arg(short = 'n', long, value_delimiter = ',', default_value = "64", value_name = "N,..")]
    pub(super) generate: Vec<usize>,
    /// Numbers of tokens in the cache before decode is measured
    #[arg(long, value_delimiter = ',', default_value = "0", value_name = "N,..")]
    pub(super) depth: Vec<usize>,
    /// Also measure decode in a copy of the cache (a snapshot) that shares the tokens of --depth
    #[arg(long, requires = "depth")]
    pub(super) snapshot: bool,
    /// Also measure a beam search with N beams and a batch of N rows; the ratio is to the batch
    #[arg(long, value_name = "N")]
    pub(super) num_beams: Option<usize>,
    /// Sample decoded tokens at this temperature, from the 50 likeliest [default: the likeliest token]
    #[arg(short, long, value_name = "T", allow_negative_numbers = true)]
    pub(super) temperature: Option<f32>,
    /// Counted repetitions; one more runs first to compile kernels and is reported as warm-up
    #[arg(short, long, default_value_t = 5, value_name = "N")]
    pub(super) repetitions: usize,
    /// Measure a server of the model instead: tokens a second and latencies by the number of clients
    ///
    /// Each client sends four requests, one after the other, of -p words and -n tokens.
    #[arg(long, conflicts_with_all = OF_STEPS)]
    pub(super) serve: bool,
    /// Measure this server, which speaks OpenAI's API; --model is then the name of one of its models
    #[arg(long, requires = "serve", value_name = "URL", conflicts_with = "cache", conflicts_with_all = OPTIONS)]
    pub(super) url: Option<String>,
    /// Key for --url
    #[arg(long, env = "KILN_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(super) api_key: Option<String>,
    /// Numbers of clients of --serve
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8,16",
        requires = "serve",
        value_name = "N,.."
    )]
    pub(super) clients: Vec<usize>,
    /// Draw tokens a second by the number of clients, as SVG
    #[arg(long, requires = "serve", value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
    /// Format of the report
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    pub(super) output: BenchOutput,
    /// Also print the figures of another runtime, from a file that tools/bench_transformers.py wrote
    #[arg(long, value_name = "FILE")]
    pub(super) against: Option<PathBuf>,
}

impl BenchArgs {
    /// Whether to capture the decode step; `None`: the cache's default.
    pub(super) fn compile(&self) -> Option<bool> {
        memory::compile(self.compile, self.no_compile)
    }
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
