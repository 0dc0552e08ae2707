//! Folders with quantized matrices give the results of the unpacked numbers, for every quantization method.
//!
//! Recorded matrices (`tools/quantized_cases.py`) replace those of the recorded llama.

use std::{collections::BTreeMap, fs};

use kiln::{
    DtypeChoice, Model,
    device::Opened,
    expert::{Inspection, kernels::Choice},
};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    checkpoints::{Tensors, copy_of, edit_config, edit_tensors, load, logits, refused},
    support::{assert_close, float32},
};

/// Matrices of one quantization method.
struct Case {
    name: String,
    /// `quantization_config`
    config: Value,
    tensors: Tensors,
    /// Unpacked matrices by module name: shape, and bytes of float32.
    numbers: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/weights/quantized.safetensors");
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let configs = metadata.metadata().as_ref().unwrap().iter();
    let mut cases: Vec<_> = configs
        .filter(|(name, _)| !name.starts_with("edges"))
        .map(|(name, config)| {
            let mut case = Case {
                name: name.clone(),
                config: serde_json::from_str(config).unwrap(),
                tensors: Tensors::new(),
                numbers: BTreeMap::new(),
            };
            for (tensor, view) in file.tensors() {
                let Some(tensor) = tensor.strip_prefix(&format!("{name}/")) else { continue };
                let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
                match tensor.strip_suffix(".numbers") {
                    Some(module) => drop(case.numbers.insert(module.to_owned(), (shape, data))),
                    None => drop(case.tensors.insert(tensor.to_owned(), (view.dtype(), shape, data))),
                }
            }
            case
        })
        .collect();
    cases.sort_by(|one, two| one.name.cmp(&two.name));
    cases
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

impl Case {
    /// Creates the llama with these quantized matrices.
    fn folder(&self) -> TempDir {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| config["quantization_config"] = self.config.clone());
        edit_tensors(folder.path(), |tensors| {
            for module in self.numbers.keys() {
                tensors.remove(&format!("{module}.weight")).unwrap();
            }
            tensors.extend(self.tensors.clone());
        });
        folder
    }

    /// Creates the llama with the unpacked numbers of these matrices.
    fn plain(&self) -> TempDir {
        let folder = copy_of("llama");
        edit_tensors(folder.path(), |tensors| {
            for (module, (shape, data)) in &self.numbers {
                let (_, was, own) = tensors.get_mut(&format!("{module}.weight")).unwrap();
                assert_eq!(was, shape, "{module}");
                own.clone_from(data);
            }
        });
        folder
    }
}

/// Returns valid weight files for fuzzing, each with its `quantization_config`.
pub(crate) fn small_files() -> Vec<(Value, Vec<u8>)> {
    let file =
        |case: Case| (case.config.clone(), fs::read(case.folder().path().join("model.safetensors")).unwrap());
    ["nf4", "fp4_nested", "int8", "gptq_act_order", "awq", "ct_4_rows", "ct_float8"]
        .map(case)
        .map(file)
        .into()
}

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

#[test]
fn every_method_gives_the_logits_of_its_unpacked_matrices() {
    let cases = cases();
    assert!(cases.len() > 12);
    for case in cases {
        let (folder, plain) = (case.folder(), case.plain());
        // Shows that the test would detect unchanged matrices.
        assert_ne!(logits(&load(plain.path()).unwrap()), logits(&load(copy_of("llama").path()).unwrap()));
        for opened in devices() {
            let builder = |folder: &TempDir| float32(Model::builder(folder.path()), opened);
            let unpacked = |folder| builder(folder).kernels(Choice::Reference);
            let [model, same] = [&folder, &plain].map(|folder| unpacked(folder).load().unwrap());
            let what = format!("{} on {}", case.name, opened.info.name);
            assert_eq!(model.parameters(), same.parameters(), "{what}");
            let want = logits(&same);
            assert!(want.iter().all(|logit| logit.is_finite()), "{what}");
            assert_eq!(logits(&model), want, "{what}");
            // Split into blocks of rows, each of which begins within a matrix.
            let [cut, same] =
                [&folder, &plain].map(|folder| unpacked(folder).largest_binding(1024).load().unwrap());
            assert_eq!(logits(&cut), logits(&same), "{what}, cut");
            // Some of the matrices are computed directly from their codes.
            let packed = builder(&folder).exact(true).load().unwrap();
            assert_close(&logits(&packed), &want, &what);
        }
    }
}

