//! The task that owns the device: it takes requests, runs the turns of the engine, and tells readers what
//! happened.

use std::{
    collections::{HashMap, VecDeque},
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use axum::http::StatusCode;
use kiln::{Engine, Error, Event, GeneratedText, Model, Piece, RequestId, Result, Share, Stats, StopReason};
use tokio::sync::{
    OwnedSemaphorePermit, Semaphore,
    mpsc::{self, error::TrySendError},
    oneshot,
};
use web_time::Instant;

use crate::{ServeOptions, error::ApiError, metrics::ModelMetrics, tasks::Task};

/// Number of events that a reader may be behind before its request is cancelled.
const BEHIND: usize = 1024;

/// Something that happened to one choice of a request.
#[derive(Debug)]
pub(crate) enum Told {
    /// The settings are possible, and the choice waits for its first token.
    Accepted {
        prompt_tokens: usize,
    },
    Piece(Piece),
    Ended(End, Stats),
    Failed(ApiError),
}

/// The end of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) reason: StopReason,
    /// The stop string that ended it.
    pub(crate) stop: Option<String>,
}

/// Events, each with the choice that it happened to.
pub(crate) type Events = mpsc::Receiver<(usize, Told)>;

/// Makes the text of a request.
pub(crate) type Make = Box<dyn Fn(&Model) -> Result<GeneratedText<'static>> + Send>;

