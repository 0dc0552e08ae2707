//! The vocabularies and texts of llama.cpp's own tests.
//!
//! `KILN_TEST_VOCABS` names a folder with `ggml-vocab-*.gguf` and the matching texts and tokens: `models` of
//! llama.cpp, which is also in the source package of llama-cpp-python. Without it, this test reports that it
//! was skipped.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
};

use tokenizers::{NormalizedString, Normalizer, normalizers::NFC};

use super::{ids, tokenizer};
use crate::gguf::{Gguf, Metadata, tokenizer_json};

fn vocabs(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("KILN_TEST_VOCABS").map(PathBuf::from);
    if folder.is_none() {
        println!("{test}: skipped: set KILN_TEST_VOCABS to the folder `models` of llama.cpp");
    }
    folder
}

fn metadata(path: &Path) -> Metadata {
    let mut file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    Gguf::read(&mut file, len).unwrap().metadata().clone()
}

/// Reads the texts of a vocabulary with their tokens; `None` if there are none.
fn cases(path: &Path) -> Option<Vec<(String, Vec<u32>)>> {
    const BETWEEN: &str = "\n__ggml_vocab_test__\n";
    let beside = |extension| fs::read_to_string(path.with_extension(extension)).ok();
    let (texts, tokens) = (beside("gguf.inp")?, beside("gguf.out")?);
    let texts: Vec<_> =
        texts.strip_suffix(BETWEEN).unwrap_or(&texts).split(BETWEEN).map(str::to_owned).collect();
    let tokens = tokens.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    let tokens: Vec<Vec<u32>> = tokens.collect();
    assert_eq!(texts.len(), tokens.len());
    Some(texts.into_iter().zip(tokens).collect())
}

#[test]
fn llama_cpps_own_tests_pass() {
    let Some(folder) = vocabs("llama_cpps_own_tests_pass") else { return };
    let (mut refused, mut tested) = (BTreeSet::new(), 0);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for path in files.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")) {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let metadata = metadata(&path);
        let json = match tokenizer_json(&metadata) {
            Ok(json) => json,
            Err(error) => {
                println!("{name}: {error}");
                refused.insert(name);
                continue;
            }
        };
        let tokenizer = tokenizer(&metadata);
        let Some(cases) = cases(&path) else { continue };
        // llama.cpp does not compose letters and accents, but the models' own tokenizers do.
        let changes = |text: &str| {
            let mut composed = NormalizedString::from(text);
            NFC.normalize(&mut composed).unwrap();
            json["normalizer"]["type"] == "NFC" && composed.get() != text
        };
        let (left_out, cases): (Vec<_>, Vec<_>) = cases.into_iter().partition(|(text, _)| changes(text));
        for (text, tokens) in &cases {
            assert_eq!(ids(&tokenizer, text), *tokens, "{name}: {text:?}");
        }
        println!("{name}: {} texts, {} left out", cases.len(), left_out.len());
        tested += cases.len();
    }
    assert!(tested > 0, "the folder has no texts");
    // An encoder, and a file older than the names of pre-tokenizers.
    let known = ["ggml-vocab-aquila", "ggml-vocab-nomic-bert-moe"].map(str::to_owned);
    assert!(refused.is_subset(&known.into()), "{refused:?}");
}
