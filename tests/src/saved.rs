//! Caches saved to disk.

use std::{collections::HashMap, path::Path};

use kiln::{
    DtypeChoice, Error, Model, ModelBuilder, OnOutOfMemory, Plan, Sequence, TokenId, burn::tensor::DType,
    expert::ModelCache,
};
use safetensors::{SafeTensors, tensor::TensorView};

use crate::support::{TINY, batch, fixtures, fixtures_of, float32, floats, forward, greedy, recorded};

const PROMPT: [TokenId; 20] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 97 - 1, 79, 32, 38, 46, 26, 43, 38, 32];

fn filled(model: &Model, plan: &Plan) -> ModelCache {
    let mut cache = model.cache(plan).unwrap();
    forward(model, &batch(model, &[PROMPT.to_vec()]), &mut cache);
    cache
}

#[test]
fn a_loaded_cache_continues_as_if_never_saved() {
    let folder = tempfile::tempdir().unwrap();
    for (device, opened) in kiln_testkit::devices::opened() {
        // The second model has layers with a window, and the third has no keys.
        let models = ["llama", "gemma2", "mamba"].map(|name| recorded(name, opened)).into_iter();
        // States, and some scales, are float32 there, too.
        let halves = ["llama", "mamba"].into_iter().filter(|_| opened.device.supports_dtype(DType::F16));
        let halves = halves.map(|name| {
            let folder = fixtures_of(name).join("models").join(name);
            Model::builder(folder).opened(opened.clone()).dtype(DtypeChoice::F16).load().unwrap()
        });
        for model in models.chain(halves) {
            let needs = model.causal().needs();
            for text in kiln::expert::cache_samples() {
                let plan = Plan::named(&text).unwrap();
                if plan.check(&needs).is_err() {
                    continue;
                }
                let path = folder.path().join("cache.safetensors");
                let (mut saved, mut never) = (filled(&model, &plan), filled(&model, &plan));
                let result = model.save_cache(&path, &plan, &mut saved, &[PROMPT.to_vec()], &[0]);
                if !plan.remembers(&needs) {
                    assert!(matches!(result, Err(Error::Setting { name: "cache", .. })), "{text}");
                    assert!(model.check_saving(&path, &plan).is_err(), "it is known before");
                    continue;
                }
                result.unwrap();
                let described = model.plan_of_saved(&path).unwrap();
                assert_eq!(described, plan);
                let mut loaded = model.load_cache(&path, &described).unwrap();
                assert_eq!((loaded.tokens, loaded.left_pad), (vec![PROMPT.to_vec()], vec![0]));
                for token in [7, 8, 9] {
                    let next = batch(&model, &[vec![token]]);
                    let want = forward(&model, &next, &mut never);
                    assert_eq!(forward(&model, &next, &mut loaded.cache), want, "{text} on {device}, loaded");
                    assert_eq!(forward(&model, &next, &mut saved), want, "{text} on {device}, saved");
                }
            }
        }
    }
}

/// A cache that was packed after memory ran out is saved in packed form.
#[test]
fn a_cache_that_was_quantized_midway_is_saved_as_quantized() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    for (device, opened) in kiln_testkit::devices::opened() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let model = float32(Model::builder(&demo), opened).memory(1 << 30).load().unwrap();
        let plan = Plan::dynamic();
        let mut sequence = Sequence::new(&model, &plan).unwrap();
        let prompt: Vec<TokenId> = (0..200).map(|i| 40 + i % 300).collect();
        let limit = model.weight_bytes() + 1_200_000;
        model.budget().set_limit(Some(limit));
        let go_on = |sequence: &mut Sequence, rows: Vec<TokenId>| -> Vec<Option<TokenId>> {
            let steps = model
                .generate(rows)
                .sequence(sequence)
                .config(greedy(20))
                .on_oom(OnOutOfMemory::Quantize)
                .steps()
                .unwrap();
            steps.map(|step| step.unwrap().tokens[0]).collect()
        };
        go_on(&mut sequence, prompt);
        assert!(
            sequence.cache().strategies().all(|name| name == Some("quantized")),
            "it was packed on {device}"
        );
        sequence.save(&model, &plan, &path).unwrap();
        let became = model.plan_of_saved(&path).unwrap();
        assert_eq!(became.global.to_string(), "quantized");
        let mut loaded = Sequence::load(&model, &became, &path).unwrap();
        let rows = sequence.tokens()[0].clone();
        assert_eq!(go_on(&mut loaded, rows.clone()), go_on(&mut sequence, rows), "on {device}");
    }
}

