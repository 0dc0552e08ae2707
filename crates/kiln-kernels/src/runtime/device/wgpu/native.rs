//! Adapters of the machine's drivers.

use std::{
    panic::resume_unwind,
    sync::{Arc, OnceLock},
};

use burn::tensor::{
    Device, DeviceKind,
    wgpu::{WgpuBackend, WgpuSetup, wgpu},
};
use kiln_core::{
    Result,
    device_state::{DeviceState, REFUSAL},
    read_back::block_on,
    unsafe_ops,
};

use super::{Handles, LAUNCHES_A_SUBMISSION, MATRIX_UNITS, OPENED, info_of};
use crate::runtime::device::{
    info::{DeviceClass, DeviceInfo, DeviceName, Opened, unavailable},
    opened, subnormals, system,
};

/// Like [`LAUNCHES_A_SUBMISSION`], on a device that was lost before: one submission may have taken too long
/// for the driver.
const LAUNCHES_AFTER_A_LOSS: usize = 16;

#[derive(Clone)]
struct Adapter {
    info: DeviceInfo,
    backend: WgpuBackend,
    kind: DeviceKind,
}

/// Lists all adapters, in the order of their indices.
pub(in crate::runtime::device) fn infos() -> Result<Vec<DeviceInfo>> {
    let adapters = adapters();
    if adapters.is_empty() {
        let why = "no Vulkan, Metal or DX12 driver offers an adapter (OpenGL is not used: kernels give wrong results \
                   on it; nor is DX12 without dxcompiler.dll); install the GPU's driver, or mesa-vulkan-drivers for a \
                   software device";
        return Err(unavailable(DeviceName::Wgpu(None), why));
    }
    Ok(adapters.into_iter().map(|adapter| adapter.info).collect())
}

/// Opens adapter `index`, or the best one.
pub(in crate::runtime::device) fn open(index: Option<usize>) -> Result<Opened> {
    let name = DeviceName::Wgpu(index);
    let adapters = adapters();
    let number = match index {
        Some(index) => index,
        None => {
            let rank = |adapter: &Adapter| match adapter.info.class {
                DeviceClass::Discrete => 0,
                DeviceClass::Integrated => 1,
                DeviceClass::Virtual => 2,
                DeviceClass::Cpu | DeviceClass::Software => 3,
            };
            let best = adapters.iter().enumerate().min_by_key(|(_, adapter)| rank(adapter));
            best.map_or(0, |(number, _)| number)
        }
    };
    let Some(adapter) = adapters.into_iter().nth(number) else {
        let have = infos()?.len();
        return Err(unavailable(
            name,
            format!("there are {have} adapters, numbered from 0; see `kiln devices`"),
        ));
    };
    let mut all = OPENED.lock().map_err(|_| unavailable(name, "an earlier attempt to open it panicked"))?;
    if let (Some(opened), Some(handles)) = (opened::find(adapter.info.name), all.get_mut(&number)) {
        if !DeviceState::of(&opened.device).is_lost() {
            return Ok(opened);
        }
        *handles = open_again(handles, adapter.info.name)?;
        opened::replace(&opened.device, &handles.device);
        return Ok(Opened { device: handles.device.clone(), ..opened });
    }
    let (device, setup) = Device::wgpu_options()
        .device_kind(adapter.kind)
        .graphics_api(adapter.backend)
        .tasks_max(LAUNCHES_A_SUBMISSION)
        .init_with_setup()
        .map_err(|e| unavailable(name, e))?;
    watch(&device, &setup);
    let has_matrix_units = setup.device.features().contains(MATRIX_UNITS);
    let info =
        DeviceInfo { matrix_units: adapter.info.matrix_units.filter(|_| has_matrix_units), ..adapter.info };
    let keeps_subnormals = block_on(subnormals::are_kept(&device));
    tracing::debug!(target: "kiln", keeps_subnormals, "opened {}", info.adapter);
    all.insert(number, Handles { device: device.clone(), setup, keeps_subnormals });
    Ok(opened::add(Opened { device, info }))
}

/// Makes errors of a device stop the work of the thread that uses it.
fn watch(device: &Device, setup: &WgpuSetup) {
    let state = DeviceState::of(device);
    setup.device.on_uncaptured_error(Arc::new(move |error| give_up(&state, error)));
}

/// Opens a new device on the adapter of one that was lost.
fn open_again(Handles { setup, keeps_subnormals, .. }: &Handles, name: DeviceName) -> Result<Handles> {
    let failed = |e: &dyn std::fmt::Display| {
        unavailable(name, format!("it was lost, and opening it again failed: {e}"))
    };
    // The same request as cubecl's for the first device.
    let adapter = &setup.adapter;
    let descriptor = wgpu::DeviceDescriptor {
        required_features: adapter.features().difference(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS),
        required_limits: adapter.limits(),
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        experimental_features: unsafe_ops::experimental_features(),
        ..wgpu::DeviceDescriptor::default()
    };
    let (device, queue) = block_on(adapter.request_device(&descriptor)).map_err(|e| failed(&e))?;
    let setup = WgpuSetup { device, queue, ..setup.clone() };
    let device = Device::wgpu_options()
        .tasks_max(LAUNCHES_AFTER_A_LOSS)
        .setup(setup.clone())
        .init()
        .map_err(|e| failed(&e))?;
    watch(&device, &setup);
    Ok(Handles { device, setup, keeps_subnormals: *keeps_subnormals })
}

