//! The one module with `unsafe`. Each function says what it trusts.
#![allow(unsafe_code, reason = "everything else is forbidden to; see the lint table of the workspace")]

use burn::{
    backend::{Backend, BackendTypes, Dispatch},
    tensor::Device,
};
use libloading::Library;

use crate::{Result, device_state::DeviceState};

/// Whether the system's loader finds the shared library `name`.
///
/// Trusts what the library does when it is loaded, as using it would.
pub fn can_load(name: &str) -> bool {
    // SAFETY: see above; nothing of it is called.
    unsafe { Library::new(name) }.is_ok()
}

/// Bytes of each heap of an adapter's memory, and whether it is the device's own; none where it is no adapter of Vulkan.
///
/// Trusts that wgpu's handles are those of the adapter, which lives as long as this borrows it.
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
        // The first flag says that a heap is the device's own.
        heaps.map(|heap| (heap.size, heap.flags.as_raw() & 1 == 1)).collect()
    }
    #[cfg(not(any(target_os = "linux", target_os = "windows", target_os = "android")))]
    {
        _ = adapter;
        Vec::new()
    }
}

/// Leave to use extensions of wgpu that it calls experimental: matrix units.
///
/// Trusts that what is there of them is what Kiln takes it for, as cubecl does for every device that it opens.
#[cfg(feature = "wgpu")]
pub fn experimental_features() -> burn::tensor::wgpu::wgpu::ExperimentalFeatures {
    // SAFETY: see above.
    unsafe { burn::tensor::wgpu::wgpu::ExperimentalFeatures::enabled() }
}

/// A graph of launches of the device, as Burn holds it.
pub type Graph = <Dispatch as BackendTypes>::GraphPrimitive;

/// Executes what was recorded, once.
///
/// Trusts that every tensor which the recorded launches read or wrote still exists and was not replaced, and that only this
/// thread uses them. The runtime itself keeps their memory from being given to others while the graph exists, so a caller who
/// breaks this gets wrong numbers, not a crash.
///
/// # Errors
/// What the device says.
pub fn replay(device: &Device, graph: &Graph) -> Result<()> {
    let state = DeviceState::of(device);
    // SAFETY: see above; the step that owns a recording holds the tensors, or borrows their owners.
    let replayed = state.caught(|| unsafe { Dispatch::graph_replay(device.as_dispatch(), graph) })?;
    replayed.map_err(|e| state.error(e))
}
