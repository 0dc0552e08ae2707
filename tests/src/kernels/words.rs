//! The words that packing produces, bit for bit, and the numbers that they encode.

use std::sync::LazyLock;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use half::f16;
use kiln::expert::{
    kernels::{
        Choice, KvPack, KvUnpack,
        cases::{Cut, Layout, Plain, Swapped},
    },
    memory::{Along, PackedBuffer, Packing},
    read_back,
};

use super::choices;
use crate::support::cases_are;

#[derive(Clone, Copy, Debug)]
struct Given {
    /// `[batch, kv_heads, slots, head_dim]`
    buffer: [usize; 4],
    n: usize,
    slot: usize,
    bits: usize,
    group: usize,
    along: Along,
    numbers: Kind,
    layout: Layout,
    /// Whether scales are given rather than computed.
    given: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// From -2 to 2.
    Usual,
    /// All magnitudes, including numbers beyond float16, subnormal, infinite and NaN.
    Odd,
    /// Halfway between two codes.
    Ties,
    Constant,
}
use Kind::{Constant, Odd, Ties, Usual};

fn cases() -> Vec<Given> {
    let base = Given {
        buffer: [2, 2, 64, 64],
        n: 32,
        slot: 0,
        bits: 4,
        group: 32,
        along: Along::Channels,
        numbers: Usual,
        layout: Plain,
        given: false,
    };
    let mut cases = Vec::new();
    for along in [Along::Channels, Along::Tokens] {
        for bits in Packing::BITS {
            let base = Given { bits, along, ..base };
            for numbers in [Usual, Odd, Ties, Constant] {
                cases.push(Given { numbers, ..base });
                cases.push(Given { numbers, given: true, ..base });
            }
            for head_dim in [1, 8, 12, 80, 96, 256] {
                cases.push(Given { buffer: [1, 2, 64, head_dim], ..base });
            }
            for group in [8, 16, 24, 64, 128, 256] {
                let n = if along == Along::Tokens { group } else { 3 };
                let slots = 2 * n;
                // Wraps around the end of the ring buffer.
                cases.push(Given { buffer: [1, 2, slots, 80], group, n, slot: slots - n / 8 * 8, ..base });
                cases.push(Given { buffer: [1, 2, slots, 80], group, n, slot: 3 * slots, ..base });
            }
            cases.push(Given { layout: Swapped(1, 2), ..base });
            cases.push(Given { layout: Cut(2), ..base });
            cases.push(Given { n: 0, ..base });
        }
    }
    for group in [8, 64] {
        cases.push(Given { group, n: 64, slot: 64, along: Along::Tokens, buffer: [1, 1, 192, 12], ..base });
    }
    cases
}

impl Given {
    fn packing(&self) -> Packing {
        Packing::new(self.bits, self.group, self.along).unwrap()
    }

    fn together(&self) -> usize {
        if self.along == Along::Tokens { self.group } else { 1 }
    }

    fn slot(&self) -> usize {
        self.slot / self.together() * self.together()
    }

