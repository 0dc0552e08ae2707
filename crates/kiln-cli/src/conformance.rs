//! `kiln conformance`

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use clap::Args;
use kiln::{
    Error, Offload, Plan,
    device::DeviceName,
    expert::{
        files::{self, FolderSource},
        kernels::Choice,
        read_back::block_on,
    },
};
use kiln_testkit::conformance::{self, Line, Setup};

use crate::{
    load,
    output::{Result, note, say},
};

#[derive(Debug, Args)]
pub(crate) struct ConformanceArgs {
    /// Folder of fixtures: cases.json, tensors.safetensors, models/
    folder: PathBuf,
    #[command(flatten)]
    place: ConformancePlaceArgs,
    /// Run the cases of the `dynamic` cache with this cache; the results must be the same
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    cache: Option<String>,
    /// Keep layers in host memory: `all`, `full` for those without a window, or `layers=N` for all but the
    /// last N; the results must be the same
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    offload: Option<Offload>,
    /// Keep the experts of mixtures in host memory, except the N last used per block; the results must be the
    /// same
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    offload_experts: Option<usize>,
    /// Compute the experts of mixtures on this device: cpu; the results must be the same
    #[arg(long, value_name = "DEVICE")]
    experts: Option<DeviceName>,
    /// Run only the cases whose MODEL/CASE contains this
    #[arg(long, default_value = "", value_name = "SUBSTRING")]
    filter: String,
    /// Write the report to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Where cases run. The type is always float32, like that of the recordings.
#[derive(Debug, Args)]
pub(crate) struct ConformancePlaceArgs {
    /// auto, cpu, wgpu[:INDEX] or cuda[:INDEX]; see `kiln devices`
    ///
    /// With several, such as `cuda,cpu`, each computes one layer, and the last one the rest.
    #[arg(
        short,
        long,
        env = "KILN_DEVICE",
        default_value = "auto",
        value_delimiter = ',',
        value_name = "DEVICE,.."
    )]
    device: Vec<DeviceName>,
    /// Implementation of each kernel: auto, reference, wgsl or cube
    #[arg(long, default_value = "auto", value_name = "WHICH")]
    kernels: Choice,
}

pub(crate) fn run(args: &ConformanceArgs) -> Result<ExitCode> {
    let cache = args.cache.as_deref().map(Plan::named).transpose()?;
    args.json.as_deref().map_or(Ok(()), files::check_writable)?;
    let mut devices = load::open_all(&args.place.device, None)?;
    if args.folder.is_dir() {
        for device in &devices {
            note(format_args!("on {}: {} ({})", device.info.name, device.info.adapter, device.info.api));
        }
    }
    let device = devices.remove(0);
    let setup = Setup {
        kernels: args.place.kernels,
        cache,
        offload: args.offload,
        resident_experts: args.offload_experts,
        experts_on: args.experts,
        further: devices,
        ..Setup::on(&device)
    };
    let mut lines: Vec<Line> = Vec::new();
    let mut report = |line: &Line| {
        lines.push(line.clone());
        say(line)
    };
    let folder = Arc::new(FolderSource::new(&args.folder));
    let mut wanted = |name: &str| name.contains(&args.filter);
    let summary = block_on(conformance::run(folder, &mut wanted, &setup, &mut report))?;
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
