//! Devices and their properties.

use std::{fmt, str::FromStr};

use burn::tensor::{DType, Device};
use kiln_core::{Error, Result, device_state::DeviceState};

/// The name of a device: `auto`, `cpu`, `wgpu`, `wgpu:1`, `cuda`, `cuda:1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// A discrete GPU if there is one, else an integrated one, else the CPU; never software Vulkan.
    #[default]
    Auto,
    Cpu,
    /// The best adapter, or the one with this index in the list.
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

/// The kind of hardware behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceClass {
    Cpu,
    Discrete,
    Integrated,
    Virtual,
    /// A GPU emulated on the CPU: for tests, not for speed.
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

/// GPU units that multiply small matrices: tensor cores, matrix cores, simdgroup matrices. wgpu calls their
/// operands cooperative matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixUnits {
    /// Rows of the first factor, and of the sums.
    pub height: u32,
    /// Columns of all matrices, and rows of the second factor.
    pub size: u32,
    /// Threads in the smallest subgroup. The threads of a subgroup hold a matrix together.
    pub threads: u32,
    /// Whether they work beside lanes that have time to unpack weights meanwhile: NVIDIA's. On AMD's and
    /// Apple's GPUs the lanes multiply; on Intel's they are busy loading.
    pub beside_lanes: bool,
}

impl fmt::Display for MatrixUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.height, self.size)
    }
}

/// The properties of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    pub name: DeviceName,
    pub class: DeviceClass,
    pub adapter: String,
    pub driver: String,
    pub api: String,
    /// Bytes of memory, if the API reports them.
    pub memory: Option<u64>,
    pub f16: bool,
    /// Sizes of the smallest and the largest subgroup, if kernels can use subgroups.
    pub subgroups: Option<(u32, u32)>,
    /// Units that multiply float16 matrices with float32 sums, if kernels can use them.
    pub matrix_units: Option<MatrixUnits>,
    /// Whether lanes have so few registers that they compute half as many rows at once: Intel's.
    pub few_registers: bool,
    /// Bytes of the largest tensor that a kernel can be given.
    pub largest_binding: usize,
}

/// A device ready for tensors.
#[derive(Clone, Debug)]
pub struct Opened {
    pub device: Device,
    pub info: DeviceInfo,
}

impl Opened {
    /// The 16-bit type for computing a model on this device, if any: float16, or bfloat16 if the model's
    /// numbers are too large for float16. The CPU computes bfloat16 ten times slower than float32.
    pub fn half_dtype(&self, fits_float16: bool) -> Option<DType> {
        let dtype = if fits_float16 { DType::F16 } else { DType::BF16 };
        let is_slow = dtype == DType::BF16 && self.info.class == DeviceClass::Cpu;
        (!is_slow && self.device.supports_dtype(dtype)).then_some(dtype)
    }

    /// The default type of weights and caches: [`half_dtype`](Self::half_dtype) on a GPU, float32 elsewhere.
    pub fn natural_dtype(&self, fits_float16: bool) -> DType {
        match self.info.class {
            DeviceClass::Discrete | DeviceClass::Integrated | DeviceClass::Virtual => {
                self.half_dtype(fits_float16).unwrap_or(DType::F32)
            }
            DeviceClass::Cpu | DeviceClass::Software => DType::F32,
        }
    }

    /// Checks that the device is not lost. Use it after an error: work that stops because the device is being
    /// lost may fail with a different error.
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

/// The error of a device that is not available.
pub(crate) fn unavailable(device: impl fmt::Display, why: impl fmt::Display) -> Error {
    Error::Device { device: device.to_string(), why: why.to_string() }
}
