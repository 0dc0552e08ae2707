//! `kiln conformance`

use std::{fs, process::ExitCode};

use kiln::{Error, Result, device};
use kiln_testkit::conformance::{self, Line, Setup};

use crate::{args::ConformanceArgs, display};

pub(crate) fn run(args: &ConformanceArgs) -> Result<ExitCode> {
    let cache = args.cache.as_deref().map(str::parse).transpose()?;
    let device = device::open(args.place.device)?;
    eprintln!("on {}: {} ({})", device.info.name, device.info.adapter, device.info.api);
    let setup = Setup { device, kernels: args.place.kernels, cache, offload: args.offload };
    let mut lines: Vec<Line> = Vec::new();
    let summary = conformance::run(&args.folder, &args.filter, &setup, &mut |line| {
        display::say(line);
        lines.push(line.clone());
    })?;
    if lines.is_empty() {
        let why = format!("no case of {} has `{}` in its name", args.folder.display(), args.filter);
        return Err(Error::Setting { name: "--filter", why });
    }
    if let Some(path) = &args.json {
        let report = serde_json::json!({
            "device": setup.device.info.name.to_string(),
            "adapter": setup.device.info.adapter,
            "summary": summary,
            "cases": lines,
        });
        fs::write(path, format!("{report:#}\n"))
            .map_err(|e| Error::File { path: path.clone(), why: format!("cannot be written: {e}") })?;
    }
    display::say(summary);
    Ok(if summary.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
