//! Variants of model folders: other tensor names, another head, and tensors that the config has no place for.

use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path};

use kiln::{GenerationConfig, Mixture, Model, device::Opened};
use safetensors::Dtype;
use serde_json::json;

use crate::{
    checkpoints::{Tensors, copy_of, edit_config, edit_tensors, load, logits, refused},
    support::{architectures, assert_close, fixtures, float32},
};

fn cpu() -> &'static Opened {
    &kiln_testkit::devices::opened()[0].1
}

/// Returns the logits of a folder, and those of a GGUF file converted from it.
fn both(folder: &Path) -> [Vec<f32>; 2] {
    let output = tempfile::tempdir().unwrap();
    let path = output.path().join("model.gguf");
    kiln::quantize(folder, &path, Mixture::F32, |_| ControlFlow::Continue(())).unwrap();
    let file = float32(Model::builder(&path), cpu()).load().unwrap();
    [logits(&load(folder).unwrap()), logits(&file)]
}

#[track_caller]
fn same(folder: &Path, want: &[f32]) {
    for got in both(folder) {
        assert_close(&got, want, "another spelling");
    }
}

/// Returns the error message that both loading and packing give.
#[track_caller]
fn refused_by_both(folder: &Path) -> String {
    let output = tempfile::tempdir().unwrap();
    let path = output.path().join("model.gguf");
    let packed = kiln::quantize(folder, &path, Mixture::F32, |_| ControlFlow::Continue(()));
    assert_eq!(packed.unwrap_err().to_string(), refused(folder));
    assert!(fs::read_dir(output.path()).unwrap().next().is_none(), "a file is begun");
    refused(folder)
}

fn rename(tensors: &mut Tensors, known: impl Fn(&str) -> String) {
    *tensors = std::mem::take(tensors).into_iter().map(|(name, tensor)| (known(&name), tensor)).collect();
}

fn zeros(shape: &[usize]) -> (Dtype, Vec<usize>, Vec<u8>) {
    (Dtype::F32, shape.to_vec(), vec![0; 4 * shape.iter().product::<usize>()])
}

fn doubles(bytes: &[u8]) -> Vec<u8> {
    let wide = |bytes: &[u8; 4]| f64::from(f32::from_le_bytes(*bytes)).to_le_bytes();
    bytes.as_chunks().0.iter().flat_map(wide).collect()
}

#[test]
fn tensor_names_may_lack_the_module_of_the_model() {
    for name in architectures() {
        let folder = copy_of(name);
        let want = logits(&load(folder.path()).unwrap());
        edit_tensors(folder.path(), |tensors| {
            rename(tensors, |name| {
                let stripped = name.strip_prefix("model.").or_else(|| name.strip_prefix("backbone."));
                stripped.unwrap_or(name).to_owned()
            });
        });
        assert_eq!(logits(&load(folder.path()).unwrap()), want, "{name}");
    }
    // A file that mixes both names matches neither.
    let folder = copy_of("llama");
    edit_tensors(folder.path(), |tensors| {
        let norm = tensors["model.norm.weight"].clone();
        tensors.insert("norm.weight".to_owned(), norm);
    });
    let error = refused_by_both(folder.path());
    assert!(error.contains("`model.norm.weight` is there twice"), "{error}");
}

