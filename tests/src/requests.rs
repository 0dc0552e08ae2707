//! Requests: every way to run one gives the same tokens, and an async one yields its thread between steps.

use std::{
    fs,
    future::Future,
    path::Path,
    pin::pin,
    task::{Context, Poll, Waker},
};

use futures_util::StreamExt;
use kiln::{
    Chat, ChatTemplate, Error, Logprobs, Model, Plan, Prompt, Request, Sequence, TokenId, expert::read_back,
};
use serde_json::{Value, json};

use crate::support::float32;

const PROMPT: &str = "The Constitution";
/// Number of tokens to generate.
const NEW: usize = 12;

/// Loads the demo model on each device.
pub(crate) fn demos() -> impl Iterator<Item = (&'static str, Model)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
    kiln_testkit::devices::opened()
        .iter()
        .map(move |(name, opened)| (name.as_str(), float32(Model::builder(&folder), opened).load().unwrap()))
}

/// Makes the request sample at a high temperature from a fixed seed: with other random numbers, the text
/// would differ.
fn drawn(request: Request<'_>) -> Request<'_> {
    request.max_new_tokens(NEW).temperature(1.5).seed(3)
}

#[test]
fn text_stream_and_steps_give_the_same_tokens() {
    for (device, model) in demos() {
        let text = drawn(model.generate(PROMPT)).text().unwrap();
        let pieces = drawn(model.generate(PROMPT)).stream().unwrap();
        assert_eq!(pieces.collect::<kiln::Result<String>>().unwrap(), text, "on {device}");
        let pieces = drawn(model.generate(PROMPT)).stream().unwrap().into_stream();
        let pieces: Vec<kiln::Result<String>> = read_back::block_on(pieces.collect());
        assert_eq!(pieces.into_iter().collect::<kiln::Result<String>>().unwrap(), text, "on {device}");

        let prompt = model.encode(PROMPT).unwrap();
        let mut steps = drawn(model.generate(prompt.clone())).steps().unwrap();
        let tokens: Vec<TokenId> = steps.by_ref().map(|step| step.unwrap().tokens[0].unwrap()).collect();
        assert_eq!(steps.tokens(0), Some(&[&prompt[..], &tokens].concat()[..]), "on {device}");
        let steps = drawn(model.generate(prompt.clone())).steps().unwrap().into_stream();
        let streamed: Vec<_> =
            read_back::block_on(steps.map(|step| step.unwrap().tokens[0].unwrap()).collect());
        assert_eq!(streamed, tokens, "on {device}");
        // A text that is decoded on its own may lack its leading space.
        assert_eq!(model.decode(&tokens).unwrap().trim_start(), text.trim_start(), "on {device}");

        // The result does not depend on where the sequence is stored.
        let mut cache = model.cache(model.plan()).unwrap();
        assert_eq!(drawn(model.generate(PROMPT)).cache(&mut cache).text().unwrap(), text, "on {device}");
        assert_eq!(cache.seq_len(), prompt.len() + NEW - 1, "on {device}");
        let mut sequence = Sequence::new(&model, model.plan()).unwrap();
        drawn(model.generate(PROMPT)).sequence(&mut sequence).prefill().unwrap();
        let pieces = drawn(model.generate(PROMPT)).sequence(&mut sequence).stream().unwrap();
        assert_eq!(pieces.reuse().fed, 1, "the last token of the prompt, on {device}");
        assert_eq!(pieces.collect::<kiln::Result<String>>().unwrap(), text, "on {device}");
    }
}

/// Counts how often the stream of an async generation is pending: at least between all chunks of the prompt,
/// and before each step.
#[test]
fn an_async_request_yields_between_chunks_and_steps() {
    for (device, model) in demos() {
        let prompt: Vec<TokenId> = (0..20).collect();
        let steps = model.generate(prompt).max_new_tokens(NEW).prefill_chunk(4).steps().unwrap();
        let mut all = pin!(steps.into_stream().collect::<Vec<_>>());
        let mut left = 0;
        while all.as_mut().poll(&mut Context::from_waker(Waker::noop())) == Poll::Pending {
            left += 1;
        }
        let (chunks, steps) = (20 / 4, NEW);
        assert!(left >= chunks - 1 + steps, "{left} times on {device}");
    }
}

/// Loads the demo model with a tokenizer that begins each text with a token BOS. The model's folder is
/// deleted when the first value is dropped.
fn demo_with_bos() -> (tempfile::TempDir, Model) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(demo.join(name), folder.path().join(name)).unwrap();
    }
    let mut tokenizer: Value =
        serde_json::from_str(&fs::read_to_string(demo.join("tokenizer.json")).unwrap()).unwrap();
    let bos = tokenizer["added_tokens"][0]["content"].clone();
    let id = tokenizer["added_tokens"][0]["id"].clone();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos.as_str().unwrap(): {"id": bos, "ids": [id], "tokens": [bos]}},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = float32(Model::builder(folder.path()), opened).load().unwrap();
    (folder, model)
}