#[test]
fn quantized_numbers_are_rounded_once_to_float16() {
    let opened = &kiln_testkit::devices::opened()[0].1;
    for case in ["nf4", "gptq", "ct_int8"].map(case) {
        let half = |folder: &TempDir| {
            let builder = Model::builder(folder.path()).opened(opened.clone()).dtype(DtypeChoice::F16);
            logits(&builder.load().unwrap())
        };
        assert_eq!(half(&case.folder()), half(&case.plain()), "{}", case.name);
    }
}

#[test]
fn a_folder_may_mix_matrices_of_different_bits() {
    let (mut four, eight) = (case("gptq"), case("gptq_8"));
    let module = "model.layers.2.mlp.down_proj";
    four.tensors.retain(|name, _| !name.starts_with(module));
    four.tensors.extend(eight.tensors.into_iter().filter(|(name, _)| name.starts_with(module)));
    four.numbers.insert(module.to_owned(), eight.numbers[module].clone());
    let same = logits(&load(four.plain().path()).unwrap());
    assert_eq!(logits(&load(four.folder().path()).unwrap()), same);
}

#[test]
fn zero_points_of_packed_codes_may_be_bytes() {
    let mut case = case("ct_4_rows");
    let same = logits(&load(case.folder().path()).unwrap());
    for (name, (dtype, shape, data)) in &mut case.tensors {
        if name.ends_with("weight_zero_point") {
            let zeros = data.iter().flat_map(|byte| [byte & 15, byte >> 4]).map(|code| code.wrapping_sub(8));
            (*dtype, *shape, *data) = (Dtype::I8, vec![data.len() * 2, 1], zeros.collect());
        }
    }
    assert_eq!(logits(&load(case.folder().path()).unwrap()), same);
}

#[test]
fn inspection_reports_how_a_folder_was_quantized() {
    let names: BTreeMap<_, _> = [
        ("nf4", "NF4 (bitsandbytes, 4 bits)"),
        ("fp4_nested", "FP4 (bitsandbytes, 4 bits)"),
        ("int8", "LLM.int8 (bitsandbytes, 8 bits)"),
        ("gptq", "GPTQ (4 bits)"),
        ("gptq_8", "GPTQ (8 bits)"),
        ("gptq_v2_2", "GPTQ (2 bits)"),
        ("awq", "AWQ (4 bits)"),
        ("ct_4_groups", "INT4 (compressed-tensors)"),
        ("ct_8", "INT8 (compressed-tensors)"),
        ("ct_float8", "F8_E4M3 (compressed-tensors)"),
    ]
    .into();
    for (name, dtype) in names {
        let case = case(name);
        let inspection = Inspection::of(case.folder().path()).unwrap();
        let numbers: usize = case.numbers.values().map(|(shape, _)| shape.iter().product::<usize>()).sum();
        // Two small tensors are read with the header: the quantization state of a 4-bit matrix, and the shape
        // of packed matrices.
        let read = |name: &str| name.contains("quant_state") || name.ends_with("weight_shape");
        let bytes = case.tensors.iter().filter(|(name, _)| !read(name)).map(|(_, (_, _, data))| data.len());
        assert_eq!(inspection.by_dtype[dtype], (numbers as u64, bytes.sum::<usize>() as u64), "{name}");
        assert_eq!(inspection.parameters, Inspection::of(case.plain().path()).unwrap().parameters);
    }
}

#[test]
fn unquantized_modules_of_a_quantized_folder_are_read_as_they_are() {
    // A folder whose config names a method, but whose matrices are all unquantized.
    let want = logits(&load(copy_of("llama").path()).unwrap());
    for case in ["nf4", "gptq", "awq", "ct_8"].map(case) {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| config["quantization_config"] = case.config.clone());
        assert_eq!(logits(&load(folder.path()).unwrap()), want, "{}", case.name);
    }
}

#[test]
fn packed_matrices_that_are_stored_in_another_order_are_errors() {
    const PACKED: &str = "model.layers.1.self_attn.k_proj.";
    const MODULE: &str = "model.layers.0.self_attn.q_proj.";
    for case in ["nf4", "gptq", "awq", "ct_8"].map(case) {
        // Its queries and gates are sorted by head.
        let folder = copy_of("qwen3_5_text_other");
        edit_config(folder.path(), |config| config["quantization_config"] = case.config.clone());
        edit_tensors(folder.path(), |tensors| {
            tensors.remove(&format!("{MODULE}weight"));
            let own = case.tensors.iter().filter(|(name, _)| name.starts_with(PACKED));
            tensors.extend(own.map(|(name, tensor)| (name.replace(PACKED, MODULE), tensor.clone())));
        });
        let error = refused(folder.path());
        assert!(error.contains("is packed as") && error.contains("not quantized"), "{}: {error}", case.name);
    }
}

