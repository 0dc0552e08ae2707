//! Small models and helpers for tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use burn::tensor::{Tensor, TensorData};
use kiln::{
    DtypeChoice, GenerationConfig, Model, ModelBuilder, TokenId,
    device::Opened,
    expert::{
        Batch, ConfigFile, Logits, ModelCache, files::FolderSource, kernels::Choice, models, read_back,
    },
};
use kiln_testkit::conformance::{self, Line, Setup, Summary};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Sizes of a Llama with random weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Llama {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) intermediate: usize,
    pub(crate) vocab: usize,
}

pub(crate) const TINY: Llama =
    Llama { layers: 2, hidden: 32, heads: 4, kv_heads: 2, intermediate: 48, vocab: 97 };

impl Llama {
    pub(crate) fn config(self) -> ConfigFile {
        ConfigFile::from_json(json!({
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1 << 20,
        }))
    }

    /// Names and shapes of the tensors in a folder.
    pub(crate) fn tensors(self) -> Vec<(String, Vec<usize>)> {
        let Self { layers, hidden, heads, kv_heads, intermediate, vocab } = self;
        let keys = hidden / heads * kv_heads;
        let outside = [
            ("model.embed_tokens", vec![vocab, hidden]),
            ("model.norm", vec![hidden]),
            ("lm_head", vec![vocab, hidden]),
        ];
        let of_layer = [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![intermediate, hidden]),
            ("mlp.up_proj", vec![intermediate, hidden]),
            ("mlp.down_proj", vec![hidden, intermediate]),
        ];
        let layer = |i: usize| {
            of_layer.clone().map(|(name, shape)| (format!("model.layers.{i}.{name}.weight"), shape))
        };
        let outside = outside.map(|(name, shape)| (format!("{name}.weight"), shape));
        outside.into_iter().chain((0..layers).flat_map(layer)).collect()
    }
}

/// Creates a model folder with random weights.
pub(crate) fn folder(config: &Value, tensors: &[(String, Vec<usize>)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut seed = 3u32;
    let mut next = |name: &str| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let number = (seed >> 8) as f32 / (1 << 24) as f32 - 0.5;
        if name.contains("norm") { 1.0 + number / 4.0 } else { number / 4.0 }
    };
    let bytes = tensors.iter().map(|(name, shape)| {
        let numbers = (0..shape.iter().product()).flat_map(|_: usize| next(name).to_le_bytes());
        (name, shape, numbers.collect::<Vec<u8>>())
    });
    let bytes: Vec<_> = bytes.collect();
    let views = bytes
        .iter()
        .map(|(name, shape, data)| (name, TensorView::new(Dtype::F32, (*shape).clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Names of the recorded text models, one for each architecture: that of its `model_type`.
pub(crate) fn architectures() -> impl Iterator<Item = &'static str> {
    // `whisper` is a speech model and `bert` one of embeddings; they have separate tests.
    models::ARCHITECTURES
        .iter()
        .map(|architecture| architecture.model_type())
        .filter(|name| !["whisper", "bert"].contains(name))
}

/// Returns the fixtures folder that has the recorded model `name`.
pub(crate) fn fixtures_of(name: &str) -> PathBuf {
    let folders = [
        "5.23.0",
        "5.23.0-mamba",
        "5.23.0-experts",
        "5.23.0-decoders",
        "5.23.0-states",
        "5.23.0-gemma4",
        "5.23.0-multimodal",
        "5.23.0-embeddings",
    ]
    .map(fixtures);
    let found = folders.into_iter().find(|folder| folder.join("models").join(name).is_dir());
    found.unwrap_or_else(|| panic!("no fixtures folder has a model `{name}`"))
}

/// Returns a folder of fixtures.
pub(crate) fn fixtures(version: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(format!("transformers-{version}"))
}

/// Configures `model` for `device`, with the type in which results are compared.
pub(crate) fn float32<'a>(model: ModelBuilder<'a>, device: &Opened) -> ModelBuilder<'a> {
    model.opened(device.clone()).dtype(DtypeChoice::F32)
}

/// Loads the recorded model `name` in float32.
pub(crate) fn recorded(name: &str, device: &Opened) -> Model {
    let folder = fixtures_of(name).join("models").join(name);
    float32(Model::builder(&folder), device).load().unwrap()
}

/// Loads the recorded `llama` with kernels of one kind.
pub(crate) fn llama_with(device: &Opened, kernels: Choice) -> Model {
    let folder = fixtures("5.23.0").join("models/llama");
    float32(Model::builder(folder), device).kernels(kernels).load().unwrap()
}

/// Returns settings for exactly `n` greedy tokens, without end tokens.
pub(crate) fn greedy(n: usize) -> GenerationConfig {
    GenerationConfig::new().max_new_tokens(n).do_sample(false).eos_token_id(Vec::new())
}

/// Returns the logits of every token of `batch`, fed in as many pieces as the cache requires: `[rows, tokens,
/// vocab]`.
pub(crate) fn forward(model: &Model, batch: &Batch, cache: &mut ModelCache) -> Vec<f32> {
    let (mut start, mut logits) = (0, Vec::new());
    while start < batch.len() {
        let n = cache.at_once().unwrap_or(batch.len()).min(batch.len() - start);
        logits.push(model.causal().forward(&batch.slice(start..start + n), Logits::All, cache).unwrap());
        start += n;
    }
    floats(Tensor::cat(logits, 1))
}

pub(crate) fn batch(model: &Model, rows: &[Vec<TokenId>]) -> Batch {
    Batch::from_rows(rows, model.device()).unwrap()
}

pub(crate) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data: TensorData = read_back::read(tensor).unwrap();
    data.iter::<f32>().collect()
}

