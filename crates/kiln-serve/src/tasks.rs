//! Threads and time, as the endpoints need them. In a browser, endpoints have one thread: all is computed in
//! it, and nothing ends for its time.

#[cfg(not(target_family = "wasm"))]
mod system {
    use std::{
        convert::Infallible,
        io,
        thread::{self, JoinHandle},
        time::Duration,
    };

    use axum::response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    };
    use futures_util::Stream;
    use kiln::expert::read_back::block_on;

    /// Time after which a comment keeps a quiet stream open.
    const KEEP_ALIVE: Duration = Duration::from_secs(15);

    /// A computation that goes on by itself.
    #[derive(Debug)]
    pub(crate) struct Task(JoinHandle<()>);

    impl Task {
        /// Starts what `make` makes, on a thread of its own.
        pub(crate) fn start<F: Future<Output = ()>>(
            name: &str,
            make: impl FnOnce() -> F + Send + 'static,
        ) -> io::Result<Self> {
            thread::Builder::new().name(name.to_owned()).spawn(move || block_on(make())).map(Self)
        }

        /// Waits for its end.
        pub(crate) fn join(self) {
            _ = self.0.join();
        }
    }

    /// Computes something that takes a while. `None`: it panicked.
    pub(crate) async fn apart<T: Send + 'static>(compute: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        tokio::task::spawn_blocking(compute).await.ok()
    }

    /// Runs a future to its end, even if nobody waits for it any more. `None`: it panicked.
    pub(crate) async fn to_its_end<T: Send + 'static>(
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        tokio::spawn(future).await.ok()
    }

    /// The output of a future, unless it takes longer.
    pub(crate) async fn within<T>(time: Duration, future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(time, future).await.ok()
    }

    pub(crate) async fn pause(time: Duration) {
        tokio::time::sleep(time).await;
    }

    /// Keeps the connection of a stream open while nothing comes.
    pub(crate) fn kept_open<S>(stream: Sse<S>) -> Response
    where
        S: Stream<Item = Result<Event, Infallible>> + Send + 'static,
    {
        stream.keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
    }
}

#[cfg(target_family = "wasm")]
mod system {
    use std::{convert::Infallible, io, time::Duration};

    use axum::response::{IntoResponse, Response, Sse, sse::Event};
    use futures_util::Stream;
    use kiln::expert::read_back::yield_now;

    /// A computation that goes on by itself.
    #[derive(Debug)]
    pub(crate) struct Task;

    impl Task {
        pub(crate) fn start<F: Future<Output = ()> + 'static>(
            _name: &str,
            make: impl FnOnce() -> F + Send + 'static,
        ) -> io::Result<Self> {
            wasm_bindgen_futures::spawn_local(make());
            Ok(Self)
        }

        /// Does not wait: it ends by itself.
        pub(crate) fn join(self) {}
    }

    pub(crate) async fn apart<T>(compute: impl FnOnce() -> T) -> Option<T> {
        Some(compute())
    }

    pub(crate) async fn to_its_end<T>(future: impl Future<Output = T>) -> Option<T> {
        Some(future.await)
    }

    pub(crate) async fn within<T>(_time: Duration, future: impl Future<Output = T>) -> Option<T> {
        Some(future.await)
    }

    pub(crate) async fn pause(_time: Duration) {
        yield_now().await;
    }

    /// There is no connection.
    pub(crate) fn kept_open<S>(stream: Sse<S>) -> Response
    where
        S: Stream<Item = Result<Event, Infallible>> + Send + 'static,
    {
        stream.into_response()
    }
}

pub(crate) use system::{Task, apart, kept_open, pause, to_its_end, within};
