//! Standard output and standard error, and the ways in which a command can fail.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
    process::ExitCode,
};

use kiln::Error;

/// Reason for which a command ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    Kiln(Error),
    /// A model could not be downloaded from the hub.
    #[cfg(feature = "hub")]
    Hub(kiln::hub::Error),
    /// No file has this name, and the hub has no such model either.
    #[cfg(feature = "hub")]
    Nowhere(String, kiln::hub::Error),
    /// Output could not be written to the named stream.
    Output(&'static str, io::Error),
    /// The reader of standard output closed it (`| head`). The rest is not needed, and this is not reported.
    Closed,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Kiln(error)
    }
}

#[cfg(feature = "hub")]
impl From<kiln::hub::Error> for Failure {
    fn from(error: kiln::hub::Error) -> Self {
        Self::Hub(error)
    }
}

impl Failure {
    /// Reports the failure on standard error, and returns the exit code of the process. Settings are named by
    /// the options of `program` that give them.
    pub(crate) fn report(&self, program: &clap::Command) -> ExitCode {
        /// Exit code for errors in the user's input.
        const BAD_INPUT: u8 = 2;

        match self {
            Self::Closed => return ExitCode::SUCCESS,
            Self::Kiln(Error::Setting { name, why }) => {
                // The settings of a cache are not options.
                let why = if *name == "cache" {
                    kiln::expert::plain(why)
                } else {
                    flags(program, &kiln::expert::plain(why))
                };
                note(format_args!("error: {}: {why}", flag(program, name)));
            }
            Self::Kiln(error)
                if matches!(
                    error.cause(),
                    Error::OutOfMemory { .. }
                        | Error::Prompt { .. }
                        | Error::TooLong { .. }
                        | Error::Full { .. }
                ) =>
            {
                note(format_args!("error: {}", flags(program, &plain(error))));
            }
            Self::Kiln(error) => note(format_args!("error: {}", plain(error))),
            #[cfg(feature = "hub")]
            Self::Hub(error) => note(format_args!("error: {}", kiln::expert::plain(&error.to_string()))),
            #[cfg(feature = "hub")]
            Self::Nowhere(name, error) => {
                let why = kiln::expert::plain(&error.to_string());
                note(format_args!("error: no folder or file here is called {name}, and {why}"));
            }
            Self::Output(stream, error) => note(format_args!("error: {stream} cannot be written: {error}")),
        }
        match self {
            Self::Kiln(Error::Execution(_) | Error::DeviceLost(_)) | Self::Output(..) => ExitCode::FAILURE,
            _ => ExitCode::from(BAD_INPUT),
        }
    }
}

/// The option for a setting of the library, or the name of the setting if there is none.
fn flag(program: &clap::Command, setting: &str) -> String {
    let name = setting.replace('_', "-");
    let mut options = program.get_subcommands().flat_map(clap::Command::get_arguments);
    let named = |option: &&clap::Arg| {
        let other = |alias: &&str| *alias == name;
        option.get_long() == Some(&name) || option.get_all_aliases().unwrap_or_default().iter().any(other)
    };
    let long = options.find(named).and_then(clap::Arg::get_long);
    long.map_or_else(|| setting.to_owned(), |long| format!("--{long}"))
}

/// Replaces names of settings in a text by their options.
fn flags(program: &clap::Command, text: &str) -> String {
    let pieces = text.split('`').enumerate().map(|(i, piece)| match (i % 2, flag(program, piece)) {
        (1, option) if option != piece => option,
        (1, _) => format!("`{piece}`"),
        _ => piece.to_owned(),
    });
    pieces.collect()
}

/// Prints a line to standard output.
///
/// # Errors
/// [`Failure::Output`], [`Failure::Closed`].
pub(crate) fn say(line: impl Display) -> Result<()> {
    print(format_args!("{line}\n"))
}

/// Prints to standard output, at once.
///
/// # Errors
/// [`Failure::Output`], [`Failure::Closed`].
pub(crate) fn print(text: impl Display) -> Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::Output("standard output", e),
    })
}

/// Prints a requested report to standard error. A closed stream is not an error.
///
/// # Errors
/// [`Failure::Output`].
pub(crate) fn tell(text: impl Display) -> Result<()> {
    match write!(io::stderr(), "{text}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::Output("standard error", e)),
        _ => Ok(()),
    }
}

/// Prints a line that is not output to standard error. A failure to write it is ignored.
pub(crate) fn note(line: impl Display) {
    _ = writeln!(io::stderr(), "{line}");
}

/// Formats an error for a terminal.
pub(crate) fn plain(error: &Error) -> String {
    kiln::expert::plain(&error.to_string())
}
