//! Speech to text with a real model, Whisper tiny.en, and real speech, if available.
//!
//! `KILN_TEST_SPEECH` names the folder that `python tools/speech.py fetch DIR` creates. Without it, these
//! tests report that they were skipped.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    pin::pin,
    task::{Context, Waker},
};

use futures_util::StreamExt;
use kiln::{
    Audio, AudioReader, DtypeChoice, Model, Plan, Segment, Task, TokenId, Transcriber, expert::read_back,
};
use serde_json::Value;

/// Returns the folder with `whisper-tiny.en` and `speech`; `None`, with a message, if it does not exist.
fn folder(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("KILN_TEST_SPEECH").map(PathBuf::from);
    if folder.is_none() {
        println!(
            "{test}: skipped: set KILN_TEST_SPEECH to a folder made by `python tools/speech.py fetch DIR`"
        );
    }
    folder
}

/// Loads Whisper tiny.en on every device, in float32. A software GPU takes ten seconds per window, so only
/// the first device runs more than one test: `whisper.rs` has small models for the others.
fn models(folder: &Path) -> impl Iterator<Item = (String, Model)> {
    kiln_testkit::devices::opened().iter().map(move |(device, opened)| {
        let model = Model::builder(folder.join("whisper-tiny.en")).opened(opened.clone());
        (device.to_string(), model.dtype(DtypeChoice::F32).load().unwrap())
    })
}

/// Returns the tokens from Transformers, by `FILE/timestamps` and `FILE/plain`.
fn expected() -> BTreeMap<String, Vec<TokenId>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/speech/tokens.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn segments(transcriber: &Transcriber, audio: impl Into<Audio>) -> Vec<Segment> {
    transcriber.transcribe(audio).unwrap().collect::<kiln::Result<_>>().unwrap()
}

fn tokens(segments: &[Segment]) -> Vec<TokenId> {
    segments.iter().flat_map(|segment| segment.tokens.clone()).collect()
}

fn recording(folder: &Path, name: &str) -> AudioReader {
    AudioReader::open(folder.join("speech").join(name)).unwrap()
}

#[test]
fn transcripts_have_the_tokens_of_transformers() {
    let Some(folder) = folder("transcripts_have_the_tokens_of_transformers") else { return };
    for (device, model) in models(&folder) {
        for (name, want) in expected() {
            let (file, kind) = name.split_once('/').unwrap();
            let transcriber = Transcriber::new(&model).unwrap().timestamps(kind == "timestamps");
            let got = segments(&transcriber, recording(&folder, file));
            assert_eq!(tokens(&got), want, "{name} on {device}");
        }
    }
}

#[test]
fn every_cache_gives_the_same_transcript() {
    let Some(folder) = folder("every_cache_gives_the_same_transcript") else { return };
    let want = &expected()["0920.wav/timestamps"];
    for (device, model) in models(&folder).take(1) {
        for cache in
            ["static", "none", "quantized:nbits=8", "offloaded", "dynamic + encoder=quantized:nbits=8"]
        {
            let transcriber = Transcriber::new(&model).unwrap().plan(Plan::named(cache).unwrap()).unwrap();
            let got = tokens(&segments(&transcriber, recording(&folder, "0920.wav")));
            assert_eq!(&got, want, "{cache} on {device}");
        }
    }
}

#[test]
fn batched_recordings_give_the_transcripts_of_each_alone() {
    let Some(folder) = folder("batched_recordings_give_the_transcripts_of_each_alone") else { return };
    let files = ["0880.wav", "joined_twice.wav", "0930.wav"];
    for (device, model) in models(&folder).take(1) {
        let transcriber = Transcriber::new(&model).unwrap();
        let all = files.iter().map(|name| recording(&folder, name).into()).collect();
        let mut together = vec![Vec::new(); files.len()];
        for segment in transcriber.transcribe_all(all).unwrap() {
            let (number, segment) = segment.unwrap();
            together[number].extend(segment.tokens);
        }
        for (file, got) in files.iter().zip(together) {
            assert_eq!(got, expected()[&format!("{file}/timestamps")], "{file} on {device}");
        }
    }
}

