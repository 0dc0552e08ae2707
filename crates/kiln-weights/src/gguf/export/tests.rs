//! Configs as llama.cpp's converter writes them, and round trips of tokenizers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{collections::BTreeMap, fs};

use serde_json::{Value as Json, json};

use super::{architectures::ARCHITECTURES, *};
use crate::{
    Error,
    gguf::{Gguf, Tensors, Value, generation_config, tokenizer_config, tokenizer_json},
};

fn read(path: &str) -> Json {
    let path = format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Cases of the models that can be written.
fn cases() -> Vec<Json> {
    let mut cases: Vec<Json> = serde_json::from_value(read("tests/data/gguf/cases.json")).unwrap();
    let known = |case: &Json| ARCHITECTURES.iter().any(|one| case["config"]["model_type"] == one.model_type);
    cases.retain(known);
    cases
}

/// Shapes of the tensors of a case, and its factors.
struct Few(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

impl Tensors for Few {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.get(name).map(|(shape, _)| shape.clone())
    }

    fn numbers(&mut self, name: &str) -> Result<Vec<f32>, Error> {
        Ok(self.0[name].1.clone())
    }
}

fn number(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32)
}

#[test]
fn configs_are_written_as_the_converter_writes_them() {
    for case in cases() {
        let ConfigMetadata { metadata, factors } = config_metadata(&case["config"]).unwrap();
        let name = case["config"]["model_type"].as_str().unwrap();
        let of_file = |key: &str| {
            let known = case["metadata"].as_array().unwrap().iter();
            known
                .clone()
                .find(|entry| entry[0].as_str().unwrap().ends_with(key))
                .map(|entry| entry[2].clone())
        };
        let further = of_file("nextn_predict_layers").and_then(|blocks| blocks.as_u64()).unwrap_or(0);
        for entry in case["metadata"].as_array().unwrap() {
            let (key, expected) = (entry[0].as_str().unwrap(), &entry[2]);
            // Blocks that predict further tokens are not read, so they are not written.
            let expected = match key {
                key if key.ends_with("nextn_predict_layers") => continue,
                key if key.ends_with(".block_count") => &Json::from(expected.as_u64().unwrap() - further),
                _ => expected,
            };
            let found = metadata.get(key).unwrap_or_else(|| panic!("{name}: {key} is missing"));
            let same = match (found, expected) {
                (Value::String(text), _) => expected == text,
                (Value::Bool(truth), _) => expected == truth,
                (Value::Array(list), _) => list.len() == expected.as_array().unwrap().len(),
                (found, _) => number(found) == expected.as_f64().map(|number| number as f32),
            };
            assert!(same, "{name}: {key} is {found:?}, the converter wrote {expected}");
        }
        // Keys whose values equal llama.cpp's defaults.
        let implied = [
            "key_length",
            "value_length",
            "freq_base",
            "head_count_kv",
            "dimension_count",
            // The converter derives it from a field that Transformers does not write.
            "expert_gating_func",
            // Kiln's own.
            "ssm.time_step_min",
        ];
        let known = |key: &str| {
            let listed = case["metadata"].as_array().unwrap().iter().any(|entry| entry[0] == key);
            listed || implied.iter().any(|end| key.ends_with(end))
        };
        let more: Vec<_> = metadata.iter().filter(|(key, _)| !known(key)).collect();
        assert!(more.is_empty(), "{name}: {more:?}");

        let expected = case["factors"].as_object().unwrap();
        assert_eq!(factors.len(), expected.len(), "{name}");
        for (tensor, found) in factors {
            let expected: Vec<f32> = serde_json::from_value(expected[tensor].clone()).unwrap();
            assert_eq!(found.len(), expected.len());
            // The same operations in float32, except powers, which are accurate to two units in the last
            // place. `smooth` propagates their error, enlarged up to four times.
            let bound = 8.0 * f32::EPSILON;
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= bound * b.abs();
            assert!(found.iter().zip(&expected).all(close), "{name}: {found:?} {expected:?}");
        }
    }
}

