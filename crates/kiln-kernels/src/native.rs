//! What native code on the CPU shares: tensors as the backend sees them, types of numbers, and threads.

use std::sync::Mutex;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{BackendPrimitive, Element, Tensor, TensorData, bf16, f16, kind::Basic},
};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use pulp::{Arch, WithSimd};

/// Pieces of work a thread: a few, so that one that was interrupted is helped by the others.
const PIECES: usize = 4;

/// Products of fewer pairs of numbers than these take less time than it takes to wake a thread.
pub(crate) const ONE_THREAD: usize = 1 << 18;

/// # Panics
/// On a tensor of another backend, as Burn does wherever devices are mixed.
pub(crate) fn primitive<const D: usize, K>(tensor: Tensor<D, K>) -> FlexTensor
where
    K: Basic + BackendPrimitive<Flex, Primitive = FlexTensor>,
{
    tensor.try_into_primitive::<Flex>().expect("the tensors of a kernel are on its device")
}

/// How many threads should compute the products of that many pairs of numbers.
fn threads(products: usize) -> usize {
    if products < ONE_THREAD { 1 } else { rayon::current_num_threads() }
}

/// In how many pieces that work should come.
pub(crate) fn pieces(products: usize) -> usize {
    match threads(products) {
        1 => 1,
        threads => threads * PIECES,
    }
}

/// Does that work, the last piece first.
pub(crate) fn work<P: WithSimd + Send>(products: usize, pieces: Vec<P>) {
    let pieces = Mutex::new(pieces);
    on_threads(products, &|| {
        while let Some(piece) = pieces.lock().ok().and_then(|mut pieces| pieces.pop()) {
            Arch::new().dispatch(piece);
        }
    });
}

/// Calls `work` on as many threads as that many products are worth.
pub(crate) fn on_threads(products: usize, work: &(dyn Fn() + Sync)) {
    match threads(products) {
        1 => work(),
        // This thread begins at once, and does not wait for the others to wake.
        threads => rayon::in_place_scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| work());
            }
            work();
        }),
    }
}

/// How numbers are stored.
pub(crate) trait Storage: Element + Pod + Default + Send + Sync {
    /// Numbers that are float32 already.
    fn floats(numbers: &[Self]) -> Option<&[f32]> {
        let _ = numbers;
        None
    }

    fn widen(from: &[Self], to: &mut [f32]);

    /// To the nearest.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// Numbers in float32, which are in `widened` where they are not stored so.
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

    /// Numbers to the nearest.
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

    fn of_floats(numbers: Vec<f32>) -> Vec<Self> {
        numbers
    }
}

impl Storage for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Storage for bf16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// The numbers of data whose type was looked at.
pub(crate) fn numbers<E: Storage>(data: &TensorData) -> &[E] {
    data.as_slice().expect("the type was looked at")
}

/// Vectors `[rows, tokens, width]` in float32: in the memory of their tensor, if they are there as such.
pub(crate) struct Vectors<'a> {
    numbers: &'a [f32],
    start: usize,
    /// From row to row, and from token to token.
    strides: [usize; 2],
}

impl<'a> Vectors<'a> {
    /// Those of `tensor`. They are copied to `copy` where they are of another type, or have gaps.
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

    /// The vector of a token, and what is behind it in memory.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, token: usize) -> &'a [f32] {
        &self.numbers[self.start + row * self.strides[0] + token * self.strides[1]..]
    }
}

/// `exp` of numbers up to 88, to within two roundings; 0 below -87. Without branches, so that it is done in vectors.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which the lowest bits then are.
    const ROUND: f32 = 12_582_912.0;
    /// The logarithm of 2 in few digits, so that products with it are exact.
    const LN_2: f32 = 355.0 / 512.0;
    /// What that is short of it.
    const LN_2_REST: f32 = -2.121_944_4e-4;

    let bound = if x < -87.0 { -87.0 } else { x };
    let rounded = bound * std::f32::consts::LOG2_E + ROUND;
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let whole = rounded - ROUND;
    // Between minus and plus half the logarithm of 2: the minimax polynomial of Cephes.
    let r = bound - whole * LN_2 - whole * LN_2_REST;
    let p = 1.987_569_2e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let y = p * f32::from_bits(power.wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { y }
}

/// `x / (1 + exp(-x))`
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    let bound = if x < -80.0 { -80.0 } else { x };
    x / (1.0 + exp(-bound))
}
