//! NVIDIA GPUs through CUDA. Conditions that would make Burn panic are checked beforehand.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
};

use burn::tensor::{DType, Device};
use cubecl::cuda::{CudaDevice, install};
use cudarc::driver::result::device;
use kiln_core::{Result, device_state::DeviceState, unsafe_ops};
use nvml_wrapper::Nvml;

use crate::runtime::{
    device::{
        info::{DeviceClass, DeviceInfo, DeviceName, Opened, unavailable},
        opened,
    },
    tensor_cores,
};

/// Whether the driver is a stand-in with software devices (`tools/softcuda`).
static SOFTWARE: AtomicBool = AtomicBool::new(false);

/// Whether the CUDA devices that were opened are emulated on the CPU.
pub(crate) fn is_software() -> bool {
    SOFTWARE.load(Ordering::Relaxed)
}

/// Lists all GPUs that CUDA reports.
pub(super) fn infos() -> Result<Vec<DeviceInfo>> {
    let count = count()?;
    let memory = Memory::read();
    (0..count).map(|index| info(index, &memory)).collect()
}

/// Opens GPU `index`.
pub(super) fn open(index: usize) -> Result<Opened> {
    let name = DeviceName::Cuda(index);
    if let Some(opened) = opened::find(name) {
        return Ok(opened);
    }
    let count = count()?;
    if index >= count {
        let why = format!("there are {count} CUDA devices, numbered from 0; see `kiln devices`");
        return Err(unavailable(name, why));
    }
    // Kernels are compiled on their first launch, which is too late to say what is missing.
    if !cudarc::get_lib_name_candidates("nvrtc").iter().any(|library| unsafe_ops::can_load(library)) {
        let why = "NVRTC, CUDA's run-time compiler, is not installed; install the CUDA toolkit (libnvrtc)";
        return Err(unavailable(name, why));
    }
    let info = info(index, &Memory::read())?;
    let include = install::cuda_path().map(|path| path.join("include"));
    let is_there = |header: &str| include.as_ref().is_some_and(|include| include.join(header).is_file());
    let missing: Vec<&str> = headers(index).filter(|header| !is_there(header)).collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        let place = include.map_or_else(String::new, |include| format!(" in {}", include.display()));
        let why = format!(
            "headers of the CUDA toolkit are missing{place}: {missing}; install them, or set CUDA_PATH to the toolkit's \
             folder"
        );
        return Err(unavailable(name, why));
    }
    let device = Device::cuda(index);
    DeviceState::of(&device).copies_beside_work();
    // Whether Burn computes in place depends on how far the device is, so a recorded step can need a kernel
    // that the steps before it did not. If it cannot be loaded, cubecl gives up all that the kernel reads,
    // the weights included.
    let client = cubecl::Device::Cuda(CudaDevice::new(index)).client();
    let relaxed = client.exclusive(unsafe_ops::load_kernels_while_recording);
    relaxed.map_err(|e| unavailable(name, format!("{e:?}")))??;
    Ok(opened::add(Opened { device, info }))
}

/// Headers that kernels include: number types, and tensor cores if there are any.
fn headers(index: usize) -> impl Iterator<Item = &'static str> {
    let properties = cubecl::Device::Cuda(CudaDevice::new(index)).client().properties_shared();
    let tensor_cores = properties.hardware.min_tensor_cores_dim.map(|_| ["mma.h", "crt/mma.h"]);
    ["cuda_fp16.h", "cuda_bf16.h"].into_iter().chain(tensor_cores.into_iter().flatten())
}

/// Returns the number of GPUs that the driver reports.
fn count() -> Result<usize> {
    let name = DeviceName::Cuda(0);
    if !cudarc::get_lib_name_candidates("cuda").iter().any(|library| unsafe_ops::can_load(library)) {
        return Err(unavailable(name, "the NVIDIA driver (libcuda) is not installed"));
    }
    match cubecl::Device::enumerate(cubecl::Device::Cuda(CudaDevice::new(0)).to_id()).len() {
        0 => Err(unavailable(name, "the NVIDIA driver shows no GPU")),
        count => Ok(count),
    }
}

fn info(index: usize, memory: &Memory) -> Result<DeviceInfo> {
    let name = DeviceName::Cuda(index);
    let gpu = i32::try_from(index).map_err(|e| unavailable(name, e))?;
    let gpu = device::get(gpu).map_err(|e| unavailable(name, e))?;
    let uuid = device::get_uuid(gpu).ok().map(|uuid| {
        let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    });
    let adapter = device::get_name(gpu).map_err(|e| unavailable(name, e))?;
    let software = adapter.to_lowercase().contains("software");
    SOFTWARE.fetch_or(software, Ordering::Relaxed);
    let properties = cubecl::Device::Cuda(CudaDevice::new(index)).client().properties_shared();
    let total = uuid.and_then(|uuid| memory.total.get(&uuid).copied()).or(properties.memory.max_memory());
    Ok(DeviceInfo {
        name,
        class: if software { DeviceClass::Software } else { DeviceClass::Discrete },
        adapter,
        driver: memory.driver.clone().unwrap_or_else(|| "NVIDIA".to_owned()),
        api: "CUDA".to_owned(),
        memory: total,
        // Every GPU that current toolkits compile for has float16.
        f16: Device::cuda(index).supports_dtype(DType::F16),
        subgroups: Some((32, 32)),
        matrix_units: tensor_cores::units_of(&properties),
        few_registers: false,
        // Pages of cubecl are at most a quarter of the memory.
        largest_binding: total.map_or(1 << 30, |total| usize::try_from(total / 4).unwrap_or(usize::MAX)),
    })
}

/// Information from NVML. It may be missing (Jetson, MIG): then the CUDA driver gives the size of the memory.
struct Memory {
    /// Bytes by the UUID of the GPU, because NVML also counts GPUs that CUDA was told to hide.
    total: HashMap<String, u64>,
    driver: Option<String>,
}

impl Memory {
    fn read() -> Self {
        let Ok(nvml) = Nvml::init() else { return Self { total: HashMap::new(), driver: None } };
        let total = (0..nvml.device_count().unwrap_or(0))
            .filter_map(|index| {
                let device = nvml.device_by_index(index).ok()?;
                Some((device.uuid().ok()?, device.memory_info().ok()?.total))
            })
            .collect();
        Self { total, driver: nvml.sys_driver_version().ok() }
    }
}
