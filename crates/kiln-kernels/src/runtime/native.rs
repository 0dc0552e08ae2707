//! Shared parts of native code on the CPU: tensors as the backend sees them, number types, functions and
//! instructions.

mod functions;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{BackendPrimitive, Element, Tensor, TensorData, bf16, f16, kind::Basic},
};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use kiln_products::threads::share;
use kiln_simd::Instructions;
use pulp::{Arch, Simd, WithSimd};

pub(crate) use self::functions::{float_of_half, silu, sum, sum_of_squares};
pub(crate) use kiln_products::threads::pieces;

/// Does work in pieces, with the best instructions that [`kiln_simd::run`] may use.
pub(crate) fn work<P: WithSimd<Output = ()> + Send>(products: usize, pieces: Vec<P>) {
    share(products, pieces, |piece| {
        #[cfg(target_arch = "x86_64")]
        match kiln_simd::best() {
            Instructions::Plain => return Simd::vectorize(pulp::Scalar::new(), piece),
            Instructions::Avx2 | Instructions::AvxVnni => {
                if let Some(simd) = pulp::x86::V3::try_new() {
                    return Simd::vectorize(simd, piece);
                }
            }
            Instructions::Neon | Instructions::NeonDotprod | Instructions::Avx512 => {}
        }
        Arch::new().dispatch(piece);
    });
}

/// Returns the backend's tensor.
///
/// # Panics
/// On a tensor of another backend, as Burn does wherever devices are mixed.
pub(crate) fn primitive<const D: usize, K>(tensor: Tensor<D, K>) -> FlexTensor
where
    K: Basic + BackendPrimitive<Flex, Primitive = FlexTensor>,
{
    tensor.try_into_primitive::<Flex>().expect("the tensors of a kernel are on its device")
}

/// Numbers that are rounded at a time.
const ROUNDED: usize = 256;

/// A type in which numbers are stored.
pub(crate) trait Storage: Element + Pod + Default + Send + Sync {
    /// Returns the numbers as they are, if they are float32 already.
    fn floats(numbers: &[Self]) -> Option<&[f32]> {
        let _ = numbers;
        None
    }

    fn widen(from: &[Self], to: &mut [f32]);

    /// Rounds to the nearest stored number.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// Rounds numbers in place, as storing them does.
    #[inline(always)]
    fn round(numbers: &mut [f32]) {
        let mut stored = [Self::default(); ROUNDED];
        for numbers in numbers.chunks_mut(ROUNDED) {
            let stored = &mut stored[..numbers.len()];
            Self::narrow(numbers, stored);
            Self::widen(stored, numbers);
        }
    }

    /// Returns numbers in float32, converted into `widened` unless they are stored in that type.
    #[inline(always)]
    fn in_floats<'a>(numbers: &'a [Self], widened: &'a mut Vec<f32>) -> &'a [f32] {
        match Self::floats(numbers) {
            Some(floats) => floats,
            None => {
                widened.resize(numbers.len(), 0.0);
                Self::widen(numbers, widened);
                widened
            }
        }
    }

    /// Rounds to the nearest stored numbers.
    fn of_floats(numbers: Vec<f32>) -> Vec<Self> {
        let mut narrowed = vec![Self::default(); numbers.len()];
        Self::narrow(&numbers, &mut narrowed);
        narrowed
    }
}

impl Storage for f32 {
    fn floats(numbers: &[Self]) -> Option<&[f32]> {
        Some(numbers)
    }

    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn round(_: &mut [f32]) {}

    fn of_floats(numbers: Vec<f32>) -> Vec<Self> {
        numbers
    }
}

// Numbers are widened here and not by the functions of `half`, which are not compiled for the instruction set
// of the kernel that calls them.
impl Storage for f16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = float_of_half(from.to_bits());
        }
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Storage for bf16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// Evaluates an expression with the stored type of numbers, and another one for types without native code.
macro_rules! by_storage {
    ($dtype:expr, $stored:ident => $then:expr, else $otherwise:expr) => {
        match $dtype {
            burn::tensor::DType::F32 => {
                type $stored = f32;
                $then
            }
            burn::tensor::DType::F16 => {
                type $stored = burn::tensor::f16;
                $then
            }
            burn::tensor::DType::BF16 => {
                type $stored = burn::tensor::bf16;
                $then
            }
            _ => $otherwise,
        }
    };
}
pub(crate) use by_storage;

/// Vectors that are computed one by one, each from its own inputs.
pub(crate) trait Rows<E>: Sync {
    /// Computes a vector. Should be inlined, so that it is compiled for the detected instruction set.
    fn compute(&self, vector: usize, numbers: &mut [f32]);
}

/// Computes all `count` vectors of `width` numbers, rounded to their type. `operations` is an estimate per
/// number.
pub(crate) fn computed<E: Storage>(
    rows: &impl Rows<E>,
    [count, width]: [usize; 2],
    operations: usize,
) -> Vec<E> {
    let mut y = vec![E::default(); count * width];
    let products = operations * y.len();
    let each = count.div_ceil(pieces(products));
    let piece = |(i, y)| Piece { rows, width, first: i * each, y };
    work(products, y.chunks_mut(each * width).enumerate().map(piece).collect());
    y
}

/// Some vectors, from `first` on.
struct Piece<'a, R, E> {
    rows: &'a R,
    width: usize,
    first: usize,
    y: &'a mut [E],
}

impl<R: Rows<E>, E: Storage> WithSimd for Piece<'_, R, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { rows, width, first, y } = self;
        let mut numbers = vec![0.0; width];
        for (i, y) in y.chunks_mut(width).enumerate() {
            rows.compute(first + i, &mut numbers);
            E::narrow(&numbers, y);
        }
    }
}

/// The numbers of data whose type was checked.
pub(crate) fn numbers<E: Storage>(data: &TensorData) -> &[E] {
    data.as_slice().expect("the type was looked at")
}

/// Vectors `[rows, tokens, width]` in float32, borrowed from the tensor if it stores them in that form.
pub(crate) struct Vectors<'a> {
    numbers: &'a [f32],
    start: usize,
    /// Strides of rows and of tokens.
    strides: [usize; 2],
}

impl<'a> Vectors<'a> {
    /// The vectors of `tensor`. They are copied to `copy` if they have another type, or have gaps.
    pub(crate) fn of<E: Storage>(tensor: &'a FlexTensor, copy: &'a mut Vec<f32>) -> Self {
        let layout = tensor.layout();
        let (shape, strides) = (layout.shape(), layout.strides());
        let width = shape[2];
        let forward = strides.iter().all(|&stride| stride >= 0) && (strides[2] == 1 || width == 1);
        match E::floats(tensor.storage()).filter(|_| forward) {
            Some(numbers) => Self {
                numbers,
                start: layout.start_offset(),
                strides: [strides[0] as usize, strides[1] as usize],
            },
            None => {
                let whole = tensor.to_contiguous();
                copy.resize(shape.num_elements(), 0.0);
                E::widen(whole.as_slice().expect("the type was looked at"), copy);
                Self { numbers: copy, start: 0, strides: [shape[1] * width, width] }
            }
        }
    }

    /// The vector of a token, followed by the rest of the memory.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, token: usize) -> &'a [f32] {
        &self.numbers[self.start + row * self.strides[0] + token * self.strides[1]..]
    }
}
