//! Decoders whose blocks differ, against a plain computation.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use kiln_cache::Plan;
use kiln_core::{
    Result,
    batch::Batch,
    model::{CausalModel, Logits},
    model_cache::ModelCache,
    need::Stream,
    read_back,
};
use kiln_kernels::{Choice, Kernels, Placement};
use serde_json::json;

use super::{
    super::{
        attention::{AttentionConfig, HeadNorms, QK_NORMS, Reach},
        block::{BlockConfig, MixerConfig},
        rope::{Rope, RopeKind, Ropes},
    },
    Decoder, DecoderConfig,
};
use crate::{
    ConfigFile, Configured, HostMatrix, Part, Weights,
    config::{Common, Defaults},
};

const HIDDEN: usize = 16;
const VOCAB: usize = 23;
const EPS: f64 = 1e-5;
/// Rotary bases of blocks without a window and with one, and how many numbers of a head are rotated.
const BASES: [f64; 2] = [10_000.0, 50.0];
const ROTATED: usize = 8;

/// Weights that depend on their names alone.
struct Waves {
    device: Device,
}

fn numbers(name: &str, n: usize) -> Vec<f32> {
    let seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into())) % 1000;
    (0..n).map(|i| ((i as f32 + 1.0) * (1.0 + seed as f32 / 517.0)).sin() * 0.6).collect()
}

impl Weights for Waves {
    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        let all: Vec<f32> = parts.iter().flat_map(|part| numbers(&part.name, part.rows)).collect();
        let len = all.len();
        Ok(Tensor::from_data(TensorData::new(all, [len]), &self.device))
    }

    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        let all: Vec<f32> = parts.iter().flat_map(|part| numbers(&part.name, part.rows * width)).collect();
        let rows = all[range.start * width..range.end * width].to_vec();
        Ok(Tensor::from_data(TensorData::new(rows, [range.len(), width]), &self.device))
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        read_back::read(self.dense_matrix(parts, width, range)?).map(HostMatrix::dense)
    }

    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        self.vector(&[Part::new(name, shape.iter().product())])
    }

    fn largest_binding(&self) -> usize {
        1 << 30
    }

    fn element_bytes(&self) -> usize {
        4
    }
}

/// A decoder without feed-forwards, with these blocks.
fn config(blocks: impl Fn(AttentionConfig) -> Vec<AttentionConfig>) -> DecoderConfig {
    let file = ConfigFile::from_json(json!({
        "num_hidden_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "intermediate_size": 8, "vocab_size": VOCAB, "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
    }));
    let defaults = Defaults { kv_heads: None, head_dim: None, positions: 64, eps: EPS, tied: false };
    let common = Common::read(&file, defaults).unwrap();
    let [full, sliding] = BASES
        .map(|base| Rope::read(&ConfigFile::from_json(json!({ "rope_theta": base })), ROTATED, 64).unwrap());
    let mut config = DecoderConfig::new(common, Ropes { full, sliding: Some(sliding) });
    let usual = *config.attention().next().unwrap();
    let alone = |attention| BlockConfig::alone(MixerConfig::Attention(attention));
    config.blocks = blocks(usual).into_iter().map(alone).collect();
    config
}

/// Blocks with and without rotation, with other rotations, widths, windows, scales, caps and norms.
fn mixed(usual: AttentionConfig) -> Vec<AttentionConfig> {
    let windowed = |window| AttentionConfig { reach: Reach::Window(window), ..usual };
    vec![
        usual,
        AttentionConfig {
            kv_heads: 1,
            value_dim: 6,
            rope: None,
            softcap: Some(0.7),
            qkv_bias: true,
            ..usual
        },
        AttentionConfig {
            heads: 2,
            head_dim: 8,
            value_dim: 4,
            rope: Some(RopeKind::Sliding),
            scale: 0.9,
            ..windowed(3)
        },
        AttentionConfig {
            heads: 3,
            kv_heads: 1,
            head_dim: 10,
            value_dim: 16,
            head_norms: Some(HeadNorms::PerHead(QK_NORMS)),
            fused: Some("qkv_proj"),
            o_bias: true,
            ..windowed(4)
        },
    ]
}

type Vectors = Vec<Vec<f64>>;

/// Multiplies vectors by the matrix `name`, `[out, in]`.
fn product(x: &Vectors, name: &str, out: usize) -> Vectors {
    let width = x[0].len();
    let weight = numbers(&format!("{name}.weight"), out * width);
    let row = |x: &Vec<f64>, row: &[f32]| x.iter().zip(row).map(|(x, w)| x * f64::from(*w)).sum();
    x.iter().map(|x| weight.chunks(width).map(|of| row(x, of)).collect()).collect()
}

