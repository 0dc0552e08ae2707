//! Stands in for `cubecl-llvm` 0.11.3, the LLVM compiler of CubeCL, so that CUDA builds without LLVM.
//!
//! `cubecl-cuda` depends on that crate whichever compiler it uses, and to build it is to download LLVM and
//! to have a C++ compiler. With cubecl's `cuda-cpp` feature the kernels become CUDA C++, which NVRTC
//! compiles, and nothing in LLVM is called. Here is what `cubecl-cuda` names, and no more; without that
//! feature every kernel fails to compile, with an error that says so. See `README.md`.

use std::fmt;

use cubecl_core::environment::backtrace::BackTrace;
use cubecl_core::ir::{amd::GfxArch, attributes::BufferIOAttr, nvidia::SmArch};
use cubecl_core::prelude::KernelDefinition;
use cubecl_core::{CompilationError, Compiler};

#[cfg(feature = "amdgpu")]
compile_error!("this stand-in for cubecl-llvm serves CUDA only: ROCm needs the real crate");

/// What belongs to the PTX target.
pub mod nvptx {
    /// The version of the PTX language.
    pub mod ptx_version {
        use std::fmt;

        /// A PTX version, of which there is none: NVRTC chooses its own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum PtxVersion {}

        impl PtxVersion {
            /// No version, whatever the driver.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {}
            }
        }
    }
}

/// What the targets share.
pub mod shared {
    /// What a device advertises.
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        /// The target to narrow a device's features for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// PTX.
            Nvptx,
        }

        /// Leaves `props` as they are: no kernel compiles that could ask for them.
        pub fn restrict_features(_props: &mut DeviceProperties, _target: GpuTarget) {}
    }
}

/// What a compiler compiles for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// PTX.
    #[default]
    Nvptx,
}

/// The compiler, which refuses every kernel.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// What it would compile for.
    pub target: LlvmTarget,
}

/// The options of a compilation, none of them read.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// The AMD architecture.
    pub arch: Option<GfxArch>,
    /// The NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// The PTX version to emit.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// Whether the metadata is passed by value.
    pub grid_constants: bool,
}

/// A compiled PTX module. None is ever made.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// The PTX, NUL-terminated.
    pub ptx: Vec<std::ffi::c_char>,
    /// The IR, for the log.
    pub ir: String,
    /// Bytes of shared memory a launch takes.
    pub shared_memory_size: usize,
    /// How each buffer is accessed, in binding order.
    pub io: Vec<BufferIOAttr>,
}

/// A compiled kernel. None is ever made.
#[derive(Clone, Debug)]
pub enum PlironArtifact {
    /// PTX.
    NvptxCode(NvptxModule),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::NvptxCode(module) = self;
        f.write_str(&module.ir)
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _: KernelDefinition,
        _: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "built without LLVM; cubecl's feature `cuda-cpp` compiles with NVRTC".to_owned(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}
