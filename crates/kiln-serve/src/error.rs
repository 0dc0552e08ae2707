//! Errors of the API, in OpenAI's form.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use kiln::Error;
use serde_json::{Value, json};

/// An error of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// A name by which programs tell errors apart, such as `model_not_found`.
    pub(crate) code: Option<&'static str>,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    pub(crate) message: String,
    /// Seconds after which another attempt may succeed.
    pub(crate) retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, code: None, param: None, message: message.into(), retry_after: None }
    }

    /// A field that is wrong.
    pub(crate) fn field(name: &str, why: impl std::fmt::Display) -> Self {
        let message = format!("{name}: {why}");
        Self { param: Some(name.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// The object of the field `error` in OpenAI's form, also at the end of a stream.
    pub(crate) fn object(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "message": self.message, "type": kind, "param": self.param, "code": self.code })
    }

    /// The body of a response in this form.
    pub(crate) fn body(&self, form: ErrorForm) -> Value {
        match form {
            ErrorForm::OpenAi => json!({ "error": self.object() }),
            ErrorForm::Anthropic => {
                let kind = match self.status {
                    StatusCode::UNAUTHORIZED => "authentication_error",
                    StatusCode::FORBIDDEN => "permission_error",
                    StatusCode::NOT_FOUND => "not_found_error",
                    StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
                    StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
                    StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
                    status if status.is_server_error() => "api_error",
                    _ => "invalid_request_error",
                };
                let mut error = json!({ "type": kind, "message": self.message });
                if self.param.as_deref() == Some("thread") {
                    // Anthropic's clients then send all messages.
                    error["details"] =
                        json!({ "error_code": "thread_unsupported_request", "unsupported": ["thread"] });
                }
                json!({ "type": "error", "error": error })
            }
            ErrorForm::Ollama => json!({ "error": self.message }),
        }
    }

    pub(crate) fn response(&self, form: ErrorForm) -> Response {
        let mut response = (self.status, Json(self.body(form))).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The form of errors in an API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ErrorForm {
    /// The form of the API with this address.
    pub(crate) fn of(path: &str) -> Self {
        match path {
            path if path.starts_with("/v1/messages") => Self::Anthropic,
            path if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }
}

/// Errors of a request's own making are of status 400; the others are the server's.
impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = kiln::expert::plain(&error.to_string());
        match error.cause() {
            Error::Setting { name, .. } => {
                Self { param: Some((*name).to_owned()), ..Self::new(StatusCode::BAD_REQUEST, message) }
            }
            Error::TooLong { .. } | Error::Full { .. } | Error::TooManyAtOnce { .. } => {
                Self { code: Some("context_length_exceeded"), ..Self::new(StatusCode::BAD_REQUEST, message) }
            }
            Error::Prompt { .. }
            | Error::ChatTemplate { .. }
            | Error::Unknown { .. }
            | Error::Audio { .. } => Self::new(StatusCode::BAD_REQUEST, message),
            Error::OutOfMemory { .. } | Error::BufferTooLarge { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.response(ErrorForm::OpenAi);
        // The API that was asked may have another form.
        response.extensions_mut().insert(self);
        response
    }
}
