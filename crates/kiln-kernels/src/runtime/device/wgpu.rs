//! Adapters of Vulkan, Metal and DX12, through wgpu.
//!
//! OpenGL is excluded, because references of kernels silently give wrong results there. One cause: `a % b` of
//! negative integers is undefined in GLSL, naga 30 translates WGSL's to it, and drivers compute it unsigned,
//! so that -99 % 7 is 3 and not -1. There are others: references that take no remainder of negative integers
//! still fail conformance.

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

use crate::runtime::device::{
    info::{DeviceClass, DeviceInfo, DeviceName, MatrixUnits, Opened, unavailable},
    opened::{Handles, OPENED},
    subnormals, system,
};

/// Launches per submission to the driver. A decode step of a large model has a few hundred, and each
/// submission takes as long as many of them.
const LAUNCHES_A_SUBMISSION: usize = 256;

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
pub(super) fn infos() -> Result<Vec<DeviceInfo>> {
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
pub(super) fn open(index: Option<usize>) -> Result<Opened> {
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
    let mut opened =
        OPENED.lock().map_err(|_| unavailable(name, "an earlier attempt to open it panicked"))?;
    let opened = opened.get_or_insert_default();
    if let Some(handles) = opened.get(&number) {
        if !DeviceState::of(&handles.opened.device).is_lost() {
            return Ok(handles.opened.clone());
        }
        let again = open_again(handles)?;
        let device = again.opened.clone();
        opened.insert(number, again);
        return Ok(device);
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
    let keeps_subnormals = subnormals::are_kept(&device);
    tracing::debug!(target: "kiln", keeps_subnormals, "opened {}", info.adapter);
    let device = Opened { device, info };
    opened.insert(number, Handles { opened: device.clone(), setup, keeps_subnormals });
    Ok(device)
}

/// Makes errors of a device stop the work of the thread that uses it.
fn watch(device: &Device, setup: &WgpuSetup) {
    let state = DeviceState::of(device);
    setup.device.on_uncaptured_error(Arc::new(move |error| give_up(&state, error)));
}

/// Opens a new device on the adapter of one that was lost.
fn open_again(Handles { opened: lost, setup, keeps_subnormals }: &Handles) -> Result<Handles> {
    let failed = |e: &dyn std::fmt::Display| {
        unavailable(lost.info.name, format!("it was lost, and opening it again failed: {e}"))
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
    let opened = Opened { device, info: lost.info.clone() };
    Ok(Handles { opened, setup, keeps_subnormals: *keeps_subnormals })
}

/// Features for shaders that use matrix units. cubecl requests everything that the adapter has.
const MATRIX_UNITS: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::SUBGROUP);

/// The largest square float16 matrices with float32 sums.
fn matrix_units_of(adapter: &wgpu::Adapter) -> Option<MatrixUnits> {
    use wgpu::CooperativeScalarType::{F16, F32};

    let info = adapter.get_info();
    // wgpu reports 4 for Metal, but matrices belong to SIMD groups, which have 32 threads.
    let threads = if info.backend == wgpu::Backend::Metal { 32 } else { info.subgroup_min_size };
    let all = adapter.cooperative_matrix_properties().into_iter();
    let taken = all.filter(|matrix| {
        let is_square = matrix.m_size == matrix.n_size && matrix.n_size == matrix.k_size;
        is_square && matrix.ab_type == F16 && matrix.cr_type == F32 && !matrix.saturating_accumulation
    });
    let size = taken.map(|matrix| matrix.m_size).max()?;
    adapter.features().contains(MATRIX_UNITS).then_some(MatrixUnits { size, threads })
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
        let info = adapter.get_info();
        let (class, kind) = match info.device_type {
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
        let (features, limits) = (adapter.features(), adapter.limits());
        let subgroups = features.contains(wgpu::Features::SUBGROUP);
        let info = DeviceInfo {
            name: DeviceName::Wgpu(None),
            class,
            adapter: info.name,
            driver: driver_of(&info.driver, &info.driver_info, system::version),
            api: format!("{:?}", info.backend),
            memory: memory_of(&unsafe_ops::vulkan_heaps(&adapter), class, system::memory()),
            f16: features.contains(wgpu::Features::SHADER_F16),
            subgroups: subgroups.then_some((info.subgroup_min_size, info.subgroup_max_size)),
            matrix_units: matrix_units_of(&adapter),
            largest_binding: largest_binding_of(&limits),
        };
        adapters.push(Adapter { info, backend, kind });
    }
    adapters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_the_device_s_own_or_the_system_s() {
        use DeviceClass::{Discrete, Integrated};

        // A large heap, a window that the host writes through, and the host's memory.
        let heaps = [(8 << 30, true), (256 << 20, true), (32 << 30, false)];
        assert_eq!(memory_of(&heaps, Discrete, Some(64 << 30)), Some(8 << 30));
        // The memory that the firmware set aside, and all that the driver may take.
        assert_eq!(memory_of(&[(512 << 20, true), (14 << 30, false)], Integrated, None), Some(14 << 30));
        assert_eq!(memory_of(&[], Integrated, Some(16 << 30)), Some(8 << 30));
        assert_eq!(memory_of(&[], Discrete, Some(16 << 30)), None, "nobody says");
    }

    #[test]
    fn a_driver_without_a_version_is_that_of_the_system() {
        let system = || Some("macOS 15.1 Sequoia".to_owned());
        assert_eq!(driver_of("", "", system), "of macOS 15.1 Sequoia");
        assert_eq!(driver_of("", "", || None), "unknown");
        assert_eq!(driver_of("radv", "Mesa 26.0", system), "radv Mesa 26.0");
    }

    #[test]
    fn no_binding_is_counted_in_more_than_32_bits() {
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