#[test]
fn unsupported_methods_are_errors_that_name_them() {
    let cases = [
        (json!({"quant_method": "hqq"}), "were quantized by hqq"),
        (json!({"quant_method": "fp8"}), "were quantized by fp8"),
        (json!({"quant_method": 7}), "an unknown method"),
        (json!([]), "an unknown method"),
        (json!({"quant_method": "gptq", "bits": 3, "group_size": 128}), "has weights of 3 bits"),
        (json!({"quant_method": "gptq", "group_size": 128}), "has no `bits`"),
        (json!({"quant_method": "gptq", "bits": 4}), "has no possible `group_size`"),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 0}), "has no possible `group_size`"),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": -2}), "has no possible `group_size`"),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}),
            "has `checkpoint_format` \"marlin\" in `quantization_config`, and gptq, gptq_v2 are read",
        ),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": true}), "Marlin"),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}), "\"gemv\""),
        (json!({"quant_method": "awq", "bits": 8, "group_size": 32}), "has weights of 8 bits"),
        (json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}), "nvfp4"),
        (
            json!({"quant_method": "compressed-tensors", "transform_config": {"x": 1}}),
            "has a `transform_config`",
        ),
        (
            json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}),
            "sparse-24-bitmask",
        ),
    ];
    for (config, said) in cases {
        let folder = copy_of("llama");
        edit_config(folder.path(), |file| file["quantization_config"] = config.clone());
        let error = refused(folder.path());
        assert!(error.contains(said) && error.contains("config.json"), "{config}: {error}");
    }
}

/// Returns the error of a load after `edit` changed the tensors of a case's `k_proj`.
fn spoilt(name: &str, edit: impl FnOnce(&mut dyn FnMut(&str, Option<Spoilt>))) -> String {
    let folder = case(name).folder();
    edit_tensors(folder.path(), |tensors| {
        edit(&mut |part, spoilt| {
            let name = format!("model.layers.1.self_attn.k_proj.{part}");
            let own = tensors.get_mut(&name);
            match (own, spoilt) {
                (Some(own), Some(spoilt)) => *own = spoilt(own.clone()),
                (Some(_), None) => drop(tensors.remove(&name)),
                (None, _) => panic!("no {name}"),
            }
        });
    });
    let error = refused(folder.path());
    assert!(error.contains("k_proj"), "{error}");
    error
}

type Stored = (Dtype, Vec<usize>, Vec<u8>);
type Spoilt = Box<dyn Fn(Stored) -> Stored>;

/// Replaces the bytes of a tensor by a text.
fn text(text: &str) -> Spoilt {
    let bytes = text.as_bytes().to_vec();
    Box::new(move |_| (Dtype::U8, vec![bytes.len()], bytes.clone()))
}

/// Replaces a tensor by one of int32 or int64.
fn integers(dtype: Dtype, shape: &[usize], number: i64) -> Spoilt {
    let (len, shape) = (shape.iter().product::<usize>(), shape.to_vec());
    Box::new(move |_| {
        let bytes = number.to_le_bytes()[..if dtype == Dtype::I64 { 8 } else { 4 }].repeat(len);
        (dtype, shape.clone(), bytes)
    })
}

