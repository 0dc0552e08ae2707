//! Every kernel: the reference on the CPU agrees with every implementation on every device.

mod attention;
mod in_place;
mod invariance;
mod product;
mod recordings;
mod sample;
mod shaders;
mod words;

use crate::support::{cases_are, some};
use burn::tensor::{DType, Device};
use kiln::{
    Error,
    device::{DeviceClass, Opened},
    expert::{
        kernels::{
            Arithmetic, Choice, Implementation, KERNELS, KernelInfo, Kernels, RunCount, cases::AnyCase,
            faults::set_keeps_subnormals,
        },
        read_back::block_on,
    },
};

/// Returns the choices that a device supports, and checks that these are the expected ones.
fn choices(name: &str, device: &Device) -> Vec<(Choice, Kernels)> {
    let takes: &[Choice] = match name {
        "cpu" => &[Choice::Auto, Choice::Reference],
        "wgpu" => &[Choice::Auto, Choice::Reference, Choice::Wgsl, Choice::Cube],
        "cuda" => &[Choice::Auto, Choice::Reference, Choice::Cube],
        _ => panic!("no kernels are known for {name}"),
    };
    let mut kernels = Vec::new();
    for choice in Choice::ALL {
        match Kernels::new(choice, device) {
            Ok(_) if !takes.contains(&choice) => panic!("{name} takes {choice}"),
            Err(Error::Setting { name: "kernels", .. }) if !takes.contains(&choice) => {}
            made => kernels.push((choice, made.unwrap())),
        }
    }
    kernels
}

/// Returns the implementation that a choice selects on a device.
fn path(choice: Choice, device: &str) -> Implementation {
    match (choice, device) {
        (Choice::Reference, _) => Implementation::Reference,
        (Choice::Auto, "cpu") => Implementation::Native,
        (Choice::Wgsl, _) | (Choice::Auto, "wgpu") => Implementation::Wgsl,
        (Choice::Cube, _) | (Choice::Auto, _) => Implementation::Cube,
    }
}

/// Whether a case is another one once more: `#[cube]` functions take weights whose products may be in
/// integers as they take others.
fn is_repeated(case: &AnyCase, choice: Choice) -> bool {
    choice == Choice::Cube && matches!(case.packed(), Some((_, Arithmetic::Integers)))
}

/// Returns all kernels, or the one that `KILN_TEST_KERNEL` names, or a share of them: `1/2`, `2/2`.
fn kernels() -> Vec<&'static KernelInfo> {
    let wanted = std::env::var("KILN_TEST_KERNEL").unwrap_or_default();
    let kernels: Vec<_> = match wanted.split_once('/') {
        Some((share, of)) => {
            let [share, of] = [share, of].map(|number| number.parse::<usize>().expect("a share as 1/2"));
            KERNELS.iter().skip(share - 1).step_by(of).collect()
        }
        None => KERNELS.iter().filter(|kernel| wanted.is_empty() || wanted == kernel.name).collect(),
    };
    assert!(!kernels.is_empty(), "no kernel is named {wanted:?}");
    kernels
}

