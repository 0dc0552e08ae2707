#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;

fn of(spec: &str, files: &[&str]) -> Result<Choice> {
    let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
    choice(&spec.parse().unwrap(), &files).map_err(|unchosen| unchosen.of("a/b"))
}

fn gguf(files: &[&str]) -> Choice {
    Choice::Gguf(files.iter().map(|&file| file.to_owned()).collect())
}

#[track_caller]
fn refused(spec: &str, files: &[&str], expected: &str) {
    let message = of(spec, files).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
}

const QUANTS: [&str; 7] = [
    "README.md",
    "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q2_K_XL.gguf",
    "mmproj-F16.gguf",
    "Q6_K/m-Q6_K-00001-of-00002.gguf",
];

#[test]
fn a_folder_is_chosen_as_its_text_files_and_weights() {
    let files = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
        "a.gguf",
        "onnx/config.json",
    ];
    let texts = vec!["config.json".to_owned(), "tokenizer.json".to_owned()];
    assert_eq!(of("a/b", &files).unwrap(), Choice::Folder { texts, indexed: false });
    let both = ["config.json", "model.safetensors", INDEX];
    let texts_of_both = vec!["config.json".to_owned()];
    assert_eq!(of("a/b", &both).unwrap(), Choice::Folder { texts: texts_of_both, indexed: false });
    assert_eq!(of("a/b:a.gguf", &files).unwrap(), gguf(&["a.gguf"]));
    let Choice::Folder { texts, indexed: true } = of(
        "a/b",
        &[
            "config.json",
            INDEX,
            "additional_chat_templates/rag.jinja",
            "additional_chat_templates/../x.jinja",
        ],
    )
    .unwrap() else {
        unreachable!("a folder with an index")
    };
    assert_eq!(texts, ["config.json", "additional_chat_templates/rag.jinja"]);
}

#[test]
fn a_folder_for_embeddings_has_its_modules() {
    let modules = ["1_Pooling/config.json", "2_Dense/model.safetensors", "config_sentence_transformers.json"];
    let others = ["onnx/config.json", "1_Pooling/other.bin", "a_b/config.json", "2_Dense/x/config.json"];
    let with = |more: &[&str]| {
        let files = [&["config.json", "model.safetensors"], more, &modules[..], &others[..]].concat();
        match of("a/b", &files).unwrap() {
            Choice::Folder { texts, .. } => texts,
            Choice::Gguf(_) => unreachable!("a folder"),
        }
    };
    assert_eq!(with(&["sentence_bert_config.json"]), ["config.json"]);
    let limits = ["modules.json", "sentence_bert_config.json"];
    assert!(with(&["modules.json", "pooling/config.json"]).contains(&"pooling/config.json".to_owned()));
    assert_eq!(with(&limits), [&["config.json"], &limits[..], &modules[..]].concat());
}

#[test]
fn a_quant_selects_a_gguf_file_by_a_word_of_its_name() {
    assert_eq!(of("a/b:q8_0", &QUANTS).unwrap(), gguf(&["m-Q8_0.gguf"]));
    assert_eq!(of("a/b", &QUANTS).unwrap(), gguf(&["m-Q4_K_M.gguf"]));
    assert_eq!(of("a/b:iq4_xs", &QUANTS).unwrap(), gguf(&["m-IQ4_XS.gguf"]));
    assert_eq!(of("a/b", &["x.gguf", "mmproj-x.gguf", "x.imatrix.gguf"]).unwrap(), gguf(&["x.gguf"]));
    assert_eq!(of("a/b:mmproj-F16.gguf", &QUANTS).unwrap(), gguf(&["mmproj-F16.gguf"]));
    refused("a/b:Q4_K", &QUANTS, "no GGUF file of `Q4_K`; it has Q6_K, IQ4_XS, Q4_K_M, Q8_0, UD-Q2_K_XL");
    refused("a/b:Q4_XS", &QUANTS, "no GGUF file of `Q4_XS`");
    refused("a/b", &["x-Q8_0.gguf", "x-F16.gguf"], "write a/b:QUANT with one of F16, Q8_0");
    refused(
        "a/b:Q8_0",
        &["x-Q8_0.gguf", "y-Q8_0.gguf"],
        "several GGUF files of `Q8_0`; name the file: x-Q8_0, y-Q8_0",
    );
    refused("a/b:Q8_0", &["README.md"], "has no GGUF files");
    refused("a/b", &["README.md", "pytorch_model.bin", "config.json"], "which is what Kiln reads");
    refused("a/b:m-Q8_1.gguf", &QUANTS, "has no file `m-Q8_1.gguf`; the nearest is `m-Q8_0.gguf`");
}

