//! The page at `/`: a chat with the model. It is part of the program, and loads nothing from elsewhere.

use axum::{
    http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName},
    response::IntoResponse,
};

type Headers = [(HeaderName, &'static str); 2];

fn headers(kind: &'static str) -> Headers {
    [(CONTENT_TYPE, kind), (CONTENT_SECURITY_POLICY, "default-src 'self'")]
}

pub(super) async fn html() -> impl IntoResponse {
    (headers("text/html; charset=utf-8"), include_str!("../../page/index.html"))
}

pub(super) async fn css() -> impl IntoResponse {
    (headers("text/css; charset=utf-8"), include_str!("../../page/page.css"))
}

pub(super) async fn script() -> impl IntoResponse {
    (headers("text/javascript; charset=utf-8"), include_str!("../../page/page.js"))
}
