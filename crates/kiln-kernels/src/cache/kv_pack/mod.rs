//! Packs keys or values into few bits, and writes them into a ring buffer of slots.
//!
//! For each group, `offset` is the smallest number, rounded down to float16, and `scale` is
//! `(largest - offset) / (2^bits - 1)`, rounded up, so that codes reach the largest number; it is 0 if that
//! is less than the smallest float16. This is the asymmetric quantization of KIVI
//! (<https://arxiv.org/abs/2402.02750>).
//!
//! `code = clamp(round((x - offset) / scale), 0, 2^bits - 1)`, with ties to even. The difference is rounded
//! to float32 and the rest is exact: no quotient is rounded, because devices round quotients differently. So
//! the words are the same on every device. The error of a number is at most half a scale.
//!
//! Numbers outside the range of float16 count as its largest number, and NaN counts as 0.

#[cfg(feature = "cube")]
mod cube;

use burn::tensor::{DType, Int, Tensor};
use kiln_core::packed::{Along, PackedBuffer, Packing};

use crate::{
    runtime::{
        half::{self, Rounding, SMALLEST},
        kernel::Kernel,
        shader::{Lines, Shader, reads, updates},
    },
    testing::{
        case::Case,
        checked::Checked,
        cut::{Extent, cut_buffer, cut_rows},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Packs new tokens into a ring buffer: token `i` into slot `(slot + i) mod slots`. Returns the buffer.
///
/// Writes in place if `buffer` is the only handle of its memory, and to a copy otherwise. The words are equal
/// on every device.
#[derive(Clone, Debug)]
pub struct KvPack {
    /// Packed `[batch, kv_heads, slots, head_dim]`
    pub buffer: PackedBuffer,
    /// `[batch, kv_heads, n, head_dim]`, with `n <= slots`; groups along tokens divide `n`
    pub tokens: Tensor<4>,
    /// Slot of the first token; a multiple of the size of groups along tokens.
    pub slot: usize,
    pub packing: Packing,
    /// Scales and offsets of the tokens ([`Packing::scales_shape`]), replacing those computed from the
    /// numbers. They are rounded to the nearest float16; a scale below 0 counts as 0.
    pub given: Option<[Tensor<4>; 2]>,
}

impl Kernel for KvPack {
    const NAME: &'static str = "kv_pack";
    type Output = PackedBuffer;

    fn checked(self) -> Self {
        let Self { buffer, tokens, slot, packing, given } = &self;
        let ([batch, heads, n, head_dim], slots) = (tokens.dims(), buffer.slots());
        fits(Self::NAME, buffer, *packing, [batch, heads, slots, head_dim]);
        let together = packing.slots_together();
        assert!(n <= slots, "kv_pack: {n} tokens into {slots} slots");
        assert!(
            n.is_multiple_of(together) && slot.is_multiple_of(together),
            "kv_pack: {n} tokens from slot {slot} on are no groups of {together}"
        );
        for given in given.iter().flatten() {
            let shape = packing.scales_shape(tokens.dims());
            assert_eq!(given.dims(), shape, "kv_pack: scales of tokens {:?}", tokens.dims());
        }
        self
    }

    fn shape(&self) -> Vec<usize> {
        self.tokens.dims().into()
    }

    fn reference(self) -> PackedBuffer {
        let Self { buffer, tokens, slot, packing, given } = self;
        let dims = tokens.dims();
        if tokens.shape().num_elements() == 0 {
            return buffer;
        }
        let numbers = finite(tokens);
        let scales = match given {
            Some([scale, offset]) => {
                let scale = half::bits(finite(scale).clamp_min(0.0), Rounding::Nearest);
                words(scale, half::bits(finite(offset), Rounding::Nearest))
            }
            None => scales(&numbers, packing),
        };
        let scale = spread(half::numbers(scales.clone()), packing, dims);
        let offset = spread(half::numbers(scales.clone().bitwise_right_shift_scalar(16)), packing, dims);
        let codes = codes(numbers, scale, offset, packing);
        let slots = buffer.slots();
        let group = packing.slots_together();
        PackedBuffer {
            codes: write(buffer.codes, pack(codes, packing), slot % slots),
            scales: write(buffer.scales, scales, slot % slots / group),
        }
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<PackedBuffer, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, primitive, strides, to_write},
            shaders::{kv_pack, kv_scales},
        };

        let Self { buffer, tokens, slot, packing, given } = self;
        let [batch, heads, n, dim] = tokens.dims();
        if tokens.shape().num_elements() == 0 {
            return Ok(buffer);
        }
        let slots = buffer.slots();
        let [_, _, all_rows, columns] = buffer.scales.dims();
        let rows = n / packing.slots_together();
        let words = packing.words(dim);
        let is_given = given.is_some();
        let measured =
            given.map_or_else(|| tokens.clone(), |given| Tensor::cat(given.to_vec(), 3).cast(DType::F32));
        let (tokens, measured) = (primitive(tokens), primitive(measured));
        let (codes, scales) = (to_write(primitive(buffer.codes)), to_write(primitive(buffer.scales)));
        let client = codes.client.clone();
        let [along, bits] = picks(packing);

        let invocations = batch * heads * rows * columns;
        let info = kv_scales::Info {
            token_strides: strides(&measured),
            scale_strides: strides(&scales),
            heads: heads as u32,
            rows: rows as u32,
            columns: columns as u32,
            head_dim: dim as u32,
            group: packing.group() as u32,
            row: (slot % slots / packing.slots_together()) as u32,
            all_rows: all_rows as u32,
            invocations: invocations as u32,
            reciprocal: 1.0 / packing.largest() as f32,
        };
        let launch = Launch::new(&SCALES, measured.dtype, &client).with(&[along, usize::from(is_given)]);
        launch.run(invocations.div_ceil(LANES), [&measured, &scales], info);

        let invocations = batch * heads * n * words;
        let info = kv_pack::Info {
            token_strides: strides(&tokens),
            code_strides: strides(&codes),
            scale_strides: strides(&scales),
            heads: heads as u32,
            tokens: n as u32,
            head_dim: dim as u32,
            words: words as u32,
            group: packing.group() as u32,
            channels_together: packing.channels_together(dim) as u32,
            words_together: packing.words_together(dim) as u32,
            slot: (slot % slots) as u32,
            slots: slots as u32,
            invocations: invocations as u32,
        };
        let launch = Launch::new(&CODES, tokens.dtype, &client).with(&[along, bits]);
        launch.run(invocations.div_ceil(LANES), [&tokens, &codes, &scales], info);
        Ok(PackedBuffer {
            codes: Tensor::from_primitive::<Cube>(codes),
            scales: Tensor::from_primitive::<Cube>(scales),
        })
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<PackedBuffer, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for KvPack {
    fn extent(&self) -> [usize; 2] {
        [self.tokens.dims()[0], 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        let given = self.given.map(|given| given.map(|numbers| cut_rows(numbers, &rows)));
        let buffer = cut_buffer(self.buffer, &rows);
        Self { buffer, tokens: cut_rows(self.tokens, &rows), given, ..self }
    }

    fn part_of(whole: PackedBuffer, [rows, _]: Extent) -> PackedBuffer {
        cut_buffer(whole, &rows)
    }

    fn shaders() -> &'static [Shader] {
        &[SCALES, CODES]
    }

    fn cases() -> Vec<Case<Self>> {
        let mut cases = Vec::new();
        for bits in Packing::BITS {
            for along in [Along::Channels, Along::Tokens] {
                for (layout, given) in [(Plain, false), (Plain, true), (Swapped(1, 2), false), (Cut(2), true)]
                {
                    cases.push(Given {
                        shape: [2, 2, 64, 64],
                        n: 32,
                        slot: 0,
                        group: 32,
                        bits,
                        along,
                        layout,
                        given,
                    });
                    let (n, slot) = if along == Along::Tokens { (24, 48) } else { (7, 45) };
                    cases.push(Given {
                        shape: [1, 3, 48, 80],
                        n,
                        slot,
                        group: 24,
                        bits,
                        along,
                        layout,
                        given,
                    });
                }
            }
        }
        let case = |given: Given| {
            let packing = Packing::new(given.bits, given.group, given.along).ok()?;
            Some(Case::new(given, move |numbers| given.inputs(packing, numbers)).without_native())
        };
        cases.into_iter().filter_map(case).collect()
    }
}

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    /// `[batch, kv_heads, slots, head_dim]`
    shape: [usize; 4],
    n: usize,
    slot: usize,
    bits: usize,
    group: usize,
    along: Along,
    layout: Layout,
    /// Whether scales are given.
    given: bool,
}

impl Given {
    fn inputs(&self, packing: Packing, numbers: &mut Numbers) -> KvPack {
        let [batch, heads, _, head_dim] = self.shape;
        let new = [batch, heads, self.n, head_dim];
        let mut scales = |layout| numbers.tensor(packing.scales_shape(new), layout);
        let given = self.given.then(|| [scales(Plain).abs(), scales(Plain)]);
        let (buffer, tokens) = (numbers.packed(self.shape, packing), numbers.tensor(new, self.layout));
        KvPack { buffer, tokens, slot: self.slot, packing, given }
    }
}

/// Checks the shape of a packed buffer.
///
/// # Panics
/// If `buffer` does not have this shape and packing.
pub(crate) fn fits(kernel: &str, buffer: &PackedBuffer, packing: Packing, shape: [usize; 4]) {
    assert_eq!(buffer.codes.dims(), packing.codes_shape(shape), "{kernel}: codes of {shape:?}");
    assert_eq!(buffer.scales.dims(), packing.scales_shape(shape), "{kernel}: scales of {shape:?}");
    let together = packing.slots_together();
    assert!(shape[2].is_multiple_of(together), "{kernel}: {} slots are no groups of {together}", shape[2]);
}

/// Casts to float32 and clamps to the range of float16. NaN becomes 0, and so do subnormal float32 numbers,
/// which some devices flush.
fn finite(x: Tensor<4>) -> Tensor<4> {
    let x = x.cast(DType::F32);
    let x = x.clone().mask_fill(x.is_nan(), 0.0).clamp(-half::LARGEST, half::LARGEST);
    let small = x.clone().abs().lower_elem(f32::MIN_POSITIVE);
    x.mask_fill(small, 0.0)
}

/// Joins a scale in the low half and an offset in the high half of each word.
fn words(scale: Tensor<4, Int>, offset: Tensor<4, Int>) -> Tensor<4, Int> {
    offset.bitwise_left_shift_scalar(16).bitwise_or(scale)
}

fn scales(numbers: &Tensor<4>, packing: Packing) -> Tensor<4, Int> {
    let [batch, heads, n, dim] = numbers.dims();
    let group = packing.group();
    let (groups, axis): (Tensor<5>, usize) = match packing.along() {
        Along::Channels => {
            // Padded with the last number, which changes neither the smallest nor the largest of its group.
            let count = dim.div_ceil(group);
            let mut whole = numbers.clone();
            if count * group > dim {
                let last = numbers.clone().narrow(3, dim - 1, 1);
                whole = Tensor::cat(vec![whole, last.expand([batch, heads, n, count * group - dim])], 3);
            }
            (whole.reshape([batch, heads, n, count, group]), 4)
        }
        Along::Tokens => (numbers.clone().reshape([batch, heads, n / group, group, dim]), 3),
    };
    let smallest: Tensor<4> = groups.clone().min_dim(axis).squeeze_dim(axis);
    let largest: Tensor<4> = groups.max_dim(axis).squeeze_dim(axis);
    let offset = half::bits(smallest, Rounding::Down);
    let range = largest - half::numbers(offset.clone());
    let none = range.clone().lower_elem(SMALLEST);
    let scale = half::bits(range * (1.0 / packing.largest() as f32), Rounding::Up);
    words(scale.mask_fill(none, 0), offset)
}

/// Repeats the number of each group for all numbers in it.
pub(crate) fn spread(groups: Tensor<4>, packing: Packing, dims: [usize; 4]) -> Tensor<4> {
    let ([batch, heads, n, dim], [_, _, rows, columns]) = (dims, groups.dims());
    let group = packing.group();
    match packing.along() {
        Along::Channels => {
            let all = groups.unsqueeze_dim::<5>(4).expand([batch, heads, n, columns, group]);
            all.reshape([batch, heads, n, columns * group]).narrow(3, 0, dim)
        }
        Along::Tokens => {
            let all = groups.unsqueeze_dim::<5>(3).expand([batch, heads, rows, group, dim]);
            all.reshape([batch, heads, n, dim])
        }
    }
}

fn codes(x: Tensor<4>, scale: Tensor<4>, offset: Tensor<4>, packing: Packing) -> Tensor<4, Int> {
    let most = packing.largest() as f32;
    let difference = (x - offset).clamp_min(0.0);
    let constant = scale.clone().equal_elem(0.0);
    let estimate =
        (difference.clone() / scale.clone().mask_fill(constant.clone(), 1.0)).clamp_max(most).round();
    // The midpoints between a code and its neighbours are exact: odd numbers times half of a scale.
    let odd = (estimate.clone() * 0.5).floor() * 2.0;
    let odd = odd.not_equal(estimate.clone());
    let middle = |add: f32| (estimate.clone() * 2.0 + add) * (scale.clone() * 0.5);
    let at = |middle: Tensor<4>| difference.clone().equal(middle).bool_and(odd.clone());
    let above = difference.clone().greater(middle(1.0)).bool_or(at(middle(1.0)));
    let below = difference.clone().lower(middle(-1.0)).bool_or(at(middle(-1.0)));
    let code = estimate.clone().mask_where(above, estimate.clone() + 1.0);
    let code = code.mask_where(below, estimate - 1.0).clamp(0.0, most);
    code.mask_fill(constant, 0.0).int().cast(DType::I32)
}

/// Packs codes `[.., dim]` into words `[.., words]`.
fn pack(codes: Tensor<4, Int>, packing: Packing) -> Tensor<4, Int> {
    let [batch, heads, n, dim] = codes.dims();
    let (channels, count) = (packing.channels_together(dim), packing.words_together(dim));
    let (groups, each) = (dim.div_ceil(channels), packing.codes_a_word());
    let device = codes.device();
    let zeros = |shape| Tensor::<4, Int>::zeros(shape, (&device, DType::I32));
    let mut codes = codes;
    if groups * channels > dim {
        codes = Tensor::cat(vec![codes, zeros([batch, heads, n, groups * channels - dim])], 3);
    }
    let mut codes: Tensor<4, Int> = codes.reshape([batch, heads, n * groups, channels]);
    if count * each > channels {
        codes = Tensor::cat(vec![codes, zeros([batch, heads, n * groups, count * each - channels])], 3);
    }
    let codes: Tensor<5, Int> = codes.reshape([batch, heads, n, groups * count, each]);
    let mut words = zeros([batch, heads, n, groups * count]);
    for i in 0..each {
        let code: Tensor<4, Int> = codes.clone().narrow(4, i, 1).squeeze_dim(4);
        words = words.bitwise_or(code.bitwise_left_shift_scalar((i * packing.bits()) as i32));
    }
    words
}

/// Writes rows from `row` on, wrapping to the first after the last.
fn write(buffer: Tensor<4, Int>, rows: Tensor<4, Int>, row: usize) -> Tensor<4, Int> {
    let [batch, heads, slots, width] = buffer.dims();
    let n = rows.dims()[2];
    let straight = n.min(slots - row);
    let buffer = buffer.slice_assign(
        [0..batch, 0..heads, row..row + straight, 0..width],
        rows.clone().narrow(2, 0, straight),
    );
    if straight == n {
        return buffer;
    }
    buffer
        .slice_assign([0..batch, 0..heads, 0..n - straight, 0..width], rows.narrow(2, straight, n - straight))
}

const ALONG: Lines = || &["const ALONG_TOKENS = false;", "const ALONG_TOKENS = true;"];

const BITS: Lines =
    || &["const BITS = 4u;", "const BITS = 1u;", "const BITS = 2u;", "const BITS = 3u;", "const BITS = 8u;"];

const SCALES: Shader = Shader {
    name: "kv_scales",
    bindings: &[reads("tokens"), updates("scales")],
    text: include_str!("../../../../../shaders/kv_scales.wgsl"),
    options: &[ALONG, || &["const GIVEN = false;", "const GIVEN = true;"]],
};

const CODES: Shader = Shader {
    name: "kv_pack",
    bindings: &[reads("tokens"), updates("codes"), reads("scales")],
    text: include_str!("../../../../../shaders/kv_pack.wgsl"),
    options: OPTIONS,
};

/// Options of all shaders that read codes in one packing.
pub(crate) const OPTIONS: &[Lines] = &[ALONG, BITS];

/// The lines for a packing.
#[cfg(feature = "wgpu")]
pub(crate) fn picks(packing: Packing) -> [usize; 2] {
    let bits = match packing.bits() {
        1 => 1,
        2 => 2,
        3 => 3,
        8 => 4,
        _ => 0,
    };
    [usize::from(packing.along() == Along::Tokens), bits]
}
