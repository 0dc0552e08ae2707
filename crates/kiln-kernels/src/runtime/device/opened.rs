//! The open GPUs, and the properties that launches look up.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use burn::tensor::Device;

#[cfg(feature = "wgpu")]
use crate::runtime::device::info::DeviceClass;
use crate::runtime::device::info::{DeviceName, MatrixUnits, Opened};

/// GPUs opened so far: Burn initialises each once per process.
static GPUS: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());

/// A GPU that was opened.
struct Gpu {
    opened: Opened,
    /// Kernels that do not use matrix units.
    without_matrix_units: BTreeSet<String>,
}

/// Applies `read` to the first GPU that `is_it` accepts.
fn known<T>(is_it: impl Fn(&Opened) -> bool, read: impl FnOnce(&mut Gpu) -> T) -> Option<T> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    gpus.iter_mut().find(|gpu| is_it(&gpu.opened)).map(read)
}

/// Applies `read` to the GPU of a device that [`open`](fn@crate::device::open) opened.
fn of<T>(device: &Device, read: impl FnOnce(&mut Gpu) -> T) -> Option<T> {
    known(|opened| opened.device == *device, read)
}

/// The GPU with this name, if it was opened.
pub(super) fn find(name: DeviceName) -> Option<Opened> {
    known(|opened| opened.info.name == name, |gpu| gpu.opened.clone())
}

/// Remembers a GPU that was opened, unless one of its name is known. Returns the known one.
pub(super) fn add(opened: Opened) -> Opened {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = gpus.iter().find(|gpu| gpu.opened.info.name == opened.info.name) {
        return gpu.opened.clone();
    }
    gpus.push(Gpu { opened: opened.clone(), without_matrix_units: BTreeSet::new() });
    opened
}

/// Replaces the device of a GPU that was lost.
#[cfg(all(feature = "wgpu", not(target_family = "wasm")))]
pub(super) fn replace(lost: &Device, device: &Device) {
    of(lost, |gpu| gpu.opened.device = device.clone());
}

/// Whether a device that was reopened is a software GPU.
#[cfg(feature = "wgpu")]
pub(crate) fn is_software(device: &Device) -> bool {
    of(device, |gpu| gpu.opened.info.class == DeviceClass::Software).unwrap_or(false)
}

/// Bytes of the largest tensor that a kernel can be given, on a device that [`open`](fn@crate::device::open)
/// opened.
#[cfg(feature = "wgpu")]
pub(crate) fn largest_binding(device: &Device) -> Option<usize> {
    of(device, |gpu| gpu.opened.info.largest_binding)
}

/// The matrix units for a kernel of a device that [`open`](fn@crate::device::open) opened.
pub(crate) fn matrix_units(device: &Device, kernel: &str) -> Option<MatrixUnits> {
    of(device, |gpu| match gpu.without_matrix_units.contains(kernel) {
        true => None,
        false => gpu.opened.info.matrix_units,
    })?
}

/// Sets the result of [`matrix_units`] from now on.
pub(super) fn set_matrix_units(device: &Device, units: Option<MatrixUnits>) {
    of(device, |gpu| gpu.opened.info.matrix_units = units);
}

/// Whether lanes of a device that [`open`](fn@crate::device::open) opened have few registers.
pub(crate) fn has_few_registers(device: &Device) -> bool {
    of(device, |gpu| gpu.opened.info.few_registers).unwrap_or(false)
}

/// Sets the result of [`has_few_registers`] from now on.
pub(super) fn set_few_registers(device: &Device, are_few: bool) {
    of(device, |gpu| gpu.opened.info.few_registers = are_few);
}

/// Makes `kernels` do without matrix units from now on.
pub(super) fn leave_out_matrix_units(device: &Device, kernels: impl IntoIterator<Item = String>) {
    of(device, |gpu| gpu.without_matrix_units.extend(kernels));
}
