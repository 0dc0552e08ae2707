//! Adapters of Vulkan, Metal and DX12, through wgpu.
//!
//! Not of OpenGL, where references of kernels give wrong results in silence. One cause: `a % b` of negative integers is
//! undefined in GLSL, naga 30 writes WGSL's as that, and drivers compute it unsigned, so that -99 % 7 is 3 and not -1. It
//! is not the only one: references that take no remainder of negative integers still fail conformance.

use std::{
    collections::HashMap,
    panic::resume_unwind,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use burn::tensor::{
    Device, DeviceKind,
    wgpu::{WgpuBackend, wgpu},
};
use kiln_core::{
    Result,
    device_state::{DeviceState, REFUSAL},
    read_back::block_on,
    unsafe_ops,
};

use super::{DeviceClass, DeviceInfo, DeviceName, MatrixUnits, Opened, unavailable};

/// Devices opened so far, by their number: Burn initialises a runtime once a process.
static OPENED: Mutex<Option<HashMap<usize, Opened>>> = Mutex::new(None);

/// Launches that are handed to the driver together. A decode step of a large model has a few hundred, and each submission takes as long as many of them.
const LAUNCHES_A_SUBMISSION: usize = 256;

#[derive(Clone)]
struct Adapter {
    info: DeviceInfo,
    backend: WgpuBackend,
    kind: DeviceKind,
}

/// All adapters, in the order of their numbers.
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

/// Opens adapter `index`, or the best.
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
    if let Some(device) = opened.get(&number) {
        return Ok(device.clone());
    }
    let (device, setup) = Device::wgpu_options()
        .device_kind(adapter.kind)
        .graphics_api(adapter.backend)
        .tasks_max(LAUNCHES_A_SUBMISSION)
        .init_with_setup()
        .map_err(|e| unavailable(name, e))?;
    let state = DeviceState::of(&device);
    setup.device.on_uncaptured_error(Arc::new(move |error| give_up(&state, error)));
    let has_matrix_units = setup.device.features().contains(MATRIX_UNITS);
    let info =
        DeviceInfo { matrix_units: adapter.info.matrix_units.filter(|_| has_matrix_units), ..adapter.info };
    let device = Opened { device, info };
    opened.insert(number, device.clone());
    Ok(device)
}

/// What shaders that multiply with matrix units need. cubecl requests everything that the adapter has.
const MATRIX_UNITS: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::SUBGROUP);

/// The matrix units of a device that [`open`] opened.
pub(crate) fn matrix_units(device: &Device) -> Option<MatrixUnits> {
    let opened = OPENED.lock().ok()?;
    opened.as_ref()?.values().find(|opened| opened.device == *device)?.info.matrix_units
}

/// Bytes of the largest tensor that a kernel on a device that [`open`] opened can be given.
pub(crate) fn largest_binding(device: &Device) -> Option<usize> {
    let opened = OPENED.lock().ok()?;
    Some(opened.as_ref()?.values().find(|opened| opened.device == *device)?.info.largest_binding)
}

/// What [`matrix_units`] says from now on.
pub(super) fn set_matrix_units(device: &Device, units: Option<MatrixUnits>) {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    for opened in opened.iter_mut().flat_map(HashMap::values_mut).filter(|opened| opened.device == *device) {
        opened.info.matrix_units = units;
    }
}

/// The largest square matrices of float16 with sums in float32.
fn matrix_units_of(adapter: &wgpu::Adapter) -> Option<MatrixUnits> {
    use wgpu::CooperativeScalarType::{F16, F32};

    let info = adapter.get_info();
    // wgpu says 4 for Metal. But matrices are of SIMD groups, which have 32 threads.
    let threads = if info.backend == wgpu::Backend::Metal { 32 } else { info.subgroup_min_size };
    let all = adapter.cooperative_matrix_properties().into_iter();
    let taken = all.filter(|matrix| {
        let is_square = matrix.m_size == matrix.n_size && matrix.n_size == matrix.k_size;
        is_square && matrix.ab_type == F16 && matrix.cr_type == F32 && !matrix.saturating_accumulation
    });
    let size = taken.map(|matrix| matrix.m_size).max()?;
    adapter.features().contains(MATRIX_UNITS).then_some(MatrixUnits { size, threads })
}

/// Ends what the thread of the device is at by a panic, as Burn's own handler does. Tensors that were to be written count
/// as unwritten: reading them, or what is computed from them, is an error.
#[allow(clippy::panic, reason = "other faults are mistakes of ours, and want a trace")]
fn give_up(state: &DeviceState, error: wgpu::Error) {
    match error {
        wgpu::Error::OutOfMemory { .. } => {
            state.report_refusal();
            // Nobody has to be told by a trace.
            resume_unwind(Box::new(REFUSAL.to_owned()))
        }
        // What became of another fault, which was told.
        wgpu::Error::Validation { description, .. } if description.contains("is invalid") => {
            resume_unwind(Box::new(description))
        }
        fault => panic!("{fault}"),
    }
}

/// Bytes of the largest tensor. Shaders count elements in 32 bits, and Metal binds more.
fn largest_binding_of(limits: &wgpu::Limits) -> usize {
    let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    usize::try_from(largest.min(u64::from(u32::MAX))).unwrap_or(usize::MAX)
}

/// Bytes of an adapter: of its own, as Vulkan says, else what it may take of the system's.
fn memory_of(adapter: &wgpu::Adapter, class: DeviceClass) -> Option<u64> {
    let own = unsafe_ops::vulkan_memory(adapter);
    match class {
        DeviceClass::Discrete | DeviceClass::Virtual => own,
        // What Metal and DX12 recommend is from half to three quarters of it.
        _ => own.or_else(|| super::system_memory().map(|memory| memory / 2)),
    }
}

/// They are looked for once a process: it takes a while, and drivers may say something each time.
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
    // Without it, wgpu takes FXC, which has no float16 and compiles a shader for minutes.
    descriptor.backend_options.dx12.shader_compiler = wgpu::Dx12Compiler::default_dynamic_dxc();
    let found = block_on(wgpu::Instance::new(descriptor).enumerate_adapters(backends));
    // Burn counts the adapters of each class apart.
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
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
            api: format!("{:?}", info.backend),
            memory: memory_of(&adapter, class),
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
