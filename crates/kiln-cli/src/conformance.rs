//! `kiln conformance`

use std::process::ExitCode;

use kiln::{Error, Plan, device, expert::files};
use kiln_testkit::conformance::{self, Line, Setup};

use crate::{
    args::ConformanceArgs,
    output::{Result, note, say},
};

pub(crate) fn run(args: &ConformanceArgs) -> Result<ExitCode> {
    let cache = args.cache.as_deref().map(Plan::named).transpose()?;
    args.json.as_deref().map_or(Ok(()), files::check_writable)?;
    let device = device::open(args.place.device)?;
    if args.folder.is_dir() {
        note(format_args!("on {}: {} ({})", device.info.name, device.info.adapter, device.info.api));
    }
    let setup = Setup {
        kernels: args.place.kernels,
        cache,
        offload: args.offload,
        resident_experts: args.offload_experts,
        ..Setup::on(&device)
    };
    let mut lines: Vec<Line> = Vec::new();
    let summary = conformance::run(&args.folder, &args.filter, &setup, &mut |line| {
        lines.push(line.clone());
        say(line)
    })?;
    if lines.is_empty() {
        let why = format!("no case of {} has `{}` in its name", args.folder.display(), args.filter);
        return Err(Error::Setting { name: "--filter", why }.into());
    }
    say(summary)?;
    if let Some(path) = &args.json {
        let report = serde_json::json!({
            "device": setup.device.info.name.to_string(),
            "adapter": setup.device.info.adapter,
            "summary": summary,
            "cases": lines,
        });
        files::write(path, format!("{report:#}\n").as_bytes())?;
    }
    Ok(if summary.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
