//! Products with the matrices of experts on the CPU: the weights of each chosen expert are read once, for all
//! of its pairs. The result of a pair does not depend on the number of pairs, as in `linear`.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};

use kiln_weights::streams::Order;

use super::ExpertLinear;
use crate::{
    linear::{
        Group,
        matrix::{Matrix, StackBlock},
        packed::PackedLayout,
        products_of_groups,
    },
    runtime::{
        kernel::Kernel,
        native::{Storage, by_storage, primitive},
    },
};

/// Computes the products. Returns `None` for unsupported inputs: mixed types, weights with gaps, and empty
/// tensors.
pub(super) fn products_of(kernel: &ExpertLinear) -> Option<Tensor<4>> {
    if !kernel.is_of_one_type() {
        return None;
    }
    by_storage!(kernel.x.dtype(), E => products_in::<E>(kernel), else None)
}

/// Computes the products in one type. Sums are float32, and rounded once.
fn products_in<E: Storage>(ExpertLinear { x, weight, experts }: &ExpertLinear) -> Option<Tensor<4>> {
    let ([rows, tokens, each, input], slots) = (x.dims(), experts.dims()[2]);
    let [count, output, _] = weight.shape();
    let experts: Vec<i64> = primitive(experts.clone()).into_data().iter().collect();
    let mut pairs = vec![Vec::new(); count];
    for (pair, &expert) in experts.iter().enumerate() {
        pairs.get_mut(usize::try_from(expert).ok()?)?.push(pair);
    }

    let x = primitive(x.clone()).to_contiguous();
    let mut widened = Vec::new();
    let x = E::in_floats(x.as_slice()?, &mut widened);
    let vector = |pair: usize| if each == 1 { pair / slots } else { pair };
    // The vectors of each expert's pairs, one after the other, and their indices among all vectors.
    let mut gathered = Vec::with_capacity(experts.len() * input);
    let mut vectors = Vec::with_capacity(count);
    for own in &pairs {
        let first = gathered.len() / input;
        for &pair in own {
            gathered.extend_from_slice(&x[vector(pair) * input..][..input]);
        }
        vectors.push(first..first + own.len());
    }

    let mut y = vec![0.0; experts.len() * output];
    let mut read = 0;
    for StackBlock { matrix, members, rows } in weight.blocks() {
        let mut results: Vec<_> = y.chunks_mut(output).map(|y| Some(&mut y[rows.clone()])).collect();
        let mut results_of =
            |expert: usize| pairs[expert].iter().filter_map(|&pair| results[pair].take()).collect();
        let chosen = members.clone().enumerate().filter(|(_, expert)| !pairs[*expert].is_empty());
        match matrix {
            Matrix::Dense(numbers) => {
                let (numbers, len) = (primitive(numbers.clone()), rows.len() * input);
                let numbers: &[E] = numbers.as_slice()?;
                let group = |(place, expert): (usize, usize)| Group {
                    x: &gathered[vectors[expert].start * input..vectors[expert].end * input],
                    weight: &numbers[place * len..][..len],
                    y: results_of(expert),
                };
                let groups: Vec<_> = chosen.map(group).collect();
                read += groups.iter().map(|group| size_of_val(group.weight)).sum::<usize>();
                products_of_groups(input, groups);
            }
            Matrix::Packed(matrix) => {
                let words = primitive(matrix.words.clone()).to_contiguous();
                let words: &[u32] = bytemuck::cast_slice(words.as_slice::<i32>()?);
                let len = words.len() / members.len();
                let group = |(place, expert): (usize, usize)| kiln_products::Group {
                    vectors: vectors[expert].clone(),
                    words: &words[place * len..][..len],
                    y: results_of(expert),
                };
                let groups: Vec<_> = chosen.map(group).collect();
                read += groups.iter().map(|group| size_of_val(group.words)).sum::<usize>();
                if !groups.is_empty() {
                    let PackedLayout { format, order: Order::Sixteens } = matrix.layout else {
                        return None;
                    };
                    let arithmetic = matrix.use_as.arithmetic;
                    kiln_products::products_of_groups(&gathered, input, format, arithmetic, groups)?;
                }
            }
        }
    }
    tracing::trace!(target: "kiln::kernels", kernel = ExpertLinear::NAME, read, "bytes of weights were read");
    let y = FlexTensor::from_data(TensorData::new(E::of_floats(y), [rows, tokens, slots, output]));
    Some(Tensor::from_primitive::<Flex>(y))
}
