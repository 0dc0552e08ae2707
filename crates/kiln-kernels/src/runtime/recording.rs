//! Steps that are recorded once and replayed.

use std::thread::{self, ThreadId};

use burn::{
    backend::{Backend, Dispatch},
    tensor::Device,
};
use kiln_core::{
    Error, Result,
    device_state::DeviceState,
    unsafe_ops::{self, Graph},
};

#[cfg(feature = "cuda")]
use crate::runtime::tickets;

/// The outcome of recording launches.
#[derive(Debug)]
#[must_use]
pub enum Recorded<T> {
    /// The launches can be executed, any number of times.
    Graph(Recording, T),
    /// The device has no graphs. Nothing was launched.
    Never,
    /// The device gave up recording, as CUDA does if another thread allocates meanwhile. Nothing was or will
    /// be executed, and the device refuses to read the tensors that the launches would have written.
    Lost(Error),
}

/// Launches that were recorded once and are repeated as one (a CUDA graph, or wgpu's command list).
pub struct Recording {
    device: Device,
    graph: Graph,
    /// Work is ordered by thread, and so are replays.
    thread: ThreadId,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

impl Recording {
    /// Tells the allocator that the following launches will be recorded, so that their memory stays allocated
    /// for every replay. A few runs must follow before [`record`](Self::record), which allocates nothing new.
    pub fn prepare(device: &Device) -> Result<()> {
        let state = DeviceState::of(device);
        let mut preparing = state.preparing();
        let prepared = state.caught(|| Dispatch::graph_prepare(device.as_dispatch()))?;
        prepared.map_err(|e| state.error(e))?;
        *preparing += 1;
        Ok(())
    }

    /// Ends a preparation, whether or not it was recorded.
    fn prepared(state: &DeviceState) {
        let mut preparing = state.preparing();
        *preparing = preparing.saturating_sub(1);
    }

    /// Takes back [`prepare`](Self::prepare), if nothing is going to be recorded after all.
    pub fn abandon(device: &Device) {
        // There is no graph to return, and the error says so.
        let state = DeviceState::of(device);
        _ = state.caught(|| Dispatch::graph_stop_capture(device.as_dispatch()));
        Self::prepared(&state);
    }

    /// Records the launches of `launch`; none of them is executed.
    ///
    /// # Errors
    /// Returns the error of `launch`. State that `launch` advanced on the host stays advanced, although
    /// nothing was executed.
    pub fn record<T>(device: &Device, launch: impl FnOnce() -> Result<T>) -> Result<Recorded<T>> {
        let state = DeviceState::of(device);
        // While launches are recorded, none is executed that would make them. The graph keeps their memory.
        #[cfg(feature = "cuda")]
        state.caught(|| tickets::of_stream(device))?;
        let started = state.caught(|| Dispatch::graph_start_capture(device.as_dispatch()));
        if !matches!(started, Ok(Ok(()))) {
            Self::prepared(&state);
            return started.map(|_| Recorded::Never);
        }
        let output = launch();
        // Stopped even after an error: the device must not stay in this mode.
        let graph = state.caught(|| Dispatch::graph_stop_capture(device.as_dispatch()));
        Self::prepared(&state);
        let graph = graph.and_then(|graph| graph.map_err(|e| state.error(e)));
        let output = output?;
        match graph {
            Ok(graph) => {
                let recording = Self { device: device.clone(), graph, thread: thread::current().id() };
                Ok(Recorded::Graph(recording, output))
            }
            Err(why) => Ok(Recorded::Lost(why)),
        }
    }

    /// Whether this thread may replay the recording.
    pub fn is_of_this_thread(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// Executes the recorded launches once.
    ///
    /// Tensors that the recorded launches read or wrote must still exist, and no other thread may use them
    /// ([`unsafe_ops::replay`]).
    ///
    /// # Errors
    /// On another thread than the one that recorded; errors of the device.
    pub fn replay(&self) -> Result<()> {
        if !self.is_of_this_thread() {
            return Err(Error::Execution(
                "a captured step belongs to the thread that captured it".to_owned(),
            ));
        }
        unsafe_ops::replay(&self.device, &self.graph)
    }
}
