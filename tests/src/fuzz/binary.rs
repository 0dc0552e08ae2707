//! Runs the fuzz corpus through the real binary.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    TARGETS, corpus,
    mutate::{Pool, Random},
    targets::{
        cache::{fingerprints, signed},
        tokenizer::of_recorded,
    },
};
use crate::support::fixtures_of;

/// Time after which the test of the corpus runs no further file. The test of command lines has a quarter of
/// it.
const ALL: Duration = Duration::from_secs(20);
/// Time limit of one command, after which it counts as hanging. The slowest command takes a second, and
/// longer on a busy machine.
const ONE: Duration = Duration::from_secs(60);

/// Returns the path of the binary next to this one; `None` if it was not built.
fn binary() -> Option<PathBuf> {
    let me = std::env::current_exe().unwrap();
    let name = format!("kiln{}", std::env::consts::EXE_SUFFIX);
    let binary = me.parent().and_then(Path::parent)?.join(name);
    binary.is_file().then_some(binary)
}

/// Creates a complete folder of the recorded model `name` in `folder`. The caller replaces one of its files
/// by a file of the corpus.
fn model(folder: &Path, name: &str) -> PathBuf {
    let to = folder.join("model");
    _ = fs::remove_dir_all(&to);
    fs::create_dir_all(&to).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixtures_of(name).join("models").join(name).join(file), to.join(file)).unwrap();
    }
    fs::write(to.join("tokenizer.json"), of_recorded().to_string()).unwrap();
    to
}

/// Runs one command with a line of input, on the CPU. Returns a description if it crashes, hangs, or prints
/// more or less than one error when it fails; `None` if it ends properly.
fn ends_badly(binary: &Path, folder: &Path, args: &[&str]) -> Option<String> {
    let [out, err] = ["out", "err"].map(|name| folder.join(name));
    fs::write(folder.join("in"), "hello\n").unwrap();
    let mut child = Command::new(binary)
        .args(args)
        .env("KILN_DEVICE", "cpu")
        .stdin(File::open(folder.join("in")).unwrap())
        .stdout(File::create(&out).unwrap())
        .stderr(Stdio::from(File::create(&err).unwrap()))
        .spawn()
        .unwrap();
    let code = code(&mut child);
    let said = String::from_utf8_lossy(&fs::read(&err).unwrap()).into_owned();
    // Messages of clap span several lines and repeat the user's words verbatim.
    let clap = said.contains("try '--help'");
    let is_error = |line: &&str| line.starts_with("error:");
    let others =
        said.lines().filter(|line| !is_error(line) && !line.trim_start().starts_with("WARN")).count();
    let wrong = [
        (!matches!(code, Some(0..=2)), "ends in another way"),
        (said.contains("panicked"), "panics"),
        (!clap && said.chars().any(|c| c.is_control() && c != '\n'), "prints control characters"),
        (
            said.lines().filter(is_error).count() != usize::from(code != Some(0)),
            "prints no error, or several",
        ),
        (code != Some(0) && others > 0 && !clap, "prints more than an error"),
    ];
    let wrong = wrong.into_iter().find_map(|(wrong, why)| wrong.then_some(why))?;
    Some(format!("kiln {args:?} {wrong}: {code:?} {said:?}"))
}

/// Returns the exit code; `None` if the process takes too long or was ended by a signal.
fn code(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < ONE {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(2));
    }
    _ = child.kill();
    _ = child.wait();
    None
}