/// A prompt that was fed without a generation is saved, and the next generation continues as usual.
#[test]
fn a_prompt_can_be_saved_before_any_generation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        for text in kiln::expert::cache_samples() {
            let plan = Plan::named(&text).unwrap();
            if plan.check(&model.causal().needs()).is_err() || !plan.remembers(&model.causal().needs()) {
                continue;
            }
            // The positions of tokens in a sink cache of version 4.47, and the tokens that a cache smaller
            // than the prompt evicts, depend on how many tokens are fed at once.
            let at_once = model.cache(&plan).unwrap().at_once();
            if text.contains("compat") || at_once.is_some_and(|most| most < PROMPT.len()) {
                continue;
            }
            let run = |sequence: &mut Sequence| -> Vec<Option<TokenId>> {
                let rows = vec![PROMPT.to_vec()];
                let steps = model.generate(rows).sequence(sequence).config(greedy(6)).steps().unwrap();
                steps.map(|step| step.unwrap().tokens[0]).collect()
            };
            let mut fed = Sequence::new(&model, &plan).unwrap();
            model.generate(vec![PROMPT.to_vec()]).sequence(&mut fed).prefill().unwrap();
            // In packed caches, the rounding error of a product of 19 rather than 20 rows may change a code.
            let want = match plan.global.strategy.name {
                "quantized" => run(&mut fed.snapshot()),
                _ => run(&mut Sequence::new(&model, &plan).unwrap()),
            };
            assert_eq!((fed.len(), fed.tokens()), (PROMPT.len() - 1, &[PROMPT.to_vec()][..]), "{text}");
            fed.save(&model, &plan, &path).unwrap();
            let mut loaded = Sequence::load(&model, &plan, &path).unwrap();
            let reused = model.generate(PROMPT.to_vec()).sequence(&mut loaded).config(greedy(1)).steps();
            assert_eq!(reused.unwrap().reuse().fed, 1, "{text} on {device} feeds one token");
            assert_eq!(run(&mut Sequence::load(&model, &plan, &path).unwrap()), want, "{text} on {device}");
        }
        let mut sequence = Sequence::new(&model, &Plan::dynamic()).unwrap();
        let refused = model.generate(vec![vec![1]]).sequence(&mut sequence).prefill();
        assert!(matches!(refused, Err(Error::Prompt { .. })));
    }
}

#[test]
fn padded_rows_can_be_saved_and_loaded() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = recorded("llama", opened);
    let plan = Plan::dynamic();
    let rows = vec![vec![5, 6, 7], vec![9, 8, 7, 6, 5]];
    let padded = kiln::expert::Batch::left_padded(&rows, 0, model.device()).unwrap();
    let mut cache = model.cache(&plan).unwrap();
    model.causal().forward(&padded, kiln::expert::Logits::Last, &mut cache).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    model.save_cache(&path, &plan, &mut cache, &rows, &[2, 0]).unwrap();
    let mut loaded = model.load_cache(&path, &plan).unwrap();
    assert_eq!((loaded.tokens, loaded.left_pad.clone()), (rows, vec![2, 0]));
    let mut next = batch(&model, &[vec![1], vec![2]]);
    next.left_pad = loaded.left_pad;
    let run = |cache| floats(model.causal().forward(&next, kiln::expert::Logits::Last, cache).unwrap());
    assert_eq!(run(&mut loaded.cache), run(&mut cache));
}

