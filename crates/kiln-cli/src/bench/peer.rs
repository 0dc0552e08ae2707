//! Figures of another runtime, as `tools/bench_transformers.py --json` writes them.

use std::path::Path;

use kiln::{Error, Result, expert::files};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub(super) struct Peer {
    pub(super) tool: String,
    #[serde(default)]
    pub(super) version: String,
    #[serde(default)]
    pub(super) threads: Option<usize>,
    #[serde(default)]
    pub(super) dtype: String,
    results: Vec<Figure>,
}

#[derive(Debug, Deserialize)]
struct Figure {
    test: String,
    tokens_per_second: f64,
}

pub(super) fn read(path: &Path) -> Result<Peer> {
    let wrong = |why: String| Error::File { path: path.to_owned(), why };
    let text = files::read_input(path)?;
    serde_json::from_str(&text)
        .map_err(|e| wrong(format!("is not a report of tools/bench_transformers.py --json: {e}")))
}

impl Peer {
    pub(super) fn tokens_per_second(&self, test: &str) -> Option<f64> {
        self.results.iter().find(|figure| figure.test == test).map(|figure| figure.tokens_per_second)
    }
}
