//! GGUF files: metadata and packed tensors in one file, as llama.cpp reads them.
//!
//! Source: `docs/gguf.md` and `src/gguf.cpp` of ggml.

mod config;
mod export;
mod file;
mod metadata;
pub mod names;
mod parts;
mod pooling;
mod reader;
mod tensor;
mod tokenizer;
mod writer;

pub use config::{FACTORS, Tensors, config_json};
pub use export::{ConfigMetadata, TokenizerFiles, check_config, config_metadata, tokenizer_metadata};
pub use file::Gguf;
pub use metadata::{Array, Metadata, Value};
pub use parts::{Parts, part_names};
pub use pooling::{POOLING_CONFIG, modules, pooling_config};
pub use tensor::TensorInfo;
pub use tokenizer::{generation_config, tokenizer_config, tokenizer_json};
pub use writer::{GgufWriter, NewTensor};

use crate::Error;

/// Maximum length of an entry's key or a tensor's name, in bytes.
const LONGEST_NAME: u64 = 64 << 10;
const MOST_TENSORS: u64 = 1 << 16;

/// Default alignment of tensors, in bytes, if the metadata does not state one.
const ALIGNMENT: u64 = 32;

fn damaged(why: String) -> Error {
    Error::Damaged(why)
}

/// Returns the alignment of tensors in bytes, a power of two.
fn alignment(metadata: &Metadata) -> Result<u64, Error> {
    const KEY: &str = "general.alignment";

    match metadata.get(KEY) {
        None => Ok(ALIGNMENT),
        Some(Value::U32(alignment)) if alignment.is_power_of_two() => Ok((*alignment).into()),
        Some(_) => Err(Error::Metadata {
            key: KEY.to_owned(),
            why: "must be a power of two, as an unsigned integer of 32 bits".to_owned(),
        }),
    }
}

/// Formats a name from a file for a message: quoted, short, and without control characters, which a terminal
/// would interpret.
fn shown(name: &str) -> String {
    const LONGEST: usize = 100;

    let short: String = name.chars().take(LONGEST).collect();
    let rest = if short.len() < name.len() { ".." } else { "" };
    format!("`{}{rest}`", short.escape_debug())
}

#[cfg(test)]
mod tests;
