//! Self-tests of GPUs. Kernels are trusted if they gave the results of their references once on this GPU with
//! this driver; and a model runs with the kernels with which it computes the same as on the CPU.

mod model;
mod record;

use std::collections::BTreeSet;

use burn::tensor::DType;
use kiln_core::{Error, Result};
use kiln_kernels::{
    Arithmetic, Choice, Coverage, KERNELS, KernelInfo, Kernels, Verdict,
    device::{self, DeviceClass, Opened},
    self_test,
};
use kiln_weights::Format;

pub(crate) use model::Ends;
pub use model::{Agreement, ModelVerdict};
use record::Record;
pub use record::{interrupted, keep_verdicts, kept_verdicts};

/// When the kernels of a device are compared with their references before use, and a model on the device with
/// the same model on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelfTest {
    /// At the first use of a GPU, of a driver, and of a version of Kiln, by a model with new formats or
    /// shapes. Results are stored in the user's cache folder, `kiln/self-test.json`.
    #[default]
    Once,
    /// At every load, on any device.
    Always,
    Never,
}

/// Name of the matrix units, a part of a device that is not a kernel.
const MATRIX_UNITS: &str = "matrix units";

/// Beginning of the name of the matrix units in one kernel.
const MATRIX_UNITS_OF: &str = "matrix units of ";

/// Name of captured steps.
const CAPTURED: &str = "captured steps";

/// Name of the work on a device before a model is compared.
const LOADING: &str = "loading";

/// Name of a model that is wrong even without everything that can be left out.
const MODEL: &str = "the model";

/// Number of kernels that crashed processes from which on a device is not used.
const MOST_CRASHES: usize = 3;

/// A device, as far as it is trusted.
#[derive(Clone, Debug)]
pub(crate) struct Trusted {
    pub(crate) device: Opened,
    pub(crate) kernels: Kernels,
    /// Whether steps may be captured and replayed.
    pub(crate) captures: bool,
}

/// Tests the parts of a device that a model uses, if the user did not choose kernels. `packed`: the formats
/// of packed weights, and the arithmetic of their products; `ends`: the parts of the model that are compared.
///
/// A device that is lost during the test is opened again, and does not get the kernel that lost it.
///
/// # Errors
/// [`Error::Device`] for a device that must not be used; errors of the device.
pub(crate) async fn trusted(
    kernels: Kernels,
    device: Opened,
    dtype: DType,
    when: SelfTest,
    packed: &[(Format, Arithmetic)],
    ends: Option<&Ends<'_>>,
) -> Result<Trusted> {
    let is_gpu = !matches!(device.info.class, DeviceClass::Cpu | DeviceClass::Software);
    let remembers = match when {
        SelfTest::Once if is_gpu => true,
        SelfTest::Always => false,
        SelfTest::Once | SelfTest::Never => return Ok(Trusted { device, kernels, captures: true }),
    };
    let record = Record::of(key(&device), record::folder().as_deref());
    let (mut device, mut losses) = (device, 0);
    loop {
        let test = Test { record: &record, device: &device, dtype, remembers };
        match test.run(packed, ends).await {
            Err(Error::DeviceLost(why)) => {
                record.lost();
                losses += 1;
                let again = device::open_async(device.info.name).await;
                device = match again {
                    Ok(again) if again.device != device.device && losses < MOST_CRASHES => again,
                    _ => return Err(Error::DeviceLost(why)),
                };
            }
            done => return done,
        }
    }
}

/// A test of an open device.
struct Test<'a> {
    record: &'a Record,
    device: &'a Opened,
    dtype: DType,
    /// Whether stored results are used.
    remembers: bool,
}

