//! Which devices there are, and how one is opened. A device that cannot be had is a sentence, never a panic.

use std::{fmt, str::FromStr};

use burn::tensor::{DType, Device};
use kiln_core::{Error, Result, device_state::DeviceState};

mod bandwidth;
pub use bandwidth::CopyBandwidth;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
pub(crate) use cuda::is_software as is_software_cuda;
#[cfg(feature = "wgpu")]
mod subnormals;
#[cfg(feature = "wgpu")]
mod wgpu;

/// The name of a device: `auto`, `cpu`, `wgpu`, `wgpu:1`, `cuda`, `cuda:1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// A discrete GPU if there is one, else an integrated one, else the CPU; never software Vulkan.
    #[default]
    Auto,
    Cpu,
    /// The best adapter, or the one of that number in the list.
    Wgpu(Option<usize>),
    Cuda(usize),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu(None) => f.write_str("wgpu"),
            Self::Wgpu(Some(index)) => write!(f, "wgpu:{index}"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, index) = match text.split_once(':') {
            Some((name, index)) => (name, Some(index)),
            None => (text, None),
        };
        let index = index.map(str::parse).transpose().map_err(|_| Error::Device {
            device: text.to_owned(),
            why: "what follows the colon must be a number".to_owned(),
        })?;
        match (name, index) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu", None) => Ok(Self::Cpu),
            ("wgpu", index) => Ok(Self::Wgpu(index)),
            ("cuda", index) => Ok(Self::Cuda(index.unwrap_or(0))),
            _ => Err(Error::Unknown {
                what: "device",
                name: text.to_owned(),
                known: ["auto", "cpu", "wgpu", "wgpu:INDEX", "cuda", "cuda:INDEX"].map(str::to_owned).into(),
            }),
        }
    }
}

/// What a device is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceClass {
    Cpu,
    Discrete,
    Integrated,
    Virtual,
    /// A GPU imitated on the CPU: for tests, not for speed.
    Software,
}

impl fmt::Display for DeviceClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Discrete => "discrete",
            Self::Integrated => "integrated",
            Self::Virtual => "virtual",
            Self::Software => "software",
        })
    }
}

/// Units of a GPU that multiply small matrices: tensor cores, matrix cores, simdgroup matrices. wgpu calls what they
/// multiply cooperative matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixUnits {
    /// Rows of each matrix, and columns.
    pub size: u32,
    /// Threads of the smallest subgroup. The threads of a subgroup hold a matrix together.
    pub threads: u32,
}

impl fmt::Display for MatrixUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{0}x{0}", self.size)
    }
}

/// What is known of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    pub name: DeviceName,
    pub class: DeviceClass,
    pub adapter: String,
    pub driver: String,
    pub api: String,
    /// Bytes, where the API says.
    pub memory: Option<u64>,
    pub f16: bool,
    /// Smallest and largest subgroup, where kernels can use them.
    pub subgroups: Option<(u32, u32)>,
    /// Units that multiply matrices of float16 and add up in float32, where shaders can use them.
    pub matrix_units: Option<MatrixUnits>,
    /// Bytes of the largest tensor a kernel can be given.
    pub largest_binding: usize,
}

/// A device ready for tensors.
#[derive(Clone, Debug)]
pub struct Opened {
    pub device: Device,
    pub info: DeviceInfo,
}

impl Opened {
    /// The type of 16 bits that a model is computed in here, if any: float16, or bfloat16 where the model's numbers are too large for that. The CPU
    /// computes bfloat16 ten times slower than float32.
    pub fn half_dtype(&self, fits_float16: bool) -> Option<DType> {
        let dtype = if fits_float16 { DType::F16 } else { DType::BF16 };
        let is_slow = dtype == DType::BF16 && self.info.class == DeviceClass::Cpu;
        (!is_slow && self.device.supports_dtype(dtype)).then_some(dtype)
    }

    /// The type that weights and caches are held in where the user does not say: [`half_dtype`](Self::half_dtype) on a GPU, else float32.
    pub fn natural_dtype(&self, fits_float16: bool) -> DType {
        match self.info.class {
            DeviceClass::Discrete | DeviceClass::Integrated | DeviceClass::Virtual => {
                self.half_dtype(fits_float16).unwrap_or(DType::F32)
            }
            DeviceClass::Cpu | DeviceClass::Software => DType::F32,
        }
    }