#[test]
fn whisper_names_may_lack_the_module_and_may_have_only_the_head() {
    let from = fixtures("5.23.0").join("models/whisper");
    let copy = |edit: &dyn Fn(&mut Tensors)| {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(&from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        edit_tensors(folder.path(), edit);
        folder
    };
    let embedding = "model.decoder.embed_tokens.weight";
    for edit in [
        (&|tensors: &mut Tensors| rename(tensors, |name| name.replacen("model.", "", 1)))
            as &dyn Fn(&mut Tensors),
        &|tensors| rename(tensors, |name| name.replace(embedding, "proj_out.weight")),
        &|tensors| {
            let head = tensors[embedding].clone();
            tensors.insert("proj_out.weight".to_owned(), head);
        },
    ] {
        let model = load(copy(edit).path()).unwrap();
        assert!(model.causal().ties_embeddings());
        assert_eq!(model.parameters(), load(&from).unwrap().parameters());
    }
    let other = copy(&|tensors| {
        let (kind, shape, data) = tensors[embedding].clone();
        tensors.insert("proj_out.weight".to_owned(), (kind, shape, vec![0; data.len()]));
    });
    assert!(!load(other.path()).unwrap().causal().ties_embeddings());
}

#[test]
fn experts_may_be_stacked_and_named_as_new_versions_write_them() {
    for (name, module, parts) in [
        ("mixtral", "block_sparse_moe", ["w1", "w3", "w2"]),
        ("qwen2_moe", "mlp", ["gate_proj", "up_proj", "down_proj"]),
        ("jamba", "feed_forward", ["gate_proj", "up_proj", "down_proj"]),
    ] {
        let folder = copy_of(name);
        let want = logits(&load(folder.path()).unwrap());
        edit_tensors(folder.path(), |tensors| {
            let mut stacks = BTreeMap::<String, BTreeMap<usize, [Vec<u8>; 3]>>::new();
            let mut shapes = BTreeMap::new();
            tensors.retain(|name, (_, shape, data)| {
                let Some((module, expert)) = name.split_once(".experts.") else { return true };
                let (expert, part) = expert.split_once('.').unwrap();
                let part = parts.iter().position(|known| part == format!("{known}.weight")).unwrap();
                let stack = stacks.entry(module.to_owned()).or_default();
                stack.entry(expert.parse().unwrap()).or_default()[part] = std::mem::take(data);
                shapes.insert(part, shape.clone());
                false
            });
            for (module, experts) in stacks {
                let gate_up = experts.values().flat_map(|[gate, up, _]| [&gate[..], up].concat()).collect();
                let down = experts.values().flat_map(|[.., down]| down.clone()).collect();
                let (into, out) = (&shapes[&0], &shapes[&2]);
                tensors.insert(
                    format!("{module}.experts.gate_up_proj"),
                    (Dtype::F32, vec![experts.len(), 2 * into[0], into[1]], gate_up),
                );
                tensors.insert(
                    format!("{module}.experts.down_proj"),
                    (Dtype::F32, vec![experts.len(), out[0], out[1]], down),
                );
            }
            if name == "mixtral" {
                rename(tensors, |name| name.replace(module, "mlp"));
            }
        });
        assert_eq!(logits(&load(folder.path()).unwrap()), want, "{name}");
        // The header of a tensor without elements may be arbitrary.
        edit_tensors(folder.path(), |tensors| {
            let (_, (_, shape, data)) =
                tensors.iter_mut().find(|(name, _)| name.contains(".experts.")).unwrap();
            (*shape, *data) = (vec![1 << 40, 0, 2], Vec::new());
        });
        let error = refused(folder.path());
        assert!(error.contains("which no matrices of experts have"), "{error}");
    }
}

#[test]
fn a_stored_head_is_used_if_it_differs_from_the_embeddings() {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let folder = |edit: &dyn Fn(&mut Tensors)| {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| config["tie_word_embeddings"] = json!(true));
        edit_tensors(folder.path(), edit);
        folder
    };
    let tied = logits(&load(folder(&|tensors| _ = tensors.remove("lm_head.weight")).path()).unwrap());
    let untied = logits(&load(copy_of("llama").path()).unwrap());
    assert_ne!(tied, untied);
    // The recorded model has a separate head.
    same(folder(&|_| {}).path(), &untied);
    // A head with the same numbers, in either type.
    for wide in [false, true] {
        let equal = folder(&|tensors| {
            let (_, shape, data) = tensors[EMBEDDING].clone();
            let head = if wide { (Dtype::F64, shape, doubles(&data)) } else { (Dtype::F32, shape, data) };
            tensors.insert("lm_head.weight".to_owned(), head);
        });
        same(equal.path(), &tied);
        assert!(load(equal.path()).unwrap().causal().ties_embeddings());
    }
    // Only the head is present.
    let only = folder(&|tensors| {
        let embedding = tensors.remove(EMBEDDING).unwrap();
        tensors.insert("lm_head.weight".to_owned(), embedding);
    });
    same(only.path(), &tied);
    // The last number differs.
    let near = folder(&|tensors| {
        let (kind, shape, mut data) = tensors[EMBEDDING].clone();
        let last = data.len() - 4;
        data[last..].copy_from_slice(&9.0_f32.to_le_bytes());
        tensors.insert("lm_head.weight".to_owned(), (kind, shape, data));
    });
    assert!(!load(near.path()).unwrap().causal().ties_embeddings());
    let narrow = folder(&|tensors| _ = tensors.insert("lm_head.weight".to_owned(), zeros(&[96, 32])));
    assert!(refused(narrow.path()).contains("`lm_head.weight` has shape [96, 32]"));
}

