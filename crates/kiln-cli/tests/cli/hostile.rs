//! Output that cannot be written, unreadable files and invalid model folders: nothing is lost, and every
//! failure is reported.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{fixture, kiln, refused, run, stderr, stdout};

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.stdin(Stdio::null());
    command
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo")
}

/// A copy of the demo model to which `change` is applied.
fn copy_of_demo(change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    change(folder.path());
    folder
}

fn of(folder: &tempfile::TempDir, args: &[&str]) -> Output {
    run(&[&["--model", folder.path().to_str().unwrap()], args].concat())
}

/// Sets some keys in a JSON file of the folder.
fn set(folder: &Path, file: &str, values: Value) {
    let path = folder.join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in values.as_object().unwrap() {
        json[key] = value.clone();
    }
    fs::write(path, json.to_string()).unwrap();
}

#[cfg(unix)]
fn full() -> Stdio {
    fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let demo = demo();
    let run = ["run", "--device", "cpu", "-n", "3", "x"];
    let commands: [&[&str]; 8] = [
        &run,
        &[&run[..], &["--json"]].concat(),
        &["devices"],
        &["--help"],
        &["run", "-h"],
        &["completions", "bash"],
        &["inspect", demo.to_str().unwrap(), "--memory", "1GiB"],
        &["bench", "--device", "cpu", "-p", "2", "-n", "0", "-r", "1"],
    ];
    for args in commands {
        let output = command().args(args).stdout(full()).output().unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
        assert!(message.contains("cannot be written"), "{args:?}: {message}");
    }
    let output = command().args(run).arg("--verbose").stderr(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "the report was asked for");
    let mut chat = command();
    chat.args(["chat", "--device", "cpu", "-n", "3"])
        .stdin(Stdio::piped())
        .stdout(full())
        .stderr(Stdio::piped());
    let output = typed(chat.spawn().unwrap(), "hello\n");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
}

/// Adds a tensor of zeros to the weights of a folder.
fn add_zeros(folder: &Path, name: &str, len: usize) {
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    let offsets = [data.len(), data.len() + 4 * len];
    header[name] = json!({ "dtype": "F32", "shape": [len], "data_offsets": offsets });
    let header = header.to_string();
    let mut written = (header.len() as u64).to_le_bytes().to_vec();
    written.extend([header.as_bytes(), data, &vec![0; 4 * len]].concat());
    fs::write(path, written).unwrap();
}

#[test]
fn unused_tensors_are_named_once_in_a_warning() {
    let folder = copy_of_demo(|folder| add_zeros(folder, "score.weight", 2));
    let output = of(&folder, &["x"]);
    assert_eq!(stdout(&output), stdout(&run(&["x"])));
    let warning = stderr(&output);
    assert!(warning.contains("no place for them: modules beside the model, `score.weight`"), "{warning}");
    assert_eq!(warning.matches("score.weight").count(), 1, "it is said once");
}

fn typed(mut child: Child, text: &str) -> Output {
    // The process may have ended before it has read everything.
    _ = std::io::Write::write_all(&mut child.stdin.take().unwrap(), text.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn a_closed_output_pipe_is_not_an_error() {
    for args in [&["completions", "bash"][..], &["run", "--device", "cpu", "-n", "20", "--verbose", "x"]] {
        let mut child = command().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args:?}");
        assert!(!stderr(&output).contains("panicked") && !stderr(&output).contains("error"), "{args:?}");
        let mut child = command().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stderr.take());
        assert!(child.wait_with_output().unwrap().status.success(), "{args:?}");
    }
}

