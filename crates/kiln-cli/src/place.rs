//! Options of all commands that load a model: device, number types and memory.

use std::path::PathBuf;

use clap::Args;
use kiln::{ArithmeticChoice, DtypeChoice, Layers, Mixture, device::DeviceName, expert::kernels::Choice};

use crate::parse;

/// Names of [`PlaceArgs`], which a command that asks a server refuses. That of the device is not among them,
/// because the environment may set it.
pub(crate) const OPTIONS: [&str; 11] = [
    "layers",
    "dtype",
    "kernels",
    "arithmetic",
    "exact",
    "quant",
    "memory",
    "offload_experts",
    "experts",
    "lora",
    "threads",
];

/// The device on which a model runs, and its number types.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArgs {
    /// auto, cpu, wgpu[:INDEX] or cuda[:INDEX]; see `kiln devices`
    ///
    /// With several, such as `cuda,cpu`, each computes some of the model's layers.
    #[arg(
        short,
        long,
        env = "KILN_DEVICE",
        default_value = "auto",
        value_delimiter = ',',
        value_name = "DEVICE,.."
    )]
    pub(crate) device: Vec<DeviceName>,
    /// Layers on each device: `auto`, N, or N,N,rest [default: auto, if there are several devices]
    ///
    /// The last device computes the rest; after a single GPU, that is the CPU. `auto` puts as many layers on
    /// each device as fit, with the cache of 4,096 tokens.
    #[arg(long, visible_alias = "gpu-layers", value_name = "N,..", value_parser = str::parse::<Layers>)]
    pub(crate) layers: Option<Layers>,
    /// auto, f32, f16 or bf16
    ///
    /// `auto` is f16 on a GPU that computes it, else f32.
    #[arg(long, default_value_t, value_name = "TYPE")]
    pub(crate) dtype: DtypeChoice,
    /// Implementation of each kernel: auto, reference, wgsl or cube
    #[arg(long, hide_short_help = true, default_value = "auto", value_name = "WHICH")]
    pub(crate) kernels: Choice,
    /// Arithmetic of products with packed weights: auto, floats, integers or fastest
    ///
    /// In integers, activations are rounded to 8 bits, with one scale per 32 numbers. `auto` is integers on
    /// the CPU and floats on GPUs. `integers` is for wgpu, too, in passes of up to 16 tokens; longer prompts
    /// and experts stay in floats. `fastest` measures which is faster there when the model is loaded.
    #[arg(long, default_value_t, value_name = "WHICH", conflicts_with = "exact")]
    pub(crate) arithmetic: ArithmeticChoice,
    /// Round no activation to 8 bits: the same as `--arithmetic floats`
    #[arg(long)]
    pub(crate) exact: bool,
    /// Pack the weights when they are loaded, such as q8_0, q4_k_m or nf4; see `kiln quantize --help`
    ///
    /// A file that `kiln quantize` wrote loads faster, with the same numbers. nf4, the format of
    /// bitsandbytes, cannot be written to a file.
    #[arg(long, value_name = "NAME", value_parser = parse::mixture)]
    pub(crate) quant: Option<Mixture>,
    /// Device memory limit, such as `6GiB` [default: 90 % of what the device has]
    ///
    /// With several devices, it is the limit of each but the CPU.
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub(crate) memory: Option<u64>,
    /// Keep the experts of a mixture in host memory, except the N last used per block
    ///
    /// A larger model fits on the device. Each step copies the experts that its tokens are routed to, unless
    /// they are among the N.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) offload_experts: Option<usize>,
    /// Compute the experts of a mixture on this device: cpu [default: that of the model]
    ///
    /// For a model that is too large for the GPU, which computes the rest. The weights of the experts stay in
    /// host memory.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) experts: Option<DeviceName>,
    /// Change the model by a LoRA adapter, a folder of peft, times SCALE [default: 1]
    ///
    /// May be given several times.
    #[arg(long, value_name = "DIR[=SCALE]", value_parser = parse::adapter)]
    pub(crate) lora: Vec<(PathBuf, f32)>,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
}
