//! Attention on the CPU: which rows go over which keys, in which piece of work.

mod rows;
mod scores;

use std::ops::Range;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, Element, Int, Tensor, TensorData, bf16, f16},
};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;

use super::{AttentionShape, Limits};
use crate::native::{pieces, primitive, work};
use rows::{Mixed, Rows};
use scores::Vectors;

/// Rows that go over keys together, where there are so many.
const ROWS: usize = 64;

/// Keys that are worth a piece of their own.
const PIECE: usize = 128;

/// `None` for types that it is not made for, and where there is nothing to do.
pub(crate) fn native(
    [q, keys, values]: [&Tensor<4>; 3],
    first: &Tensor<1, Int>,
    left_pad: Option<&Tensor<1, Int>>,
    shape: &AttentionShape,
) -> Option<Tensor<4>> {
    let (dtype, slots) = (q.dtype(), keys.dims()[2]);
    if q.shape().num_elements() * slots == 0 {
        return None;
    }
    let numbers = |tensor: &Tensor<1, Int>| -> Vec<i32> {
        primitive(tensor.clone()).into_data().iter::<i32>().collect()
    };
    let places = Places {
        first: numbers(first).first().copied()?,
        left_pad: left_pad.map(numbers),
        limits: shape.limits(slots),
    };
    let tensors = [q, keys, values].map(|tensor| primitive(tensor.clone()));
    let dims = [q.dims(), keys.dims()];
    let y = match dtype {
        DType::F32 => attend::<f32>(&tensors, dims, places),
        DType::F16 => attend::<f16>(&tensors, dims, places),
        DType::BF16 => attend::<bf16>(&tensors, dims, places),
        _ => return None,
    };
    Some(Tensor::from_primitive::<Flex>(FlexTensor::from_data(y)))
}

fn attend<E: Storage>(
    tensors: &[FlexTensor; 3],
    [[batch, heads, new, head_dim], [_, kv_heads, slots, _]]: [[usize; 4]; 2],
    places: Places,
) -> TensorData {
    let [q, keys, values] = tensors.each_ref().map(View::of);
    let group = heads / kv_heads;
    let given = Given { q, keys, values, places, group, new, slots, head_dim };
    let mut y = vec![E::default(); batch * heads * new * head_dim];

    let together = (ROWS / group).clamp(1, new);
    let blocks = (0..batch * kv_heads).flat_map(|i| {
        let queries = (0..new).step_by(together).map(move |query| query..new.min(query + together));
        queries.map(move |queries| Block { row: i / kv_heads, kv_head: i % kv_heads, queries })
    });
    let visible = given.keys(0, &(0..new)).len();
    let products = batch * heads * new * visible * head_dim;
    let number = batch * kv_heads * new.div_ceil(together);
    let splits = pieces(products).div_ceil(number).min(visible / PIECE).max(1);

    // The vectors of a head, in the order of the blocks.
    let mut vectors: Vec<_> =
        y.chunks_mut(new * head_dim).map(|head| head.chunks_mut(together * head_dim)).collect();
    let mut result = |block: &Block| -> Vec<&mut [E]> {
        let head = (block.row * kv_heads + block.kv_head) * group;
        vectors[head..head + group].iter_mut().filter_map(Iterator::next).collect()
    };
    if splits == 1 {
        let pieces = blocks.map(|block| {
            let (keys, result) = (given.keys(block.row, &block.queries), Mixed::Whole(result(&block)));
            Rows { given: &given, block, keys, result }
        });
        work(products, pieces.collect());
    } else {
        let size = group * together * (head_dim + 2);
        let mut parts = vec![0.0; number * splits * size];
        let mut pieces = Vec::with_capacity(number * splits);
        for (block, parts) in blocks.clone().zip(parts.chunks_mut(splits * size)) {
            let keys = given.keys(block.row, &block.queries);
            let each = keys.len().div_ceil(splits).max(1);
            for (part, start) in parts.chunks_mut(size).zip(keys.clone().step_by(each)) {
                let keys = start..keys.end.min(start + each as i32);
                pieces.push(Rows { given: &given, block: block.clone(), keys, result: Mixed::Part(part) });
            }
        }
        work(products, pieces);
        for (block, parts) in blocks.zip(parts.chunks(splits * size)) {
            combine(&parts.chunks(size).collect::<Vec<_>>(), result(&block), head_dim);
        }
    }
    TensorData::new(y, [batch, heads, new, head_dim])
}