fn with_bias(x: Vectors, name: &str, has_bias: bool) -> Vectors {
    let bias = numbers(&format!("{name}.bias"), x[0].len());
    let add = |x: Vec<f64>| x.iter().zip(&bias).map(|(x, b)| x + f64::from(*b)).collect();
    if has_bias { x.into_iter().map(add).collect() } else { x }
}

fn norm(x: &[f64], name: &str) -> Vec<f64> {
    let weight = numbers(&format!("{name}.weight"), x.len());
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + EPS).sqrt() * f64::from(w)).collect()
}

fn rotate(x: &mut [f64], position: usize, base: f64) {
    let pairs = ROTATED / 2;
    for i in 0..pairs {
        let (sin, cos) = (position as f64 * base.powf(-2.0 * i as f64 / ROTATED as f64)).sin_cos();
        let (a, b) = (x[i], x[i + pairs]);
        (x[i], x[i + pairs]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

/// Computes the logits of the last of `tokens`.
fn plainly(config: &DecoderConfig, tokens: &[u32]) -> Vec<f64> {
    let table = numbers("model.embed_tokens.weight", VOCAB * HIDDEN);
    let embedding =
        |token: &u32| table[*token as usize * HIDDEN..][..HIDDEN].iter().map(|x| f64::from(*x)).collect();
    let mut x: Vectors = tokens.iter().map(embedding).collect();
    for (i, a) in config.attention().enumerate() {
        let part = |part: &str| format!("model.layers.{i}.{part}");
        let normed: Vectors = x.iter().map(|x| norm(x, &part("input_layernorm"))).collect();
        let sizes = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim];
        let [mut q, mut k, v] = if let Some(fused) = a.fused {
            let all = product(&normed, &part(&format!("self_attn.{fused}")), sizes.iter().sum());
            let begins = [0, sizes[0], sizes[0] + sizes[1]];
            [0, 1, 2].map(|n| all.iter().map(|x| x[begins[n]..begins[n] + sizes[n]].to_vec()).collect())
        } else {
            let names = ["q_proj", "k_proj", "v_proj"].map(|name| part(&format!("self_attn.{name}")));
            [0, 1, 2].map(|n| with_bias(product(&normed, &names[n], sizes[n]), &names[n], a.qkv_bias))
        };
        for (vectors, name) in [(&mut q, "q_norm"), (&mut k, "k_norm")] {
            for (position, head) in vectors.iter_mut().enumerate().flat_map(|(position, vector)| {
                vector.chunks_mut(a.head_dim).map(move |head| (position, head))
            }) {
                if a.head_norms.is_some() {
                    let normed = norm(head, &part(&format!("self_attn.{name}")));
                    head.copy_from_slice(&normed);
                }
                if let Some(kind) = a.rope {
                    rotate(head, position, BASES[usize::from(kind == RopeKind::Sliding)]);
                }
            }
        }
        let mut mixed = vec![Vec::new(); x.len()];
        for (position, mixed) in mixed.iter_mut().enumerate() {
            for head in 0..a.heads {
                let of = head / (a.heads / a.kv_heads);
                let first = match a.reach {
                    Reach::All => 0,
                    Reach::Window(window) => (position + 1).saturating_sub(window),
                    Reach::Chunk(len) => position / len * len,
                };
                let query = &q[position][head * a.head_dim..][..a.head_dim];
                let score = |key: usize| {
                    let key = &k[key][of * a.head_dim..][..a.head_dim];
                    let score = query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() * a.scale;
                    a.softcap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
                };
                let weights: Vec<f64> = (first..=position).map(score).collect();
                let sum: f64 = weights.iter().sum();
                mixed.extend((0..a.value_dim).map(|d| {
                    let values = (first..=position).map(|key| v[key][of * a.value_dim + d]);
                    weights.iter().zip(values).map(|(weight, value)| weight / sum * value).sum::<f64>()
                }));
            }
        }
        let name = part("self_attn.o_proj");
        let out = with_bias(product(&mixed, &name, HIDDEN), &name, a.o_bias);
        for (x, out) in x.iter_mut().zip(out) {
            x.iter_mut().zip(out).for_each(|(x, out)| *x += out);
        }
    }
    let last = norm(x.last().unwrap(), "model.norm");
    product(&vec![last], "lm_head", VOCAB).remove(0)
}

struct Feeder {
    model: Decoder,
    plan: Plan,
    placement: Placement,
    device: Device,
    what: &'static str,
}

impl Feeder {
    fn new(config: &DecoderConfig, what: &'static str) -> Self {
        let device = Device::flex();
        let placement: Placement = Kernels::new(Choice::Auto, &device).unwrap().into();
        let model = Decoder::load(config, &mut Waves { device: device.clone() }, &placement).unwrap();
        Self { model, plan: Plan::named(what).unwrap(), placement, device, what }
    }

    fn cache(&self) -> ModelCache {
        self.plan.build(&self.model.needs(), &self.placement).unwrap()
    }

    /// Feeds new tokens to each row, and compares the logits of the last ones with the plain computation.
    fn feed(&self, cache: &mut ModelCache, new: &[Vec<u32>], all: &[Vec<u32>]) {
        let batch = Batch::ragged(new, 0, &self.device).unwrap();
        let logits = self.model.forward(&batch, Logits::Last, cache).unwrap();
        let got: Vec<f64> = logits.into_data().iter::<f64>().collect();
        for (got, row) in got.chunks(VOCAB).zip(all) {
            for (got, want) in got.iter().zip(plainly(&self.model.config, row)) {
                let what = format!("{} after {}: {got}, not {want}", self.what, row.len());
                assert!((got - want).abs() < 1e-3, "{what}");
            }
        }
    }
}

fn text(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i + 5 * i + seed) % VOCAB) as u32).collect()
}

