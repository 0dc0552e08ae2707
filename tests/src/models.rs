//! Models through the public API: equivalent results and refused inputs.

use std::fs;

use kiln::{
    DtypeChoice, Error, GenerationConfig, Model, ModelBuilder, Plan, TokenId,
    burn::tensor::DType,
    device::{self, DeviceClass, DeviceName, Opened},
    expert::{Batch, ConfigFile, Logits},
};

use crate::support::{
    Llama, TINY, architectures, assert_close, batch, fixtures_of, float32, floats, greedy, recorded,
};

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

fn dynamic() -> Plan {
    Plan::dynamic()
}

#[test]
fn a_padded_row_gives_the_logits_of_the_row_alone() {
    for (opened, name) in devices().flat_map(|opened| architectures().map(move |name| (opened, name))) {
        let model = recorded(name, opened);
        // Longer than the windows of the models that have one, which hold 8 tokens.
        let rows = [vec![5, 6, 7], (20..33).collect(), vec![1]];
        let padded = Batch::left_padded(&rows, 0, model.device()).unwrap();
        let mut cache = model.cache(&dynamic()).unwrap();
        let together = floats(model.causal().forward(&padded, Logits::Last, &mut cache).unwrap());
        for (row, got) in rows.iter().zip(together.chunks(97)) {
            let mut cache = model.cache(&dynamic()).unwrap();
            let alone = batch(&model, std::slice::from_ref(row));
            let alone = floats(model.causal().forward(&alone, Logits::Last, &mut cache).unwrap());
            assert_close(got, &alone, &format!("{name}, {row:?} on {}", opened.info.name));
        }
    }
}

#[test]
fn rows_of_a_batch_generate_what_they_would_alone() {
    for opened in devices() {
        let model = recorded("llama", opened);
        let prompts = vec![vec![5, 6, 7], vec![9, 8, 7, 6, 5, 4, 3, 2]];
        let run = |prompts: Vec<Vec<TokenId>>| {
            let rows = prompts.len();
            let mut cache = model.cache(&dynamic()).unwrap();
            let mut out = vec![Vec::new(); rows];
            for step in model.generate(prompts).cache(&mut cache).config(greedy(8)).steps().unwrap() {
                for (out, token) in out.iter_mut().zip(step.unwrap().tokens) {
                    out.extend(token);
                }
            }
            out
        };
        let together = run(prompts.clone());
        for (prompt, together) in prompts.into_iter().zip(together) {
            assert_eq!(run(vec![prompt]), [together], "on {}", opened.info.name);
        }
    }
}

#[test]
fn the_head_makes_logits_of_hidden_states() {
    for (opened, name) in devices().flat_map(|opened| architectures().map(move |name| (opened, name))) {
        let model = recorded(name, opened);
        let run = |logits| {
            let mut cache = model.cache(&dynamic()).unwrap();
            let rows = Batch::left_padded(&[vec![5, 6, 7], (20..33).collect()], 0, model.device()).unwrap();
            model.causal().forward(&rows, logits, &mut cache).unwrap()
        };
        let hidden = run(Logits::Hidden);
        assert_eq!(hidden.dims(), [2, 13, model.sizes().hidden]);
        let logits = floats(model.causal().head(hidden));
        assert_close(&logits, &floats(run(Logits::All)), &format!("{name} on {}", opened.info.name));
    }
}

