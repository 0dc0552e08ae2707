//! The one module with `unsafe`. Each function says what it trusts.
#![allow(unsafe_code, reason = "everything else is forbidden to; see the lint table of the workspace")]

use std::thread::{self, ThreadId};

use burn::{
    backend::{Backend, BackendTypes, Dispatch},
    tensor::Device,
};
use libloading::Library;

use crate::{
    Error, Result,
    device_error::{caught, preparing},
};

/// Whether the system's loader finds the shared library `name`.
///
/// Trusts what the library does when it is loaded, as using it would.
pub fn can_load(name: &str) -> bool {
    // SAFETY: see above; nothing of it is called.
    unsafe { Library::new(name) }.is_ok()
}

/// Keeps the Wayland library, which some Vulkan drivers load and ask for a display, from printing that there is none.
///
/// For programs without windows: no message of that library is printed from now on. Trusts that its logging hook is what
/// its documentation says; the handler looks at none of its arguments.
pub fn silence_wayland() {
    /// `wl_log_func_t`; the second argument is a `va_list`.
    type Handler = extern "C" fn(*const std::ffi::c_char, *mut std::ffi::c_void);
    extern "C" fn ignore(_: *const std::ffi::c_char, _: *mut std::ffi::c_void) {}

    if cfg!(target_os = "linux") {
        // SAFETY: see above. The library is never unloaded, so that it does not forget the handler.
        unsafe {
            let Ok(library) = Library::new("libwayland-client.so.0") else { return };
            if let Ok(set) = library.get::<unsafe extern "C" fn(Handler)>(b"wl_log_set_handler_client\0") {
                set(ignore);
            }
            std::mem::forget(library);
        }
    }
}

/// Launches that were recorded once and are repeated as one (a CUDA graph, or wgpu's command list).
pub struct Recording {
    device: Device,
    graph: <Dispatch as BackendTypes>::GraphPrimitive,
    /// Work is ordered by thread, and so are replays.
    thread: ThreadId,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

impl Recording {
    /// Tells the allocator that what runs from now on will be recorded, so that it is there for every replay. A few runs
    /// must follow before [`record`](Self::record), which allocates nothing new.
    pub fn prepare(device: &Device) -> Result<()> {
        let mut preparing = preparing();
        caught(|| Dispatch::graph_prepare(device.as_dispatch()))?.map_err(Error::of_device)?;
        *preparing += 1;
        Ok(())
    }

    /// What was prepared was recorded, or will not be.
    fn prepared() {
        let mut preparing = preparing();
        *preparing = preparing.saturating_sub(1);
    }

    /// Takes back [`prepare`](Self::prepare), where nothing is going to be recorded after all.
    pub fn abandon(device: &Device) {
        // It has no graph to give, and says so.
        _ = caught(|| Dispatch::graph_stop_capture(device.as_dispatch()));
        Self::prepared();
    }

    /// Records what `launch` launches; nothing of it is executed. `None`, and nothing was launched, where the device has
    /// no graphs.
    ///
    /// # Errors
    /// That of `launch`, or of the device. What `launch` counted on the host is counted then, and was not executed.
    pub fn record<T>(device: &Device, launch: impl FnOnce() -> Result<T>) -> Result<Option<(Self, T)>> {
        let started = caught(|| Dispatch::graph_start_capture(device.as_dispatch()));
        if !matches!(started, Ok(Ok(()))) {
            Self::prepared();
            return started.map(|_| None);
        }
        let output = launch();
        // Stopped also after an error: the device must not stay in this mode.
        let graph = caught(|| Dispatch::graph_stop_capture(device.as_dispatch()));
        Self::prepared();
        let (output, graph) = (output?, graph?.map_err(Error::of_device)?);
        Ok(Some((Self { device: device.clone(), graph, thread: thread::current().id() }, output)))
    }

    /// Whether this thread may replay it.
    pub fn is_of_this_thread(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// Executes what was recorded, once.
    ///
    /// Trusts that every tensor which the recorded launches read or wrote still exists and was not replaced, and that
    /// only this thread uses them. The runtime itself keeps their memory from being given to others while the recording
    /// exists, so a caller who breaks this gets wrong numbers, not a crash.
    ///
    /// # Errors
    /// On another thread than the one that recorded; what the device says.
    pub fn replay(&self) -> Result<()> {
        if !self.is_of_this_thread() {
            return Err(Error::Execution(
                "a captured step belongs to the thread that captured it".to_owned(),
            ));
        }
        // SAFETY: see above; the step that owns a recording holds the tensors, or borrows their owners.
        caught(|| unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) })?
            .map_err(Error::of_device)
    }
}