    /// Returns tokens, `[batch, kv_heads, n, head_dim]`, scales and offsets.
    fn numbers(&self) -> [Vec<f32>; 3] {
        let [batch, heads, _, dim] = self.buffer;
        let mut seed = 7u32;
        let mut next = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 8
        };
        let largest = ((1 << self.bits) - 1) as f32;
        let number = |random: u32| {
            let usual = random as f32 / (1 << 22) as f32 - 2.0;
            match self.numbers {
                Usual => usual,
                Odd => match random % 41 {
                    0 => f32::NAN,
                    1 => f32::INFINITY,
                    2 => f32::NEG_INFINITY,
                    3 => 1e-40,
                    4 => -1e-40,
                    5 => -0.0,
                    _ => usual * (2f32).powi((random % 83) as i32 / 2 - 24),
                },
                // Chosen so that the offset is 0 and the scale is 1, or nearly.
                Ties => match random % 9 {
                    0 => 0.0,
                    1 => largest,
                    _ => (random % (2 * largest as u32 + 1)) as f32 / 2.0,
                },
                Constant => -1.7,
            }
        };
        let tokens = (0..batch * heads * self.n * dim).map(|_| number(next())).collect();
        let scales: usize = self.scales([batch, heads, self.n, dim]).iter().product();
        let mut given = |from: f32, to: f32| -> Vec<f32> {
            (0..scales).map(|_| from + (to - from) * (next() as f32 / (1 << 24) as f32)).collect()
        };
        let (scale, offset) = match self.numbers {
            Ties => (vec![1.0; scales], vec![0.0; scales]),
            Odd => (given(-1e-6, 1e-5), given(-1e6, 1e6)),
            _ => (given(0.0, 4.0 / largest), given(-2.0, 0.0)),
        };
        [tokens, scale, offset]
    }

    fn scales(&self, [batch, heads, slots, dim]: [usize; 4]) -> [usize; 4] {
        match self.along {
            Along::Channels => [batch, heads, slots, dim.div_ceil(self.group)],
            Along::Tokens => [batch, heads, slots / self.group, dim],
        }
    }

    /// Returns the group of a number: its index within a batch row and head.
    fn group_of(&self, token: usize, channel: usize) -> usize {
        let dim = self.buffer[3];
        match self.along {
            Along::Channels => token * dim.div_ceil(self.group) + channel / self.group,
            Along::Tokens => token / self.group * dim + channel,
        }
    }

    /// Returns the codes and scales of the buffer, and the numbers that they encode, which are 0 in unwritten
    /// slots.
    fn meaning(&self, dtype: DType) -> (Vec<u32>, Vec<u32>, Vec<f32>) {
        let [batch, heads, slots, dim] = self.buffer;
        let [tokens, scale, offset] = self.numbers();
        let rounded = |x: f32| match dtype {
            DType::F16 => f16::from_f32(x).to_f32(),
            _ => x,
        };
        let finite = |x: f32| match x {
            x if x.is_nan() || x.abs() < f32::MIN_POSITIVE => 0.0,
            x => x.clamp(-65504.0, 65504.0),
        };
        let most = (1u32 << self.bits) - 1;
        let a_word = 32 / self.bits;
        let channels = if self.along == Along::Channels { self.group.min(dim) } else { dim };
        let words = channels.div_ceil(a_word);
        let width = dim.div_ceil(channels) * words;
        let groups: usize = self.scales(self.buffer)[2..].iter().product();
        let new_groups: usize = self.scales([1, 1, self.n, dim]).iter().product();
        let mut codes = vec![0u32; batch * heads * slots * width];
        let mut scales = vec![0u32; batch * heads * groups];
        let mut numbers = vec![0f32; batch * heads * slots * dim];
        for head in 0..batch * heads {
            let x = |token: usize, channel: usize| {
                finite(rounded(tokens[(head * self.n + token) * dim + channel]))
            };
            let mut bounds = vec![(f32::INFINITY, f32::NEG_INFINITY); new_groups];
            for (token, channel) in
                (0..self.n).flat_map(|token| (0..dim).map(move |channel| (token, channel)))
            {
                let bounds = &mut bounds[self.group_of(token, channel)];
                *bounds = (bounds.0.min(x(token, channel)), bounds.1.max(x(token, channel)));
            }
            let halves = |group: usize| -> (f16, f16) {
                if self.given {
                    let near = |x: f32| f16::from_f32(finite(x));
                    let at = head * new_groups + group;
                    let (scale, offset) = (near(scale[at].max(0.0)), near(offset[at]));
                    return (scale, if offset == f16::ZERO { f16::ZERO } else { offset });
                }
                let (least, largest) = bounds[group];
                let offset = below(least);
                let range = largest - offset.to_f32();
                if range < (2f32).powi(-24) {
                    return (f16::ZERO, offset);
                }
                let scale = range * (1.0 / most as f32);
                (above(scale), offset)
            };
            let halves: Vec<_> = (0..new_groups).map(halves).collect();
            for (token, channel) in
                (0..self.n).flat_map(|token| (0..dim).map(move |channel| (token, channel)))
            {
                let slot = (self.slot() + token) % slots;
                let (scale, offset) = halves[self.group_of(token, channel)];
                let at = head * groups + self.group_of(slot, channel);
                scales[at] = u32::from(scale.to_bits()) | u32::from(offset.to_bits()) << 16;
                let (scale, offset) = (scale.to_f32(), offset.to_f32());
                let difference = f64::from((x(token, channel) - offset).max(0.0));
                let distance = |code: u32| (difference - f64::from(code) * f64::from(scale)).abs();
                let nearest = |a: u32, b: u32| {
                    let odd = |code: u32| code % 2;
                    distance(a).total_cmp(&distance(b)).then(odd(a).cmp(&odd(b)))
                };
                let code = if scale == 0.0 { 0 } else { (0..=most).min_by(|a, b| nearest(*a, *b)).unwrap() };
                let (group, i) = (channel / channels, channel % channels);
                let word = (head * slots + slot) * width + group * words + i / a_word;
                codes[word] |= code << (i % a_word * self.bits);
                numbers[(head * slots + slot) * dim + channel] = code as f32 * scale + offset;
            }
        }
        (codes, scales, numbers)
    }

    fn tensor(&self, numbers: Vec<f32>, shape: [usize; 4], device: &Device, dtype: DType) -> Tensor<4> {
        let plain = |numbers: Vec<f32>, shape| {
            Tensor::<4>::from_data(TensorData::new(numbers, shape), (device, DType::F32)).cast(dtype)
        };
        match self.layout {
            Plain => plain(numbers, shape),
            Swapped(a, b) => plain(numbers, shape).swap_dims(a, b).mul_scalar(1.0).swap_dims(a, b),
            Cut(dim) => {
                let mut first = shape;
                first[dim] = 1;
                let noise = plain(vec![f32::NAN; first.iter().product()], first);
                Tensor::cat(vec![noise, plain(numbers, shape)], dim).narrow(dim, 1, shape[dim])
            }
        }
    }
}

