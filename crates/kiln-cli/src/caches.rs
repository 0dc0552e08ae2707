//! `kiln caches`: the values of `--cache`.

use std::process::ExitCode;

use clap::Args;
use kiln::expert::STRATEGIES;
use serde_json::json;

use crate::{
    display::table,
    output::{Result, say},
};

#[derive(Debug, Args)]
pub(crate) struct CachesArgs {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CachesArgs) -> Result<ExitCode> {
    if args.json {
        let caches = STRATEGIES.iter().map(|strategy| {
            let settings = strategy.settings.iter().map(|&(key, meaning)| (key.to_owned(), json!(meaning)));
            json!({
                "name": strategy.name,
                "aliases": strategy.aliases,
                "offloaded_aliases": strategy.offloaded_aliases,
                "summary": strategy.summary,
                "settings": settings.collect::<serde_json::Map<_, _>>(),
            })
        });
        say(format_args!("{:#}", caches.collect::<serde_json::Value>()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
    let mut caches = vec![row(["cache", "also called", "what it does"])];
    let mut settings = vec![row(["cache", "setting", "meaning"])];
    for strategy in STRATEGIES {
        let offloaded = strategy.offloaded_aliases.iter().map(|alias| format!("{alias} with --offload"));
        let aliases: Vec<String> =
            strategy.aliases.iter().map(|&alias| alias.to_owned()).chain(offloaded).collect();
        caches.push(row([strategy.name, &aliases.join(", "), strategy.summary]));
        for (key, meaning) in strategy.settings {
            settings.push(row([strategy.name, key, meaning]));
        }
    }
    say(format_args!(
        "{}\n\nSettings follow the name: --cache sink:window=512,sinks=4\n\n{}",
        table(&caches),
        table(&settings)
    ))?;
    Ok(ExitCode::SUCCESS)
}
