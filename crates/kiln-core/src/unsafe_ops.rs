//! The only module with `unsafe`. Each function documents what it trusts.
#![allow(unsafe_code, reason = "everything else is forbidden to; see the lint table of the workspace")]

use burn::{
    backend::{Backend, BackendTypes, Dispatch},
    tensor::Device,
};

use crate::{Result, device_state::DeviceState};

/// Whether the system's loader finds the shared library `name`.
///
/// Trusts the code that the library runs when it is loaded, as using the library would.
#[cfg(feature = "cuda")]
pub fn can_load(name: &str) -> bool {
    // SAFETY: see above; no function of the library is called.
    unsafe { libloading::Library::new(name) }.is_ok()
}

/// Ends the process without what it does at its end in order.
///
/// Drivers and compilers of GPUs free what their threads still use when a process ends in order: NVIDIA's
/// crash, and others may wait for a kernel that hangs.
pub fn exit_at_once(code: i32) -> ! {
    #[cfg(unix)]
    // SAFETY: the function takes any number and does not return.
    unsafe {
        libc::_exit(code)
    }
    // Windows ends the other threads first.
    #[cfg(not(unix))]
    std::process::exit(code)
}

/// Lets the calling thread load kernels while launches are recorded, which CUDA otherwise refuses.
///
/// Trusts that the thread is cubecl's for a device, which keeps what it loads and allocates as long as the
/// graph exists.
///
/// # Errors
/// The driver's error.
#[cfg(feature = "cuda")]
pub fn load_kernels_while_recording() -> Result<()> {
    use cudarc::driver::sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};

    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the function only exchanges a setting of this thread with `mode`.
    let status = unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    status.result().map_err(crate::Error::of_device)
}

/// Returns the size in bytes of each memory heap of an adapter, and whether the heap is device-local; empty
/// if the adapter is not a Vulkan one.
///
/// Trusts that wgpu's handles belong to the adapter, which lives as long as this function borrows it.
#[cfg(feature = "wgpu")]
pub fn vulkan_heaps(adapter: &burn::tensor::wgpu::wgpu::Adapter) -> Vec<(u64, bool)> {
    #[cfg(any(target_os = "linux", target_os = "windows", target_os = "android"))]
    {
        // SAFETY: see above; nothing is destroyed, and the properties are only read.
        let properties = unsafe {
            adapter.as_hal::<burn::tensor::wgpu::wgpu::hal::api::Vulkan>().map(|vulkan| {
                let instance = vulkan.shared_instance().raw_instance();
                instance.get_physical_device_memory_properties(vulkan.raw_physical_device())
            })
        };
        let heaps = properties.iter().flat_map(|properties| properties.memory_heaps_as_slice());
        // The first flag means that a heap is device-local.
        heaps.map(|heap| (heap.size, heap.flags.as_raw() & 1 == 1)).collect()
    }
    #[cfg(not(any(target_os = "linux", target_os = "windows", target_os = "android")))]
    {
        _ = adapter;
        Vec::new()
    }
}

/// Permission to use wgpu extensions that it calls experimental: matrix units.
///
/// Trusts that the extensions that exist behave as Kiln assumes, as cubecl does for every device that it
/// opens.
#[cfg(feature = "wgpu")]
pub fn experimental_features() -> burn::tensor::wgpu::wgpu::ExperimentalFeatures {
    // SAFETY: see above.
    unsafe { burn::tensor::wgpu::wgpu::ExperimentalFeatures::enabled() }
}

/// A graph of the device's launches, as Burn holds it.
pub type Graph = <Dispatch as BackendTypes>::GraphPrimitive;

/// Executes a recorded graph once.
///
/// Trusts that every tensor which the recorded launches read or wrote still exists and was not replaced, and
/// that only this thread uses them. The runtime does not give their memory to others while the graph exists,
/// so a caller who violates this gets wrong numbers, not a crash.
///
/// # Errors
/// The device's error.
pub fn replay(device: &Device, graph: &Graph) -> Result<()> {
    let state = DeviceState::of(device);
    // SAFETY: see above; the step that owns a recording holds the tensors, or borrows their owners.
    let replayed = state.caught(|| unsafe { Dispatch::graph_replay(device.as_dispatch(), graph) })?;
    replayed.map_err(|e| state.error(e))
}
