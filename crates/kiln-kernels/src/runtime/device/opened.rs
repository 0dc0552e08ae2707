//! The open wgpu devices, and the properties that launches look up.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, PoisonError},
};

use burn::tensor::{Device, wgpu::WgpuSetup};

use crate::runtime::device::info::{DeviceClass, DeviceInfo, MatrixUnits, Opened};

/// Devices opened so far, by their index: Burn initialises a runtime once per process.
pub(super) static OPENED: Mutex<Option<HashMap<usize, Handles>>> = Mutex::new(None);

/// A device that was opened.
pub(super) struct Handles {
    pub(super) opened: Opened,
    pub(super) setup: WgpuSetup,
    /// See `subnormals.rs`.
    pub(super) keeps_subnormals: bool,
    /// Kernels that do not use matrix units.
    pub(super) without_matrix_units: BTreeSet<String>,
}

impl Handles {
    pub(super) fn new(opened: Opened, setup: WgpuSetup, keeps_subnormals: bool) -> Self {
        Self { opened, setup, keeps_subnormals, without_matrix_units: BTreeSet::new() }
    }
}

/// Destroys a device, as if the driver had lost it.
pub(crate) fn lose(device: &Device) {
    known(device, |handles| handles.setup.device.destroy());
}

/// Applies `read` to the handles of a device that [`open`](fn@crate::device::open) opened.
fn known<T>(device: &Device, read: impl FnOnce(&mut Handles) -> T) -> Option<T> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = opened.iter_mut().flat_map(HashMap::values_mut);
    all.find(|handles| handles.opened.device == *device).map(read)
}

fn info<T>(device: &Device, read: impl FnOnce(&DeviceInfo) -> T) -> Option<T> {
    known(device, |handles| read(&handles.opened.info))
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

/// Whether a device that was reopened is a software GPU.
pub(crate) fn is_software(device: &Device) -> bool {
    info(device, |info| info.class == DeviceClass::Software).unwrap_or(false)
}

/// The matrix units for a kernel of a device that [`open`](fn@crate::device::open) opened.
pub(crate) fn matrix_units(device: &Device, kernel: &str) -> Option<MatrixUnits> {
    known(device, |handles| match handles.without_matrix_units.contains(kernel) {
        true => None,
        false => handles.opened.info.matrix_units,
    })?
}

/// Bytes of the largest tensor that a kernel can be given, on a device that [`open`](fn@crate::device::open)
/// opened.
pub(crate) fn largest_binding(device: &Device) -> Option<usize> {
    info(device, |info| info.largest_binding)
}

/// Sets the result of [`matrix_units`] from now on.
pub(super) fn set_matrix_units(device: &Device, units: Option<MatrixUnits>) {
    known(device, |handles| handles.opened.info.matrix_units = units);
}

/// Makes `kernels` do without matrix units from now on.
pub(super) fn leave_out_matrix_units(device: &Device, kernels: impl IntoIterator<Item = String>) {
    known(device, |handles| handles.without_matrix_units.extend(kernels));
}
