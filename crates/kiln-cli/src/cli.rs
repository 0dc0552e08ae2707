//! The commands.

use clap::{Parser, Subcommand};

#[cfg(feature = "hub")]
use crate::hub;
use crate::{
    bench, caches, chat, conformance, detect, devices, doctor, embed, inspect, probe, quantize, run, serve,
    transcribe,
};

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
    Run(run::RunArgs),
    /// Talk with a model
    Chat(chat::ChatArgs),
    /// Answer requests in the form of OpenAI's API
    Serve(serve::ServeArgs),
    /// List the devices of this machine
    Devices(devices::DevicesArgs),
    /// Check the kernels of a device against their references and time them, for a bug report
    Doctor(doctor::DoctorArgs),
    /// Describe the caches and their settings
    Caches(caches::CachesArgs),
    /// Show what a model folder holds, and what fits into memory
    Inspect(inspect::InspectArgs),
    /// Check the tokens and logits against recordings of transformers
    Conformance(conformance::ConformanceArgs),
    /// Measure prefill and decode
    Bench(bench::BenchArgs),
    /// Measure the loss of quantized caches or packed weights on a model, and recommend one
    Probe(probe::ProbeArgs),
    /// Write a model as a GGUF file with packed weights
    Quantize(quantize::QuantizeArgs),
    /// Turn speech into text
    Transcribe(transcribe::TranscribeArgs),
    /// Turn texts into vectors
    Embed(embed::EmbedArgs),
    /// Look for a watermark in a text
    Detect(detect::DetectArgs),
    /// Download a model from the Hugging Face hub
    #[cfg(feature = "hub")]
    Pull(hub::PullArgs),
    /// List the downloaded models
    #[cfg(feature = "hub")]
    List(hub::ListArgs),
    /// Remove a downloaded model
    #[cfg(feature = "hub")]
    Remove(hub::RemoveArgs),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// Print a manual page, to be read with `man -l -`
    Man {
        /// A command, such as run; without it, the page of kiln itself
        command: Option<String>,
    },
}
