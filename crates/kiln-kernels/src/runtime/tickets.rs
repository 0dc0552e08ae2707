//! Counters by which a workgroup knows that it is the last one of a launch to arrive somewhere. WGSL does not
//! promise that it then sees what the others wrote, as CUDA does.
//!
//! cubecl skips launches that read what a failed launch would have written, and these counters are read and
//! written. So after a failure, launches with counters fail, too, until the error is read; then the counters
//! are made again.

use std::cell::RefCell;

use burn::{
    backend::DispatchDevice,
    tensor::{DType, Device, Shape, StreamId},
};
use burn_cubecl::{CubeDevice, ops::numeric::zeros, tensor::CubeTensor};
use kiln_core::device_state::DeviceState;

/// Counters of a stream.
pub(crate) const TICKETS: usize = 1024;

/// Streams whose counters a thread keeps.
const STREAMS: usize = 16;

/// The counters of a stream.
struct OfStream {
    device: CubeDevice,
    stream: StreamId,
    /// [`DeviceState::errors`] when they were made.
    errors: u64,
    tickets: CubeTensor,
}

thread_local! {
    /// The newest come first.
    static OF_STREAMS: RefCell<Vec<OfStream>> = const { RefCell::new(Vec::new()) };
}

/// Returns the [`TICKETS`] counters of the stream of this thread. They are 0, and a launch must leave them
/// so: launches of a stream follow one another, so no other uses them meanwhile. `None` without CUDA.
pub(crate) fn of_stream(device: &Device) -> Option<CubeTensor> {
    let DispatchDevice::Cube(cuda @ CubeDevice::Cuda(_)) = device.as_dispatch() else {
        return None;
    };
    let (stream, errors) = (StreamId::current(), DeviceState::of(device).errors());
    OF_STREAMS.with_borrow_mut(|known| {
        known.retain(|of| of.errors == errors || of.device != *cuda);
        if let Some(of) = known.iter().find(|of| of.stream == stream && of.device == *cuda) {
            return Some(of.tickets.clone());
        }
        let tickets = zeros(cuda.clone(), Shape::new([TICKETS]), DType::U32);
        known.truncate(STREAMS - 1);
        known.insert(0, OfStream { device: cuda.clone(), stream, errors, tickets: tickets.clone() });
        Some(tickets)
    })
}
