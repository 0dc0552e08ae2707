//! `kiln pull`, `kiln list`, `kiln remove`, and hub names wherever a command takes a model.

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
    time::SystemTime,
};

use clap::Args;
use kiln::{
    Error,
    hub::{self, Hub, Spec, StoredModel},
};
use serde_json::json;

use crate::{
    display,
    output::{Failure, Result, note, say, tell},
};

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// ORG/NAME[:QUANT or FILE][@REVISION], such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B-GGUF:Q8_0
    #[arg(value_name = "MODEL")]
    spec: Spec,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// ORG/NAME removes all of it; with :QUANT, :FILE or @REVISION only that part
    #[arg(value_name = "MODEL")]
    spec: Spec,
    /// Remove without asking
    #[arg(short, long)]
    yes: bool,
}

/// The path of a model: `named` itself if such a file or folder exists, else the path of the model from the
/// hub.
pub(crate) fn located(named: &Path) -> Result<PathBuf> {
    // A name that does not look like one on the hub is a path. Whoever opens it reports what is wrong with
    // it.
    let Some(text) = named.to_str().filter(|_| named.symlink_metadata().is_err()) else {
        return Ok(named.to_owned());
    };
    let spec: Spec = match text.parse() {
        Ok(spec) => spec,
        Err(error) => {
            let names_a_repo =
                text.split_once([':', '@']).is_some_and(|(repo, _)| repo.parse::<Spec>().is_ok());
            return if names_a_repo { Err(error.into()) } else { Ok(named.to_owned()) };
        }
    };
    fetch(&spec).map_err(|error| match error {
        hub::Error::NoRepository { .. }
        | hub::Error::Unreachable { .. }
        | hub::Error::OfflineModel { .. } => Failure::Nowhere(text.to_owned(), error),
        error => error.into(),
    })
}

/// Downloads a model. Shows a progress bar on a terminal.
fn fetch(spec: &Spec) -> hub::Result<PathBuf> {
    let hub = Hub::from_env()?;
    let bar = display::bar("downloading");
    let path = hub.fetch(spec, |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.read);
    });
    bar.finish_and_clear();
    path
}

pub(crate) fn pull(args: &PullArgs) -> Result<ExitCode> {
    say(fetch(&args.spec)?.display())?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn list(args: &ListArgs) -> Result<ExitCode> {
    let hub = Hub::from_env()?;
    let models = hub.list()?;
    if args.json {
        let seconds =
            |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).ok().map(|since| since.as_secs());
        let model = |model: &StoredModel| {
            json!({
                "model": model.repo,
                "weights": model.weights,
                "bytes": model.bytes,
                "unfinished": model.unfinished,
                "last_used": model.last_used.and_then(seconds),
            })
        };
        say(format_args!("{:#}", json!(models.iter().map(model).collect::<Vec<_>>())))?;
        return Ok(ExitCode::SUCCESS);
    }
    if models.is_empty() {
        note(format_args!("there are no models in {}; `kiln pull` downloads one", hub.cache().display()));
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["model", "weights", "size", "last used"].map(str::to_owned).to_vec();
    let row = |model: &StoredModel| {
        let weights = if model.weights.is_empty() { "none".to_owned() } else { model.weights.join(", ") };
        let unfinished = if model.unfinished { ", unfinished" } else { "" };
        let used = model.last_used.map_or_else(String::new, ago);
        vec![
            model.repo.clone(),
            kiln::expert::plain(&format!("{weights}{unfinished}")),
            display::bytes(model.bytes),
            used,
        ]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(models.iter().map(row)).collect();
    say(display::table(&rows))?;
    Ok(ExitCode::SUCCESS)
}

/// Formats how many days ago `at` was. A time in the future counts as the current day.
fn ago(at: SystemTime) -> String {
    let days = at.elapsed().map_or(0, |time| time.as_secs() / (24 * 60 * 60));
    match days {
        0 => "today".to_owned(),
        1 => "yesterday".to_owned(),
        days => format!("{days} days ago"),
    }
}

pub(crate) fn remove(args: &RemoveArgs) -> Result<ExitCode> {
    let removal = Hub::from_env()?.removal(&args.spec)?;
    let files =
        if removal.files.len() == 1 { "1 file".to_owned() } else { format!("{} files", removal.files.len()) };
    let what = format!("{}: {files}, {}", args.spec, display::bytes(removal.bytes));
    if !args.yes {
        if !io::stdin().is_terminal() {
            let why = "is needed to remove a model where nobody can be asked".to_owned();
            return Err(Error::Setting { name: "--yes", why }.into());
        }
        tell(format_args!("remove {what}? [y/N] "))?;
        let mut answer = String::new();
        // An answer that cannot be read does not count as yes.
        _ = io::stdin().read_line(&mut answer);
        if !matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
            note("nothing is removed");
            return Ok(ExitCode::SUCCESS);
        }
    }
    removal.run()?;
    note(format_args!("removed {what}"));
    Ok(ExitCode::SUCCESS)
}