#[test]
fn exported_metadata_is_read_back_as_the_same_config() {
    for case in cases() {
        let ConfigMetadata { metadata, factors } = config_metadata(&case["config"]).unwrap();
        let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_value(case["tensors"].clone()).unwrap();
        let mut tensors = Few(shapes.into_iter().map(|(name, shape)| (name, (shape, Vec::new()))).collect());
        for (name, factors) in factors {
            tensors.0.insert(name.to_owned(), (vec![factors.len()], factors));
        }
        check_config(&case["config"], &metadata, &mut tensors).unwrap();
        let mut other = case["config"].clone();
        other["vocab_size"] = 95.into();
        let error = check_config(&other, &metadata, &mut tensors).unwrap_err().to_string();
        assert!(error.contains("`vocab_size` is 95"), "{error}");
    }
}

#[test]
fn configs_that_gguf_cannot_express_are_errors() {
    let of = |model_type: &str| {
        cases()
            .into_iter()
            .map(|case| case["config"].clone())
            .find(|config| config["model_type"] == model_type)
    };
    for (model_type, field, value, why) in [
        ("llama", "model_type", json!("gpt9"), "model_type is `gpt9`; known: llama"),
        ("llama", "hidden_size", json!("64"), "`hidden_size` in config.json must be a whole number"),
        ("llama", "num_hidden_layers", json!(5000), "at most 4096"),
        ("llama", "hidden_size", json!(1_u64 << 40), "too large"),
        ("llama", "hidden_act", json!("relu"), "`hidden_act` is `relu`"),
        (
            "llama",
            "rope_parameters",
            json!({ "rope_type": "dynamic", "factor": 2.0 }),
            "rope type is `dynamic`",
        ),
        ("llama", "rope_parameters", json!({ "rope_type": "longrope" }), "must have 8 numbers"),
        ("qwen2", "use_sliding_window", json!(true), "no window"),
        ("qwen2_moe", "norm_topk_prob", json!(true), "`norm_topk_prob` is not false"),
        ("qwen3_moe", "mlp_only_layers", json!([0]), "some blocks have no experts"),
        ("gemma2", "attn_logit_softcapping", json!(null), "is null"),
        ("mamba", "expand", json!(4), "twice the hidden size"),
    ] {
        let mut config = of(model_type).unwrap();
        config[field] = value;
        let error = config_metadata(&config).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert!(config_metadata(&Json::Null).is_err());

    // All blocks of a Mistral are alike in a file.
    let mut mistral = of("llama").unwrap();
    mistral["model_type"] = "mistral".into();
    mistral["sliding_window"] = json!(8);
    let blocks = mistral["num_hidden_layers"].as_u64().unwrap() as usize;
    let window = |kinds: Vec<&str>| {
        let mut config = mistral.clone();
        config["layer_types"] = kinds.into();
        let window =
            |found: ConfigMetadata| found.metadata.unsigned("llama.attention.sliding_window").unwrap();
        config_metadata(&config).map(window).map_err(|e| e.to_string())
    };
    let [full, sliding] = ["full_attention", "sliding_attention"];
    assert_eq!(window(vec![full; blocks]), Ok(None));
    assert_eq!(window(vec![sliding; blocks]), Ok(Some(8)));
    let mixed = window([vec![full], vec![sliding; blocks - 1]].concat()).unwrap_err();
    assert!(mixed.contains("`layer_types` has blocks with and without a window"), "{mixed}");
}

fn demo() -> TokenizerFiles {
    TokenizerFiles {
        tokenizer: read("assets/demo/tokenizer.json"),
        config: read("assets/demo/tokenizer_config.json"),
        generation: read("assets/demo/generation_config.json"),
        model: read("assets/demo/config.json"),
        chat_template: None,
    }
}

#[test]
fn an_exported_byte_level_tokenizer_is_read_back_unchanged() {
    let files = demo();
    let metadata = tokenizer_metadata(&files, 2050).unwrap();
    let back = tokenizer_json(&metadata).unwrap();
    assert_eq!(back["model"]["vocab"], files.tokenizer["model"]["vocab"]);
    assert_eq!(back["model"]["merges"], files.tokenizer["model"]["merges"]);
    let special = |json: &Json| {
        let tokens = json["added_tokens"].as_array().unwrap().iter();
        tokens.map(|token| (token["id"].clone(), token["content"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(special(&back), special(&files.tokenizer));
    assert_eq!(metadata.text("tokenizer.ggml.pre").unwrap(), Some("gpt-2"));
    let config = tokenizer_config(&metadata).unwrap();
    for key in ["bos_token", "eos_token", "pad_token", "chat_template"] {
        assert_eq!(config[key], files.config[key], "{key}");
    }
    assert_eq!(generation_config(&metadata).unwrap()["eos_token_id"], json!([1]));
}

/// Checks that each tokenizer from the reader is recognised by the writer.
#[test]
fn every_pre_tokenizer_is_recognised() {
    use crate::gguf::tokenizer::pre_tokenizer::{PRE_TOKENIZERS, PreTokenizer};
    for one in PRE_TOKENIZERS {
        let mut files = demo();
        files.tokenizer["pre_tokenizer"] = one.json();
        files.tokenizer["normalizer"] = if one.composes { json!({ "type": "NFC" }) } else { Json::Null };
        files.tokenizer["model"]["ignore_merges"] = one.ignores_merges.into();
        let metadata = tokenizer_metadata(&files, 2048).unwrap();
        let found = metadata.text("tokenizer.ggml.pre").unwrap().unwrap();
        // The `bos` setting is written separately, so names that differ only in it count as one.
        let found = PRE_TOKENIZERS.iter().find(|one| one.names.contains(&found)).unwrap();
        let does = |one: &PreTokenizer| (one.json(), one.composes, one.ignores_merges);
        assert_eq!(does(found), does(one), "{:?} for {:?}", found.names, one.names);
    }
}

/// `KILN_TEST_VOCABS` names the folder `models` of llama.cpp, as in the tests of the reader.
#[test]
fn exported_vocabularies_of_llama_cpp_are_read_back_unchanged() {
    let Some(folder) = std::env::var_os("KILN_TEST_VOCABS") else {
        println!(
            "exported_vocabularies_of_llama_cpp_are_read_back_unchanged: skipped: set KILN_TEST_VOCABS to the folder `models` of llama.cpp"
        );
        return;
    };
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut tested = 0;
    for path in files.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")) {
        let mut file = fs::File::open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        let metadata = Gguf::read(&mut file, len).unwrap().metadata().clone();
        // Files that cannot be read are counted by the reader's test.
        let Ok(tokenizer) = tokenizer_json(&metadata) else { continue };
        // The merges of this model do not follow any scores, and no model that Kiln writes uses it.
        if metadata.text("tokenizer.ggml.model").unwrap() == Some("gemma4") {
            continue;
        }
        let vocab = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap().len();
        let files = TokenizerFiles {
            tokenizer: tokenizer.clone(),
            config: tokenizer_config(&metadata).unwrap(),
            generation: generation_config(&metadata).unwrap(),
            ..TokenizerFiles::default()
        };
        let written = tokenizer_metadata(&files, vocab).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let back = tokenizer_json(&written).unwrap();
        for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
            assert_eq!(back[part], tokenizer[part], "{path:?}: {part}");
        }
        assert!(back["model"] == tokenizer["model"], "{path:?}: another model");
        assert_eq!(generation_config(&written).unwrap(), files.generation, "{path:?}");
        tested += 1;
    }
    println!("{tested} vocabularies");
    assert!(tested > 0, "the folder has no vocabularies");
}

/// Returns a tokenizer with `<unk>`, `<s>`, `</s>`, the bytes, letters, and their merges.
fn sentencepiece() -> TokenizerFiles {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let named = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter();
    let texts = ["▁", "a", "b", "c", "bc", "ab", "▁a", "abc"].map(str::to_owned);
    let vocab: serde_json::Map<String, Json> = named
        .chain(bytes)
        .chain(texts)
        .zip(0..)
        .map(|(token, id): (String, u32)| (token, id.into()))
        .collect();
    let added =
        |id: u32, content: &str, special: bool| json!({ "id": id, "content": content, "special": special });
    let tokenizer = json!({
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true), added(267, "▁▁", false)],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "pre_tokenizer": null,
        "post_processor": { "type": "TemplateProcessing", "single": [
            { "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
        ] },
        "model": { "type": "BPE", "vocab": vocab, "unk_token": "<unk>", "byte_fallback": true, "merges": [
            "b c", ["a", "b"], "▁ a", "a bc", "ab c",
        ] },
    });
    TokenizerFiles { tokenizer, config: json!({ "eos_token": "</s>" }), ..TokenizerFiles::default() }
}

#[test]
fn merges_of_sentencepiece_are_restored_from_scores() {
    let files = sentencepiece();
    let metadata = tokenizer_metadata(&files, 270).unwrap();
    let back = tokenizer_json(&metadata).unwrap();
    let expected = json!([["b", "c"], ["a", "b"], ["▁", "a"], ["a", "bc"], ["ab", "c"]]);
    assert_eq!(back["model"]["merges"], expected);
    assert_eq!(back["normalizer"], files.tokenizer["normalizer"]);
    assert_eq!(back["post_processor"]["single"], files.tokenizer["post_processor"]["single"]);
    assert_eq!(metadata.integers("tokenizer.ggml.token_type").unwrap().unwrap()[..4], [2, 3, 3, 6]);
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(tokens[267..], ["  ", "[PAD268]", "[PAD269]"]);
}

#[test]
fn tokenizers_that_llama_cpp_lacks_are_errors() {
    let refused = |files: &TokenizerFiles, vocab, why: &str| {
        let error = tokenizer_metadata(files, vocab).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&demo(), 2047, "the id 2047, and the model has 2047 embeddings");
    for (field, value, why) in [
        ("pre_tokenizer", json!({ "type": "Whitespace" }), "GGUF has no name"),
        ("pre_tokenizer", Json::Null, "GGUF has no name"),
        ("normalizer", json!({ "type": "Lowercase" }), "normalizes"),
        ("post_processor", json!({ "type": "BertProcessing" }), "`BertProcessing`"),
        ("model", json!({ "type": "Unigram" }), "`Unigram`"),
        ("model", json!({ "type": "BPE", "merges": ["ab"] }), "no pair"),
    ] {
        let mut files = demo();
        files.tokenizer[field] = value;
        refused(&files, 2048, why);
    }
    let mut files = sentencepiece();
    files.tokenizer["normalizer"] = json!({ "type": "NFKC" });
    refused(&files, 270, "`NFKC`");
    // GGUF has either a space before every text or none, but this step adds none to a text that begins with
    // one.
    let metaspace = |field: &str, value: Json| {
        let mut files = sentencepiece();
        files.tokenizer["normalizer"] = Json::Null;
        files.tokenizer["pre_tokenizer"] = json!({ "type": "Metaspace", "replacement": "▁" });
        files.tokenizer["pre_tokenizer"][field] = value;
        files
    };
    refused(&metaspace("prepend_scheme", json!("first")), 270, "prepend_scheme is `first`");
    refused(&metaspace("prepend_scheme", json!("always")), 270, "prepend_scheme is `always`");
    refused(&metaspace("add_prefix_space", json!(true)), 270, "prepend_scheme is `always`");
    for never in [metaspace("prepend_scheme", json!("never")), metaspace("add_prefix_space", json!(false))] {
        let metadata = tokenizer_metadata(&never, 270).unwrap();
        assert_eq!(metadata.boolean("tokenizer.ggml.add_space_prefix").unwrap(), Some(false));
    }
    files = sentencepiece();
    files.generation = json!({ "eos_token_id": [2, 3, 4, 5] });
    refused(&files, 270, "4 tokens end a text");
    refused(&TokenizerFiles::default(), 8, "known: BPE");
}

#[test]
fn more_than_one_token_can_end_a_text() {
    let mut files = sentencepiece();
    files.generation = json!({ "eos_token_id": [5, 2, 7] });
    let metadata = tokenizer_metadata(&files, 270).unwrap();
    assert_eq!(generation_config(&metadata).unwrap()["eos_token_id"], json!([2, 5, 7]));
}
