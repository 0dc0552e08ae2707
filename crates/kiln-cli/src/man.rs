//! Manual pages, generated from the text of the help.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_mangen::Man;
use kiln::Error;

use crate::{
    cli::Cli,
    output::{Failure, Result, print},
};

/// Prints the page of one command, or of the whole program.
pub(crate) fn run(name: Option<&str>) -> Result<ExitCode> {
    let mut cli = Cli::command();
    // Gives each command its full name, such as `kiln-run`.
    cli.build();
    let command = match name {
        None => cli,
        Some(name) => cli.find_subcommand(name).cloned().ok_or_else(|| Error::Unknown {
            what: "command",
            name: name.to_owned(),
            known: cli.get_subcommands().map(|command| command.get_name().to_owned()).collect(),
        })?,
    };
    let mut page = Vec::new();
    Man::new(command)
        .source(concat!("kiln ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)
        .map_err(|e| Failure::Output("the page", e))?;
    print(String::from_utf8_lossy(&page))?;
    Ok(ExitCode::SUCCESS)
}
