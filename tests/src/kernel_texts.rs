//! Writes the shaders that compilers are to check into a folder, as WGSL and as the SPIR-V that wgpu passes
//! to a driver. `tools/gpu/check.py` runs GPU compilers on them and prints their reports. Shaders for matrix
//! units are in folders named after the sizes of their matrices.
#![allow(clippy::disallowed_methods, reason = "tests write files of their own")]

use std::{env, error::Error, fs, path::Path};

use kiln::expert::kernels::{KERNELS, Text};
use naga::{
    back::spv,
    proc::{BoundsCheckPolicies, BoundsCheckPolicy},
    valid::{Capabilities, ValidationFlags, Validator},
};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args().nth(1).ok_or("usage: kernel-texts FOLDER")?;
    let folder = Path::new(&folder);
    for text in KERNELS.iter().flat_map(|kernel| kernel.shaders()).filter(|text| is_written(&text.name)) {
        // Not every compiler supports matrix units, and those that do support only some sizes.
        let matrix = ["coop_mat8x8", "coop_mat16x8", "coop_mat16x16"]
            .into_iter()
            .find(|matrix| text.wgsl.contains(matrix));
        let folder = matrix.map_or_else(|| folder.to_owned(), |matrix| folder.join(matrix));
        fs::create_dir_all(&folder)?;
        let file = folder.join(text.name.replace(' ', "-"));
        fs::write(file.with_extension("wgsl"), &text.wgsl)?;
        let bytes: Vec<u8> = spirv(&text)?.into_iter().flat_map(u32::to_le_bytes).collect();
        fs::write(file.with_extension("spv"), bytes)?;
    }
    Ok(())
}

/// Whether a permutation of a shader is written. Products with packed weights have 14 formats whose
/// surrounding code is the same: one and eight rows of x, and the fewest and the most lanes, are sufficient,
/// with four rows of the usual formats; and of products with bytes, one activation.
/// Among the shaders for devices that flush subnormal numbers to 0, which no known desktop driver does, those
/// for one row of x in Q8_0, Q4_K and Q6_K show the cost of unpacking with integers.
fn is_written(name: &str) -> bool {
    let parts: Vec<&str> = name.split(' ').collect();
    match parts[..] {
        ["linear_packed", _, format, rows, splits, _] => {
            let is_usual = ["1", "5", "8", "10"].contains(&format);
            (["0", "3"].contains(&rows) || rows == "2" && is_usual) && ["0", "5"].contains(&splits)
        }
        ["linear_bytes", _, _, rows, splits, after] => {
            ["0", "3"].contains(&rows) && ["0", "5"].contains(&splits) && ["0", "1", "5"].contains(&after)
        }
        ["linear_packed_integers", _, format, "0", "0", "0"] => ["5", "8", "10"].contains(&format),
        [shader, ..] if shader.ends_with("_integers") => false,
        _ => true,
    }
}

/// Compiles a shader to SPIR-V with the options that cubecl-wgpu uses.
fn spirv(Text { wgsl, counts_loops, .. }: &Text) -> Result<Vec<u32>, Box<dyn Error>> {
    let module = naga::front::wgsl::parse_str(wgsl)?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module)?;
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::empty(),
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: *counts_loops,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let entry =
        spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: "main".to_owned() };
    Ok(spv::write_vec(&module, &info, &options, Some(&entry))?)
}
