//! The fields of each endpoint. None is read past in silence: it is honoured, has no effect here by its
//! nature, or is refused by name.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The treatment of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Honoured,
    /// Says something about the client, not about the answer.
    Accepted,
    /// Refused with this sentence, unless its value asks for nothing: null, false, empty, or the given one.
    Refused(&'static str, Option<&'static str>),
    /// Honoured with this value; the other is refused with this sentence. Routers send such fields.
    Only(bool, &'static str),
}
use Use::{Accepted, Honoured, Only, Refused};

const OLD_TOOLS: Use = Refused("is an old name; use `tools` and `tool_choice`", None);
const REASONING: &str = "reasoning is always told, apart from the answer";
const ONE_TEXT: Use = Refused("this server answers with text alone", None);

/// Fields that `/v1/chat/completions` and `/v1/completions` share.
pub const COMMON: &[(&str, Use)] = &[
    ("model", Honoured),
    ("stream", Honoured),
    ("stream_options", Honoured),
    ("temperature", Honoured),
    ("top_p", Honoured),
    ("top_k", Honoured),
    ("min_p", Honoured),
    ("typical_p", Honoured),
    ("seed", Honoured),
    ("stop", Honoured),
    ("max_tokens", Honoured),
    ("min_tokens", Honoured),
    ("ignore_eos", Honoured),
    ("n", Honoured),
    ("presence_penalty", Honoured),
    ("frequency_penalty", Honoured),
    ("repetition_penalty", Honoured),
    ("logit_bias", Honoured),
    ("logprobs", Honoured),
    ("cache_salt", Honoured),
    ("priority", Honoured),
    ("skip_special_tokens", Honoured),
    ("kiln", Honoured),
    ("no_stop_trim", Only(false, "stop strings are never part of the text")),
    ("return_hidden_states", Only(false, "hidden states are not returned")),
    ("user", Accepted),
];

/// Fields of `/v1/chat/completions`, beside [`COMMON`].
pub const CHAT: &[(&str, Use)] = &[
    ("messages", Honoured),
    ("max_completion_tokens", Honoured),
    ("response_format", Honoured),
    ("chat_template_kwargs", Honoured),
    ("add_generation_prompt", Honoured),
    ("continue_final_message", Honoured),
    ("documents", Honoured),
    ("separate_reasoning", Only(true, REASONING)),
    ("stream_reasoning", Only(true, REASONING)),
    ("include_reasoning", Only(true, REASONING)),
    ("metadata", Accepted),
    ("safety_identifier", Accepted),
    ("prompt_cache_key", Accepted),
    ("prompt_cache_retention", Accepted),
    ("prompt_cache_options", Accepted),
    ("moderation", Refused("nothing is moderated here; leave it out", None)),
    ("service_tier", Refused("there is one tier; leave it out", Some("\"auto\""))),
    ("store", Refused("answers are not stored; leave it out", None)),
    ("top_logprobs", Honoured),
    ("tools", Honoured),
    ("tool_choice", Honoured),
    ("parallel_tool_calls", Honoured),
    ("reasoning_effort", Honoured),
    ("thinking_token_budget", Honoured),
    ("functions", OLD_TOOLS),
    ("function_call", OLD_TOOLS),
    ("verbosity", Refused("no model here has levels of it", None)),
    ("audio", ONE_TEXT),
    ("modalities", Refused("this server answers with text alone", Some("[\"text\"]"))),
    ("prediction", Refused("predicted outputs are not used", None)),
    ("web_search_options", Refused("this server opens no address", None)),
];

/// Fields of `/v1/completions`, beside [`COMMON`].
pub const COMPLETIONS: &[(&str, Use)] = &[
    ("prompt", Honoured),
    ("echo", Honoured),
    ("best_of", Refused("the best of several texts is not chosen; use `n`", Some("1"))),
    ("suffix", Refused("texts are not filled in; leave it out", None)),
];