#[test]
fn contradictory_tensors_are_errors() {
    let one = |name: &str, part: &str, spoilt: Spoilt, said: &str| {
        let error = self::spoilt(name, |change| change(part, Some(spoilt)));
        assert!(error.contains(said), "{name} {part}: {error}");
    };
    let state = "weight.quant_state.bitsandbytes__nf4";
    let deep = "[".repeat(2000);
    one("nf4", state, text("{"), "is no JSON");
    one("nf4", state, text(&deep), "is no JSON");
    one("nf4", state, text(&" ".repeat(5000)), "longer than any");
    one("nf4", state, text("[1, 2]"), "lacks a `blocksize`");
    one("nf4", state, text(r#"{"blocksize": 0, "shape": [16, 32]}"#), "lacks a `blocksize`");
    one("nf4", state, text(r#"{"blocksize": 64, "shape": [16, -32]}"#), "impossible `shape`");
    one(
        "nf4",
        state,
        text(r#"{"blocksize": 64, "shape": [16, 33]}"#),
        "says [16, 33], and there are 256 bytes",
    );
    let huge = format!(r#"{{"blocksize": 64, "shape": [{0}, {0}]}}"#, 1_u64 << 33);
    one("nf4", state, text(&huge), "and there are 256 bytes");
    one("nf4", state, text(r#"{"blocksize": 64, "shape": [32, 16]}"#), "has shape [32, 16]");
    one("nf4", state, text(r#"{"blocksize": 32, "shape": [16, 32]}"#), "where 16 numbers are needed");
    one("nf4", "weight.quant_map", integers(Dtype::I32, &[16], 0), "`*.weight.quant_map` in I32");
    let state = "weight.quant_state.bitsandbytes__fp4";
    one("fp4_nested", state, text(r#"{"blocksize": 64, "shape": [16, 32]}"#), "lacks `nested_blocksize`");
    one("int8", "weight_format", text("\u{1}"), "in the order of a GPU");
    one("int8", "weight", integers(Dtype::I32, &[16, 32], 0), "a matrix of [I8] is needed");

    one("gptq", "g_idx", integers(Dtype::I32, &[32], 2), "name group 2, and there are 2 groups");
    one("gptq", "g_idx", integers(Dtype::I32, &[32], -7), "name group -7");
    one("gptq", "g_idx", integers(Dtype::I32, &[31], 0), "not 2, 4 or 8 bits each");
    one("gptq", "g_idx", integers(Dtype::I32, &[1], 0), "not 2, 4 or 8 bits each");
    one("gptq", "g_idx", integers(Dtype::I64, &[32], 0), "`*.g_idx` in I64");
    one("gptq", "qzeros", integers(Dtype::I32, &[2, 3], 0), "where 4 numbers are needed");
    one("gptq", "scales", integers(Dtype::I32, &[2, 16], 0), "`*.scales` in I32");
    one("gptq", "qweight", integers(Dtype::I32, &[64], 0), "a matrix of [I32] is needed");
    one("gptq", "qweight", integers(Dtype::I32, &[4, 17], 0), "has shape [17, 32]");
    one("awq", "qweight", integers(Dtype::I32, &[16, 2], 0), "has shape [16, 16]");
    one("awq", "qzeros", integers(Dtype::I32, &[2, 3], 0), "where 4 numbers are needed");

    let shape = "weight_shape";
    one("ct_4_rows", shape, integers(Dtype::I64, &[2], 16), "are no matrix [16, 16] of [4] bits");
    one("ct_4_rows", shape, integers(Dtype::I64, &[2], i64::MAX), "are no matrix");
    one("ct_4_rows", shape, integers(Dtype::I64, &[2], -1), "are no matrix [0, 0]");
    one("ct_4_rows", shape, integers(Dtype::I32, &[2], 16), "is not two I64");
    one("ct_4_rows", "weight_zero_point", integers(Dtype::I32, &[1, 1], 0), "where 2 numbers are needed");
    one("ct_8", "weight_scale", integers(Dtype::I64, &[16, 2], 0), "`*.weight_scale` in I64");
    one("ct_int8", "weight", integers(Dtype::I64, &[16, 32], 0), "a matrix of [I8, F8_E4M3] is needed");
}

#[test]
fn missing_tensors_are_errors_that_name_them() {
    let without = [
        ("nf4", "weight.absmax"),
        ("nf4", "weight.quant_map"),
        ("nf4", "weight"),
        ("fp4_nested", "weight.nested_quant_map"),
        ("int8", "weight"),
        ("gptq", "scales"),
        ("gptq", "qzeros"),
        ("awq", "qzeros"),
        ("ct_4_rows", "weight_scale"),
        ("ct_4_rows", "weight_shape"),
    ];
    for (name, part) in without {
        let error = spoilt(name, |change| change(part, None));
        assert!(error.contains(part) || error.contains("weight`"), "{name} {part}: {error}");
    }
    // Tensors that belong to no matrix remain unused.
    let error = spoilt("gptq", |change| change("qweight", None));
    assert!(error.contains("no tensor `model.layers.1.self_attn.k_proj.weight`"), "{error}");
    // A matrix that occurs twice.
    let folder = case("gptq").folder();
    edit_tensors(folder.path(), |tensors| {
        let plain = tensors["model.layers.0.self_attn.k_proj.weight"].clone();
        tensors.insert("model.layers.1.self_attn.k_proj.weight".to_owned(), plain);
    });
    assert!(refused(folder.path()).contains("is there twice"));
}
