//! Ctrl-C: it ends the program, in order, or what a command is doing.

use std::{
    process::{abort, exit},
    sync::atomic::{AtomicBool, Ordering},
    thread::{sleep, spawn},
    time::Duration,
};

/// The exit code of a program that Ctrl-C ended, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;

/// Whether the next one ends the program: no command waits for one, or one came already.
static ENDS: AtomicBool = AtomicBool::new(true);

/// Installs the handler. To be called once, before anything else.
pub(crate) fn handle() {
    let handler = || {
        if ENDS.swap(true, Ordering::Relaxed) {
            kiln::expert::interrupted();
            // A driver may wait at the end for a kernel that hangs.
            spawn(|| {
                sleep(Duration::from_secs(2));
                abort();
            });
            exit(INTERRUPTED.into());
        }
    };
    if let Err(e) = ctrlc::set_handler(handler) {
        tracing::warn!("Ctrl-C ends the program at once: {e}");
    }
}

/// Work that ends at Ctrl-C by itself, so that the program goes on: it has to look whether one [`came`](Self::came).
pub(crate) struct Interruptible(());

impl Interruptible {
    pub(crate) fn begin() -> Self {
        ENDS.store(false, Ordering::Relaxed);
        Self(())
    }

    pub(crate) fn came(&self) -> bool {
        ENDS.load(Ordering::Relaxed)
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        ENDS.store(true, Ordering::Relaxed);
    }
}
