//! Compares the kernels of a device with their references: drivers differ, and a wrong kernel gives text that looks right for a while.

use burn::tensor::{DType, Device};
use kiln_core::{Error, Result};

use crate::{Choice, KernelInfo, Kernels, Path, cases::AnyCase, device::Opened};

/// How many inputs of a kernel are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// A few: all kernels together take about a second on a GPU.
    Quick,
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
    /// How many gave a wrong result.
    pub wrong: usize,
    /// What is wrong with the first of them, in a sentence.
    pub why: Option<String>,
}

impl Verdict {
    pub fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

/// Compares the implementation of `kernel` that [`Choice::Auto`] selects on a device with its reference, computed on the CPU where this build has it.
/// `None` if no implementation takes its inputs.
///
/// # Errors
/// [`Error::DeviceLost`], [`Error::OutOfMemory`]. Other errors are wrong results.
pub fn self_test(
    kernel: &KernelInfo,
    device: &Opened,
    dtype: DType,
    extent: Coverage,
) -> Result<Option<Verdict>> {
    /// Inputs of a quick test, besides those that it always has.
    const FEW: usize = 4;

    let device = &device.device;
    let reference = Kernels::new(Choice::Reference, &reference_device(device))?;
    let path = Kernels::new(Choice::Auto, device)?.path();
    let mut cases = kernel.cases();
    cases.retain(|case| path != Path::Reference && case.path(path, dtype, device) == path);
    let step = match extent {
        Coverage::Quick => cases.len().div_ceil(FEW),
        Coverage::Full => 1,
    };
    let mut verdict = Verdict { kernel: kernel.name, path, dtype, compared: 0, wrong: 0, why: None };
    let is_compared =
        |(number, case): &(usize, &AnyCase)| number.is_multiple_of(step.max(1)) || case.is_probed();
    for (_, case) in cases.iter().enumerate().filter(is_compared) {
        let want = case.run(&reference, dtype)?;
        let why = match case.run(&Kernels::new(Choice::Auto, device)?, dtype) {
            Ok(got) => case.difference(dtype, &got, &want),
            Err(error @ (Error::DeviceLost(_) | Error::OutOfMemory { .. })) => return Err(error),
            Err(error) => Some(error.to_string()),
        };
        verdict.compared += 1;
        if let Some(why) = why {
            verdict.wrong += 1;
            verdict.why.get_or_insert_with(|| format!("{case:?}: {why}"));
        }
    }
    Ok((verdict.compared > 0).then_some(verdict))
}

/// Where references are computed.
#[cfg_attr(feature = "cpu", allow(unused_variables, reason = "without a CPU it is the device itself"))]
fn reference_device(device: &Device) -> Device {
    #[cfg(feature = "cpu")]
    return Device::flex();
    #[cfg(not(feature = "cpu"))]
    return device.clone();
}
