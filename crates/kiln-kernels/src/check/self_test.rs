//! Compares the kernels of a device with their references: drivers differ, and a wrong kernel gives text that looks right for a while.

use burn::tensor::{DType, Device};
use kiln_core::{Error, Result};
use kiln_weights::Format;

use crate::{
    check::{any_case::AnyCase, registry::KernelInfo},
    runtime::{
        choice::{Choice, Path},
        device::info::Opened,
        kernels::Kernels,
    },
};

/// How many inputs of a kernel are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage<'a> {
    /// A few, and all with weights that are packed in these formats: all kernels together take about a second on a GPU.
    Quick(&'a [Format]),
    /// All that Kiln's own tests have.
    Full,
}

/// What comparing a kernel with its reference gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub kernel: &'static str,
    /// The implementation that was compared.
    pub path: Path,
    /// The type of the numbers.
    pub dtype: DType,
    /// How many inputs were compared.
    pub compared: usize,
    /// How many gave a wrong result, or one that depends on what is computed beside it.
    pub wrong: usize,
    /// What is wrong with the first of them, in a sentence.
    pub why: Option<String>,
}

impl Verdict {
    pub fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

/// Compares the implementation of `kernel` that [`Choice::Auto`] selects on a device with its reference, computed on the CPU where this build has it;
/// and rows that are computed together with the same rows alone. `None` if no implementation takes its inputs.
///
/// # Errors
/// [`Error::DeviceLost`], [`Error::OutOfMemory`]. Other errors are wrong results.
pub fn self_test(
    kernel: &KernelInfo,
    device: &Opened,
    dtype: DType,
    coverage: Coverage<'_>,
) -> Result<Option<Verdict>> {
    /// Inputs of a quick test, besides those that it always has.
    const FEW: usize = 4;

    let opened = device;
    let device = &opened.device;
    let reference = Kernels::new(Choice::Reference, &reference_device(device))?;
    let kernels = Kernels::new(Choice::Auto, device)?;
    let path = kernels.path();
    let mut cases = kernel.cases();
    cases.retain(|case| path != Path::Reference && case.path(path, dtype, device) == path);
    let step = cases.len().div_ceil(FEW).max(1);
    let is_compared = |(number, case): &(usize, &AnyCase)| match coverage {
        Coverage::Quick(formats) => {
            let is_launched = case.format().is_some_and(|format| formats.contains(&format));
            number.is_multiple_of(step) || case.is_probed() || is_launched
        }
        Coverage::Full => true,
    };
    let mut verdict = Verdict { kernel: kernel.name, path, dtype, compared: 0, wrong: 0, why: None };
    for (_, case) in cases.iter().enumerate().filter(is_compared) {
        let want = case.run(&reference, dtype)?;
        let why = match case.run(&kernels, dtype) {
            Ok(got) => match case.difference(dtype, &got, &want) {
                None => sentence(case.variance(&kernels, dtype), opened)?,
                why => why,
            },
            Err(error) => sentence(Err(error), opened)?,
        };
        verdict.compared += 1;
        if let Some(why) = why {
            verdict.wrong += 1;
            verdict.why.get_or_insert_with(|| format!("{case:?}: {why}"));
        }
    }
    Ok((verdict.compared > 0).then_some(verdict))
}

/// What is wrong, where errors are wrong, too: but for those that say nothing of a kernel.
fn sentence(found: Result<Option<String>>, device: &Opened) -> Result<Option<String>> {
    match found {
        Err(error @ (Error::DeviceLost(_) | Error::OutOfMemory { .. })) => Err(error),
        Err(error) => device.check().map(|()| Some(error.to_string())),
        found => found,
    }
}

/// Where references are computed.
#[cfg_attr(feature = "cpu", allow(unused_variables, reason = "without a CPU it is the device itself"))]
fn reference_device(device: &Device) -> Device {
    #[cfg(feature = "cpu")]
    return Device::flex();
    #[cfg(not(feature = "cpu"))]
    return device.clone();
}