/// Puts together what came of the parts of all keys, as [`Mixed::Part`] says.
fn combine<E: Storage>(parts: &[&[f32]], heads: Vec<&mut [E]>, head_dim: usize) {
    let vectors = heads.into_iter().flat_map(|head| head.chunks_mut(head_dim));
    for (r, vector) in vectors.enumerate() {
        let rows = parts.iter().map(|part| &part[r * (head_dim + 2)..][..head_dim + 2]);
        let rows = rows.filter(|row| row[1] != 0.0);
        let largest = rows.clone().map(|row| row[0]).fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut mixed) = (0.0, vec![0.0; head_dim]);
        for row in rows {
            let weight = (row[0] - largest).exp();
            sum += row[1] * weight;
            mixed.iter_mut().zip(&row[2..]).for_each(|(mixed, value)| *mixed += weight * value);
        }
        // What sees nothing is 0.
        if sum != 0.0 {
            mixed.iter_mut().for_each(|mixed| *mixed /= sum);
        }
        E::narrow(&mixed, vector);
    }
}

/// Queries that go over keys together, for all heads that share these.
#[derive(Clone)]
struct Block {
    /// Of the batch.
    row: usize,
    kv_head: usize,
    queries: Range<usize>,
}

/// Where queries stand.
struct Places {
    first: i32,
    left_pad: Option<Vec<i32>>,
    limits: Limits,
}

struct Given<'a, E> {
    q: View<'a, E>,
    keys: View<'a, E>,
    values: View<'a, E>,
    places: Places,
    group: usize,
    new: usize,
    slots: usize,
    head_dim: usize,
}

impl<E> Given<'_, E> {
    fn limits(&self) -> Limits {
        self.places.limits
    }

    /// The first and the last position that a query sees; none where they are the other way round.
    fn seen(&self, row: usize, query: usize) -> (i32, i32) {
        let Places { first, left_pad, limits } = &self.places;
        let position = first + query as i32;
        let kept = first + self.new as i32 - self.slots as i32;
        let pad = left_pad.as_ref().map_or(0, |pads| pads[row]);
        (limits.start.max(kept).max(pad).max(position - limits.window + 1), position)
    }

    /// The positions that any of `queries` sees.
    fn keys(&self, row: usize, queries: &Range<usize>) -> Range<i32> {
        let (from, to) = (self.seen(row, queries.start).0, self.seen(row, queries.end - 1).1);
        from..from.max(to + 1)
    }

    fn slot(&self, position: i32) -> usize {
        (position - self.places.limits.origin).rem_euclid(self.slots as i32) as usize
    }
}

/// A tensor of the backend's.
struct View<'a, E> {
    numbers: &'a [E],
    start: isize,
    strides: [isize; 4],
}

impl<'a, E: Storage> View<'a, E> {
    fn of(tensor: &'a FlexTensor) -> Self {
        let (layout, dim) = (tensor.layout(), 3);
        let mut strides = [0; 4];
        strides.copy_from_slice(layout.strides());
        // Numbers that are alone are next to each other.
        if layout.shape()[dim] == 1 {
            strides[dim] = 1;
        }
        Self { numbers: tensor.storage(), start: layout.start_offset() as isize, strides }
    }

    fn place(&self, at: [usize; 3]) -> isize {
        self.start + (0..3).map(|dim| at[dim] as isize * self.strides[dim]).sum::<isize>()
    }

    /// The vector at `at`, in float32.
    fn read(&self, at: [usize; 3], vector: &mut [f32]) {
        let place = self.place(at);
        if self.strides[3] == 1 {
            E::widen(&self.numbers[place as usize..][..vector.len()], vector);
        } else {
            for (i, number) in vector.iter_mut().enumerate() {
                let from = (place + i as isize * self.strides[3]) as usize;
                E::widen(&self.numbers[from..=from], std::slice::from_mut(number));
            }
        }
    }

    /// The vectors of `n` slots, in float32, `width` numbers of each: `dim`, and 0 beyond. Where they are, if that is
    /// how they are, else in `packed`.
    fn vectors<'b>(
        &'b self,
        at: [usize; 3],
        [n, dim, width]: [usize; 3],
        packed: &'b mut Vec<f32>,
    ) -> Vectors<'b> {
        if let ([_, _, stride, 1], Some(numbers)) = (self.strides, E::floats(self.numbers))
            && dim == width
            && stride >= 0
        {
            return Vectors { numbers: &numbers[self.place(at) as usize..], stride: stride as usize };
        }
        packed.resize(n * width, 0.0);
        for (i, vector) in packed.chunks_exact_mut(width).enumerate() {
            self.read([at[0], at[1], at[2] + i], &mut vector[..dim]);
        }
        Vectors { numbers: packed, stride: width }
    }
}

/// How numbers are stored.
trait Storage: Element + Pod + Default + Send + Sync {
    /// Numbers that are float32 already.
    fn floats(numbers: &[Self]) -> Option<&[f32]> {
        let _ = numbers;
        None
    }

    fn widen(from: &[Self], to: &mut [f32]);

    /// To the nearest.
    fn narrow(from: &[f32], to: &mut [Self]);
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