#[test]
fn a_split_file_is_chosen_with_all_its_parts() {
    let both = ["Q6_K/m-Q6_K-00002-of-00002.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf"];
    let parts = gguf(&["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"]);
    assert_eq!(of("a/b:Q6_K", &both).unwrap(), parts);
    assert_eq!(of("a/b:Q6_K/m-Q6_K-00002-of-00002.gguf", &both).unwrap(), parts);
    refused("a/b:Q6_K", &QUANTS, "lacks the file `Q6_K/m-Q6_K-00002-of-00002.gguf`");
    refused("a/b", &["x-00001-of-99999.gguf"], "in 99999 parts; 1 to 1000 are possible");
    refused("a/b", &["x-00001-of-00000.gguf", "../x-F16.gguf"], "in 0 parts");
    refused("a/b", &["../x-F16.gguf", "/y-F16.gguf"], "no GGUF file");
}

#[test]
fn an_index_may_name_only_safetensors_files_in_the_folder() {
    let index =
        br#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}"#;
    let named: Vec<String> = shards(index).unwrap().into_iter().collect();
    assert_eq!(named, ["m-1.safetensors", "m-2.safetensors"]);
    for index in [
        r#"{"weight_map": {"a": "../m.safetensors"}}"#,
        r#"{"weight_map": {"a": "/m.safetensors"}}"#,
        r#"{"weight_map": {"a": "m.bin"}}"#,
        r#"{"weight_map": {"a": 1}}"#,
        r#"{"weight_map": {}}"#,
        r#"{"weight_map": []}"#,
        "[]",
        "",
        "{",
    ] {
        assert!(shards(index.as_bytes()).is_err(), "{index}");
    }
}

#[test]
fn weights_are_listed_by_their_formats() {
    let files: Vec<String> =
        QUANTS.iter().chain(&["model.safetensors", "plain.gguf"]).map(|&f| f.to_owned()).collect();
    assert_eq!(labels(&files), ["safetensors", "Q6_K", "IQ4_XS", "Q4_K_M", "Q8_0", "UD-Q2_K_XL", "plain"]);
}

proptest! {
    /// Whatever a hub lists, the chosen files are listed ones, and their paths stay in the model's folder.
    #[test]
    fn chosen_files_are_listed_and_have_safe_names(
        files in prop::collection::vec(
            prop_oneof![
                "[-_.a-cQ0-9/\\\\:]{0,12}(-Q4_K_M|-Q8_0|-00001-of-0000[0-3]|)[.](gguf|GGUF)",
                "(|[.][.]/|additional_chat_templates/)[a-z.]{0,3}(config.json|model.safetensors|x.jinja)",
                ".{0,20}",
            ],
            0..12,
        ),
        spec in prop::sample::select(vec!["a/b", "a/b:Q4_K_M", "a/b:q8_0", "a/b:a.gguf", "a/b:é"]),
    ) {
        let spec: Spec = spec.parse().unwrap();
        let chosen = match choice(&spec, &files) {
            Ok(Choice::Folder { texts, .. }) => texts,
            Ok(Choice::Gguf(parts)) => parts,
            Err(unchosen) => {
                prop_assert!(unchosen.of("a/b").to_string().len() > "a/b ".len());
                return Ok(());
            }
        };
        prop_assert!(!chosen.is_empty());
        for file in &chosen {
            prop_assert!(files.contains(file) && names::is_safe(file), "{}", file);
        }
    }

    /// A text is either refused or names a folder inside the cache.
    #[test]
    fn a_parsed_spec_names_a_folder_inside_the_cache(text in "[-_.a-b/:@\\\\é]{0,16}|[a-b.]{1,3}/[a-b.]{1,3}[:@.a-b/]{0,9}") {
        if let Ok(spec) = text.parse::<Spec>() {
            prop_assert_eq!(spec.to_string(), text);
            let (org, name) = spec.repo().split_once('/').unwrap();
            for part in [org, name] {
                prop_assert!(names::is_safe(part) && !part.contains('/') && !part.contains("--"), "{}", part);
            }
            prop_assert!(spec.revision().is_none_or(names::is_safe));
        }
    }
}
