//! LoRA adapters: shared weights, merged and not, packed weights, and input that is refused.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kiln::{DtypeChoice, Mixture, Model, Plan, expert::kernels::Choice};
use kiln_testkit::devices::opened;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

use crate::support::{assert_close, batch, fixtures, forward};

fn base(name: &str) -> PathBuf {
    fixtures("5.23.0-adapters").join("models").join(name)
}

fn adapter(name: &str) -> PathBuf {
    fixtures("5.23.0-adapters").join("adapters").join(name)
}

fn logits(model: &Model) -> Vec<f32> {
    let prompt: Vec<u32> = (0..21).map(|i| i * 7 % 97).collect();
    forward(model, &batch(model, &[prompt]), &mut model.cache(&Plan::dynamic()).unwrap())
}

/// The largest difference.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn adapters_share_a_model_and_equal_merged_ones() {
    for (device, opened) in opened() {
        for (name, adapters) in [
            ("llama", &["llama_all", "llama_patterns"][..]),
            ("mamba2", &["mamba2_in"]),
            ("mixtral", &["mixtral_attention"]),
            ("gpt2", &["gpt2_conv1d"]),
        ] {
            let builder = || Model::builder(base(name)).opened(opened.clone()).dtype(DtypeChoice::F32);
            let model = builder().load().unwrap();
            let before = logits(&model);
            let used = model.budget().used();
            for own in adapters {
                let what = format!("{own} on {device}");
                let adapted = model.with_adapter(adapter(own), 1.0).unwrap();
                assert!(model.budget().used() > used, "{what}: its bytes count");
                assert!(adapted.parameters() > model.parameters());
                assert_ne!(adapted.fingerprint().unwrap(), model.fingerprint().unwrap());
                let got = logits(&adapted);
                assert!(apart(&got, &before) > 0.1, "{what}: it changes the model");
                assert_close(&got, &logits(&builder().adapter(adapter(own), 1.0).load().unwrap()), &what);
                // A factor of 0 changes nothing, and one of 2 more than one of 1.
                assert_eq!(logits(&model.with_adapter(adapter(own), 0.0).unwrap()), before, "{what}");
                assert!(apart(&logits(&model.with_adapter(adapter(own), 2.0).unwrap()), &got) > 0.1);
            }
            assert_eq!(model.budget().used(), used, "adapters give their memory back");
            assert_eq!(logits(&model), before, "{name} on {device}: the model itself stays");
        }
    }
}

#[test]
fn several_adapters_add_up() {
    let [first, second] = ["llama_all", "llama_patterns"].map(adapter);
    let builder = |dtype| Model::builder(base("llama")).device("cpu".parse().unwrap()).dtype(dtype);
    let merged = |dtype| builder(dtype).adapter(&first, 0.5).adapter(&second, 1.0).load().unwrap();
    let model = builder(DtypeChoice::F32).load().unwrap();
    let both = model.with_adapter(&second, 1.0).unwrap().with_adapter(&first, 0.5).unwrap();
    let found = logits(&both);
    assert_close(&found, &logits(&merged(DtypeChoice::F32)), "in any order");
    // Reference kernels have dense weights, which are changed.
    let dense =
        builder(DtypeChoice::F32).kernels(Choice::Reference).adapter(&first, 0.5).adapter(&second, 1.0);
    assert_close(&found, &logits(&dense.load().unwrap()), "merged");
    // Rounding a model of this size to float16 moves its logits by 2.4 % of what the adapters change.
    let change = apart(&found, &logits(&model));
    let error = apart(&found, &logits(&merged(DtypeChoice::F16)));
    assert!(error < 0.05 * change, "{error} of {change}");
}

#[test]
fn packed_weights_keep_adapters_beside_them() {
    for (device, opened) in opened() {
        let builder =
            || Model::builder(base("llama")).opened(opened.clone()).dtype(DtypeChoice::F32).exact(true);
        let packed = || builder().quant(Mixture::Q8_0);
        let own = adapter("llama_all");
        // A small change moves logits by as much, whether weights are packed or not.
        let change = |model: &Model, changed: &Model| -> Vec<f32> {
            logits(changed).iter().zip(logits(model)).map(|(changed, own)| changed - own).collect()
        };
        let dense = change(&builder().load().unwrap(), &builder().adapter(&own, 0.05).load().unwrap());
        let beside = packed().adapter(&own, 0.05).load().unwrap();
        let got = change(&packed().load().unwrap(), &beside);
        let largest = dense.iter().fold(0.0f32, |largest, change| largest.max(change.abs()));
        let error = apart(&got, &dense);
        assert!(error < 0.15 * largest, "on {device}: {error} of {largest}");
        // On a GPU, matrices that are not packed are merged in one of them.
        let shared = packed().load().unwrap().with_adapter(&own, 0.05).unwrap();
        assert_close(&logits(&shared), &logits(&beside), &format!("on {device}"));
    }
}

