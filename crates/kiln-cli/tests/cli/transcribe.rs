//! `kiln transcribe`: errors that are reported before a model is loaded, and output with a real model, if
//! there is one.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use super::{fixture, kiln, refused, stderr, stdout};

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/audio").join(name);
    path.to_str().unwrap().to_owned()
}

fn whisper() -> String {
    fixture("transformers-5.23.0/models/whisper")
}

fn transcribe(args: &[&str]) -> Output {
    kiln(&[&["transcribe", "--device", "cpu"], args].concat())
}

#[test]
fn files_without_audio_and_models_without_a_tokenizer_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.mp3");
    fs::write(&text, "To be, or not to be").unwrap();
    let whisper = whisper();
    let model = ["--model", &whisper];
    refused(&transcribe(&[&model[..], &[text.to_str().unwrap()]].concat()), "text.mp3");
    refused(&transcribe(&[&model[..], &["nowhere.wav"]].concat()), "nowhere.wav");
    refused(&transcribe(&[&model[..], &[&data("no-audio.mp4")]].concat()), "no-audio.mp4");
    refused(&transcribe(&[&model[..], &[folder.path().to_str().unwrap()]].concat()), "");
    // The model has no tokenizer.
    refused(&transcribe(&[&model[..], &[&data("16k-mono-i16.wav")]].concat()), "tokenizer.json");
}

#[test]
fn text_and_speech_models_are_errors_in_commands_of_the_other() {
    let (whisper, llama) = (whisper(), fixture("transformers-5.23.0/models/llama"));
    let wav = data("16k-mono-i16.wav");
    refused(&transcribe(&["--model", &llama, &wav]), "takes text and no sound");
    refused(&kiln(&["run", "--device", "cpu", "--model", &whisper, "Hello"]), "use `kiln transcribe`");
    refused(&kiln(&["bench", "--device", "cpu", "--model", &whisper]), "use `kiln transcribe`");
}

#[test]
fn transcripts_that_would_overwrite_each_other_are_errors() {
    let (whisper, wav) = (whisper(), data("16k-mono-i16.wav"));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    refused(&transcribe(&["-m", &whisper, "-o", out, &wav, &wav]), "would be written twice");
    refused(&transcribe(&["-m", &whisper, "--num-beams", "0", &wav]), "--num-beams");
    refused(&transcribe(&["-m", &whisper, "-o", "/no/such/folder", &wav]), "is not a folder");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// The folder that `python tools/speech.py fetch DIR` makes; prints a note and returns `None` if there is
/// none.
fn speech(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("KILN_TEST_SPEECH").map(PathBuf::from);
    if folder.is_none() {
        println!(
            "{test}: skipped: set KILN_TEST_SPEECH to a folder made by `python tools/speech.py fetch DIR`"
        );
    }
    folder
}

#[test]
fn every_output_format_has_the_same_sentence() {
    let Some(folder) = speech("every_output_format_has_the_same_sentence") else { return };
    let model = folder.join("whisper-tiny.en").to_str().unwrap().to_owned();
    let wav = folder.join("speech/0930.wav").to_str().unwrap().to_owned();
    let sentence = "He might even have been made amiable himself.";
    let written = |format: &str| {
        let output = transcribe(&["-m", &model, "-f", format, &wav]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stderr(&output).contains("3.3 s of sound in"), "{}", stderr(&output));
        stdout(&output)
    };
    assert_eq!(written("text"), format!("{sentence}\n"));
    assert_eq!(written("srt"), format!("1\n00:00:00,000 --> 00:00:03,000\n{sentence}\n\n"));
    assert_eq!(written("vtt"), format!("WEBVTT\n\n00:00:00.000 --> 00:00:03.000\n{sentence}\n\n"));
    let json: Value = serde_json::from_str(&written("json")).unwrap();
    assert_eq!(json["segments"][0]["text"].as_str().unwrap().trim(), sentence);
    assert_eq!(json["segments"][0]["end"], 3.0);

    // Several files side by side, and standard input.
    let out = tempfile::tempdir().unwrap();
    let other = folder.join("speech/0880.wav").to_str().unwrap().to_owned();
    let target = out.path().to_str().unwrap();
    let output = transcribe(&["-m", &model, "-o", target, "--batch", "2", &wav, &other]);
    assert!(output.status.success() && stdout(&output).is_empty(), "{}", stderr(&output));
    assert_eq!(fs::read_to_string(out.path().join("0930.txt")).unwrap(), format!("{sentence}\n"));
    assert!(fs::read_to_string(out.path().join("0880.txt")).unwrap().starts_with("He was not"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["transcribe", "--device", "cpu", "-m", &model, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&fs::read(&wav).unwrap()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(stdout(&output), format!("{sentence}\n"), "{}", stderr(&output));
}

/// Audio in other formats, cut short, without an end, or with samples that are not numbers.
#[test]
fn unusual_recordings_are_transcribed_or_are_errors() {
    let Some(folder) = speech("unusual_recordings_are_transcribed_or_are_errors") else { return };
    let model = folder.join("whisper-tiny.en").to_str().unwrap().to_owned();
    let heard = |path: &str| {
        let output = transcribe(&["-m", &model, path]);
        assert!(output.status.success(), "{path}: {}", stderr(&output));
        stderr(&output)
    };
    // Tones without speech.
    for name in ["24k-stereo.flac", "44k-stereo.mp3", "48k-stereo.m4a", "8k-mono-u8.wav", "44k-stereo.ogg"] {
        heard(&data(name));
    }
    let scratch = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = scratch.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mp3 = fs::read(data("44k-stereo.mp3")).unwrap();
    let cut = heard(&write("cut.mp3", &mp3[..mp3.len() * 2 / 3]));
    assert!(cut.contains("cut.mp3: is cut short: 0.3 s of 0.5 s are there"), "{cut}");
    // One incomplete frame.
    let flac = fs::read(data("24k-stereo.flac")).unwrap();
    let cut = transcribe(&["-m", &model, &write("cut.flac", &flac[..flac.len() * 2 / 3])]);
    refused(&cut, "is cut short before its first sample");
    // A header that announces no samples.
    let mut wav = fs::read(data("16k-mono-i16.wav")).unwrap();
    wav.truncate(44);
    wav[4..8].copy_from_slice(&36u32.to_le_bytes());
    wav[40..44].copy_from_slice(&0u32.to_le_bytes());
    assert!(heard(&write("empty.wav", &wav)).contains("there is no sound in it"));
    let mut nan = fs::read(data("11k-mono-f32.wav")).unwrap();
    let end = nan.len();
    nan[end - 8..].copy_from_slice(&[0xff; 8]);
    refused(&transcribe(&["-m", &model, &write("nan.wav", &nan)]), "NaN");
}
