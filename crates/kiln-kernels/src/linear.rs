//! `y = x Wᵀ + b` for `[rows, tokens, in]` and weights `[out, in]`, as checkpoints store them.
//!
//! Decoding multiplies each weight by a handful of vectors, once a token: it takes as long as reading the weights does.
//! The native code therefore reads each weight once, on all threads; matrix products proper are left to Burn.

use burn::tensor::Tensor;

pub(crate) fn definition(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<3> {
    let [rows, tokens, input] = x.dims();
    let [output, _] = weight.dims();
    // One product of two matrices, which the CPU backend computes in parallel; one product a row it would not.
    let y = x.reshape([rows * tokens, input]).matmul(weight.transpose());
    let y = match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    };
    y.reshape([rows, tokens, output])
}

#[cfg(feature = "cpu")]
pub(crate) use matrix_vector::native;

#[cfg(feature = "cpu")]
mod matrix_vector {
    use std::sync::Mutex;

    use burn::{
        backend::{Flex, flex::FlexTensor},
        tensor::{DType, Tensor, TensorData},
    };
    use pulp::{Arch, Simd, WithSimd};
    use crate::native::primitive;

    /// Products with fewer weights than these take less time than it takes to wake a thread.
    const ONE_THREAD: usize = 1 << 14;

    /// Pieces of work a thread: a few, so that one that was interrupted is helped by the others.
    const PIECES: usize = 4;

    /// `None` for what it is not made for: more than four vectors, types other than float32, views with gaps.
    pub(crate) fn native(x: &Tensor<3>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) -> Option<Tensor<3>> {
        let [rows, tokens, _] = x.dims();
        let [output, input] = weight.dims();
        let is_f32 = [x.dtype(), weight.dtype()]
            .into_iter()
            .chain(bias.map(Tensor::dtype))
            .all(|dtype| dtype == DType::F32);
        if !is_f32 || input == 0 || output == 0 {
            return None;
        }
        let (x, weight) = (primitive(x.clone()), primitive(weight.clone()));
        let (x, weight) = (x.as_slice()?, weight.as_slice()?);
        let bias = bias.cloned().map(primitive);
        let bias: Option<&[f32]> = match &bias {
            Some(bias) => Some(bias.as_slice()?),
            None => None,
        };
        let y = match rows * tokens {
            1 => products::<1>(x, weight, bias),
            2 => products::<2>(x, weight, bias),
            3 => products::<3>(x, weight, bias),
            4 => products::<4>(x, weight, bias),
            _ => return None,
        };
        let y = FlexTensor::from_data(TensorData::new(y, [rows, tokens, output]));
        Some(Tensor::from_primitive::<Flex>(y))
    }

    /// `[M, out]` for x `[M, in]` and weights `[out, in]`.
    fn products<const M: usize>(x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let input = x.len() / M;
        let output = weight.len() / input;
        let x: [&[f32]; M] = std::array::from_fn(|m| &x[m * input..(m + 1) * input]);
        // Transposed, so that each thread writes a slice of its own.
        let mut y = vec![[0.0; M]; output];
        let threads = if weight.len() < ONE_THREAD { 1 } else { rayon::current_num_threads() };
        let piece = output.div_ceil(threads * if threads > 1 { PIECES } else { 1 });
        let pieces = Mutex::new(y.chunks_mut(piece).zip(weight.chunks(piece * input)));
        let work = || {
            while let Some((y, weight)) = next(&pieces) {
                Arch::new().dispatch(Products { x, weight, y });
            }
        };
        // This thread begins at once, and does not wait for the others to wake.
        rayon::in_place_scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| work());
            }
            work();
        });
        if let Some(bias) = bias {
            y.iter_mut().zip(bias).for_each(|(y, bias)| y.iter_mut().for_each(|y| *y += bias));
        }
        (0..M).flat_map(|m| y.iter().map(move |y| y[m])).collect()
    }

    fn next<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
        items.lock().ok()?.next()
    }

    struct Products<'a, const M: usize> {
        x: [&'a [f32]; M],
        weight: &'a [f32],
        y: &'a mut [[f32; M]],
    }

    impl<const M: usize> WithSimd for Products<'_, M> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let Self { x, weight, y } = self;
            for (weight, y) in weight.chunks_exact(x[0].len()).zip(y) {
                *y = dots(simd, x, weight);
            }
        }
    }

    /// The dot product of each x with the weights. Several sums, because an addition waits for the one before it.
    ///
    /// Loops throughout: what a closure computes is not compiled for the instructions that were found.
    #[inline(always)]
    fn dots<S: Simd, const M: usize>(simd: S, x: [&[f32]; M], weight: &[f32]) -> [f32; M] {
        const SUMS: usize = 4;
        let (vectors, end) = S::as_simd_f32s(weight);
        let (blocks, rest) = vectors.as_chunks::<SUMS>();
        let mut x_blocks = [&[][..]; M];
        let mut x_rest = [&[][..]; M];
        let mut x_end = [&[][..]; M];
        for m in 0..M {
            let (vectors, end) = S::as_simd_f32s(x[m]);
            let (blocks, rest) = vectors.as_chunks::<SUMS>();
            (x_blocks[m], x_rest[m], x_end[m]) = (blocks, rest, end);
        }

        let mut sums = [[simd.splat_f32s(0.0); SUMS]; M];
        for (i, block) in blocks.iter().enumerate() {
            for m in 0..M {
                for sum in 0..SUMS {
                    sums[m][sum] = simd.mul_add_e_f32s(block[sum], x_blocks[m][i][sum], sums[m][sum]);
                }
            }
        }
        let mut dots = [0.0; M];
        for m in 0..M {
            for (i, vector) in rest.iter().enumerate() {
                sums[m][i] = simd.mul_add_e_f32s(*vector, x_rest[m][i], sums[m][i]);
            }
            let [a, b, c, d] = sums[m];
            dots[m] = simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d)));
            for (i, weight) in end.iter().enumerate() {
                dots[m] += weight * x_end[m][i];
            }
        }
        dots
    }
}