#[test]
fn a_cache_belongs_to_the_adapter_that_made_it() {
    let model = Model::builder(base("llama")).device("cpu".parse().unwrap()).load().unwrap();
    let adapted = model.with_adapter(adapter("llama_all"), 1.0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (file, plan) = (folder.path().join("cache"), Plan::dynamic());
    let mut sequence = kiln::Sequence::new(&adapted, &plan).unwrap();
    let steps = adapted.generate(vec![1, 2, 3]).max_new_tokens(4).sequence(&mut sequence);
    steps.steps().unwrap().for_each(|step| drop(step.unwrap()));
    sequence.save(&adapted, &plan, &file).unwrap();
    assert!(kiln::Sequence::load(&adapted, &plan, &file).is_ok());
    let error = kiln::Sequence::load(&model, &plan, &file).unwrap_err().to_string();
    assert!(error.contains("another model"), "{error}");
}

/// Name and shape of a tensor.
type Shaped = (String, Vec<usize>);

/// Copies an adapter and edits its config, and the shapes of its tensors by their names.
fn edited(
    config: impl Fn(&mut Value),
    tensors: impl Fn(&str, Vec<usize>) -> Option<Shaped>,
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let from = adapter("llama_all");
    let read = |name: &str| fs::read(Path::new(&from).join(name)).unwrap();
    let mut json: Value = serde_json::from_slice(&read("adapter_config.json")).unwrap();
    config(&mut json);
    fs::write(folder.path().join("adapter_config.json"), json.to_string()).unwrap();
    let bytes = read("adapter_model.safetensors");
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), 1 << 14).flatten().collect();
    let views: Vec<(String, TensorView<'_>)> = all
        .tensors()
        .into_iter()
        .filter_map(|(name, view)| {
            let (name, shape) = tensors(&name, view.shape().to_vec())?;
            let bytes = 4 * shape.iter().product::<usize>();
            Some((name, TensorView::new(Dtype::F32, shape, &ones[..bytes]).unwrap()))
        })
        .collect();
    safetensors::serialize_to_file(views, None, &folder.path().join("adapter_model.safetensors")).unwrap();
    folder
}

#[test]
fn bad_adapters_are_refused_by_name() {
    let model = Model::builder(base("llama")).device("cpu".parse().unwrap()).load().unwrap();
    let refused = |folder: &Path| model.with_adapter(folder, 1.0).unwrap_err().to_string();
    let kept = |name: &str, shape: Vec<usize>| Some((name.to_owned(), shape));
    let config =
        |field: &'static str, value: Value| refused(edited(|json| json[field] = value.clone(), kept).path());
    let of_tensors = |change: fn(&str, Vec<usize>) -> Option<Shaped>| refused(edited(|_| (), change).path());
    for (error, said) in [
        (config("use_dora", json!(true)), "`use_dora`"),
        (config("modules_to_save", json!(["lm_head"])), "`modules_to_save`"),
        (config("bias", json!("lora_only")), "has biases"),
        (config("peft_type", json!("IA3")), "`IA3`"),
        (config("init_lora_weights", json!("pissa_niter_4")), "`pissa_niter_4`"),
        (config("r", json!(0)), "rank 0"),
        (config("r", json!(8)), "belongs to another model"),
        (config("lora_alpha", json!("x")), "invalid type"),
        (config("rank_pattern", json!({ ".*q_proj": 4 })), "only names of modules"),
        (config("alpha_pattern", json!({ "no_proj": 4 })), "`no_proj`, which no module has"),
        (config("lora_alpha", json!(1e300)), "not finite"),
        (config("a_new_field", json!(3)), "`a_new_field`"),
        (
            of_tensors(|name, shape| {
                (!name.ends_with("q_proj.lora_A.weight")).then(|| (name.to_owned(), shape))
            }),
            "only one",
        ),
        (of_tensors(|_, _| None), "no tensors"),
        (
            of_tensors(|name, shape| Some((name.replace("lora_A.weight", "lora_magnitude_vector"), shape))),
            "not one of LoRA's",
        ),
        (
            of_tensors(|name, shape| Some((name.replace("q_proj", "qq_proj"), shape))),
            "`model.layers.0.self_attn.qq_proj`",
        ),
        (
            of_tensors(|name, shape| Some((name.to_owned(), shape.iter().map(|n| n + 1).collect()))),
            "another model",
        ),
        (refused(&adapter("gpt2_conv1d")), "which this model does not have"),
        (refused(Path::new("/nowhere")), "is missing"),
    ] {
        assert!(error.contains(said), "{said}: {error}");
    }
    // Experts cannot be changed.
    let mixtral = Model::builder(base("mixtral")).device("cpu".parse().unwrap()).load().unwrap();
    let folder = edited(
        |_| (),
        |name, shape| {
            let module = "mlp.experts.0.gate_proj";
            name.contains("layers.0.mlp.gate_proj").then(|| (name.replace("mlp.gate_proj", module), shape))
        },
    );
    let error = mixtral.with_adapter(folder.path(), 1.0).unwrap_err().to_string();
    assert!(error.contains("experts"), "{error}");
    let error = model.with_adapter(adapter("llama_all"), f32::NAN).unwrap_err().to_string();
    assert!(error.contains("NaN"), "{error}");
}

#[test]
fn the_first_pattern_that_fits_counts() {
    let model = Model::builder(base("llama")).device("cpu".parse().unwrap()).load().unwrap();
    let with = |patterns: Value| {
        let folder = edited(
            |json| json["alpha_pattern"] = patterns.clone(),
            |name, shape| Some((name.to_owned(), shape)),
        );
        logits(&model.with_adapter(folder.path(), 1e-4).unwrap())
    };
    let long_first = with(json!({ "self_attn.q_proj": 64, "q_proj": 8 }));
    assert_eq!(long_first, with(json!({ "self_attn.q_proj": 64 })));
    assert_ne!(long_first, with(json!({ "q_proj": 8, "self_attn.q_proj": 64 })));
    assert_eq!(with(json!(null)), with(json!({})));
}
