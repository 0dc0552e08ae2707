//! The CPU as a device.

use burn::tensor::Device;
use kiln_core::Result;

use crate::runtime::device::{
    info::{DeviceClass, DeviceInfo, DeviceName, Opened},
    system::{memory, threads},
};

pub(super) fn info() -> Result<DeviceInfo> {
    use sysinfo::{CpuRefreshKind, RefreshKind, System};

    let system = System::new_with_specifics(RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing()));
    let brand = match cfg!(target_family = "wasm") {
        true => "WebAssembly",
        false => system.cpus().first().map_or("", |cpu| cpu.brand().trim()),
    };
    Ok(DeviceInfo {
        name: DeviceName::Cpu,
        class: DeviceClass::Cpu,
        adapter: match threads() {
            1 => format!("{brand} (1 thread)"),
            threads => format!("{brand} ({threads} threads)"),
        },
        driver: "burn-flex".to_owned(),
        api: format!("native, {}", kiln_simd::best().name()),
        memory: memory(),
        f16: false,
        subgroups: None,
        matrix_units: None,
        few_registers: false,
        largest_binding: usize::MAX,
    })
}

pub(super) fn open() -> Result<Opened> {
    Ok(Opened { device: Device::flex(), info: info()? })
}
