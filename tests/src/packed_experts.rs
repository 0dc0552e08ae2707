//! Mixtures of experts with packed weights give the same results as with the unpacked numbers.

use std::{
    fs,
    io::Cursor,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use kiln::{
    Mixture, Model, ModelBuilder, Plan,
    burn::tensor::DType,
    device::{DeviceName, Opened},
    expert::{
        kernels::{Choice, Kernels},
        models::checkpoint::Checkpoint,
    },
};
use kiln_weights::{
    Format,
    gguf::{Gguf, GgufWriter, NewTensor},
};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::support::{assert_close, batch, float32, folder, forward, greedy};

const HIDDEN: usize = 256;

const EXPERTS: usize = 5;

fn config(model_type: &str, others: Json) -> Json {
    let mut config = json!({
        "model_type": model_type,
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false,
        "sliding_window": null,
        "num_experts_per_tok": 2,
    });
    let others = others.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(others);
    config
}

/// Returns the tensors of a decoder with two blocks, plus those that `of_block` adds to each block.
fn tensors(of_block: impl Fn(&str) -> Vec<(String, Vec<usize>)>) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![97, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![97, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for block in 0..2 {
        let name = format!("model.layers.{block}");
        let mut add = |part: &str, shape: &[usize]| all.push((format!("{name}.{part}"), shape.to_vec()));
        add("input_layernorm.weight", &[HIDDEN]);
        add("post_attention_layernorm.weight", &[HIDDEN]);
        for (part, rows) in [("q", HIDDEN), ("k", HIDDEN / 2), ("v", HIDDEN / 2), ("o", HIDDEN)] {
            add(&format!("self_attn.{part}_proj.weight"), &[rows, HIDDEN]);
        }
        all.extend(of_block(&name));
    }
    all
}

/// Creates a Mixtral whose experts have that intermediate size.
fn mixtral(intermediate: usize) -> TempDir {
    let config =
        config("mixtral", json!({ "intermediate_size": intermediate, "num_local_experts": EXPERTS }));
    let of_block = |block: &str| {
        let mut all = vec![(format!("{block}.block_sparse_moe.gate.weight"), vec![EXPERTS, HIDDEN])];
        for expert in 0..EXPERTS {
            for (part, shape) in [
                ("w1", [intermediate, HIDDEN]),
                ("w3", [intermediate, HIDDEN]),
                ("w2", [HIDDEN, intermediate]),
            ] {
                all.push((format!("{block}.block_sparse_moe.experts.{expert}.{part}.weight"), shape.into()));
            }
        }
        all
    };
    folder(&config, &tensors(of_block))
}

/// Creates a Qwen2-MoE, which has a shared expert.
fn qwen2_moe() -> TempDir {
    let (own, shared) = (256, 512);
    let sizes = json!({
        "intermediate_size": 256, "num_experts": EXPERTS, "moe_intermediate_size": own, "shared_expert_intermediate_size": shared,
        "norm_topk_prob": false, "mlp_only_layers": [], "use_sliding_window": false, "max_window_layers": 28,
    });
    let of_block = |block: &str| {
        let mut all = vec![
            (format!("{block}.mlp.gate.weight"), vec![EXPERTS, HIDDEN]),
            (format!("{block}.mlp.shared_expert_gate.weight"), vec![1, HIDDEN]),
        ];
        for (part, rows) in [("q", HIDDEN), ("k", HIDDEN / 2), ("v", HIDDEN / 2)] {
            all.push((format!("{block}.self_attn.{part}_proj.bias"), vec![rows]));
        }
        let experts = (0..EXPERTS).map(|expert| (format!("experts.{expert}"), own));
        for (name, width) in experts.chain([("shared_expert".to_owned(), shared)]) {
            for (part, shape) in
                [("gate", [width, HIDDEN]), ("up", [width, HIDDEN]), ("down", [HIDDEN, width])]
            {
                all.push((format!("{block}.mlp.{name}.{part}_proj.weight"), shape.into()));
            }
        }
        all
    };
    folder(&config("qwen2_moe", sizes), &tensors(of_block))
}

fn quantize(from: &Path, to: PathBuf, mixture: Mixture) -> PathBuf {
    kiln::quantize(from, &to, mixture, |_| ControlFlow::Continue(())).unwrap();
    to
}

/// Packs some tensors of a file in another format.
fn repack(from: &Path, to: PathBuf, kind: &str, format: Format) -> PathBuf {
    let bytes = fs::read(from).unwrap();
    let header = Gguf::read(&mut Cursor::new(&bytes), bytes.len() as u64).unwrap();
    let format_of = |name: &str, own| if name.contains(kind) { format } else { own };
    let tensor = |tensor: &kiln_weights::gguf::TensorInfo| NewTensor {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        format: format_of(&tensor.name, tensor.format),
    };
    let tensors: Vec<_> = header.tensors().iter().map(tensor).collect();
    assert!(tensors.iter().any(|tensor| tensor.name.contains(kind)), "{kind}");
    let mut writer = GgufWriter::new(fs::File::create(&to).unwrap(), header.metadata(), &tensors).unwrap();
    for (tensor, new) in header.tensors().iter().zip(&tensors) {
        let mut numbers = vec![0.0; tensor.shape.iter().product()];
        let range = tensor.range.start as usize..tensor.range.end as usize;
        tensor.format.unpack(&bytes[range.clone()], &mut numbers).unwrap();
        let mut packed = vec![0; new.format.bytes_of(numbers.len()).unwrap()];
        new.format.pack(&numbers, &mut packed).unwrap();
        writer.write(if new.format == tensor.format { &bytes[range] } else { &packed }).unwrap();
    }
    writer.finish().unwrap();
    to
}

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

/// Returns the logits of few tokens and of many, and generated tokens.
fn results(model: &Model) -> (Vec<f32>, Vec<u32>) {
    let prompt = |n: u32| (0..n).map(|i| i * 31 % 97).collect::<Vec<u32>>();
    let mut logits = Vec::new();
    for tokens in [3, 50] {
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        logits.extend(forward(model, &batch(model, &[prompt(tokens)]), &mut cache));
    }
    let mut cache = model.cache(&Plan::dynamic()).unwrap();
    let steps = model.generate(vec![prompt(5)]).cache(&mut cache).config(greedy(12)).steps().unwrap();
    (logits, steps.flat_map(|step| step.unwrap().tokens).flatten().collect())
}

/// Returns the number of bytes that the weights of a checkpoint are predicted to take on a device.
fn held(checkpoint: &Checkpoint, opened: &Opened, bytes: fn(&Checkpoint, &Kernels, DType) -> u64) -> u64 {
    bytes(checkpoint, &Kernels::new(Choice::Auto, &opened.device).unwrap(), DType::F32)
}

/// Compares a model with packed experts with `wide`, which has the same numbers in float32.
fn compare(name: &str, wide: &Path, sources: &[(&Path, Option<Mixture>)]) {
    for opened in devices() {
        let each = held(&Checkpoint::open(wide).unwrap(), opened, Checkpoint::held_expert_bytes)
            / (2 * EXPERTS) as u64;
        let wide = float32(Model::builder(wide), opened).load().unwrap();
        let (logits, tokens) = results(&wide);
        for &(source, mixture) in sources {
            let mut checkpoint = Checkpoint::open(source).unwrap();
            if let Some(mixture) = mixture {
                checkpoint.pack_as(mixture, None).unwrap();
            }
            for (resident, experts_on) in [(None, None), (Some(1), None), (None, Some(DeviceName::Cpu))] {
                let place =
                    experts_on.map_or_else(|| format!("{resident:?}"), |device| format!("on {device}"));
                let name = format!("{name}, {mixture:?}, {place} on {}", opened.info.name);
                let builder = |exact| -> ModelBuilder<'_> {
                    float32(Model::builder(source), opened)
                        .quant(mixture)
                        .exact(exact)
                        .offload_experts(resident)
                        .experts_on(experts_on)
                };
                let model = builder(true).load().unwrap();
                let bytes = model.weight_bytes() + model.host_weight_bytes();
                // In host memory, matrices with any number of rows stay packed.
                let said = held(&checkpoint, opened, Checkpoint::held_bytes);
                let of_experts = |opened| held(&checkpoint, opened, Checkpoint::held_expert_bytes);
                let said = match experts_on {
                    Some(device) => {
                        said - of_experts(opened) + of_experts(&kiln::device::open(device).unwrap())
                    }
                    None => said,
                };
                assert!(bytes == said || resident.is_some() && bytes < said, "{name}: {bytes}, not {said}");
                assert!(bytes < wide.weight_bytes() * 7 / 10, "{name}: {bytes} of {}", wide.weight_bytes());
                let (found, generated) = results(&model);
                assert_close(&found, &logits, &name);
                assert_eq!(generated, tokens, "{name}");
                if let Some(traffic) = model.expert_traffic() {
                    assert!(
                        traffic.copied > 0 && traffic.bytes < traffic.copied * each * 7 / 10,
                        "{name}: {traffic:?}"
                    );
                    continue;
                }
                // Rounding activations to 8 bits causes errors below 1 %. If two experts are almost equally
                // likely, a token may be routed to the other one.
                let (found, _) = results(&builder(false).load().unwrap());
                let square =
                    |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>().sqrt();
                let off = square(&mut found.iter().zip(&logits).map(|(found, want)| found - want));
                let most = 0.2 * square(&mut logits.iter().copied());
                assert!(off <= most, "{name}: logits are {off} off, and may be {most}");
            }
        }
    }
}

#[test]
fn packed_experts_give_the_logits_of_unpacked_ones() {
    for (name, folder) in [("mixtral", mixtral(256)), ("qwen2_moe", qwen2_moe())] {
        for mixture in [Mixture::Q8_0, Mixture::Q4KM] {
            let files = tempfile::tempdir().unwrap();
            let packed = quantize(folder.path(), files.path().join("packed.gguf"), mixture);
            let wide = quantize(&packed, files.path().join("wide.gguf"), Mixture::F32);
            compare(name, &wide, &[(folder.path(), Some(mixture)), (&packed, None)]);
        }
    }
}

#[test]
fn experts_with_40_rows_or_two_formats_give_the_logits_of_unpacked_ones() {
    let files = tempfile::tempdir().unwrap();
    let at = |name: &str| files.path().join(name);
    // On the CPU, matrices of 40 rows are dense; those of 256 rows are packed.
    let folder = mixtral(40);
    let packed = quantize(folder.path(), at("bf16.gguf"), Mixture::Bf16);
    let wide = quantize(&packed, at("wide.gguf"), Mixture::F32);
    compare("bf16", &wide, &[(&packed, None)]);
    // The gate projections of experts in one format, and the up projections in another.
    let folder = mixtral(256);
    let packed = quantize(folder.path(), at("q4_0.gguf"), Mixture::Q4_0);
    let apart = repack(&packed, at("apart.gguf"), "ffn_up_exps", Format::Q6K);
    let wide = quantize(&apart, at("wide.gguf"), Mixture::F32);
    compare("apart", &wide, &[(&apart, None)]);
}