/// All fields of `/v1/audio/transcriptions` and `/v1/audio/translations`, beside the file.
pub const AUDIO: &[(&str, Use)] = &[
    ("model", Honoured),
    ("language", Honoured),
    ("prompt", Honoured),
    ("response_format", Honoured),
    ("temperature", Honoured),
    ("timestamp_granularities", Honoured),
    ("stream", Honoured),
    ("languages", Refused("give one `language`", None)),
    ("include", Refused("log-probabilities of speech are not told", None)),
    ("chunking_strategy", Refused("recordings are cut into windows of 30 seconds", Some("\"auto\""))),
    ("known_speaker_names", Refused("speakers are not told apart", None)),
    ("known_speaker_references", Refused("speakers are not told apart", None)),
    ("keywords", Refused("use `prompt`", None)),
];

/// All fields of `/v1/responses`.
pub const RESPONSES: &[(&str, Use)] = &[
    ("model", Honoured),
    ("input", Honoured),
    ("instructions", Honoured),
    ("previous_response_id", Honoured),
    ("store", Honoured),
    ("stream", Honoured),
    ("max_output_tokens", Honoured),
    ("temperature", Honoured),
    ("top_p", Honoured),
    ("top_logprobs", Honoured),
    ("include", Honoured),
    ("tools", Honoured),
    ("tool_choice", Honoured),
    ("parallel_tool_calls", Honoured),
    ("text", Honoured),
    ("reasoning", Honoured),
    ("metadata", Honoured),
    ("kiln", Honoured),
    ("top_k", Honoured),
    ("min_p", Honoured),
    ("typical_p", Honoured),
    ("seed", Honoured),
    ("stop", Honoured),
    ("ignore_eos", Honoured),
    ("presence_penalty", Honoured),
    ("frequency_penalty", Honoured),
    ("repetition_penalty", Honoured),
    ("logit_bias", Honoured),
    ("cache_salt", Honoured),
    ("priority", Honoured),
    ("stream_options", Accepted),
    ("user", Accepted),
    ("safety_identifier", Accepted),
    ("prompt_cache_key", Accepted),
    ("prompt_cache_retention", Accepted),
    ("prompt_cache_options", Accepted),
    ("service_tier", Refused("there is one tier; leave it out", Some("\"auto\""))),
    ("truncation", Refused("an input that is too long is refused, and not cut", Some("\"disabled\""))),
    ("background", Refused("answers are given at once", None)),
    ("background_options", Refused("answers are given at once", None)),
    ("conversation", Refused("use `previous_response_id`", None)),
    ("prompt", Refused("there are no stored prompts; use `input`", None)),
    ("max_tool_calls", Refused("the client calls the tools", None)),
    ("context_management", Refused("inputs are not edited", None)),
    ("moderation", Refused("nothing is moderated here; leave it out", None)),
    ("access_programs", Refused("there are no such programs here", None)),
    ("image", Refused("no pictures are made here", None)),
];

/// All fields of `/v1/messages` and `/v1/messages/count_tokens`.
pub const MESSAGES: &[(&str, Use)] = &[
    ("model", Honoured),
    ("messages", Honoured),
    ("max_tokens", Honoured),
    ("system", Honoured),
    ("stop_sequences", Honoured),
    ("stream", Honoured),
    ("temperature", Honoured),
    ("top_p", Honoured),
    ("top_k", Honoured),
    ("tools", Honoured),
    ("tool_choice", Honoured),
    ("thinking", Honoured),
    ("output_config", Honoured),
    ("kiln", Honoured),
    ("metadata", Accepted),
    ("cache_control", Accepted),
    ("inference_geo", Accepted),
    ("user_profile_id", Accepted),
    ("workspace_id", Accepted),
    ("service_tier", Accepted),
    ("speed", Refused("there is one speed; leave it out", Some("\"standard\""))),
    ("container", Refused("there are no containers here", None)),
    ("thread", Refused("conversations are not kept here; send all messages", None)),
    ("diagnostics", Refused("there are no diagnostics; leave it out", None)),
    ("context_management", Refused("messages are not edited; leave it out", None)),
    ("mcp_servers", Refused("this server opens no address", None)),
];

