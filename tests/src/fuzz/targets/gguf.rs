//! GGUF files.

use std::path::Path;

use super::{cpu, used};
use crate::{
    fuzz::{Run, Target, mutate::Format, put},
    gguf::small_files,
};

pub(in crate::fuzz) const TARGET: Target =
    Target { name: "gguf", format: Format::Bytes, seeds: small_files, prepare };

fn prepare(folder: &Path) -> Run {
    let (path, device) = (folder.join("model.gguf"), cpu());
    Box::new(move |input| {
        put(&path, input);
        used(&path, &device)
    })
}
