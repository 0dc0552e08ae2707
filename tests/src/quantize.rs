//! Models written as GGUF files give the results of the original models.

use std::{
    fs,
    io::Cursor,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use kiln::{Mixture, Result, expert::models::checkpoint::Quantized};
use kiln_weights::{
    Format,
    gguf::{Gguf, config_metadata},
};

use crate::{
    checkpoints::logits,
    gguf::{Case, cases, load},
    support::assert_close,
};

fn quantize(model: &Path, output: &Path, mixture: Mixture) -> Result<Option<Quantized>> {
    kiln::quantize(model, output, mixture, |_| ControlFlow::Continue(()))
}

fn case(model_type: &str) -> Case {
    cases().into_iter().find(|case| case.model_type() == model_type).unwrap()
}

/// The cases of models that can be written as GGUF files.
fn writable() -> impl Iterator<Item = Case> {
    cases().into_iter().filter(|case| config_metadata(&case.config).is_ok())
}

/// Reads a file and its header.
fn read(path: &Path) -> (Vec<u8>, Gguf) {
    let bytes = fs::read(path).unwrap();
    let header = Gguf::read(&mut Cursor::new(&bytes), bytes.len() as u64).unwrap();
    (bytes, header)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_folder_and_its_gguf_file_give_the_same_logits() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    for case in writable() {
        let name = case.model_type();
        let (folder, output) = (case.folder(Format::F32), tempfile::tempdir().unwrap());
        let path = output.path().join("model.gguf");
        let done = quantize(folder.path(), &path, Mixture::F32).unwrap().unwrap();
        let (_, header) = read(&path);
        // The names and shapes of llama.cpp's converter.
        let shapes: Vec<_> =
            header.tensors().iter().map(|one| (one.name.clone(), one.shape.clone())).collect();
        assert_eq!(shapes.into_iter().collect::<std::collections::BTreeMap<_, _>>(), case.tensors, "{name}");
        let (model, same) = (load(&path, opened).unwrap(), load(folder.path(), opened).unwrap());
        let (found, want) = (logits(&model), logits(&same));
        // The heads of delta nets have another order in files, and so have sums.
        if !name.starts_with("qwen3_5") {
            assert!(found == want, "{name}");
        }
        assert_close(&found, &want, name);
        let numbers = header.tensors().iter().map(|one| one.shape.iter().product::<usize>() as u64);
        assert_eq!(done.parameters, numbers.sum::<u64>(), "{name}");
    }
}

#[test]
fn tensors_are_packed_as_the_mixture_says() {
    // Plain, stacked and state-space matrices; none has rows of 256.
    for model_type in ["mixtral", "jamba"] {
        let (folder, output) = (case(model_type).folder(Format::F32), tempfile::tempdir().unwrap());
        let at = |name: &str| output.path().join(name);
        quantize(folder.path(), &at("f32"), Mixture::F32).unwrap();
        let (wide, header) = read(&at("f32"));
        for mixture in [Mixture::F16, Mixture::Q8_0, Mixture::Q4KM, Mixture::Iq4Nl] {
            quantize(folder.path(), &at("one"), mixture).unwrap();
            quantize(&at("f32"), &at("two"), mixture).unwrap();
            let ((bytes, packed), (same, _)) = (read(&at("one")), read(&at("two")));
            assert_eq!(
                packed.metadata().unsigned("general.file_type").unwrap(),
                mixture.file_type().map(u64::from)
            );
            let mut formats = Vec::new();
            for tensor in packed.tensors() {
                let from = &header.tensor(&tensor.name).unwrap().range;
                let numbers: Vec<f32> = wide[from.start as usize..from.end as usize]
                    .as_chunks()
                    .0
                    .iter()
                    .map(|bytes| f32::from_le_bytes(*bytes))
                    .collect();
                let mut expected = vec![0; tensor.format.bytes_of(numbers.len()).unwrap()];
                tensor.format.pack(&numbers, &mut expected).unwrap();
                let range = tensor.range.start as usize..tensor.range.end as usize;
                assert!(bytes[range] == expected, "{model_type}: {} in {mixture}", tensor.name);
                formats.push(tensor.format);
            }
            assert!(formats.contains(&Format::F32) && formats.iter().any(|format| *format != Format::F32));
            assert!(bytes == same, "{model_type} in {mixture}: a folder and its file differ");
        }
    }
}

#[test]
fn a_mixture_that_gguf_lacks_is_an_error() {
    let (folder, output) = (case("llama").folder(Format::F32), tempfile::tempdir().unwrap());
    let path = output.path().join("model.gguf");
    let error = quantize(folder.path(), &path, Mixture::Nf4).unwrap_err().to_string();
    assert!(error.contains("nf4 cannot be in a GGUF file"), "{error}");
    assert!(!path.exists());
}

#[test]
fn quantized_files_load_and_give_finite_logits() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    for case in writable() {
        let (folder, output) = (case.folder(Format::F32), tempfile::tempdir().unwrap());
        let path = output.path().join("model.gguf");
        quantize(folder.path(), &path, Mixture::Q4KM).unwrap();
        let logits = logits(&load(&path, opened).unwrap());
        assert!(logits.iter().all(|logit| logit.is_finite()), "{}", case.model_type());
    }
}

#[test]
fn an_incomplete_file_is_removed_and_an_old_one_is_kept() {
    let output = tempfile::tempdir().unwrap();
    let path = output.path().join("model.gguf");
    let folder = case("llama").folder(Format::F32);
    // Stops after the first piece.
    let stopped = kiln::quantize(folder.path(), &path, Mixture::F16, |_| ControlFlow::Break(()));
    assert_eq!(stopped.unwrap(), None);
    assert_eq!(files(output.path()), [] as [PathBuf; 0]);

    fs::write(&path, "before").unwrap();
    let weights = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    // The first tensor after the header is the head.
    let first = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[first..first + 4].copy_from_slice(&1e6_f32.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    for (mixture, why) in
        [(Mixture::F16, "beyond float16; choose bf16"), (Mixture::Q8_0, "and q8_0 takes numbers")]
    {
        let error = quantize(folder.path(), &path, mixture).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(files(output.path()), [&*path]);
        assert_eq!(fs::read(&path).unwrap(), b"before");
    }
    quantize(folder.path(), &path, Mixture::Bf16).unwrap();
    assert_eq!(files(output.path()), [path]);
}

#[test]
fn folders_that_cannot_be_converted_are_errors_and_leave_no_file() {
    let output = tempfile::tempdir().unwrap();
    let path = output.path().join("model.gguf");
    let refused = |folder: &Path, why: &str| {
        let error = quantize(folder, &path, Mixture::Q8_0).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert!(files(output.path()).is_empty());
    };
    refused(Path::new("/nowhere"), "/nowhere");
    let folder = case("llama").folder(Format::F32);
    fs::write(folder.path().join("tokenizer.model"), "x").unwrap();
    refused(folder.path(), "tokenizer.model: is not read; make a tokenizer.json");
    fs::write(folder.path().join("tokenizer.json"), "x").unwrap();
    refused(folder.path(), "tokenizer.json: is not valid JSON");
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    refused(folder.path(), "known: BPE");
    let folder = case("gemma2").folder(Format::F32);
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"query_pre_attn_scalar\":32", "\"query_pre_attn_scalar\":31")).unwrap();
    refused(folder.path(), "`query_pre_attn_scalar` is 31 in config.json");
}