/// Stops the work of the device's thread with a panic, like Burn's own handler. Tensors that were to be
/// written count as unwritten: reading them, or anything computed from them, is an error.
#[allow(clippy::panic, reason = "other faults are mistakes of ours, and want a trace")]
fn give_up(state: &DeviceState, error: wgpu::Error) {
    match error {
        wgpu::Error::OutOfMemory { .. } => {
            state.report_refusal();
            // No trace, because this is not a bug.
            resume_unwind(Box::new(REFUSAL.to_owned()))
        }
        // A consequence of another fault, which was reported.
        wgpu::Error::Validation { description, .. } if description.contains("is invalid") => {
            resume_unwind(Box::new(description))
        }
        fault => panic!("{fault}"),
    }
}

/// Bytes of memory of an adapter, given the size of each Vulkan heap and whether it is local to the device.
///
/// With separate memory, this is the largest local heap. With shared memory, it is the largest heap of all,
/// because drivers mark only small parts as local. Without heaps, it is the part of the system's memory that
/// the adapter may take.
fn memory_of(heaps: &[(u64, bool)], class: DeviceClass, system: Option<u64>) -> Option<u64> {
    let is_separate = matches!(class, DeviceClass::Discrete | DeviceClass::Virtual);
    let heaps = heaps.iter().filter(|(_, is_own)| *is_own || !is_separate).map(|(bytes, _)| *bytes);
    // Metal and DX12 recommend from half to three quarters of it.
    heaps.max().or(system.filter(|_| !is_separate).map(|bytes| bytes / 2))
}

/// Finds the adapters, once per process: it takes a while, and drivers may print messages each time.
fn adapters() -> Vec<Adapter> {
    static FOUND: OnceLock<Vec<Adapter>> = OnceLock::new();
    FOUND.get_or_init(find_adapters).clone()
}

fn find_adapters() -> Vec<Adapter> {
    let apis = [
        (wgpu::Backends::METAL, WgpuBackend::Metal),
        (wgpu::Backends::VULKAN, WgpuBackend::Vulkan),
        (wgpu::Backends::DX12, WgpuBackend::Dx12),
    ];
    let mut adapters: Vec<Adapter> =
        apis.into_iter().flat_map(|(backends, backend)| adapters_of(backends, backend)).collect();
    for (number, adapter) in adapters.iter_mut().enumerate() {
        adapter.info.name = DeviceName::Wgpu(Some(number));
    }
    adapters
}

fn adapters_of(backends: wgpu::Backends, backend: WgpuBackend) -> Vec<Adapter> {
    let mut descriptor =
        wgpu::InstanceDescriptor { backends, ..wgpu::InstanceDescriptor::new_without_display_handle() };
    // Otherwise wgpu takes FXC, which has no float16 and compiles a shader for minutes.
    descriptor.backend_options.dx12.shader_compiler = wgpu::Dx12Compiler::default_dynamic_dxc();
    let found = block_on(wgpu::Instance::new(descriptor).enumerate_adapters(backends));
    // Burn numbers the adapters of each class separately.
    let (mut discrete, mut integrated, mut virtual_, mut software) = (0, 0, 0, 0);
    let count = |class: &mut usize| {
        *class += 1;
        *class - 1
    };
    let mut adapters = Vec::new();
    for adapter in found {
        let (class, kind) = match adapter.get_info().device_type {
            wgpu::DeviceType::DiscreteGpu => {
                (DeviceClass::Discrete, DeviceKind::DiscreteGpu(count(&mut discrete)))
            }
            wgpu::DeviceType::IntegratedGpu => {
                (DeviceClass::Integrated, DeviceKind::IntegratedGpu(count(&mut integrated)))
            }
            wgpu::DeviceType::VirtualGpu => {
                (DeviceClass::Virtual, DeviceKind::VirtualGpu(count(&mut virtual_)))
            }
            // Burn can name the first software adapter and no other.
            wgpu::DeviceType::Cpu if count(&mut software) == 0 => (DeviceClass::Software, DeviceKind::Cpu),
            wgpu::DeviceType::Cpu | wgpu::DeviceType::Other => continue,
        };
        let memory = memory_of(&unsafe_ops::vulkan_heaps(&adapter), class, system::memory());
        adapters.push(Adapter { info: info_of(&adapter, class, memory), backend, kind });
    }
    adapters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_own_heaps_if_discrete_and_system_memory_if_integrated() {
        use DeviceClass::{Discrete, Integrated};

        // A large heap, a window that the host writes through, and the host's memory.
        let heaps = [(8 << 30, true), (256 << 20, true), (32 << 30, false)];
        assert_eq!(memory_of(&heaps, Discrete, Some(64 << 30)), Some(8 << 30));
        // The memory that the firmware set aside, and all that the driver may take.
        assert_eq!(memory_of(&[(512 << 20, true), (14 << 30, false)], Integrated, None), Some(14 << 30));
        assert_eq!(memory_of(&[], Integrated, Some(16 << 30)), Some(8 << 30));
        assert_eq!(memory_of(&[], Discrete, Some(16 << 30)), None, "nobody says");
    }
}
