//! Which implementation of a kernel runs, and which ones did.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{backend::DispatchDevice, tensor::Device};
use kiln_core::{Error, Result};

/// Which implementation of a kernel is to run. A choice other than `Auto` is kept or refused, never replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// WGSL on wgpu, the `#[cube]` twin on CUDA, native code on the CPU where there is any, else the definition.
    #[default]
    Auto,
    /// Plain Burn operations, on any device.
    Definition,
    /// The shaders, on wgpu devices.
    Wgsl,
    /// The `#[cube]` twins, on wgpu and CUDA devices.
    Cube,
}

impl Choice {
    pub const ALL: [Self; 4] = [Self::Auto, Self::Definition, Self::Wgsl, Self::Cube];

    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Definition => "definition",
            Self::Wgsl => "wgsl",
            Self::Cube => "cube",
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == text).ok_or_else(|| Error::Unknown {
            what: "kernel choice",
            name: text.to_owned(),
            known: Self::ALL.map(|choice| choice.name().to_owned()).into(),
        })
    }
}

/// Which implementation ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    Definition,
    /// Rust on the CPU.
    Native,
    Wgsl,
    Cube,
}

impl Path {
    const ALL: [Self; 4] = [Self::Definition, Self::Native, Self::Wgsl, Self::Cube];
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Definition => "definition",
            Self::Native => "native",
            Self::Wgsl => "wgsl",
            Self::Cube => "cube",
        })
    }
}

/// How often one implementation of one kernel ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    pub kernel: &'static str,
    pub path: Path,
    pub count: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernel {
    RmsNorm,
    Rotary,
    KvAppend,
    Linear,
    Gated,
    Attention,
    KvPack,
    KvUnpack,
    AttentionPacked,
    Sample,
}

impl Kernel {
    const ALL: [Self; 10] = [
        Self::RmsNorm,
        Self::Rotary,
        Self::KvAppend,
        Self::Linear,
        Self::Gated,
        Self::Attention,
        Self::KvPack,
        Self::KvUnpack,
        Self::AttentionPacked,
        Self::Sample,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::RmsNorm => "rms_norm",
            Self::Rotary => "rotary",
            Self::KvAppend => "kv_append",
            Self::Linear => "linear",
            Self::Gated => "gated",
            Self::Attention => "attention",
            Self::KvPack => "kv_pack",
            Self::KvUnpack => "kv_unpack",
            Self::AttentionPacked => "attention_packed",
            Self::Sample => "sample",
        }
    }
}

/// Tells each call which path to take, and writes it down.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    /// Of kernels that have a GPU implementation.
    path: Path,
    /// By kernel, then path.
    counts: Arc<[[AtomicU64; Path::ALL.len()]; Kernel::ALL.len()]>,
}

impl Recorder {
    pub(crate) fn new(choice: Choice, device: &Device) -> Result<Self> {
        let runtime = Runtime::of(device);
        let path = match (choice, runtime) {
            (Choice::Definition, _) | (Choice::Auto, Runtime::Other) => Path::Definition,
            (Choice::Auto, Runtime::Cpu) => Path::Native,
            (Choice::Auto | Choice::Wgsl, Runtime::Wgpu) => Path::Wgsl,
            (Choice::Auto | Choice::Cube, Runtime::Cuda) | (Choice::Cube, Runtime::Wgpu) => Path::Cube,
            (Choice::Wgsl | Choice::Cube, _) => {
                let devices = if choice == Choice::Wgsl { "wgpu" } else { "wgpu and cuda" };
                let why =
                    format!("`{choice}` runs on {devices} devices only; use `auto` or `definition` here");
                return Err(Error::Setting { name: "kernels", why });
            }
        };
        Ok(Self { path, counts: Arc::default() })
    }

    /// The path that `kernel` takes, counted.
    pub(crate) fn run(&self, kernel: Kernel, shape: &[usize]) -> Path {
        let path = self.path(kernel);
        self.record(kernel, path, shape);
        path
    }

    /// The path that `kernel` takes.
    pub(crate) fn path(&self, kernel: Kernel) -> Path {
        match (self.path, kernel) {
            // What has no native code, or none for what it is given.
            (Path::Native, Kernel::KvAppend) => Path::Native,
            (Path::Native, _) => Path::Definition,
            (path, _) => path,
        }
    }

    /// Whether kernels that have native code are to run it.
    #[cfg(feature = "cpu")]
    pub(crate) fn is_native(&self) -> bool {
        self.path == Path::Native
    }

    /// Counts and traces a launch.
    pub(crate) fn record(&self, kernel: Kernel, path: Path, shape: &[usize]) {
        tracing::trace!(target: "kiln::kernels", kernel = kernel.name(), %path, ?shape);
        self.counts[kernel as usize][path as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn ran(&self) -> Vec<Ran> {
        let all = Kernel::ALL.into_iter().flat_map(|kernel| Path::ALL.map(|path| (kernel, path)));
        let counted = all.map(|(kernel, path)| {
            let count = self.counts[kernel as usize][path as usize].load(Ordering::Relaxed);
            Ran { kernel: kernel.name(), path, count }
        });
        counted.filter(|ran| ran.count > 0).collect()
    }
}

/// What executes the kernels of a device.
#[allow(dead_code, reason = "which of them can be there depends on the features")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    Cpu,
    Wgpu,
    Cuda,
    /// Nothing this crate has kernels for.
    Other,
}

impl Runtime {
    fn of(device: &Device) -> Self {
        match device.as_dispatch() {
            #[cfg(feature = "cpu")]
            DispatchDevice::Flex(_) => Self::Cpu,
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(cubecl::Device::Wgpu(_)) => Self::Wgpu,
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(cubecl::Device::Cuda(_)) => Self::Cuda,
            #[allow(unreachable_patterns, reason = "which variants there are depends on the features")]
            _ => Self::Other,
        }
    }
}