#[test]
fn files_that_cannot_be_saved_are_errors_before_anything_is_generated() {
    let folder = tempfile::tempdir().unwrap();
    let (nowhere, file) = (folder.path().join("none/file"), folder.path().join("file"));
    let (nowhere, file) = (nowhere.to_str().unwrap(), file.to_str().unwrap());
    let here = folder.path().to_str().unwrap();
    let fixtures = fixture("transformers-5.23.0");
    let refusals: [(&[&str], &str); 7] = [
        (&["run", "--device", "cpu", "--save-cache", nowhere, "x"], "there is no folder"),
        (&["run", "--device", "cpu", "--save-cache", here, "x"], "is a folder"),
        (&["run", "--device", "cpu", "--cache", "none", "--save-cache", file, "x"], "remembers nothing"),
        (&["probe", "--device", "cpu", "--plot", nowhere], "there is no folder"),
        (&["probe", "--device", "cpu", "--cache", "none"], "remembers nothing"),
        (&["probe", "--device", "cpu", "--weights", "--plot", nowhere], "there is no folder"),
        (&["conformance", &fixtures, "--device", "cpu", "--json", nowhere], "there is no folder"),
    ];
    for (args, expected) in refusals {
        let output = kiln(args);
        refused(&output, expected);
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    #[cfg(unix)]
    refused(&run(&["--save-cache", "/dev/null", "x"]), "not a regular file");
}

/// A limit on file sizes stands in for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_conversation_survives_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("talk.json");
    let before = r#"{"messages":[{"role":"user","content":"what was said before"}]}"#;
    fs::write(&path, before).unwrap();
    let script =
        format!("trap '' XFSZ; ulimit -f 0; exec {} chat --device cpu -n 3", env!("CARGO_BIN_EXE_kiln"));
    let mut child = Command::new("bash");
    child.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = typed(child.spawn().unwrap(), &format!("hello\n/save {}\n", path.display()));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot be written"), "{}", stderr(&output));
    assert_eq!(fs::read_to_string(&path).unwrap(), before);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn logits_that_are_not_finite_are_errors() {
    let folder = copy_of_demo(|folder| {
        let path = folder.join("model.safetensors");
        let mut file = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let json: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
        let norm = &json["model.norm.weight"];
        let at = 8 + header + norm["data_offsets"][0].as_u64().unwrap() as usize;
        let nan: &[u8] = match norm["dtype"].as_str().unwrap() {
            "F32" => &f32::NAN.to_le_bytes(),
            "F16" => &[0x00, 0x7e],
            _ => &[0xc0, 0x7f],
        };
        file[at..at + nan.len()].copy_from_slice(nan);
        fs::write(&path, file).unwrap();
    });
    let model = folder.path().to_str().unwrap();
    let devices = super::devices();
    for device in devices.iter().map(String::as_str) {
        for how in [&["--greedy"][..], &["--temperature", "0.7"], &["--greedy", "--kernels", "reference"]] {
            let output = kiln(&[&["run", "-m", model, "-d", device, "-n", "5", "x"], how].concat());
            assert_eq!(output.status.code(), Some(1), "{how:?} on {device}: {}", stdout(&output));
            assert!(stderr(&output).contains("not finite numbers"), "{}", stderr(&output));
        }
        for what in [&["--tokens", "20"][..], &["--weights=q8_0", "--text", "Cargo.toml", "--tokens", "20"]] {
            let output = kiln(&[&["probe", "-m", model, "-d", device], what].concat());
            assert_eq!(output.status.code(), Some(1), "on {device}");
            assert!(
                stderr(&output).contains("not finite numbers"),
                "the cache and the mixture are not blamed: {}",
                stderr(&output)
            );
        }
    }
}

#[test]
fn losses_of_quantized_weights_are_printed_and_plotted() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (chart, packed) = (path("loss.svg"), path("packed.gguf"));
    for device in super::devices() {
        let probe = ["probe", "-d", &device, "--weights=q8_0,q4_0", "--tokens", "40"];
        let report = kiln(&[&probe[..], &["--json", "--per-tensor", "--plot", &chart]].concat());
        assert!(report.status.success(), "{}", stderr(&report));
        let json: Value = serde_json::from_str(&stdout(&report)).unwrap();
        let weights = json["weights"].as_array().unwrap();
        let quants: Vec<_> = weights.iter().map(|one| (one["quant"].as_str(), &one["exact"])).collect();
        let (yes, no) = (&json!(true), &json!(false));
        let expected = match device.as_str() {
            "cpu" => vec![
                (None, no),
                (Some("q8_0"), yes),
                (Some("q8_0"), no),
                (Some("q4_0"), yes),
                (Some("q4_0"), no),
            ],
            _ => vec![(None, no), (Some("q8_0"), no), (Some("q4_0"), no)],
        };
        assert_eq!(quants, expected, "{device}");
        assert!(weights[1]["kl_divergence"].as_f64().unwrap() > 0.0);
        assert_eq!(json["tensors"]["quant"], "q4_0", "the smallest");
        assert_eq!(json["tensors"]["worst"].as_array().unwrap().len(), 10);
        let drawn = fs::read_to_string(&chart).unwrap();
        assert!(drawn.contains(">q4_0</text>") && !drawn.contains("--exact"), "{drawn}");

        let table = kiln(&probe);
        assert!(table.status.success(), "{}", stderr(&table));
        assert!(stdout(&table).contains("recommended:"), "{}", stdout(&table));
    }
    let quantize = kiln(&["quantize", demo().to_str().unwrap(), "-o", &packed, "--quant", "q8_0"]);
    assert!(quantize.status.success(), "{}", stderr(&quantize));
    refused(&kiln(&["probe", "-d", "cpu", "--weights", "-m", &packed]), "name the original");
}