    /// Bytes a second that a kernel can read and write here, measured on so many bytes: fewer than the caches of a CPU hold are read from
    /// these, and a GPU's are at least 128 MiB.
    ///
    /// # Errors
    /// What the device says of the work.
    pub fn measure_bandwidth(&self, bytes: usize) -> Result<f64> {
        bandwidth::measure(self, bytes)
    }

    /// Bytes a second that are copied between the host and this device, measured; `None` where they share their memory, so
    /// that nothing has to be.
    ///
    /// # Errors
    /// What the device says of the work.
    pub fn measure_copies(&self) -> Result<Option<CopyBandwidth>> {
        match self.info.class {
            DeviceClass::Cpu => Ok(None),
            _ => bandwidth::measure_copies(&self.device).map(Some),
        }
    }

    /// Has kernels use these matrix units from now on, in this process: those that the device was opened with, or none.
    pub fn with_matrix_units(mut self, units: Option<MatrixUnits>) -> Self {
        #[cfg(feature = "wgpu")]
        wgpu::set_matrix_units(&self.device, units);
        self.info.matrix_units = units;
        self
    }

    /// Whether the device is there, asked after an error: work that is given up because the device is being lost may fail in other words.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn check(&self) -> Result<()> {
        match DeviceState::of(&self.device).sync() {
            Err(lost @ Error::DeviceLost(_)) => Err(lost),
            _ => Ok(()),
        }
    }

    /// Whether the host can go on while this device computes.
    pub fn is_asynchronous(&self) -> bool {
        self.info.class != DeviceClass::Cpu
    }
}

/// Every device of this build and machine; and for each kind that is missing, why.
pub fn list() -> (Vec<DeviceInfo>, Vec<Error>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for kind in [cpu_info().map(|info| vec![info]), wgpu_infos(), cuda_infos()] {
        match kind {
            Ok(infos) => found.extend(infos),
            Err(why) => missing.push(why),
        }
    }
    (found, missing)
}

/// Opens the device of that name. Opening one twice gives the same device, but for one that was lost: it is another then, and launches are handed to it in
/// smaller parts. CUDA has none in the same process.
///
/// # Errors
/// [`Error::Device`] that says what is missing.
pub fn open(name: DeviceName) -> Result<Opened> {
    match name {
        DeviceName::Auto => open(choose()?),
        DeviceName::Cpu => open_cpu(),
        DeviceName::Wgpu(index) => open_wgpu(index),
        DeviceName::Cuda(index) => open_cuda(index),
    }
}

/// What `auto` means here.
fn choose() -> Result<DeviceName> {
    let (found, missing) = list();
    let rank = |info: &DeviceInfo| match (info.class, info.name) {
        (DeviceClass::Discrete, DeviceName::Cuda(_)) => Some(0),
        (DeviceClass::Discrete, _) => Some(1),
        (DeviceClass::Integrated, _) => Some(2),
        (DeviceClass::Virtual, _) => Some(3),
        (DeviceClass::Cpu, _) => Some(4),
        (DeviceClass::Software, _) => None,
    };
    let best = found.iter().filter_map(|info| Some((rank(info)?, info.name))).min_by_key(|(rank, _)| *rank);
    match best {
        Some((_, name)) => Ok(name),
        None => Err(missing.into_iter().next().unwrap_or_else(|| unavailable("auto", "there is no device"))),
    }
}

/// Threads a core that are of any use: beyond that they wait for each other, for minutes.
const THREADS_A_CORE: usize = 32;

/// Computes with `threads` CPU threads. Only before the first computation.
///
/// # Errors
/// [`Error::Setting`] for 0, for many times more than there are cores, or when it is too late.
pub fn limit_threads(threads: usize) -> Result<()> {
    let wrong = |why: String| Error::Setting { name: "threads", why };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = cores.saturating_mul(THREADS_A_CORE);
    if threads == 0 || threads > most {
        return Err(wrong(format!(
            "is {threads}, must be from 1 to {most}; there are {cores} cores, and more threads than cores are not faster"
        )));
    }
    #[cfg(feature = "cpu")]
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| wrong(e.to_string()))?;
    Ok(())
}

/// Has the CPU compute with no better instructions than these, as machines do that lack them: `plain`, `avx2`, `avx-vnni`, `avx512` or
/// `neon`.
///
/// # Errors
/// [`Error::Setting`] for another name, or instructions that this machine does not have.
pub fn limit_instructions(name: &str) -> Result<()> {
    let wrong = |why: String| Error::Setting { name: "KILN_INSTRUCTIONS", why };
    #[cfg(feature = "cpu")]
    {
        use kiln_simd::Instructions;

        let here = || Instructions::ALL.into_iter().filter(|instructions| instructions.are_here());
        let names = || here().map(Instructions::name).collect::<Vec<_>>().join(", ");
        let Some(best) = here().find(|instructions| instructions.name() == name) else {
            return Err(wrong(format!("is `{name}`, must be one of those of this machine: {}", names())));
        };
        kiln_simd::limit(best);
        Ok(())
    }
    #[cfg(not(feature = "cpu"))]
    Err(wrong(format!("is `{name}`, but this kiln was built without the CPU")))
}

