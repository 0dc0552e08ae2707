//! `/v1/audio/transcriptions`

use std::{fs, io::Write, net::TcpStream, path::PathBuf, time::Duration};

use kiln::{AudioReader, Model, Transcriber};
use kiln_serve::ServedModel;
use serde_json::{Value, json};

use crate::{MODEL, Reply, Running, completion, reply};

const BOUNDARY: &str = "a-boundary-of-the-form";

/// Sends a form. A field of the name `file` is the path of a recording.
fn post(server: &Running, path: &str, fields: &[(&str, &str)]) -> Reply {
    let mut body = Vec::new();
    for (name, value) in fields {
        write!(body, "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"{name}\"").unwrap();
        if *name == "file" {
            write!(body, "; filename=\"{value}\"\r\n\r\n").unwrap();
            body.extend(fs::read(value).unwrap());
        } else {
            write!(body, "\r\n\r\n{value}").unwrap();
        }
        body.extend(b"\r\n");
    }
    write!(body, "--{BOUNDARY}--\r\n").unwrap();
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: multipart/form-data; boundary={BOUNDARY}\r\n\
         content-length: {}\r\n\r\n",
        server.address,
        body.len()
    )
    .unwrap();
    stream.write_all(&body).unwrap();
    reply(stream)
}

/// The folder that `python tools/speech.py fetch DIR` makes.
fn speech() -> Option<PathBuf> {
    let folder = std::env::var_os("KILN_TEST_SPEECH").map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: set KILN_TEST_SPEECH to a folder made by `python tools/speech.py fetch DIR`");
    }
    folder
}

#[test]
fn recordings_are_transcribed_as_by_the_model_alone_beside_answers_of_another() {
    let Some(folder) = speech() else { return };
    let model = Model::builder(folder.join("whisper-tiny.en")).opened(MODEL.opened().clone()).load().unwrap();
    let wav = folder.join("speech/0930.wav");
    let transcriber = Transcriber::new(&model).unwrap();
    let segments: Vec<_> =
        transcriber.transcribe(AudioReader::open(&wav).unwrap()).unwrap().map(Result::unwrap).collect();
    let want: String = segments.iter().map(|segment| segment.text.as_str()).collect();
    let models = vec![ServedModel::loaded("demo", MODEL.clone()), ServedModel::loaded("whisper", model)];
    let server = Running::offering(models, |options| options);
    let wav = wav.to_str().unwrap();
    let long = completion("ROMEO:", 0, &json!({ "stream": true, "max_tokens": 200 }));
    let beside = server.post_raw("/v1/completions", &long);
    let ask = |path: &str, extra: &[(&str, &str)]| {
        let fields = [&[("model", "whisper"), ("file", wav)], extra].concat();
        post(&server, path, &fields)
    };
    let transcriptions = |extra: &[(&str, &str)]| ask("/v1/audio/transcriptions", extra);
    let Reply { status, body, .. } = transcriptions(&[]);
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&answer["text"], &answer["usage"]["type"]), (&json!(want.trim()), &json!("duration")));
    assert!(reply(beside).body.contains("[DONE]"));
    assert_eq!(transcriptions(&[("response_format", "text")]).body, format!("{}\n", want.trim()));
    let srt = transcriptions(&[("response_format", "srt")]).body;
    assert!(srt.starts_with("1\n00:00:00,000 --> ") && srt.contains(segments[0].text.trim()), "{srt}");
    assert!(transcriptions(&[("response_format", "vtt")]).body.starts_with("WEBVTT\n\n00:00:00.000 --> "));
    let verbose = transcriptions(&[
        ("response_format", "verbose_json"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
        ("temperature", "0"),
    ]);
    let verbose: Value = serde_json::from_str(&verbose.body).unwrap();
    assert_eq!(verbose["segments"][0]["tokens"], json!(segments[0].tokens), "{verbose}");
    assert_eq!(verbose["words"].as_array().unwrap().len(), want.split_whitespace().count(), "{verbose}");
    let streamed = transcriptions(&[("stream", "true")]).body;
    let events: Vec<Value> =
        streamed.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!((text.trim(), &events.last().unwrap()["text"]), (want.trim(), &json!(want.trim())));

    for (extra, param) in [
        (("response_format", "docx"), "response_format"),
        (("language", "klingon"), "language"),
        (("temperature", "7"), "temperature"),
        (("timestamp_granularities[]", "letter"), "timestamp_granularities"),
        (("include[]", "logprobs"), "include"),
        (("languag", "en"), "languag"),
    ] {
        let Reply { status, body, .. } = transcriptions(&[extra]);
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{extra:?}: {answer}");
    }
    // The model knows English alone.
    assert_eq!(ask("/v1/audio/translations", &[]).status, 400);
    let text = completion("a", 0, &json!({}));
    let mut of_speech = text.clone();
    of_speech["model"] = json!("whisper");
    assert_eq!(server.post("/v1/completions", &of_speech).1["error"]["param"], "model");
    let of_text = post(&server, "/v1/audio/transcriptions", &[("model", "demo"), ("file", wav)]);
    assert_eq!(of_text.status, 400, "{}", of_text.body);
    let noise = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let none = post(&server, "/v1/audio/transcriptions", &[("model", "whisper"), ("file", noise)]);
    assert_eq!(none.status, 400, "{}", none.body);
    let missing = post(&server, "/v1/audio/transcriptions", &[("model", "whisper")]);
    assert_eq!(missing.status, 400, "{}", missing.body);
    assert_eq!(server.post("/v1/completions", &text).0, 200);
}
