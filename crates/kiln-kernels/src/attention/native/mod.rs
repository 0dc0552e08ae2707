//! Attention on the CPU: division of rows and keys into pieces of work.

mod few;
mod packed;
mod rows;
mod scores;

use std::ops::Range;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Element, Int, Tensor, TensorData},
};
use bytemuck::Pod;

use kiln_core::packed::Packing;
use kiln_products::attention as products;

use super::{Buffers, Limits, packed::AttentionPacked};
use crate::runtime::{
    kernel::INVARIANT_UP_TO,
    native::{Storage, by_storage, pieces, primitive, work},
};
use packed::PackedView;
use rows::{Mixed, Rows};
use scores::Vectors;

/// Most rows that go over keys together.
const ROWS: usize = 64;

/// Most rows that fill at most half of a vector of AVX-512.
const FEW_ROWS: usize = 8;

/// Fewest keys that are worth a piece of work.
const PIECE: usize = 128;

/// Keys per piece if queries are few. Such pieces begin at multiples of it, so that the result of a query
/// depends only on the positions of its keys.
const CHUNK: i32 = 4 * rows::BLOCK as i32;

/// Attention over a chain of dense buffers. Returns `None` for types without an implementation and for empty
/// inputs.
pub(super) fn dense(
    q: &Tensor<4>,
    chain: &[Buffers],
    positions: &Tensor<2, Int>,
    sinks: Option<&Tensor<1>>,
) -> Option<Tensor<4>> {
    if q.shape().num_elements() == 0 || chain.iter().any(Buffers::are_empty) {
        return None;
    }
    let positions = numbers(positions);
    let latent = chain.first().is_some_and(|buffers| buffers.shape.latent);
    let chain = chain.iter().map(|buffers| Dense::new(buffers, q, &positions)).collect();
    attend_any(q, chain, None, sinks, latent)
}

/// Dense keys and values.
struct Dense {
    tensors: [FlexTensor; 2],
    places: Places,
    slots: usize,
}

impl Dense {
    fn new(buffers: &Buffers, q: &Tensor<4>, positions: &[i32]) -> Self {
        let (slots, limits, new) = (buffers.slots(), buffers.limits(), q.dims()[2]);
        // Slots hold only so many positions.
        let from = buffers.from.as_ref().and_then(|from| numbers(from).first().copied());
        let kept = |first: i32| {
            let held = (first + new as i32).min(limits.end) - slots as i32;
            from.map_or(held, |from| held.max(from))
        };
        let places = Places::new(positions, kept, limits.end, limits);
        let tensors = [&buffers.keys, &buffers.values].map(|tensor| {
            let tensor = primitive(tensor.clone());
            let [_, _, of_slots, of_numbers] = strides(&tensor);
            if of_slots >= 0 && of_numbers == 1 { tensor } else { tensor.to_contiguous() }
        });
        Self { tensors, places, slots }
    }
}

/// Like [`dense`], but over packed positions and recent ones.
pub(super) fn packed(attention: &AttentionPacked) -> Option<Tensor<4>> {
    let AttentionPacked { q, packed: kv, recent, positions, shape, sinks } = attention;
    let (start, held) = (recent.start, kv.keys.slots());
    if q.shape().num_elements() * recent.values.shape().num_elements() * held == 0 {
        return None;
    }
    let recent = Buffers::new(recent.clone(), shape).seen_at(positions);
    let (positions, end) = (numbers(&positions.on_device), numbers(&kv.end).first().copied()?);
    let mut recent = Dense::new(&recent, q, &positions);
    recent.places.rows.iter_mut().for_each(|row| row.from = row.from.max(end));
    let limits = shape.limits(start, kv.origin, held);
    let packed_places = Places::new(&positions, |_| end - held as i32, end, limits);
    let tensors = [&kv.keys.codes, &kv.keys.scales, &kv.values.codes, &kv.values.scales].map(|words| {
        let words = primitive(words.clone());
        let (strides, width) = (words.layout().strides(), words.layout().shape()[3]);
        let neighbours = strides[2] == width as isize && (strides[3] == 1 || width == 1);
        if neighbours { words } else { words.to_contiguous() }
    });
    let packings = [kv.key_packing, kv.value_packing];
    let packed = Packed { tensors, packings, places: packed_places, slots: held };
    attend_any(q, vec![recent], Some(packed), sinks.as_ref(), shape.latent)
}

/// Packed keys and values.
struct Packed {
    /// Codes and scales of keys, and of values.
    tensors: [FlexTensor; 4],
    packings: [Packing; 2],
    places: Places,
    slots: usize,
}

fn numbers<const D: usize>(tensor: &Tensor<D, Int>) -> Vec<i32> {
    primitive(tensor.clone()).into_data().iter::<i32>().collect()
}

