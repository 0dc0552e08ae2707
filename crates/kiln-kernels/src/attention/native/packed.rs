//! Packed keys and values. Few queries go over the codes; many go over unpacked numbers, which stay in the
//! caches of the CPU.

use burn::backend::flex::FlexTensor;
use kiln_core::packed::{Along, Packing};
use kiln_products::attention::{Codes, Layout, affine};

use super::View;

/// A packed buffer of the backend.
#[derive(Clone, Copy)]
pub(super) struct PackedView<'a> {
    codes: View<'a, i32>,
    scales: View<'a, i32>,
    packing: Packing,
}

impl<'a> PackedView<'a> {
    /// Views a packed buffer. The words of consecutive tokens must be adjacent in memory, and so must their
    /// scales.
    pub(super) fn of([codes, scales]: [&'a FlexTensor; 2], packing: Packing) -> Self {
        Self { codes: View::of(codes), scales: View::of(scales), packing }
    }

    /// The codes of a head.
    pub(super) fn codes(&self, row: usize, head: usize, head_dim: usize) -> Codes<'_> {
        let [words, scales] = [&self.codes, &self.scales].map(|view| {
            let words = &view.numbers[view.place([row, head, 0]) as usize..];
            bytemuck::cast_slice(words)
        });
        let layout = Layout {
            head_dim,
            bits: self.packing.bits(),
            channels: self.packing.channels_together(head_dim),
            tokens: (self.packing.along() == Along::Tokens).then_some(self.packing.group()),
        };
        Codes::new(words, scales, layout)
    }

    /// Reads the vectors in `n` slots, `width` numbers each, of which `dim` are written.
    #[inline(always)]
    pub(super) fn read(&self, at: [usize; 3], sizes: [usize; 3], numbers: &mut [f32]) {
        match self.packing.bits() {
            1 => self.read_bits::<1, 32>(at, sizes, numbers),
            2 => self.read_bits::<2, 16>(at, sizes, numbers),
            3 => self.read_bits::<3, 10>(at, sizes, numbers),
            4 => self.read_bits::<4, 8>(at, sizes, numbers),
            _ => self.read_bits::<8, 4>(at, sizes, numbers),
        }
    }

    #[inline(always)]
    fn read_bits<const BITS: usize, const CODES: usize>(
        &self,
        [batch, head, slot]: [usize; 3],
        [n, dim, width]: [usize; 3],
        numbers: &mut [f32],
    ) {
        let group = self.packing.group();
        let (channels, words) = (self.packing.channels_together(dim), self.packing.words_together(dim));
        let along_tokens = self.packing.along() == Along::Tokens;
        let (mut scales, mut offsets) = (vec![0.0; dim], vec![0.0; dim]);
        for i in 0..n {
            let vector = &mut numbers[i * width..][..dim];
            let codes = &self.codes.numbers[self.codes.place([batch, head, slot + i]) as usize..];
            if along_tokens {
                if i == 0 || (slot + i).is_multiple_of(group) {
                    let halves = self.scales.place([batch, head, (slot + i) / group]) as usize;
                    let halves = &self.scales.numbers[halves..][..dim];
                    for d in 0..dim {
                        (scales[d], offsets[d]) = affine(halves[d].cast_unsigned());
                    }
                }
                let mut d = 0;
                while d + CODES <= dim {
                    let (scales, offsets) = (&scales[d..][..CODES], &offsets[d..][..CODES]);
                    let (vector, codes) =
                        (&mut vector[d..][..CODES], codes_of::<BITS, CODES>(codes[d / CODES]));
                    for c in 0..CODES {
                        vector[c] = codes[c] * scales[c] + offsets[c];
                    }
                    d += CODES;
                }
                if d < dim {
                    let codes = codes_of::<BITS, CODES>(codes[d / CODES]);
                    for c in 0..dim - d {
                        vector[d + c] = codes[c] * scales[d + c] + offsets[d + c];
                    }
                }
            } else {
                let halves = self.scales.place([batch, head, slot + i]) as usize;
                let halves = &self.scales.numbers[halves..];
                let mut first = 0;
                while first < dim {
                    let (scale, offset) = affine(halves[first / channels].cast_unsigned());
                    let codes = &codes[first / channels * words..];
                    let vector = &mut vector[first..dim.min(first + channels)];
                    let mut d = 0;
                    while d + CODES <= vector.len() {
                        let codes = codes_of::<BITS, CODES>(codes[d / CODES]);
                        let vector = &mut vector[d..][..CODES];
                        for c in 0..CODES {
                            vector[c] = codes[c] * scale + offset;
                        }
                        d += CODES;
                    }
                    if d < vector.len() {
                        let codes = codes_of::<BITS, CODES>(codes[d / CODES]);
                        for c in 0..vector.len() - d {
                            vector[d + c] = codes[c] * scale + offset;
                        }
                    }
                    first += channels;
                }
            }
        }
    }
}

/// Unpacks the codes in a word.
#[inline(always)]
fn codes_of<const BITS: usize, const CODES: usize>(word: i32) -> [f32; CODES] {
    std::array::from_fn(|i| ((word as u32 >> (i * BITS)) & ((1 << BITS) - 1)) as i32 as f32)
}
