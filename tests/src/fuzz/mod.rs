//! Inputs that nobody wrote, for everything that strangers' files and users' words reach: none may end in a panic, a crash,
//! a hang or a lack of memory.
//!
//! Every target runs the files in `tests/fuzz/corpus/TARGET`, one for each defect that is known, and then its seeds with
//! mutations, for `KILN_FUZZ_SECONDS` (3) from the seed `KILN_FUZZ_SEED` on; `KILN_FUZZ_TARGETS=a,b` runs only some. What
//! failed is saved in `target/tmp/fuzz/TARGET`, and belongs into the corpus once it is understood.
//!
//! Why no `cargo fuzz`: it would build burn and all other dependencies a second time, with instrumentation, on every
//! machine. What is fuzzed here is mostly JSON, in JSON, in safetensors, with checksums; mutations
//! that know these formats get behind the parsers, where bytes alone with the help of coverage hardly do. So this is a part
//! of the test binary as any other, at the cost of seconds.

mod binary;
mod driver;
mod mutate;
mod targets;

use std::path::{Path, PathBuf};

use mutate::Format;

/// What is fuzzed.
struct Target {
    name: &'static str,
    format: Format,
    /// Inputs that are right.
    seeds: fn() -> Vec<Vec<u8>>,
    /// Makes what all inputs need, in an empty folder that is the target's own.
    prepare: fn(&Path) -> Run,
}

/// Takes an input as far as it goes. Returns whether it was taken, and not refused.
type Run = Box<dyn FnMut(&[u8]) -> bool>;

/// Every target. A line here is all that it takes.
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

/// Writes a small file many times. One that is emptied first is written to the disk by some systems when it is closed, at
/// the cost of most inputs a second.
fn put(path: &Path, bytes: &[u8]) {
    use std::io::Write;

    let mut file = std::fs::OpenOptions::new().create(true).write(true).truncate(false).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

/// The files of the corpus of one target, in order of their names.
fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}
