//! Models in GGUF files give the same results as their Hugging Face folders, in every number format.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

use kiln::{Model, ModelBuilder, Pooling, device::Opened};
use kiln_weights::{
    Format,
    gguf::{
        Array, GgufWriter, Metadata, NewTensor, Value,
        names::{Heads, Undo, source},
    },
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::{
    checkpoints::logits,
    support::{assert_close, float32},
};

/// Input and output of llama.cpp's converter for one model (`tools/gguf_cases.py`). The numbers are generated
/// here.
pub(crate) struct Case {
    pub(crate) config: Json,
    metadata: Metadata,
    /// Shapes by tensor name: in the GGUF file, and in the folder (`checkpoint`).
    pub(crate) tensors: BTreeMap<String, Vec<usize>>,
    checkpoint: BTreeMap<String, Vec<usize>>,
    /// Tensors whose numbers are derived from the config.
    factors: HashMap<String, Vec<f32>>,
}

pub(crate) fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/gguf/cases.json");
    let cases: Vec<Json> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    cases.iter().map(Case::new).collect()
}

impl Case {
    fn new(json: &Json) -> Self {
        let entries = json["metadata"].as_array().unwrap().iter();
        let metadata =
            entries.map(|entry| (entry[0].as_str().unwrap(), value(&entry[1], &entry[2]))).collect();
        let shapes = |key: &str| serde_json::from_value(json[key].clone()).unwrap();
        let factors = serde_json::from_value(json["factors"].clone()).unwrap_or_default();
        Self {
            config: json["config"].clone(),
            metadata,
            tensors: shapes("tensors"),
            checkpoint: shapes("checkpoint"),
            factors,
        }
    }

    pub(crate) fn model_type(&self) -> &str {
        self.config["model_type"].as_str().unwrap()
    }

    /// Returns the format of a tensor: `format` if its rows are whole blocks.
    fn format(&self, name: &str, format: Format) -> Format {
        let shape = &self.tensors[name];
        let is_matrix = shape.len() > 1 && !name.contains("ssm_") && !name.contains("norm");
        if is_matrix && shape[shape.len() - 1].is_multiple_of(format.block()) { format } else { Format::F32 }
    }

    /// Returns the bytes of a tensor and the numbers that they encode.
    fn numbers(&self, name: &str, format: Format) -> (Vec<u8>, Vec<f32>) {
        let len: usize = self.tensors[name].iter().product();
        let mut seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let mut numbers: Vec<f32> = (0..len)
            .map(|_| match next() {
                x if name.contains("norm") => 1.0 + x / 4.0,
                // Decay of a state.
                x if name.ends_with("ssm_a") => x - 1.0,
                x => x / 2.0,
            })
            .collect();
        if let Some(factors) = self.factors.get(name) {
            numbers.clone_from(factors);
        }
        let format = self.format(name, format);
        let mut bytes = vec![0; format.bytes_of(len).unwrap()];
        format.pack(&numbers, &mut bytes).unwrap();
        format.unpack(&bytes, &mut numbers).unwrap();
        (bytes, numbers)
    }

