//! The binary, as a user runs it.
#![allow(clippy::disallowed_methods, reason = "tests write files of their own")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

mod hostile;
#[cfg(feature = "hub")]
mod hub;
// On Windows, system errors read differently and the program is called kiln.exe.
#[cfg(unix)]
mod snapshots;
mod transcribe;

/// The devices to test: `KILN_TEST_DEVICES`, else the CPU.
fn devices() -> Vec<String> {
    let named = std::env::var("KILN_TEST_DEVICES").unwrap_or_default();
    let named: Vec<String> = named.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    if named.is_empty() { vec!["cpu".to_owned()] } else { named }
}

fn kiln(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kiln")).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs on the CPU, so that the output is the same everywhere.
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
fn cache_chunks_kernels_and_threads_do_not_change_the_text() {
    let want = stdout(&run(&["The Constitution of the United States"]));
    for args in
        [["--cache", "none"], ["--prefill-chunk", "3"], ["--kernels", "reference"], ["--threads", "1"]]
    {
        let output = run(&[&args[..], &["The Constitution of the United States"]].concat());
        assert_eq!(stdout(&output), want, "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn json_output_is_one_object() {
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
fn verbose_reports_times_cache_and_kernels() {
    let message = stderr(&run(&["--verbose", "ROMEO:"]));
    for word in ["load", "prefill", "decode", "tokens/s", "cache", "kernels", "rms_norm"] {
        assert!(message.contains(word), "{word}: {message}");
    }
}

#[test]
fn equal_seeds_repeat_a_text_and_a_stop_string_ends_it() {
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
fn generation_settings_are_given_with_set_or_as_options() {
    let text = |args: &[&str]| stdout(&run(&[&["--no-echo", "-n", "24"], args, &["ROMEO:"]].concat()));
    let plain = text(&[]);
    assert_ne!(plain, text(&["--set", "no_repeat_ngram_size=1"]));
    assert_eq!(text(&["--no-repeat-ngram-size", "2"]), text(&["--set", "no_repeat_ngram_size=2"]));
    assert_eq!(plain, text(&["--set", "typical_p=0.2"]), "--greedy wins");
    let drawn = kiln(&["run", "--device", "cpu", "--json", "-n", "4", "--set", "top_p=0.9", "ROMEO:"]);
    let report: Value = serde_json::from_str(&stdout(&drawn)).unwrap();
    assert!(report["seed"].is_u64(), "whoever shapes the distribution wants to draw: {report}");
    // If both are given, the option wins.
    let stopped = run(&["--json", "--stop", "\n", "--set", "stop_strings=[\"e\"]", "ROMEO:"]);
    let report: Value = serde_json::from_str(&stdout(&stopped)).unwrap();
    assert_eq!(report["stop_reason"], "stop_string", "{report}");
    let all: Vec<String> = (0..2048).map(|id| id.to_string()).collect();
    let all = format!("suppress_tokens=[{}]", all.join(","));
    refused(&run(&["--set", &all, "ROMEO:"]), "suppress_tokens: leaves no token");
}

#[test]
fn beam_search_prints_the_best_sequence_or_several() {
    let beams = ["ROMEO:", "--greedy", "--num-beams", "3"];
    let best = stdout(&run(&beams));
    let list = stdout(&run(&[&beams[..], &["--num-return-sequences", "2"]].concat()));
    let (first, rest) = list.split_once("--- 2 of 2, score -").unwrap();
    assert!(first.starts_with("--- 1 of 2, score -"), "{list}");
    assert!(first.ends_with(&best) && !rest.ends_with(&best), "{list}{best}");
    let json = stdout(&run(&[&beams[..], &["--json"]].concat()));
    let report: Value = serde_json::from_str(&json).unwrap();
    let completion = &report["completions"][0];
    assert!(completion["score"].as_f64().unwrap() < 0.0);
    assert_eq!((&completion["text"], completion["tokens"].as_array().unwrap().len()), (&report["text"], 8));
    let drawn = stdout(&kiln(&[
        "run",
        "ROMEO:",
        "-n",
        "4",
        "-t",
        "2",
        "--num-return-sequences",
        "3",
        "--device",
        "cpu",
    ]));
    assert_eq!(drawn.matches(" of 3 ---\nROMEO:").count(), 3, "{drawn}");
}

#[test]
fn a_watermark_is_detected_only_in_text_generated_with_it() {
    for config in
        [r#"{"bias": 4, "hashing_key": 77}"#, r#"{"ngram_len": 4, "keys": [5, 6, 7, 8, 9, 10, 11, 12]}"#]
    {
        let set = format!("watermarking_config={config}");
        let drawn = ["run", "--device", "cpu", "--no-echo", "-n", "160", "--temperature", "1", "--seed", "2"];
        let text = stdout(&kiln(&[&drawn[..], &["--set", &set, "ROMEO:"]].concat()));
        let other = stdout(&kiln(&[&drawn[..], &["ROMEO:"]].concat()));
        let detect = |text: &str| stdout(&kiln(&["detect", "--watermark", config, text]));
        assert!(detect(&text).contains("has this watermark"), "{}", detect(&text));
        assert!(detect(&other).contains("was not found"), "{}", detect(&other));
        let report = stdout(&kiln(&["detect", "--watermark", config, "--json", &text]));
        let report: Value = serde_json::from_str(&report).unwrap();
        assert!(report["prediction"] == true && report["p_value"].as_f64().unwrap() < 1e-4, "{report}");
        let strict = stdout(&kiln(&["detect", "--watermark", config, "--z-threshold", "1e9", &text]));
        assert!(strict.contains("was not found"), "{strict}");
    }
}

#[test]
fn a_time_limit_ends_a_text() {
    let output = run(&["--json", "--max-time", "0.000001", "ROMEO:"]);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&report["stop_reason"], &report["generated_tokens"]),
        (&json!("time"), &json!(1)),
        "{report}"
    );
}

/// Checks errors whose text depends on the machine. The others are in `snapshots`.
#[test]
fn bad_input_is_an_error_of_one_sentence_with_exit_code_2() {
    refused(&run(&[""]), "prompt is empty");
    refused(&run(&["--threads", "0", "x"]), "must be from 1 to");
    refused(&run(&[&"word ".repeat(600)]), "positions");
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
fn doctor_compares_kernels_and_times_the_device() {
    for device in devices() {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
        let output = kiln(&["doctor", "--device", &device, "--quick", "--model", demo, "--dtype", "f32"]);
        let text = stdout(&output);
        assert!(output.status.success(), "{text}{}", stderr(&output));
        if device == "cpu" {
            assert!(stderr(&output).contains("the model is not compared"), "{}", stderr(&output));
        } else {
            for line in
                ["model: blocks 0, 4 and the head in ", "- launched: ", "- 1 tokens: cosine ", "- right"]
            {
                assert!(text.contains(line), "{text}");
            }
        }
        for line in [
            "memory: ",
            "a launch: ",
            "choosing one of 128256 tokens: ",
            "give the results of their references",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
    let output = kiln(&["doctor", "--device", "cpu", "--quick", "--json"]);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert!(report["kernels"].as_array().unwrap().iter().all(|kernel| kernel["wrong"] == 0), "{report}");
    assert!(report["seconds"]["launch"].as_f64().unwrap() > 0.0, "{report}");
    refused(&kiln(&["doctor", "--device", "wgpu:99"]), "wgpu:99");
}

#[test]
fn inspect_reports_parameters_and_cache_sizes() {
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
fn inspect_reports_the_longest_text_per_cache() {
    let demo = format!("{}/../../assets/demo", env!("CARGO_MANIFEST_DIR"));
    let args = ["inspect", &demo, "--ctx", "100", "--batch", "2", "--memory", "16MiB", "--json"];
    let report: Value = serde_json::from_str(&stdout(&kiln(&args))).unwrap();
    let of = |cache: &str, dtype: &str| {
        let caches = report["caches"].as_array().unwrap();
        caches.iter().find(|c| c["cache"] == cache && c["dtype"] == dtype).unwrap().clone()
    };
    let dynamic = of("dynamic", "f16");
    // There are two rows. When offloaded, two layers of five are on the device.
    assert_eq!((&dynamic["bytes"], &dynamic["offloaded_bytes"]), (&512_000.into(), &204_800.into()));
    // 16 MiB less the weights, in tokens of 5120 bytes or of 2048 bytes, and the activations of a step.
    let longest = |key: &str| dynamic[key].as_u64().unwrap();
    assert!((1600..1727).contains(&longest("longest")), "{dynamic}");
    assert!((4000..4318).contains(&longest("longest_offloaded")), "{dynamic}");
    assert_eq!(of("none", "f16")["longest"], "any");
    assert_eq!(of("dynamic", "f32")["longest"], 51, "{report}");
    let one = stdout(&kiln(&["inspect", &demo, "--memory", "1GB", "--cache", "sink:window=8"]));
    assert!(one.contains("sink:window=8") && one.contains("any") && !one.contains("dynamic"), "{one}");
    refused(&kiln(&["inspect", &demo, "--memory", "much"]), "800MB");
}

#[test]
fn a_cache_that_does_not_fit_is_offloaded_or_is_an_error() {
    let prompt = "ROMEO: ".repeat(40);
    let ask = |args: &[&str]| {
        kiln(&[&["run", "--device", "cpu", "--greedy", "-n", "40"], args, &[&prompt]].concat())
    };
    let whole = ask(&[]);
    assert_eq!(stderr(&whole), "");
    // The weights take 7.6 MiB, the cache 1.3 MiB.
    let small = ask(&["--memory", "8.7MiB"]);
    assert_eq!(stdout(&small), stdout(&whole));
    let told = stderr(&small);
    assert!(told.contains("move to host memory") && told.lines().count() == 1, "{told}");
    refused(&ask(&["--memory", "8.7MiB", "--on-oom", "fail"]), "out of memory: no room for a cache of");
    refused(&ask(&["--memory", "8MiB"]), "use at most");
    refused(&ask(&["--memory", "7.5MiB"]), "out of memory: no room for the model's weights");
    refused(&ask(&["--on-oom", "weep"]), "offload");
    // The same command, with layers in host memory from the start.
    for args in
        [&["--offload"][..], &["--offload=layers=2"], &["--offload=auto"], &["--cache", "offloaded_static"]]
    {
        assert_eq!(stdout(&ask(args)), stdout(&whole), "{args:?}");
    }
    refused(&ask(&["--offload=some"]), "layers=N");
    // A device on which the 30th allocation fails.
    let failing = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["run", "--device", "cpu", "--greedy", "-n", "40", &prompt])
        .env("KILN_FAIL_ALLOC_AT", "30")
        .output()
        .unwrap();
    assert_eq!(stdout(&failing), stdout(&whole));
    assert!(stderr(&failing).contains("move to host memory"), "{}", stderr(&failing));
}

#[test]
fn a_failed_system_allocation_is_an_error_or_quantizes_the_cache() {
    let limited = |args: &[&str]| {
        let shell = "ulimit -v 1500000; exec \"$0\" run --device cpu --greedy \"$@\" ROMEO:";
        let kiln = env!("CARGO_BIN_EXE_kiln");
        Command::new("sh").args([&["-c", shell, kiln], args].concat()).output().unwrap()
    };
    let (few, many) = (["-n", "8"], ["-n", "8", "--memory", "100GiB", "--cache", "static:len=2000000"]);
    let whole = limited(&few);
    assert!(whole.status.success(), "{}", stderr(&whole));
    let none = limited(&many);
    refused(&none, "out of memory: no room for the cache");
    assert_eq!(stderr(&none).lines().count(), 1, "{}", stderr(&none));
    let packed = limited(&[&many[..], &["--on-oom", "quantize"]].concat());
    assert!(packed.status.success(), "{}", stderr(&packed));
    assert!(stderr(&packed).contains("packed in 4 bits"), "{}", stderr(&packed));
}

#[test]
fn conformance_reports_passed_and_skipped_cases() {
    let report = std::env::temp_dir().join(format!("kiln-conformance-{}.json", std::process::id()));
    let folder = fixture("transformers-5.23.0");
    let args = ["conformance", &folder, "--device", "cpu", "--filter", "llama/greedy", "--json"];
    let output = kiln(&[&args[..], &[report.to_str().unwrap()]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.contains(" passed, 0 failed, ") && last.contains(" skipped"), "{last}");
    assert!(
        text.contains("llama/greedy_dynamic") && text.contains("skipped: the reference itself fails here"),
        "{text}"
    );
    let json: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    std::fs::remove_file(&report).unwrap();
    assert_eq!(json["cases"].as_array().unwrap().len(), text.lines().count() - 1);
}

#[test]
fn bench_prints_the_requested_tests_and_formats() {
    const SIZES: &str =
        "hidden_size=32,num_attention_heads=2,num_key_value_heads=1,intermediate_size=48,vocab_size=97";

    let config = format!("model_type=llama,num_hidden_layers=1,{SIZES}");
    let small = ["bench", "--device", "cpu", "-p", "8", "-n", "4", "-r", "1", "--random", &config];
    let table = stdout(&kiln(&small));
    assert!(table.contains("| pp8") && table.contains("| tg4") && table.contains('%'), "{table}");
    let csv = stdout(&kiln(&[&small[..], &["-o", "csv"]].concat()));
    assert_eq!(csv.lines().count(), 3, "{csv}");
    let json: Value = serde_json::from_str(&stdout(&kiln(&[&small[..], &["-o", "json"]].concat()))).unwrap();
    assert_eq!(json["results"][0]["test"], "pp8");
    // A step with two layers copies up their contents, and down its own token.
    let config = format!("model_type=llama,num_hidden_layers=2,{SIZES}");
    let offloaded = ["-n", "6", "-p", "0", "--random", &config, "-c", "offloaded", "-o", "json"];
    let offloaded = stdout(&kiln(&[&["bench", "--device", "cpu", "-r", "1"], &offloaded[..]].concat()));
    let json: Value = serde_json::from_str(&offloaded).unwrap();
    let copied = &json["results"][0]["copied"];
    let token = 2 * 16 * 4;
    assert!(copied["up"].as_u64().unwrap() >= 2 * 6 * token, "{copied}");
    assert_eq!(copied["down"].as_u64(), Some(2 * token));

    let table = stdout(&kiln(&[&small[..], &["--temperature", "0.8"]].concat()));
    assert!(table.contains("| tg4 t=0.8"), "{table}");
    refused(&kiln(&[&small[..], &["--temperature", "-1"]].concat()), "temperature");

    let table = stdout(&kiln(&[&small[..], &["--depth", "0,300", "--snapshot"]].concat()));
    assert_eq!(table.matches("dynamic, snapshot").count(), 1, "{table}");
    refused(&kiln(&[&small[..], &["--snapshot"]].concat()), "--depth");

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
fn a_saved_cache_is_loaded_and_continued() {
    let file = std::env::temp_dir().join(format!("kiln-cache-{}.safetensors", std::process::id()));
    let path = file.to_str().unwrap();
    let at =
        |args: &[&str]| kiln(&[&["run", "--device", "cpu", "--greedy", "--json", "-n", "8"], args].concat());
    let json = |output: &Output| -> Value { serde_json::from_str(&stdout(output)).unwrap() };
    for cache in ["dynamic", "static", "sink:window=16"] {
        let first = json(&at(&["--cache", cache, "--save-cache", path, "ROMEO: what light through"]));
        let second = json(&at(&["--cache", cache, "--load-cache", path, "--save-cache", path, " And then"]));
        // The last token of the first answer, and the new message.
        assert!(second["prompt_tokens"].as_u64() < first["prompt_tokens"].as_u64(), "{second}");
        let again = json(&at(&["--cache", cache, "--load-cache", path, " so"]));
        assert!(again["generated_tokens"] == 8, "{again}");
    }
    refused(&at(&["--cache", "dynamic", "--load-cache", path, "x"]), "`sink:window=16`");
    std::fs::write(&file, "nonsense").unwrap();
    refused(&at(&["--load-cache", path, "x"]), "not a whole");
    std::fs::remove_file(&file).unwrap();
    refused(&at(&["--load-cache", path, "x"]), path);
}

#[test]
fn exact_caches_give_the_text_of_dynamic() {
    let text = |cache: &str| stdout(&run(&["--cache", cache, "--greedy", "--verbose", "ROMEO:"]));
    let dynamic = text("dynamic");
    for cache in ["fixed", "static", "static:len=64", "hybrid", "sink", "sink:window=64,sinks=2", "none"] {
        assert_eq!(text(cache), dynamic, "{cache}");
    }
    // More tokens than positions, with a sliding window.
    let sink =
        ["run", "--device", "cpu", "--cache", "sink:window=32", "-n", "600", "--greedy", "--json", "ROMEO:"];
    let report: Value = serde_json::from_str(&stdout(&kiln(&sink))).unwrap();
    assert_eq!((&report["generated_tokens"], &report["cache"]), (&600.into(), &"sink:window=32".into()));
}

#[test]
fn a_folder_is_quantized_to_a_file_that_runs() {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("demo.gguf");
    let (demo, file) = (demo.to_str().unwrap(), file.to_str().unwrap());
    let output = kiln(&["quantize", demo, "-o", file, "--quant", "f16"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("16.0") && stdout(&output).contains("in f16"), "{}", stdout(&output));
    // The demo's numbers are float16, so the file has the same numbers and the same tokenizer.
    let continued = |model: &str| stdout(&run(&["--model", model, "The Constitution of the United States"]));
    assert_eq!(continued(file), continued(demo));

    refused(&kiln(&["quantize", demo, "-o", file]), "--force to replace it");
    let output = kiln(&["quantize", file, "-o", file, "--force", "--quant", "Q8_0"]);
    assert!(output.status.success() && stdout(&output).contains("in q8_0"), "{}", stderr(&output));
    assert!(run(&["--model", file, "ROMEO:"]).status.success());
    assert_eq!(std::fs::read_dir(files.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn each_shell_has_a_completion_script() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&kiln(&["completions", shell])).contains("kiln"), "{shell}");
    }
}

#[test]
fn manual_pages_have_the_options_of_the_help() {
    let page = stdout(&kiln(&["man"]));
    assert!(page.contains(".TH kiln 1") && page.contains("kiln\\-run(1)"), "{page}");
    let page = stdout(&kiln(&["man", "run"]));
    assert!(page.contains(".TH kiln-run 1") && page.contains("\\-\\-max\\-new\\-tokens"), "{page}");
}

/// Talks to the demo model through a pipe.
fn chat(args: &[&str], lines: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args([&["chat", "--device", "cpu", "--greedy", "-n", "12"], args].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that exits early closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

/// The path of a chat template of the tests.
fn template(name: &str) -> String {
    fixture(&format!("../data/chat_templates/{name}.jinja"))
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kiln-{}-{name}", std::process::id()))
}

#[test]
fn a_chat_feeds_only_new_tokens() {
    let lines = "What news from Rome?\n\nWho told you so, and when?\n/stats\n";
    let output = chat(&[], lines);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "", "nothing is said that was not asked for");
    let text = stdout(&output);
    let (answers, stats) = text.split_once("prompt ").unwrap();
    let number = |before: &str| -> usize {
        stats.split_once(before).unwrap().0.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let (reused, fed) = (number(" reused"), number(" fed"));
    assert!(reused > 20 && fed < 30 && fed < reused, "{stats}");
    for words in ["first ", "prefill ", "decode ", "cache    dynamic, "] {
        assert!(stats.contains(words), "{words}: {stats}");
    }

    let output = chat(&["--cache", "none"], lines);
    let text = stdout(&output);
    let (same, stats) = text.split_once("prompt ").unwrap();
    assert_eq!(same, answers, "the same without a cache");
    assert!(stats.contains(" 0 reused"), "{stats}");
}

#[test]
fn a_chat_with_attention_sinks_continues_beyond_the_positions() {
    let long = "word ".repeat(200);
    let lines = format!("{long}\n/stats\n").repeat(4);
    let output = chat(&["--cache", "sink:window=128,sinks=4"], &lines);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    let last = text.lines().rfind(|line| line.starts_with("cache ")).unwrap();
    let seen: usize = last.split_once(" tokens seen").unwrap().0.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(seen > 512, "{last}");
    let fed: Vec<&str> = text.lines().filter(|line| line.starts_with("prompt ")).collect();
    assert!(fed.iter().skip(1).all(|line| !line.contains(" 0 reused")), "{fed:?}");
}

#[test]
fn a_conversation_is_saved_loaded_and_continued() {
    let (path, again) = (temporary("a.json"), temporary("b.json"));
    let (file, again_file) = (path.to_str().unwrap(), again.to_str().unwrap());
    let first = "Hail,\\\nCaesar!\n";
    let lines = format!(
        "{first}/save {file}\n/reset\n\"\"\"\nTwo\nlines\"\"\"\n/load {file}\n/save {again_file}\nWell?\n"
    );
    let template = template("chatml");
    let brief = ["--template", &template, "--system", "Be brief."];
    let output = chat(&brief, &lines);
    assert!(output.status.success(), "{}", stderr(&output));
    let read = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
    let saved: Value = serde_json::from_str(&read(&path)).unwrap();
    assert_eq!(read(&path), read(&again));
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(&again).unwrap();
    let messages = saved["messages"].as_array().unwrap();
    assert_eq!(messages[0], serde_json::json!({"role": "system", "content": "Be brief."}));
    assert_eq!(messages[1], serde_json::json!({"role": "user", "content": "Hail,\nCaesar!"}));
    assert_eq!((messages.len(), &messages[2]["role"]), (3, &"assistant".into()));
    let answer = messages[2]["content"].as_str().unwrap();

    let text = stdout(&output);
    assert!(text.starts_with(&format!("{answer}\n")), "{text}");
    // The messages in between are forgotten.
    let want = stdout(&chat(&brief, &format!("{first}Well?\n")));
    assert!(text.ends_with(want.strip_prefix(&format!("{answer}\n")).unwrap()), "{text}\n{want}");
}

#[test]
fn chat_commands_are_answered() {
    let output = chat(
        &["--template", &template("chatml")],
        "/help\n/system\n/system Speak verse.\n/system\n/cache\n/stats\n/exit\nnever read\n",
    );
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for words in [
        "/load FILE",
        "no system message\n",
        "Speak verse.\n",
        "cache    dynamic, 0 of 512 positions",
        "nothing was answered",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn impossible_chats_are_errors_of_one_sentence_with_exit_code_2() {
    refused(&chat(&[], &"word ".repeat(600)), "512 positions");

    let file = temporary("template.jinja");
    let with = |source: &str| {
        std::fs::write(&file, source).unwrap();
        chat(&["--template", file.to_str().unwrap()], "hello\n")
    };
    refused(&with("{% for"), "the chat template cannot be used");
    refused(&with("{{ raise_exception('no, thanks') }}"), "no, thanks");
    // More steps than are allowed, or on a busy machine more seconds.
    refused(
        &with("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"),
        "it takes more than",
    );
    let output = with("{{ messages[-1].content }}");
    assert!(output.status.success(), "{}", stderr(&output));
    std::fs::write(&file, "[]").unwrap();
    refused(&chat(&[], &format!("/load {}\n", file.display())), "is no conversation");
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_model_without_a_template_uses_chatml_and_reports_it() {
    let folder = temporary("plain");
    std::fs::create_dir_all(&folder).unwrap();
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo.join(file), folder.join(file)).unwrap();
    }
    let output = chat(&["--model", folder.to_str().unwrap()], "hello\n/stats\n");
    refused(&chat(&["--model", folder.to_str().unwrap(), "--template", "x"], ""), "no such file");
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("ChatML"), "{}", stderr(&output));
    assert!(stdout(&output).contains("reused"));
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_or_an_idle_program() {
    use std::io::{BufRead, BufReader, Read};

    let mut child = Command::new(env!("CARGO_BIN_EXE_kiln"))
        // Without a cache an answer takes long enough to be stopped.
        .args(["chat", "--device", "cpu", "--greedy", "--cache", "none", "-n", "450", "--stop", "never said"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    input.write_all(b"Speak.\n").unwrap();
    let mut first = [0];
    out.read_exact(&mut first).unwrap();
    let interrupt = || {
        let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
    };
    interrupt();
    input.write_all(b"/stats\n").unwrap();
    let line = out.by_ref().lines().map(Result::unwrap).find(|line| line.starts_with("decode ")).unwrap();
    let decoded: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(decoded < 400, "{line}");
    // If no answer is being generated, Ctrl-C ends the program.
    interrupt();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130), "{status}");
}

#[cfg(unix)]
#[test]
fn a_server_answers_and_ends_in_order() {
    use std::{
        io::{BufRead, BufReader, Read},
        net::TcpStream,
    };

    let mut server = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["serve", "--device", "cpu", "--port", "0", "--alias", "shakespeare"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split_once("http://").and_then(|(_, rest)| rest.split_once("/v1")).unwrap().0;
    let body =
        json!({ "model": "shakespeare", "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0 }).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json");
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "{head}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let answer: Value = serde_json::from_str(reply.split_once("\r\n\r\n").unwrap().1).unwrap();
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert_eq!(format!("ROMEO:{text}\n"), stdout(&run(&["ROMEO:"])));

    // A chat and a measurement from outside.
    let url = format!("http://{address}");
    let mut chat = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["chat", "--url", &url, "--greedy", "-n", "8"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    chat.stdin.take().unwrap().write_all(b"What news?\n/stats\n/cache\n").unwrap();
    let text = stdout(&chat.wait_with_output().unwrap());
    assert!(text.contains("prompt ") && text.contains(&format!("cache    is at {url}/v1")), "{text}");
    let bench =
        kiln(&["bench", "--serve", "--url", &url, "--clients", "1,2", "-p", "8", "-n", "4", "-o", "json"]);
    let report: Value = serde_json::from_str(&stdout(&bench)).unwrap();
    assert_eq!(
        (&report["model"], report["results"][1]["requests"].as_u64()),
        (&json!("shakespeare"), Some(8))
    );
    assert!(report["results"][1]["first"]["p99"].as_f64().unwrap() > 0.0, "{report}");

    let ended = Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap();
    assert!(ended.success());
    assert_eq!(server.wait().unwrap().code(), Some(0));
}
