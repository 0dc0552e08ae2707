//! Untrusted model folders: split, damaged or with false claims. Each gives a clear error, and none panics.

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::DType;
use half::{bf16, f16};
use kiln::{
    DtypeChoice, Error, GenerationConfig, Model, Plan,
    device::{DeviceName, Opened},
    expert::Inspection,
};
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{architectures, assert_close, batch, fixtures, fixtures_of, float32, forward};

/// Copies the recorded llama, to be damaged by a test.
fn copy() -> TempDir {
    copy_of("llama")
}

/// Copies the recorded model `name`.
pub(crate) fn copy_of(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let from = fixtures_of(name).join("models").join(name);
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        // Models of embeddings generate nothing.
        if from.join(file).exists() {
            fs::copy(from.join(file), folder.path().join(file)).unwrap();
        }
    }
    folder
}

pub(crate) fn cpu() -> Opened {
    kiln_testkit::devices::opened()[0].1.clone()
}

pub(crate) fn load(folder: &Path) -> kiln::Result<Model> {
    float32(Model::builder(folder), &cpu()).load()
}

/// Returns the error message of a failed load.
#[track_caller]
pub(crate) fn refused(folder: &Path) -> String {
    match load(folder) {
        Ok(_) => panic!("{} loads", folder.display()),
        Err(error) => error.to_string(),
    }
}

pub(crate) fn edit_config(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(&path, config.to_string()).unwrap();
}

pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read_tensors(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let own = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    tensors.tensors().into_iter().map(own).collect()
}

fn write_tensors(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

pub(crate) fn edit_tensors(folder: &Path, edit: impl FnOnce(&mut Tensors)) {
    let mut tensors = read_tensors(folder);
    edit(&mut tensors);
    write_tensors(&folder.join("model.safetensors"), &tensors);
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()))
}

/// Divides the weights of a folder among three files, and returns the file of each tensor.
pub(crate) fn shard(folder: &Path) -> BTreeMap<String, String> {
    let tensors = read_tensors(folder);
    let mut shards: [Tensors; 3] = Default::default();
    let mut map = BTreeMap::new();
    for (i, (name, tensor)) in tensors.into_iter().enumerate() {
        map.insert(name.clone(), format!("model-{}.safetensors", i % 3));
        shards[i % 3].insert(name, tensor);
    }
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    for (i, shard) in shards.iter().enumerate() {
        write_tensors(&folder.join(format!("model-{i}.safetensors")), shard);
    }
    let index = folder.join("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    map
}

#[test]
fn shards_give_the_logits_of_one_file() {
    let folder = copy();
    let want = logits(&load(folder.path()).unwrap());
    let mut map = shard(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    assert_eq!(logits(&load(folder.path()).unwrap()), want);
    assert_eq!(Inspection::of(folder.path()).unwrap().shards, 3);

    // A tensor that is not in the named file, a file that does not exist, and a path that leads out of the
    // folder.
    map.insert("model.ghost.weight".into(), "model-0.safetensors".into());
    fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    assert!(refused(folder.path()).contains("model.ghost.weight"));
    for file in ["missing.safetensors", "../model-0.safetensors", "/etc/passwd", ""] {
        map.insert("model.ghost.weight".into(), file.into());
        fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
        assert!(!refused(folder.path()).is_empty());
    }
}

pub(crate) fn logits(model: &Model) -> Vec<f32> {
    let mut cache = model.cache(&Plan::dynamic()).unwrap();
    forward(model, &batch(model, &[vec![3, 1, 4, 1, 5]]), &mut cache)
}

/// Rounds all tensors of a folder to a 16-bit type.
fn halve(folder: &Path, dtype: Dtype) {
    edit_tensors(folder, |tensors| {
        for (kind, _, data) in tensors.values_mut() {
            let half = |x: f32| match dtype {
                Dtype::F16 => f16::from_f32(x).to_le_bytes(),
                _ => bf16::from_f32(x).to_le_bytes(),
            };
            *data = floats(data).flat_map(half).collect();
            *kind = dtype;
        }
    });
}

#[test]
fn half_precision_files_load() {
    let want = logits(&load(copy().path()).unwrap());
    for dtype in [Dtype::F16, Dtype::BF16] {
        let folder = copy();
        halve(folder.path(), dtype);
        let model = load(folder.path()).unwrap();
        assert_eq!(model.dtype(), DType::F32);
        // bfloat16 keeps 8 bits of each weight; logits reach about 10.
        let largest = logits(&model).iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.0 && largest < 1.0, "{dtype:?}: {largest}");
    }
}

#[test]
fn every_architecture_loads_from_bfloat16() {
    for name in architectures() {
        let folder = copy_of(name);
        halve(folder.path(), Dtype::BF16);
        let found = logits(&load(folder.path()).unwrap());
        assert!(found.iter().all(|logit| logit.is_finite()), "{name}");
    }
}

#[test]
fn matrices_stay_in_bfloat16_if_shaders_can_read_them() {
    let is_wgpu = |opened: &&Opened| matches!(opened.info.name, DeviceName::Wgpu(_));
    for opened in kiln_testkit::devices::opened().iter().map(|(_, opened)| opened).filter(is_wgpu) {
        for name in ["llama", "llama_tied", "gemma2", "gemma3_text", "qwen2", "qwen2_moe", "phi3"] {
            let folder = copy_of(name);
            halve(folder.path(), Dtype::BF16);
            let on_cpu = load(folder.path()).unwrap();
            let model = float32(Model::builder(folder.path()), opened).load().unwrap();
            // The weights equal those of the file, and so do the logits, for few tokens and for many.
            for tokens in [vec![3, 1, 4, 1, 5], (10..50).collect()] {
                let logits = |model: &Model| {
                    let mut cache = model.cache(&Plan::dynamic()).unwrap();
                    forward(model, &batch(model, std::slice::from_ref(&tokens)), &mut cache)
                };
                assert_close(&logits(&model), &logits(&on_cpu), &format!("{name}, {} tokens", tokens.len()));
            }
            assert_eq!(model.parameters(), on_cpu.parameters());
            for model in [&model, &on_cpu] {
                let halved = model.weight_bytes() as f64 / (4 * model.parameters()) as f64;
                // Vectors and experts stay in float32.
                assert!(halved < if name == "qwen2_moe" { 0.9 } else { 0.6 }, "{name}: {halved}");
            }
            // Split into blocks that fit a small binding.
            let cut = float32(Model::builder(folder.path()), opened).largest_binding(6144).load().unwrap();
            assert_close(&self::logits(&cut), &self::logits(&on_cpu), &format!("{name}, cut"));
        }
    }
}

#[test]
fn weights_beyond_float16_are_errors_that_name_the_tensor() {
    for name in ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"] {
        let folder = copy();
        edit_tensors(folder.path(), |tensors| {
            let (_, _, data) = tensors.get_mut(name).unwrap();
            data[..4].copy_from_slice(&1e6f32.to_le_bytes());
        });
        load(folder.path()).unwrap();
        let loaded = Model::builder(folder.path()).opened(cpu()).dtype(DtypeChoice::F16).load();
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("`dtype`"), "{error}");
    }
}