    /// Writes a subset of the tensors.
    fn write<'a>(
        &self,
        path: &Path,
        metadata: &Metadata,
        names: impl Iterator<Item = &'a String> + Clone,
        format: Format,
    ) {
        let tensor = |name: &String| NewTensor {
            name: name.clone(),
            shape: self.tensors[name].clone(),
            format: self.format(name, format),
        };
        let tensors: Vec<_> = names.clone().map(tensor).collect();
        let mut writer = GgufWriter::new(fs::File::create(path).unwrap(), metadata, &tensors).unwrap();
        names.for_each(|name| writer.write(&self.numbers(name, format).0).unwrap());
        writer.finish().unwrap();
    }

    fn gguf(&self, folder: &TempDir, format: Format) -> PathBuf {
        let path = folder.path().join(format!("{}.gguf", self.model_type()));
        self.write(&path, &self.metadata, self.tensors.keys(), format);
        path
    }

    /// Returns the numbers of a tensor of the checkpoint, in its order.
    fn stored(&self, name: &str, shape: &[usize], heads: Heads, format: Format) -> Vec<f32> {
        if name.ends_with("kv_b_proj.weight") {
            return self.stored_latents(name, heads, format);
        }
        if name.ends_with("in_proj_qkvz.weight") {
            return self.stored_delta(name, heads, format);
        }
        let experts = [".mlp.experts.", ".feed_forward.experts."];
        if let ("gpt_oss" | "llama4_text", Some((block, part))) =
            (self.model_type(), experts.into_iter().find_map(|experts| name.split_once(experts)))
        {
            let block = block.replace("model.layers", "blk");
            return self.stored_experts(&block, part, shape, format);
        }
        if let Some((block, part)) =
            name.split_once(".experts.").filter(|_| self.model_type() == "gemma4_text")
        {
            // Files have these tensors as they are.
            let part = if part == "down_proj" { "ffn_down_exps" } else { "ffn_gate_up_exps" };
            let block = block.replace("model.layers", "blk");
            return self.numbers(&format!("{block}.{part}.weight"), format).1;
        }
        if let Some((module, part)) =
            name.rsplit_once("_moe.").filter(|(_, part)| part.contains("put_linear"))
        {
            return self.stored_mixture(module, part, shape, format);
        }
        if let Some((module, _)) = name.split_once("shared_mlp.input_linear") {
            let part = |part: &str| {
                let name = format!("{module}block_sparse_moe.shared_mlp.{part}.weight");
                self.numbers(&source(self.model_type(), &name, heads).unwrap().name, format).1
            };
            return [part("gate_proj"), part("up_proj")].concat();
        }
        let prefix = if self.model_type() == "bert" { "bert." } else { "" };
        let known = format!("{prefix}{name}")
            .replace("attention.self.query", "attention.q_proj")
            .replace("attention.self.key", "attention.k_proj")
            .replace("attention.self.value", "attention.v_proj")
            .replace("attention.output.dense", "attention.o_proj")
            .replace("attention.output.LayerNorm", "attention_norm")
            .replace("query_key_value", "q_proj")
            .replace("embed_out", "lm_head")
            .replace("router.layer", "router")
            .replace("in_proj_ba", "in_proj_b")
            .replace("shared_mlp.output_linear", "block_sparse_moe.shared_mlp.down_proj");
        let found = source(self.model_type(), &known, heads).unwrap();
        let is_joined = name.contains("query_key_value");
        let own = if is_joined { found.name.replace("attn_q.", "attn_qkv.") } else { found.name.clone() };
        let (_, numbers) = self.numbers(&own, format);
        let (rows, columns) = (shape[0], shape[1..].iter().product::<usize>());
        if self.model_type() == "gpt2" && name.contains(".c_") && shape.len() == 2 {
            // The checkpoint has `[in, out]`.
            return (0..rows * columns).map(|i| numbers[i % columns * rows + i / columns]).collect();
        }
        let first = found.rows(rows).unwrap().start;
        // Queries and gates are one matrix in both, and so are the two vectors of a delta net.
        let undo = if matches!(found.undo, Undo::Half { .. }) { Undo::Nothing } else { found.undo };
        let place = |row: usize| match is_joined {
            // The checkpoint has all of the first head, then all of the second, and so on.
            true => {
                let each = rows / heads.heads / 3;
                let (head, part, row) = (row / each / 3, row / each % 3, row % each);
                (part * heads.heads + head) * each + row
            }
            false => first + undo.row(self.by_values(name, row), rows),
        };
        let row = |row: usize| &numbers[place(row) * columns..][..columns];
        if name.ends_with("linear_attn.out_proj.weight") {
            let column = |i: usize| i / columns * columns + self.by_values(name, i % columns);
            return (0..rows * columns).map(|i| numbers[column(i)]).collect();
        }
        (0..rows).flat_map(row).map(|x| found.undo.number(*x)).collect()
    }

    /// Returns the place in the file of row `row` of a tensor of a delta net: heads of values that share keys
    /// are adjacent in a checkpoint, and not in the file.
    fn by_values(&self, name: &str, row: usize) -> usize {
        let is_moved = |part: &str| !part.starts_with("norm") && self.model_type() != "qwen3_next";
        let Some((_, part)) = name.split_once("linear_attn.").filter(|(_, part)| is_moved(part)) else {
            return row;
        };
        let size = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let (keys, heads) = (size("linear_num_key_heads"), size("linear_num_value_heads"));
        let of_keys = 2 * keys * size("linear_key_head_dim");
        let (before, width) = match part.split('.').next().unwrap() {
            "in_proj_qkv" | "conv1d" => (of_keys, size("linear_value_head_dim")),
            "in_proj_z" | "out_proj" => (0, size("linear_value_head_dim")),
            _ => (0, 1),
        };
        let Some(value) = row.checked_sub(before) else { return row };
        let (head, sharing) = (value / width, heads / keys);
        before + (head % sharing * keys + head / sharing) * width + value % width
    }

    /// Returns the numbers of the projection from latents to the keys and values of each head. In the file,
    /// the matrices of keys are transposed.
    fn stored_latents(&self, name: &str, heads: Heads, format: Format) -> Vec<f32> {
        let size = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let (rank, keys, values) = (size("kv_lora_rank"), size("qk_nope_head_dim"), size("v_head_dim"));
        let of = |part: &str| {
            let name = name.replace("kv_b_proj", part);
            self.numbers(&source(self.model_type(), &name, heads).unwrap().name, format).1
        };
        let (of_keys, of_values) = (of("k_b_proj_transposed"), of("v_b_proj"));
        let number = |head: usize, row: usize, column: usize| match row.checked_sub(keys) {
            None => of_keys[(head * rank + column) * keys + row],
            Some(row) => of_values[(head * values + row) * rank + column],
        };
        let rows = (0..heads.heads).flat_map(|head| (0..keys + values).map(move |row| (head, row)));
        rows.flat_map(|(head, row)| (0..rank).map(move |column| number(head, row, column))).collect()
    }

    /// Returns the numbers of the projection to queries, keys, values and gates, sorted by heads of keys. In
    /// the file, it is sorted by these parts.
    fn stored_delta(&self, name: &str, heads: Heads, format: Format) -> Vec<f32> {
        let size = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let of = |part: &str| {
            let name = name.replace("in_proj_qkvz", part);
            self.numbers(&source(self.model_type(), &name, heads).unwrap().name, format).1
        };
        let all = [of("in_proj_qkv"), of("in_proj_z")].concat();
        let width = size("hidden_size");
        let keys = size("linear_key_head_dim");
        let values = size("linear_num_value_heads") / heads.state_heads * size("linear_value_head_dim");
        let mut first = 0;
        let mut parts = Vec::new();
        for rows in [keys, keys, values, values] {
            parts.push((first, rows));
            first += heads.state_heads * rows;
        }
        let of_head = |head: usize| {
            let rows = parts.iter().map(move |(first, rows)| (first + head * rows, *rows));
            rows.flat_map(|(first, rows)| all[first * width..][..rows * width].iter().copied())
        };
        (0..heads.state_heads).flat_map(of_head).collect()
    }

    /// Returns the numbers of a tensor of all experts of Granite: `[experts, out, in]`, gate before up.
    fn stored_mixture(&self, module: &str, part: &str, shape: &[usize], format: Format) -> Vec<f32> {
        let block = module.rsplit_once('.').unwrap().0.replace("model.layers", "blk");
        let names = if part.starts_with("input") { vec!["gate", "up"] } else { vec!["down"] };
        let of = |name: &&str| self.numbers(&format!("{block}.ffn_{name}_exps.weight"), format).1;
        let parts: Vec<Vec<f32>> = names.iter().map(of).collect();
        let each = shape[1] * shape[2] / parts.len();
        let expert = |i: usize| parts.iter().flat_map(move |part| part[i * each..][..each].iter().copied());
        (0..shape[0]).flat_map(expert).collect()
    }

    /// Returns the numbers of a tensor of all experts: `[experts, in, out]`, or `[experts, out]`. Gate and up
    /// alternate in gpt-oss, and follow each other in Llama 4.
    fn stored_experts(&self, block: &str, part: &str, shape: &[usize], format: Format) -> Vec<f32> {
        let (part, kind) = match part.strip_suffix("_bias") {
            Some(part) => (part, "bias"),
            None => (part, "weight"),
        };
        let names = if part == "gate_up_proj" { vec!["gate", "up"] } else { vec!["down"] };
        let of = |name: &&str| self.numbers(&format!("{block}.ffn_{name}_exps.{kind}"), format).1;
        let parts: Vec<Vec<f32>> = names.iter().map(of).collect();
        let (out, input) = (shape[shape.len() - 1], if shape.len() == 3 { shape[1] } else { 1 });
        let number = |i: usize| {
            let (expert, from, to) = (i / out / input, i / out % input, i % out);
            let rows = out / parts.len();
            let (part, row) = match self.model_type() {
                "gpt_oss" => (to % parts.len(), to / parts.len()),
                _ => (to / rows, to % rows),
            };
            parts[part][(expert * rows + row) * input + from]
        };
        (0..shape.iter().product()).map(number).collect()
    }

    /// Creates a Hugging Face folder of the model.
    pub(crate) fn folder(&self, format: Format) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let number = |key: &str| self.config[key].as_u64().unwrap_or(0) as usize;
        let heads = Heads {
            heads: number("num_attention_heads"),
            kv_heads: number("num_key_value_heads"),
            state_heads: number("linear_num_key_heads"),
        };
        let mut tensors = BTreeMap::new();
        // Files have no heads of encoders.
        for (name, shape) in self.checkpoint.iter().filter(|(name, _)| !name.starts_with("pooler.")) {
            let numbers = self.stored(name, shape, heads, format).into_iter();
            let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
            tensors.insert(name.clone(), (shape.clone(), bytes));
        }
        let views = tensors
            .iter()
            .map(|(name, (shape, data))| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        folder
    }
}