/// A computation between two turns of the engine. It takes its own turn among the models.
type Compute = Box<dyn FnOnce(Model, Turns) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Something done with the engine between two of its turns.
type Use = Box<dyn FnOnce(&Model, &mut Engine<GeneratedText<'static>>) + Send>;

/// A message from a handler to the task.
enum Work {
    Choices(Vec<Job>),
    Call(Compute),
    Use(Use),
    /// Nothing is computed any more, and those who wait are told.
    Stop,
}

struct Job {
    choice: usize,
    make: Make,
    share: Share,
    reader: mpsc::Sender<(usize, Told)>,
    place: OwnedSemaphorePermit,
}

/// A request that runs.
struct Running {
    choice: usize,
    reader: mpsc::Sender<(usize, Told)>,
    begun: Instant,
    /// When the latest piece came.
    told: Option<Instant>,
    /// The place among the requests that the server takes at once.
    _place: OwnedSemaphorePermit,
}

/// The engine's task, as handlers see it.
#[derive(Debug)]
pub(crate) struct Worker {
    work: mpsc::UnboundedSender<Work>,
    places: Arc<Semaphore>,
    counts: Arc<Counts>,
    task: Task,
}

/// Lets the engines of several models compute in turn.
pub(crate) type Turns = Arc<tokio::sync::Mutex<()>>;

/// Counts for `/health` and for the time after which a client may come again.
#[derive(Debug)]
pub(crate) struct Counts {
    rows: usize,
    /// Number of requests that the engine has, and of those that wait in it for others to end.
    running: AtomicUsize,
    waiting: AtomicUsize,
    /// Bytes of caches on devices, and of caches of beginnings of prompts in host memory.
    cache_bytes: AtomicUsize,
    prefix_bytes: AtomicUsize,
    /// Whether the task has panicked.
    failed: AtomicBool,
    /// Mean time of a choice, in milliseconds, in which recent ones count more.
    milliseconds: AtomicU64,
}

impl Worker {
    /// Starts the task.
    pub(crate) fn start(
        model: Model,
        rows: usize,
        options: &ServeOptions,
        metrics: ModelMetrics,
        turns_of_all: Turns,
    ) -> Result<Self> {
        let ServeOptions { queue, prefix_bytes, reuse_answers, .. } = *options;
        let engine = model.engine(rows)?.with_prefixes(prefix_bytes);
        let engine = if reuse_answers { engine.with_answers_reused() } else { engine };
        let counts = Counts {
            rows,
            running: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            cache_bytes: AtomicUsize::new(0),
            prefix_bytes: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            milliseconds: AtomicU64::new(1000),
        };
        let counts = Arc::new(counts);
        let (work, mut queued) = mpsc::unbounded_channel();
        let places = Arc::new(Semaphore::new(rows.saturating_add(queue).min(Semaphore::MAX_PERMITS)));
        let own = counts.clone();
        let run = async move || {
            let mut readers = HashMap::new();
            let turns = turns(&model, engine, &mut queued, &mut readers, &own, &metrics, &turns_of_all);
            if has_panicked(turns).await {
                own.failed.store(true, Ordering::Relaxed);
                for running in readers.into_values() {
                    _ = running.reader.try_send((running.choice, Told::Failed(failed())));
                }
            }
        };
        let task = Task::start("engine", run);
        let task =
            task.map_err(|e| Error::Execution(format!("the thread of the engine does not start: {e}")))?;
        Ok(Self { work, places, counts, task })
    }

    /// Ends all answers with an error.
    pub(crate) fn stop(&self) {
        _ = self.send(Work::Stop);
    }

    /// Ends the task, and waits for it.
    pub(crate) fn end(self) {
        drop(self.work);
        self.task.join();
    }

    /// Submits the choices of a request: all, or none. Each is accepted or fails before the first piece. A
    /// reader that is dropped cancels them. `share`: whose they are.
    pub(crate) fn submit(&self, choices: Vec<Make>, share: Share) -> Result<Events, ApiError> {
        let mut places = Vec::new();
        for _ in &choices {
            match self.places.clone().try_acquire_owned() {
                Ok(place) => places.push(place),
                Err(_) => return Err(self.busy()),
            }
        }
        let (reader, events) = mpsc::channel(BEHIND);
        let job = |(choice, (make, place))| Job { choice, make, share, reader: reader.clone(), place };
        let jobs = choices.into_iter().zip(places).enumerate().map(job).collect();
        self.send(Work::Choices(jobs)).map(|()| events)
    }

    /// Computes something between two turns of the engine.
    pub(crate) async fn call<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        compute: impl FnOnce(Model) -> F + Send + 'static,
    ) -> Result<T, ApiError> {
        let _place = self.places.clone().try_acquire_owned().map_err(|_| self.busy())?;
        let (sender, result) = oneshot::channel();
        let compute = async move |model: Model, turns: Turns| {
            let _turn = turns.lock().await;
            // Nobody waits any more for one that was cancelled.
            if !sender.is_closed() {
                _ = sender.send(compute(model).await);
            }
        };
        self.send(Work::Call(Box::new(|model, turns| Box::pin(compute(model, turns)))))?;
        result.await.map_err(|_| failed())
    }

    /// Computes something long between two turns of the engine. It takes its own turns among the models.
    pub(crate) fn run<F: Future<Output = ()> + 'static>(
        &self,
        compute: impl FnOnce(Turns) -> F + Send + 'static,
    ) -> Result<(), ApiError> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| self.busy())?;
        let compute = async move |turns| {
            compute(turns).await;
            drop(place);
        };
        self.send(Work::Call(Box::new(|_, turns| Box::pin(compute(turns)))))
    }

    /// Does something with the engine between two of its turns.
    pub(crate) async fn with_engine<T: Send + 'static>(
        &self,
        with: impl FnOnce(&Model, &mut Engine<GeneratedText<'static>>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let (sender, result) = oneshot::channel();
        self.send(Work::Use(Box::new(|model, engine| _ = sender.send(with(model, engine)))))?;
        result.await.map_err(|_| failed())
    }

    fn send(&self, work: Work) -> Result<(), ApiError> {
        self.work.send(work).map_err(|_| failed())
    }

    /// Whether nothing will be computed any more.
    pub(crate) fn has_failed(&self) -> bool {
        self.counts.failed.load(Ordering::Relaxed)
    }

    pub(crate) fn running(&self) -> usize {
        self.counts.running.load(Ordering::Relaxed)
    }

    /// Number of running requests that wait for others to end.
    pub(crate) fn waiting(&self) -> usize {
        self.counts.waiting.load(Ordering::Relaxed)
    }

    /// Number of bytes of the caches of answers on devices, and of the beginnings of prompts in host memory.
    pub(crate) fn cache_bytes(&self) -> [usize; 2] {
        [&self.counts.cache_bytes, &self.counts.prefix_bytes].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    fn busy(&self) -> ApiError {
        let mean = Duration::from_millis(self.counts.milliseconds.load(Ordering::Relaxed));
        let ahead = self.running().div_ceil(self.counts.rows) as u32;
        ApiError {
            code: Some("queue_full"),
            retry_after: Some((mean * ahead).as_secs().max(1)),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too many requests wait; come again later")
        }
    }
}