#[test]
fn settings_that_are_not_applied_are_named_once() {
    let folder = copy_of_demo(|folder| {
        let values =
            json!({"do_sample": false, "no_repeat_ngram_size": 3, "token_healing": true, "constraints": [1]});
        set(folder, "generation_config.json", values);
    });
    let message = stderr(&of(&folder, &["x"]));
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains("constraints, token_healing"), "{message}");
    assert!(!message.contains("no_repeat_ngram_size"), "it is applied: {message}");
    assert!(!message.contains('\x1b'), "no colours where nobody sees them: {message:?}");
}

#[test]
fn a_system_message_that_the_template_leaves_out_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let without = folder.path().join("without.jinja");
    fs::write(
        &without,
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    )
    .unwrap();
    let refusing = folder.path().join("refusing.jinja");
    fs::write(&refusing, "{{ raise_exception('\x1b[31mno system \u{9b}31mrole') }}").unwrap();
    for (template, expected) in [(without, "leaves out the system message"), (refusing, "no system")] {
        let template = template.to_str().unwrap();
        let output = kiln(&["chat", "--device", "cpu", "--template", template, "--system", "Be brief."]);
        refused(&output, expected);
        assert!(!stderr(&output).contains(['\x1b', '\u{9b}']), "{:?}", stderr(&output));
    }
}

#[test]
fn a_seed_alone_does_not_enable_sampling() {
    let folder = copy_of_demo(|folder| set(folder, "generation_config.json", json!({"do_sample": false})));
    let model = folder.path().to_str().unwrap();
    let with = |args: &[&str]| {
        stdout(&kiln(&[&["run", "-m", model, "-d", "cpu", "-n", "12", "ROMEO:"], args].concat()))
    };
    assert_eq!(with(&["-s", "5"]), with(&["--greedy"]));
    assert_ne!(with(&["-s", "5", "--temperature", "1.5"]), with(&["--greedy"]));
}

#[test]
fn one_newline_at_the_end_of_a_prompt_file_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt");
    for (text, prompt) in [("ROMEO:\n", "ROMEO:"), ("ROMEO:\r\n", "ROMEO:"), ("ROMEO:\n\n", "ROMEO:\n")] {
        fs::write(&path, text).unwrap();
        let output = run(&["--json", "--file", path.to_str().unwrap()]);
        let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(report["prompt"], prompt);
    }
    refused(&run(&["--cache", "static:len=50", "-n", "100", "x"]), "room for 50 tokens");
    assert!(!stderr(&run(&["--cache", "static:len=50", "-n", "100", "x"])).contains("positions"));
}

/// The libraries below print messages of their own on machines without a display.
#[test]
fn devices_are_listed_without_messages_on_a_machine_without_a_display() {
    let output = command()
        .arg("devices")
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("WAYLAND_DISPLAY")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(stderr(&output), "");
}

