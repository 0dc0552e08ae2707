//! The command line. Bad input is reported in one sentence, with exit code 2.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use clap::{CommandFactory, Parser};

mod allocator;
mod bench;
mod caches;
mod chat;
mod cli;
mod client;
mod conformance;
mod detect;
mod devices;
mod display;
mod doctor;
mod embed;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod interrupt;
mod load;
mod man;
mod memory;
mod output;
mod parse;
mod place;
mod probe;
mod quantize;
mod run;
mod serve;
mod settings;
mod transcribe;
mod wayland;

use cli::{Cli, Command};
use output::{Failure, Result, print};

fn main() -> ExitCode {
    // Libraries log nothing unless asked to: `KILN_LOG=kiln=debug`, or `trace`.
    let filter = tracing_subscriber::EnvFilter::try_from_env("KILN_LOG");
    let filter = match (filter, "ureq_proto::util=debug".parse(), "tokenizers::tokenizer=debug".parse()) {
        // One library logs the bytes that it sends, which include the token of the hub; the other one logs
        // texts. These directives are more specific than any from the user.
        (Ok(filter), Ok(bytes), Ok(texts)) => filter.add_directive(bytes).add_directive(texts),
        _ => "off,kiln=warn,kiln::self_test=info".into(),
    };
    let colours =
        io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(colours)
        // The logger would panic if standard error is closed.
        .log_internal_errors(false)
        .without_time()
        .init();

    wayland::silence();
    interrupt::handle();

    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => return explain(&message),
    };
    dispatch(&cli).unwrap_or_else(|failure| failure.report(&Cli::command()))
}

fn dispatch(cli: &Cli) -> Result<ExitCode> {
    if let Some(name) = std::env::var_os("KILN_INSTRUCTIONS") {
        kiln::device::limit_instructions(&name.to_string_lossy())?;
    }
    match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Caches(args) => caches::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Conformance(args) => conformance::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Probe(args) => probe::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Transcribe(args) => transcribe::run(args),
        Command::Embed(args) => embed::run(args),
        Command::Detect(args) => detect::run(args),
        #[cfg(feature = "hub")]
        Command::Pull(args) => hub::pull(args),
        #[cfg(feature = "hub")]
        Command::List(args) => hub::list(args),
        #[cfg(feature = "hub")]
        Command::Remove(args) => hub::remove(args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "kiln", &mut script);
            print(String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { command } => man::run(command.as_deref()),
    }
}

/// Prints help, or an error in the arguments.
fn explain(message: &clap::Error) -> ExitCode {
    let code = ExitCode::from(u8::try_from(message.exit_code()).unwrap_or(1));
    match message.print() {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Failure::Output("the help", e).report(&Cli::command())
        }
        _ => code,
    }
}
