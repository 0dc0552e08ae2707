//! Who may ask: the key of a request, the host that it names, the page that it comes from, and the type of
//! its body.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::error::ApiError;

/// Most bytes of the headers of a request.
pub(crate) const HEADER_BYTES: usize = 32 << 10;

type Hash = [u8; 32];

/// The key of a request: its number among those of the server; `None` if no key is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(pub(crate) Option<u64>);

/// Headers that pages of other origins may send.
const HEADERS: &str = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta, \
                       anthropic-dangerous-direct-browser-access";

/// Addresses that need no key: whether the server is well, and the page, which asks for the key itself.
const OPEN: [&str; 5] = ["/health", "/ready", "/", "/page.css", "/page.js"];

/// The rules of a server.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Hashes of the keys; without any, no key is needed.
    keys: Vec<Hash>,
    /// Names of the host that requests may use; `None`: any.
    hosts: Option<Vec<String>>,
    /// Origins of pages that may ask, beside those of the machine itself.
    origins: Vec<String>,
}

impl Guard {
    /// `hosts`: the names of a server that only its own machine reaches. A page of another site could
    /// otherwise ask it under a name of its own that leads here (DNS rebinding).
    pub(crate) fn new(keys: &[String], hosts: Option<Vec<String>>, origins: Vec<String>) -> Self {
        Self { keys: keys.iter().map(|key| hash(key)).collect(), hosts, origins }
    }

    fn check(&self, request: &Request) -> Result<Key, ApiError> {
        let headers = request.headers();
        let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        if bytes > HEADER_BYTES {
            let message = format!("the headers have more than {HEADER_BYTES} bytes");
            return Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message));
        }
        let host = text(headers, header::HOST).or_else(|| request.uri().host());
        if let Some(hosts) = &self.hosts
            && !host.is_some_and(|host| hosts.iter().any(|own| own == without_port(host)))
        {
            let message = "the request names another host than this server's";
            return Err(ApiError::new(StatusCode::FORBIDDEN, message));
        }
        if let Some(origin) = text(headers, header::ORIGIN)
            && !self.allows(origin)
        {
            let message = format!("pages of {origin} may not ask; `--cors` allows an origin");
            return Err(ApiError::new(StatusCode::FORBIDDEN, message));
        }
        let is_open = request.method() == Method::OPTIONS || OPEN.contains(&request.uri().path());
        let key = if is_open { Key(None) } else { self.check_key(headers)? };
        let is_json = text(headers, header::CONTENT_TYPE).is_some_and(|kind| {
            kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
        });
        let has_form = request.uri().path().starts_with("/v1/audio/");
        // Clients of ollama leave out the type. A browser names the origin of each POST, so no page gets
        // through.
        let may_lack_type =
            request.uri().path().starts_with("/api/") && !headers.contains_key(header::ORIGIN);
        if request.method() == Method::POST && !is_json && !has_form && !may_lack_type {
            let message = "the body must be of type application/json";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        Ok(key)
    }

    fn check_key(&self, headers: &HeaderMap) -> Result<Key, ApiError> {
        if self.keys.is_empty() {
            return Ok(Key(None));
        }
        let bearer = text(headers, header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
        // Anthropic's clients have another name.
        let given = bearer.or_else(|| text(headers, HeaderName::from_static("x-api-key")));
        let given = hash(given.unwrap_or_default().trim());
        // All keys are compared, each in the same time.
        let found =
            self.keys.iter().zip(1..).fold(0u64, |found, (key, number)| {
                u64::conditional_select(&found, &number, key.ct_eq(&given))
            });
        if found > 0 {
            return Ok(Key(Some(found)));
        }
        Err(ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(
                StatusCode::UNAUTHORIZED,
                "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
            )
        })
    }

    /// Whether pages of this origin may ask.
    fn allows(&self, origin: &str) -> bool {
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let is_local = host.is_some_and(|host| is_loopback(without_port(host)));
        is_local || self.origins.iter().any(|own| own == origin)
    }
}

pub(crate) async fn guard(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let origin = text(request.headers(), header::ORIGIN)
        .filter(|origin| guard.allows(origin))
        .and_then(|origin| HeaderValue::from_str(origin).ok());
    let mut response = match guard.check(&request) {
        Err(error) => error.into_response(),
        Ok(_) if request.method() == Method::OPTIONS => StatusCode::NO_CONTENT.into_response(),
        Ok(key) => {
            request.extensions_mut().insert(key);
            next.run(request).await
        }
    };
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        let allowed = HeaderValue::from_static(HEADERS);
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    }
    response
}

/// Whether this name always means the machine itself.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}