fn attend_any(
    q: &Tensor<4>,
    dense: Vec<Dense>,
    packed: Option<Packed>,
    sinks: Option<&Tensor<1>>,
    latent: bool,
) -> Option<Tensor<4>> {
    let (dtype, q) = (q.dtype(), primitive(q.clone()));
    let sinks: Option<Vec<f32>> = sinks.map(|sinks| primitive(sinks.clone()).into_data().iter().collect());
    let (packed, sinks) = (packed.as_ref(), sinks.as_deref());
    let y = by_storage!(dtype, E => attend::<E>(&q, &dense, packed, sinks, latent), else return None);
    Some(Tensor::from_primitive::<Flex>(FlexTensor::from_data(y)))
}

fn attend<E: Storage>(
    q: &FlexTensor,
    dense: &[Dense],
    packed: Option<&Packed>,
    sinks: Option<&[f32]>,
    latent: bool,
) -> TensorData {
    let dims = |tensor: &FlexTensor| [0, 1, 2, 3].map(|dim| tensor.layout().shape()[dim]);
    let [batch, heads, new, head_dim] = dims(q);
    let [_, kv_heads, _, width] = dense.first().map_or(dims(q), |dense| dims(&dense.tensors[1]));
    let (group, are_few) = (heads / kv_heads, new <= INVARIANT_UP_TO);
    let q = View::of(q);
    let mut all = Vec::with_capacity(dense.len() + 1);
    for Dense { tensors, places, slots } in dense {
        let kv = Source::Dense(tensors.each_ref().map(View::of));
        let (places, slots) = (places.clone(), *slots);
        all.push(Given { q, kv, places, group, slots, head_dim, width, are_few, latent });
    }
    if let Some(Packed { tensors: [k, ks, v, vs], packings, places, slots }) = packed {
        let both = [([k, ks], packings[0]), ([v, vs], packings[1])];
        let kv = Source::Packed(both.map(|(tensors, packing)| PackedView::of(tensors, packing)));
        let (places, slots) = (places.clone(), *slots);
        all.push(Given { q, kv, places, group, slots, head_dim, width, are_few, latent });
    }
    let mut y = vec![E::default(); batch * heads * new * width];

    let together = (ROWS / group).clamp(1, new);
    let blocks = (0..batch * kv_heads).flat_map(|i| {
        let queries = (0..new).step_by(together).map(move |query| query..new.min(query + together));
        queries.map(move |queries| Block { row: i / kv_heads, kv_head: i % kv_heads, queries })
    });
    let of_rows = |given: &Given<'_, E>| (0..batch).map(|row| given.keys(row, &(0..new)).len()).max();
    let visible: Vec<usize> = all.iter().map(|given| of_rows(given).unwrap_or(0)).collect();
    let products = batch * heads * new * visible.iter().sum::<usize>() * (head_dim + width).div_ceil(2);
    let number = batch * kv_heads * new.div_ceil(together);
    // The largest number of parts into which the keys of a block are divided.
    let splits = |given: &Given<'_, E>, visible: &usize| match are_few {
        true => {
            let parts = |block: Block| chunks(&given.keys(block.row, &block.queries)).count();
            blocks.clone().map(parts).max().unwrap_or(0)
        }
        false => pieces(products).div_ceil(number).min(visible / PIECE),
    };
    let splits: Vec<usize> = all.iter().zip(&visible).map(|(given, n)| splits(given, n).max(1)).collect();
    let parts_of_all: usize = splits.iter().sum();

    // The vectors of a head, in the order of the blocks.
    let mut vectors: Vec<_> =
        y.chunks_mut(new * width).map(|head| head.chunks_mut(together * width)).collect();
    let mut result = |block: &Block| -> Vec<&mut [E]> {
        let head = (block.row * kv_heads + block.kv_head) * group;
        vectors[head..head + group].iter_mut().filter_map(Iterator::next).collect()
    };
    if parts_of_all == 1 && sinks.is_none() {
        let given = &all[0];
        let pieces = blocks.map(|block| {
            let (keys, result) = (given.keys(block.row, &block.queries), Mixed::Whole(result(&block)));
            Rows { given, block, keys, result }
        });
        work(products, pieces.collect());
    } else {
        let size = group * together * (width + 2);
        let mut parts = vec![0.0; number * parts_of_all * size];
        let mut pieces = Vec::with_capacity(number * parts_of_all);
        for (block, parts) in blocks.clone().zip(parts.chunks_mut(parts_of_all * size)) {
            let mut parts = parts.chunks_mut(size);
            for (given, splits) in all.iter().zip(&splits) {
                let keys = given.keys(block.row, &block.queries);
                let each = keys.len().div_ceil(*splits).max(1);
                let ranges: Vec<Range<i32>> = match are_few {
                    true => chunks(&keys).collect(),
                    false => keys
                        .clone()
                        .step_by(each)
                        .map(|start| start..keys.end.min(start + each as i32))
                        .collect(),
                };
                for (keys, part) in ranges.into_iter().zip(&mut parts) {
                    pieces.push(Rows { given, block: block.clone(), keys, result: Mixed::Part(part) });
                }
            }
        }
        work(products, pieces);
        for (block, parts) in blocks.zip(parts.chunks(parts_of_all * size)) {
            let own = sinks.map(|sinks| &sinks[block.kv_head * group..][..group]);
            combine(&parts.chunks(size).collect::<Vec<_>>(), result(&block), own, width);
        }
    }
    TensorData::new(y, [batch, heads, new, width])
}