/// Returns a value in the types named as in the Python package `gguf`.
fn value(types: &Json, value: &Json) -> Value {
    match (types[0].as_str().unwrap(), value) {
        ("UINT32", _) => Value::U32(value.as_u64().unwrap() as u32),
        ("FLOAT32", _) => Value::F32(value.as_f64().unwrap() as f32),
        ("BOOL", _) => Value::Bool(value.as_bool().unwrap()),
        ("STRING", _) => Value::String(value.as_str().unwrap().to_owned()),
        ("ARRAY", list) if types[1] == "BOOL" => {
            Value::Array(Array::Bool(serde_json::from_value(list.clone()).unwrap()))
        }
        ("ARRAY", list) => Value::Array(Array::I32(serde_json::from_value(list.clone()).unwrap())),
        (other, _) => panic!("no model has a value of type {other}"),
    }
}

/// Returns small valid files, as seeds for fuzzing.
pub(crate) fn small_files() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let kinds = [("llama", Format::F32), ("qwen2", Format::Q8_0), ("mamba", Format::F32)];
    let of = |(kind, format): (&str, Format)| {
        let case = cases().into_iter().find(|case| case.model_type() == kind).unwrap();
        fs::read(case.gguf(&folder, format)).unwrap()
    };
    kinds.map(of).into()
}

