//! Counts launches.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, ThreadId},
};

use cubecl::logging::{LaunchObservation, LaunchObserver};

/// Counts the GPU launches of this thread during `work`, by the name of the kernel. Replays of a recording
/// are not counted.
///
/// Only one count runs at a time: if a second one begins, the first counts no launches until the second ends.
pub fn launches_of<T>(work: impl FnOnce() -> T) -> (T, BTreeMap<&'static str, usize>) {
    let counts = Arc::new(Counts { thread: thread::current().id(), counts: Mutex::default() });
    let observation = LaunchObservation::new(counts.clone());
    let result = work();
    drop(observation);
    let counts = std::mem::take(&mut *counts.counts.lock().unwrap_or_else(PoisonError::into_inner));
    (result, counts)
}

struct Counts {
    thread: ThreadId,
    counts: Mutex<BTreeMap<&'static str, usize>>,
}

impl LaunchObserver for Counts {
    fn launched(&self, kernel: &'static str) {
        if thread::current().id() == self.thread {
            *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(kernel).or_default() += 1;
        }
    }
}