/// Tolerance of logits of about 10: float32 sums of up to a few hundred terms in another order, through a few
/// layers.
pub(crate) const CLOSE: f32 = 2e-4;

#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest <= CLOSE, "{what}: differs by {largest}");
}

/// Runs the test `name` of this binary again in a separate process, on `devices` only if they are given.
#[track_caller]
pub(crate) fn alone(name: &str, devices: Option<&str>) {
    alone_with(name, devices, &[]);
}

/// Runs a test like [`alone`], with additional environment variables.
#[track_caller]
pub(crate) fn alone_with(name: &str, devices: Option<&str>, set: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(ALONE, name).envs(set.iter().copied());
    if let Some(devices) = devices {
        child.env("KILN_TEST_DEVICES", devices);
    }
    let child = child.output().unwrap();
    let [out, err] = [&child.stdout, &child.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    let what = format!("{name} on {devices:?}: {:?}\n{out}{err}", child.status);
    assert!(child.status.success() && out.contains("1 passed"), "{what}");
    assert!(!err.contains("panicked"), "{what}");
    println!("{out}");
}

const ALONE: &str = "KILN_TEST_ALONE";

/// Whether this is the process that [`alone`] started.
pub(crate) fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs the recorded cases of a folder that are wanted.
pub(crate) fn run_cases(
    folder: &Path,
    wanted: &mut dyn FnMut(&str) -> bool,
    setup: &Setup,
    report: &mut dyn FnMut(&Line),
) -> Summary {
    let mut report = |line: &Line| {
        report(line);
        Ok::<(), kiln::Error>(())
    };
    let folder = Arc::new(FolderSource::new(folder));
    read_back::block_on(conformance::run(folder, wanted, setup, &mut report)).unwrap()
}

/// Whether `KILN_TEST_CASES` has this value: `some` shortens long tests, `many-rows` leaves out the cases of
/// kernels with few rows.
pub(crate) fn cases_are(value: &str) -> bool {
    std::env::var("KILN_TEST_CASES").is_ok_and(|cases| cases == value)
}

/// All items, or every second of them where long tests are to be shorter.
pub(crate) fn some<T>(items: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    items.into_iter().step_by(if cases_are("some") { 2 } else { 1 })
}

/// All items on the CPU, and on other devices every third where long tests are to be shorter: without a GPU,
/// these are imitated, which takes long.
pub(crate) fn some_on<T>(device: &str, items: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let is_short = cases_are("some") && device != "cpu";
    items.into_iter().step_by(if is_short { 3 } else { 1 })
}
