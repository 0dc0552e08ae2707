//! Shared parts of the native implementations of kernels on the CPU: access to the numbers of the backend's
//! tensors, number types, functions, and dispatch to instruction sets and threads.

mod functions;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{BackendPrimitive, Element, Tensor, TensorData, bf16, f16, kind::Basic},
};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use kiln_products::{attention::Numbers, threads::share};
#[cfg(target_arch = "x86_64")]
use kiln_simd::Instructions;
use pulp::{Arch, Simd, WithSimd};

pub(crate) use self::functions::{float_of_half, silu, sum, sum_of_squares};
pub(crate) use kiln_products::threads::pieces;

/// Runs each piece with the best instructions that [`kiln_simd::run`] may use, on as many threads as
/// `products` multiplications in total are worth.
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
            Instructions::Simd128 | Instructions::Neon | Instructions::NeonDotprod | Instructions::Avx512 => {
            }
        }
        Arch::new().dispatch(piece);
    });
}

/// Returns the tensor of Flex, the backend of the CPU.
///
/// # Panics
/// If the tensor is on another backend. Burn panics, too, if devices are mixed.
pub(crate) fn primitive<const D: usize, K>(tensor: Tensor<D, K>) -> FlexTensor
where
    K: Basic + BackendPrimitive<Flex, Primitive = FlexTensor>,
{
    tensor.try_into_primitive::<Flex>().expect("the tensors of a kernel are on its device")
}

/// Number of elements that [`Storage::round`] rounds at a time.
const ROUNDED: usize = 256;

/// An element type of tensors with native code: float32, float16 or bfloat16. Computations are in float32.
pub(crate) trait Storage: Element + Pod + Default + Send + Sync {
    /// Returns the numbers without a copy if they are float32, else `None`.
    fn floats(numbers: &[Self]) -> Option<&[f32]> {
        let _ = numbers;
        None
    }

    /// Keys and values, as attention reads them.
    fn attended<'a>(keys_and_values: [&'a [Self]; 2]) -> Numbers<'a>;

    /// Converts to float32.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Rounds each number to the nearest one of this type.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// Rounds numbers in place to numbers of this type.
    #[inline(always)]
    fn round(numbers: &mut [f32]) {
        let mut stored = [Self::default(); ROUNDED];
        for numbers in numbers.chunks_mut(ROUNDED) {
            let stored = &mut stored[..numbers.len()];
            Self::narrow(numbers, stored);
            Self::widen(stored, numbers);
        }
    }

    /// Returns numbers in float32: without a copy if they are stored in it, else converted into `widened`.
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

    /// Converts float32 numbers to this type, each rounded to the nearest.
    fn of_floats(numbers: Vec<f32>) -> Vec<Self> {
        let mut narrowed = vec![Self::default(); numbers.len()];
        Self::narrow(&numbers, &mut narrowed);
        narrowed
    }
}

impl Storage for f32 {
    fn attended<'a>(keys_and_values: [&'a [Self]; 2]) -> Numbers<'a> {
        Numbers::Float32(keys_and_values)
    }

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
    fn attended<'a>(keys_and_values: [&'a [Self]; 2]) -> Numbers<'a> {
        Numbers::Float16(keys_and_values.map(bytemuck::cast_slice))
    }

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
    fn attended<'a>(keys_and_values: [&'a [Self]; 2]) -> Numbers<'a> {
        Numbers::Bfloat16(keys_and_values.map(bytemuck::cast_slice))
    }

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

/// Evaluates the first expression with `$stored` as the [`Storage`] type of `$dtype`, or the second one if
/// the type has no native code.
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

/// A kernel whose output is a list of vectors that do not depend on each other. (These are not only the rows
/// of a batch.) `E`: element type of the output.
pub(crate) trait VectorKernel<E>: Sync {
    /// Computes the vector with index `vector` into `numbers`. Must be inlined, so that it is compiled for
    /// the detected instruction set.
    fn compute(&self, vector: usize, numbers: &mut [f32]);
}

/// Computes all `count` vectors of `width` numbers on several threads, rounded to their type. `operations`:
/// an estimate of the multiplications per number, for the number of threads.
pub(crate) fn computed<E: Storage>(
    rows: &impl VectorKernel<E>,
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

/// The vectors from index `first` on that one thread computes into `y`.
struct Piece<'a, R, E> {
    rows: &'a R,
    width: usize,
    first: usize,
    y: &'a mut [E],
}

impl<R: VectorKernel<E>, E: Storage> WithSimd for Piece<'_, R, E> {
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

/// Returns the numbers of data of type `E`.
///
/// # Panics
/// If the data has another type.
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
    /// Borrows the vectors of `tensor`, `[rows, tokens, width]`. They are copied to `copy` if they are not
    /// float32, or if their elements are not contiguous.
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

    /// Returns a slice that begins with the vector of a token, and extends to the end of the memory: only its
    /// first `width` numbers are the vector.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, token: usize) -> &'a [f32] {
        &self.numbers[self.start + row * self.strides[0] + token * self.strides[1]..]
    }
}
