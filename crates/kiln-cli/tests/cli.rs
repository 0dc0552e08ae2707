//! The binary, as a user runs it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

fn kiln(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kiln")).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs on the CPU, so that what is printed is the same everywhere.
fn run(args: &[&str]) -> Output {
    kiln(&[&["run", "--device", "cpu", "--greedy", "-n", "8"], args].concat())
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    path.to_str().unwrap().to_owned()
}

#[track_caller]
fn refused(output: &Output, expected: &str) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains(expected), "{message}");
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn the_demo_continues_a_prompt() {
    let output = run(&["ROMEO:"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.starts_with("ROMEO:") && text.len() > "ROMEO:\n".len(), "{text}");
    assert_eq!(stderr(&output), "", "nothing is said that was not asked for");
    assert_eq!(stdout(&run(&["ROMEO:"])), text, "greedy repeats itself");
}

#[test]
fn the_prompt_may_come_from_a_file_or_standard_input() {
    let want = stdout(&run(&["ROMEO:"]));
    let file = std::env::temp_dir().join(format!("kiln-prompt-{}", std::process::id()));
    std::fs::write(&file, "ROMEO:").unwrap();
    assert_eq!(stdout(&run(&["--file", file.to_str().unwrap()])), want);
    std::fs::remove_file(&file).unwrap();

    let mut child = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["run", "--device", "cpu", "--greedy", "-n", "8", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"ROMEO:").unwrap();
    assert_eq!(stdout(&child.wait_with_output().unwrap()), want);
}

#[test]
fn no_cache_and_chunks_change_no_token() {
    let want = stdout(&run(&["The Constitution of the United States"]));
    for args in
        [["--cache", "none"], ["--prefill-chunk", "3"], ["--kernels", "definition"], ["--threads", "1"]]
    {
        let output = run(&[&args[..], &["The Constitution of the United States"]].concat());
        assert_eq!(stdout(&output), want, "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn json_is_one_object() {
    let output = run(&["--json", "ROMEO:"]);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["prompt"], "ROMEO:");
    assert_eq!(report["generated_tokens"], 8);
    assert_eq!(report["stop_reason"], "length");
    assert_eq!(report["device"], "cpu");
    let text = report["text"].as_str().unwrap();
    assert!(stdout(&run(&["ROMEO:"])).contains(text));
}

#[test]
fn verbose_says_where_the_time_went() {
    let message = stderr(&run(&["--verbose", "ROMEO:"]));
    for word in ["load", "prefill", "decode", "tokens/s", "cache", "kernels", "rms_norm"] {
        assert!(message.contains(word), "{word}: {message}");
    }
}

#[test]
fn a_seed_repeats_and_a_stop_string_stops() {
    let sample = |seed: &str| {
        stdout(&kiln(&[
            "run",
            "--device",
            "cpu",
            "-n",
            "20",
            "--seed",
            seed,
            "--temperature",
            "1.2",
            "ROMEO:",
        ]))
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
    let text = stdout(&run(&["--no-echo", "ROMEO:"]));
    let stop: String = text.trim().chars().skip(2).take(3).collect();
    let output = run(&["--json", "--stop", &stop, "ROMEO:"]);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["stop_reason"], "stop_string");
    assert_eq!(report["text"], text[..text.find(&stop).unwrap()]);
}

#[test]
fn bad_input_is_one_sentence_and_exit_code_2() {
    refused(&run(&[""]), "prompt is empty");
    refused(&run(&[]), "prompt is empty");
    refused(&run(&["--model", "/nowhere", "x"]), "/nowhere");
    refused(&run(&["--cache", "elastic", "x"]), "known: dynamic, fixed, sliding, sink, none");
    refused(&run(&["--cache", "sink:window=4,sinks=4", "x"]), "leave no room");
    refused(&run(&["--cache", "sink:window=0", "x"]), "at least 1");
    refused(&run(&["--cache", "sink:windows=9", "x"]), "known: window, sinks, compat");
    refused(&run(&["--cache", "sink:window=many", "x"]), "not a number of tokens");
    refused(&run(&["--cache", "sink:window", "x"]), "key=value");
    refused(&run(&["--cache", "dynamic:len=4", "x"]), "unknown cache setting");
    refused(&run(&["--cache", "fixed:len=3", "ROMEO: what light is this"]), "room for 3 tokens");
    refused(&run(&["--cache", "fixed:len=0", "x"]), "at least 1");
    refused(&run(&["--cache", "sliding", "x"]), "have a window");
    refused(&run(&["--cache-windowed", "elastic", "x"]), "known: dynamic, fixed");
    refused(&run(&["--cache", "dynamic", "--compat", "4.47", "x"]), "goes with --cache sink");
    refused(&run(&["--cache", "sink", "--compat", "3.0", "x"]), "known: 4.47");
    refused(&run(&["--compile", "--no-compile", "x"]), "cannot be used with");
    refused(&kiln(&["run", "--device", "abacus", "x"]), "known: auto, cpu");
    refused(&run(&["--dtype", "f12", "x"]), "known: auto, f32");
    refused(&run(&["--kernels", "magic", "x"]), "known: auto");
    refused(&run(&["--kernels", "wgsl", "x"]), "wgpu");
    refused(&run(&["--file", "/nowhere", "x"]), "cannot be used with");
    refused(&run(&["--file", "/nowhere"]), "/nowhere");
    refused(&run(&["--prefill-chunk", "0", "x"]), "at least 1");
    refused(&run(&["--threads", "0", "x"]), "at least 1");
    refused(&kiln(&["run", "--device", "cpu", "-n", "0", "x"]), "at least 1");
    refused(&kiln(&["run", "--device", "cpu", "-n=-1", "x"]), "invalid");
    refused(&run(&["--stop", "", "x"]), "stop");
    refused(&run(&["--repetition-penalty", "0", "x"]), "repetition_penalty");
    for (flag, value) in
        [("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "1.5"), ("--min-p", "-0.1")]
    {
        let name = flag.trim_start_matches("--").replace('-', "_");
        refused(&kiln(&["run", "--device", "cpu", flag, value, "x"]), &name);
    }
    refused(&run(&[&"word ".repeat(600)]), "positions");
    refused(&run(&["--model", &fixture("transformers-5.23.0/models/llama"), "x"]), "tokenizer.json");
    refused(&run(&["--model", &fixture("transformers-5.23.0/models/mamba"), "x"]), "known: llama");
    refused(&kiln(&["bench", "--random", "1,2,3"]), "six numbers");
    refused(&kiln(&["bench", "--against", "/nowhere"]), "/nowhere");
    refused(&kiln(&["bench", "-r", "0"]), "at least 1");
    refused(&kiln(&["inspect", "/nowhere"]), "/nowhere");
    refused(&kiln(&["conformance", "/nowhere", "--device", "cpu"]), "/nowhere");
    refused(&kiln(&["run", "--device", "wgpu:99", "x"]), "wgpu:99");
    refused(&kiln(&["run", "--device", "cuda", "x"]), "cuda");
}

#[test]
fn devices_are_listed() {
    let text = stdout(&kiln(&["devices"]));
    assert!(text.contains("cpu") && text.contains("auto is"), "{text}");
    let devices: Value = serde_json::from_str(&stdout(&kiln(&["devices", "--json"]))).unwrap();
    assert_eq!(devices[0]["device"], "cpu");
}

#[test]
fn inspect_says_what_a_folder_holds() {
    let demo = format!("{}/../../assets/demo", env!("CARGO_MANIFEST_DIR"));
    let text = stdout(&kiln(&["inspect", &demo]));
    assert!(text.contains("llama") && text.contains("3.97 M") && text.contains("dynamic"), "{text}");
    let report: Value =
        serde_json::from_str(&stdout(&kiln(&["inspect", "--json", &demo, "--ctx", "100"]))).unwrap();
    assert_eq!(report["parameters"], 3_967_744);
    // 5 blocks, 2 heads of 64, keys and values, float16
    let dynamic = report["caches"].as_array().unwrap().iter().find(|c| c["cache"] == "dynamic").unwrap();
    assert_eq!((&dynamic["bytes_per_token"], &dynamic["bytes"]), (&Value::from(2560), &Value::from(256_000)));
}

#[test]
fn conformance_reports_and_fails_as_it_should() {
    let report = std::env::temp_dir().join(format!("kiln-conformance-{}.json", std::process::id()));
    let folder = fixture("transformers-5.23.0");
    let args = ["conformance", &folder, "--device", "cpu", "--filter", "llama/greedy", "--json"];
    let output = kiln(&[&args[..], &[report.to_str().unwrap()]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.contains(" passed, 0 failed, ") && last.ends_with(" skipped"), "{last}");
    assert!(
        text.contains("llama/greedy_dynamic") && text.contains("skipped: the argument `cache_config`"),
        "{text}"
    );
    let json: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    std::fs::remove_file(&report).unwrap();
    assert_eq!(json["cases"].as_array().unwrap().len(), text.lines().count() - 1);
}

#[test]
fn bench_prints_what_it_is_asked_to() {
    let small = ["bench", "--device", "cpu", "-p", "8", "-n", "4", "-r", "1", "--random", "1,32,2,1,48,97"];
    let table = stdout(&kiln(&small));
    assert!(table.contains("| pp8") && table.contains("| tg4") && table.contains('%'), "{table}");
    let csv = stdout(&kiln(&[&small[..], &["-o", "csv"]].concat()));
    assert_eq!(csv.lines().count(), 3, "{csv}");
    let json: Value = serde_json::from_str(&stdout(&kiln(&[&small[..], &["-o", "json"]].concat()))).unwrap();
    assert_eq!(json["results"][0]["test"], "pp8");

    let peer = std::env::temp_dir().join(format!("kiln-peer-{}.json", std::process::id()));
    std::fs::write(&peer, r#"{"tool": "other", "results": [{"test": "pp8", "tokens_per_second": 2.0}]}"#)
        .unwrap();
    let table = stdout(&kiln(&[&small[..], &["--against", peer.to_str().unwrap()]].concat()));
    std::fs::remove_file(&peer).unwrap();
    assert!(table.contains("ratio") && table.contains("2.00"), "{table}");

    let table =
        stdout(&kiln(&[&small[..], &["-c", "dynamic", "-c", "sink:window=8", "--depth", "0,6"]].concat()));
    assert!(table.contains("tg4@6") && table.contains("times dynamic") && table.contains("p99"), "{table}");
}

#[test]
fn every_cache_runs() {
    let text = |cache: &str| stdout(&run(&["--cache", cache, "--greedy", "--verbose", "ROMEO:"]));
    let dynamic = text("dynamic");
    for cache in ["fixed", "static", "fixed:len=64", "hybrid", "sink", "sink:window=64,sinks=2", "none"] {
        assert_eq!(text(cache), dynamic, "{cache}");
    }
    // More tokens than positions, in a window.
    let sink =
        ["run", "--device", "cpu", "--cache", "sink:window=32", "-n", "600", "--greedy", "--json", "ROMEO:"];
    let report: Value = serde_json::from_str(&stdout(&kiln(&sink))).unwrap();
    assert_eq!((&report["generated_tokens"], &report["cache"]), (&600.into(), &"sink:window=32".into()));
    let help = stdout(&kiln(&["run", "--help"]));
    for word in ["dynamic", "fixed", "sliding", "sinks: first tokens", "--cache-windowed", "--no-compile"] {
        assert!(help.contains(word), "{word} is missing in {help}");
    }
}

#[test]
fn completions_are_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&kiln(&["completions", shell])).contains("kiln"), "{shell}");
    }
}
