//! Which kernels of a GPU are trusted: those that gave the results of their references, once, on this GPU with this driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::DType;
use etcetera::BaseStrategy;
use kiln_core::{Result, files};
use kiln_kernels::{
    Coverage, KERNELS, KernelInfo, Kernels, Verdict,
    device::{DeviceClass, Opened},
    self_test,
};

/// When the kernels of a device are compared with their references before they are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelfTest {
    /// At the first use of a GPU, of a driver, and of a version of Kiln. What was found is remembered in the user's folder for caches,
    /// `kiln/self-test.json`.
    #[default]
    Once,
    /// At every load, on any device.
    Always,
    Never,
}

/// The part of a device that is no kernel of its own.
const MATRIX_UNITS: &str = "matrix units";

/// The longest file of verdicts that is read.
const LONGEST: u64 = 1 << 20;

/// What is not trusted, by device, driver, version and type of numbers.
type Verdicts = BTreeMap<String, BTreeSet<String>>;

/// The kernels and the device, without what gives wrong results for numbers of type `dtype`.
///
/// # Errors
/// What the device says of the work.
pub(crate) fn trusted(
    kernels: Kernels,
    device: Opened,
    dtype: DType,
    when: SelfTest,
) -> Result<(Kernels, Opened)> {
    let is_gpu = !matches!(device.info.class, DeviceClass::Cpu | DeviceClass::Software);
    let remembers = match when {
        SelfTest::Once if is_gpu => true,
        SelfTest::Always => false,
        SelfTest::Once | SelfTest::Never => return Ok((kernels, device)),
    };
    let file = cache_file().filter(|_| remembers);
    let distrusted = known(file.as_deref(), &key(&device, dtype), || {
        tracing::info!(target: "kiln", "comparing the kernels of {} with their references", device.info.adapter);
        distrusted(&device, dtype, KERNELS)
    })?;
    let known_names = KERNELS.iter().map(|kernel| kernel.name).chain([MATRIX_UNITS]);
    for name in known_names.filter(|name| distrusted.contains(*name)) {
        tracing::warn!(
            target: "kiln",
            "{name} gives wrong results in {} on {} (driver {}), so a slower way is taken; `kiln doctor` says more, for a report",
            dtype.name(),
            device.info.adapter,
            device.info.driver,
        );
    }
    let device = match distrusted.contains(MATRIX_UNITS) {
        true => device.with_matrix_units(None),
        false => device,
    };
    let wrong = KERNELS.iter().map(|kernel| kernel.name).filter(|name| distrusted.contains(*name));
    Ok((kernels.without(wrong), device))
}

/// What is not trusted by the verdict of this key: that of the file, else what `find` gives, which is remembered.
fn known(
    file: Option<&Path>,
    key: &str,
    find: impl FnOnce() -> Result<BTreeSet<String>>,
) -> Result<BTreeSet<String>> {
    let mut verdicts = file.and_then(read).unwrap_or_default();
    if let Some(known) = verdicts.remove(key) {
        return Ok(known);
    }
    let found = find()?;
    verdicts.insert(key.to_owned(), found.clone());
    if let Some(file) = file {
        remember(file, &verdicts);
    }
    Ok(found)
}

/// What gives wrong results: kernels, or the matrix units without which they are right.
fn distrusted(device: &Opened, dtype: DType, kernels: &[KernelInfo]) -> Result<BTreeSet<String>> {
    let wrong = |device: &Opened| -> Result<BTreeSet<String>> {
        let mut wrong = BTreeSet::new();
        for kernel in kernels {
            if let Some(Verdict { why: Some(why), path, .. }) =
                self_test(kernel, device, dtype, Coverage::Quick)?
            {
                tracing::debug!(target: "kiln", kernel = kernel.name, %path, why);
                wrong.insert(kernel.name.to_owned());
            }
        }
        Ok(wrong)
    };
    let first = wrong(device)?;
    if first.is_empty() || device.info.matrix_units.is_none() {
        return Ok(first);
    }
    let mut others = wrong(&device.clone().with_matrix_units(None))?;
    // They may not be what is wrong.
    _ = device.clone().with_matrix_units(device.info.matrix_units);
    if others != first {
        others.insert(MATRIX_UNITS.to_owned());
    }
    Ok(others)
}

