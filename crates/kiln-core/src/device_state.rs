//! State that all generations on a device share: refused allocations, steps that are about to be recorded,
//! and the queue for copies to the device.
//!
//! A claim that does not fit a [`Budget`](crate::budget::Budget) is refused before anything is allocated. A
//! device may still refuse memory that was claimed: other processes use it too, or its size is unknown. Then
//! the data that were to be stored there are missing, and the work that depends on them is given up, some of
//! it silently. Refusals are therefore counted here, and nothing that was computed on that device since is
//! trusted.

use std::{
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use burn::tensor::{Device, StreamId, Tensor};

use crate::{Error, Result, read_back};

/// Text in the panic that reports a refused allocation.
pub const REFUSAL: &str = "out of device memory";

/// State that all generations on a device share. There is one instance for each device.
#[derive(Clone, Debug)]
pub struct DeviceState(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    device: Device,
    /// Number of allocations that the device refused.
    refused: AtomicU64,
    /// Number of errors that the device reported, refusals among them.
    errors: AtomicU64,
    /// Number of steps that are about to be recorded.
    preparing: Mutex<usize>,
    /// Queue for copies to the device, if it can copy and compute at once.
    uploads: OnceLock<StreamId>,
    /// Whether the device reported that it is lost.
    lost: AtomicBool,
}

/// The numbers of allocations that devices had refused at some moment.
#[derive(Clone, Debug)]
pub struct Refusals(Vec<(DeviceState, u64)>);

impl Refusals {
    /// Returns the refusals of several devices until now.
    pub fn of_all<'a>(devices: impl IntoIterator<Item = &'a Device>) -> Self {
        Self(devices.into_iter().flat_map(|device| DeviceState::of(device).refusals().0).collect())
    }

    /// Checks that results computed since can be trusted, as far as they were waited for.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if a device refused an allocation since.
    pub fn none_since(&self) -> Result<()> {
        match self.0.iter().all(|(device, count)| device.count() == *count) {
            true => Ok(()),
            false => Err(Error::refused("a tensor")),
        }
    }

    /// Forgets the refusals until now: results computed from here on can be trusted again.
    pub fn forgive(&mut self) {
        self.0.iter_mut().for_each(|(device, count)| *count = device.count());
    }
}

impl DeviceState {
    /// Returns the state of `device`.
    pub fn of(device: &Device) -> Self {
        /// One entry for each device that this process uses.
        static ALL: Mutex<Vec<DeviceState>> = Mutex::new(Vec::new());

        // The list is consistent at any time, so a panic while the lock was held did no harm.
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = all.iter().find(|state| state.0.device == *device) {
            return state.clone();
        }
        let state = Self(Arc::new(Shared {
            device: device.clone(),
            refused: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            preparing: Mutex::new(0),
            uploads: OnceLock::new(),
            lost: AtomicBool::new(false),
        }));
        all.push(state.clone());
        state
    }

