//! Shader sources.

use std::{collections::BTreeMap, env, fmt::Write, fs};

use kiln::expert::kernels::{Access, Binding, KERNELS, Text};
use naga::{
    AddressSpace, Module, ScalarKind, TypeInner,
    valid::{Capabilities, GlobalUse, ValidationFlags, Validator},
};

use crate::support::cases_are;

fn parsed(Text { name, wgsl, .. }: &Text) -> Module {
    naga::front::wgsl::parse_str(wgsl).unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(wgsl)))
}

/// Returns the tensors of a shader, in the order of their bindings.
fn tensors(module: &Module) -> Vec<(naga::Handle<naga::GlobalVariable>, &naga::GlobalVariable)> {
    let all = module.global_variables.iter();
    let mut tensors: Vec<_> =
        all.filter(|(_, variable)| matches!(variable.space, AddressSpace::Storage { .. })).collect();
    tensors.sort_by_key(|(_, variable)| variable.binding.as_ref().map(|at| at.binding));
    tensors
}

/// Returns the name of the shader of a permutation.
fn shader(text: &Text) -> &str {
    text.name.split(' ').next().unwrap_or_default()
}

/// Returns one permutation of each shader, in which `elem` is float16.
fn one_of_each() -> Vec<Text> {
    let mut all: Vec<Text> = Vec::new();
    for text in KERNELS.iter().flat_map(|kernel| kernel.shaders()) {
        let is_known = all.iter().any(|known| shader(known) == shader(&text));
        if !is_known && !shader(&text).ends_with("_integers") && text.wgsl.contains("enable f16;") {
            all.push(text);
        }
    }
    all
}

#[test]
fn shaders_are_valid_within_the_limits_of_every_device() {
    let mut written: BTreeMap<String, (&[Binding], Vec<bool>)> = BTreeMap::new();
    let texts = KERNELS.iter().flat_map(|kernel| kernel.shaders()).enumerate();
    // Of each four texts, one in each type.
    let are_wanted = |i: usize| !cases_are("some") || [0, 3].contains(&(i % 4));
    for text in texts.filter(|(i, _)| are_wanted(*i)).map(|(_, text)| text) {
        let (module, Text { name, wgsl, bindings, .. }) = (parsed(&text), &text);
        // A permutation declares the features that it needs. Matrix units include subgroups: naga refuses
        // `enable subgroups;`. Every WebGPU device converts float16 numbers packed in words.
        let mut wanted = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        wanted.set(Capabilities::SHADER_FLOAT16, wgsl.contains("enable f16;"));
        let matrix_units = Capabilities::COOPERATIVE_MATRIX | Capabilities::SUBGROUP;
        wanted.set(matrix_units, wgsl.contains("enable wgpu_cooperative_matrix;"));
        let info = Validator::new(ValidationFlags::all(), wanted)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(wgsl)));

        let in_browsers = text.clone().with_reads_declared();
        let reads = bindings.iter().filter(|binding| binding.access == Access::Read).count();
        assert_eq!(in_browsers.wgsl.matches("var<storage, read>").count(), reads, "{name}");
        let validated = Validator::new(ValidationFlags::all(), wanted).validate(&parsed(&in_browsers));
        validated.unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&in_browsers.wgsl)));

        let [entry] = &module.entry_points[..] else { panic!("{name} has several entry points") };
        assert_eq!(entry.name, "main", "{name}");
        assert!(entry.workgroup_size.iter().product::<u32>() <= 256, "{name}");
        let bytes_in = |space: AddressSpace| -> u32 {
            let of_space = module.global_variables.iter().filter(|(_, variable)| variable.space == space);
            of_space.map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx())).sum()
        };
        // GPUs with matrix units have twice the workgroup memory that all have.
        let memory = if wgsl.contains("enable wgpu_cooperative_matrix;") { 32 << 10 } else { 16 << 10 };
        assert!(bytes_in(AddressSpace::WorkGroup) <= memory, "{name}");
        // Matrix units read at multiples of 16 bytes, and drivers put one variable after the other.
        let ends_early = |variable: &naga::GlobalVariable| {
            let size = module.types[variable.ty].inner.size(module.to_ctx());
            variable.space == AddressSpace::WorkGroup && !size.is_multiple_of(16)
        };
        if wgsl.contains("enable wgpu_cooperative_matrix;") {
            let early = module.global_variables.iter().find(|(_, variable)| ends_early(variable));
            assert_eq!(early.and_then(|(_, variable)| variable.name.as_deref()), None, "{name}");
        }

        let tensors = tensors(&module);
        assert!(tensors.len() <= 8, "{name}");
        let declared: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.name.as_deref()).collect();
        let bound: Vec<_> = bindings.iter().map(|binding| Some(binding.name)).collect();
        assert_eq!(declared, bound, "{name}: tensors of the shader, and of its launch");
        let all = module.global_variables.iter().filter_map(|(_, variable)| variable.binding.as_ref());
        let mut numbers: Vec<_> = all.map(|at| (at.group, at.binding)).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq((0..=bindings.len() as u32).map(|number| (0, number))), "{name}");
        let (_, written) =
            written.entry(shader(&text).to_owned()).or_insert((bindings, vec![false; bindings.len()]));
        for (is_written, (handle, _)) in written.iter_mut().zip(tensors) {
            *is_written |= info.get_entry_point(0)[handle].contains(GlobalUse::WRITE);
        }
    }
    // Some permutations do not write tensors that others write.
    for (shader, (bindings, written)) in written {
        for (binding, is_written) in bindings.iter().zip(written) {
            assert_eq!(binding.access != Access::Read, is_written, "{shader}: {binding:?}");
        }
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn uniforms_are_laid_out_as_launches_write_them() {
    for text in one_of_each() {
        let module = parsed(&text);
        let info = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some("Info"));
        let Some(TypeInner::Struct { members, .. }) = info.map(|(_, ty)| &ty.inner) else {
            panic!("{} has no uniform", text.name)
        };
        let fields: Vec<_> =
            members.iter().map(|member| (member.name.as_deref().unwrap(), member.offset as usize)).collect();
        assert!(kiln::expert::kernels::UNIFORMS.contains(&&fields[..]), "{}: {fields:?}", text.name);
    }
}

