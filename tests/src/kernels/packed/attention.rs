//! Attention over packed keys and values: what it is given, and what it means, in plain loops.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln::{
    kernels::{AttentionShape, Choice, Kernels, Path, Ran},
    memory::{Along, PackedBuffer, PackedKv, Packing, Positions, RowPosition},
    read_back,
};

use super::super::{
    choices,
    numbers::{LARGEST, Numbers, Plain},
};

#[derive(Clone, Copy, Debug)]
struct Given {
    batch: usize,
    kv_heads: usize,
    /// Query heads of each of them.
    group: usize,
    new: usize,
    head_dim: usize,
    /// Bits, size and direction of groups, of keys and values.
    keys: (usize, usize, Along),
    values: (usize, usize, Along),
    /// Slots of the packed buffers, and of the recent ones.
    slots: usize,
    recent: usize,
    /// The position of the first query, and the first one that is not packed.
    first: usize,
    end: usize,
    start: usize,
    origin: usize,
    recent_origin: usize,
    window: Option<usize>,
    softcap: Option<f64>,
    /// Row `b` is padded below `pad · b`.
    pad: Option<usize>,
    /// Row `b` stands `apart · b` behind the first.
    apart: usize,
}

use Along::{Channels, Tokens};

/// One query after 64 packed tokens and 16 recent ones, the way of KIVI.
const STEP: Given = Given {
    batch: 1,
    kv_heads: 2,
    group: 2,
    new: 1,
    head_dim: 64,
    keys: (4, 32, Tokens),
    values: (4, 32, Channels),
    slots: 128,
    recent: 32,
    first: 80,
    end: 64,
    start: 0,
    origin: 0,
    recent_origin: 64,
    window: None,
    softcap: None,
    pad: None,
    apart: 0,
};

fn cases() -> Vec<Given> {
    let mut cases = Vec::new();
    for head_dim in [1, 8, 12, 64, 80, 96, 128, 256] {
        for (group, new) in [(1, 1), (2, 1), (4, 2), (7, 1)] {
            cases.push(Given { head_dim, group, new, ..STEP });
        }
        cases.push(Given { head_dim, keys: (2, 64, Channels), values: (2, 64, Tokens), ..STEP });
        cases.push(Given { head_dim, keys: (3, 64, Channels), values: (3, 128, Channels), ..STEP });
    }
    for bits in Packing::BITS {
        for along in [Channels, Tokens] {
            for group in [8, 24, 64] {
                let slots = if group == 24 { 96 } else { 128 };
                let base = Given { slots, end: slots / group * group, first: slots + 3, ..STEP };
                let base = Given { recent_origin: base.end, head_dim: 80, ..base };
                cases.push(Given { keys: (bits, group, along), values: (4, 8, Channels), ..base });
                cases.push(Given { keys: (8, 8, Channels), values: (bits, group, along), ..base });
                cases.push(Given {
                    keys: (bits, group, along),
                    values: (bits, group, along),
                    group: 8,
                    ..base
                });
            }
        }
    }
    for new in [1, 3, 20] {
        let base = Given { new, recent: 60, ..STEP };
        // Nothing packed, everything packed, and nothing else than the queries.
        cases.push(Given { end: 0, first: 10, recent_origin: 0, ..base });
        cases.push(Given { end: 128, first: 128, ..base });
        cases.push(Given { softcap: Some(2.5), batch: 3, pad: Some(30), ..base });
        cases.push(Given { pad: Some(70), batch: 2, ..base });
        cases.push(Given { apart: 3, batch: 3, ..base });
        cases.push(Given { apart: 4, batch: 2, pad: Some(40), window: Some(30), ..base });
        cases.push(Given { pad: Some(81), batch: 2, ..base });
        cases.push(Given { start: 13, ..base });
        for window in [1, 5, 40, 4096] {
            cases.push(Given { window: Some(window), ..base });
        }
        // Rings.
        let ring = Given { first: 500, end: 480, origin: 96, recent_origin: 7, start: 400, ..base };
        for origin in [0, 32, 96, 480] {
            cases.push(Given { origin, ..ring });
            cases.push(Given { origin, window: Some(50), batch: 2, pad: Some(430), ..ring });
        }
        // What the packed ring no longer holds is not seen.
        cases.push(Given { start: 0, ..ring });
    }
    // Long enough to be split.
    for (new, group) in [(1, 4), (5, 1), (33, 2)] {
        let long = Given { new, group, slots: 3072, end: 2944, first: 3000, recent: 128, ..STEP };
        let long = Given { recent_origin: 2944, ..long };
        cases.push(long);
        cases.push(Given { kv_heads: 1, ..long });
        cases.push(Given { head_dim: 128, batch: 2, pad: Some(500), ..long });
        cases.push(Given { window: Some(300), keys: (2, 64, Channels), ..long });
        cases.push(Given { recent: 1024, ..long });
        cases.push(Given { end: 32, first: 40, recent_origin: 32, ..long });
    }
    cases
}

