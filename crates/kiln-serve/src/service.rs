//! The addresses of a server, without a network.

use std::{fmt, sync::Arc};

use axum::{Router, body::Body, middleware};
use http::{Request, Response};
use kiln::Result;
use tower_service::Service as _;

use crate::{
    ServeOptions, ServedModel, api,
    guard::{Guard, guard},
    http,
    models::Models,
};

/// Answers requests, wherever they come from. Copies share the engines.
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

    /// Answers a request. A response whose body is dropped ends its answer.
    pub async fn call(&self, request: Request<Body>) -> Response<Body> {
        self.router.clone().call(request).await.unwrap_or_else(|never| match never {})
    }
}
