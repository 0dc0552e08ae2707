//! Embeddings: a real model, prompts, long texts, and input that is refused.
//!
//! `KILN_TEST_EMBEDDER` names the folder that `python tools/embedder.py fetch DIR` creates. Without it, the
//! test with the real model reports that it was skipped. Recorded small models are in `conformance.rs`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kiln::{
    DtypeChoice, Model, ModelBuilder, Plan, Pooling,
    expert::{Batch, Logits, read_back},
};
use kiln_testkit::devices::opened;
use serde_json::{Value, json};

use crate::support::{assert_close, fixtures};

/// Loads the demo model with these files beside it.
fn with_files(files: &[(&str, Value)]) -> kiln::Result<Model> {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(demo).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content.to_string()).unwrap();
    }
    Model::builder(folder.path()).device("cpu".parse()?).load()
}

fn modules(kinds: &[&str]) -> Value {
    let module = |(i, kind): (usize, &&str)| {
        let path = if i == 0 { String::new() } else { format!("{i}_{kind}") };
        json!({ "idx": i, "name": i.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}") })
    };
    kinds.iter().enumerate().map(module).collect()
}

/// Returns the hidden states of a text, computed in one pass.
fn hidden(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let batch = Batch::from_rows(&[tokens.to_vec()], model.device()).unwrap();
    let mut cache = model.cache(&Plan::none()).unwrap();
    let hidden = model.causal().forward(&batch, Logits::Hidden, &mut cache).unwrap();
    let width = hidden.dims()[2];
    let all: Vec<f32> = read_back::read(hidden).unwrap().iter().collect();
    all.chunks(width).map(<[f32]>::to_vec).collect()
}

fn mean(rows: &[Vec<f32>]) -> Vec<f32> {
    let sum = |channel: usize| rows.iter().map(|row| f64::from(row[channel])).sum::<f64>();
    (0..rows[0].len()).map(|channel| (sum(channel) / rows.len() as f64) as f32).collect()
}

#[test]
fn a_real_model_gives_the_vectors_of_sentence_transformers() {
    let Some(folder) = std::env::var_os("KILN_TEST_EMBEDDER").map(PathBuf::from) else {
        println!(
            "a_real_model_gives_the_vectors_of_sentence_transformers: skipped: set KILN_TEST_EMBEDDER to a folder made by \
             `python tools/embedder.py fetch DIR`"
        );
        return;
    };
    let record = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/embeddings/minilm.json");
    let record: Value = serde_json::from_str(&fs::read_to_string(record).unwrap()).unwrap();
    let sentences: Vec<String> = serde_json::from_value(record["sentences"].clone()).unwrap();
    let want: Vec<Vec<f32>> = serde_json::from_value(record["embeddings"].clone()).unwrap();
    for (device, opened) in opened() {
        let model = Model::builder(folder.join("minilm")).opened(opened.clone()).dtype(DtypeChoice::F32);
        let got = model.load().unwrap().embed(sentences.clone()).run().unwrap();
        // With [CLS] and [SEP].
        assert_eq!(got.tokens[6], 3);
        for ((got, want), sentence) in got.vectors.iter().zip(&want).zip(&sentences) {
            let largest = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // Float32 rounds numbers of this size by 1e-8, in some hundred operations.
            assert!(largest < 1e-5, "{sentence} on {device}: {largest}");
        }
    }
}

#[test]
fn a_long_text_in_chunks_is_the_text_at_once() {
    let config = "model_type=llama,num_hidden_layers=2,hidden_size=32,num_attention_heads=4,intermediate_size=48,\
                  vocab_size=97,max_position_embeddings=4096";
    for (device, opened) in opened() {
        let model = ModelBuilder::random(config.parse().unwrap()).opened(opened.clone());
        let model = model.dtype(DtypeChoice::F32).load().unwrap();
        let tokens: Vec<u32> = (0..2500).map(|i| (i * i + 7 * i) % 97).collect();
        assert!(tokens.len() > model.largest_chunk(1), "the text takes several passes");
        let rows = hidden(&model, &tokens);
        let last = rows.last().unwrap().clone();
        let largest: Vec<f32> =
            (0..32).map(|channel| rows.iter().map(|row| row[channel]).fold(f32::MIN, f32::max)).collect();
        for (pooling, want) in [
            (Pooling::Mean, mean(&rows)),
            (Pooling::Cls, rows[0].clone()),
            (Pooling::LastToken, last),
            (Pooling::Max, largest),
        ] {
            let got = model.embed([tokens.clone()]).pooling(pooling).vectors().unwrap().remove(0);
            assert_close(&got, &want, &format!("{pooling} on {device}"));
        }
    }
}

#[test]
fn prompts_are_put_before_texts_and_left_out_of_the_pooling() {
    let prompts = json!({ "prompts": { "query": "ROMEO: " }, "default_prompt_name": null });
    let of = |include: bool| {
        with_files(&[
            ("modules.json", modules(&["Transformer", "Pooling"])),
            ("1_Pooling/config.json", json!({ "pooling_mode_mean_tokens": true, "include_prompt": include })),
            ("config_sentence_transformers.json", prompts.clone()),
        ])
        .unwrap()
    };
    let (model, text) = (of(true), "What light is this?");
    let tokens = model.encode(&format!("ROMEO: {text}")).unwrap();
    let rows = hidden(&model, &tokens);
    let embed = |model: &Model| model.embed([text]).prompt_name("query").vectors().unwrap().remove(0);
    assert_close(&embed(&model), &mean(&rows), "the prompt counts");
    assert_eq!(embed(&model), model.embed([text]).prompt("ROMEO: ").vectors().unwrap()[0]);
    assert_eq!(embed(&model), model.embed([format!("ROMEO: {text}")]).vectors().unwrap()[0]);
    let other = of(false);
    // As sentence-transformers counts it, without spaces around it.
    let skipped = other.encode("ROMEO:").unwrap().len();
    assert_close(&embed(&other), &mean(&rows[skipped..]), "the prompt does not count");
    // Without one, all tokens count.
    assert_close(&other.embed([format!("ROMEO: {text}")]).vectors().unwrap()[0], &mean(&rows), "no prompt");
    let both = model.embed([text]).prompt("a").prompt_name("query").vectors().unwrap_err().to_string();
    assert!(both.contains("leave one of them out"), "{both}");
    let unknown = model.embed([text]).prompt_name("answer").vectors().unwrap_err().to_string();
    assert!(unknown.contains("known: document, query"), "{unknown}");
    // This one is empty by default.
    assert_eq!(model.embed([text]).prompt_name("document").vectors(), model.embed([text]).vectors());
    assert_eq!(model.embed([format!(" {text}\n")]).vectors(), model.embed([text]).vectors());
}

#[test]
fn vectors_are_cut_and_normalized_and_texts_truncated() {
    let model = with_files(&[
        ("modules.json", modules(&["Transformer", "Pooling", "Normalize"])),
        ("1_Pooling/config.json", json!({ "pooling_mode": "lasttoken" })),
        ("sentence_bert_config.json", json!({ "max_seq_length": 6, "do_lower_case": true })),
    ])
    .unwrap();
    let length = |vector: &[f32]| vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    let whole = model.embed(["romeo"]).vectors().unwrap().remove(0);
    assert!((length(&whole) - 1.0).abs() < 1e-5);
    assert_eq!(whole, model.embed(["ROMEO"]).vectors().unwrap()[0], "the case does not count");
    let plain = model.embed(["romeo"]).normalize(false).vectors().unwrap().remove(0);
    assert!((length(&plain) - 1.0).abs() > 0.1);
    let cut = model.embed(["romeo"]).dimensions(5).vectors().unwrap().remove(0);
    let of_five = length(&plain[..5]);
    assert_close(&cut, &plain[..5].iter().map(|x| x / of_five).collect::<Vec<_>>(), "five dimensions");

    let long = "the king and the queen and the fool are in the castle";
    let error = model.embed(["the king", long]).vectors().unwrap_err().to_string();
    assert!(error.contains("input 2") && error.contains("takes 6"), "{error}");
    let tokens = model.encode(long).unwrap();
    let truncated = model.embed([long]).truncate(true).run().unwrap();
    assert_eq!(truncated.tokens, [6]);
    assert_eq!(truncated.vectors, model.embed([tokens[..6].to_vec()]).vectors().unwrap());

    let left = with_files(&[
        ("modules.json", modules(&["Transformer", "Pooling", "Normalize"])),
        ("1_Pooling/config.json", json!({ "pooling_mode": "lasttoken" })),
        ("tokenizer_config.json", json!({ "model_max_length": 5, "truncation_side": "left" })),
    ])
    .unwrap();
    let tokens = left.encode(long).unwrap();
    let truncated = left.embed([long]).truncate(true).vectors().unwrap();
    assert_eq!(truncated, left.embed([tokens[tokens.len() - 5..].to_vec()]).vectors().unwrap());
}

#[test]
fn bad_folders_and_inputs_are_refused() {
    let pooling = ("1_Pooling/config.json", json!({ "pooling_mode_mean_tokens": true }));
    let refused =
        |files: &[(&str, Value)]| with_files(files).unwrap().embed(["a"]).vectors().unwrap_err().to_string();
    let of_dense = |config: Value| {
        refused(&[
            ("modules.json", modules(&["Transformer", "Pooling", "Dense"])),
            pooling.clone(),
            ("2_Dense/config.json", config),
        ])
    };
    let activation =
        json!({ "in_features": 8, "out_features": 8, "activation_function": "torch.nn.Softplus" });
    for (error, said) in [
        (refused(&[]), "no modules.json"),
        (refused(&[("modules.json", modules(&["Transformer", "LSTM"]))]), "`LSTM`"),
        (refused(&[("modules.json", json!({ "a": 1 }))]), "modules.json"),
        (
            refused(&[
                ("modules.json", modules(&["Transformer", "Pooling"])),
                ("1_Pooling/config.json", json!({ "pooling_mode": "median" })),
            ]),
            "median",
        ),
        (
            refused(&[
                ("modules.json", modules(&["Transformer", "Pooling"])),
                ("1_Pooling/config.json", json!({ "pooling_mode_mean_tokens": false })),
            ]),
            "no kind of pooling",
        ),
        (of_dense(json!({ "in_features": 8, "out_features": 8 })), "only safetensors are read"),
        (of_dense(json!({ "in_features": 8, "out_features": 0 })), "without numbers"),
        (of_dense(json!({ "in_features": 8, "out_features": 8, "use_residual": true })), "use_residual"),
        (refused(&[("modules.json", json!([]))]), "lists no modules"),
        (refused(&[("modules.json", modules(&["Transformer", "Pooling"]))]), "config.json: is missing"),
        (refused(&[("modules.json", modules(&["Pooling"]))]), "in place of a Transformer"),
        (refused(&[("modules.json", modules(&["Transformer", "Normalize"]))]), "before the pooling"),
        (
            refused(&[(
                "modules.json",
                json!([
                    { "path": "", "type": "sentence_transformers.models.Transformer" },
                    { "path": "../other", "type": "sentence_transformers.models.Pooling" },
                ]),
            )]),
            "`../other`",
        ),
        (
            refused(&[
                ("modules.json", modules(&["Transformer", "Pooling"])),
                pooling.clone(),
                ("sentence_bert_config.json", json!({ "model_args": { "a": 1 } })),
            ]),
            "`model_args`",
        ),
        (
            refused(&[
                ("modules.json", modules(&["Transformer", "Pooling"])),
                pooling.clone(),
                ("config_sentence_transformers.json", json!({ "default_prompt_name": "q" })),
            ]),
            "default prompt `q`",
        ),
        (of_dense(activation), "`Softplus`"),
    ] {
        assert!(error.contains(said), "{error}");
    }
    let model = with_files(&[("modules.json", modules(&["Transformer", "Pooling"])), pooling]).unwrap();
    let vocab = model.sizes().vocab as u32;
    for (request, said) in [
        (model.embed([vec![vocab]]), "the vocabulary"),
        (model.embed([vec![1], Vec::new()]), "input 2 has no tokens"),
        (model.embed([vec![1]]).dimensions(100_000), "100000"),
        (model.embed([vec![1]]).dimensions(0), "are 0"),
    ] {
        let error = request.vectors().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    // Nothing is an answer, too.
    assert_eq!(model.embed(Vec::<String>::new()).vectors().unwrap(), Vec::<Vec<f32>>::new());
}

#[test]
fn models_that_only_embed_do_not_generate() {
    for (name, said) in [("bert", "see later ones"), ("gemma3_text", "see later ones"), ("llama", "no head")]
    {
        let folder = fixtures("5.23.0-embeddings").join("models").join(name);
        let model = Model::builder(folder).device("cpu".parse().unwrap()).load().unwrap();
        let error = model.generate(vec![1, 2, 3]).max_new_tokens(1).steps().unwrap_err().to_string();
        assert!(error.contains(said) && error.contains("kiln embed"), "{name}: {error}");
        let batch = Batch::from_rows(&[vec![1, 2, 3]], model.device()).unwrap();
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        let error = model.causal().forward(&batch, Logits::Last, &mut cache).unwrap_err().to_string();
        assert!(error.contains(said), "{name}: {error}");
    }
}