#[test]
fn tensors_that_cannot_affect_results_are_ignored() {
    let folder = copy_of("llama");
    let want = logits(&load(folder.path()).unwrap());
    let parameters = load(folder.path()).unwrap().parameters();
    edit_tensors(folder.path(), |tensors| {
        for layer in 0..3 {
            for (module, rows) in [("self_attn.q_proj", 32), ("self_attn.o_proj", 32), ("mlp.down_proj", 32)]
            {
                tensors.insert(format!("model.layers.{layer}.{module}.bias"), zeros(&[rows]));
            }
            tensors.insert(format!("model.layers.{layer}.self_attn.k_scale"), zeros(&[1]));
            tensors.insert(format!("model.layers.{layer}.self_attn.v_proj.output_scale"), zeros(&[1]));
            tensors.insert(format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq"), zeros(&[4]));
        }
        let half = (Dtype::F16, vec![97], vec![0; 2 * 97]);
        tensors.insert("lm_head.bias".to_owned(), half);
        for name in
            ["score.weight", "v_head.summary.weight", "model.layers.3.mlp.up_proj.weight", "mtp.norm.weight"]
        {
            tensors.insert(name.to_owned(), zeros(&[2, 3]));
        }
    });
    same(folder.path(), &want);
    assert_eq!(load(folder.path()).unwrap().parameters(), parameters);
    assert_eq!(kiln::expert::Inspection::of(folder.path()).unwrap().parameters, parameters);

    // Causal masks, which old versions stored as buffers.
    for (name, attention) in [("gpt2", "transformer.h.0.attn"), ("gpt_neox", "gpt_neox.layers.0.attention")] {
        let folder = copy_of(name);
        let want = logits(&load(folder.path()).unwrap());
        edit_tensors(folder.path(), |tensors| {
            tensors.insert(format!("{attention}.bias"), (Dtype::BOOL, vec![1, 1, 2, 2], vec![1, 0, 1, 1]));
            tensors.insert(format!("{attention}.masked_bias"), zeros(&[]));
        });
        assert_close(&logits(&load(folder.path()).unwrap()), &want, name);
    }

    // Biases of zeros are kept if the model has a place for them.
    let folder = copy_of("qwen2");
    edit_tensors(folder.path(), |tensors| {
        for (name, (_, _, data)) in tensors.iter_mut().filter(|(name, _)| name.ends_with(".bias")) {
            assert!(name.contains("self_attn"));
            data.fill(0);
        }
    });
    let want = logits(&load(folder.path()).unwrap());
    same(folder.path(), &want);
}

#[test]
fn tensors_that_may_affect_results_are_errors() {
    let with = |name: &str, value: f32| {
        let folder = copy_of("llama");
        edit_tensors(folder.path(), |tensors| {
            let (kind, shape, mut data) = zeros(&[32]);
            data[120..124].copy_from_slice(&value.to_le_bytes());
            tensors.insert(name.to_owned(), (kind, shape, data));
        });
        folder
    };
    for name in ["model.layers.1.self_attn.o_proj.bias", "layers.2.mlp.down_proj.bias", "lm_head.bias"] {
        assert!(load(with(name, 0.0).path()).is_ok(), "{name}");
        let error = refused_by_both(with(name, 0.5).path());
        assert!(error.contains("is a bias that config.json has no place for"), "{error}");
    }
    // The first name exists in files of other models.
    for name in ["model.layers.0.self_attn.q_norm.weight", "model.embed_norm.weight", "final_logits_bias"] {
        let error = refused_by_both(with(name, 0.0).path());
        assert!(error.contains("has no place for") && error.contains(name), "{error}");
    }
    let adapter = "model.layers.0.self_attn.q_proj.lora_A.weight";
    assert!(refused_by_both(with(adapter, 0.0).path()).contains(adapter));

    // A missing tensor, and one with another shape.
    let spoilt = |edit: fn(&mut Tensors)| {
        let folder = copy_of("llama");
        edit_tensors(folder.path(), edit);
        refused_by_both(folder.path())
    };
    let missing = spoilt(|tensors| _ = tensors.remove("model.layers.1.mlp.up_proj.weight"));
    assert!(missing.contains("no tensor `model.layers.1.mlp.up_proj.weight`"), "{missing}");
    let narrow = spoilt(|tensors| _ = tensors.insert("model.norm.weight".to_owned(), zeros(&[31])));
    assert!(narrow.contains("`model.norm.weight` has shape [31]"), "{narrow}");
}

#[test]
fn double_precision_files_load() {
    for name in ["llama", "mamba", "qwen2_moe"] {
        let folder = copy_of(name);
        let want = logits(&load(folder.path()).unwrap());
        edit_tensors(folder.path(), |tensors| {
            for (kind, _, data) in tensors.values_mut() {
                (*kind, *data) = (Dtype::F64, doubles(data));
            }
        });
        assert_eq!(logits(&load(folder.path()).unwrap()), want, "{name}");
        if name == "llama" {
            same(folder.path(), &want);
            let packed = load_packed(folder.path());
            assert!(packed.iter().all(|logit| logit.is_finite()));
            edit_tensors(folder.path(), |tensors| {
                let (_, _, data) = tensors.get_mut("model.norm.weight").unwrap();
                data[..8].copy_from_slice(&1e300_f64.to_le_bytes());
            });
            let error = refused(folder.path());
            assert!(error.contains("`model.norm.weight` holds 1e300, beyond float32"), "{error}");
        }
    }
}

/// Loads a folder with weights packed on load, and returns the logits.
fn load_packed(folder: &Path) -> Vec<f32> {
    let builder = float32(Model::builder(folder), cpu()).quant(Mixture::Q8_0);
    logits(&builder.load().unwrap())
}

#[test]
fn a_whole_file_is_read_instead_of_the_index_beside_it() {
    let folder = copy_of("llama");
    let want = logits(&load(folder.path()).unwrap());
    let index = folder.path().join("model.safetensors.index.json");
    // The index of the original model: its shard is outdated or missing.
    fs::write(&index, json!({ "weight_map": { "model.norm.weight": "old.safetensors" } }).to_string())
        .unwrap();
    same(folder.path(), &want);
    let old = copy_of("llama");
    edit_tensors(old.path(), |tensors| {
        tensors.values_mut().for_each(|(_, _, data)| data.fill(0));
    });
    fs::copy(old.path().join("model.safetensors"), folder.path().join("old.safetensors")).unwrap();
    same(folder.path(), &want);
    fs::write(&index, "no JSON").unwrap();
    same(folder.path(), &want);
}

#[test]
fn rope_scaling_overrides_rope_parameters() {
    let of = |parameters: serde_json::Value, scaling: serde_json::Value| {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| {
            config["rope_parameters"] = parameters;
            config["rope_scaling"] = scaling;
        });
        folder
    };
    let linear = json!({ "rope_type": "linear", "factor": 4.0 });
    let plain = json!({ "rope_type": "default", "rope_theta": 500.0 });
    let want = logits(&load(of(linear.clone(), json!(null)).path()).unwrap());
    // The base in the other field is ignored, too.
    let folder = of(plain.clone(), linear.clone());
    same(folder.path(), &want);
    let model = load(folder.path()).unwrap();
    let usual = load(copy_of("llama").path()).unwrap().sizes().positions;
    assert_eq!(model.sizes().positions, 4 * usual);
    let want = logits(&load(of(plain.clone(), json!(null)).path()).unwrap());
    same(of(plain, json!({})).path(), &want);
}

