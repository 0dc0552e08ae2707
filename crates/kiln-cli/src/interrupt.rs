//! Ctrl-C: ends the program, or stops the work of a command.

use std::sync::atomic::{AtomicBool, Ordering};

use kiln::expert::{exit_at_once, interrupted};

/// Exit code of a program that Ctrl-C ended, by the convention of shells.
pub(crate) const INTERRUPTED: u8 = 130;

/// Whether the next Ctrl-C ends the program: no command handles it, or one came already.
static ENDS: AtomicBool = AtomicBool::new(true);

/// Installs the handler. Must be called once, before anything else.
pub(crate) fn handle() {
    let handler = || {
        if ENDS.swap(true, Ordering::Relaxed) {
            interrupted();
            exit_at_once(INTERRUPTED.into());
        }
    };
    if let Err(e) = ctrlc::set_handler(handler) {
        tracing::warn!("Ctrl-C ends the program at once: {e}");
    }
}

/// Work that Ctrl-C stops without ending the program: the work has to check whether it [`came`](Self::came).
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
