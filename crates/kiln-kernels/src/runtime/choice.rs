//! The implementation of the kernels that a user requests ([`Choice`]), the one that a kernel ran with
//! ([`Implementation`]), and counts of the latter.

use std::{fmt, str::FromStr};

use kiln_core::{Error, Result};

/// The requested implementation of the kernels. A device that cannot run it rejects it. For inputs that the
/// implementation of a kernel does not support, the reference runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// WGSL on wgpu, `#[cube]` on CUDA, native code on the CPU; else the reference.
    #[default]
    Auto,
    /// Plain Burn operations, on any device.
    Reference,
    /// The shaders, on wgpu devices.
    Wgsl,
    /// The `#[cube]` functions, on wgpu and CUDA devices.
    Cube,
}

impl Choice {
    /// Every choice.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Reference, Self::Wgsl, Self::Cube];

    /// Name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Reference => "reference",
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

    /// Parses a [name](Self::name).
    ///
    /// # Errors
    /// [`Error::Unknown`] with the known names.
    fn from_str(text: &str) -> Result<Self> {
        // Version 0.1 called the reference by this name.
        let text = if text == "definition" { "reference" } else { text };
        Self::ALL.into_iter().find(|choice| choice.name() == text).ok_or_else(|| Error::Unknown {
            what: "kernel choice",
            name: text.to_owned(),
            known: Self::ALL.map(|choice| choice.name().to_owned()).into(),
        })
    }
}

/// The implementation that a kernel ran with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Implementation {
    /// Plain Burn operations.
    Reference,
    /// Native Rust code on the CPU.
    Native,
    /// A WGSL shader.
    Wgsl,
    /// A `#[cube]` function.
    Cube,
}

impl Implementation {
    /// Whether this is a launch of a GPU kernel.
    pub fn is_on_gpu(self) -> bool {
        matches!(self, Self::Wgsl | Self::Cube)
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reference => "reference",
            Self::Native => "native",
            Self::Wgsl => "wgsl",
            Self::Cube => "cube",
        })
    }
}

/// Number of times that one implementation of one kernel ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunCount {
    /// Name of the kernel.
    pub kernel: &'static str,
    pub implementation: Implementation,
    pub count: u64,
}
