//! HTTP over TCP.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use kiln::{Error, Result};
use socket2::SockRef;
use tokio::{sync::Semaphore, time};
use tokio_io_timeout::TimeoutStream;

use crate::{
    ServeOptions, ServedModel, Service,
    guard::{HEADER_BYTES, is_loopback},
};

/// Most connections at once; others wait to be accepted.
const MOST_CONNECTIONS: usize = 1024;

/// Time within which the headers of a request must have come.
const HEADER_TIME: Duration = Duration::from_secs(10);

/// Time within which a client must have read something.
const WRITE_TIME: Duration = Duration::from_secs(60);

/// Time in which the last events of streams are sent.
const LAST_TIME: Duration = Duration::from_secs(2);

/// Number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Time between two looks at whether to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Most headers of a request.
const MOST_HEADERS: usize = 100;

/// A server that is bound to an address.
///
/// ```no_run
/// use kiln::Model;
/// use kiln_serve::{ServeOptions, ServedModel, Server};
///
/// let model = ServedModel::loaded("smollm2", Model::load("SmolLM2-135M-Instruct")?);
/// let server = Server::new(vec![model], ServeOptions::default(), "127.0.0.1:8080")?;
/// println!("http://{}", server.address());
/// server.run(|| false)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    service: Service,
    drain: Duration,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Server {
    /// Starts the engines of loaded models, and binds the address, such as `127.0.0.1:8080`; port 0 is any
    /// free one. The first model answers where a request may leave out the name.
    ///
    /// # Errors
    /// [`Error::Setting`] for an address that cannot be bound, for 0 rows, and for no model or two of the
    /// same name.
    pub fn new(models: Vec<ServedModel>, options: ServeOptions, address: &str) -> Result<Self> {
        let setting = |name, why: String| Error::Setting { name, why };
        let bound = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            SockRef::from(&listener).listen(BACKLOG)?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        });
        let (listener, bound) =
            bound.map_err(|e| setting("host", format!("{address} cannot be listened on: {e}")))?;
        let own = |name: &str| name.rsplit_once(':').map_or(name, |(host, _)| host).to_owned();
        let hosts = bound.ip().is_loopback().then(|| {
            let mut hosts = ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned).to_vec();
            hosts.push(own(address));
            hosts.retain(|host| is_loopback(host));
            hosts
        });
        let drain = options.drain;
        Ok(Self { listener, address: bound, service: Service::named(models, options, hosts)?, drain })
    }

    /// The address, with the port that was chosen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stops` returns true, which is asked ten times a second. Then no connection is accepted
    /// any more, and answers have the time of [`ServeOptions::drain`] to end.
    ///
    /// # Errors
    /// If the system has no threads or sockets left.
    pub fn run(self, stops: impl Fn() -> bool) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()?;
        runtime.block_on(self.accept(stops))?;
        runtime.shutdown_background();
        Ok(())
    }

    async fn accept(self, stops: impl Fn() -> bool) -> io::Result<()> {
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        // HTTP/2 has no limits for connections that send nothing, and no client asks for it without TLS.
        let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIME)
            .max_headers(MOST_HEADERS)
            .max_buf_size(HEADER_BYTES);
        let graceful = GracefulShutdown::new();
        let mut looks = time::interval(LOOK);
        let accepted = async || {
            let place = connections.clone().acquire_owned().await;
            (listener.accept().await, place)
        };
        loop {
            let accepted = tokio::select! {
                accepted = accepted() => accepted,
                _ = looks.tick() => {
                    self.service.models.unload_idle();
                    if stops() { break } else { continue }
                }
            };
            let (stream, place) = match accepted {
                (Ok((stream, _)), Ok(place)) => (stream, place),
                (Err(error), _) => {
                    // The system has no more handles, or the client is gone already.
                    tracing::warn!(target: "kiln::serve", "a connection is not accepted: {error}");
                    time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
                (_, Err(_)) => break,
            };
            _ = stream.set_nodelay(true);
            // A client that reads nothing does not keep its connection.
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(WRITE_TIME));
            let service = TowerToHyperService::new(self.service.router.clone());
            let stream = TokioIo::new(Box::pin(stream));
            let connection = builder.serve_connection(stream, service).into_owned();
            let connection = graceful.watch(connection);
            tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(target: "kiln::serve", "a connection ended: {error}");
                }
                drop(place);
            });
        }
        drop(listener);
        let mut ends = pin!(graceful.shutdown());
        if time::timeout(self.drain, &mut ends).await.is_err() {
            tracing::warn!(target: "kiln::serve", "answers are cut off after {:?}", self.drain);
            self.service.stop();
            // Streams end with the error.
            _ = time::timeout(LAST_TIME, ends).await;
        }
        Ok(())
    }
}