#[test]
fn blocks_that_differ_give_the_logits_of_a_plain_computation() {
    let config = config(mixed);
    for what in ["dynamic", "static", "none", "dynamic + offload=all"] {
        let feeder = Feeder::new(&config, what);
        let remembers = feeder.plan.remembers(&feeder.model.needs());
        let mut cache = feeder.cache();
        let (all, mut fed) = (text(20, 3), 0);
        // Chunks that fit into the windows, cross them, and exceed them.
        for n in [1, 2, 6, 1, 1, 3, 1] {
            let from = if remembers { fed } else { 0 };
            fed += n;
            feeder.feed(&mut cache, &[all[from..fed].to_vec()], &[all[..fed].to_vec()]);
        }
    }
}

#[test]
fn rows_of_different_lengths_give_the_logits_of_a_plain_computation() {
    let config = config(mixed);
    for what in ["dynamic", "static"] {
        let feeder = Feeder::new(&config, what);
        let mut cache = feeder.cache();
        let mut rows = vec![text(7, 3), text(3, 8), text(5, 13)];
        feeder.feed(&mut cache, &rows.clone(), &rows);
        for token in 0..6 {
            let new: Vec<Vec<u32>> = (0..3).map(|row| vec![token + row]).collect();
            rows.iter_mut().zip(&new).for_each(|(row, new)| row.extend(new));
            feeder.feed(&mut cache, &new, &rows);
        }
    }
}

#[test]
fn needs_follow_from_the_settings_of_each_block() {
    let config = config(mixed);
    let needs: Vec<_> = config
        .needs()
        .into_iter()
        .filter_map(|need| need.attention)
        .map(|need| (need.streams(), need.window, need.rotary.is_some()))
        .collect();
    let stream = |heads, width| Stream { heads, width };
    let want = [
        ([stream(2, 12), stream(2, 12)], None, true),
        ([stream(1, 12), stream(1, 6)], None, false),
        ([stream(2, 8), stream(2, 4)], Some(3), true),
        ([stream(1, 10), stream(1, 16)], Some(4), true),
    ];
    assert_eq!(needs, want);
}

#[test]
fn impossible_blocks_are_refused() {
    let refused = |change: &dyn Fn(&mut DecoderConfig)| {
        let mut config = config(mixed);
        change(&mut config);
        let device = Device::flex();
        let placement = Kernels::new(Choice::Auto, &device).unwrap().into();
        Decoder::load(&config, &mut Waves { device }, &placement).map(|_| ()).unwrap_err().to_string()
    };
    let last =
        |change: fn(&mut AttentionConfig)| refused(&|config| change(config.attention_mut().last().unwrap()));
    for (why, said) in [
        (last(|attention| attention.kv_heads = 2), "cannot share 2"),
        (last(|attention| attention.value_dim = 0), "10 and 0 numbers"),
        (last(|attention| attention.reach = Reach::Window(0)), "window of no tokens"),
        (last(|attention| attention.head_dim = 6), "rotates 8 numbers of keys that have 6"),
        (refused(&|config| config.ropes = None), "has no rotation"),
    ] {
        assert!(why.contains(said), "{why}");
    }
}
