//! Compares the kernels of a device with their references: drivers differ, and a wrong kernel produces text
//! that looks right for a while.

use burn::tensor::{DType, Device};
use kiln_core::{Error, Result};
use kiln_weights::{Format, streams::Arithmetic};

use crate::{
    check::{any_case::AnyCase, registry::KernelInfo},
    runtime::{
        choice::{Choice, Implementation},
        device::info::Opened,
        kernels::Kernels,
    },
};

/// How many inputs per kernel are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage<'a> {
    /// A few inputs, and all with weights packed in these formats whose products have this arithmetic: all
    /// kernels together take about a second on a GPU.
    Quick(&'a [(Format, Arithmetic)]),
    /// All inputs of Kiln's own tests.
    Full,
}

/// The result of comparing a kernel with its reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub kernel: &'static str,
    /// The implementation that was compared.
    pub path: Implementation,
    /// The type of the numbers.
    pub dtype: DType,
    /// Number of inputs that were compared.
    pub compared: usize,
    /// Number of inputs with a wrong result, or with one that depends on what is computed beside it.
    pub wrong: usize,
    /// A sentence that says what is wrong with the first of them.
    pub why: Option<String>,
}

impl Verdict {
    pub fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

/// Compares the implementation of `kernel` that [`Choice::Auto`] selects on a device with the reference, and
/// rows that are computed together with the same rows alone.
///
/// The reference runs on the CPU if this build supports it. Returns `None` if no implementation takes its
/// inputs.
///
/// # Errors
/// [`Error::DeviceLost`], [`Error::OutOfMemory`]. Other errors count as wrong results.
pub async fn self_test(
    kernel: &KernelInfo,
    device: &Opened,
    dtype: DType,
    coverage: Coverage<'_>,
) -> Result<Option<Verdict>> {
    /// Number of inputs in a quick test, besides those that are always included.
    const FEW: usize = 4;

    let opened = device;
    let device = &opened.device;
    let reference = Kernels::new(Choice::Reference, &reference_device(device))?;
    let kernels = Kernels::new(Choice::Auto, device)?;
    let path = kernels.implementation();
    let mut cases = kernel.cases();
    cases.retain(|case| path != Implementation::Reference && case.path(path, dtype, device) == path);
    let step = cases.len().div_ceil(FEW).max(1);
    let is_compared = |(number, case): &(usize, &AnyCase)| match coverage {
        Coverage::Quick(weights) => {
            let is_launched = case.packed().is_some_and(|packed| weights.contains(&packed));
            number.is_multiple_of(step) || case.is_probed() || is_launched
        }
        Coverage::Full => true,
    };
    let mut verdict = Verdict { kernel: kernel.name, path, dtype, compared: 0, wrong: 0, why: None };
    for (_, case) in cases.iter().enumerate().filter(is_compared) {
        let want = case.run(&reference, dtype).await?;
        let why = match case.run(&kernels, dtype).await {
            Ok(got) => match case.difference(dtype, &got, &want) {
                None => sentence(case.variance(&kernels, dtype).await, opened)?,
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

/// Turns errors into descriptions of a wrong result, except errors that say nothing about the kernel.
fn sentence(found: Result<Option<String>>, device: &Opened) -> Result<Option<String>> {
    match found {
        Err(error @ (Error::DeviceLost(_) | Error::OutOfMemory { .. })) => Err(error),
        Err(error) => device.check().map(|()| Some(error.to_string())),
        found => found,
    }
}

/// The device on which references are computed.
#[cfg_attr(feature = "cpu", allow(unused_variables, reason = "without a CPU it is the device itself"))]
fn reference_device(device: &Device) -> Device {
    #[cfg(feature = "cpu")]
    return Device::flex();
    #[cfg(not(feature = "cpu"))]
    return device.clone();
}