#[cfg(target_os = "linux")]
#[test]
fn pipes_devices_and_folders_in_place_of_model_files_are_errors() {
    let started = Instant::now();
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        for kind in ["pipe", "endless", "folder"] {
            let folder = copy_of_demo(|folder| {
                let path = folder.join(name);
                fs::remove_file(&path).unwrap();
                match kind {
                    "pipe" => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
                    "endless" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                    _ => fs::create_dir(&path).unwrap(),
                }
            });
            refused(&of(&folder, &["x"]), "not a");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Holds with and without an OpenGL driver.
#[cfg(target_os = "linux")]
#[test]
fn opengl_does_not_stand_in_for_vulkan() {
    let without_vulkan = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.env("VK_DRIVER_FILES", "/nonexistent").env("VK_ICD_FILENAMES", "/nonexistent");
        command.args(args).stdin(Stdio::null()).output().unwrap()
    };
    for device in ["wgpu", "wgpu:0"] {
        refused(&without_vulkan(&["run", "--device", device, "x"]), "OpenGL is not used");
    }
    let listed = without_vulkan(&["devices"]);
    let text = stdout(&listed);
    assert_eq!(stderr(&listed), "");
    assert!(listed.status.success() && text.contains("OpenGL is not used"), "{text}");
    assert!(!text.contains("wgpu:0"), "{text}");
}

#[test]
fn unsupported_or_damaged_models_are_errors_that_name_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let model = |name: &str| run(&["--model", folder.path().join(name).to_str().unwrap(), "x"]);
    fs::write(folder.path().join("x.gguf"), "GGUF\0\0").unwrap();
    refused(&model("x.gguf"), "GGUF file is damaged");
    refused(&model(""), "holds GGUF files");
    refused(&model("nowhere"), "there is no such folder");
    refused(&model("nowhere.gguf"), "there is no such file");
    for (method, said) in [(json!({"quant_method": "hqq"}), "by hqq"), (json!({}), "an unknown method")] {
        let folder =
            copy_of_demo(|folder| set(folder, "config.json", json!({"quantization_config": method})));
        refused(&of(&folder, &["x"]), said);
    }
    for name in ["model.safetensors", "tokenizer.json", "config.json"] {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
        let folder = copy_of_demo(|folder| fs::write(folder.join(name), pointer).unwrap());
        refused(&of(&folder, &["x"]), "git lfs pull");
    }
    let pickled = copy_of_demo(|folder| {
        fs::rename(folder.join("model.safetensors"), folder.join("pytorch_model.bin")).unwrap();
    });
    refused(&of(&pickled, &["x"]), "pytorch_model.bin");
}

