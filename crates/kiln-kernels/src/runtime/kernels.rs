//! Runs kernels on a device.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{backend::DispatchDevice, tensor::Device};
use kiln_core::{Error, Result, device_state::DeviceState};

use crate::runtime::{
    choice::{Choice, Path, Ran},
    faults,
    kernel::Kernel,
};

/// Runs kernels on one device. A model holds it; clones share their counts.
///
/// # Panics
/// If tensors are on another device, or their shapes do not fit together, as every operation of Burn does.
#[derive(Clone, Debug)]
pub struct Kernels {
    device: Device,
    /// The implementation that runs, where a kernel has it.
    path: Path,
    /// Kernels whose reference runs in any case.
    distrusted: Arc<BTreeSet<&'static str>>,
    counts: Arc<Mutex<BTreeMap<(&'static str, Path), u64>>>,
    /// Is told what is about to run.
    watch: Option<Watch>,
    submission: Submission,
}

#[derive(Clone)]
struct Watch(Arc<dyn Fn(&'static str) + Send + Sync>);

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl Kernels {
    /// Kernels on `device`, with the implementation that `choice` says.
    ///
    /// # Errors
    /// [`Error::Setting`] if `device` cannot run `choice`.
    pub fn new(choice: Choice, device: &Device) -> Result<Self> {
        let runtime = Runtime::of(device);
        let path = match (choice, runtime) {
            (Choice::Reference, _) | (Choice::Auto, Runtime::Other) => Path::Reference,
            (Choice::Auto, Runtime::Cpu) => Path::Native,
            (Choice::Auto | Choice::Wgsl, Runtime::Wgpu) => Path::Wgsl,
            (Choice::Auto | Choice::Cube, Runtime::Cuda) | (Choice::Cube, Runtime::Wgpu) => Path::Cube,
            (Choice::Wgsl | Choice::Cube, _) => {
                let devices = if choice == Choice::Wgsl { "wgpu" } else { "wgpu and cuda" };
                let why =
                    format!("`{choice}` runs on {devices} devices only; use `auto` or `reference` here");
                return Err(Error::Setting { name: "kernels", why });
            }
        };
        Ok(Self {
            device: device.clone(),
            path,
            distrusted: Arc::default(),
            counts: Arc::default(),
            watch: None,
            submission: Submission::default(),
        })
    }

    /// Has the references of these kernels run, whatever was chosen: those that a [`self_test`](crate::self_test) found to be wrong.
    #[must_use]
    pub fn without(self, kernels: impl IntoIterator<Item = &'static str>) -> Self {
        Self { distrusted: Arc::new(kernels.into_iter().collect()), ..self }
    }

    /// [`without`](Self::without), for kernels beside those that are left out already.
    #[must_use]
    pub fn and_without(self, kernels: impl IntoIterator<Item = &'static str>) -> Self {
        let before = self.distrusted.clone();
        self.without(before.iter().copied().chain(kernels))
    }

    /// Kernels whose reference runs, whatever was chosen.
    pub fn left_out(&self) -> impl Iterator<Item = &'static str> + use<'_> {
        self.distrusted.iter().copied()
    }

    /// Has `watch` told the name of each kernel before it runs, when all before it have been computed: what then ends the process, or never ends, is that kernel.
    #[must_use]
    pub fn watched(self, watch: impl Fn(&'static str) + Send + Sync + 'static) -> Self {
        Self { watch: Some(Watch(Arc::new(watch))), ..self }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The implementation that runs, where a kernel has it; else its reference runs.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Computes a kernel, and counts which implementation ran.
    pub fn run<K: Kernel>(&self, kernel: K) -> K::Output {
        let kernel = kernel.checked();
        let shape = tracing::enabled!(target: "kiln::kernels", tracing::Level::TRACE).then(|| kernel.shape());
        if let Some(Watch(watch)) = &self.watch {
            // What went wrong before is said where a result is read.
            _ = DeviceState::of(&self.device).sync();
            watch(K::NAME);
        }
        let work = kernel.work();
        if self.path_of::<K>().is_on_gpu() {
            faults::launched(K::NAME, &self.device);
        }
        let done = match self.path_of::<K>() {
            Path::Reference => Err(kernel),
            Path::Native => kernel.native(),
            Path::Wgsl => kernel.wgsl(),
            Path::Cube => kernel.cube(),
        };
        let (output, path) = match done {
            Ok(output) => (output, self.path),
            Err(kernel) => (kernel.reference(), Path::Reference),
        };
        if self.path.is_on_gpu() && self.submission.is_full(work) {
            let state = DeviceState::of(&self.device);
            // What is recorded is not handed over. Where handing over fails, so does what waits for the work.
            if *state.preparing() == 0 {
                _ = state.caught(|| self.device.flush());
            }
        }
        tracing::trace!(target: "kiln::kernels", kernel = K::NAME, %path, ?shape);
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry((K::NAME, path)).or_default() += 1;
        output
    }

    /// The implementation of a kernel that runs, if it has it.
    pub(crate) fn path_of<K: Kernel>(&self) -> Path {
        if self.distrusted.contains(K::NAME) { Path::Reference } else { self.path }
    }

    /// What ran so far, here and in clones. What a captured graph repeats is not counted again.
    pub fn ran(&self) -> Vec<Ran> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(&(kernel, path), &count)| Ran { kernel, path, count }).collect()
    }
}

/// Work since launches were handed to the driver. Drivers end what takes longer than some seconds, and one forward pass of a prompt takes an integrated GPU as long.
#[derive(Clone, Debug, Default)]
struct Submission(Arc<AtomicU64>);

impl Submission {
    /// Products of two numbers that are handed over together: half a second of a GPU that computes 200 billion of them a second.
    const MOST: u64 = 100_000_000_000;

    /// Counts some work, and says whether it is time to hand it over.
    fn is_full(&self, work: u64) -> bool {
        let is_full =
            work > 0 && self.0.fetch_add(work, Ordering::Relaxed).saturating_add(work) >= Self::MOST;
        if is_full {
            self.0.store(0, Ordering::Relaxed);
        }
        is_full
    }
}

/// What executes the kernels of a device.
#[allow(dead_code, reason = "which of them can be there depends on the features")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    Cpu,
    Wgpu,
    Cuda,
    /// Nothing this crate has kernels for.
    Other,
}

impl Runtime {
    fn of(device: &Device) -> Self {
        match device.as_dispatch() {
            #[cfg(feature = "cpu")]
            DispatchDevice::Flex(_) => Self::Cpu,
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(cubecl::Device::Wgpu(_)) => Self::Wgpu,
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(cubecl::Device::Cuda(_)) => Self::Cuda,
            #[allow(unreachable_patterns, reason = "which variants there are depends on the features")]
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_handed_over_before_drivers_lose_patience() {
        let submission = Submission::default();
        // A product of 512 rows of a prompt in a model of 8 billion parameters.
        let product = 512 * 4096 * 14_336;
        let before = (1..).take_while(|_| !submission.is_full(product)).count();
        assert_eq!(before, 3, "in four products");
        assert!(!submission.is_full(0) && !submission.is_full(product), "it begins anew");
        assert!(submission.is_full(u64::MAX), "however much it is");
    }
}
