//! The texts of shaders.

use kiln::expert::kernels::{KERNELS, Text};
use naga::valid::{Capabilities, ValidationFlags, Validator};

#[test]
fn shaders_are_valid_and_keep_to_what_every_device_has() {
    for Text { name, wgsl: text, .. } in KERNELS.iter().flat_map(|kernel| kernel.shaders()) {
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));
        // What a permutation asks for, it says. Subgroups come with matrix units: naga refuses `enable subgroups;`. Every device of WebGPU
        // converts float16 numbers in words.
        let mut wanted = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        wanted.set(Capabilities::SHADER_FLOAT16, text.contains("enable f16;"));
        let matrix_units = Capabilities::COOPERATIVE_MATRIX | Capabilities::SUBGROUP;
        wanted.set(matrix_units, text.contains("enable wgpu_cooperative_matrix;"));
        Validator::new(ValidationFlags::all(), wanted)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));

        let [entry] = &module.entry_points[..] else { panic!("{name} has several entry points") };
        assert_eq!(entry.name, "main", "{name}");
        assert!(entry.workgroup_size.iter().product::<u32>() <= 256, "{name}");
        let bytes_in = |space: naga::AddressSpace| -> u32 {
            let of_space = module.global_variables.iter().filter(|(_, variable)| variable.space == space);
            of_space.map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx())).sum()
        };
        assert!(bytes_in(naga::AddressSpace::WorkGroup) <= 16 << 10, "{name}");
        let storage = module
            .global_variables
            .iter()
            .filter(|(_, variable)| matches!(variable.space, naga::AddressSpace::Storage { .. }));
        assert!(storage.count() <= 8, "{name}");
    }
}