/// Cuts positions at every multiple of [`CHUNK`].
fn chunks(keys: &Range<i32>) -> impl Iterator<Item = Range<i32>> {
    let Range { start, end } = *keys;
    let first = start / CHUNK * CHUNK;
    (first..end.max(first)).step_by(CHUNK as usize).map(move |chunk| start.max(chunk)..end.min(chunk + CHUNK))
}

/// Combines the parts of all keys, in the layout of [`Mixed::Part`], and the sink of each head.
fn combine<E: Storage>(parts: &[&[f32]], heads: Vec<&mut [E]>, sinks: Option<&[f32]>, width: usize) {
    let of_head = |(h, head)| <[E]>::chunks_mut(head, width).map(move |vector| (h, vector));
    let vectors = heads.into_iter().enumerate().flat_map(of_head);
    let mut mixed = vec![0.0; width];
    for (r, (head, vector)) in vectors.enumerate() {
        let sink = sinks.map(|sinks| sinks[head]);
        let rows = parts.iter().map(|part| &part[r * (width + 2)..][..width + 2]);
        let rows = rows.filter(|row| row[1] != 0.0);
        let largest = rows.clone().map(|row| row[0]).chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = sink.map_or(0.0, |sink| (sink - largest).exp());
        mixed.fill(0.0);
        for row in rows {
            let weight = (row[0] - largest).exp();
            sum += row[1] * weight;
            mixed.iter_mut().zip(&row[2..]).for_each(|(mixed, value)| *mixed += weight * value);
        }
        // A query that sees nothing gives 0. A single part gives the same bits as the whole.
        let scale = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        mixed.iter_mut().for_each(|mixed| *mixed *= scale);
        E::narrow(&mixed, vector);
    }
}

/// Queries that go over keys together, in all heads that share these keys.
#[derive(Clone)]
struct Block {
    /// Index in the batch.
    row: usize,
    kv_head: usize,
    queries: Range<usize>,
}

/// Positions of the queries, and the part of a buffer that they may see.
#[derive(Clone)]
struct Places {
    rows: Vec<RowPlace>,
    /// The first position that is not in the buffer.
    end: i32,
    limits: Limits,
}

#[derive(Clone, Copy)]
struct RowPlace {
    /// The position of the first query.
    first: i32,
    /// The first position that is in the buffer and not hidden.
    from: i32,
    /// The first slot.
    base: usize,
}

impl Places {
    /// Reads `positions` `[3, rows]`. `kept` maps the position of the first query of a row to the first
    /// position that its slots still hold.
    fn new(positions: &[i32], kept: impl Fn(i32) -> i32, end: i32, limits: Limits) -> Self {
        let rows = positions.len() / 3;
        let row = |row: usize| {
            let [first, visible_from, base] = [0, 1, 2].map(|which| positions[which * rows + row]);
            RowPlace {
                first,
                from: limits.start.max(visible_from).max(kept(first)),
                base: base.max(0) as usize,
            }
        };
        Self { rows: (0..rows).map(row).collect(), end, limits }
    }
}

struct Given<'a, E> {
    q: View<'a, E>,
    kv: Source<'a, E>,
    places: Places,
    group: usize,
    slots: usize,
    head_dim: usize,
    /// Width of values.
    width: usize,
    /// Whether there are so few queries that none may depend on the others.
    are_few: bool,
    /// Whether each key is followed by its value.
    latent: bool,
}