impl Given {
    fn slot(position: usize, origin: usize, slots: usize) -> usize {
        (position as i64 - origin as i64).rem_euclid(slots as i64) as usize
    }

    /// The positions that query `i` of a row sees.
    fn seen(&self, row: usize, i: usize) -> std::ops::RangeInclusive<usize> {
        let query = self.first + row * self.apart + i;
        let kept = self.end.saturating_sub(self.slots);
        let window = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let pad = self.pad.map_or(0, |pad| row * pad);
        self.start.max(kept).max(window).max(pad)..=query
    }

    /// Queries, packed keys and values, recent keys and values; what no query sees is not a number where it can be none.
    fn tensors(
        &self,
        kernels: &Kernels,
        device: &Device,
        dtype: DType,
    ) -> (Tensor<4>, PackedKv, [Tensor<4>; 2]) {
        let Self { batch, kv_heads, group, new, slots, recent, head_dim, .. } = *self;
        let mut numbers = Numbers::new(device, dtype);
        let q = numbers.tensor([batch, kv_heads * group, new, head_dim], Plain);
        let mut packed = |(bits, group, along)| {
            let packing = Packing::new(bits, group, along).unwrap();
            let shape = [batch, kv_heads, slots, head_dim];
            let buffer = PackedBuffer::zeros(shape, packing, device);
            (kernels.pack(buffer, numbers.tensor(shape, Plain), 0, packing), packing)
        };
        let (keys, key_packing) = packed(self.keys);
        let (values, value_packing) = packed(self.values);
        let end = Tensor::<1, Int>::from_data([self.end as i32], device);
        let packed = PackedKv { keys, values, key_packing, value_packing, origin: self.origin, end };

        let mut used = vec![vec![false; recent]; batch];
        for (row, used) in used.iter_mut().enumerate() {
            for position in (0..new).flat_map(|i| self.seen(row, i)).filter(|p| *p >= self.end) {
                used[Self::slot(position, self.recent_origin, recent)] = true;
            }
        }
        let mut buffer = || {
            let shape = [batch, kv_heads, recent, head_dim];
            numbers.tensor_where(shape, Plain, |[row, _, slot, _]| used[row][slot])
        };
        let recent = [buffer(), buffer()];
        (q, packed, recent)
    }

    fn shape(&self) -> AttentionShape {
        let Self { head_dim, softcap, window, start, recent_origin, .. } = *self;
        AttentionShape { scale: (head_dim as f64).powf(-0.5), softcap, window, start, origin: recent_origin }
    }

    fn run(&self, kernels: &Kernels, maker: &Kernels, device: &Device, dtype: DType) -> TensorData {
        let (q, packed, recent) = self.tensors(maker, device, dtype);
        let row = |row: usize| RowPosition {
            first: self.first + row * self.apart,
            visible_from: self.pad.map_or(0, |pad| row * pad),
        };
        let positions = Positions::new((0..self.batch).map(row).collect(), device);
        read_back::read(kernels.attention_packed(q, &packed, recent, &positions, &self.shape())).unwrap()
    }

