//! All tests that run a model or a kernel, on every available device.
#![allow(clippy::disallowed_methods, reason = "tests write files of their own")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod adapters;
mod architectures;
mod arithmetic;
mod assisted;
mod beams;
mod branches;
mod chat;
mod checkpoints;
mod conformance;
mod decoding;
mod driver_faults;
mod embeddings;
mod engine;
mod experts;
mod fuzz;
mod gguf;
mod invariance;
mod joining;
mod kernels;
mod launches;
mod laws;
mod models;
mod modes;
mod offload;
mod out_of_memory;
mod packed_experts;
mod packed_folders;
mod pages;
mod placement;
mod probes;
mod quantize;
mod quantized;
mod quantized_folders;
mod ragged;
mod real_models;
mod refusals;
mod requests;
mod sampling;
mod saved;
mod self_test;
mod sequence;
mod settings;
mod sources;
mod speech;
mod spellings;
mod structured;
mod support;
mod threads;
mod tokenizers;
mod watermarks;
mod whisper;