impl Test<'_> {
    async fn run(&self, packed: &[(Format, Arithmetic)], ends: Option<&Ends<'_>>) -> Result<Trusted> {
        let Self { record, device, dtype, remembers } = *self;
        let info = &device.info;
        let crashed = record.crashed();
        if crashed.len() >= MOST_CRASHES {
            let crashed = crashed.into_iter().collect::<Vec<_>>().join(", ");
            let again = record.again();
            return Err(self.refused(&format!("programs ended, or it was lost, in {crashed}{again}")));
        }
        let name = |(format, arithmetic): &(Format, Arithmetic)| match arithmetic {
            Arithmetic::Floats => format.name().to_owned(),
            Arithmetic::Integers => format!("{} in integers", format.name()),
        };
        let names: Vec<_> = packed.iter().map(name).collect();
        let what = format!("{} | formats {}", dtype.name(), names.join(", "));
        let compare_kernels = async || {
            tracing::info!(target: "kiln::self_test", "comparing the kernels of {} with their references", info.adapter);
            let distrusted = distrusted(record, device, dtype, KERNELS, packed).await;
            if distrusted.is_ok() {
                record.clear();
            }
            distrusted
        };
        let mut wrong = record.verdict(&what, remembers, compare_kernels).await?;
        wrong.extend(crashed.iter().cloned());
        let mut trusted = self.without(&wrong)?;
        if let Some(ends) = ends.filter(|_| cfg!(feature = "cpu") && info.class != DeviceClass::Cpu) {
            let compare_models = async || {
                tracing::info!(target: "kiln::self_test", "comparing the model on {} with itself on the CPU", info.adapter);
                ends.distrusted(record, &trusted.kernels, &trusted.device, dtype).await
            };
            let found = match record.verdict(&ends.key(dtype, &wrong), remembers, compare_models).await {
                Err(error @ Error::OutOfMemory { .. }) => {
                    record.clear();
                    tracing::debug!(target: "kiln", "the model is not compared with itself on the CPU: {error}");
                    BTreeSet::new()
                }
                found => found?,
            };
            if found.contains(MODEL) {
                return Err(
                    self.refused("it computes other logits than the CPU, even without Kiln's kernels")
                );
            }
            if !found.is_empty() {
                wrong.extend(found);
                trusted = self.without(&wrong)?;
            }
        }
        let left_out = |name: &str| {
            [MATRIX_UNITS, CAPTURED].contains(&name)
                || name.starts_with(MATRIX_UNITS_OF)
                || KERNELS.iter().any(|kernel| kernel.name == name)
        };
        for name in wrong.iter().filter(|name| left_out(name)) {
            let (why, again) = match crashed.contains(name) {
                true => ("ended a program, or lost the device,", record.again()),
                false => ("gives wrong results", String::new()),
            };
            tracing::warn!(
                target: "kiln",
                "{name} {why} in {} on {} (driver {}), so a slower way is taken{again}; `kiln doctor` says more, for a report",
                dtype.name(),
                info.adapter,
                info.driver,
            );
        }
        Ok(trusted)
    }

    fn refused(&self, why: &str) -> Error {
        let info = &self.device.info;
        let why = format!(
            "{why} ({}, driver {}); use `--device cpu`, another driver, or another `--dtype`, and report what \
             `kiln doctor` says",
            info.adapter, info.driver
        );
        Error::Device { device: info.name.to_string(), why }
    }

    /// The device without the parts in `wrong`.
    fn without(&self, wrong: &BTreeSet<String>) -> Result<Trusted> {
        let device = match wrong.contains(MATRIX_UNITS) {
            true => self.device.clone().with_matrix_units(None),
            false => self.device.clone(),
        };
        let in_kernels = wrong.iter().filter_map(|name| name.strip_prefix(MATRIX_UNITS_OF));
        let device = device.without_matrix_units_in(in_kernels.map(str::to_owned));
        let wrong_kernels = KERNELS.iter().map(|kernel| kernel.name).filter(|name| wrong.contains(*name));
        let kernels = Kernels::new(Choice::Auto, &device.device)?.and_without(wrong_kernels);
        Ok(Trusted { device, kernels, captures: !wrong.contains(CAPTURED) })
    }
}

