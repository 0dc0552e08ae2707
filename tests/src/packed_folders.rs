//! Folders written by PyTorch quantizers are computed directly from their codes, if rows and groups are whole
//! blocks.
//!
//! Both the quantized matrices and the numbers that they encode are generated here.

use std::collections::BTreeMap;

use half::f16;
use kiln::{Mixture, Model, Plan, TokenId, device::Opened, expert::kernels::Choice};
use kiln_weights::{Format, streams::Table};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    checkpoints::{Tensors, copy_of, edit_config, edit_tensors},
    support::{assert_close, batch, float32, forward},
};

const HIDDEN: usize = 128;
const WIDTH: usize = 384;
const LAYERS: usize = 2;
/// Number of experts of the recorded Mixtral.
const EXPERTS: usize = 4;

/// A quantized matrix: its tensors by the suffix after the module name, and the encoded numbers.
#[derive(Default)]
struct Matrix {
    parts: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    numbers: Vec<f32>,
}

impl Matrix {
    fn with(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.parts.insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
        self
    }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Packs codes of `bits` bits into words, the first code in the lowest bits.
fn words(codes: impl IntoIterator<Item = u8>, bits: usize) -> Vec<u8> {
    let codes: Vec<u8> = codes.into_iter().collect();
    let word = |codes: &[u8]| codes.iter().rev().fold(0_u32, |word, code| word << bits | u32::from(*code));
    codes.chunks(32 / bits).flat_map(|codes| word(codes).to_le_bytes()).collect()
}

/// Transposes `[rows, columns]` to `[columns, rows]`.
fn transposed<T: Copy>(numbers: &[T], rows: usize) -> Vec<T> {
    let columns = numbers.len() / rows;
    (0..columns).flat_map(|column| (0..rows).map(move |row| numbers[row * columns + column])).collect()
}

/// Integers with a float16 scale and a zero point for each group of a row.
struct Integers {
    rows: usize,
    columns: usize,
    groups: usize,
    /// `[rows, columns]`
    codes: Vec<u8>,
    /// `[rows, groups]`
    scales: Vec<f16>,
    /// `[rows, groups]`
    zeros: Vec<u8>,
    numbers: Vec<f32>,
}

impl Integers {
    fn of(numbers: &[f32], rows: usize, group: usize, bits: usize) -> Self {
        let columns = numbers.len() / rows;
        let most = ((1 << bits) - 1) as f32;
        let (mut codes, mut scales, mut zeros, mut unpacked) = (vec![], vec![], vec![], vec![]);
        for group in numbers.chunks(group) {
            let (low, high) = group.iter().fold((0f32, 0f32), |(low, high), x| (low.min(*x), high.max(*x)));
            let scale = f16::from_f32((high - low) / most);
            let zero = (-low / scale.to_f32()).round().clamp(0.0, most);
            for x in group {
                let code = (x / scale.to_f32() + zero).round().clamp(0.0, most);
                codes.push(code as u8);
                unpacked.push((code - zero) * scale.to_f32());
            }
            scales.push(scale);
            zeros.push(zero as u8);
        }
        Self { rows, columns, groups: columns / group, codes, scales, zeros, numbers: unpacked }
    }

    fn scales(&self, transpose: bool) -> Vec<u8> {
        let scales = if transpose { transposed(&self.scales, self.rows) } else { self.scales.clone() };
        scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()
    }

    fn gptq(self, bits: usize) -> Matrix {
        let Self { rows, columns, groups, .. } = self;
        let per_word = 32 / bits;
        // A word of a row holds consecutive codes of a column.
        let lines = transposed(&self.codes, rows);
        let lines = lines.chunks(per_word * rows).flat_map(|line| transposed(line, per_word));
        let qweight = words(lines.collect::<Vec<_>>(), bits);
        // A zero point of 0 would borrow from the next one.
        let stored = transposed(&self.zeros, rows).into_iter().map(|zero| zero.checked_sub(1).unwrap());
        let order =
            (0..columns).flat_map(|column| ((column / (columns / groups)) as i32).to_le_bytes()).collect();
        Matrix { numbers: self.numbers.clone(), ..Matrix::default() }
            .with("qweight", Dtype::I32, &[columns / per_word, rows], qweight)
            .with("qzeros", Dtype::I32, &[groups, rows / per_word], words(stored, bits))
            .with("scales", Dtype::F16, &[groups, rows], self.scales(true))
            .with("g_idx", Dtype::I32, &[columns], order)
    }