pub(crate) fn load(path: &Path, opened: &Opened) -> kiln::Result<Model> {
    float32(Model::builder(path), opened).load()
}

/// Returns the logits of a model, or the embedding of an encoder.
fn outputs(model: &Model) -> Vec<f32> {
    match model.causal().is_bidirectional() {
        true => {
            model.embed([vec![3, 1, 4, 1, 5]]).pooling(Pooling::WeightedMean).vectors().unwrap().remove(0)
        }
        false => logits(model),
    }
}

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

#[test]
fn gguf_files_give_the_logits_of_their_folders() {
    for case in cases() {
        let files = tempfile::tempdir().unwrap();
        let (path, folder) = (case.gguf(&files, Format::F32), case.folder(Format::F32));
        for opened in devices() {
            let (model, same) = (load(&path, opened).unwrap(), load(folder.path(), opened).unwrap());
            assert_eq!(model.parameters(), same.parameters(), "{}", case.model_type());
            let (logits, want) = (outputs(&model), outputs(&same));
            assert!(logits.iter().all(|logit| logit.is_finite()), "{}", case.model_type());
            // Frequencies of scaled positions are stored as float32 in the file, and computed for the folder.
            let name = format!("{} on {}", case.model_type(), opened.info.name);
            // The heads of delta nets have another order in files, and so have sums.
            if case.factors.is_empty() && !case.model_type().starts_with("qwen3_5") {
                assert_eq!(logits, want, "{name}");
            }
            assert_close(&logits, &want, &name);
        }
    }
}

