//! The command line. Bad input is one sentence and exit code 2.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

mod args;
mod bench;
mod chat;
mod conformance;
mod devices;
mod display;
mod inspect;
mod load;
mod probe;
mod run;

use args::{Cli, Command};

/// Something was wrong with what the user gave.
const BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    // Messages of the libraries below stay silent unless asked for: `KILN_LOG=kiln=debug`, or `trace`.
    let filter = tracing_subscriber::EnvFilter::try_from_env("KILN_LOG");
    let filter = filter.unwrap_or_else(|_| "error,kiln=warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();

    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Conformance(args) => conformance::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Probe(args) => probe::run(args),
        Command::Completions { shell } => {
            clap_complete::generate(*shell, &mut Cli::command(), "kiln", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            match error {
                kiln::Error::Execution(_) | kiln::Error::DeviceLost(_) => ExitCode::FAILURE,
                _ => ExitCode::from(BAD_INPUT),
            }
        }
    }
}