    fn awq(self) -> Matrix {
        let Self { rows, columns, groups, .. } = self;
        let in_order = |codes: &[u8]| -> Vec<u8> {
            let codes = transposed(codes, rows);
            codes.chunks(8).flat_map(|eight| [0, 2, 4, 6, 1, 3, 5, 7].map(|place| eight[place])).collect()
        };
        Matrix { numbers: self.numbers.clone(), ..Matrix::default() }
            .with("qweight", Dtype::I32, &[columns, rows / 8], words(in_order(&self.codes), 4))
            .with("qzeros", Dtype::I32, &[groups, rows / 8], words(in_order(&self.zeros), 4))
            .with("scales", Dtype::F16, &[groups, rows], self.scales(true))
    }

    fn compressed(self, bits: usize) -> Matrix {
        let Self { rows, columns, groups, .. } = self;
        let per_word = 32 / bits;
        let zeros = self.zeros.chunks(per_word * groups).flat_map(|zeros| transposed(zeros, per_word));
        let shape = [rows, columns].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
        Matrix { numbers: self.numbers.clone(), ..Matrix::default() }
            .with("weight_packed", Dtype::I32, &[rows, columns / per_word], words(self.codes.clone(), bits))
            .with(
                "weight_zero_point",
                Dtype::I32,
                &[rows / per_word, groups],
                words(zeros.collect::<Vec<_>>(), bits),
            )
            .with("weight_scale", Dtype::F16, &[rows, groups], self.scales(false))
            .with("weight_shape", Dtype::I64, &[2], shape)
    }
}

/// Quantizes like bitsandbytes, with `block` numbers per block.
fn four_bits(numbers: &[f32], rows: usize, block: usize, name: &str, table: Table) -> Matrix {
    let table = table.numbers();
    let (mut codes, mut scales, mut unpacked) = (vec![], vec![], vec![]);
    for block in numbers.chunks(block) {
        let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        scales.push(largest);
        for x in block {
            let off = |code: &u8| (table[usize::from(*code)] * largest - x).abs();
            let code = (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap();
            codes.push(code);
            unpacked.push(table[usize::from(code)] * largest);
        }
    }
    let state =
        json!({"quant_type": name, "blocksize": block, "shape": [rows, numbers.len() / rows]}).to_string();
    let bytes = codes.chunks(2).map(|two| two[0] << 4 | two[1]).collect();
    let state_name = format!("weight.quant_state.bitsandbytes__{name}");
    Matrix { numbers: unpacked, ..Matrix::default() }
        .with("weight", Dtype::U8, &[numbers.len() / 2, 1], bytes)
        .with("weight.absmax", Dtype::F32, &[scales.len()], bytes_of(&scales))
        .with("weight.quant_map", Dtype::F32, &[16], bytes_of(&table))
        .with(&state_name, Dtype::U8, &[state.len()], state.into_bytes())
}

/// Signed bytes with a scale for each row: LLM.int8(), which also multiplies by another factor, and
/// compressed-tensors.
fn signed_bytes(numbers: &[f32], rows: usize, factor: f32, scale_name: &str, shape: &[usize]) -> Matrix {
    let (mut codes, mut scales, mut unpacked) = (vec![], vec![], vec![]);
    for row in numbers.chunks(numbers.len() / rows) {
        let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let scale = largest / 127.0 / factor;
        for x in row {
            let code = (x / largest * 127.0).round();
            codes.push((code as i8).cast_unsigned());
            unpacked.push(code * scale * factor);
        }
        scales.push(scale);
    }
    Matrix { numbers: unpacked, ..Matrix::default() }
        .with("weight", Dtype::I8, &[rows, numbers.len() / rows], codes)
        .with(scale_name, Dtype::F32, shape, bytes_of(&scales))
}

/// Quantization of the matrices of a folder.
struct Case {
    name: &'static str,
    config: Value,
    format: Format,
    quantize: fn(&[f32], usize) -> Matrix,
}

fn cases() -> Vec<Case> {
    let gptq =
        |bits, group| json!({"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": false});
    let bnb = || json!({"quant_method": "bitsandbytes"});
    let compressed = |format, bits| {
        let weights = json!({"num_bits": bits, "type": "int"});
        json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}})
    };
    let case = |name, config, format, quantize| Case { name, config, format, quantize };
    vec![
        case("nf4", bnb(), Format::Nf4, |x, rows| four_bits(x, rows, 64, "nf4", Table::Nf4)),
        case("fp4 in 128", bnb(), Format::Fp4, |x, rows| four_bits(x, rows, 128, "fp4", Table::Fp4)),
        case("LLM.int8()", bnb(), Format::Int8, |x, rows| signed_bytes(x, rows, 1.0 / 127.0, "SCB", &[rows])),
        case("gptq", gptq(4, 128), Format::Int4In128, |x, rows| Integers::of(x, rows, 128, 4).gptq(4)),
        case("gptq in 64", gptq(4, 64), Format::Int4In64, |x, rows| Integers::of(x, rows, 64, 4).gptq(4)),
        case("gptq 2 in 32", gptq(2, 32), Format::Int4In32, |x, rows| Integers::of(x, rows, 32, 2).gptq(2)),
        case("gptq 8 in rows", gptq(8, -1), Format::Int8, |x, rows| {
            Integers::of(x, rows, x.len() / rows, 8).gptq(8)
        }),
        case(
            "awq",
            json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
            Format::Int4In64,
            |x, rows| Integers::of(x, rows, 64, 4).awq(),
        ),
        case("compressed 4", compressed("pack-quantized", 4), Format::Int4In32, |x, rows| {
            Integers::of(x, rows, 32, 4).compressed(4)
        }),
        case("compressed 8", compressed("pack-quantized", 8), Format::Int8, |x, rows| {
            Integers::of(x, rows, 128, 8).compressed(8)
        }),
        case("compressed bytes", compressed("int-quantized", 8), Format::Int8, |x, rows| {
            signed_bytes(x, rows, 1.0, "weight_scale", &[rows, 1])
        }),
    ]
}