/// The parts that give wrong results: kernels, or their matrix units if they are right without. Kernels that
/// crashed a process are not tested.
async fn distrusted(
    record: &Record,
    device: &Opened,
    dtype: DType,
    kernels: &[KernelInfo],
    packed: &[(Format, Arithmetic)],
) -> Result<BTreeSet<String>> {
    let crashed = record.crashed();
    let wrong = async |device: &Opened| -> Result<BTreeSet<String>> {
        let mut wrong = BTreeSet::new();
        for kernel in kernels.iter().filter(|kernel| !crashed.contains(kernel.name)) {
            record.mark(kernel.name);
            if let Some(Verdict { why: Some(why), path, .. }) =
                self_test(kernel, device, dtype, Coverage::Quick(packed)).await?
            {
                tracing::debug!(target: "kiln", kernel = kernel.name, %path, why);
                wrong.insert(kernel.name.to_owned());
            }
        }
        Ok(wrong)
    };
    let first = wrong(device).await?;
    if first.is_empty() || device.info.matrix_units.is_none() {
        return Ok(first);
    }
    let others = wrong(&device.clone().with_matrix_units(None)).await;
    // Restores the matrix units, which may not be at fault.
    _ = device.clone().with_matrix_units(device.info.matrix_units);
    let mut wrong = others?;
    let right = first.difference(&wrong).map(|kernel| format!("{MATRIX_UNITS_OF}{kernel}"));
    wrong.extend(right.collect::<Vec<_>>());
    Ok(wrong)
}

/// A key for everything that results of kernels depend on, except the number type.
fn key(device: &Opened) -> String {
    let info = &device.info;
    format!("{} | {} | {} | kiln {}", info.adapter, info.api, info.driver, env!("CARGO_PKG_VERSION"))
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use burn::tensor::Tensor;
    use kiln_core::read_back::block_on;
    use kiln_kernels::{
        Checked, Kernel,
        cases::{Case, Layout},
        device::{DeviceName, MatrixUnits, open},
        invariance::Extent,
    };

    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// A kernel that doubles numbers, but gives wrong results with matrix units.
    #[derive(Clone)]
    struct Planted(Tensor<1>);

    impl Kernel for Planted {
        const NAME: &'static str = "planted";
        type Output = Tensor<1>;

        fn checked(self) -> Self {
            self
        }

        fn shape(&self) -> Vec<usize> {
            self.0.dims().into()
        }

        fn reference(self) -> Tensor<1> {
            self.0 * 2
        }

        fn wgsl(self) -> Result<Tensor<1>, Self> {
            let units = open(DeviceName::Wgpu(None)).unwrap().info.matrix_units;
            Ok(self.0 * if units.is_some() { 3 } else { 2 })
        }
    }

    impl Checked for Planted {
        fn extent(&self) -> [usize; 2] {
            [1, 1]
        }

        fn part(self, _: Extent) -> Self {
            self
        }

        fn part_of(whole: Tensor<1>, _: Extent) -> Tensor<1> {
            whole
        }

        fn cases() -> Vec<Case<Self>> {
            vec![Case::new("of three", |numbers| Self(numbers.tensor::<1>([3], Layout::Plain).abs() + 1))]
        }
    }

    #[test]
    fn wrong_matrix_units_are_found_and_kernels_are_trusted_without_them() {
        let Ok(device) = open(DeviceName::Wgpu(None)) else {
            let wanted = std::env::var("KILN_TEST_DEVICES").unwrap_or_default();
            assert!(!wanted.contains("wgpu"), "there is no wgpu device");
            return eprintln!("not tested: there is no wgpu device");
        };
        let own = device.info.matrix_units;
        // Kernels of this process will try to use them. No kernel multiplies with them on a software device.
        let units = MatrixUnits { height: 16, size: 16, threads: 32, beside_lanes: false };
        let device = device.with_matrix_units(Some(units));
        let planted = [KernelInfo::of::<Planted>()];
        let record = Record::of(key(&device), None);
        let found = |device: &Opened| block_on(distrusted(&record, device, DType::F32, &planted, &[]));
        assert_eq!(found(&device), Ok(names(&["matrix units of planted"])));
        assert_eq!(open(DeviceName::Wgpu(None)).unwrap().info.matrix_units, device.info.matrix_units);
        let device = device.with_matrix_units(None);
        assert_eq!(found(&device), Ok(names(&[])));
        device.with_matrix_units(own);
    }
}
