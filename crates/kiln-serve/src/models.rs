//! The models of a server. Each is loaded when a request asks for it, and may be unloaded when none has for a
//! while.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::http::StatusCode;
use kiln::{
    ChatTemplate, EXACT_ROWS, Error, Model, Plan, Pooling, Result, Transcriber,
    device::{self, DeviceClass, DeviceInfo, Opened},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use web_time::Instant;

use crate::{
    ServeOptions,
    error::ApiError,
    metrics::Metrics,
    tasks,
    worker::{Turns, Worker},
};

/// Time for which a request waits for another model to end its answers, and between two looks.
const BUSY_TIME: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(50);

/// Loads a model again after it was unloaded.
type Load = Arc<dyn Fn() -> Result<Model> + Send + Sync>;

/// A model that a [`Server`](crate::Server) offers.
#[derive(Clone)]
pub struct ServedModel {
    name: String,
    model: Option<Model>,
    load: Option<Load>,
}

impl fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedModel")
            .field("name", &self.name)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl ServedModel {
    /// A model that stays loaded. `name`: the name by which requests ask for it.
    pub fn loaded(name: impl Into<String>, model: Model) -> Self {
        Self { name: name.into(), model: Some(model), load: None }
    }

    /// A model that is loaded by `load` when a request asks for it.
    pub fn on_demand(
        name: impl Into<String>,
        load: impl Fn() -> Result<Model> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), model: None, load: Some(Arc::new(load)) }
    }

    /// A model that is loaded now, and again by `load` after it was unloaded.
    #[must_use]
    pub fn loaded_again_by(self, load: impl Fn() -> Result<Model> + Send + Sync + 'static) -> Self {
        Self { load: Some(Arc::new(load)), ..self }
    }
}

/// A model that is loaded, with its engine.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) model: Model,
    /// The name by which requests ask for the model.
    pub(crate) name: String,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) plan: Option<Plan>,
    /// Other kinds of caches that a request may ask for.
    pub(crate) plans: Vec<Plan>,
    /// Number of tokens of a prompt in a pass.
    pub(crate) chunk: usize,
    /// The most choices that are computed at once.
    pub(crate) rows: usize,
    /// Whether answers have the bits that they have alone, unless they begin with an earlier answer.
    pub(crate) is_exact: bool,
    /// The most tokens that are drafted by prompt lookup for a pass.
    pub(crate) lookup_drafts: Option<usize>,
    pub(crate) pooling: Option<Pooling>,
    /// Of a model of speech.
    pub(crate) transcriber: Option<Transcriber>,
    pub(crate) worker: Worker,
    pub(crate) fingerprint: String,
}

/// A name for all that an answer depends on beside its request: the version, the weights and the form in
/// which they are held, the device and its driver, types, kernels, arithmetic, threads, cache and chunk.
fn fingerprint(model: &Model, plan: Option<&Plan>, chunk: usize) -> Result<String> {
    let of_stage = |(own, device): (Range<usize>, &Opened)| {
        let DeviceInfo { name, adapter, driver, api, .. } = &device.info;
        format!("{} {name} {adapter} {driver} {api}", own.start)
    };
    let experts = model.experts_device().map(|device| of_stage((0..0, device)));
    let devices: Vec<String> = model.stages().blocks(usize::MAX).map(of_stage).chain(experts).collect();
    let version = env!("CARGO_PKG_VERSION");
    let (dtype, plan, threads) = (model.dtype().name(), plan.unwrap_or(model.plan()), device::threads());
    let (weights, held) = (model.fingerprint()?, model.weight_bytes());
    let (kernels, arithmetic) = (model.kernels().implementation(), model.arithmetic());
    let all =
        format!("{devices:?} {threads} {dtype} {kernels:?} {arithmetic:?} {plan} {chunk} {weights} {held}");
    let hash = Sha256::digest(all);
    let short: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("kiln-{version}-{dtype}-{short}"))
}

/// The most choices that are computed at once, unless the options say. On the CPU, which computes no faster
/// with more, these are few.
fn default_rows(model: &Model) -> usize {
    /// The most for a GPU, whose kernels for few rows take no more.
    const ROWS: usize = 64;

    match model.opened().info.class {
        DeviceClass::Cpu => EXACT_ROWS,
        _ => model.exact_rows().min(ROWS),
    }
}

