//! The responses that are kept for the next one.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{Extension, Json, extract::Path, http::StatusCode};
use serde_json::{Value, json};

use crate::{error::ApiError, guard::Key};

/// Most responses that are kept, and their bytes. The oldest are dropped.
const MOST_STORED: usize = 1000;
const STORED_BYTES: usize = 64 << 20;

/// The responses that are kept for later ones, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Stored(Mutex<VecDeque<Kept>>);

#[derive(Debug)]
pub(super) struct Kept {
    key: Key,
    response: Value,
    /// The conversation with the answer, as messages of a chat.
    pub(super) messages: Vec<Value>,
    bytes: usize,
}

impl Stored {
    fn all(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keep(&self, key: Key, response: Value, messages: Vec<Value>) {
        let text = |value: &Value| value.to_string().len();
        let bytes = text(&response) + messages.iter().map(text).sum::<usize>();
        let mut all = self.all();
        all.push_back(Kept { key, response, messages, bytes });
        let mut held: usize = all.iter().map(|kept| kept.bytes).sum();
        while all.len() > MOST_STORED || held > STORED_BYTES {
            held -= all.pop_front().map_or(0, |kept| kept.bytes);
        }
    }

    /// A part of the response with this name, unless it is another user's.
    pub(super) fn find<T>(&self, key: Key, id: &str, part: impl FnOnce(&Kept) -> T) -> Result<T, ApiError> {
        let all = self.all();
        let kept = all.iter().find(|kept| kept.key == key && kept.response["id"] == id);
        kept.map(part).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> ApiError {
    let message = format!("there is no response `{id}`: it was not stored, or others took its place");
    ApiError {
        code: Some("response_not_found"),
        param: Some("previous_response_id".to_owned()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

pub(crate) async fn get(
    Extension(stored): Extension<Arc<Stored>>,
    Extension(key): Extension<Key>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    stored.find(key, &id, |kept| kept.response.clone()).map(Json)
}

pub(crate) async fn delete(
    Extension(stored): Extension<Arc<Stored>>,
    Extension(key): Extension<Key>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    stored.find(key, &id, |_| ())?;
    stored.all().retain(|kept| !(kept.key == key && kept.response["id"] == id));
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
}
