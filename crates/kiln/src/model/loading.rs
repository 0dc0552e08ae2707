//! Where and how a model is loaded.

use std::{fmt, str::FromStr};

use burn::tensor::DType;
use kiln_cache::Plan;
use kiln_core::{Error, Result, budget::Budget};
use kiln_kernels::{
    Choice,
    device::{self, DeviceClass, DeviceName, Opened},
};
use kiln_models::Configured;

use crate::out_of_memory::usable;

/// The type that weights, activations and caches are held in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DtypeChoice {
    /// float16 on a GPU that computes it, where the model's activations stay within it; else float32
    #[default]
    Auto,
    F32,
    F16,
    Bf16,
}

impl FromStr for DtypeChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "f32" | "float32" => Self::F32,
            "f16" | "float16" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            _ => {
                let known = ["auto", "f32", "f16", "bf16"].map(str::to_owned).into();
                return Err(Error::Unknown { what: "dtype", name: text.to_owned(), known });
            }
        })
    }
}

impl fmt::Display for DtypeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// How far loading has come, in bytes of the weights' files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub read: u64,
    pub total: u64,
}

/// Where and how a model is loaded.
pub struct LoadOptions<'a> {
    pub device: Opened,
    pub dtype: DtypeChoice,
    pub kernels: Choice,
    /// Bytes of the largest tensor that is given to a kernel; the device's own limit if smaller.
    pub largest_binding: Option<usize>,
    pub on_progress: Option<&'a mut dyn FnMut(Progress)>,
    /// The caches that will be asked for: one that the model cannot have is refused before its weights are read.
    pub plan: Option<Plan>,
    /// Bytes of the device that weights, caches and activations may take together; `None`: 90 % of its memory, where it
    /// is known.
    pub memory: Option<u64>,
    /// Tokens that a sequence will have at least: where there is no memory for them, that is said before the weights are
    /// read.
    pub tokens: usize,
}

impl fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("device", &self.device)
            .field("dtype", &self.dtype)
            .field("kernels", &self.kernels)
            .finish_non_exhaustive()
    }
}

impl LoadOptions<'_> {
    /// The defaults on device `name`, which is opened.
    pub fn new(name: DeviceName) -> Result<Self> {
        Ok(Self::on(device::open(name)?))
    }

    /// The defaults on `device`.
    pub fn on(device: Opened) -> Self {
        let (dtype, kernels) = (DtypeChoice::Auto, Choice::Auto);
        Self {
            device,
            dtype,
            kernels,
            largest_binding: None,
            on_progress: None,
            plan: None,
            memory: None,
            tokens: 0,
        }
    }

    /// float32 on `device`: what comparisons with transformers are made in.
    pub fn float32(device: Opened) -> Self {
        Self { dtype: DtypeChoice::F32, ..Self::on(device) }
    }

    pub(super) fn dtype(&self, configured: &dyn Configured) -> Result<DType> {
        let dtype = match self.dtype {
            DtypeChoice::Auto if !configured.fits_float16() => DType::F32,
            DtypeChoice::Auto => self.device.natural_dtype(),
            DtypeChoice::F32 => DType::F32,
            DtypeChoice::F16 => DType::F16,
            DtypeChoice::Bf16 => DType::BF16,
        };
        let wrong = |why| Err(Error::Setting { name: "dtype", why });
        if !self.device.device.supports_dtype(dtype) {
            return wrong(format!("{} does not compute {}; use f32", self.device.info.name, dtype.name()));
        }
        if self.device.info.class == DeviceClass::Cpu && dtype == DType::BF16 {
            return wrong(
                "the CPU computes bf16 ten times slower than f32; use f32, or f16 for half the memory"
                    .to_owned(),
            );
        }
        Ok(dtype)
    }

    /// Whether the model could be held in float16 here.
    pub(super) fn computes_float16(&self, configured: &dyn Configured) -> bool {
        configured.fits_float16() && self.device.device.supports_dtype(DType::F16)
    }

    pub(super) fn budget(&self) -> Budget {
        let info = &self.device.info;
        let budget = Budget::new(self.memory.or_else(|| usable(info)));
        budget.set_device_memory(info.memory);
        budget.set_largest_buffer(u64::try_from(info.largest_binding).ok());
        if info.class == DeviceClass::Cpu { budget.of_this_process() } else { budget }
    }

    pub(super) fn largest_binding(&self) -> usize {
        let device = self.device.info.largest_binding;
        self.largest_binding.map_or(device, |asked| asked.min(device))
    }
}