#[test]
fn the_corpus_never_panics_the_binary() {
    let Some(binary) = binary() else { return println!("skipped: kiln was not built") };
    let folder = tempfile::tempdir().unwrap();
    let fingerprints = fingerprints();
    let begun = Instant::now();
    let (mut run, mut left, mut failed) = (0, 0, Vec::new());
    // One file of each target in turn, so that a short run covers all targets.
    let mut files: Vec<(usize, &str, PathBuf)> = Vec::new();
    for target in TARGETS {
        files.extend(corpus(target.name).into_iter().enumerate().map(|(at, path)| (at, target.name, path)));
    }
    files.sort();
    for (_, target, path) in files {
        if begun.elapsed() > ALL {
            left += 1;
            continue;
        }
        run += 1;
        let (what, bytes) = (path.display().to_string(), fs::read(&path).unwrap());
        let mut kiln = |args: &[&str]| {
            let wrong = ends_badly(&binary, folder.path(), args);
            failed.extend(wrong.map(|wrong| format!("{what}: {wrong}")));
        };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let named = |name: &str| folder.path().join(name).display().to_string();
        match target {
            "words" => {
                let words = text.trim_end();
                if words.starts_with('-') {
                    kiln(&[&["run", "-n", "1", "hello"], &words.split(' ').collect::<Vec<_>>()[..]].concat());
                } else {
                    kiln(&["run", "-n", "3", &format!("--cache={words}"), "hello"]);
                    kiln(&["run", "-n", "1", &format!("--device={words}"), "hello"]);
                }
            }
            "chat_template" => {
                fs::write(named("template.jinja"), &bytes).unwrap();
                kiln(&["chat", "-n", "1", "--template", &named("template.jinja")]);
            }
            "cache_file" => {
                model(folder.path(), "llama");
                // The fingerprint of the recorded model and a valid checksum make the binary read the
                // contents. The tokenizer here is another, but is not part of a fingerprint.
                fs::write(named("cache"), signed(&bytes, &fingerprints).unwrap_or(bytes)).unwrap();
                kiln(&["run", "-n", "2", "-m", &named("model"), "--load-cache", &named("cache")]);
            }
            // The binary does not read these formats.
            "conversation" | "audio" => {}
            _ => {
                let model = model(folder.path(), "llama");
                let file = match target {
                    "safetensors" if text.starts_with('{') => "model.safetensors.index.json",
                    "safetensors" => "model.safetensors",
                    "config" => "config.json",
                    "generation_config" => "generation_config.json",
                    _ => "tokenizer.json",
                };
                fs::write(model.join(file), &bytes).unwrap();
                kiln(&["inspect", &named("model")]);
                kiln(&["run", "-n", "2", "-m", &named("model"), "hello"]);
            }
        }
    }
    println!("{run} files through the binary, {left} left out for lack of time");
    assert!(run > 0);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Runs command lines with mutated values of random options.
#[test]
fn mutated_options_never_panic_the_binary() {
    let Some(binary) = binary() else { return println!("skipped: kiln was not built") };
    let folder = tempfile::tempdir().unwrap();
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/demo");
    let words = TARGETS.iter().find(|target| target.name == "words").unwrap();
    let pool = Pool::new(words.format, (words.seeds)());
    let mut random =
        Random(std::env::var("KILN_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1));
    let options = [
        "--cache",
        "--cache-windowed",
        "--compat",
        "--offload",
        "--on-oom",
        "--dtype",
        "--kernels",
        "--memory",
        "--threads",
        "--prefill-chunk",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--seed",
        "--stop",
        "--file",
        "--load-cache",
        "--save-cache",
        "--ctx",
        "--batch",
        "--nonsense",
    ];
    let begun = Instant::now();
    for _ in 0..30 {
        let command = ["run", "inspect"][random.below(2)];
        let mut args = vec![command.to_owned(), if command == "run" { "hello" } else { demo }.to_owned()];
        for _ in 0..1 + random.below(3) {
            let word = String::from_utf8_lossy(&pool.mutated(&mut random)).replace('\0', "");
            // Files are written only to the temporary folder.
            let option = random.pick(&options);
            let word = if option.starts_with("--save") {
                format!("{}/{}", folder.path().display(), word.len())
            } else {
                word
            };
            args.push(format!("{option}={}", word.chars().take(2000).collect::<String>()));
        }
        if command == "run" && !args.iter().any(|arg| arg.starts_with("--max")) {
            args.push("--max-new-tokens=2".to_owned());
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        assert_eq!(ends_badly(&binary, folder.path(), &args), None);
        if begun.elapsed() > ALL / 4 {
            break;
        }
    }
}