fn stopped() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server ends, and the answer with it")
}

fn failed() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine failed; restart the server")
}

/// Runs a future to its end, or until it panics.
async fn has_panicked(future: impl Future<Output = ()>) -> bool {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(polled) => polled.map(|()| false),
        Err(_) => Poll::Ready(true),
    })
    .await
}

/// Runs until all [`Worker`]s are gone and nothing is left to do.
async fn turns(
    model: &Model,
    mut engine: Engine<GeneratedText<'static>>,
    queued: &mut mpsc::UnboundedReceiver<Work>,
    readers: &mut HashMap<RequestId, Running>,
    counts: &Counts,
    metrics: &ModelMetrics,
    turns_of_all: &Turns,
) {
    // Those that others left no memory for.
    let mut deferred = VecDeque::new();
    let mut before = 0;
    loop {
        if engine.is_idle() && deferred.is_empty() {
            match queued.recv().await {
                Some(work) => take(work, model, &mut engine, readers, &mut deferred, turns_of_all).await,
                None => return,
            }
        }
        while let Ok(work) = queued.try_recv() {
            let computes = matches!(work, Work::Call(_));
            take(work, model, &mut engine, readers, &mut deferred, turns_of_all).await;
            // Answers go on between computations: the next one may be queued by now, again and again.
            if computes {
                break;
            }
        }
        deferred.retain(|job: &Job| !job.reader.is_closed());
        if readers.len() < before || engine.is_idle() {
            let _turn = turns_of_all.lock().await;
            while let Some(job) = deferred.pop_front() {
                if let Some(job) = begin(job, model, &mut engine, readers) {
                    deferred.push_front(job);
                    break;
                }
            }
        }
        before = readers.len();
        let _turn = turns_of_all.lock().await;
        let gone: Vec<_> =
            readers.iter().filter(|(_, running)| running.reader.is_closed()).map(|(id, _)| *id).collect();
        for id in gone {
            readers.remove(&id);
            engine.cancel(id);
        }
        observe(&engine, readers.len(), deferred.len(), counts, metrics);
        let events = engine.step().await;
        // A client that has its whole answer finds it counted as ended.
        let ending = events.iter().filter(|event| !matches!(event, Event::Output(..))).count();
        observe(&engine, readers.len().saturating_sub(ending), deferred.len(), counts, metrics);
        for event in events {
            tell(event, &mut engine, readers, counts, metrics);
        }
        observe(&engine, readers.len(), deferred.len(), counts, metrics);
    }
}

/// Counts what the engine has. `deferred`: number of requests that it does not have yet.
fn observe(
    engine: &Engine<GeneratedText<'static>>,
    readers: usize,
    deferred: usize,
    counts: &Counts,
    metrics: &ModelMetrics,
) {
    let (running, waiting) = (readers + deferred, engine.waiting() + deferred);
    counts.running.store(running, Ordering::Relaxed);
    counts.waiting.store(waiting, Ordering::Relaxed);
    counts.cache_bytes.store(engine.cache_bytes(), Ordering::Relaxed);
    counts.prefix_bytes.store(engine.prefix_bytes(), Ordering::Relaxed);
    metrics.observe(running.saturating_sub(waiting), waiting, counts.rows);
}

async fn take(
    work: Work,
    model: &Model,
    engine: &mut Engine<GeneratedText<'static>>,
    readers: &mut HashMap<RequestId, Running>,
    deferred: &mut VecDeque<Job>,
    turns: &Turns,
) {
    match work {
        Work::Choices(jobs) => {
            let _turn = turns.lock().await;
            for job in jobs {
                // In the order of arrival.
                let waits = if deferred.is_empty() { begin(job, model, engine, readers) } else { Some(job) };
                deferred.extend(waits);
            }
        }
        Work::Call(compute) => compute(model.clone(), turns.clone()).await,
        Work::Use(with) => with(model, engine),
        Work::Stop => {
            for (id, running) in readers.drain() {
                engine.cancel(id);
                _ = running.reader.try_send((running.choice, Told::Failed(stopped())));
            }
            for job in deferred.drain(..) {
                _ = job.reader.try_send((job.choice, Told::Failed(stopped())));
            }
        }
    }
}