/// How many threads the CPU computes with.
pub fn threads() -> usize {
    #[cfg(feature = "cpu")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "cpu"))]
    1
}

pub(crate) fn unavailable(device: impl fmt::Display, why: impl fmt::Display) -> Error {
    Error::Device { device: device.to_string(), why: why.to_string() }
}

#[cfg(not(all(feature = "cpu", feature = "wgpu", feature = "cuda")))]
fn not_compiled(device: DeviceName, feature: &str) -> Error {
    unavailable(device, format!("this kiln was built without it; build with `--features {feature}`"))
}

/// The system and its version; `None` in builds that do not ask.
#[cfg(feature = "wgpu")]
fn system_version() -> Option<String> {
    #[cfg(feature = "cpu")]
    return sysinfo::System::long_os_version();
    #[cfg(not(feature = "cpu"))]
    None
}

/// Bytes of the system's memory; `None` in builds that do not ask.
#[cfg(any(feature = "cpu", feature = "wgpu"))]
#[allow(clippy::unnecessary_wraps, reason = "some builds do not know")]
fn system_memory() -> Option<u64> {
    #[cfg(feature = "cpu")]
    {
        use sysinfo::{MemoryRefreshKind, RefreshKind, System};

        let what = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(what);
        // A container may have less than the machine.
        let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
        Some(limit.min(system.total_memory()))
    }
    #[cfg(not(feature = "cpu"))]
    None
}

#[cfg(feature = "cpu")]
fn cpu_info() -> Result<DeviceInfo> {
    use sysinfo::{CpuRefreshKind, RefreshKind, System};

    let system = System::new_with_specifics(RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing()));
    let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).unwrap_or_default();
    Ok(DeviceInfo {
        name: DeviceName::Cpu,
        class: DeviceClass::Cpu,
        adapter: format!("{brand} ({} threads)", rayon::current_num_threads()),
        driver: "burn-flex".to_owned(),
        api: format!("native, {}", kiln_simd::best().name()),
        memory: system_memory(),
        f16: false,
        subgroups: None,
        matrix_units: None,
        largest_binding: usize::MAX,
    })
}

#[cfg(feature = "cpu")]
fn open_cpu() -> Result<Opened> {
    Ok(Opened { device: Device::flex(), info: cpu_info()? })
}

#[cfg(not(feature = "cpu"))]
fn cpu_info() -> Result<DeviceInfo> {
    Err(not_compiled(DeviceName::Cpu, "cpu"))
}

#[cfg(not(feature = "cpu"))]
fn open_cpu() -> Result<Opened> {
    Err(not_compiled(DeviceName::Cpu, "cpu"))
}

#[cfg(feature = "wgpu")]
use wgpu::{infos as wgpu_infos, open as open_wgpu};
#[cfg(feature = "wgpu")]
pub(crate) use wgpu::{
    is_software as is_software_wgpu, keeps_subnormals, largest_binding, lose, matrix_units,
    set_keeps_subnormals,
};

#[cfg(not(feature = "wgpu"))]
pub(crate) fn lose(_: &Device) {}
#[cfg(not(feature = "wgpu"))]
pub(crate) fn set_keeps_subnormals(_: &Device, _: bool) -> Option<bool> {
    None
}
#[cfg(not(feature = "wgpu"))]
fn wgpu_infos() -> Result<Vec<DeviceInfo>> {
    Err(not_compiled(DeviceName::Wgpu(None), "wgpu"))
}

#[cfg(not(feature = "wgpu"))]
fn open_wgpu(index: Option<usize>) -> Result<Opened> {
    Err(not_compiled(DeviceName::Wgpu(index), "wgpu"))
}

#[cfg(feature = "cuda")]
use cuda::{infos as cuda_infos, open as open_cuda};

#[cfg(not(feature = "cuda"))]
fn cuda_infos() -> Result<Vec<DeviceInfo>> {
    Err(not_compiled(DeviceName::Cuda(0), "cuda"))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(index: usize) -> Result<Opened> {
    Err(not_compiled(DeviceName::Cuda(index), "cuda"))
}