/// Matrices in one piece, and split into blocks that fit a small binding, also across the parts of a fused
/// matrix.
#[test]
fn matrices_larger_than_a_binding_are_split() {
    for opened in devices() {
        for name in ["llama", "llama_tied", "phi3", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe"] {
            let folder = fixtures_of(name).join("models").join(name);
            let load = |largest_binding| {
                float32(Model::builder(&folder), opened).largest_binding(largest_binding).load().unwrap()
            };
            let logits = |model: &Model| {
                let mut cache = model.cache(&dynamic()).unwrap();
                let batch = batch(model, &[vec![0, 1, 30, 31, 32, 95, 96]]);
                floats(model.causal().forward(&batch, Logits::All, &mut cache).unwrap())
            };
            let whole = logits(&load(None));
            // 97 rows of 128 bytes: in blocks of 31 rows, 48 (and one of 1), 62, and 96.
            for limit in [4095, 6144, 8000, 12_415] {
                assert_close(&logits(&load(Some(limit))), &whole, &format!("{name}, {limit} bytes"));
            }
            let builder = float32(Model::builder(&folder), opened).largest_binding(127);
            let error = builder.load().unwrap_err().to_string();
            assert!(error.contains("binds at most 127"), "rows are not cut: {error}");
        }
    }
}

#[test]
fn half_precision_is_close_to_float32() {
    let types = [(DtypeChoice::F16, true, 11), (DtypeChoice::Bf16, false, 8)];
    let able = types.into_iter().flat_map(|(dtype, is_float16, bits)| {
        devices()
            .filter(move |opened| opened.half_dtype(is_float16).is_some())
            .map(move |opened| (opened, dtype, bits))
    });
    for ((opened, dtype, bits), name) in able.flat_map(|able| architectures().map(move |name| (able, name))) {
        let folder = fixtures_of(name).join("models").join(name);
        let half = Model::builder(&folder).opened(opened.clone()).dtype(dtype).load().unwrap();
        let single = recorded(name, opened);
        let run = |model: &Model| {
            let mut cache = model.cache(&dynamic()).unwrap();
            let batch = batch(model, &[(0..20).collect()]);
            floats(model.causal().forward(&batch, Logits::All, &mut cache).unwrap())
        };
        let (half, single) = (run(&half), run(&single));
        assert_ne!(half, single, "{name} in {dtype}");
        // Logits reach about 10; each rounding changes them by a factor of 2^-bits, with a few dozen
        // roundings per logit.
        let bound = 10.0 * 2f32.powi(-bits) * 30.0;
        let vocabulary = half.len() / 20;
        let is_close = |(half, single): &(&[f32], &[f32])| {
            half.iter().zip(*single).all(|(half, single)| (half - single).abs() < bound)
        };
        let far =
            half.chunks(vocabulary).zip(single.chunks(vocabulary)).filter(|token| !is_close(token)).count();
        // A token chooses other experts if their scores differ by less than the roundings, which are eight
        // times as large in bfloat16.
        let config = fs::read_to_string(folder.join("config.json")).unwrap();
        let most = if dtype == DtypeChoice::F16 { 4 } else { 8 };
        let allowed = if config.contains("num_experts_per_tok") { most } else { 0 };
        assert!(far <= allowed, "{name} in {dtype}: {far} of 20 tokens differ by more than {bound}");
    }
}

#[test]
fn models_beyond_the_range_of_float16_run_in_bfloat16_on_cuda_gpus() {
    for opened in devices().filter(|opened| opened.info.class != DeviceClass::Cpu) {
        let chosen = |class| {
            let mut opened = opened.clone();
            opened.info.class = class;
            opened.natural_dtype(false)
        };
        let is_cuda = matches!(opened.info.name, DeviceName::Cuda(_));
        assert_eq!(chosen(DeviceClass::Discrete), if is_cuda { DType::BF16 } else { DType::F32 });
        assert_eq!(chosen(DeviceClass::Software), DType::F32);
    }
}

#[test]
fn impossible_generations_are_errors_before_they_start() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = float32(ModelBuilder::random(TINY.config()), opened).load().unwrap();
    let mut cache = model.cache(&dynamic()).unwrap();
    let mut refused = |prompts: Vec<Vec<TokenId>>, wanted: &GenerationConfig| {
        model
            .generate(prompts)
            .cache(&mut cache)
            .config(wanted.clone())
            .steps()
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert!(refused(vec![], &greedy(1)).contains("empty"));
    assert!(refused(vec![vec![1], vec![]], &greedy(1)).contains("empty"));
    let outside = refused(vec![vec![1, 97]], &greedy(1));
    assert!(outside.contains("97") && outside.contains("vocabulary"), "{outside}");
    let wrong = GenerationConfig::new().top_p(2.0).do_sample(true);
    assert!(refused(vec![vec![1]], &wrong).contains("top_p"));
}