#[test]
fn a_file_of_an_encoder_has_its_tokenizer_and_its_pooling() {
    let case = cases().into_iter().find(|case| case.model_type() == "bert").unwrap();
    let mut texts =
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "##s", ",", "romeo"].map(str::to_owned).to_vec();
    texts.extend(('a'..='z').flat_map(|letter| [letter.to_string(), format!("##{letter}")]));
    texts.retain({
        let mut known = BTreeSet::new();
        move |text| known.insert(text.clone())
    });
    let folder = case.folder(Format::F32);
    let write = |file: &str, json: Json| {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, json.to_string()).unwrap();
    };
    let special = |id: usize| {
        json!({
            "id": id, "content": texts[id], "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false,
        })
    };
    let vocab: BTreeMap<&String, usize> = texts.iter().zip(0..).collect();
    write(
        "tokenizer.json",
        json!({
            "version": "1.0",
            "added_tokens": [special(0), special(1), special(2), special(3)],
            "normalizer": {
                "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                "lowercase": true,
            },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "post_processor": { "type": "BertProcessing", "cls": ["[CLS]", 2], "sep": ["[SEP]", 3] },
            "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "model": {
                "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        }),
    );
    let modules = ["Transformer", "Pooling", "Normalize"].iter().enumerate();
    let path = |i: usize| if i == 0 { String::new() } else { format!("{i}") };
    let modules =
        modules.map(|(i, kind)| json!({ "path": path(i), "type": format!("sentence_transformers.{kind}") }));
    write("modules.json", modules.collect());

    let mut metadata = case.metadata.clone();
    let stored = texts.iter().enumerate().map(|(id, text)| match text.strip_prefix("##") {
        _ if id < 4 => text.clone(),
        Some(inside) => inside.to_owned(),
        None => format!("▁{text}"),
    });
    let kinds = (0..texts.len()).map(|id| if id < 4 { 3 } else { 1 }).collect();
    metadata.insert("tokenizer.ggml.model", Value::String("bert".to_owned()));
    metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(stored.collect())));
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    for (name, id) in [("padding", 0), ("unknown", 1), ("cls", 2), ("seperator", 3)] {
        metadata.insert(format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
    }
    let load_with = |kind: u32, opened: &Opened| {
        let mut metadata = metadata.clone();
        metadata.insert("bert.pooling_type", Value::U32(kind));
        let path = folder.path().join("model.gguf");
        case.write(&path, &metadata, case.tensors.keys(), Format::F32);
        load(&path, opened).unwrap()
    };
    let inputs = ["Roméos, the Wherefores?", "x", ""];
    for opened in devices() {
        for (kind, pooling) in [(1, "mean"), (2, "cls"), (3, "lasttoken")] {
            write("1/config.json", json!({ "pooling_mode": pooling }));
            let want = load(folder.path(), opened).unwrap().embed(inputs).run().unwrap();
            assert_eq!(load_with(kind, opened).embed(inputs).run().unwrap(), want, "{pooling}");
        }
        let error = |kind| load_with(kind, opened).embed(inputs).vectors().unwrap_err().to_string();
        assert!(error(0).contains("pooling"), "{}", error(0));
        assert!(error(4).contains("`bert.pooling_type` is 4: the model ranks"), "{}", error(4));
        assert!(error(9).contains("is 9, must be between 0 and 3"), "{}", error(9));
    }
}

