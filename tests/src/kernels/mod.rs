//! Every kernel: the definition on the CPU agrees with every implementation on every device.

mod attention;
mod cases;
mod in_place;
mod numbers;
mod packed;
mod sample;
mod shaders;

use burn::tensor::{DType, Device, TensorData};
use kiln::{
    Error,
    kernels::{Choice, Kernels, Ran},
};

use cases::{difference, table};

/// The choices a device takes, in a test that fails where it takes others.
fn choices(name: &str, device: &Device) -> Vec<(Choice, Kernels)> {
    let takes: &[Choice] = match name {
        "cpu" => &[Choice::Auto, Choice::Definition],
        "wgpu" => &[Choice::Auto, Choice::Definition, Choice::Wgsl, Choice::Cube],
        "cuda" => &[Choice::Auto, Choice::Definition, Choice::Cube],
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

#[test]
fn kernels_agree_with_their_definitions() {
    let devices = kiln_testkit::devices();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("definitions run on the CPU");
    let definition = Kernels::new(Choice::Definition, cpu).unwrap();
    let mut failures = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let wanted: Vec<TensorData> =
            table().iter().map(|case| case.run(&definition, cpu, dtype).unwrap()).collect();
        for (name, device) in &devices {
            if !device.supports_dtype(dtype) {
                eprintln!("{name} has no {dtype:?}");
                continue;
            }
            for (choice, _) in choices(name, device) {
                for (case, want) in table().iter().zip(&wanted) {
                    let kernels = Kernels::new(choice, device).unwrap();
                    let got = case.run(&kernels, device, dtype);
                    let path = case.path(choice, name, dtype);
                    let what = format!("{choice} on {name}, {dtype:?}: {case}");
                    assert_eq!(kernels.ran(), [Ran { kernel: case.kernel(), path, count: 1 }], "{what}");
                    let wrong = match got {
                        Ok(got) => difference(case, dtype, &got, want),
                        Err(error) => Some(error.to_string()),
                    };
                    failures.extend(wrong.map(|why| format!("{what}: {why}")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn choices_are_read_as_they_are_written() {
    for choice in Choice::ALL {
        assert_eq!(choice.to_string().parse(), Ok(choice));
    }
    let error = "fast".parse::<Choice>().unwrap_err().to_string();
    assert_eq!(error, "unknown kernel choice `fast`; known: auto, definition, wgsl, cube");
}