/// Fields that ollama's `/api/chat` and `/api/generate` share.
pub const OLLAMA: &[(&str, Use)] = &[
    ("model", Honoured),
    ("stream", Honoured),
    ("options", Honoured),
    ("format", Honoured),
    ("keep_alive", Honoured),
    ("think", Honoured),
    ("logprobs", Honoured),
    ("top_logprobs", Honoured),
    ("kiln", Honoured),
    ("truncate", Only(false, "a prompt that is too long is refused, and not cut")),
    ("shift", Only(false, "an answer ends where the model's positions do")),
];

/// Fields of `/api/chat`, beside [`OLLAMA`].
pub const OLLAMA_CHAT: &[(&str, Use)] = &[("messages", Honoured), ("tools", Honoured)];

const PICTURES: Use = Refused("no pictures are made here", None);

/// Fields of `/api/generate`, beside [`OLLAMA`].
pub const OLLAMA_GENERATE: &[(&str, Use)] = &[
    ("prompt", Honoured),
    ("system", Honoured),
    ("raw", Honoured),
    ("suffix", Refused("texts are not filled in; leave it out", None)),
    ("template", Refused("the template is chosen when the server starts (`--template`)", None)),
    ("context", Refused("give the conversation to `/api/chat` instead", None)),
    ("images", Refused("only text is read", None)),
    ("width", PICTURES),
    ("height", PICTURES),
    ("steps", PICTURES),
];

const OF_SERVER: Use = Accepted;

/// Fields of `options`. How the server computes is chosen when it starts, and changes no answer.
pub const OLLAMA_OPTIONS: &[(&str, Use)] = &[
    ("seed", Honoured),
    ("num_predict", Honoured),
    ("num_ctx", Honoured),
    ("top_k", Honoured),
    ("top_p", Honoured),
    ("min_p", Honoured),
    ("typical_p", Honoured),
    ("repeat_penalty", Honoured),
    ("repeat_last_n", Honoured),
    ("presence_penalty", Honoured),
    ("frequency_penalty", Honoured),
    ("temperature", Honoured),
    ("stop", Honoured),
    ("tfs_z", Refused("tail-free sampling is not there; use `min_p`", Some("1.0"))),
    ("mirostat", Refused("Mirostat is not there; use `min_p`", Some("0"))),
    ("mirostat_tau", Refused("Mirostat is not there; use `min_p`", None)),
    ("mirostat_eta", Refused("Mirostat is not there; use `min_p`", None)),
    ("penalize_newline", Only(true, "penalties are for all tokens")),
    ("num_keep", OF_SERVER),
    ("num_batch", OF_SERVER),
    ("num_gpu", OF_SERVER),
    ("main_gpu", OF_SERVER),
    ("num_thread", OF_SERVER),
    ("numa", OF_SERVER),
    ("low_vram", OF_SERVER),
    ("f16_kv", OF_SERVER),
    ("use_mmap", OF_SERVER),
    ("use_mlock", OF_SERVER),
    ("vocab_only", OF_SERVER),
    ("embedding_only", OF_SERVER),
    ("logits_all", OF_SERVER),
];

/// Fields of `/api/embed`.
pub const OLLAMA_EMBED: &[(&str, Use)] = &[
    ("model", Honoured),
    ("input", Honoured),
    ("truncate", Honoured),
    ("dimensions", Honoured),
    ("keep_alive", Honoured),
    ("options", Refused("no option changes an embedding", None)),
];

/// Fields of `/api/embeddings`.
pub const OLLAMA_EMBEDDINGS: &[(&str, Use)] = &[
    ("model", Honoured),
    ("prompt", Honoured),
    ("keep_alive", Honoured),
    ("options", Refused("no option changes an embedding", None)),
];

