//! The result of a row or token does not depend on what is computed in the same launch, bit for bit.

use burn::tensor::DType;
use kiln::expert::{
    kernels::{Choice, Implementation, Kernels},
    read_back::block_on,
};

use super::{choices, is_repeated, kernels, path};

#[test]
fn results_of_kernels_do_not_depend_on_other_rows_and_tokens() {
    let mut failures = Vec::new();
    for (name, device) in &kiln_testkit::devices() {
        for dtype in
            [DType::F32, DType::F16, DType::BF16].into_iter().filter(|&dtype| device.supports_dtype(dtype))
        {
            for (choice, _) in choices(name, device) {
                // On GPUs, `auto` is one of the other choices. References take hundreds of launches of Burn's
                // own kernels there.
                if name != "cpu" && [Choice::Auto, Choice::Reference].contains(&choice) {
                    continue;
                }
                // Other types change loads and stores, not sums.
                let every = match (dtype, choice) {
                    (DType::F32, Choice::Wgsl) => 1,
                    (DType::F32, Choice::Cube) if name == "wgpu" => 16,
                    (DType::F32, _) => 2,
                    _ => 8,
                };
                for kernel in kernels() {
                    for case in kernel.cases().into_iter().step_by(every) {
                        if is_repeated(&case, choice)
                            || name != "cpu"
                                && case.path(path(choice, name), dtype, device) == Implementation::Reference
                        {
                            continue;
                        }
                        let kernels = Kernels::new(choice, device).unwrap();
                        let varies = block_on(case.variance(&kernels, dtype)).unwrap();
                        failures.extend(
                            varies.map(|why| format!("{choice} on {name}, {dtype:?}: {case:?}: {why}")),
                        );
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases depend:\n{}", failures.len(), failures.join("\n"));
}
