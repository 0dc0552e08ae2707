//! `/v1/embeddings`

use kiln::Pooling;
use kiln_serve::ServeOptions;
use serde_json::json;

use crate::{MODELS, Running, completion, reply};

#[test]
fn embeddings_equal_those_of_the_model_also_beside_answers() {
    for model in &*MODELS {
        let server = Running::of(model, |options| ServeOptions { pooling: Some(Pooling::Mean), ..options });
        let texts = ["What news from Rome?", "To be"];
        let want = model.embed(texts).pooling(Pooling::Mean).run().unwrap();
        let long = completion("ROMEO:", 0, &json!({ "stream": true, "max_tokens": 100 }));
        let beside = server.post_raw("/v1/completions", &long);
        let (status, answer) = server.post("/v1/embeddings", &json!({ "model": "demo", "input": texts }));
        assert_eq!(status, 200, "{answer}");
        let got: Vec<Vec<f32>> =
            (0..2).map(|i| serde_json::from_value(answer["data"][i]["embedding"].clone()).unwrap()).collect();
        assert_eq!(got, want.vectors);
        assert_eq!(answer["usage"]["total_tokens"], want.tokens.iter().sum::<usize>());
        assert!(reply(beside).body.contains("[DONE]"));

        let body = json!({ "model": "demo", "input": model.encode("To be").unwrap(), "encoding_format": "base64", "dimensions": 2 });
        let (_, answer) = server.post("/v1/embeddings", &body);
        // Two float32 numbers are eight bytes.
        assert_eq!(answer["data"][0]["embedding"].as_str().map(str::len), Some(12), "{answer}");
    }
    let server = Running::new(|options| ServeOptions { pooling: Some(Pooling::Mean), ..options });
    for (body, param) in [
        (json!({ "model": "demo" }), "input"),
        (json!({ "model": "demo", "input": [] }), "input"),
        (json!({ "model": "demo", "input": "a", "dimension": 3 }), "dimension"),
        (json!({ "model": "demo", "input": "a", "encoding_format": "hex" }), "encoding_format"),
        (json!({ "model": "demo", "input": "a", "dimensions": 1_000_000 }), "dimensions"),
    ] {
        let (status, answer) = server.post("/v1/embeddings", &body);
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{body}: {answer}");
    }
}
