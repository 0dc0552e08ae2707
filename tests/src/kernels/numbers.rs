//! What kernels are given: numbers that are the same on every device, in several layouts.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Plain,
    /// A view with these two dimensions exchanged.
    Swapped(usize, usize),
    /// A view from the second element of this dimension on.
    Cut(usize),
}
pub(super) use Layout::{Cut, Plain, Swapped};

/// Numbers are not larger.
pub(super) const LARGEST: f64 = 2.0;

/// Numbers that are the same on every device.
pub(super) struct Numbers {
    device: Device,
    dtype: DType,
    seed: u32,
}

impl Numbers {
    pub(super) fn new(device: &Device, dtype: DType) -> Self {
        Self { device: device.clone(), dtype, seed: 1 }
    }

    /// From -2 to 2.
    pub(super) fn tensor<const D: usize>(&mut self, shape: [usize; D], layout: Layout) -> Tensor<D> {
        self.tensor_where(shape, layout, |_| true)
    }

    /// From -1 to 1, in float32.
    pub(super) fn float32<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.laid_out(shape, Plain, DType::F32, |number, _| number / 2.0)
    }

    /// Not a number where `used` says no.
    pub(super) fn tensor_where<const D: usize>(
        &mut self,
        shape: [usize; D],
        layout: Layout,
        used: impl Fn([usize; D]) -> bool,
    ) -> Tensor<D> {
        // Rounded here: devices may round the last digit as they like.
        let round = match self.dtype {
            DType::F32 => |x| x,
            DType::F16 => |x| half::f16::from_f32(x).to_f32(),
            _ => |x| half::bf16::from_f32(x).to_f32(),
        };
        self.laid_out(shape, layout, self.dtype, |x, index| if used(index) { round(x) } else { f32::NAN })
    }

    /// What `number` makes of a number from -2 to 2, for each index.
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
            self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
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
            // 24 bits
            number((self.seed >> 8) as f32 / (1 << 22) as f32 - 2.0, index)
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
