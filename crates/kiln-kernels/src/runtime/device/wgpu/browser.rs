//! The adapter that a browser gives.

use std::sync::{Arc, PoisonError};

use burn::tensor::{Device, wgpu::wgpu};
use kiln_core::{Result, device_state::DeviceState};

use super::{Handles, LAUNCHES_A_SUBMISSION, OPENED, info_of};
use crate::runtime::device::{
    info::{DeviceClass, DeviceInfo, DeviceName, Opened, unavailable},
    opened, subnormals,
};

/// Opens the device of the browser. [`open`](fn@crate::device::open) finds it from then on.
///
/// # Errors
/// [`Error::Device`](kiln_core::Error::Device) if the browser has none.
pub(in crate::runtime::device) async fn open() -> Result<Opened> {
    let name = DeviceName::Wgpu(Some(0));
    if let Some(opened) = opened::find(name) {
        return Ok(opened);
    }
    let options = Device::wgpu_options().tasks_max(LAUNCHES_A_SUBMISSION);
    let (device, setup) = options.init_with_setup_async().await.map_err(|e| unavailable(name, e))?;
    let state = DeviceState::of(&device);
    setup.device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        tracing::error!(target: "kiln", "{error}");
        // A panic would end the program, so generations learn of it as of refused memory: nothing that was
        // computed since is trusted.
        state.report_refusal();
    }));
    let class = match setup.adapter.get_info().device_type {
        wgpu::DeviceType::Cpu => DeviceClass::Software,
        // A browser does not tell which GPU it is, nor how much memory it has.
        _ => DeviceClass::Integrated,
    };
    let info = DeviceInfo { name, ..info_of(&setup.adapter, class, None) };
    let keeps_subnormals = subnormals::are_kept(&device).await;
    let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    all.entry(0).or_insert(Handles { device: device.clone(), setup, keeps_subnormals });
    Ok(opened::add(Opened { device, info }))
}

/// Lists the device that was opened.
pub(in crate::runtime::device) fn infos() -> Result<Vec<DeviceInfo>> {
    opened_before(None).map(|opened| vec![opened.info])
}

/// Returns the device that was opened.
pub(in crate::runtime::device) fn opened_before(index: Option<usize>) -> Result<Opened> {
    let why = "a browser opens its only device asynchronously; await `device::open_async` first";
    opened::find(DeviceName::Wgpu(Some(index.unwrap_or(0))))
        .ok_or_else(|| unavailable(DeviceName::Wgpu(index), why))
}