impl<E: Storage> Given<'_, E> {
    fn limits(&self) -> Limits {
        self.places.limits
    }

    /// The first and the last position that a query sees; the first is larger if it sees none.
    fn seen(&self, row: usize, query: usize) -> (i32, i32) {
        let Places { rows, end, limits } = &self.places;
        let RowPlace { first, from, .. } = rows[row];
        let position = first + query as i32;
        (from.max(position - limits.window + 1), position.min(end - 1))
    }

    /// The positions that at least one of `queries` sees.
    fn keys(&self, row: usize, queries: &Range<usize>) -> Range<i32> {
        let (from, to) = (self.seen(row, queries.start).0, self.seen(row, queries.end - 1).1);
        from..from.max(to + 1)
    }

    /// Whether [`few`] computes a block of `rows` rows: if no query may depend on the others, or if half of a
    /// vector of rows would be empty. It does not compute packed latents.
    fn is_for_few(&self, rows: usize) -> bool {
        let is_packed = matches!(self.kv, Source::Packed(_));
        (self.are_few || rows <= FEW_ROWS) && !(self.latent && is_packed)
    }

    /// The keys and values of a head, from the first slot of `row` on.
    fn source(&self, row: usize, kv_head: usize) -> products::Source<'_> {
        let at = [row, kv_head, self.places.rows[row].base];
        match &self.kv {
            Source::Dense(both) => products::Source::Dense(products::Dense {
                numbers: E::attended(both.map(|view| &view.numbers[view.place(at) as usize..])),
                widths: [self.key_dim(), self.width],
                strides: both.map(|view| view.strides[2].unsigned_abs()),
                latent: self.latent,
            }),
            Source::Packed([keys, values]) => products::Source::Packed {
                keys: keys.codes(row, kv_head, self.head_dim),
                values: values.codes(row, kv_head, self.width),
            },
        }
    }

    /// Width of a key.
    fn key_dim(&self) -> usize {
        if self.latent { self.head_dim - self.width } else { self.head_dim }
    }

    fn slot(&self, position: i32) -> usize {
        (position - self.places.limits.origin).rem_euclid(self.slots as i32) as usize
    }
}

/// The tensors that keys and values are read from.
enum Source<'a, E> {
    Dense([View<'a, E>; 2]),
    Packed([PackedView<'a>; 2]),
}

/// Index of keys, and of values.
const KEYS: usize = 0;
const VALUES: usize = 1;

impl<E: Storage> Source<'_, E> {
    /// The keys or values in `n` slots, in float32, `width` numbers each: `dim`, then zeros.
    #[inline(always)]
    fn vectors<'b>(
        &'b self,
        which: usize,
        at: [usize; 3],
        sizes: [usize; 3],
        made: &'b mut Vec<f32>,
    ) -> Vectors<'b> {
        match self {
            Self::Dense(both) => both[which].vectors(at, sizes, made),
            Self::Packed(both) => {
                let [n, _, width] = sizes;
                made.resize(n * width, 0.0);
                both[which].read(at, sizes, made);
                Vectors { numbers: made, stride: width }
            }
        }
    }
}

/// The distances between neighbours in each dimension of a tensor.
fn strides(tensor: &FlexTensor) -> [isize; 4] {
    let (layout, dim) = (tensor.layout(), 3);
    let mut strides = [0; 4];
    strides.copy_from_slice(layout.strides());
    // A dimension of one number is contiguous.
    if layout.shape()[dim] == 1 {
        strides[dim] = 1;
    }
    strides
}

/// A view of a tensor of the backend.
#[derive(Clone, Copy)]
struct View<'a, E> {
    numbers: &'a [E],
    start: isize,
    strides: [isize; 4],
}

impl<'a, E: Element + Pod> View<'a, E> {
    fn of(tensor: &'a FlexTensor) -> Self {
        let start = tensor.layout().start_offset() as isize;
        Self { numbers: tensor.storage(), start, strides: strides(tensor) }
    }

    fn place(&self, at: [usize; 3]) -> isize {
        self.start + (0..3).map(|dim| at[dim] as isize * self.strides[dim]).sum::<isize>()
    }
}

impl<E: Storage> View<'_, E> {
    /// Reads the vector at `at`, in float32.
    #[inline(always)]
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

    /// The vectors in `n` slots, in float32, `width` numbers each: `dim`, then zeros. Borrows them from the
    /// tensor if they have this form there, and writes them to `packed` otherwise.
    fn vectors<'b>(
        &'b self,
        at: [usize; 3],
        [n, dim, width]: [usize; 3],
        packed: &'b mut Vec<f32>,
    ) -> Vectors<'b> {
        if let Some(numbers) = E::floats(self.numbers)
            && dim == width
        {
            return Vectors {
                numbers: &numbers[self.place(at) as usize..],
                stride: self.strides[2].unsigned_abs(),
            };
        }
        packed.resize(n * width, 0.0);
        for (i, vector) in packed.chunks_exact_mut(width).enumerate() {
            self.read([at[0], at[1], at[2] + i], &mut vector[..dim]);
        }
        Vectors { numbers: packed, stride: width }
    }
}
