//! `kiln quantize`

use std::{ops::ControlFlow, path::PathBuf, process::ExitCode};

use clap::Args;
use kiln::{Error, LoadProgress, Mixture, expert::files};

use crate::{
    display,
    interrupt::{INTERRUPTED, Interruptible},
    output::{Result, note, say},
    parse,
};

#[derive(Debug, Args)]
pub(crate) struct QuantizeArgs {
    /// A Hugging Face model folder, or a GGUF file
    model: PathBuf,
    /// The GGUF file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[arg(short, long, default_value_t, value_name = "NAME", value_parser = parse::mixture, help = mixtures())]
    quant: Mixture,
    /// Replace the file if it is there
    #[arg(long)]
    force: bool,
}

fn mixtures() -> String {
    let of_files = Mixture::ALL.into_iter().filter(|mixture| mixture.file_type().is_some());
    let names: Vec<_> = of_files.map(Mixture::name).collect();
    format!("Mixture of number formats, as llama.cpp names them: {}", names.join(", "))
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<ExitCode> {
    let QuantizeArgs { model, output, quant, force } = args;
    if !force && output.exists() {
        let why = format!("{} is there; give another name, or --force to replace it", output.display());
        return Err(Error::Setting { name: "--output", why }.into());
    }
    files::check_writable(output)?;
    let work = Interruptible::begin();
    let bar = display::bar("quantizing");
    let done = kiln::quantize(model, output, *quant, |LoadProgress { read, total, .. }| {
        bar.set_length(total);
        bar.set_position(read);
        match work.came() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    bar.finish_and_clear();
    let Some(done) = done? else {
        note("stopped; nothing was written");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let tensors: Vec<_> = done.tensors.iter().map(|(format, count)| format!("{count} in {format}")).collect();
    let bits = 8.0 * done.bytes as f64 / done.parameters.max(1) as f64;
    say(format_args!(
        "{}: {} in {}, {bits:.2} bits a number; tensors: {}",
        output.display(),
        display::count(done.parameters),
        display::bytes(done.bytes),
        tensors.join(", ")
    ))?;
    Ok(ExitCode::SUCCESS)
}