#[test]
fn a_tensor_at_an_odd_offset_loads() {
    // Writers need not align tensors.
    let folder = copy();
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut odd = ((header + 1) as u64).to_le_bytes().to_vec();
    odd.extend(&bytes[8..8 + header]);
    odd.push(b' ');
    odd.extend(&bytes[8 + header..]);
    let want = logits(&load(folder.path()).unwrap());
    fs::write(&path, odd).unwrap();
    assert_close(&logits(&load(folder.path()).unwrap()), &want, "odd offsets");
}

#[test]
fn names_and_shapes_must_fit_the_config() {
    let folder = copy();
    edit_tensors(folder.path(), |tensors| {
        tensors.remove("model.layers.1.mlp.up_proj.weight");
    });
    assert!(refused(folder.path()).contains("no tensor `model.layers.1.mlp.up_proj.weight`"));

    let folder = copy();
    edit_config(folder.path(), |config| config["intermediate_size"] = json!(49));
    let error = refused(folder.path());
    assert!(error.contains("[48, 32]") && error.contains("[49, 32]"), "{error}");

    let folder = copy();
    edit_tensors(folder.path(), |tensors| {
        let (kind, shape, data) = tensors.get_mut("model.norm.weight").unwrap();
        (*kind, *data) = (Dtype::I64, vec![0; shape[0] * 8]);
    });
    assert!(refused(folder.path()).contains("is stored as I64"));
}

#[test]
fn impossible_configs_are_errors() {
    let cases: [(&str, Value, &str); 18] = [
        ("model_type", json!("gpt9"), "known: llama"),
        ("model_type", Value::Null, "`model_type` is missing"),
        ("hidden_size", json!(0), "hidden_size"),
        ("hidden_size", json!(-1), "hidden_size"),
        ("hidden_size", json!(u64::MAX), "hidden_size"),
        ("hidden_size", json!("32"), "invalid type"),
        ("num_hidden_layers", json!(1_000_000_000), "num_hidden_layers"),
        ("num_attention_heads", json!(3), "attention heads"),
        ("num_key_value_heads", json!(0), "num_key_value_heads"),
        ("head_dim", json!(7), "pairs"),
        ("vocab_size", json!(1u64 << 40), "vocab_size"),
        ("hidden_act", json!("relu"), "known: silu"),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps"),
        ("rope_parameters", json!({"rope_type": "spiral"}), "known: default"),
        ("rope_parameters", json!({"rope_type": "linear"}), "`factor` is missing"),
        (
            "rope_parameters",
            json!({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}),
            "short_factor",
        ),
        ("rope_parameters", json!({"rope_type": "default", "rope_theta": 0.0}), "rope_theta"),
        ("rope_parameters", json!("yes"), "not understood"),
    ];
    for (key, value, expected) in cases {
        let folder = copy();
        edit_config(folder.path(), |config| config[key] = value.clone());
        let error = refused(folder.path());
        assert!(error.contains(expected), "{key} = {value}: {error}");
    }
}