    /// What it means.
    fn meaning(&self, cpu: &Device, dtype: DType) -> Vec<f64> {
        let Self { batch, kv_heads, group, new, head_dim, slots, recent, .. } = *self;
        let kernels = Kernels::new(Choice::Definition, cpu).unwrap();
        let (q, packed, [recent_keys, recent_values]) = self.tensors(&kernels, cpu, dtype);
        let read = |tensor| read_back::read(tensor).unwrap().iter::<f64>().collect::<Vec<_>>();
        let unpacked = |buffer, packing| {
            read(kernels.unpack(buffer, packing, head_dim, 0..slots, burn::tensor::FloatDType::F32))
        };
        let packed_keys = unpacked(&packed.keys, packed.key_packing);
        let packed_values = unpacked(&packed.values, packed.value_packing);
        let [q, recent_keys, recent_values] = [q, recent_keys, recent_values].map(read);
        let AttentionShape { scale, softcap, .. } = self.shape();
        let mut result = vec![0.0; q.len()];
        for vector in 0..batch * kv_heads * group * new {
            let (head, i) = (vector / new, vector % new);
            let (row, kv_head) = (head / group / kv_heads, head / group);
            let at = |position: usize| -> [&[f64]; 2] {
                let (buffers, origin, slots) = if position < self.end {
                    ([&packed_keys, &packed_values], self.origin, slots)
                } else {
                    ([&recent_keys, &recent_values], self.recent_origin, recent)
                };
                let slot = kv_head * slots + Self::slot(position, origin, slots);
                buffers.map(|buffer| &buffer[slot * head_dim..][..head_dim])
            };
            let score = |position| {
                let q = &q[vector * head_dim..][..head_dim];
                let score = q.iter().zip(at(position)[0]).map(|(q, k)| q * k).sum::<f64>() * scale;
                softcap.map_or(score, |cap| cap * (score / cap).tanh())
            };
            let scores: Vec<f64> = self.seen(row, i).map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
            for (position, score) in self.seen(row, i).zip(scores) {
                let weight = (score - most).exp() / sum;
                let result = &mut result[vector * head_dim..][..head_dim];
                result.iter_mut().zip(at(position)[1]).for_each(|(result, value)| *result += weight * value);
            }
        }
        result
    }

    /// How far an element may be off before it is rounded to its type; what is unpacked first is rounded to it, too.
    fn tolerance(&self, dtype: DType, want: f64) -> f64 {
        let single = f64::from(f32::EPSILON);
        let ulp = if dtype == DType::F16 { f64::from(half::f16::EPSILON) } else { 0.0 };
        let (n, keys) = (self.head_dim as f64, (self.slots + self.recent) as f64);
        // As for dense attention; scales and offsets are multiplied after sums here, of numbers up to the largest code
        // times the scale and the offset, which are less than three times the largest number together.
        let score = 3.0 * LARGEST * LARGEST * ((n.sqrt() + 1.0) * single + ulp / 2.0)
            + self.softcap.map_or(0.0, |cap| 4.0 * cap * single);
        let weight = score + 16.0 * single;
        3.0 * LARGEST * (2.0 * weight + (keys.sqrt() + 8.0) * single + ulp) + want.abs() * ulp
    }
}

#[test]
fn attention_over_codes_means_what_the_loops_say() {
    let devices = kiln_testkit::devices();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("definitions run on the CPU");
    let mut failures = Vec::new();
    for dtype in [DType::F32, DType::F16] {
        for given in cases() {
            let want = given.meaning(cpu, dtype);
            for (name, device) in &devices {
                if !device.supports_dtype(dtype) {
                    continue;
                }
                for (choice, maker) in choices(name, device) {
                    // Hundreds of launches; and what `auto` is on a device need not run twice.
                    let slow = choice == Choice::Definition && name != "cpu" && given.keys.0 != 3;
                    if slow || choice == Choice::Wgsl {
                        continue;
                    }
                    let kernels = Kernels::new(choice, device).unwrap();
                    let got = given.run(&kernels, &maker, device, dtype);
                    let path = match (choice, &name[..]) {
                        (Choice::Definition, _) => Path::Definition,
                        (Choice::Auto, "cpu") => Path::Native,
                        (Choice::Wgsl, _) | (Choice::Auto, "wgpu") => Path::Wgsl,
                        _ => Path::Cube,
                    };
                    let what = format!("{choice} on {name}, {dtype:?}: {given:?}");
                    assert_eq!(kernels.ran(), [Ran { kernel: "attention_packed", path, count: 1 }], "{what}");
                    assert_eq!(
                        got.shape()[..],
                        [given.batch, given.kv_heads * given.group, given.new, given.head_dim]
                    );
                    let off = got.iter::<f64>().zip(&want).map(|(got, want)| {
                        let times = (got - want).abs() / given.tolerance(dtype, *want);
                        (times, got, *want)
                    });
                    // Not a number is the worst.
                    if let Some((times, got, want)) = off.max_by(|a, b| a.0.total_cmp(&b.0))
                        && (times > 1.0 || times.is_nan())
                    {
                        failures.push(format!("{what}: {got}, not {want}: {times} times what is allowed"));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}