/// Returns all finite float16 numbers in ascending order, with a single 0.
fn halves() -> &'static [f32] {
    static HALVES: LazyLock<Vec<f32>> = LazyLock::new(|| {
        let negative = (0x8001..=0xfbffu16).rev();
        negative.chain(0..=0x7bff).map(|bits| f16::from_bits(bits).to_f32()).collect()
    });
    &HALVES
}

/// Returns the largest float16 that is not above `x`.
fn below(x: f32) -> f16 {
    f16::from_f32(halves()[halves().partition_point(|half| *half <= x) - 1])
}

/// Returns the smallest float16 that is not below `x`, or the largest finite one.
fn above(x: f32) -> f16 {
    f16::from_f32(halves()[halves().partition_point(|half| *half < x).min(halves().len() - 1)])
}

fn words(tensor: Tensor<4, Int>) -> Vec<u32> {
    read_back::read(tensor).unwrap().iter::<i32>().map(|word| word as u32).collect()
}

#[test]
fn packed_words_equal_those_of_plain_loops_on_every_device() {
    for dtype in [DType::F32, DType::F16] {
        for (i, given) in cases().into_iter().enumerate() {
            let (codes, scales, numbers) = given.meaning(dtype);
            for (name, device) in kiln_testkit::devices() {
                let is_left_out = cases_are("some") && name != "cpu" && i % 2 > 0;
                if is_left_out || !device.supports_dtype(dtype) {
                    continue;
                }
                for (choice, kernels) in choices(&name, &device) {
                    // References take hundreds of launches, and the implementation of `auto` need not run
                    // twice.
                    let slow = choice == Choice::Reference && name != "cpu" && given.bits != 4;
                    if slow || choice == Choice::Wgsl {
                        continue;
                    }
                    let what = format!("{choice} on {name}, {dtype:?}: {given:?}");
                    let [batch, heads, slots, dim] = given.buffer;
                    let packing = given.packing();
                    let [tokens, scale, offset] = given.numbers();
                    let tokens = given.tensor(tokens, [batch, heads, given.n, dim], &device, dtype);
                    let buffer = PackedBuffer::zeros(given.buffer, packing, &device);
                    let shape = given.scales([batch, heads, given.n, dim]);
                    let scales_of =
                        |numbers| Tensor::from_data(TensorData::new(numbers, shape), (&device, DType::F32));
                    let (slot, scales_given) = (given.slot(), [scale, offset].map(scales_of));
                    let scales_given = given.given.then_some(scales_given);
                    let buffer = kernels.run(KvPack { buffer, tokens, slot, packing, given: scales_given });
                    assert_eq!(words(buffer.codes.clone()), codes, "codes: {what}");
                    assert_eq!(words(buffer.scales.clone()), scales, "scales: {what}");

                    // All slots, and ranges that begin and end within groups.
                    for some in [0..slots, slots / 3..slots - 1, 3..3] {
                        let got = kernels.run(KvUnpack {
                            buffer: buffer.clone(),
                            packing,
                            head_dim: dim,
                            slots: some.clone(),
                            dtype: FloatDType::F32,
                        });
                        let got: Vec<f32> = read_back::read(got).unwrap().iter::<f32>().collect();
                        let heads = numbers.chunks(slots * dim);
                        let want: Vec<f32> =
                            heads.flat_map(|head| &head[some.start * dim..some.end * dim]).copied().collect();
                        assert!(got == want, "numbers of {some:?}: {what}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_packed_number_is_off_by_half_a_scale_at_most() {
    for given in cases().into_iter().filter(|given| !given.given && !matches!(given.numbers, Odd)) {
        let [batch, heads, slots, dim] = given.buffer;
        let (_, scales, numbers) = given.meaning(DType::F32);
        let [tokens, ..] = given.numbers();
        let groups: usize = given.scales(given.buffer)[2..].iter().product();
        for (i, x) in tokens.iter().enumerate() {
            let (head, token, channel) = (i / dim / given.n, i / dim % given.n, i % dim);
            let slot = (given.slot() + token) % slots;
            let scale = scales[head * groups + given.group_of(slot, channel)] & 0xffff;
            let half = f64::from(f16::from_bits(scale as u16).to_f32()) / 2.0;
            let off = f64::from(*x) - f64::from(numbers[(head * slots + slot) * dim + channel]);
            // The error of the smallest float16 scale in constant groups, and the rounding error of a
            // difference.
            let rounding = (2f64).powi(-24) * (1.0 + 4.0 * f64::from(x.abs()));
            assert!(off.abs() <= half + rounding, "{x} is off by {off}, scale {}: {given:?}", 2.0 * half);
        }
        assert_eq!(tokens.len(), batch * heads * given.n * dim);
    }
}

#[test]
fn impossible_packings_are_errors_that_list_what_is_possible() {
    let refused = |bits, group| Packing::new(bits, group, Along::Tokens).unwrap_err().to_string();
    assert_eq!(refused(5, 64), "bits: 5 bits are not possible; use 1, 2, 3, 4 or 8");
    for group in [0, 4, 20, 264] {
        let want = format!("group: groups of {group} are not possible; use a multiple of 8, up to 256");
        assert_eq!(refused(4, group), want);
    }
}