/// Every kind of damage or mismatch gives an error of one sentence.
#[test]
fn damaged_and_mismatched_files_are_errors() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = recorded("llama", opened);
    let plan = Plan::dynamic();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let mut cache = filled(&model, &plan);
    model.save_cache(&path, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap();
    let whole = std::fs::read(&path).unwrap();

    let refused = |model: &Model, plan: &str, bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        match model.load_cache(&path, &Plan::named(plan).unwrap()) {
            Err(Error::File { why, .. }) => why,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("was taken"),
        }
    };
    let other = recorded("llama_tied", opened);
    assert!(refused(&other, "dynamic", &whole).contains("another model"));
    assert!(refused(&model, "sink:window=12,sinks=3", &whole).contains("`dynamic`"));
    assert!(refused(&model, "dynamic", &whole[..whole.len() - 1]).contains("not a whole"));
    assert!(refused(&model, "dynamic", &[]).contains("not a whole"));
    assert!(refused(&model, "dynamic", b"hello, this is no such file at all").contains("not a whole"));
    // A weight file is also a safetensors file.
    let weights = std::fs::read(fixtures("5.23.0").join("models/llama/model.safetensors")).unwrap();
    assert!(refused(&model, "dynamic", &weights).contains("not a cache"));
    // Flips a bit anywhere. Bytes that are only spaces of the header may change without harm.
    for at in (0..whole.len()).step_by(97) {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        std::fs::write(&path, &flipped).unwrap();
        if let Ok(mut loaded) = model.load_cache(&path, &plan) {
            let next = batch(&model, &[vec![1]]);
            let mut whole = filled(&model, &plan);
            let want = forward(&model, &next, &mut whole);
            assert_eq!(forward(&model, &next, &mut loaded.cache), want, "a flipped bit at {at} was taken");
        }
    }
    // Too small for the saved tokens.
    let fixed = Plan::named("static:len=64").unwrap();
    let mut cache = filled(&model, &fixed);
    model.save_cache(&path, &fixed, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert!(refused(&model, "static:len=8", &bytes).contains("`static:len=64`"));
}

/// Files with a valid checksum and contents that no layer could have saved.
#[test]
fn forged_contents_with_a_valid_checksum_are_errors() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = recorded("llama", opened);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    for text in kiln::expert::cache_samples() {
        let plan = Plan::named(&text).unwrap();
        if plan.check(&model.causal().needs()).is_err() || !plan.remembers(&model.causal().needs()) {
            continue;
        }
        let mut cache = filled(&model, &plan);
        model.save_cache(&path, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let refused = |what: &str, forge: &dyn Fn(&mut serde_json::Value, &mut Tensors)| {
            std::fs::write(&path, forged(&whole, forge)).unwrap();
            match model.load_cache(&path, &plan) {
                Err(Error::File { .. } | Error::Full { .. }) => {}
                other => panic!("{text}, {what}: {other:?}"),
            }
        };
        refused("padding without end", &|header, _| header["left_pad"] = serde_json::json!([1u64 << 63]));
        refused("padding behind the tokens", &|header, _| header["left_pad"] = serde_json::json!([400]));
        refused("no row", &|header, _| {
            header["left_pad"] = serde_json::json!([]);
            header["tokens"] = serde_json::json!([]);
        });
        refused("rows that are not in the tensors", &|header, _| {
            header["left_pad"] = serde_json::json!([0, 0]);
            header["tokens"] = serde_json::json!([PROMPT, PROMPT]);
        });
        refused("a token that is not in the vocabulary", &|header, _| {
            header["tokens"][0][3] = serde_json::json!(1 << 30)
        });
        refused("too few tokens", &|header, _| header["tokens"] = serde_json::json!([[1]]));
        refused("other floats", &|_, tensors| {
            for (dtype, shape, bytes) in
                tensors.values_mut().filter(|(dtype, ..)| *dtype == safetensors::Dtype::F32)
            {
                *dtype = safetensors::Dtype::F16;
                bytes.truncate(shape.iter().product::<usize>() * 2);
            }
        });
        let whole_tensors = SafeTensors::deserialize(&whole).unwrap();
        for name in whole_tensors.names() {
            if whole_tensors.tensor(name).unwrap().shape().len() < 4 {
                continue;
            }
            refused(&format!("{name} of twice the rows"), &|_, tensors| {
                let (_, shape, bytes) = tensors.get_mut(name).unwrap();
                shape[0] *= 2;
                bytes.extend(bytes.clone());
            });
        }
        let none = Plan::named("none").unwrap();
        let stateless = forged(&whole, &|header, tensors| {
            tensors.clear();
            header["cache"] = serde_json::json!("none");
            for layer in header["layers"].as_array_mut().unwrap() {
                (layer["counts"], layer["slots"]) = (serde_json::Value::Null, serde_json::json!([]));
            }
        });
        std::fs::write(&path, stateless).unwrap();
        assert!(model.load_cache(&path, &none).is_err(), "{text}: a length of what holds nothing");
        refused("integers where there were floats", &|_, tensors| {
            for (dtype, ..) in tensors.values_mut() {
                *dtype = if *dtype == safetensors::Dtype::F32 {
                    safetensors::Dtype::I32
                } else {
                    safetensors::Dtype::F32
                };
            }
        });
        for count in [u64::MAX, 1 << 63, 1 << 40, 1 << 20] {
            refused("counts", &|header, _| {
                for layer in header["layers"].as_array_mut().unwrap() {
                    set_numbers(&mut layer["counts"], count);
                    layer["seq_len"] = serde_json::json!(count);
                }
            });
            refused("tensors of a slot", &|header, _| {
                header["layers"][0]["slots"][0] = serde_json::json!(count)
            });
        }
        refused("a layer too few", &|header, _| _ = header["layers"].as_array_mut().unwrap().pop());
    }
}

