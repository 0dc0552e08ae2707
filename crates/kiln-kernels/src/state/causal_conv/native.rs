//! The convolution on the CPU: channels are contiguous, and go through the lanes of vectors.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};
use pulp::{Simd, WithSimd};

use super::CausalConv;
use crate::runtime::native::{Storage, Vectors, by_storage, numbers, pieces, primitive, silu, work};

/// Computes the convolution.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn convolved(kernel: CausalConv) -> Result<(Tensor<3>, Tensor<4>), CausalConv> {
    by_storage!(kernel.x.dtype(), E => Ok(convolved_in::<E>(kernel)), else Err(kernel))
}

fn convolved_in<E: Storage>(kernel: CausalConv) -> (Tensor<3>, Tensor<4>) {
    let CausalConv { x, weight, bias, silu: activated, ring, positions } = kernel;
    let ([rows, tokens, channels], [_, width]) = (x.dims(), weight.dims());
    let slots = ring.dims()[2];
    if rows * tokens * channels == 0 {
        return (x, ring);
    }
    let positions: Vec<i64> = primitive(positions.on_device).into_data().iter().collect();
    let place = |row: usize| [positions[row], positions[rows + row]];
    let x = primitive(x);
    // By column, so that channels are contiguous.
    let weight = primitive(weight.swap_dims(0, 1)).into_data();
    let bias = bias.map(|bias| primitive(bias).into_data());
    // The memory of the ring itself if it has one owner, and a copy otherwise.
    let mut ring = primitive(ring).into_data();

    let mut y = vec![0.0; rows * tokens * channels];
    let mut x_widened = Vec::new();
    let x = Vectors::of::<E>(&x, &mut x_widened);
    {
        let mut widened: [Vec<f32>; 3] = Default::default();
        let [ring_widened, weight_widened, bias_widened] = &mut widened;
        let shared = Shared {
            x: &x,
            ring: E::in_floats(numbers(&ring), ring_widened),
            weight: E::in_floats(numbers(&weight), weight_widened),
            bias: bias.as_ref().map(|bias| E::in_floats(numbers(bias), bias_widened)),
            activated,
            sizes: [channels, width, slots],
        };
        let products = rows * tokens * channels * width;
        let together = tokens.div_ceil(pieces(products).div_ceil(rows)).max(1);
        let mut all = Vec::new();
        for (row, y) in y.chunks_mut(tokens * channels).enumerate() {
            for (i, y) in y.chunks_mut(together * channels).enumerate() {
                all.push(Tokens { shared: &shared, row, place: place(row), first: i * together, y });
            }
        }
        work(products, all);
    }

    let latest: &mut [E] = ring.as_mut_slice().expect("the type was looked at");
    for row in 0..rows {
        let [first, visible_from] = place(row);
        for token in tokens.saturating_sub(slots)..tokens {
            let position = first + token as i64;
            let to = (row * slots + position.rem_euclid(slots as i64) as usize) * channels;
            let to = &mut latest[to..to + channels];
            match position >= visible_from {
                // The inputs had this type, so this rounds nothing.
                true => E::narrow(&x.at(row, token)[..channels], to),
                false => to.fill(E::default()),
            }
        }
    }
    let y = FlexTensor::from_data(TensorData::new(E::of_floats(y), [rows, tokens, channels]));
    (Tensor::from_primitive::<Flex>(y), Tensor::from_primitive::<Flex>(FlexTensor::from_data(ring)))
}

/// Inputs that all pieces share.
struct Shared<'a> {
    x: &'a Vectors<'a>,
    ring: &'a [f32],
    /// `[width, channels]`
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    activated: bool,
    /// Channels, width and slots.
    sizes: [usize; 3],
}

/// Some tokens of a row, from `first` on.
struct Tokens<'a> {
    shared: &'a Shared<'a>,
    row: usize,
    /// The position of the row's first token, and the first position that is not padding.
    place: [i64; 2],
    first: usize,
    y: &'a mut [f32],
}

impl WithSimd for Tokens<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { shared, row, place: [begin, visible_from], first, y } = self;
        let Shared { x, ring, weight, bias, activated, sizes: [channels, width, slots] } = *shared;
        for (i, y) in y.chunks_mut(channels).enumerate() {
            let token = first + i;
            if begin + (token as i64) < visible_from {
                // The result is 0 already.
                continue;
            }
            if let Some(bias) = bias {
                y.copy_from_slice(bias);
            }
            for k in 0..width {
                let back = width - 1 - k;
                let position = begin + token as i64 - back as i64;
                if position < visible_from.max(0) {
                    continue;
                }
                let input = match token.checked_sub(back) {
                    Some(token) => &x.at(row, token)[..channels],
                    None => {
                        let slot = position.rem_euclid(slots as i64) as usize;
                        &ring[(row * slots + slot) * channels..][..channels]
                    }
                };
                let weight = &weight[k * channels..][..channels];
                for c in 0..channels {
                    y[c] += input[c] * weight[c];
                }
            }
            if activated {
                for y in y.iter_mut() {
                    *y = silu(*y);
                }
            }
        }
    }
}
