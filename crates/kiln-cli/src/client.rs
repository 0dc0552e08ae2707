//! A client of servers that speak OpenAI's API.

use std::{
    io::{BufRead, BufReader},
    time::Duration,
};

use kiln::Error;
use serde_json::{Map, Value, json};
use ureq::{
    Agent, Body,
    http::{Response, header},
};

use crate::output::Result;

/// Time within which a server must take a connection.
const CONNECT_TIME: Duration = Duration::from_secs(10);

/// Longest answer that is no stream, in bytes.
const LONGEST: u64 = 16 << 20;

/// A client of one model of a server.
pub(crate) struct Client {
    agent: Agent,
    /// The address, with `/v1`.
    pub(crate) url: String,
    key: Option<String>,
    pub(crate) model: String,
}

/// A change of an answer.
#[derive(Debug)]
pub(crate) enum Delta {
    Text(String),
    Reasoning,
    /// The reason for which the answer ended.
    End(String),
    Usage(Usage),
}

/// Numbers of tokens of an answer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: u64,
    pub(crate) cached: u64,
    pub(crate) generated: u64,
}

fn wrong(why: impl Into<String>) -> Error {
    Error::Setting { name: "--url", why: why.into() }
}

impl Client {
    /// Asks a server for its models. `model`: the name of one; `None`: the first.
    ///
    /// # Errors
    /// [`Error::Setting`] for an address that does not answer as such a server, and for a model that it does
    /// not have.
    pub(crate) fn find(url: &str, key: Option<String>, model: Option<String>) -> Result<Self> {
        let url = url.trim_end_matches('/');
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(wrong(format!("is `{url}`, must begin with http:// or https://")).into());
        }
        let url = if url.ends_with("/v1") { url.to_owned() } else { format!("{url}/v1") };
        let config =
            Agent::config_builder().http_status_as_error(false).timeout_connect(Some(CONNECT_TIME)).build();
        let mut client = Self { agent: config.new_agent(), url, key, model: String::new() };
        let list = client.json(client.get("models")?)?;
        let names: Vec<&str> =
            list["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str()).collect();
        client.model = match model {
            Some(model) if names.contains(&model.as_str()) => model,
            Some(model) => {
                let known = names.iter().map(|name| (*name).to_owned()).collect();
                return Err(Error::Unknown { what: "model", name: model, known }.into());
            }
            None => names.first().ok_or_else(|| wrong("has a server without models"))?.to_string(),
        };
        Ok(client)
    }

    /// Streams the answer to a conversation.
    pub(crate) fn chat(
        &self,
        body: Map<String, Value>,
    ) -> Result<impl Iterator<Item = Result<Delta>> + use<>> {
        self.stream("chat/completions", body)
    }

    /// Streams an answer in the form of an address below `/v1`. `body`: all fields but the model and those of
    /// streams.
    pub(crate) fn stream(
        &self,
        path: &str,
        mut body: Map<String, Value>,
    ) -> Result<impl Iterator<Item = Result<Delta>> + use<>> {
        body.insert("model".to_owned(), json!(self.model));
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({ "include_usage": true }));
        let url = format!("{}/{path}", self.url);
        let mut request = self.agent.post(&url).header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let response = request.send(Value::Object(body).to_string()).map_err(|e| self.unreachable(&e))?;
        let response = self.accepted(response)?;
        let reader = BufReader::new(response.into_body().into_with_config().limit(u64::MAX).reader());
        Ok(reader.lines().flat_map(|line| match line {
            Ok(line) => deltas(&line).unwrap_or_else(|error| vec![Err(error.into())]),
            Err(error) => {
                vec![Err(Error::Execution(format!(
                    "the server went away in the middle of the answer: {error}"
                ))
                .into())]
            }
        }))
    }

    fn get(&self, path: &str) -> Result<Response<Body>> {
        let mut request = self.agent.get(format!("{}/{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let response = request.call().map_err(|e| self.unreachable(&e))?;
        self.accepted(response)
    }

    fn json(&self, response: Response<Body>) -> Result<Value> {
        let text = response.into_body().into_with_config().limit(LONGEST).read_to_string();
        let value = text.ok().and_then(|text| serde_json::from_str(&text).ok());
        Ok(value.ok_or_else(|| wrong(format!("{} does not speak OpenAI's API", self.url)))?)
    }

    /// The response, unless it is an error.
    fn accepted(&self, response: Response<Body>) -> Result<Response<Body>> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text =
            response.into_body().into_with_config().limit(LONGEST).read_to_string().unwrap_or_default();
        let error: Value = serde_json::from_str(&text).unwrap_or_default();
        let told = error["error"]["message"].as_str();
        Err(match (status.as_u16(), told) {
            (401, _) if self.key.is_none() => wrong("has a server that needs a key; give --api-key"),
            (401, _) => wrong("has a server that does not accept this key"),
            (429, _) => Error::Execution("the server is busy; try again later".to_owned()),
            (404, None) => wrong(format!("{} does not speak OpenAI's API", self.url)),
            (400..500, Some(why)) => wrong(format!("the server refuses this: {why}")),
            (code, Some(why)) => Error::Execution(format!("the server has failed ({code}): {why}")),
            (code, None) => Error::Execution(format!("the server has failed ({code})")),
        }
        .into())
    }

    fn unreachable(&self, error: &ureq::Error) -> Error {
        let why = match error {
            ureq::Error::HostNotFound => "its name is not known".to_owned(),
            ureq::Error::ConnectionFailed => "it does not accept connections".to_owned(),
            ureq::Error::Timeout(_) => "it does not answer".to_owned(),
            ureq::Error::Io(error) => error.to_string(),
            other => other.to_string(),
        };
        wrong(format!("{} cannot be reached: {why}; is `kiln serve` running?", self.url))
    }
}

/// The changes of a line of a stream.
fn deltas(line: &str) -> Result<Vec<Result<Delta>>, Error> {
    let Some(data) = line.strip_prefix("data:").map(str::trim).filter(|data| *data != "[DONE]") else {
        return Ok(Vec::new());
    };
    let event: Value = serde_json::from_str(data)
        .map_err(|error| Error::Execution(format!("the server sent an event that is no JSON: {error}")))?;
    if let Some(why) = event["error"]["message"].as_str() {
        return Err(Error::Execution(format!("the answer broke off: {why}")));
    }
    let choice = &event["choices"][0];
    let delta = &choice["delta"];
    let mut all = Vec::new();
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    all.extend(
        ["reasoning_content", "reasoning"]
            .iter()
            .find_map(|name| text(&delta[name]))
            .map(|_| Delta::Reasoning),
    );
    all.extend(text(&delta["content"]).or_else(|| text(&choice["text"])).map(Delta::Text));
    all.extend(text(&choice["finish_reason"]).map(Delta::End));
    let usage = &event["usage"];
    if usage.is_object() {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        all.push(Delta::Usage(Usage {
            prompt: count(&usage["prompt_tokens"]),
            cached: count(&usage["prompt_tokens_details"]["cached_tokens"]),
            generated: count(&usage["completion_tokens"]),
        }));
    }
    Ok(all.into_iter().map(Ok).collect())
}