/// Fields of `/api/show`.
pub const OLLAMA_SHOW: &[(&str, Use)] = &[("model", Honoured), ("name", Honoured), ("verbose", Accepted)];

/// All fields of `/v1/embeddings`.
pub const EMBEDDINGS: &[(&str, Use)] = &[
    ("model", Honoured),
    ("input", Honoured),
    ("encoding_format", Honoured),
    ("dimensions", Honoured),
    ("user", Accepted),
];

/// All fields of `/tokenize`.
pub const TOKENIZE: &[(&str, Use)] = &[("content", Honoured), ("add_special", Honoured), ("model", Honoured)];

/// All fields of `/detokenize`.
pub const DETOKENIZE: &[(&str, Use)] = &[("tokens", Honoured), ("model", Honoured)];

/// Checks the names of the fields of a request, and removes those that ask for nothing.
pub(crate) fn check(body: &mut Map<String, Value>, tables: &[&[(&str, Use)]]) -> Result<(), ApiError> {
    body.retain(|_, value| !value.is_null());
    let all = || tables.iter().copied().flatten();
    for (name, value) in &*body {
        match all().find(|(known, _)| known == name) {
            Some((_, Honoured | Accepted)) => {}
            Some((_, Refused(why, neutral))) => {
                let asks_for_nothing = match value {
                    Value::Bool(asks) => !asks,
                    Value::Array(list) => list.is_empty(),
                    Value::Object(map) => map.is_empty(),
                    Value::String(text) => text.is_empty(),
                    _ => false,
                };
                let text = value.to_string();
                if !asks_for_nothing && *neutral != Some(text.as_str()) {
                    return Err(ApiError::field(name, why));
                }
            }
            Some((_, Only(possible, why))) => {
                if *value != Value::Bool(*possible) {
                    return Err(ApiError::field(name, why));
                }
            }
            None => return Err(ApiError::field(name, unknown(name, all().map(|(known, _)| *known)))),
        }
    }
    body.retain(|name, _| all().any(|(known, what)| known == name && *what == Honoured));
    Ok(())
}

/// Says that there is no such field, and names one that is spelled nearly so.
fn unknown<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let likeness = |known: &str| strsim::jaro_winkler(name, known);
    match known.max_by(|a, b| likeness(a).total_cmp(&likeness(b))).filter(|known| likeness(known) > 0.8) {
        Some(near) => format!("there is no such field; did you mean `{near}`?"),
        None => "there is no such field".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]

    use serde_json::json;

    use super::{CHAT, COMMON, check};

    #[test]
    fn fields_are_honoured_or_refused_by_name() {
        let refused = |body: serde_json::Value| {
            let mut body = body.as_object().unwrap().clone();
            check(&mut body, &[CHAT, COMMON])
                .map(|()| body.len())
                .map_err(|error| (error.param.unwrap(), error.message))
        };
        assert_eq!(refused(json!({ "messages": [], "user": "me", "seed": null })), Ok(1));
        // As vllm-router and sglang-router send them.
        let routed = json!({
            "no_stop_trim": false, "separate_reasoning": true, "stream_reasoning": true, "include_reasoning": true,
            "return_hidden_states": false, "skip_special_tokens": true, "ignore_eos": false,
        });
        assert_eq!(refused(routed), Ok(2));
        assert_eq!(
            refused(json!({ "store": false, "audio": {}, "modalities": ["text"], "functions": [] })),
            Ok(0)
        );
        let (param, message) = refused(json!({ "temprature": 1 })).unwrap_err();
        assert_eq!((param.as_str(), message.contains("`temperature`")), ("temprature", true), "{message}");
        for body in [
            json!({ "include_reasoning": false }),
            json!({ "store": true }),
            json!({ "service_tier": "flex" }),
        ] {
            let name = body.as_object().unwrap().keys().next().unwrap().clone();
            assert_eq!(refused(body).unwrap_err().0, name);
        }
    }
}
