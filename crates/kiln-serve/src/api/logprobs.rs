//! The log-probabilities of tokens, in OpenAI's two forms.

use kiln::{GeneratedToken, Logprobs, Model, TokenId};
use serde_json::{Map, Value, json};

/// The number that OpenAI's API has for a probability of 0: JSON has no infinity.
const IMPOSSIBLE: f32 = -9999.0;

fn number(log_prob: f32) -> Value {
    json!(if log_prob.is_finite() { log_prob } else { IMPOSSIBLE })
}

fn bytes(model: &Model, token: TokenId) -> Vec<u8> {
    model.token_bytes(token).ok().flatten().unwrap_or_default()
}

/// The text of a token. One that is no whole characters is spelled in bytes, as OpenAI's API does.
fn text(model: &Model, token: TokenId) -> String {
    String::from_utf8(bytes(model, token)).unwrap_or_else(|error| {
        let spelled = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", spelled.collect::<String>())
    })
}

/// A list of the tokens, as chat completions have it.
pub(super) fn of_chat(model: &Model, tokens: &[GeneratedToken]) -> Value {
    let one = |token: TokenId, log_prob: f32| {
        json!({
            "token": text(model, token),
            "bytes": bytes(model, token),
            "logprob": number(log_prob),
        })
    };
    let entry = |(id, Logprobs { chosen, top, .. }): (TokenId, &Logprobs)| {
        let mut entry = one(id, *chosen);
        entry["top_logprobs"] = top.iter().map(|&(id, log_prob)| one(id, log_prob)).collect();
        entry
    };
    Value::Array(known(tokens).map(entry).collect())
}

/// Lists of the properties of the tokens, as completions have it. `offset`: number of characters before them,
/// to which theirs are added.
pub(super) fn of_text(model: &Model, tokens: &[GeneratedToken], offset: &mut usize) -> Value {
    let (mut texts, mut log_probs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for GeneratedToken { id, logprobs, .. } in tokens {
        let own = text(model, *id);
        offsets.push(*offset);
        *offset += own.chars().count();
        texts.push(own);
        // The first token of a prompt follows nothing.
        let Some(Logprobs { chosen, top, .. }) = logprobs else {
            log_probs.push(Value::Null);
            tops.push(Value::Null);
            continue;
        };
        log_probs.push(number(*chosen));
        let pairs = top.iter().map(|&(id, log_prob)| (text(model, id), number(log_prob)));
        tops.push(Value::Object(pairs.collect::<Map<_, _>>()));
    }
    json!({ "tokens": texts, "token_logprobs": log_probs, "top_logprobs": tops, "text_offset": offsets })
}

fn known(tokens: &[GeneratedToken]) -> impl Iterator<Item = (TokenId, &Logprobs)> {
    tokens.iter().filter_map(|token| Some((token.id, token.logprobs.as_ref()?)))
}
