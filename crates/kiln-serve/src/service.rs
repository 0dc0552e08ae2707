//! The addresses of a server, without a network.

use std::{fmt, sync::Arc};

use axum::{Router, body::Body, middleware};
use http::{Request, Response};
use kiln::{
    Error, Result,
    expert::{StoredPrefix, TensorFile},
};
use tower_service::Service as _;

use crate::{
    ServeOptions, ServedModel, api,
    guard::{Guard, guard},
    http,
    models::Models,
};

/// Answers requests, wherever they come from. Copies share the engines. Outside browsers, it needs a runtime
/// of tokio with time.
///
/// ```no_run
/// use kiln::Model;
/// use kiln_serve::{Body, ServeOptions, ServedModel, Service, http::Request};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let model = ServedModel::loaded("smollm2", Model::load("SmolLM2-135M-Instruct")?);
/// let service = Service::new(vec![model], ServeOptions::default())?;
/// let request = Request::get("/v1/models").body(Body::empty())?;
/// assert_eq!(service.call(request).await.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Service {
    pub(crate) router: Router,
    pub(crate) models: Arc<Models>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

impl Service {
    /// Starts the engines of loaded models. The first model answers where a request may leave out the name.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln::Error::Setting) for 0 rows, and for no model or two of the same name.
    pub fn new(models: Vec<ServedModel>, options: ServeOptions) -> Result<Self> {
        Self::named(models, options, None)
    }

    /// A service that answers only requests to these hosts; `None`: to any.
    pub(crate) fn named(
        models: Vec<ServedModel>,
        options: ServeOptions,
        hosts: Option<Vec<String>>,
    ) -> Result<Self> {
        let rules = Arc::new(Guard::new(&options.keys, hosts, options.origins.clone()));
        let models = Arc::new(Models::new(models, options)?);
        let router = api::router(models.clone())
            .layer(middleware::from_fn_with_state(rules, guard))
            .layer(middleware::from_fn(api::finish));
        Ok(Self { router, models })
    }

    /// Ends all answers with an error.
    pub fn stop(&self) {
        self.models.stop();
    }

    /// Copies the beginnings of prompts that the engine of a model keeps into the bytes of a file, for
    /// [`restore_prefixes`](Self::restore_prefixes). `model`: its name; `None`: the first. `cache_salt`: only
    /// those of requests that had this one.
    ///
    /// # Errors
    /// [`Error::Execution`] for a model that does not exist, or cannot be loaded; the errors of
    /// [`kiln::Model::save_prefixes`].
    pub async fn save_prefixes(&self, model: Option<&str>, cache_salt: Option<&str>) -> Result<Vec<u8>> {
        let served = self.models.get(model).await.map_err(|e| Error::Execution(e.message))?;
        let computed_by = served.fingerprint.clone();
        // Scopes end with the salt, in quotes (`api/settings.rs`).
        let end = cache_salt.map(|salt| format!(" {salt:?}"));
        let save = move |model: &kiln::Model, engine: &mut kiln::Engine<_>| {
            let is_wanted =
                |prefix: &&StoredPrefix| end.as_ref().is_none_or(|end| prefix.scope.name.ends_with(end));
            model.save_prefixes(engine.stored_prefixes().filter(is_wanted), &computed_by)
        };
        served.worker.with_engine(save).await.map_err(|e| Error::Execution(e.message))?
    }

    /// Gives the engine of a model the beginnings of prompts that were saved. Prompts that begin like these
    /// are computed from there, with the same bits. Returns the number of beginnings in the file.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is damaged, or was computed by another model, device, driver or
    /// version of Kiln.
    pub async fn restore_prefixes(&self, model: Option<&str>, file: TensorFile) -> Result<usize> {
        let served = self.models.get(model).await.map_err(|e| Error::Execution(e.message))?;
        let computed_by = served.fingerprint.clone();
        let restore = move |model: &kiln::Model, engine: &mut kiln::Engine<_>| {
            let prefixes = model.load_prefixes(file, &computed_by)?;
            let count = prefixes.len();
            prefixes.into_iter().for_each(|prefix| engine.store_prefix(prefix));
            Ok(count)
        };
        served.worker.with_engine(restore).await.map_err(|e| Error::Execution(e.message))?
    }

    /// Answers a request. A response whose body is dropped ends its answer.
    pub async fn call(&self, request: Request<Body>) -> Response<Body> {
        self.router.clone().call(request).await.unwrap_or_else(|never| match never {})
    }
}
