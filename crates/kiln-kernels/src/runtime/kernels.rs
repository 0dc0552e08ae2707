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
use kiln_core::{Error, Result, device_state::DeviceState, stages::Stages};

use crate::runtime::{
    choice::{Choice, Implementation, RunCount},
    faults,
    kernel::Kernel,
};

/// The kernels of each stage of a model: which blocks are on which device.
pub type Placement = Stages<Kernels>;

/// Runs kernels on one device. A model holds it; clones share their counts.
///
/// # Panics
/// If tensors are on another device, or their shapes do not fit together, as every operation of Burn does.
#[derive(Clone, Debug)]
pub struct Kernels {
    device: Device,
    /// The implementation that runs if a kernel has it.
    implementation: Implementation,
    /// Kernels whose reference always runs.
    distrusted: Arc<BTreeSet<&'static str>>,
    counts: Arc<Mutex<BTreeMap<(&'static str, Implementation), u64>>>,
    /// Called with the name of each kernel before it runs.
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
    /// Creates the runner of kernels on `device`, with the implementation that `choice` selects.
    ///
    /// # Errors
    /// [`Error::Setting`] if `device` cannot run `choice`.
    pub fn new(choice: Choice, device: &Device) -> Result<Self> {
        let runtime = Runtime::of(device);
        let implementation = match (choice, runtime) {
            (Choice::Reference, _) | (Choice::Auto, Runtime::Other) => Implementation::Reference,
            (Choice::Auto, Runtime::Cpu) => Implementation::Native,
            (Choice::Auto | Choice::Wgsl, Runtime::Wgpu) => Implementation::Wgsl,
            (Choice::Auto | Choice::Cube, Runtime::Cuda) | (Choice::Cube, Runtime::Wgpu) => {
                Implementation::Cube
            }
            (Choice::Wgsl | Choice::Cube, _) => {
                let devices = if choice == Choice::Wgsl { "wgpu" } else { "wgpu and cuda" };
                let why =
                    format!("`{choice}` runs on {devices} devices only; use `auto` or `reference` here");
                return Err(Error::Setting { name: "kernels", why });
            }
        };
        Ok(Self {
            device: device.clone(),
            implementation,
            distrusted: Arc::default(),
            counts: Arc::default(),
            watch: None,
            submission: Submission::default(),
        })
    }

    /// Makes these kernels run their references, whatever was chosen: those that a
    /// [`self_test`](crate::self_test) found to be wrong.
    #[must_use]
    pub fn without(self, kernels: impl IntoIterator<Item = &'static str>) -> Self {
        Self { distrusted: Arc::new(kernels.into_iter().collect()), ..self }
    }

    /// Like [`without`](Self::without), in addition to the kernels that are left out already.
    #[must_use]
    pub fn and_without(self, kernels: impl IntoIterator<Item = &'static str>) -> Self {
        let before = self.distrusted.clone();
        self.without(before.iter().copied().chain(kernels))
    }

    /// Kernels whose reference always runs, whatever was chosen.
    pub fn left_out(&self) -> impl Iterator<Item = &'static str> + use<'_> {
        self.distrusted.iter().copied()
    }

    /// Calls `watch` with the name of each kernel before it runs, after all earlier ones have been computed.
    /// If the process then ends or hangs, that kernel is the cause.
    #[must_use]
    pub fn watched(self, watch: impl Fn(&'static str) + Send + Sync + 'static) -> Self {
        Self { watch: Some(Watch(Arc::new(watch))), ..self }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The implementation that runs if a kernel has it; otherwise the reference runs.
    pub fn implementation(&self) -> Implementation {
        self.implementation
    }

    /// Computes a kernel, and counts the implementation that ran.
    pub fn run<K: Kernel>(&self, kernel: K) -> K::Output {
        let kernel = kernel.checked();
        let shape = tracing::enabled!(target: "kiln::kernels", tracing::Level::TRACE).then(|| kernel.shape());
        if let Some(Watch(watch)) = &self.watch {
            // Earlier errors are reported where a result is read.
            _ = DeviceState::of(&self.device).sync();
            watch(K::NAME);
        }
        let work = kernel.work();
        if self.implementation_of::<K>().is_on_gpu() {
            faults::launched(K::NAME, &self.device);
        }
        let done = match self.implementation_of::<K>() {
            Implementation::Reference => Err(kernel),
            Implementation::Native => kernel.native(),
            Implementation::Wgsl => kernel.wgsl(),
            Implementation::Cube => kernel.cube(),
        };
        let (output, path) = match done {
            Ok(output) => (output, self.implementation),
            Err(kernel) => (kernel.reference(), Implementation::Reference),
        };
        if self.implementation.is_on_gpu() && self.submission.is_full(work) {
            let state = DeviceState::of(&self.device);
            // Launches that are being recorded are not submitted. If submitting fails, so does waiting for
            // the work.
            if *state.preparing() == 0 {
                _ = state.caught(|| self.device.flush());
            }
        }
        tracing::trace!(target: "kiln::kernels", kernel = K::NAME, %path, ?shape);
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry((K::NAME, path)).or_default() += 1;
        output
    }

    /// The implementation that runs if the kernel has it.
    pub(crate) fn implementation_of<K: Kernel>(&self) -> Implementation {
        if self.distrusted.contains(K::NAME) { Implementation::Reference } else { self.implementation }
    }

    /// Counts of what ran so far, here and in clones. Replays of a captured graph are not counted.
    pub fn ran(&self) -> Vec<RunCount> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .iter()
            .map(|(&(kernel, implementation), &count)| RunCount { kernel, implementation, count })
            .collect()
    }
}

/// Work since the last submission to the driver. Drivers abort submissions that take longer than some
/// seconds, and one forward pass over a prompt can take that long on an integrated GPU.
#[derive(Clone, Debug, Default)]
struct Submission(Arc<AtomicU64>);

impl Submission {
    /// Most multiplications per submission: half a second on a GPU that does 200 billion per second.
    const MOST: u64 = 100_000_000_000;

    /// Counts some work, and returns whether it is time to submit it.
    fn is_full(&self, work: u64) -> bool {
        let is_full =
            work > 0 && self.0.fetch_add(work, Ordering::Relaxed).saturating_add(work) >= Self::MOST;
        if is_full {
            self.0.store(0, Ordering::Relaxed);
        }
        is_full
    }
}

/// The runtime that executes the kernels of a device.
#[allow(dead_code, reason = "which of them can be there depends on the features")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    Cpu,
    Wgpu,
    Cuda,
    /// A runtime that this crate has no kernels for.
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
    fn a_submission_is_full_after_a_limited_amount_of_work() {
        let submission = Submission::default();
        // A product of 512 rows of a prompt in a model with 8 billion parameters.
        let product = 512 * 4096 * 14_336;
        let before = (1..).take_while(|_| !submission.is_full(product)).count();
        assert_eq!(before, 3, "in four products");
        assert!(!submission.is_full(0) && !submission.is_full(product), "it begins anew");
        assert!(submission.is_full(u64::MAX), "however much it is");
    }
}