const TABLE: &str = "../shaders/README.md";
const HEAD: &str = "| shaders | tensor | numbers | access | shape |\n|---|---|---|---|---|\n";

/// Compares the table of shaders in `README.md` with the code; `KILN_WRITE_TABLE` writes it.
#[test]
fn the_table_of_tensors_matches_the_shaders() {
    let readme = fs::read_to_string(TABLE).unwrap();
    let (before, rest) = readme.split_once(HEAD).expect("the table has this head");
    let (old, after) = rest.split_once("\n\n").expect("a blank line ends the table");
    // Shapes by the first shader and the tensor.
    let mut shapes = BTreeMap::new();
    let mut shaders = "";
    for row in old.lines() {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let [_, first, tensor, _, _, shape, _] = cells[..] else { panic!("{row}") };
        shaders = if first.is_empty() { shaders } else { first };
        let first = shaders.split(',').next().unwrap_or_default();
        shapes.insert((first.to_owned(), tensor.to_owned()), shape);
    }
    // Adjacent shaders with the same tensors form one group of rows.
    let mut groups: Vec<(Vec<String>, Vec<[String; 3]>)> = Vec::new();
    for text in one_of_each() {
        let module = parsed(&text);
        let rows: Vec<_> = tensors(&module)
            .into_iter()
            .zip(text.bindings)
            .map(|((_, tensor), binding)| {
                let access = match binding.access {
                    Access::Read => "read",
                    Access::Update => "update",
                    Access::Write => "write",
                };
                [format!("`{}`", binding.name), numbers(&module, tensor.ty).to_owned(), access.to_owned()]
            })
            .collect();
        match groups.last_mut() {
            Some((shaders, last)) if *last == rows => shaders.push(shader(&text).to_owned()),
            _ => groups.push((vec![shader(&text).to_owned()], rows)),
        }
    }
    let mut table = String::new();
    for (shaders, rows) in groups {
        let names: Vec<_> = shaders.iter().map(|shader| format!("`{shader}`")).collect();
        for (i, [tensor, numbers, access]) in rows.into_iter().enumerate() {
            let first = if i == 0 { names.join(", ") + " " } else { String::new() };
            let shape = shapes.get(&(names[0].clone(), tensor.clone())).copied().unwrap_or("?");
            writeln!(table, "| {first}| {tensor} | {numbers} | {access} | {shape} |").unwrap();
        }
    }
    let table = table.trim_end();
    if env::var_os("KILN_WRITE_TABLE").is_some() {
        fs::write(TABLE, format!("{before}{HEAD}{table}\n\n{after}")).unwrap();
    } else {
        assert_eq!(old, table, "KILN_WRITE_TABLE=1 writes it anew");
    }
    assert!(!table.contains("| ? |"), "every tensor has a shape");
}

/// Returns the element type of a tensor.
fn numbers(module: &Module, ty: naga::Handle<naga::Type>) -> &'static str {
    match module.types[ty].inner {
        TypeInner::Array { base, .. } => numbers(module, base),
        TypeInner::Vector { scalar, .. } | TypeInner::Scalar(scalar) => match (scalar.kind, scalar.width) {
            (ScalarKind::Float, 2) => "elem",
            (ScalarKind::Float, _) => "f32",
            (ScalarKind::Sint, _) => "i32",
            (ScalarKind::Uint, _) => "u32",
            _ => panic!("{scalar:?}"),
        },
        ref other => panic!("{other:?}"),
    }
}