#[test]
fn impossible_requests_are_errors_within_30_seconds() {
    let started = Instant::now();
    refused(&run(&["--threads", "100000", "x"]), "threads: is 100000");
    let random = "model_type=llama,num_hidden_layers=4,hidden_size=1000000,num_attention_heads=10,\
                  intermediate_size=4000000,vocab_size=100000";
    refused(
        &kiln(&["bench", "--device", "cpu", "--random", random, "--memory", "8GiB"]),
        "the model's weights",
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt");
    fs::write(&path, "word ".repeat(3 << 20)).unwrap();
    refused(&run(&["--file", path.to_str().unwrap()]), "positions");
    fs::write(&path, "word ".repeat(4 << 20)).unwrap();
    refused(&run(&["--file", path.to_str().unwrap(), "--cache", "sink"]), "longer than the");
    refused(&run(&["--dtype", "bf16", "x"]), "use f32");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}

/// Tries each remedy that an error message names.
#[test]
fn remedies_in_out_of_memory_messages_work() {
    let prompt = "word ".repeat(300);
    let with =
        |args: &[&str]| kiln(&[&["run", "-d", "cpu", "--greedy", "--no-echo", &prompt], args].concat());
    let said = |args: &[&str], expected: &str| {
        let output = with(args);
        refused(&output, expected);
        stderr(&output)
    };
    let between = |message: &str, before: &str, behind: &str| {
        let (_, rest) = message.split_once(before).unwrap_or_else(|| panic!("{before}: {message}"));
        rest.split_once(behind).unwrap_or_else(|| panic!("{behind}: {message}")).0.replace(' ', "")
    };
    let succeeds = |args: &[&str]| {
        let output = with(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    };
    // The weights alone are too large.
    let dense = ["--memory", "10MiB", "-n", "8", "--kernels", "reference"];
    let message = said(&dense, "the model's weights");
    assert!(!message.contains("offload") && !message.contains("smaller cache"), "{message}");
    let memory = between(&message, "allow at least", "(--memory)");
    let reference = ["run", "-d", "cpu", "--kernels", "reference", "-n", "4"];
    let output = kiln(&[&reference[..], &["--memory", &memory, "x"]].concat());
    assert!(output.status.success(), "{memory}: {}", stderr(&output));
    assert!(message.contains("--dtype"), "{message}");
    let output = kiln(&[&reference[..], &["--memory", "10MiB", "--dtype", "f16", "x"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    // Weights that stay 16 bits wide have half the size already.
    let message = said(&["--memory", "5MiB", "-n", "8"], "the model's weights");
    assert!(!message.contains("--dtype"), "{message}");
    let memory = between(&message, "allow at least", "(--memory)");
    let output = kiln(&["run", "-d", "cpu", "--memory", &memory, "-n", "4", "x"]);
    assert!(output.status.success(), "{}", stderr(&output));
    // The cache is too large as well.
    for on_oom in ["offload", "fail"] {
        let message = said(&["--memory", "8.5MiB", "-n", "150", "--on-oom", on_oom], "a cache of");
        let memory = between(&message, "allow at least", "(--memory)");
        succeeds(&["--memory", &memory, "-n", "150", "--on-oom", on_oom]);
    }
    let message = said(&["--memory", "9.5MiB", "-n", "150", "--on-oom", "fail"], "a cache of");
    assert!(message.contains("--offload"), "{message}");
    succeeds(&["--memory", "9.5MiB", "-n", "150", "--on-oom", "fail", "--offload"]);
    let tokens: usize = between(&message, "use at most", "tokens").parse().unwrap();
    let output = kiln(&[
        "run",
        "-d",
        "cpu",
        "--memory",
        "9.5MiB",
        "--on-oom",
        "fail",
        "-n",
        &(tokens - 2).to_string(),
        "ROMEO:",
    ]);
    assert!(output.status.success(), "{tokens}: {}", stderr(&output));
    // The forward pass that feeds the prompt.
    succeeds(&["--memory", "12.5MiB", "-n", "150", "--on-oom", "fail"]);
    let large = ["--memory", "12.5MiB", "-n", "150", "--on-oom", "fail", "--prefill-chunk", "512"];
    let message = said(&large, "--prefill-chunk");
    let chunk = between(&message, "feed", "prompt tokens at a time");
    succeeds(&["--memory", "12.5MiB", "-n", "150", "--on-oom", "fail", "--prefill-chunk", &chunk]);
    refused(&kiln(&["run", "-d", "cpu", "-t", "1e-40", "x"]), "temperature");
}

#[test]
fn conventions_of_other_tools_work() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.kv");
    let path = path.to_str().unwrap();
    let prompt = "ROMEO: what light";
    let whole = stdout(&run(&[prompt]));
    let cached = run(&["-n", "0", "--save-cache", path, prompt]);
    assert!(cached.status.success(), "{}", stderr(&cached));
    assert_eq!(stdout(&cached), "");
    let rest = run(&["--load-cache", path]);
    assert_eq!(format!("{prompt}{}", stdout(&rest)), whole, "{}", stderr(&rest));
    // Without `--cache`, `--load-cache` uses the kind of cache that was saved.
    let quantized = ["--cache", "quantized:nbits=8", "--save-cache", path, prompt];
    assert!(run(&quantized).status.success());
    let verbose = stderr(&run(&["--load-cache", path, "--verbose"]));
    assert!(verbose.contains("quantized:nbits=8"), "{verbose}");

    assert_eq!(stdout(&run(&["-n", "3", "-n", "8", prompt])), whole, "the last one wins");
    assert!(stderr(&run(&["llama3.2:1b"])).contains("--model"));
    assert_eq!(stderr(&run(&["llamas"])), "");
    let ended = kiln(&["run", "-d", "cpu", "--greedy", "-n", "-1", "--json", "x"]);
    let report: Value = serde_json::from_str(&stdout(&ended)).unwrap();
    assert!(report["generated_tokens"].as_u64().unwrap() > 0, "{report}");
    let [short, long] = ["-h", "--help"].map(|flag| stdout(&kiln(&["run", flag])));
    assert!(short.lines().count() * 2 < long.lines().count(), "{short}");
}