/// Submits a request to the engine, unless it is impossible. Returns it if others leave no memory for it.
fn begin(
    Job { choice, make, share, reader, place }: Job,
    model: &Model,
    engine: &mut Engine<GeneratedText<'static>>,
    readers: &mut HashMap<RequestId, Running>,
) -> Option<Job> {
    if reader.is_closed() {
        return None;
    }
    let submit = |text: GeneratedText<'static>| {
        let prompt_tokens = text.stats().prompt_tokens;
        Ok((engine.submit_for(text, share)?, prompt_tokens))
    };
    match make(model).and_then(submit) {
        Ok((id, prompt_tokens)) => {
            _ = reader.try_send((choice, Told::Accepted { prompt_tokens }));
            readers.insert(id, Running { choice, reader, begun: Instant::now(), told: None, _place: place });
        }
        Err(error) if matches!(error.cause(), Error::OutOfMemory { .. }) && !engine.is_idle() => {
            return Some(Job { choice, make, share, reader, place });
        }
        Err(error) => _ = reader.try_send((choice, Told::Failed(error.into()))),
    }
    None
}

fn tell(
    event: Event<GeneratedText<'static>>,
    engine: &mut Engine<GeneratedText<'static>>,
    readers: &mut HashMap<RequestId, Running>,
    counts: &Counts,
    metrics: &ModelMetrics,
) {
    let (id, told) = match event {
        Event::Output(id, piece) => (id, Told::Piece(piece)),
        Event::Ended(id, text) => {
            let reason = text.stop_reason().unwrap_or(StopReason::Length);
            let end = End { reason, stop: text.stop_string().map(str::to_owned) };
            (id, Told::Ended(end, text.stats()))
        }
        Event::Failed(id, _, error) => (id, Told::Failed(error.into())),
    };
    let Some(running) = readers.get_mut(&id) else { return };
    match &told {
        Told::Piece(_) => {
            let now = Instant::now();
            match running.told.replace(now) {
                None => metrics.first_token(now - running.begun),
                Some(before) => metrics.next_token(now - before),
            }
        }
        Told::Ended(end, stats) => metrics.ended(end.reason, stats, running.begun.elapsed()),
        Told::Accepted { .. } | Told::Failed(_) => {}
    }
    let ends = !matches!(told, Told::Piece(_));
    let sent = running.reader.try_send((running.choice, told));
    if ends {
        let took = running.begun.elapsed().as_millis() as u64;
        let mean = counts.milliseconds.load(Ordering::Relaxed);
        counts.milliseconds.store((7 * mean + took) / 8, Ordering::Relaxed);
    } else if let Err(error) = &sent {
        if matches!(error, TrySendError::Full(_)) {
            tracing::warn!(target: "kiln::serve", "a request is cancelled: its reader is {BEHIND} events behind");
        }
        engine.cancel(id);
    }
    if ends || sent.is_err() {
        readers.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

    use std::{path::Path, thread, time::Duration};

    use kiln::{Model, Share};

    use super::{Turns, Worker};
    use crate::{ServeOptions, metrics::Metrics};

    #[test]
    fn an_engine_that_panics_is_reported_and_refuses() {
        let model = Model::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo")).unwrap();
        let options = ServeOptions { queue: 1, prefix_bytes: 0, ..ServeOptions::default() };
        let worker = Worker::start(model, 1, &options, Metrics::new().of("demo"), Turns::default()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(worker.call(async |model| model.sizes().heads > 0)), Ok(true));
        assert!(!worker.has_failed());
        let error = runtime.block_on(worker.call(async |_| panic!("a test"))).unwrap_err();
        assert!(error.message.contains("restart the server"), "{error:?}");
        for _ in 0..500 {
            if worker.has_failed() && worker.submit(Vec::new(), Share::default()).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("the failure is not reported");
    }

    #[test]
    fn any_number_of_rows_and_places_starts() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
        for rows in [usize::MAX, usize::MAX / 2] {
            let options = ServeOptions { queue: 256, prefix_bytes: 0, ..ServeOptions::default() };
            let model = Model::load(folder).unwrap();
            let worker = Worker::start(model, rows, &options, Metrics::new().of("demo"), Turns::default());
            assert!(worker.is_ok(), "{rows} rows");
        }
    }
}