#[test]
fn words_of_a_segment_join_to_its_text_with_plausible_times() {
    let Some(folder) = folder("words_of_a_segment_join_to_its_text_with_plausible_times") else { return };
    for (device, model) in models(&folder).take(1) {
        let transcriber = Transcriber::new(&model).unwrap().word_times(true).unwrap();
        let segments = segments(&transcriber, recording(&folder, "joined_twice.wav"));
        for segment in &segments {
            let text: String = segment.words.iter().map(|word| word.text.as_str()).collect();
            assert_eq!(text, segment.text, "on {device}");
            for word in &segment.words {
                assert!(word.start <= word.end && word.end - word.start < 3.0, "{word:?} on {device}");
                // A model's timestamps and its attention differ slightly.
                assert!(
                    word.start > segment.start - 1.0 && word.end < segment.end + 1.0,
                    "{word:?} in {segment:?}"
                );
            }
            assert!(segment.words.is_sorted_by(|a, b| a.start <= b.start), "{segment:?}");
        }
        // The speaker says "Dashwood" at about one second, and the concatenated sentences start over at 24.73
        // s.
        let dashwood = |after: f64| {
            let words = segments.iter().flat_map(|segment| &segment.words);
            words.filter(|word| word.start >= after).find(|word| word.text == " Dashwood").unwrap().start
        };
        let (first, second) = (dashwood(0.0), dashwood(20.0));
        assert!((0.5..2.0).contains(&first), "{first} on {device}");
        assert!((second - first - 24.73).abs() < 0.3, "{first} and {second} on {device}");
    }
}

