//! `kiln devices`

use std::process::ExitCode;

use clap::Args;
use kiln::device::{self, DeviceInfo, DeviceName};

use crate::{
    display,
    output::{Result, say},
};

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DevicesArgs) -> Result<ExitCode> {
    let (found, missing) = device::list();
    if args.json {
        let devices: Vec<_> = found.iter().map(json).collect();
        say(format_args!("{:#}", serde_json::Value::from(devices)))?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = [
        "device",
        "class",
        "adapter",
        "api",
        "driver",
        "memory",
        "f16",
        "subgroups",
        "matrix units",
        "largest binding",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(found.iter().map(row));
    say(format_args!("{}", display::table(&rows)))?;
    if let Ok(auto) = device::open(DeviceName::Auto) {
        say(format_args!("\nauto is {}", auto.info.name))?;
    }
    for why in missing {
        say(why)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(info: &DeviceInfo) -> Vec<String> {
    let unknown = || "-".to_owned();
    vec![
        info.name.to_string(),
        info.class.to_string(),
        info.adapter.clone(),
        info.api.clone(),
        info.driver.clone(),
        info.memory.map_or_else(unknown, display::bytes),
        if info.f16 { "yes" } else { "no" }.to_owned(),
        info.subgroups.map_or_else(unknown, |(least, most)| match least == most {
            true => least.to_string(),
            false => format!("{least} to {most}"),
        }),
        info.matrix_units.map_or_else(unknown, |units| units.to_string()),
        match info.largest_binding {
            usize::MAX => "any".to_owned(),
            limit => display::bytes(limit as u64),
        },
    ]
}

fn json(info: &DeviceInfo) -> serde_json::Value {
    serde_json::json!({
        "device": info.name.to_string(),
        "class": info.class.to_string(),
        "adapter": info.adapter,
        "api": info.api,
        "driver": info.driver,
        "memory": info.memory,
        "f16": info.f16,
        "subgroups": info.subgroups,
        "matrix_units": info.matrix_units.map(|units| units.to_string()),
        "largest_binding": (info.largest_binding != usize::MAX).then_some(info.largest_binding),
    })
}