#[test]
fn a_prompt_without_room_for_a_new_token_is_an_error() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = recorded("llama", opened);
    let positions = model.sizes().positions;
    let mut cache = model.cache(&dynamic()).unwrap();
    let error = model
        .generate(vec![1; positions])
        .cache(&mut cache)
        .config(greedy(1))
        .steps()
        .map(|_| ())
        .unwrap_err();
    assert!(
        matches!(&error, Error::TooLong { why } if why.contains(&format!("{positions} positions"))),
        "{error}"
    );
    // One token fewer leaves room for one token, and no more tokens are generated than fit.
    let wanted = GenerationConfig::new().do_sample(false).eos_token_id(Vec::new());
    let steps =
        model.generate(vec![1; positions - 1]).cache(&mut cache).config(wanted.clone()).steps().unwrap();
    assert_eq!(steps.count(), 1);
}

#[test]
fn scaled_positions_extend_the_limit_of_the_model() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    // 16 trained positions, scaled by 2; the config of YaRN already contains the scaled number.
    assert_eq!(recorded("llama_rope_dynamic", opened).sizes().positions, 32);
    assert_eq!(recorded("llama_rope_yarn", opened).sizes().positions, 64);
}

#[test]
fn missing_and_unknown_devices_are_errors() {
    for name in ["wgpu:99", "cuda:99"] {
        let error = device::open(name.parse::<DeviceName>().unwrap()).unwrap_err();
        assert!(matches!(&error, Error::Device { .. }), "{error}");
    }
    for name in ["gpu", "wgpu:x", "cpu:1", ""] {
        assert!(name.parse::<DeviceName>().is_err(), "{name}");
    }
}

#[test]
fn auto_never_selects_a_software_device() {
    let opened = device::open(DeviceName::Auto).unwrap();
    assert_ne!(opened.info.class, device::DeviceClass::Software);
}

#[test]
fn impossible_sizes_of_random_models_are_errors() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    for sizes in [
        Llama { heads: 0, ..TINY },
        Llama { kv_heads: 3, ..TINY },
        Llama { hidden: 33, ..TINY },
        Llama { layers: usize::MAX, ..TINY },
        Llama { vocab: 0, ..TINY },
    ] {
        assert!(float32(ModelBuilder::random(sizes.config()), opened).load().is_err(), "{sizes:?}");
    }
}

#[test]
fn every_architecture_runs_with_random_weights_for_a_config() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    for name in architectures() {
        let config = ConfigFile::read(&fixtures_of(name).join("models").join(name)).unwrap();
        let model = float32(ModelBuilder::random(config), opened).load().unwrap();
        assert_eq!(model.parameters(), recorded(name, opened).parameters(), "{name}");
        let steps = model.generate(vec![1, 2, 3]).max_new_tokens(3).temperature(0.0).steps().unwrap();
        assert_eq!(steps.map(Result::unwrap).count(), 3, "{name}");
    }
}

#[test]
fn a_config_is_read_from_key_value_pairs() {
    let config: ConfigFile =
        r#"model_type=llama,layer_types=["full_attention", "a,b"], hidden_size = 64,rope_scaling={"a": 1}"#
            .parse()
            .unwrap();
    let want = serde_json::json!({
        "model_type": "llama",
        "layer_types": ["full_attention", "a,b"],
        "hidden_size": 64,
        "rope_scaling": {"a": 1},
    });
    assert_eq!(*config.json(), want);
    for (text, why) in [("hidden_size", "no value"), ("a=1,a=2", "given twice"), ("", "no value")] {
        let refused = text.parse::<ConfigFile>().map(drop).unwrap_err().to_string();
        assert!(refused.contains(why), "{text}: {refused}");
    }
}