#[test]
fn packed_weights_give_the_logits_of_unpacked_ones() {
    let formats = [Format::F16, Format::Bf16, Format::Q4_0, Format::Q5_1, Format::Q8_0, Format::Iq4Nl];
    let all = cases();
    let of = |name: &str| all.iter().find(|case| case.model_type() == name).unwrap();
    let of_qwen2 = formats.map(|format| (of("qwen2"), format));
    // Rows in another order, and matrices of heads.
    let others = ["qwen3_5_text", "qwen3_next", "deepseek_v3", "llama4_text"].map(of);
    let others = others.map(|case| (case, Format::Q8_0));
    for (case, format) in of_qwen2.into_iter().chain(others) {
        let files = tempfile::tempdir().unwrap();
        let path = case.gguf(&files, format);
        let packed = case.tensors.keys().filter(|name| case.format(name, format) == format).count();
        assert!(packed > 4, "{format}: {packed} tensors");
        for opened in devices() {
            let name = format!("{} in {format} on {}", case.model_type(), opened.info.name);
            let want = logits(&load(case.folder(format).path(), opened).unwrap());
            let exact = float32(Model::builder(&path), opened).exact(true).load().unwrap();
            assert_close(&logits(&exact), &want, &name);
            // Rounding activations to 8 bits changes a typical number by 0.6 %, which is 2 % of the norm of a
            // sum of a dozen products.
            let found = logits(&load(&path, opened).unwrap());
            let square = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>().sqrt();
            let off = square(&mut found.iter().zip(&want).map(|(found, want)| found - want));
            let most = 0.05 * square(&mut want.iter().copied());
            assert!(off <= most, "{name}: logits are {off} off, and may be {most}");
        }
    }
}

#[test]
fn a_split_file_is_loaded_by_the_name_of_any_part() {
    let case = cases().into_iter().find(|case| case.model_type() == "llama").unwrap();
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let files = tempfile::tempdir().unwrap();
    let want = logits(&load(&case.gguf(&files, Format::F32), opened).unwrap());
    let part = |number: usize| files.path().join(format!("model-{number:05}-of-00003.gguf"));
    let split = |number: usize, all: usize| {
        let mut metadata = if number == 1 { case.metadata.clone() } else { Metadata::new() };
        metadata.insert("split.no", Value::U16(number as u16 - 1));
        metadata.insert("split.count", Value::U16(3));
        metadata.insert("split.tensors.count", Value::I32(all as i32));
        let own = case.tensors.keys().enumerate().filter(move |(i, _)| i % 3 + 1 == number);
        case.write(&part(number), &metadata, own.map(|(_, name)| name), Format::F32);
    };
    (1..=3).for_each(|number| split(number, case.tensors.len()));
    for number in 1..=3 {
        assert_eq!(logits(&load(&part(number), opened).unwrap()), want);
    }
    let bytes = (1..=3).map(|number| {
        (part(number).file_name().unwrap().to_str().unwrap().to_owned(), fs::read(part(number)).unwrap())
    });
    let from_memory = float32(ModelBuilder::from_bytes(bytes), opened).load().unwrap();
    assert_eq!(logits(&from_memory), want);
    let refused = |path: &Path| load(path, opened).unwrap_err().to_string();
    let renamed = files.path().join("renamed.gguf");
    fs::copy(part(2), &renamed).unwrap();
    assert!(refused(&renamed).contains("is part 2 of 3"), "{}", refused(&renamed));
    split(1, case.tensors.len() + 1);
    assert!(refused(&part(1)).contains("its parts have"), "{}", refused(&part(1)));
    fs::copy(part(2), part(3)).unwrap();
    assert!(refused(&part(1)).contains("is not part 3 of 3"), "{}", refused(&part(1)));
    fs::remove_file(part(3)).unwrap();
    assert!(refused(&part(1)).contains("there is no such file"), "{}", refused(&part(1)));
}

#[test]
fn files_that_contradict_their_metadata_are_errors() {
    let case = cases().into_iter().find(|case| case.model_type() == "llama").unwrap();
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("x.gguf");
    let refused = |key: &str, value: Value| {
        let mut metadata = case.metadata.clone();
        metadata.insert(key, value);
        case.write(&path, &metadata, case.tensors.keys(), Format::F32);
        load(&path, opened).unwrap_err().to_string()
    };
    let unknown = refused("general.architecture", Value::String("gpt9".to_owned()));
    assert!(unknown.contains("gpt9") && unknown.contains("known: "), "{unknown}");
    let wrong = refused("llama.embedding_length", Value::U32(128));
    assert!(wrong.contains("has shape"), "{wrong}");
    let few = refused("llama.block_count", Value::U32(1));
    assert!(few.contains("no place for"), "{few}");
    let many = refused("llama.block_count", Value::U32(3));
    assert!(many.contains("no tensor `blk.2."), "{many}");
}
