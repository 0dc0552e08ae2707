//! Every custom kernel, in up to four implementations that agree.
//!
//! A kernel is a type that implements [`Kernel`]: its fields are the inputs, and [`Kernels::run`] computes it. The
//! reference is written in plain Burn operations, runs on every device, and defines what the other implementations
//! compute. [`Checked`] adds what tests need.
//!
//! Modules use those before them in this list: `shaders`, `runtime`, `testing`, the kernels in a folder for each
//! idea, `check`.
//!
//! **Invariant:** nothing outside this crate launches a kernel of its own, or names cubecl or wgpu.
#![forbid(unsafe_code)]

/// The uniform of each shader, which `build.rs` makes of its text.
#[cfg(feature = "wgpu")]
mod shaders {
    include!(concat!(env!("OUT_DIR"), "/shaders.rs"));
}

mod runtime;

mod testing;

mod attention;
mod cache;
mod experts;
mod linear;
mod norm;
mod sampling;
mod state;

mod check;

pub use attention::{Attention, AttentionShape, packed::AttentionPacked, rotary::Rotary};
pub use cache::{kv_append::KvAppend, kv_pack::KvPack, kv_reorder::KvReorder, kv_unpack::KvUnpack};
pub use check::{
    registry::{KERNELS, KernelInfo},
    self_test::{Coverage, Verdict, self_test},
};
pub use experts::{
    expert_linear::ExpertLinear,
    route::{Route, Routing},
    weighted_sum::WeightedSum,
};
pub use kiln_weights::streams::Arithmetic;
pub use linear::{
    Linear,
    activate::Activate,
    activation::Activation,
    around::Then,
    gated::Gated,
    matrix::{Matrix, MatrixStack},
    normed_linear::NormedLinear,
    packed::{PackedLayout, PackedMatrix, Use},
    unpack::Unpack,
};
pub use norm::{
    layer_norm::LayerNorm,
    rms_norm::{NormOrder, RmsNorm},
};
#[doc(hidden)]
pub use runtime::faults;
#[cfg(feature = "cube")]
pub use runtime::launches::launches_of;
pub use runtime::{
    choice::{Choice, Path, Ran},
    device,
    kernel::{INVARIANT_UP_TO, Kernel},
    kernels::Kernels,
    product::product,
    recording::{Recorded, Recording},
    shader::{Access, Binding, Shader, Text},
};
pub use sampling::{
    beam_step::{BeamShape, BeamStep, Beams, MOST_BEAMS},
    sample::{Draws, Sample, Sampling, likeliest},
    top_logprobs::TopLogprobs,
};
#[cfg(feature = "wgpu")]
#[doc(hidden)]
pub use shaders::UNIFORMS;
pub use state::{causal_conv::CausalConv, selective_scan::SelectiveScan};
pub use testing::checked::Checked;

/// Inputs with which implementations of a kernel are compared, by tests and by the self-test of a device.
pub mod cases {
    pub use crate::{
        check::any_case::AnyCase,
        testing::{
            case::{Case, Read, Rounding},
            numbers::{Cut, Layout, Numbers, Plain, Swapped},
        },
    };
}

/// Batch invariance: what a row or a token comes to does not depend on what is computed beside it.
pub mod invariance {
    pub use crate::testing::cut::Extent;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use std::{collections::BTreeSet, fs, path::Path};

    /// A module uses those before it.
    const ORDER: [&str; 11] = [
        "shaders",
        "runtime",
        "testing",
        "norm",
        "sampling",
        "cache",
        "attention",
        "linear",
        "experts",
        "state",
        "check",
    ];

    /// Adds the modules that the files of a folder name after `crate::`.
    fn add_used(folder: &Path, used: &mut BTreeSet<String>) {
        for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
            if file.is_dir() {
                add_used(&file, used);
                continue;
            }
            let text = fs::read_to_string(file).unwrap();
            let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            for rest in code.split("crate::").skip(1) {
                let mut depth = 0;
                for part in rest.split_inclusive(['{', '}', ',', ';', ':', '(', ')', ' ', '<', '>']) {
                    let name = part.trim_end_matches(|c: char| !c.is_alphanumeric() && c != '_');
                    if depth <= 1 && ORDER.contains(&name) {
                        used.insert(name.to_owned());
                    }
                    match part.chars().last() {
                        Some('{') => depth += 1,
                        Some('}') => depth -= 1,
                        _ => {}
                    }
                    if depth <= 0 && !part.ends_with(':') {
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn modules_use_those_before_them() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for (rank, module) in ORDER.iter().enumerate().skip(1) {
            let mut used = BTreeSet::new();
            add_used(&source.join(module), &mut used);
            assert!(used.contains("runtime"), "{module} uses the runtime: {used:?}");
            let climbing: Vec<_> = used.iter().filter(|name| !ORDER[..=rank].contains(&&***name)).collect();
            assert!(climbing.is_empty(), "{module} uses {climbing:?}");
        }
    }
}