#[test]
fn yarn_extends_the_trained_positions_by_its_factor() {
    let positions = |positions: usize, yarn: serde_json::Value| {
        let folder = copy_of("llama");
        edit_config(folder.path(), |config| {
            config["max_position_embeddings"] = json!(positions);
            config["rope_parameters"] = json!(null);
            config["rope_scaling"] = yarn;
        });
        load(folder.path()).unwrap().sizes().positions
    };
    let yarn = |trained: usize| json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": trained });
    // As documented for Qwen's models, as in DeepSeek's configs, and in between.
    assert_eq!(positions(32, yarn(32)), 128);
    assert_eq!(positions(128, yarn(32)), 128);
    assert_eq!(positions(40, yarn(32)), 128);
    assert_eq!(positions(512, yarn(32)), 512);
    assert_eq!(positions(32, json!({ "type": "yarn", "factor": 4.0 })), 128);
}

/// In Transformers, config.json provides the end tokens only if there is no generation_config.json.
#[test]
fn settings_of_generation_come_from_one_file() {
    let settings = |config: serde_json::Value, generation: Option<serde_json::Value>| {
        let folder = copy_of("llama");
        edit_config(folder.path(), |fields| {
            fields.as_object_mut().unwrap().extend(config.as_object().unwrap().clone())
        });
        let path = folder.path().join("generation_config.json");
        match generation {
            Some(generation) => fs::write(path, generation.to_string()).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
        kiln::expert::generation_config_of(folder.path())
    };
    let ids = json!({ "eos_token_id": [5, 7], "bos_token_id": 3, "pad_token_id": 9 });
    let said = GenerationConfig::new().eos_token_id(vec![5, 7]).bos_token_id(3).pad_token_id(9);
    assert_eq!(settings(ids.clone(), None).unwrap(), said);
    assert_eq!(settings(json!({}), Some(ids.clone())).unwrap(), said);
    for silent in [json!({}), json!({ "_from_model_config": true, "eos_token_id": null })] {
        assert_eq!(settings(ids.clone(), Some(silent)).unwrap(), GenerationConfig::new());
    }
    // Other generation settings that models had in config.json before the file existed, and fields that are
    // no such settings or do not affect the text.
    let legacy = json!({
        "eos_token_id": null, "bos_token_id": null, "do_sample": true, "temperature": 0.3, "max_length": 33, "suppress_tokens": [7],
        "forced_decoder_ids": [[1, 2]], "seed": 4, "use_cache": false,
    });
    let said =
        GenerationConfig::new().do_sample(true).temperature(0.3).max_length(33).suppress_tokens(vec![7]);
    assert_eq!(settings(legacy.clone(), None).unwrap(), said);
    assert_eq!(settings(legacy, Some(json!({}))).unwrap(), GenerationConfig::new());
    let error = settings(json!({ "temperature": "hot" }), None).unwrap_err().to_string();
    assert!(error.contains("config.json: `temperature`"), "{error}");
}