impl Served {
    fn start(name: &str, model: Model, shared: &Common) -> Result<Self> {
        model.text_stream()?;
        let options = &shared.options;
        let default_chunk = if model.opened().info.class == DeviceClass::Cpu { 128 } else { 256 };
        let rows = options.rows.unwrap_or_else(|| default_rows(&model));
        let turns = shared.turns.clone();
        let transcriber = match model.causal().features() {
            Some(_) => Some(
                Transcriber::new(&model)?
                    .plan(options.plan.clone().unwrap_or_else(|| model.plan().clone()))?,
            ),
            None => None,
        };
        let chunk = options.prefill_chunk.unwrap_or(default_chunk);
        let fingerprint = fingerprint(&model, options.plan.as_ref(), chunk)?;
        shared.metrics.cache_config(name, chunk, rows, model.sizes().positions);
        Ok(Self {
            worker: Worker::start(model.clone(), rows, options, shared.metrics.of(name), turns)?,
            rows,
            is_exact: rows <= model.exact_rows(),
            plans: options.plans.clone(),
            chunk,
            model,
            name: name.to_owned(),
            template: options.template.clone(),
            plan: options.plan.clone(),
            lookup_drafts: options.lookup_drafts,
            pooling: options.pooling,
            transcriber,
            fingerprint,
        })
    }

    /// Checks that the model continues texts.
    pub(crate) fn check_text(&self) -> Result<(), ApiError> {
        if self.transcriber.is_some() {
            let why = format!("`{}` takes sound; ask for it at /v1/audio/transcriptions", self.name);
            return Err(ApiError::field("model", why));
        }
        Ok(self.model.causal().check_generative()?)
    }

    /// The properties of the model and its engine.
    pub(crate) fn props(&self) -> Value {
        let (model, worker) = (&self.model, &self.worker);
        let [caches, prefixes] = worker.cache_bytes();
        let default = self.plan.as_ref().unwrap_or(model.plan());
        // Browsers may hide the name of the adapter.
        let adapter = Some(&model.opened().info.adapter).filter(|name| !name.is_empty());
        let device = adapter.map_or_else(String::new, |name| format!(" ({name})"));
        let device = format!("{}{device}", model.device_names());
        json!({
            "model": self.name,
            "loaded": true,
            "version": env!("CARGO_PKG_VERSION"),
            "device": device,
            "dtype": model.dtype().name(),
            "context": model.sizes().positions,
            "cache": default.to_string(),
            "caches": std::iter::once(default).chain(&self.plans).map(Plan::to_string).collect::<Vec<_>>(),
            "rows": self.rows,
            "prefill_chunk": self.chunk,
            "running": worker.running().saturating_sub(worker.waiting()),
            "waiting": worker.waiting(),
            "memory": { "weights": model.weight_bytes(), "caches": caches, "prefixes": prefixes },
            "system_fingerprint": self.fingerprint,
        })
    }
}

/// All models of a server.
pub(crate) struct Models {
    slots: Vec<Arc<Slot>>,
    common: Arc<Common>,
    /// Locked while a model is loaded or unloaded.
    changes: Mutex<()>,
    began: Instant,
    /// When the server started, in seconds since 1970.
    created: u64,
}

/// The parts that all models share.
struct Common {
    options: ServeOptions,
    metrics: Metrics,
    turns: Turns,
}

/// The place of a model.
struct Slot {
    name: String,
    load: Option<Load>,
    served: RwLock<Option<Arc<Served>>>,
    /// When the latest request asked for it, and the time after which it may be unloaded, in milliseconds.
    /// `u64::MAX`: never.
    used: AtomicU64,
    keep: AtomicU64,
    /// The time of the server.
    default_keep: u64,
}

