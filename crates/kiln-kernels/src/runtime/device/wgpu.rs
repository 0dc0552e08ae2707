//! Adapters of Vulkan, Metal and DX12, through wgpu.
//!
//! OpenGL is excluded, because references of kernels silently give wrong results there. One cause: `a % b` of
//! negative integers is undefined in GLSL, naga 30 translates WGSL's to it, and drivers compute it unsigned,
//! so that -99 % 7 is 3 and not -1. There are others: references that take no remainder of negative integers
//! still fail conformance.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use burn::tensor::{
    Device,
    wgpu::{WgpuSetup, wgpu},
};

use crate::runtime::device::{
    info::{DeviceClass, DeviceInfo, DeviceName, MatrixUnits},
    system,
};

#[cfg(target_family = "wasm")]
pub(super) mod browser;
#[cfg(not(target_family = "wasm"))]
mod native;

#[cfg(target_family = "wasm")]
pub(super) use self::browser::{infos, opened_before as open};
#[cfg(not(target_family = "wasm"))]
pub(super) use self::native::{infos, open};

/// Launches per submission to the driver. A decode step of a large model has a few hundred, and each
/// submission takes as long as many of them.
const LAUNCHES_A_SUBMISSION: usize = 256;

/// Features for shaders that use matrix units. cubecl requests everything that the adapter has.
const MATRIX_UNITS: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::SUBGROUP);

/// Bytes of workgroup memory that these shaders may use.
const MATRIX_MEMORY: u32 = 32 << 10;

/// Vendors' numbers in the PCI registry.
const NVIDIA: u32 = 0x10de;
const INTEL: u32 = 0x8086;

/// Devices opened so far, by their index.
static OPENED: Mutex<BTreeMap<usize, Handles>> = Mutex::new(BTreeMap::new());

/// A device that was opened.
struct Handles {
    device: Device,
    setup: WgpuSetup,
    /// See `subnormals.rs`.
    keeps_subnormals: bool,
}

/// Applies `read` to the handles of a device that [`open`](fn@crate::device::open) opened.
fn known<T>(device: &Device, read: impl FnOnce(&mut Handles) -> T) -> Option<T> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.values_mut().find(|handles| handles.device == *device).map(read)
}

/// Destroys a device, as if the driver had lost it.
pub(crate) fn lose(device: &Device) {
    known(device, |handles| handles.setup.device.destroy());
}

/// Whether a device unpacks subnormal float16 numbers; `false` for one that [`open`](fn@crate::device::open)
/// did not open.
pub(crate) fn keeps_subnormals(device: &Device) -> bool {
    known(device, |handles| handles.keeps_subnormals).unwrap_or(false)
}

/// Sets the result of [`keeps_subnormals`] from now on, and returns the previous one.
pub(crate) fn set_keeps_subnormals(device: &Device, are_kept: bool) -> Option<bool> {
    known(device, |handles| std::mem::replace(&mut handles.keeps_subnormals, are_kept))
}

/// The largest float16 matrices with float32 sums that shaders know: square ones, or those with half as many
/// rows of the first factor, which Intel's GPUs have.
fn matrix_units_of(adapter: &wgpu::Adapter) -> Option<MatrixUnits> {
    use wgpu::CooperativeScalarType::{F16, F32};

    let info = adapter.get_info();
    // wgpu reports 4 for Metal, but matrices belong to SIMD groups, which have 32 threads.
    let threads = if info.backend == wgpu::Backend::Metal { 32 } else { info.subgroup_min_size };
    let all = adapter.cooperative_matrix_properties().into_iter();
    let taken = all.filter(|matrix| {
        let sizes = (matrix.m_size, matrix.n_size, matrix.k_size);
        let is_known = matches!(sizes, (8, 8, 8) | (16, 16, 16) | (8, 16, 16));
        is_known && matrix.ab_type == F16 && matrix.cr_type == F32 && !matrix.saturating_accumulation
    });
    let (size, height) = taken.map(|matrix| (matrix.n_size, matrix.m_size)).max()?;
    let has_memory = adapter.limits().max_compute_workgroup_storage_size >= MATRIX_MEMORY;
    let beside_lanes = info.vendor == NVIDIA;
    let units = MatrixUnits { height, size, threads, beside_lanes };
    (has_memory && adapter.features().contains(MATRIX_UNITS)).then_some(units)
}

/// Describes an adapter. The caller gives it a number.
fn info_of(adapter: &wgpu::Adapter, class: DeviceClass, memory: Option<u64>) -> DeviceInfo {
    let (info, features) = (adapter.get_info(), adapter.features());
    let subgroups = features.contains(wgpu::Features::SUBGROUP);
    DeviceInfo {
        name: DeviceName::Wgpu(None),
        class,
        adapter: info.name,
        driver: driver_of(&info.driver, &info.driver_info, system::version),
        api: format!("{:?}", info.backend),
        memory,
        f16: features.contains(wgpu::Features::SHADER_F16),
        subgroups: subgroups.then_some((info.subgroup_min_size, info.subgroup_max_size)),
        matrix_units: matrix_units_of(adapter),
        few_registers: info.vendor == INTEL,
        largest_binding: largest_binding_of(&adapter.limits()),
    }
}

/// The driver with its version; if the API reports neither, the operating system that the driver is a part
/// of.
fn driver_of(driver: &str, version: &str, system: impl FnOnce() -> Option<String>) -> String {
    match format!("{driver} {version}").trim() {
        "" => system().map_or_else(|| "unknown".to_owned(), |system| format!("of {system}")),
        driver => driver.to_owned(),
    }
}

/// Bytes of the largest tensor. Shaders count elements in 32 bits, although Metal binds more.
fn largest_binding_of(limits: &wgpu::Limits) -> usize {
    let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    usize::try_from(largest.min(u64::from(u32::MAX))).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_without_a_name_is_described_by_the_system() {
        let system = || Some("macOS 15.1 Sequoia".to_owned());
        assert_eq!(driver_of("", "", system), "of macOS 15.1 Sequoia");
        assert_eq!(driver_of("", "", || None), "unknown");
        assert_eq!(driver_of("radv", "Mesa 26.0", system), "radv Mesa 26.0");
    }

    #[test]
    fn the_largest_binding_fits_in_32_bits() {
        let limits = wgpu::Limits {
            max_storage_buffer_binding_size: 1 << 34,
            max_buffer_size: 1 << 35,
            ..wgpu::Limits::default()
        };
        assert_eq!(largest_binding_of(&limits), u32::MAX as usize);
        let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 27, ..limits };
        assert_eq!(largest_binding_of(&limits), 1 << 27);
    }
}
