//! Reading tensors back to the host. No other module does it.
//!
//! Reads are futures, so that a browser can await them. A browser cannot wait for them in any other way:
//! there, the functions that block are errors, unless nothing has to be waited for.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll, Waker},
};

use burn::tensor::{Device, Tensor, TensorData, kind::Basic};
use burn_std::{RuntimeKind, set_runtime_kind};

use crate::{Error, Result, device_state::DeviceState};

/// A read that was started. The device continues to work during the read.
pub struct ReadBack(State);

enum State {
    Reading(Pin<Box<dyn Future<Output = Result<TensorData>> + Send>>),
    Done(Result<TensorData>),
    Taken,
}

impl std::fmt::Debug for ReadBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            State::Reading(_) => "ReadBack(reading)",
            State::Done(_) => "ReadBack(done)",
            State::Taken => "ReadBack(taken)",
        })
    }
}

/// Starts reading the current contents of `tensor`; later launches neither delay nor change the result.
pub fn start<const D: usize, K: Basic + 'static>(tensor: Tensor<D, K>) -> ReadBack {
    // Burn's other mode copies when the data are first accessed: too late if the tensor is written again, as
    // the output of a captured step is.
    set_runtime_kind(RuntimeKind::Async);
    let state = DeviceState::of(&tensor.device());
    let mut read: Pin<Box<dyn Future<Output = _> + Send>> =
        Box::pin(async move { tensor.into_data_async().await });
    let mut read: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(poll_fn(move |context| {
        let polled = state.caught(|| read.as_mut().poll(context));
        polled.map_or_else(|panic| Poll::Ready(Err(panic)), |read| read.map_err(|e| state.error(e)))
    }));
    // Burn enqueues the copy when the future is first polled, not when it is created.
    match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(data) => ReadBack(State::Done(data)),
        Poll::Pending => ReadBack(State::Reading(read)),
    }
}

impl ReadBack {
    /// Creates a finished read from data that are on the host already.
    pub fn ready(data: TensorData) -> Self {
        Self(State::Done(Ok(data)))
    }

    /// Waits for the data.
    pub async fn finish(mut self) -> Result<TensorData> {
        match &mut self.0 {
            State::Reading(read) => {
                let data = read.await;
                #[cfg(target_family = "wasm")]
                browser::turned();
                self.0 = State::Taken;
                data
            }
            State::Done(_) | State::Taken => match std::mem::replace(&mut self.0, State::Taken) {
                State::Done(data) => data,
                _ => Err(Error::Execution("a read was finished twice".to_owned())),
            },
        }
    }
}

/// A read that is dropped is waited for: its memory is reused, and the copy must have ended by then. In a
/// browser, it ends by itself.
impl Drop for ReadBack {
    fn drop(&mut self) {
        if let State::Reading(read) = std::mem::replace(&mut self.0, State::Taken) {
            #[cfg(not(target_family = "wasm"))]
            drop(pollster::block_on(read));
            #[cfg(target_family = "wasm")]
            wasm_bindgen_futures::spawn_local(async { drop(read.await) });
        }
    }
}

/// Waits for the data of several reads, in order.
///
/// # Errors
/// The first error of the device; the other reads are dropped.
pub async fn all(reads: Vec<ReadBack>) -> Result<Vec<TensorData>> {
    let mut data = Vec::with_capacity(reads.len());
    for read in reads {
        data.push(read.finish().await?);
    }
    Ok(data)
}

/// Reads `tensor`, and blocks until the data have arrived.
///
/// # Errors
/// The error of the device, and the errors of [`wait`].
pub fn read<const D: usize, K: Basic + 'static>(tensor: Tensor<D, K>) -> Result<TensorData> {
    wait(start(tensor).finish())
}

/// Moves `tensor` to `device`. Between devices, the elements travel through host memory, because Burn's own
/// move panics where a device fails.
///
/// # Errors
/// The error of the device that it is read from, and the errors of [`wait`].
pub fn moved<const D: usize, K: Basic + 'static>(
    tensor: Tensor<D, K>,
    device: &Device,
) -> Result<Tensor<D, K>> {
    if tensor.device() == *device {
        return Ok(tensor);
    }
    let dtype = tensor.dtype();
    Ok(Tensor::from_data(read(tensor)?, (device, dtype)))
}

/// Lets other tasks of an async runtime run. Work on a CPU is done when it is requested, so a future that
/// awaits nothing else would keep its thread until all work is done.
pub async fn yield_now() {
    #[cfg(target_family = "wasm")]
    if browser::is_late() {
        return browser::turn().await;
    }
    let mut yielded = false;
    poll_fn(|context| match std::mem::replace(&mut yielded, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

/// Turns of a browser's event loop. A task that is woken at once goes on before the next message of the page
/// is read.
#[cfg(target_family = "wasm")]
mod browser {
    use std::{cell::Cell, time::Duration};

    use futures_channel::oneshot;
    use wasm_bindgen_futures::{
        JsFuture,
        js_sys::{Function, Promise, Reflect, global},
        spawn_local,
    };
    use web_time::Instant;

    /// Time after which messages are read. A turn takes up to 4 ms.
    const PATIENCE: Duration = Duration::from_millis(100);

    thread_local! {
        static LAST: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    pub(super) fn is_late() -> bool {
        if LAST.get().is_none() {
            turned();
        }
        LAST.get().is_some_and(|last| last.elapsed() >= PATIENCE)
    }

    /// Notes that the browser had a turn, such as while a read was awaited.
    pub(super) fn turned() {
        LAST.set(Some(Instant::now()));
    }

    /// Lets the browser read its messages.
    pub(super) async fn turn() {
        let (end, ended) = oneshot::channel();
        // Apart, because objects of JavaScript cannot be sent between threads, and futures of the engine are.
        spawn_local(async move {
            if let Ok(timeout) = Reflect::get(&global(), &"setTimeout".into()).map(Function::from) {
                let mut begin = |resolve: Function, _: Function| _ = timeout.call1(&global(), &resolve);
                _ = JsFuture::from(Promise::new(&mut begin)).await;
            }
            turned();
            _ = end.send(());
        });
        _ = ended.await;
    }
}

/// Whether [`wait`] can wait for a device.
pub const CAN_WAIT: bool = !cfg!(target_family = "wasm");

/// Blocks on a future of this workspace.
///
/// # Errors
/// The error of the future. A browser cannot block: a future that is not done at once is an error there.
pub fn wait<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    #[cfg(not(target_family = "wasm"))]
    return block_on(future);
    #[cfg(target_family = "wasm")]
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => {
            let why = "a browser cannot wait for its device; await the function of the same kind instead";
            Err(Error::Execution(why.to_owned()))
        }
    }
}

/// Blocks on a future of this workspace that may have no error. Not for browsers.
#[cfg(not(target_family = "wasm"))]
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    pollster::block_on(future)
}
