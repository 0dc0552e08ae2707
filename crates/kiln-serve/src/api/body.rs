//! Reading and parsing the bodies of requests, within limits of size, time and memory.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::{error::ApiError, tasks};

/// Time within which a body must have come.
const BODY_TIME: Duration = Duration::from_secs(60);

/// Most values of a body: its commas, also those of texts.
const MOST_VALUES: usize = 1 << 20;

/// Longest path of a field that a message repeats.
const LONGEST_PATH: usize = 200;

/// A body, unless it is too long, too slow, or was not sent whole.
pub(super) struct Body(Result<Bytes, ApiError>);

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = Infallible;

    async fn from_request(request: Request, state: &S) -> Result<Self, Infallible> {
        let read = async {
            Bytes::from_request(request, state)
                .await
                .map_err(|e| ApiError::new(e.status(), format!("the body cannot be read: {}", e.body_text())))
        };
        Ok(Self(in_time(read).await))
    }
}

/// Waits for the end of a body.
pub(super) async fn in_time<T>(read: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
    tasks::within(BODY_TIME, read).await.unwrap_or_else(|| {
        let why = format!("the body did not come within {} s", BODY_TIME.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, why))
    })
}

/// Computes something that takes a while, and would keep a thread of HTTP from all others. Few at once: each
/// may need much memory.
pub(super) async fn apart<T: Send + 'static>(
    compute: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    static PLACES: Semaphore = Semaphore::const_new(2);
    let failed = || ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be read");
    let place = PLACES.acquire().await.map_err(|_| failed())?;
    let compute = move || {
        let _place = place;
        compute()
    };
    tasks::apart(compute).await.ok_or_else(failed)?
}

/// Parses a body, and names the place of a fault.
pub(super) async fn parsed<T: for<'de> Deserialize<'de> + Send + 'static>(
    Body(body): Body,
) -> Result<T, ApiError> {
    let body = body?;
    apart(move || {
        // Many small values take a hundred times their text.
        if body.iter().filter(|byte| **byte == b',').count() > MOST_VALUES {
            return Err(ApiError::bad(format!("the body has more than {MOST_VALUES} values")));
        }
        let mut json = serde_json::Deserializer::from_slice(&body);
        let value = located(serde_path_to_error::deserialize(&mut json))?;
        json.end().map_err(|e| ApiError::bad(format!("the body is no JSON object: {e}")))?;
        Ok(value)
    })
    .await
}

/// Reads fields of an object that was parsed.
pub(super) fn fields<T: for<'de> Deserialize<'de>>(body: &Map<String, Value>) -> Result<T, ApiError> {
    located(serde_path_to_error::deserialize(Value::Object(body.clone())))
}

fn located<T>(result: Result<T, serde_path_to_error::Error<serde_json::Error>>) -> Result<T, ApiError> {
    result.map_err(|error| match error.path().to_string() {
        path if path == "." || path.len() > LONGEST_PATH => {
            ApiError::bad(format!("the body is no such JSON object: {}", error.inner()))
        }
        path => ApiError::field(&path, error.inner()),
    })
}