    /// Counts a refusal: to be called where the device has no room for an allocation.
    pub fn report_refusal(&self) {
        self.0.refused.fetch_add(1, Ordering::Relaxed);
        self.0.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of errors that the device reported. CUDA skips launches that read what a failed launch would
    /// have written, so tensors that outlive an error are made again.
    pub fn errors(&self) -> u64 {
        self.0.errors.load(Ordering::Relaxed)
    }

    fn count(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// Returns the refusals until now.
    pub fn refusals(&self) -> Refusals {
        Refusals(vec![(self.clone(), self.count())])
    }

    /// Turns an error message of the device into an [`Error`]. Refused allocations are counted: CUDA reports
    /// them only when a tensor that depends on one is read.
    pub fn error(&self, text: impl Display) -> Error {
        let error = Error::of_device(text);
        match error {
            Error::OutOfMemory { .. } => self.report_refusal(),
            Error::DeviceLost(_) => self.0.lost.store(true, Ordering::Relaxed),
            _ => _ = self.0.errors.fetch_add(1, Ordering::Relaxed),
        }
        error
    }

    /// Whether the device reported that it is lost: nothing is computed there any more.
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// Runs `work`, which may wait for the device, and catches panics. Burn re-raises panics of the device's
    /// thread here.
    ///
    /// # Errors
    /// The panic, as an error.
    pub fn caught<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            self.error(text.unwrap_or("its thread panicked"))
        })
    }

    /// Waits until the device has finished all launched work. A browser cannot wait: there, the work is
    /// handed to the device, and the next read waits for it.
    ///
    /// # Errors
    /// The device's error. A tensor whose work failed is not reported here, but when it is read.
    pub fn sync(&self) -> Result<()> {
        let device = &self.0.device;
        let is_done = || if cfg!(target_family = "wasm") { device.flush() } else { device.sync() };
        self.caught(is_done)?.map_err(|e| self.error(e))
    }

    /// Makes the device release unused memory, unless a step is about to be recorded on it: the recording
    /// needs the memory that it was given before.
    pub fn give_back(&self) {
        let preparing = self.preparing();
        if *preparing == 0 {
            // If this fails, it fails again for whatever needs the memory.
            _ = self.caught(|| self.0.device.memory_cleanup());
            // Each queue has its own memory.
            if self.0.uploads.get().is_some() {
                _ = self.caught(|| self.uploading(|| self.0.device.memory_cleanup()));
            }
        }
    }

    /// Waits, as [`sync`](Self::sync) does. In a browser, other tasks run meanwhile.
    ///
    /// # Errors
    /// The device's error.
    pub async fn finished(&self) -> Result<()> {
        self.sync()?;
        if cfg!(target_family = "wasm") {
            read_back::start(Tensor::<1>::zeros([1], &self.0.device)).finish().await?;
        }
        Ok(())
    }

    /// Declares that the device copies and computes at once if both are on different queues (CUDA's streams).
    pub fn copies_beside_work(&self) {
        self.0.uploads.get_or_init(StreamId::allocate);
    }

    /// Runs `upload`, which copies tensors to the device, on a queue of its own if the device has one. Work
    /// that uses the tensors waits for them; other work does not.
    pub fn uploading<T>(&self, upload: impl FnOnce() -> T) -> T {
        match self.0.uploads.get() {
            Some(queue) => queue.executes(upload),
            None => upload(),
        }
    }

    /// Locks the number of steps that are about to be recorded: none is added while the guard is held.
    pub fn preparing(&self) -> MutexGuard<'_, usize> {
        // The number is consistent at any time, so a panic while the lock was held did no harm.
        self.0.preparing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_allocation_invalidates_earlier_work_on_its_device() {
        // Neither device is opened.
        let [state, other] = [7, 8].map(|index| DeviceState::of(&Device::cuda(index)));
        let (mut before, on_other) = (state.refusals(), other.refusals());
        assert!(before.none_since().is_ok());
        DeviceState::of(&Device::cuda(7)).report_refusal();
        assert!(matches!(before.none_since(), Err(Error::OutOfMemory { .. })));
        assert!(state.refusals().none_since().is_ok());
        // CUDA reports the refusal in words, and late.
        before.forgive();
        assert!(before.none_since().is_ok());
        assert_eq!(state.error("an out-of-memory error"), Error::refused("a tensor"));
        assert!(before.none_since().is_err());
        assert!(on_other.none_since().is_ok(), "another device's refusal counts");
    }

    #[test]
    fn a_panic_of_the_device_is_an_error() {
        let state = DeviceState::of(&Device::cuda(9));
        let before = state.refusals();
        let other = state.caught(|| std::panic::resume_unwind(Box::new("no such binding")));
        assert_eq!(other, Err::<(), _>(Error::Execution("no such binding".to_owned())));
        assert_eq!(state.caught(|| 3), Ok(3));
        assert!(before.none_since().is_ok());
        let refused = state.caught(|| std::panic::resume_unwind(Box::new(REFUSAL.to_owned())));
        assert_eq!(refused, Err::<(), _>(Error::refused("a tensor")));
        assert!(before.none_since().is_err());
    }

    #[test]
    fn recordings_in_preparation_are_counted_per_device() {
        let [state, other] = [10, 11].map(|index| DeviceState::of(&Device::cuda(index)));
        *state.preparing() += 1;
        assert_eq!((*DeviceState::of(&Device::cuda(10)).preparing(), *other.preparing()), (1, 0));
    }

    #[test]
    fn a_device_that_copies_during_work_has_one_queue_for_uploads() {
        let [state, other] = [12, 13].map(|index| DeviceState::of(&Device::cuda(index)));
        state.copies_beside_work();
        let queue = || DeviceState::of(&Device::cuda(12)).uploading(StreamId::current);
        assert_ne!(queue(), StreamId::current());
        assert_eq!(queue(), queue(), "there is one for the device");
        assert_eq!(other.uploading(StreamId::current), StreamId::current());
    }
}
