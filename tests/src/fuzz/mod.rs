//! Fuzzing of everything that reads untrusted files or user input: no input may cause a panic, a crash, a
//! hang or exhaustion of memory.
//!
//! Every target runs the files in `tests/fuzz/corpus/TARGET`, one for each known defect, and then mutations
//! of its seeds, for `KILN_FUZZ_SECONDS` (3), starting from the seed `KILN_FUZZ_SEED`;
//! `KILN_FUZZ_TARGETS=a,b` runs only some targets. Failing inputs are saved in `target/tmp/fuzz/TARGET`, and
//! belong in the corpus once they are understood.
//!
//! `cargo fuzz` is not used because it would build burn and all other dependencies a second time, with
//! instrumentation, on every machine. The inputs are mostly JSON, in JSON, in safetensors, with checksums.
//! Mutations that know these formats get past the parsers, which byte mutations guided by coverage hardly do.
//! Fuzzing is therefore an ordinary part of the test binary, at the cost of seconds.

mod binary;
mod driver;
mod mutate;
mod targets;

use std::path::{Path, PathBuf};

use mutate::Format;

/// A fuzz target.
struct Target {
    name: &'static str,
    format: Format,
    /// Valid inputs.
    seeds: fn() -> Vec<Vec<u8>>,
    /// Creates the shared state of all inputs, in an empty folder that belongs to the target.
    prepare: fn(&Path) -> Run,
}

/// Processes an input as far as possible. Returns whether the input was accepted.
type Run = Box<dyn FnMut(&[u8]) -> bool>;

/// All targets. A new target needs only a line here.
const TARGETS: &[Target] = &[
    targets::weights::TARGET,
    targets::gguf::TARGET,
    targets::quantized::TARGET,
    targets::config::TARGET,
    targets::generation::TARGET,
    targets::tokenizer::TARGET,
    targets::chat::TEMPLATE,
    targets::chat::CONVERSATION,
    targets::cache::TARGET,
    targets::words::TARGET,
    targets::audio::TARGET,
];

/// Overwrites a small file repeatedly. Some systems write a truncated file to the disk when it is closed,
/// which would greatly reduce the number of inputs per second.
fn put(path: &Path, bytes: &[u8]) {
    use std::io::Write;

    let mut file = std::fs::OpenOptions::new().create(true).write(true).truncate(false).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

/// Returns the corpus files of one target, sorted by name.
fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}
