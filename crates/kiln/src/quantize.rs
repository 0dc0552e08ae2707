//! Writing a model as one GGUF file with packed weights.

mod tokenizer;

use std::{ops::ControlFlow, path::Path};

use kiln_core::Result;
use kiln_kernels::{
    Choice, Kernels,
    device::{self, DeviceName},
};
use kiln_models::{
    Mixture,
    checkpoint::{self, Checkpoint, Quantized},
};

use kiln_weights::gguf::Metadata;

use crate::LoadProgress;

/// Writes the model in a Hugging Face folder, or in another GGUF file, to the GGUF file `output`, which Kiln
/// and llama.cpp load. A model whose tokenizer would tokenize texts differently in the file is an error. No
/// device is used, and memory for a small part of a tensor is enough.
///
/// `on_progress` may cancel the work: then no file is left, and the result is `None`. An existing file is
/// replaced only when the new one is complete.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// # let files = tempfile::tempdir()?;
/// # let output = files.path().join("demo-q8_0.gguf");
/// use std::ops::ControlFlow;
///
/// kiln::quantize(folder, &output, kiln::Mixture::Q8_0, |_| ControlFlow::Continue(()))?;
/// let model = kiln::Model::load(&output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Setting`](crate::Error::Setting) for a mixture that GGUF files do not support.
/// [`Error::File`](crate::Error::File) for a model for which GGUF has no names, numbers that a format cannot
/// represent, and files that cannot be read or written. Errors in the model are reported before its weights
/// are read.
pub fn quantize(
    model: impl AsRef<Path>,
    output: impl AsRef<Path>,
    mixture: Mixture,
    mut on_progress: impl FnMut(LoadProgress) -> ControlFlow<()>,
) -> Result<Option<Quantized>> {
    let checkpoint = Checkpoint::open(model.as_ref())?;
    // Builds without the CPU backend cannot load a model here. Loading the file reports its errors instead.
    if cfg!(feature = "cpu") {
        let cpu = device::open(DeviceName::Cpu)?.device;
        checkpoint.check_places(&cpu, &Kernels::new(Choice::Auto, &cpu)?)?;
    }
    let described = if checkpoint.is_gguf() { Metadata::new() } else { tokenizer::metadata(&checkpoint)? };
    let (mut read, total) = (0, checkpoint.bytes());
    checkpoint::quantize(&checkpoint, output.as_ref(), mixture, &described, &mut |bytes| {
        read += bytes;
        on_progress(LoadProgress { read, total })
    })
}
