//! Generator of the numbers in the inputs of cases.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use kiln_core::packed::{PackedBuffer, Packing};

/// The layout of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Plain,
    /// A view with these two dimensions exchanged.
    Swapped(usize, usize),
    /// A view from the second element of this dimension on.
    Cut(usize),
}
pub use Layout::{Cut, Plain, Swapped};

/// Generates inputs that are equal on every device.
#[derive(Debug)]
pub struct Numbers {
    device: Device,
    dtype: DType,
    seed: u32,
}

impl Numbers {
    pub fn new(device: &Device, dtype: DType) -> Self {
        Self { device: device.clone(), dtype, seed: 1 }
    }

    /// Generates a tensor with numbers from -2 to 2.
    pub fn tensor<const D: usize>(&mut self, shape: [usize; D], layout: Layout) -> Tensor<D> {
        self.tensor_where(shape, layout, |_| true)
    }

    /// Generates a packed buffer `[batch, kv_heads, slots, head_dim]` with random codes and scales, for
    /// numbers from -2 to 2. Unused bits are 0, as in every packed buffer.
    pub fn packed(&mut self, shape: [usize; 4], packing: Packing) -> PackedBuffer {
        let (head_dim, each) = (shape[3], packing.codes_a_word());
        let (channels, words) = (packing.channels_together(head_dim), packing.words_together(head_dim));
        let codes = self.words(packing.codes_shape(shape), |at, number| {
            let (group, word) = (at / words, at % words);
            let in_group = channels.min(head_dim - group * channels);
            let bits = in_group.saturating_sub(word * each).min(each) * packing.bits();
            number.to_bits().wrapping_mul(0x9e37_79b1) & u32::MAX.checked_shr(32 - bits as u32).unwrap_or(0)
        });
        let largest = packing.largest() as f32;
        let scales = self.words(packing.scales_shape(shape), |_, number| {
            let offset = half::f16::from_f32(-number.abs());
            let scale = half::f16::from_f32((2.0 + offset.to_f32()) / largest);
            u32::from(scale.to_bits()) | u32::from(offset.to_bits()) << 16
        });
        PackedBuffer { codes, scales }
    }

    /// Generates words. `word` maps a place in a row and a number from -2 to 2 to a word.
    fn words(&mut self, shape: [usize; 4], word: impl Fn(usize, f32) -> u32) -> Tensor<4, Int> {
        let place = |i| i % shape[3].max(1);
        let words: Vec<i32> =
            (0..shape.iter().product()).map(|i| word(place(i), self.next()) as i32).collect();
        Tensor::from_data(TensorData::new(words, shape), (&self.device, DType::I32))
    }

    /// The device of the inputs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The type of the inputs.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The type of the inputs, as the target of float casts.
    pub fn float_dtype(&self) -> FloatDType {
        match self.dtype {
            DType::F16 => FloatDType::F16,
            DType::BF16 => FloatDType::BF16,
            _ => FloatDType::F32,
        }
    }

    /// The next number, from -2 to 2, in 24 bits.
    pub(crate) fn next(&mut self) -> f32 {
        self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.seed >> 8) as f32 / (1 << 22) as f32 - 2.0
    }

    /// Generates a float32 tensor with numbers from -1 to 1.
    pub fn float32<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.laid_out(shape, Plain, DType::F32, |number, _| number / 2.0)
    }

    /// Generates a tensor with numbers from -2 to 2, and NaN where `used` returns false.
    pub fn tensor_where<const D: usize>(
        &mut self,
        shape: [usize; D],
        layout: Layout,
        used: impl Fn([usize; D]) -> bool,
    ) -> Tensor<D> {
        // Rounded here, because devices round the last digit differently.
        let round = match self.dtype {
            DType::F32 => |x| x,
            DType::F16 => |x| half::f16::from_f32(x).to_f32(),
            _ => |x| half::bf16::from_f32(x).to_f32(),
        };
        self.laid_out(shape, layout, self.dtype, |x, index| if used(index) { round(x) } else { f32::NAN })
    }

    /// Generates a tensor. `number` maps a number from -2 to 2 and an index to an element.
    fn laid_out<const D: usize>(
        &mut self,
        shape: [usize; D],
        layout: Layout,
        dtype: DType,
        number: impl Fn(f32, [usize; D]) -> f32,
    ) -> Tensor<D> {
        let mut stored = shape;
        match layout {
            Plain => {}
            Swapped(a, b) => stored.swap(a, b),
            Cut(dim) => stored[dim] += 1,
        }
        let next = |place: usize| {
            let mut rest = place;
            let mut index = [0; D];
            for dim in (0..D).rev() {
                (rest, index[dim]) = (rest / stored[dim], rest % stored[dim]);
            }
            match layout {
                Plain => {}
                Swapped(a, b) => index.swap(a, b),
                Cut(dim) => index[dim] = index[dim].saturating_sub(1),
            }
            number(self.next(), index)
        };
        let numbers: Vec<f32> = (0..stored.iter().product()).map(next).collect();
        let data = TensorData::new(numbers, stored);
        let tensor = Tensor::<D>::from_data(data, (&self.device, DType::F32)).cast(dtype);
        match layout {
            Plain => tensor,
            Swapped(a, b) => tensor.swap_dims(a, b),
            Cut(dim) => tensor.narrow(dim, 1, shape[dim]),
        }
    }
}