impl Case {
    /// Creates a llama with quantized matrices, and one with the numbers that they encode.
    fn folders(&self) -> [TempDir; 2] {
        self.folders_of("llama", modules())
    }

    /// Creates a mixture with quantized experts, and one with the numbers that they encode.
    fn mixtures(&self) -> [TempDir; 2] {
        self.folders_of("mixtral", modules_of_mixture())
    }

    fn folders_of(&self, model: &str, modules: Vec<(String, usize, usize)>) -> [TempDir; 2] {
        let mut state = 7u32;
        let mut random = |count: usize| -> Vec<f32> {
            let next = |_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 * 0.3 - 0.14
            };
            (0..count).map(next).collect()
        };
        let [mut quantized, mut plain] = [Tensors::new(), Tensors::new()];
        let mut dense = |name: String, shape: &[usize], numbers: &[f32]| {
            for tensors in [&mut quantized, &mut plain] {
                tensors.insert(name.clone(), (Dtype::F32, shape.to_vec(), bytes_of(numbers)));
            }
        };
        for name in ["model.embed_tokens", "lm_head"] {
            dense(format!("{name}.weight"), &[97, HIDDEN], &random(97 * HIDDEN));
        }
        let norms = (0..LAYERS).flat_map(|layer| {
            ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("layers.{layer}.{norm}"))
        });
        for norm in norms.chain(["norm".to_owned()]) {
            dense(format!("model.{norm}.weight"), &[HIDDEN], &[1.0; HIDDEN]);
        }
        if model == "mixtral" {
            for layer in 0..LAYERS {
                let router = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
                dense(router, &[EXPERTS, HIDDEN], &random(EXPERTS * HIDDEN));
            }
        }
        for (module, rows, columns) in modules {
            let matrix = (self.quantize)(&random(rows * columns), rows);
            plain.insert(
                format!("{module}.weight"),
                (Dtype::F32, vec![rows, columns], bytes_of(&matrix.numbers)),
            );
            quantized
                .extend(matrix.parts.into_iter().map(|(part, tensor)| (format!("{module}.{part}"), tensor)));
        }
        [(quantized, self.config.clone()), (plain, Value::Null)].map(|(tensors, config)| {
            let folder = copy_of(model);
            edit_config(folder.path(), |file| {
                for (key, size) in [
                    ("hidden_size", HIDDEN),
                    ("intermediate_size", WIDTH),
                    ("head_dim", 32),
                    ("num_hidden_layers", LAYERS),
                ] {
                    file[key] = size.into();
                }
                file["quantization_config"] = config;
            });
            edit_tensors(folder.path(), |own| *own = tensors);
            folder
        })
    }
}