#[test]
fn implementations_agree_with_the_reference() {
    let devices = kiln_testkit::devices();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("references run on the CPU");
    let reference = Kernels::new(Choice::Reference, cpu).unwrap();
    let mut failures = Vec::new();
    for kernel in kernels() {
        let mut cases = kernel.cases();
        let only_many_rows = cases_are("many-rows");
        if only_many_rows {
            cases.retain(|case| case.has_many_rows(&reference));
        }
        assert!(!cases.is_empty(), "{} has no cases", kernel.name);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let wanted: Vec<_> =
                cases.iter().map(|case| block_on(case.run(&reference, dtype)).unwrap()).collect();
            for (name, device) in &devices {
                if !device.supports_dtype(dtype) {
                    eprintln!("{name} has no {dtype:?}");
                    continue;
                }
                for (choice, _) in choices(name, device) {
                    // On GPUs, `auto` is one of the other choices.
                    if name != "cpu" && choice == Choice::Auto {
                        continue;
                    }
                    // References on GPUs take up to hundreds of launches of Burn's operations, which Burn
                    // itself tests.
                    let every = match (name.as_str(), choice) {
                        ("wgpu" | "cuda", Choice::Reference) => 16,
                        // Written for CUDA, where more cases run. Compiling them for wgpu takes long.
                        ("wgpu", Choice::Cube) => 8,
                        // Units for matrices multiply only these types.
                        ("wgpu" | "cuda", _) if only_many_rows && dtype != DType::F32 => 1,
                        ("wgpu" | "cuda", _) if only_many_rows => continue,
                        // All run every night.
                        ("cuda", _) if cases_are("some") && dtype == DType::F32 => 2,
                        // The types differ only in loads and stores.
                        ("cuda", _) if dtype == DType::BF16 => 4,
                        ("wgpu" | "cuda", _) if dtype != DType::F32 => 2,
                        _ => 1,
                    };
                    for (i, (case, want)) in cases.iter().zip(&wanted).enumerate().step_by(every) {
                        let path = case.path(path(choice, name), dtype, device);
                        if is_repeated(case, choice)
                            || name != "cpu"
                                && path == Implementation::Reference
                                && (only_many_rows || i % 16 != 0)
                        {
                            continue;
                        }
                        let kernels = Kernels::new(choice, device).unwrap();
                        let got = block_on(case.run(&kernels, dtype));
                        let what = format!("{choice} on {name}, {dtype:?}: {case:?}");
                        assert_eq!(
                            kernels.ran(),
                            [RunCount { kernel: kernel.name, implementation: path, count: 1 }],
                            "{what}"
                        );
                        let wrong = match got {
                            Ok(got) => case.difference(dtype, &got, want),
                            Err(error) => Some(error.to_string()),
                        };
                        failures.extend(wrong.map(|why| format!("{what}: {why}")));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// Devices that flush subnormal float16 numbers to 0 use other shaders for packed weights.
#[test]
fn shaders_that_unpack_scales_with_integers_agree_with_the_reference() {
    let devices = kiln_testkit::devices::opened();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("references run on the CPU");
    let reference = Kernels::new(Choice::Reference, &cpu.device).unwrap();
    let mut failures = Vec::new();
    for (name, opened) in devices {
        let device = &opened.device;
        let Some(kept) = set_keeps_subnormals(device, false) else { continue };
        assert!(kept || opened.info.class != DeviceClass::Software, "{name} is Mesa, which keeps them");
        for kernel in kernels() {
            let cases = kernel.cases();
            let is_of_shader = |case: &&AnyCase| {
                case.packed().is_some()
                    && case.path(Implementation::Wgsl, DType::F32, device) == Implementation::Wgsl
            };
            for case in some(cases.iter().filter(is_of_shader)) {
                let want = block_on(case.run(&reference, DType::F32)).unwrap();
                let got = block_on(case.run(&Kernels::new(Choice::Wgsl, device).unwrap(), DType::F32));
                let wrong = match got {
                    Ok(got) => case.difference(DType::F32, &got, &want),
                    Err(error) => Some(error.to_string()),
                };
                failures.extend(wrong.map(|why| format!("{name}: {case:?}: {why}")));
            }
        }
        set_keeps_subnormals(device, kept);
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// The self-test leaves out matrix units that give wrong results, those of a kernel or all. This process does
/// without those of a kernel from then on, so tests that want them come before, on the same thread.
#[test]
fn matrix_units_can_be_left_out() {
    if !cases_are("many-rows") {
        return eprintln!("not tested: only many rows take matrix units");
    }
    let devices = kiln_testkit::devices::opened();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("references run on the CPU");
    let reference = Kernels::new(Choice::Reference, &cpu.device).unwrap();
    let with_units =
        devices.iter().filter_map(|(name, opened)| Some((name, opened, opened.info.matrix_units?)));
    for (name, opened, units) in with_units {
        let mut kernels = kernels();
        kernels.retain(|kernel| ["linear", "attention"].contains(&kernel.name));
        for kernel in kernels {
            let is_launched = |case: &AnyCase| {
                let own = path(Choice::Auto, name);
                case.path(own, DType::F16, &opened.device) == own && case.has_many_rows(&reference)
            };
            let cases: Vec<_> = kernel.cases().into_iter().filter(is_launched).step_by(4).collect();
            let results = |on: &Opened| -> Vec<_> {
                let kernels = Kernels::new(Choice::Auto, &on.device).unwrap();
                let run = |case: &AnyCase| block_on(case.run(&kernels, DType::F16)).unwrap();
                cases.iter().map(run).collect()
            };
            let own = results(opened);
            let without = results(&opened.clone().with_matrix_units(None));
            let restored = opened.clone().with_matrix_units(Some(units));
            assert!(own != without, "{} on {name} has the same bits without matrix units", kernel.name);
            for (case, got) in cases.iter().zip(&without) {
                let want = block_on(case.run(&reference, DType::F16)).unwrap();
                assert_eq!(case.difference(DType::F16, got, &want), None, "{name}: {case:?}");
            }
            assert!(results(&restored) == own, "{} on {name}: units are not restored", kernel.name);
            let left_out = restored.without_matrix_units_in([kernel.name.to_owned()]);
            assert!(results(&left_out) == without, "{} on {name}: units are not left out", kernel.name);
        }
    }
}

/// Where lanes have few registers, products and attention take fewer rows at once.
#[test]
fn few_registers_are_enough() {
    if !cases_are("many-rows") {
        return eprintln!("not tested: other tests run meanwhile, and compare bits");
    }
    let devices = kiln_testkit::devices::opened();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("references run on the CPU");
    let reference = Kernels::new(Choice::Reference, &cpu.device).unwrap();
    for (name, opened) in devices.iter().filter(|(name, _)| name.starts_with("wgpu")) {
        let own = opened.info.few_registers;
        let mut kernels = kernels();
        kernels.retain(|kernel| ["linear", "normed_linear", "gated", "attention"].contains(&kernel.name));
        for kernel in kernels {
            let is_launched = |case: &AnyCase| {
                let own = path(Choice::Auto, name);
                case.path(own, DType::F16, &opened.device) == own && !case.has_many_rows(&reference)
            };
            let cases: Vec<_> = kernel.cases().into_iter().filter(is_launched).collect();
            let results = |are_few| -> Vec<_> {
                let on = opened.clone().with_few_registers(are_few);
                let kernels = Kernels::new(Choice::Auto, &on.device).unwrap();
                let run = |case: &AnyCase| block_on(case.run(&kernels, DType::F16)).unwrap();
                cases.iter().map(run).collect()
            };
            let (few, many) = (results(true), results(false));
            opened.clone().with_few_registers(own);
            if kernel.name != "attention" {
                assert!(few == many, "{} on {name} has other bits with few registers", kernel.name);
                continue;
            }
            for (case, got) in cases.iter().zip(&few) {
                let want = block_on(case.run(&reference, DType::F16)).unwrap();
                assert_eq!(case.difference(DType::F16, got, &want), None, "{name}: {case:?}");
            }
        }
    }
}

#[test]
fn kernel_choices_are_parsed_from_what_they_print() {
    for choice in Choice::ALL {
        assert_eq!(choice.to_string().parse(), Ok(choice));
    }
    assert_eq!("definition".parse(), Ok(Choice::Reference), "the old name");
    let error = "fast".parse::<Choice>().unwrap_err().to_string();
    assert_eq!(error, "unknown kernel choice `fast`; known: auto, reference, wgsl, cube");
}