/// What the results of kernels depend on.
fn key(device: &Opened, dtype: DType) -> String {
    let info = &device.info;
    let version = env!("CARGO_PKG_VERSION");
    format!("{} | {} | {} | kiln {version} | {}", info.adapter, info.api, info.driver, dtype.name())
}

fn cache_file() -> Option<PathBuf> {
    Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("kiln/self-test.json"))
}

/// `None` where there are none, or none that can be read: they are made anew.
fn read(file: &Path) -> Option<Verdicts> {
    serde_json::from_slice(&files::try_read(file, LONGEST).ok()??).ok()
}

/// Where it cannot be written, the test is made again at the next load.
fn remember(file: &Path, verdicts: &Verdicts) {
    let written =
        file.parent().map_or(Ok(()), fs::create_dir_all).map_err(|e| e.to_string()).and_then(|()| {
            let text = serde_json::to_vec_pretty(verdicts).map_err(|e| e.to_string())?;
            files::write(file, &text).map_err(|e| e.to_string())
        });
    if let Err(why) = written {
        tracing::debug!(target: "kiln", "verdicts of kernels are not remembered: {why}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use kiln_core::Error;
    #[cfg(feature = "wgpu")]
    use {
        burn::tensor::Tensor,
        kiln_kernels::{
            Kernel,
            cases::{Case, Layout},
            device::{DeviceName, MatrixUnits, open},
            invariance::Extent,
        },
    };

    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_verdict_is_found_once_and_remembered_for_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kiln/self-test.json");
        let never = || Err(Error::Execution("asked again".into()));
        assert_eq!(known(Some(&file), "a", || Ok(names(&["linear"]))), Ok(names(&["linear"])));
        assert_eq!(known(Some(&file), "a", never), Ok(names(&["linear"])));
        assert_eq!(known(Some(&file), "b", || Ok(names(&[]))), Ok(names(&[])), "another driver");
        assert_eq!(known(Some(&file), "b", never), Ok(names(&[])));
        assert_eq!(known(Some(&file), "a", never), Ok(names(&["linear"])), "still known");
        assert!(known(None, "a", never).is_err(), "nothing is remembered without a file");
    }

    /// Doubles numbers: with matrix units, which are wrong, and else without.
    #[cfg(feature = "wgpu")]
    #[derive(Clone)]
    struct Planted(Tensor<1>);

    #[cfg(feature = "wgpu")]
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

    #[cfg(feature = "wgpu")]
    #[test]
    fn wrong_matrix_units_are_found_and_kernels_are_trusted_without() {
        let Ok(device) = open(DeviceName::Wgpu(None)) else {
            let wanted = std::env::var("KILN_TEST_DEVICES").unwrap_or_default();
            assert!(!wanted.contains("wgpu"), "there is no wgpu device");
            return eprintln!("not tested: there is no wgpu device");
        };
        let own = device.info.matrix_units;
        // Kernels of this process ask for them. On a software device none multiplies with them.
        let device = device.with_matrix_units(Some(MatrixUnits { size: 16, threads: 32 }));
        let planted = [KernelInfo::of::<Planted>()];
        assert_eq!(distrusted(&device, DType::F32, &planted), Ok(names(&[MATRIX_UNITS])));
        assert_eq!(open(DeviceName::Wgpu(None)).unwrap().info.matrix_units, device.info.matrix_units);
        let device = device.with_matrix_units(None);
        assert_eq!(distrusted(&device, DType::F32, &planted), Ok(names(&[])));
        device.with_matrix_units(own);
    }

    #[test]
    fn a_file_of_verdicts_that_cannot_be_read_or_written_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("self-test.json");
        fs::write(&file, "[1, 2").unwrap();
        assert_eq!(known(Some(&file), "a", || Ok(names(&["sample"]))), Ok(names(&["sample"])));
        let again = known(Some(&file), "a", || Err(Error::Execution("asked again".into())));
        assert_eq!(again, Ok(names(&["sample"])), "the file was replaced");
        // A file stands where the folder would be.
        let below = file.join("self-test.json");
        assert_eq!(known(Some(&below), "a", || Ok(names(&[]))), Ok(names(&[])));
    }
}
