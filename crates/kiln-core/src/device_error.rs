//! What goes wrong on a device behind the host's back.
//!
//! A claim that does not fit a [`Budget`](crate::budget::Budget) is refused before anything is allocated. A device may
//! refuse what was claimed all the same: others use its memory, or nobody knows how much it has. What was to be stored
//! there is missing then, and the work behind it is given up, some of it silently. So it is counted here, and nothing
//! that was computed since is trusted.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::tensor::Device;

use crate::{Error, Result};

/// By all devices of this process: work of one is queued with another's.
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// What a panic that says that a device refused an allocation carries.
pub const REFUSAL: &str = "out of device memory";

/// The allocations that were refused until some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusals(u64);

impl Refusals {
    /// Counts one: to be called where a device has no room for an allocation.
    pub fn report() {
        REFUSED.fetch_add(1, Ordering::Relaxed);
    }

    pub fn until_now() -> Self {
        Self(REFUSED.load(Ordering::Relaxed))
    }

    /// Whether what was computed since can be trusted, as far as it was waited for.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where a device refused an allocation since.
    pub fn none_since(self) -> Result<()> {
        match Self::until_now() == self {
            true => Ok(()),
            false => Err(Error::refused("a tensor")),
        }
    }
}

/// Does `work`, which may wait for a device. Burn re-raises here what the thread of the device panicked with.
///
/// # Errors
/// The panic, as an error.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Error::of_device(text.unwrap_or("its thread panicked"))
    })
}

/// Waits until `device` has done all that was launched.
///
/// # Errors
/// What the device says. A tensor whose work failed is not among it: that is said when it is read.
pub fn sync(device: &Device) -> Result<()> {
    caught(|| device.sync())?.map_err(Error::of_device)
}

/// Has `device` give back memory that nothing uses; not while a step is about to be recorded anywhere, which needs what it
/// was given before.
pub fn give_back(device: &Device) {
    let preparing = preparing();
    if *preparing == 0 {
        // Where it fails, it fails again at whatever needs the memory.
        _ = caught(|| device.memory_cleanup());
    }
}

/// Steps that are about to be recorded: none is added while this is held.
pub fn preparing() -> MutexGuard<'static, usize> {
    static PREPARING: Mutex<usize> = Mutex::new(0);
    // Whoever panicked held a number that is whole at any time.
    PREPARING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Tests of one process hear of each other's refusals.
    pub(crate) static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_refusal_ends_the_trust_in_what_came_before() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = Refusals::until_now();
        assert!(before.none_since().is_ok());
        Refusals::report();
        assert!(matches!(before.none_since(), Err(Error::OutOfMemory { .. })));
        assert!(Refusals::until_now().none_since().is_ok());
        // CUDA says it in words, and late.
        let before = Refusals::until_now();
        assert_eq!(Error::of_device("an out-of-memory error"), Error::refused("a tensor"));
        assert!(before.none_since().is_err());
    }

    #[test]
    fn a_panic_of_the_device_is_an_error() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = caught(|| std::panic::resume_unwind(Box::new(REFUSAL.to_owned())));
        assert_eq!(refused, Err::<(), _>(Error::refused("a tensor")));
        let other = caught(|| std::panic::resume_unwind(Box::new("no such binding")));
        assert_eq!(other, Err::<(), _>(Error::Execution("no such binding".to_owned())));
        assert_eq!(caught(|| 3), Ok(3));
    }
}