/// Returns the quantized modules, with their rows and columns.
fn modules() -> Vec<(String, usize, usize)> {
    let of_layer = |layer| {
        let module = move |(name, rows, columns)| (format!("model.layers.{layer}.{name}"), rows, columns);
        [
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", 64, HIDDEN),
            ("self_attn.v_proj", 64, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", WIDTH, HIDDEN),
            ("mlp.up_proj", WIDTH, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDTH),
        ]
        .map(module)
    };
    (0..LAYERS).flat_map(of_layer).collect()
}

/// Returns the quantized modules of a mixture of experts, whose router is not quantized.
fn modules_of_mixture() -> Vec<(String, usize, usize)> {
    let attention = modules().into_iter().filter(|(name, ..)| name.contains("self_attn"));
    let experts = (0..LAYERS * EXPERTS).flat_map(|i| {
        let expert = format!("model.layers.{}.block_sparse_moe.experts.{}", i / EXPERTS, i % EXPERTS);
        [("w1", WIDTH, HIDDEN), ("w3", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)]
            .map(|(name, rows, columns)| (format!("{expert}.{name}"), rows, columns))
    });
    attention.chain(experts).collect()
}

/// Returns the logits of few tokens, for which GPUs multiply by the codes, and of many, for which they unpack
/// rows.
fn logits(model: &Model) -> Vec<f32> {
    let prompts: [Vec<TokenId>; 2] = [vec![3, 1, 4, 1, 5], (0..40).map(|i| i * 7 % 97).collect()];
    let of_prompt = |prompt: Vec<TokenId>| {
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        forward(model, &batch(model, &[prompt]), &mut cache)
    };
    prompts.into_iter().flat_map(of_prompt).collect()
}

/// Returns the relative distance of numbers from the expected ones.
fn distance(found: &[f32], want: &[f32]) -> f32 {
    let square = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>().sqrt();
    let off = square(&mut found.iter().zip(want).map(|(found, want)| found - want));
    off / square(&mut want.iter().copied())
}

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

#[test]
fn every_method_is_computed_from_its_codes() {
    for case in cases() {
        let [folder, plain] = case.folders();
        for opened in devices() {
            let what = format!("{} on {}", case.name, opened.info.name);
            let builder = |folder: &TempDir| float32(Model::builder(folder.path()), opened);
            let [model, same] = [&folder, &plain].map(|folder| builder(folder).exact(true).load().unwrap());
            assert_eq!(model.parameters(), same.parameters(), "{what}");
            let want = logits(&same);
            assert!(want.iter().any(|logit| logit.abs() > 1.0), "{what}");
            assert_close(&logits(&model), &want, &what);
            // Split into blocks of rows.
            let cut = builder(&folder).exact(true).largest_binding(8 << 10).load().unwrap();
            assert_close(&logits(&cut), &want, &format!("{what}, cut"));

            // Only codes and scales are stored. The zero points of a row are whole words, and a row is a
            // multiple of 16 bytes.
            let rows: usize = modules().iter().map(|(_, rows, _)| rows).sum();
            let numbers: usize = modules().iter().map(|(_, rows, columns)| rows * columns).sum();
            let filled = (12 * 8 * rows) as f64 / numbers as f64;
            let others = same.weight_bytes() - 4 * numbers as u64;
            let bits = (model.weight_bytes() - others) as f64 * 8.0 / numbers as f64;
            let of_format = case.format.block_bytes() as f64 * 8.0 / case.format.block() as f64;
            assert!(
                (of_format..of_format + 0.2 + filled).contains(&bits),
                "{what}: {bits} bits a number, not {of_format}"
            );

            // Activations are rounded to 8 bits.
            let found = logits(&builder(&folder).load().unwrap());
            let off = distance(&found, &want);
            assert!(off <= 0.05, "{what}: logits are {off} off");
        }
    }
}

#[test]
fn experts_are_computed_from_their_codes() {
    for name in ["nf4", "gptq in 64", "compressed 8"] {
        let case = cases().into_iter().find(|case| case.name == name).expect("it is a case");
        let [folder, plain] = case.mixtures();
        for opened in devices() {
            let what = format!("{name} on {}", opened.info.name);
            let builder = |folder: &TempDir| float32(Model::builder(folder.path()), opened).exact(true);
            let same = builder(&plain).load().unwrap();
            let model = builder(&folder).load().unwrap();
            assert!(3 * model.weight_bytes() < same.weight_bytes(), "{what}");
            assert_close(&logits(&model), &logits(&same), &what);
            let offloaded = builder(&folder).offload_experts(1).load().unwrap();
            assert_close(&logits(&offloaded), &logits(&same), &format!("{what}, experts in host memory"));
        }
    }
}

#[test]
fn a_plain_folder_is_packed_in_nf4() {
    let case = cases().remove(0);
    let [folder, plain] = case.folders();
    for opened in devices() {
        let builder = |folder: &TempDir| float32(Model::builder(folder.path()), opened).exact(true);
        let want = logits(&builder(&folder).load().unwrap());
        let packed = builder(&plain).quant(Mixture::Nf4).load().unwrap();
        // Quantized matrices keep their codes; the head and the embeddings lose precision in 8 bits.
        let off = distance(&logits(&packed), &want);
        assert!(off > 0.0 && off < 0.02, "{off} on {}", opened.info.name);
    }
}

#[test]
fn without_kernels_weights_are_unpacked_exactly() {
    for case in cases() {
        let [folder, plain] = case.folders();
        let load = |folder: &TempDir| {
            let (_, opened) = &kiln_testkit::devices::opened()[0];
            float32(Model::builder(folder.path()), opened).kernels(Choice::Reference).load().unwrap()
        };
        let [model, same] = [&folder, &plain].map(load);
        let (found, want) = (logits(&model), logits(&same));
        assert!(found == want, "{}", case.name);
        assert_eq!(model.weight_bytes(), same.weight_bytes(), "{}", case.name);
    }
}