/// Returns sounds without speech, at 16 kHz.
fn sounds() -> Vec<(&'static str, Vec<f32>)> {
    let seconds = |n: usize, f: &dyn Fn(usize) -> f32| (0..n * 16_000).map(f).collect::<Vec<f32>>();
    let tone = |hertz: f32, i: usize| (std::f32::consts::TAU * hertz * i as f32 / 16_000.0).sin();
    let noise = |i: usize| {
        let mut x = i as u64 * 0x9E37_79B9_7F4A_7C15;
        x = (x ^ (x >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((x >> 40) as f32 / (1 << 24) as f32) * 2.0 - 1.0
    };
    vec![
        ("nothing at all", Vec::new()),
        ("a second of silence", seconds(1, &|_| 0.0)),
        ("silence", seconds(40, &|_| 0.0)),
        ("noise", seconds(12, &|i| 0.2 * noise(i))),
        ("faint noise", seconds(35, &|i| 0.001 * noise(i))),
        ("440 Hz", seconds(12, &|i| 0.3 * tone(440.0, i))),
        ("50 Hz", seconds(12, &|i| 0.3 * tone(50.0, i))),
        ("a chord", seconds(12, &|i| 0.1 * (tone(261.6, i) + tone(329.6, i) + tone(392.0, i)))),
        ("clicks", seconds(12, &|i| if i % 8000 < 20 { 0.5 } else { 0.0 })),
    ]
}

#[test]
fn recordings_without_speech_give_no_text() {
    let Some(folder) = folder("recordings_without_speech_give_no_text") else { return };
    for (device, model) in models(&folder).take(1) {
        let transcriber = Transcriber::new(&model).unwrap();
        for (name, samples) in sounds() {
            let text: Vec<String> =
                segments(&transcriber, samples).into_iter().map(|segment| segment.text).collect();
            assert!(text.is_empty(), "{name} on {device}: {text:?}");
        }
    }
}

#[test]
fn impossible_settings_and_samples_are_errors_for_an_english_model() {
    let Some(folder) = folder("impossible_settings_and_samples_are_errors_for_an_english_model") else {
        return;
    };
    let (_, model) = models(&folder).next().unwrap();
    let transcriber = || Transcriber::new(&model).unwrap();
    let language = transcriber().language("de").unwrap_err().to_string();
    assert!(language.contains("the model knows English alone"), "{language}");
    let task = transcriber().task(Task::Translate).unwrap_err().to_string();
    assert!(task.contains("the model knows English alone"), "{task}");
    let temperature = transcriber().temperatures(vec![-1.0]).unwrap_err().to_string();
    assert!(temperature.contains("not negative"), "{temperature}");
    let nan = transcriber().transcribe(vec![0.0, f32::NAN]).map(drop).unwrap_err().to_string();
    assert!(nan.contains("NaN"), "{nan}");
}

/// Creates the recorded multilingual model, whose tokens have their real names, with these files.
fn small(config: &[(&str, Value)], generation: Option<Value>) -> (tempfile::TempDir, Model) {
    let from = crate::support::fixtures("5.23.0-whisper").join("models/whisper_multilingual");
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read_to_string(from.join(name)).unwrap();
    let mut named = read("tokenizer.json");
    for (id, name) in [
        (51, "startoftranscript"),
        (52, "en"),
        (53, "de"),
        (54, "translate"),
        (55, "transcribe"),
        (56, "startofprev"),
        (58, "notimestamps"),
    ] {
        named = named.replace(&format!("<|{id}|>"), &format!("<|{name}|>"));
    }
    let mut json: Value = serde_json::from_str(&read("config.json")).unwrap();
    for (name, value) in config {
        json[name] = value.clone();
    }
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", &named);
    write("config.json", &json.to_string());
    if let Some(generation) = generation {
        write("generation_config.json", &generation.to_string());
    }
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = Model::builder(folder.path()).opened(opened.clone()).dtype(DtypeChoice::F32).load().unwrap();
    (folder, model)
}

/// Settings missing from an old folder are taken from its tokenizer and config.
#[test]
fn missing_speech_settings_are_taken_from_tokenizer_and_config() {
    let path = crate::support::fixtures("5.23.0-whisper").join("models/whisper_multilingual");
    let text = std::fs::read_to_string(path.join("generation_config.json")).unwrap();
    let mut said: Value = serde_json::from_str(&text).unwrap();
    let (suppress, begin) = (said["suppress_tokens"].clone(), said["begin_suppress_tokens"].clone());
    said.as_object_mut()
        .unwrap()
        .retain(|name, _| !["max_length", "max_initial_timestamp_index"].contains(&&**name));
    let hears = |(_folder, model): (tempfile::TempDir, Model)| {
        let samples: Vec<f32> =
            (0..48_000).map(|i| 0.4 * (i as f32 * 0.05).sin() * (i as f32 * 0.0007).cos()).collect();
        ["en", "de"].map(|language| {
            let transcriber = Transcriber::new(&model).unwrap().language(language).unwrap();
            let transcriber = transcriber.task(Task::Translate).unwrap();
            let transcriber = transcriber
                .logprob_threshold(None)
                .no_speech_threshold(None)
                .compression_ratio_threshold(None);
            tokens(&segments(&transcriber, samples.clone()))
        })
    };
    let want = hears(small(&[], Some(said)));
    assert!(want.iter().any(|tokens| !tokens.is_empty()), "{want:?}");
    // English models do not force a language.
    let forced = ("forced_decoder_ids", serde_json::json!([[1, 52], [2, 55], [3, 58]]));
    let old =
        [("suppress_tokens", suppress.clone()), ("begin_suppress_tokens", begin.clone()), forced.clone()];
    assert_eq!(hears(small(&old, None)), want);
    let mut older = serde_json::json!({
        "_from_model_config": true, "suppress_tokens": suppress, "begin_suppress_tokens": begin, "eos_token_id": 50,
    });
    assert_eq!(hears(small(std::slice::from_ref(&forced), Some(older.clone()))), want);
    older.as_object_mut().unwrap().remove("eos_token_id");
    assert_eq!(hears(small(&[forced], Some(older))), want);
    let (_folder, model) = small(&[("forced_decoder_ids", serde_json::json!([[1, 58]]))], None);
    let error = Transcriber::new(&model).unwrap().language("de").unwrap_err().to_string();
    assert!(error.contains("the model knows English alone"), "{error}");
}

#[test]
fn more_than_16_temperatures_are_an_error() {
    let (_folder, model) = small(&[("forced_decoder_ids", serde_json::json!([[1, 52]]))], None);
    let transcriber = || Transcriber::new(&model).unwrap();
    assert!(transcriber().temperatures(vec![0.5; 16]).is_ok());
    let error = transcriber().temperatures(vec![0.5; 17]).unwrap_err().to_string();
    assert!(error.contains("has 17 values") && error.contains("16 at most"), "{error}");
}

#[test]
fn an_async_transcript_yields_and_loses_nothing_when_a_poll_is_dropped() {
    let path = crate::support::fixtures("5.23.0-whisper").join("models/whisper_multilingual");
    let text = std::fs::read_to_string(path.join("generation_config.json")).unwrap();
    let (_folder, model) = small(&[], Some(serde_json::from_str(&text).unwrap()));
    let samples: Vec<f32> =
        (0..96_000).map(|i| 0.4 * (i as f32 * 0.05).sin() * (i as f32 * 0.0007).cos()).collect();
    let transcriber = Transcriber::new(&model).unwrap().language("en").unwrap();
    let transcriber =
        transcriber.logprob_threshold(None).no_speech_threshold(None).compression_ratio_threshold(None);
    let want = segments(&transcriber, samples.clone());
    assert!(!want.is_empty(), "nothing was heard");

    let stream = transcriber.transcribe(samples.clone()).unwrap().into_stream();
    let got: Vec<Segment> = read_back::block_on(stream.map(Result::unwrap).collect());
    assert_eq!(got, want);

    let mut transcript = transcriber.transcribe(samples).unwrap();
    for polls in 1..4 {
        let mut next = pin!(transcript.next_segment());
        for _ in 0..polls {
            assert!(next.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
    }
    assert_eq!(transcript.collect::<kiln::Result<Vec<_>>>().unwrap(), want);
}
