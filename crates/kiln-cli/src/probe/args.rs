//! Options of `kiln probe`.

use std::path::PathBuf;

use clap::Args;
use kiln::{Mixture, expert::probe::MIXTURES};

use crate::{parse, place::PlaceArgs};

const WEIGHTS: &str = "The model is compared with itself as it is stored: name the original, in 16 or 32 bits. Mixtures whose \
                       products are computed in integers are measured with --exact and without. Up to three models are in memory.";

fn weights_help() -> String {
    let default = MIXTURES.map(Mixture::name).join(",");
    format!(
        "Measure packed weights instead of caches, in these mixtures, or in nf4; see `kiln quantize --help` [default: {default}]"
    )
}

#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    #[arg(short, long, value_name = "MODEL")]
    pub(super) model: Option<PathBuf>,
    #[command(flatten)]
    pub(super) place: PlaceArgs,
    /// Text to measure on [default: the model writes one]
    #[arg(long, value_name = "FILE")]
    pub(super) text: Option<PathBuf>,
    /// Maximum number of tokens to measure on
    #[arg(long, default_value_t = 2048, value_name = "N")]
    pub(super) tokens: usize,
    /// Tokens per sequence; the cache is reset after each [default: the model's positions, at most 2048, or
    /// 512 with --weights]
    #[arg(long, alias = "window", value_name = "N")]
    pub(super) ctx: Option<usize>,
    /// Caches to measure; see `kiln caches` [default: each format at each width]
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    pub(super) cache: Vec<String>,
    #[arg(long, value_name = "NAME,..", num_args = 0..=1, require_equals = true, value_delimiter = ',')]
    #[arg(value_parser = parse::mixture, conflicts_with_all = ["cache", "exact", "offload_experts", "experts"])]
    #[arg(help = weights_help(), long_help = format!("{}\n\n{WEIGHTS}", weights_help()))]
    pub(super) weights: Option<Vec<Mixture>>,
    /// Also measure which kinds of tensors, and which ten tensors, lose most in the smallest mixture
    #[arg(long, requires = "weights")]
    pub(super) per_tensor: bool,
    /// Write a chart of loss against bytes to this SVG file
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(super) json: bool,
}
