//! The CPU as a device.

use burn::tensor::Device;
use kiln_core::Result;

use crate::runtime::device::{
    info::{DeviceClass, DeviceInfo, DeviceName, Opened},
    system::memory,
};

pub(super) fn info() -> Result<DeviceInfo> {
    use sysinfo::{CpuRefreshKind, RefreshKind, System};

    let system = System::new_with_specifics(RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing()));
    let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).unwrap_or_default();
    Ok(DeviceInfo {
        name: DeviceName::Cpu,
        class: DeviceClass::Cpu,
        adapter: match cfg!(target_family = "wasm") {
            true => "WebAssembly".to_owned(),
            false => format!("{brand} ({} threads)", rayon::current_num_threads()),
        },
        driver: "burn-flex".to_owned(),
        api: format!("native, {}", kiln_simd::best().name()),
        memory: memory(),
        f16: false,
        subgroups: None,
        matrix_units: None,
        largest_binding: usize::MAX,
    })
}

pub(super) fn open() -> Result<Opened> {
    Ok(Opened { device: Device::flex(), info: info()? })
}
