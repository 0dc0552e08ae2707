//! Opening devices by name.

use kiln_core::{Error, Result};

#[cfg(feature = "cpu")]
use crate::runtime::device::cpu::{info as cpu_info, open as open_cpu};
#[cfg(feature = "cuda")]
use crate::runtime::device::cuda::{infos as cuda_infos, open as open_cuda};
use crate::runtime::device::info::{DeviceClass, DeviceInfo, DeviceName, MatrixUnits, Opened, unavailable};
#[cfg(feature = "cube")]
use crate::runtime::device::opened;
#[cfg(all(feature = "wgpu", target_family = "wasm"))]
use crate::runtime::device::wgpu::browser;
#[cfg(feature = "wgpu")]
use crate::runtime::device::wgpu::{infos as wgpu_infos, open as open_wgpu};

impl Opened {
    /// Makes Kiln's kernels in this process use `units` from now on: the matrix units that the device was
    /// opened with, or none.
    pub fn with_matrix_units(mut self, units: Option<MatrixUnits>) -> Self {
        #[cfg(feature = "cube")]
        opened::set_matrix_units(&self.device, units);
        self.info.matrix_units = units;
        self
    }

    /// Makes Kiln's kernels in this process suppose from now on that lanes have few registers, or many.
    pub fn with_few_registers(mut self, are_few: bool) -> Self {
        #[cfg(feature = "cube")]
        opened::set_few_registers(&self.device, are_few);
        self.info.few_registers = are_few;
        self
    }

    /// Makes the kernels with these names in this process do without matrix units from now on.
    pub fn without_matrix_units_in(self, kernels: impl IntoIterator<Item = String>) -> Self {
        #[cfg(feature = "cube")]
        opened::leave_out_matrix_units(&self.device, kernels);
        #[cfg(not(feature = "cube"))]
        drop(kernels);
        self
    }
}

/// Lists every device of this build and machine, and for each missing kind the reason.
pub fn list() -> (Vec<DeviceInfo>, Vec<Error>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for kind in [cpu_info().map(|info| vec![info]), wgpu_infos(), cuda_infos()] {
        match kind {
            Ok(infos) => found.extend(infos),
            Err(why) => missing.push(why),
        }
    }
    (found, missing)
}

/// Opens the device with this name. Opening one twice gives the same device, unless it was lost: then the
/// result is another device, and launches are submitted to it in smaller batches. A lost CUDA device cannot
/// be reopened in the same process.
///
/// # Errors
/// [`Error::Device`], which says what is missing.
pub fn open(name: DeviceName) -> Result<Opened> {
    match name {
        DeviceName::Auto => open(choose()?),
        DeviceName::Cpu => open_cpu(),
        DeviceName::Wgpu(index) => open_wgpu(index),
        DeviceName::Cuda(index) => open_cuda(index),
    }
}

/// Opens a device. In a browser, which has to await it, this is the only way; everywhere else it is [`open`],
/// and blocks.
///
/// # Errors
/// [`Error::Device`], which says what is missing.
pub async fn open_async(name: DeviceName) -> Result<Opened> {
    #[cfg(all(feature = "wgpu", target_family = "wasm"))]
    if matches!(name, DeviceName::Auto | DeviceName::Wgpu(None | Some(0))) {
        return browser::open().await;
    }
    open(name)
}

/// Chooses the device that `auto` stands for.
fn choose() -> Result<DeviceName> {
    let (found, missing) = list();
    let rank = |info: &DeviceInfo| match (info.class, info.name) {
        (DeviceClass::Discrete, DeviceName::Cuda(_)) => Some(0),
        (DeviceClass::Discrete, _) => Some(1),
        (DeviceClass::Integrated, _) => Some(2),
        (DeviceClass::Virtual, _) => Some(3),
        (DeviceClass::Cpu, _) => Some(4),
        (DeviceClass::Software, _) => None,
    };
    let best = found.iter().filter_map(|info| Some((rank(info)?, info.name))).min_by_key(|(rank, _)| *rank);
    match best {
        Some((_, name)) => Ok(name),
        None => Err(missing.into_iter().next().unwrap_or_else(|| unavailable("auto", "there is no device"))),
    }
}

#[cfg(not(all(feature = "cpu", feature = "wgpu", feature = "cuda")))]
fn not_compiled(device: DeviceName, feature: &str) -> Error {
    unavailable(device, format!("this kiln was built without it; build with `--features {feature}`"))
}

#[cfg(not(feature = "cpu"))]
fn cpu_info() -> Result<DeviceInfo> {
    Err(not_compiled(DeviceName::Cpu, "cpu"))
}

#[cfg(not(feature = "cpu"))]
fn open_cpu() -> Result<Opened> {
    Err(not_compiled(DeviceName::Cpu, "cpu"))
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_infos() -> Result<Vec<DeviceInfo>> {
    Err(not_compiled(DeviceName::Wgpu(None), "wgpu"))
}

#[cfg(not(feature = "wgpu"))]
fn open_wgpu(index: Option<usize>) -> Result<Opened> {
    Err(not_compiled(DeviceName::Wgpu(index), "wgpu"))
}

#[cfg(not(feature = "cuda"))]
fn cuda_infos() -> Result<Vec<DeviceInfo>> {
    Err(not_compiled(DeviceName::Cuda(0), "cuda"))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(index: usize) -> Result<Opened> {
    Err(not_compiled(DeviceName::Cuda(index), "cuda"))
}