impl Models {
    pub(crate) fn new(models: Vec<ServedModel>, options: ServeOptions) -> Result<Self> {
        let wrong = |why: String| Err(Error::Setting { name: "model", why });
        if models.is_empty() {
            return wrong("is missing: a server has at least one".to_owned());
        }
        let metrics = Metrics::new();
        let keep = milliseconds(options.idle);
        // Models take turns on their device: a recording belongs to one thread, and threads of two would
        // compete for the same cores.
        let common = Arc::new(Common { options, metrics, turns: Turns::default() });
        let mut slots: Vec<Arc<Slot>> = Vec::new();
        for ServedModel { name, model, load } in models {
            if slots.iter().any(|slot| slot.name == name) {
                return wrong(format!("has the name `{name}` twice; `--alias` gives each model its own"));
            }
            let served = model.map(|model| Served::start(&name, model, &common)).transpose()?;
            slots.push(Arc::new(Slot {
                name,
                load,
                served: RwLock::new(served.map(Arc::new)),
                used: AtomicU64::new(0),
                keep: AtomicU64::new(keep),
                default_keep: keep,
            }));
        }
        Ok(Self { slots, common, changes: Mutex::new(()), began: Instant::now(), created: crate::api::now() })
    }

    /// The names of all models.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.slots.iter().map(|slot| slot.name.as_str())
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.common.metrics
    }

    /// The models that are loaded.
    pub(crate) fn loaded(&self) -> Vec<Arc<Served>> {
        self.slots.iter().filter_map(|slot| slot.served()).collect()
    }

    /// The models in the forms of OpenAI and Anthropic.
    pub(crate) fn objects(&self) -> Vec<Value> {
        let loaded = self.loaded();
        let object = |name: &str| {
            let mut object = json!({
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "kiln",
                "type": "model",
                "display_name": name,
                "created_at": crate::api::date(self.created),
                "lifecycle": "active",
            });
            if let Some(served) = loaded.iter().find(|served| served.name == name) {
                object["max_model_len"] = json!(served.model.sizes().positions);
            }
            object
        };
        self.names().map(object).collect()
    }

    /// The name of a model, as the server has it. `None`: that of the first.
    pub(crate) fn name(&self, name: Option<&str>) -> Result<&str, ApiError> {
        self.slot(name).map(|slot| slot.name.as_str())
    }

    fn slot(&self, name: Option<&str>) -> Result<&Arc<Slot>, ApiError> {
        let Some(name) = name else { return Ok(&self.slots[0]) };
        // Programs of ollama add `:latest`.
        let find = |name: &str| self.slots.iter().find(|slot| slot.name == name);
        let found = find(name).or_else(|| find(name.strip_suffix(":latest")?));
        found.ok_or_else(|| {
            let all: Vec<_> = self.names().map(|name| format!("`{name}`")).collect();
            let message = format!("the model `{name}` does not exist; this server has {}", all.join(", "));
            ApiError {
                code: Some("model_not_found"),
                param: Some("model".to_owned()),
                ..ApiError::new(StatusCode::NOT_FOUND, message)
            }
        })
    }

    /// The model of this name, which is loaded if it is not. `None`: the first.
    pub(crate) async fn get(self: &Arc<Self>, name: Option<&str>) -> Result<Arc<Served>, ApiError> {
        let slot = self.slot(name)?;
        slot.used.store(milliseconds(Some(self.began.elapsed())), Ordering::Relaxed);
        if let Some(served) = slot.served().filter(|served| !served.worker.has_failed()) {
            return Ok(served);
        }
        // In a task of its own: a client that leaves while it loads does not lose the work.
        let (models, slot) = (self.clone(), slot.clone());
        let load = async move { models.load(&slot).await };
        tasks::to_its_end(load).await.ok_or_else(failed)?
    }

    async fn load(&self, slot: &Slot) -> Result<Arc<Served>, ApiError> {
        let _changes = self.changes.lock().await;
        match (slot.served(), &slot.load) {
            (Some(served), load) if load.is_none() || !served.worker.has_failed() => return Ok(served),
            _ => slot.set(None),
        }
        let Some(load) = slot.load.clone() else {
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the model is not loaded"));
        };
        let begun = Instant::now();
        while self.loaded().len() >= self.common.options.most_loaded {
            if !self.unload_oldest(slot) {
                // All answer somebody.
                if begun.elapsed() > BUSY_TIME {
                    return Err(busy());
                }
                tasks::pause(LOOK).await;
            }
        }
        loop {
            tracing::info!(target: "kiln::serve", "{} is loaded", slot.name);
            let (load, common, name) = (load.clone(), self.common.clone(), slot.name.clone());
            let start = move || load().and_then(|model| Served::start(&name, model, &common));
            match tasks::apart(start).await.ok_or_else(failed)? {
                Ok(served) => {
                    let served = Arc::new(served);
                    slot.set(Some(served.clone()));
                    return Ok(served);
                }
                // Another model can make room.
                Err(error)
                    if matches!(error.cause(), Error::OutOfMemory { .. }) && self.unload_oldest(slot) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Unloads the model that was asked for longest ago, of those that answer nobody. Returns whether there
    /// was one.
    fn unload_oldest(&self, except: &Slot) -> bool {
        let mut slots: Vec<_> =
            self.slots.iter().filter(|slot| !std::ptr::eq(&raw const ***slot, except)).collect();
        slots.sort_by_key(|slot| slot.used.load(Ordering::Relaxed));
        slots.into_iter().any(|slot| slot.unload())
    }

    /// Ends all answers with an error.
    pub(crate) fn stop(&self) {
        self.loaded().iter().for_each(|served| served.worker.stop());
    }

    /// Unloads models that nobody asked for within their time.
    pub(crate) fn unload_idle(&self) {
        let Ok(_changes) = self.changes.try_lock() else { return };
        let now = milliseconds(Some(self.began.elapsed()));
        for slot in &self.slots {
            let [used, keep] = [&slot.used, &slot.keep].map(|number| number.load(Ordering::Relaxed));
            if keep < u64::MAX && now.saturating_sub(used) >= keep && !slot.unload() {
                // The time begins with the end of its answers.
                slot.used.store(now, Ordering::Relaxed);
            }
        }
    }

    /// The time after which a model may be unloaded, if nobody asks for it; `None`: never.
    pub(crate) fn expires(&self, name: &str) -> Option<Duration> {
        let slot = self.slot(Some(name)).ok()?;
        let [used, keep] = [&slot.used, &slot.keep].map(|number| number.load(Ordering::Relaxed));
        let now = milliseconds(Some(self.began.elapsed()));
        (keep < u64::MAX).then(|| Duration::from_millis((used + keep).saturating_sub(now)))
    }

    /// When the server started, in seconds since 1970.
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    /// Sets the time that a model stays loaded after the latest request: this one, for ever (`Some(None)`),
    /// or that of the server.
    pub(crate) fn keep(&self, name: &str, time: Option<Option<Duration>>) -> Result<(), ApiError> {
        let slot = self.slot(Some(name))?;
        slot.keep.store(time.map_or(slot.default_keep, milliseconds), Ordering::Relaxed);
        Ok(())
    }
}

impl Slot {
    /// The model, if it is loaded.
    fn served(&self) -> Option<Arc<Served>> {
        self.served.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, served: Option<Arc<Served>>) {
        *self.served.write().unwrap_or_else(PoisonError::into_inner) = served;
    }

    /// Unloads the model, unless it answers somebody or could not be loaded again. Returns whether it was
    /// loaded. No other thread may load or unload one meanwhile.
    fn unload(&self) -> bool {
        let mut place = self.served.write().unwrap_or_else(PoisonError::into_inner);
        // Whoever answers has a copy.
        let is_idle = place.as_ref().is_some_and(|served| Arc::strong_count(served) == 1);
        if !is_idle || self.load.is_none() {
            return false;
        }
        let served = place.take();
        drop(place);
        // Until a request says otherwise.
        self.keep.store(self.default_keep, Ordering::Relaxed);
        tracing::info!(target: "kiln::serve", "{} is unloaded", self.name);
        // The thread of the engine ends, and with it goes the model. Whoever loads another one needs the
        // memory.
        if let Some(served) = served.and_then(Arc::into_inner) {
            let Served { worker, model, .. } = served;
            drop(model);
            worker.end();
        }
        true
    }
}

fn milliseconds(time: Option<Duration>) -> u64 {
    time.map_or(u64::MAX, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn failed() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the model failed while it was loaded")
}

fn busy() -> ApiError {
    ApiError {
        code: Some("models_busy"),
        retry_after: Some(1),
        ..ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "all models that may be loaded at once are answering; come again later",
        )
    }
}