#[test]
fn bos_is_added_once_per_text() {
    let (_folder, model) = demo_with_bos();
    let more = model.encode_more(PROMPT).unwrap().len();
    assert_eq!(model.encode(PROMPT).unwrap().len(), more + 1);
    let mut cache = model.cache(model.plan()).unwrap();
    let mut fed = |prompt: Prompt| {
        let mut steps = model.generate(prompt).max_new_tokens(1).cache(&mut cache).steps().unwrap();
        steps.try_for_each(|step| step.map(drop)).unwrap();
        steps.stats().prompt_tokens
    };
    assert_eq!([fed(PROMPT.into()), fed(PROMPT.into())], [more + 1, more]);
    let steps = model.generate(Prompt::Rendered(PROMPT.to_owned())).steps().unwrap();
    assert_eq!(steps.stats().prompt_tokens, more, "a rendered template has its special tokens");
}

#[test]
fn log_probabilities_of_a_prompt_are_those_of_the_model() {
    for (device, model) in demos() {
        let tokens = model.encode("The Constitution of the United States").unwrap();
        // What each beginning gives for the token that follows it.
        let want: Vec<Logprobs> = (1..tokens.len())
            .map(|n| {
                let request = model.generate(tokens[..n].to_vec()).max_new_tokens(1).keep_logits(true);
                let step = request.steps().unwrap().next().unwrap().unwrap();
                Logprobs::of(&step.logits.unwrap()[0], tokens[n], 3)
            })
            .collect();
        let plain = drawn(model.generate(tokens.clone())).text().unwrap();
        for (cache, chunk) in
            [("dynamic", None), ("dynamic", Some(3)), ("static", Some(4)), ("none", Some(3))]
        {
            let request = drawn(model.generate(tokens.clone())).prompt_logprobs(3).prefill_chunk(chunk);
            let mut text = request.plan(Plan::named(cache).unwrap()).stream().unwrap();
            let pieces: String = text.by_ref().map(Result::unwrap).collect();
            assert_eq!(pieces, plain, "{cache} by {chunk:?} on {device}");
            let got = text.take_prompt_tokens();
            assert_eq!(got.iter().map(|token| token.id).collect::<Vec<_>>(), tokens);
            assert_eq!(got[0].logprobs, None);
            for (got, want) in got[1..].iter().zip(&want) {
                let got = got.logprobs.as_ref().unwrap();
                // Products of a whole prompt sum in another order than those of one token.
                assert!((got.chosen - want.chosen).abs() < 1e-3, "{cache} by {chunk:?} on {device}");
                assert_eq!(got.top[0].0, want.top[0].0);
                assert_eq!(got.top.len(), 3);
            }
        }
        let beams = model.generate(tokens).num_beams(2).prompt_logprobs(0).steps();
        assert!(matches!(beams, Err(Error::Setting { name: "prompt_logprobs", .. })));
    }
}

#[test]
fn impossible_requests_are_errors() {
    let (_, model) = demos().next().unwrap();
    let two = vec![vec![1], vec![2]];
    let refused = model.generate(two).stream().map(drop).unwrap_err();
    assert!(refused.to_string().contains("`steps`"), "{refused}");
    let refused = model.generate(PROMPT).prefill().unwrap_err();
    assert!(matches!(refused, Error::Setting { name: "sequence", .. }), "{refused}");
    let refused = model.generate(PROMPT).temperature(-1.0).text().unwrap_err();
    assert!(matches!(refused, Error::Setting { name: "temperature", .. }), "{refused}");
    // Later settings win over earlier ones.
    assert!(model.generate(PROMPT).temperature(-1.0).temperature(0.0).max_new_tokens(1).text().is_ok());
}

/// A chat stores a question only together with its answer, and only if the answer was read as text.
#[test]
fn a_chat_stores_a_question_only_with_its_answer() {
    let (_, model) = demos().next().unwrap();
    let mut chat = Chat::new(&model, ChatTemplate::chatml(), model.plan()).unwrap();
    drop(chat.say("What news?").unwrap());
    assert_eq!(chat.conversation().messages.len(), 0);
    let steps = chat.say("What news?").unwrap().max_new_tokens(2).steps().unwrap();
    assert_eq!(steps.count(), 2);
    assert_eq!(chat.conversation().messages.len(), 0, "tokens are no text");
    let answer = chat.say("What news?").unwrap().max_new_tokens(4).text().unwrap();
    let messages = &chat.conversation().messages;
    assert_eq!(
        messages.iter().map(|message| message.content()).collect::<Vec<_>>(),
        [Some("What news?".to_owned()), Some(answer)]
    );
}