/// Sets every number in `value` to `to`.
fn set_numbers(value: &mut serde_json::Value, to: u64) {
    match value {
        serde_json::Value::Number(number) => *number = to.into(),
        serde_json::Value::Array(all) => all.iter_mut().for_each(|value| set_numbers(value, to)),
        serde_json::Value::Object(all) => all.values_mut().for_each(|value| set_numbers(value, to)),
        _ => {}
    }
}

/// Types, shapes and bytes by tensor name.
type Tensors = HashMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// Returns a modified saved cache with an updated checksum.
fn forged(whole: &[u8], forge: &dyn Fn(&mut serde_json::Value, &mut Tensors)) -> Vec<u8> {
    use sha2::{Digest, Sha256};

    let file = SafeTensors::deserialize(whole).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(whole).unwrap();
    let mut metadata = metadata.metadata().clone().unwrap();
    let mut header: serde_json::Value = serde_json::from_str(&metadata["header"]).unwrap();
    let copy = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let mut tensors: Tensors = file.tensors().into_iter().map(|(name, view)| (name, copy(view))).collect();
    forge(&mut header, &mut tensors);
    let text = header.to_string();
    let mut hash = Sha256::new();
    hash.update(&text);
    for (layer, state) in header["layers"].as_array().unwrap().iter().enumerate() {
        for (slot, count) in state["slots"].as_array().unwrap().iter().enumerate() {
            for i in 0..count.as_u64().unwrap().min(99) {
                if let Some((.., bytes)) = tensors.get(&format!("{layer}.{slot}.{i}")) {
                    hash.update(bytes);
                }
            }
        }
    }
    metadata.insert("header".to_owned(), text);
    metadata.insert("sha256".to_owned(), hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize(views, Some(metadata)).unwrap()
}

#[test]
fn a_cache_of_a_random_model_cannot_be_saved() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
    let plan = Plan::dynamic();
    let mut cache = filled(&model, &plan);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let error = model.save_cache(&path, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap_err();
    assert!(error.to_string().contains("made up"), "{error}");
    assert!(!path.exists());
    // Nothing is lost if a file cannot be written.
    let model = recorded("llama", opened);
    let mut cache = filled(&model, &plan);
    let nowhere = folder.path().join("no/such/folder/cache.safetensors");
    assert!(model.save_cache(&nowhere, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).is_err());
    assert_eq!(cache.seq_len(), PROMPT.len());
    let steps = model.generate(vec![1]).cache(&mut cache).steps();
    assert!(steps.is_ok());
}