#[test]
fn the_old_and_the_new_name_of_a_rope_type_may_stand_together() {
    let want = logits(&load(&fixtures("5.23.0").join("models/llama_rope_linear")).unwrap());
    for rope in [
        json!({"type": "linear", "factor": 2.0}),
        json!({"type": "linear", "rope_type": "linear", "factor": 2.0}),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let from = fixtures("4.47.1").join("models/llama_rope_linear");
        for file in ["config.json", "model.safetensors"] {
            fs::copy(from.join(file), folder.path().join(file)).unwrap();
        }
        edit_config(folder.path(), |config| {
            assert_eq!(config["rope_scaling"]["factor"], rope["factor"]);
            config["rope_scaling"] = rope;
        });
        assert_eq!(logits(&load(folder.path()).unwrap()), want);
    }
}

#[test]
fn missing_and_truncated_files_are_errors_that_name_them() {
    for (file, expected) in [("config.json", "no config.json"), ("model.safetensors", "no model.safetensors")]
    {
        let folder = copy();
        fs::remove_file(folder.path().join(file)).unwrap();
        let error = refused(folder.path());
        assert!(error.contains(file) && error.contains(expected), "{error}");
    }
    assert!(refused(Path::new("/nowhere/at/all")).contains("/nowhere/at/all"));
    for file in ["config.json", "model.safetensors", "generation_config.json"] {
        for keep in [0, 1, 7, 100] {
            let folder = copy();
            let path = folder.path().join(file);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..keep]).unwrap();
            let error = refused(folder.path());
            assert!(error.contains(file), "{file} of {keep} bytes: {error}");
        }
    }
    let folder = copy();
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    assert!(refused(folder.path()).contains("not a whole safetensors file"));
}

#[test]
fn a_header_of_too_many_tensors_is_an_error() {
    let folder = copy();
    let header: serde_json::Map<_, _> = (0..300_000)
        .map(|i| (format!("t{i}"), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})))
        .collect();
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    assert!(refused(folder.path()).contains("tensors are not read"));
}

#[test]
fn a_folder_without_a_tokenizer_takes_ids_only() {
    let model = load(copy().path()).unwrap();
    assert!(matches!(model.encode("hello"), Err(Error::Prompt { why }) if why.contains("tokenizer.json")));
}

/// Loads a folder and, if that succeeds, generates: errors are accepted, panics are not.
pub(crate) fn survives(folder: &Path) {
    let Ok(model) = load(folder) else { return };
    let mut cache = model.cache(&Plan::dynamic()).unwrap();
    let wanted = GenerationConfig::new().max_new_tokens(2);
    if let Ok(generation) = model.generate(vec![0]).cache(&mut cache).config(wanted.clone()).steps() {
        for step in generation {
            let _ = step;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_flipped_bit_in_a_file_never_panics(at in 0usize..4000, bit in 0u8..8) {
        let folder = copy();
        let path = folder.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        survives(folder.path());
    }

    #[test]
    fn a_truncated_file_is_an_error(share in 0.0f64..1.0) {
        let folder = copy();
        let path = folder.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..(bytes.len() as f64 * share) as usize]).unwrap();
        prop_assert!(load(folder.path()).is_err());
    }

    #[test]
    fn a_random_header_is_an_error(
        name in "[a-z.]{0,20}",
        shape in prop::collection::vec(any::<u64>(), 0..5),
        start in any::<u64>(),
        end in any::<u64>(),
        dtype in prop::sample::select(vec!["F32", "F16", "BF16", "I64", "U8", "X", ""]),
        extra in 0usize..64,
    ) {
        let folder = copy();
        let header = json!({ name: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]} }).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + extra, 0);
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        prop_assert!(load(folder.path()).is_err());
    }

    #[test]
    fn mutated_configs_never_panic(
        key in prop::sample::select(vec![
            "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
            "tie_word_embeddings", "attention_bias", "eos_token_id", "pad_token_id", "model_type",
        ]),
        value in prop_oneof![
            any::<i64>().prop_map(|n| json!(n)),
            (0i64..200).prop_map(|n| json!(n)),
            any::<f64>().prop_map(|n| json!(n)),
            any::<bool>().prop_map(|b| json!(b)),
            Just(Value::Null),
            Just(json!([])),
            Just(json!({})),
            (any::<f64>(), any::<i64>()).prop_map(|(f, n)| json!({
                "rope_type": "yarn", "factor": f, "original_max_position_embeddings": n, "beta_fast": f,
            })),
            (any::<f64>(), -3i64..3).prop_map(|(f, n)| json!({
                "rope_type": "dynamic", "factor": f, "rope_theta": n, "partial_rotary_factor": f,
            })),
            "[a-z]{0,8}".prop_map(|s| json!(s)),
        ],
    ) {
        let folder = copy();
        edit_config(folder.path(), |config| config[key] = value);
        survives(folder.path());
    }
}
