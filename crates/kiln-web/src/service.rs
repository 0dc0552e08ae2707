//! Requests in the forms of OpenAI, Anthropic and ollama, as `kiln serve` answers them.

use std::{cell::Cell, fmt};

use futures_util::{StreamExt, stream};
use js_sys::Uint8Array;
use kiln::{Model, Plan};
use kiln_serve::{
    Body, ServeOptions, ServedModel, Service,
    http::{Request, Response},
};
use wasm_bindgen::prelude::*;

use crate::{files::WebFile, model::WebModel, thrown};

/// The caches that requests may ask for by `kiln.cache`: the visitor is the only user.
const PLANS: [&str; 8] =
    ["dynamic", "static", "sliding", "sink", "quantized", "quantized:nbits=4", "quantized:nbits=2", "none"];

/// Bytes of copies of the beginnings of prompts, by default.
const PREFIX_BYTES: usize = 256 << 20;

/// Starts the engine of a model, with so many bytes of memory for the beginnings of prompts.
pub(crate) fn start(model: &Model, prefix_bytes: Option<usize>) -> kiln::Result<Service> {
    let plans = PLANS.iter().map(|name| Plan::named(name)).collect::<kiln::Result<_>>()?;
    let served = ServedModel::loaded(model.name(), model.clone());
    let prefix_bytes = prefix_bytes.unwrap_or(PREFIX_BYTES);
    let options = ServeOptions { plans, prefix_bytes, ..ServeOptions::default() };
    Service::new(vec![served], options)
}

type Stream = stream::Abortable<kiln_serve::BodyDataStream>;

/// A response, whose body comes in pieces.
#[wasm_bindgen]
pub struct WebResponse {
    status: u16,
    headers: String,
    /// Away while the next piece is awaited.
    body: Cell<Option<Stream>>,
    abort: stream::AbortHandle,
}

impl fmt::Debug for WebResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebResponse").field("status", &self.status).finish_non_exhaustive()
    }
}

#[wasm_bindgen]
impl WebModel {
    /// Answers a request. `headers`: JSON, an array of names and values.
    ///
    /// # Errors
    /// An `Error` if it is no request.
    pub async fn fetch(
        &self,
        method: String,
        path: String,
        headers: String,
        body: Vec<u8>,
    ) -> Result<WebResponse, JsValue> {
        let wrong = |why: String| JsValue::from(JsError::new(&why));
        let headers: Vec<(String, String)> =
            serde_json::from_str(&headers).map_err(|e| wrong(e.to_string()))?;
        let mut request = Request::builder().method(&*method).uri(path);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(Body::from(body)).map_err(|e| wrong(e.to_string()))?;
        Ok(WebResponse::of(self.service().call(request).await))
    }

    /// Copies the beginnings of prompts that are kept into the bytes of a file: all, or those of requests
    /// with this `cache_salt`.
    ///
    /// # Errors
    /// An `Error` that is named after its kind.
    #[wasm_bindgen(js_name = savePrefixes)]
    pub async fn save_prefixes(&self, cache_salt: Option<String>) -> Result<Vec<u8>, JsValue> {
        self.service().save_prefixes(None, cache_salt.as_deref()).await.map_err(|e| thrown(&e))
    }

    /// Takes the beginnings of prompts from such a file. Returns their number.
    ///
    /// # Errors
    /// An `Error` that is named after its kind: a file that is damaged, or was computed elsewhere.
    #[wasm_bindgen(js_name = restorePrefixes)]
    pub async fn restore_prefixes(&self, file: WebFile) -> Result<usize, JsValue> {
        let restored = async { self.service().restore_prefixes(None, file.tensors()?).await };
        restored.await.map_err(|e| thrown(&e))
    }
}

#[wasm_bindgen]
impl WebResponse {
    #[wasm_bindgen(getter)]
    pub fn status(&self) -> u16 {
        self.status
    }

    /// JSON, an array of names and values.
    #[wasm_bindgen(getter)]
    pub fn headers(&self) -> String {
        self.headers.clone()
    }

    /// The next piece of the body; `undefined` at its end.
    ///
    /// # Errors
    /// An `Error` if the body breaks off.
    pub async fn next(&self) -> Result<Option<Uint8Array>, JsValue> {
        let Some(mut body) = self.body.take() else { return Ok(None) };
        let Some(piece) = body.next().await else { return Ok(None) };
        self.body.set(Some(body));
        let piece = piece.map_err(|e| JsError::new(&e.to_string()))?;
        Ok(Some(Uint8Array::from(&piece[..])))
    }

    /// Ends the body, and what computes it.
    pub fn abort(&self) {
        self.abort.abort();
        self.body.take();
    }
}

impl WebResponse {
    fn of(response: Response<Body>) -> Self {
        let (head, body) = response.into_parts();
        let headers = head.headers.iter();
        let headers = headers.map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes())));
        let headers = serde_json::json!(headers.collect::<Vec<_>>()).to_string();
        let (body, abort) = stream::abortable(body.into_data_stream());
        Self { status: head.status.as_u16(), headers, body: Cell::new(Some(body)), abort }
    }
}
