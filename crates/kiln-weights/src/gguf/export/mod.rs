//! Conversion of a Hugging Face folder's config and tokenizer to the metadata of a GGUF file: the inverse of
//! `config` and `tokenizer`.
//!
//! Source: `conversion/*.py` and `gguf-py/gguf/vocab.py` of llama.cpp, which write the same keys.

mod architectures;
mod config;
mod gemma4;
mod hybrids;
mod mixtures;
mod rope;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use self::config::{ConfigMetadata, check_config, config_metadata};
pub use self::tokenizer::{TokenizerFiles, tokenizer_metadata};
