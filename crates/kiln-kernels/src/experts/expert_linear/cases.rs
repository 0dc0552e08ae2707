use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order},
};

use super::ExpertLinear;
use crate::{
    linear::{
        matrix::{Matrix, MatrixStack},
        packed::{PackedLayout, takes_packed},
    },
    testing::{
        case::{Case, LARGEST, Rounding},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Rows of weights per block: all of them.
const WHOLE: usize = usize::MAX;

/// Experts for pairs `[rows, tokens, slots]`. The first has the most pairs; with many experts, some have
/// none.
fn experts(numbers: &Numbers, pairs: [usize; 3], count: usize) -> Tensor<3, Int> {
    let expert = |i: usize| (i * 7 + i / 3) % count.min(9) * (i % 5).min(1);
    let experts = (0..pairs.iter().product()).map(|i| expert(i) as i32).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(experts, pairs), (numbers.device(), DType::I32))
}

pub(super) fn of_dense() -> impl Iterator<Item = Case<ExpertLinear>> {
    let mut cases = Vec::new();
    for pairs in [[1, 1, 1], [1, 1, 2], [2, 3, 3], [4, 4, 2], [2, 20, 2], [1, 70, 3]] {
        cases.push(dense(pairs, [1, 3, 7], Plain, true, WHOLE));
        cases.push(dense(pairs, [4, 96, 80], Plain, false, WHOLE));
        cases.push(dense(pairs, [8, 41, 257], Plain, true, WHOLE));
        // Several experts per block, and several blocks per expert.
        cases.push(dense(pairs, [5, 70, 96], Plain, true, 160));
        cases.push(dense(pairs, [3, 70, 96], Cut(1), false, 32));
        cases.push(dense(pairs, [3, 70, 96], Swapped(0, 1), true, WHOLE));
    }
    cases.push(dense([1, 1, 2], [3, 300, 1030], Plain, true, WHOLE));
    cases.push(dense([1, 2, 2], [3, 8, 4100], Plain, true, WHOLE));
    cases.push(dense([2, 2, 2], [300, 8, 12], Swapped(1, 3), false, WHOLE));
    cases.push(dense([1, 150, 2], [2, 65, 36], Plain, false, WHOLE));
    cases.push(dense([2, 40, 3], [300, 8, 12], Plain, true, 100));
    cases.into_iter()
}

/// A case with a dense stack of this shape, in blocks of up to `most` rows.
fn dense(
    [rows, tokens, slots]: [usize; 3],
    [count, output, input]: [usize; 3],
    layout: Layout,
    shared: bool,
    most: usize,
) -> Case<ExpertLinear> {
    let name = ([rows, tokens, slots], [count, output, input], layout, shared, most);
    let case = Case::new(name, move |numbers| {
        let all = numbers.tensor([count * output, input], Plain);
        let weight = MatrixStack::read([count, output, input], most, |range| {
            Ok::<_, ()>(Matrix::Dense(all.clone().narrow(0, range.start, range.len())))
        });
        ExpertLinear {
            x: numbers.tensor([rows, tokens, if shared { 1 } else { slots }, input], layout),
            weight: weight.expect("what is there is read"),
            experts: experts(numbers, [rows, tokens, slots], count),
        }
    });
    case.within(move |want, rounding| tolerance(input, want, rounding))
}

/// Sums of `n` products in another order, on some devices in the type itself; then rounded.
fn tolerance(n: usize, want: f64, Rounding { single, ulp, .. }: Rounding) -> f64 {
    let n = n as f64;
    LARGEST * LARGEST * (n.sqrt() + 1.0) * n.sqrt() * single.max(ulp) + want.abs() * ulp
}

/// Kinds of codes: floats; codes with and without high bits, minimums, groups, zero points and tables.
const FORMATS: [Format; 12] = [
    Format::F32,
    Format::Bf16,
    Format::Q4_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2K,
    Format::Q4K,
    Format::Q6K,
    Format::Iq4Nl,
    Format::Mxfp4,
    Format::Nf4,
    Format::Int4In64,
];

pub(super) fn of_packed() -> impl Iterator<Item = Case<ExpertLinear>> {
    let mut cases = Vec::new();
    for (i, format) in FORMATS.into_iter().enumerate() {
        let block = format.block().max(32);
        let rows = PackedLayout { format, order: Order::Rows };
        let floats = Arithmetic::Floats;
        // Shader compilers are slow, so there are few cases: few and many tokens, with both sizes of tiles
        // and with parts of a tile.
        let few = [[1, 1, 2], [2, 3, 3], [4, 4, 2]][i % 3];
        cases.push(packed(rows, floats, few, [3, 41, 3 * block], Plain, true, WHOLE));
        cases.push(packed(rows, floats, [2, 20, 2], [4, 133, block], Plain, false, WHOLE));
        cases.push(packed(rows, floats, [1, 70, 3], [3, 70, 2 * block], Plain, true, WHOLE));
        let sixteens = PackedLayout { format, order: Order::Sixteens };
        for arithmetic in [Arithmetic::Floats, Arithmetic::Integers] {
            for pairs in [[1, 1, 2], [2, 3, 3], [4, 4, 2], [1, 70, 3]] {
                cases.push(packed(sixteens, arithmetic, pairs, [3, 48, 3 * block], Plain, true, WHOLE));
                cases.push(packed(sixteens, arithmetic, pairs, [5, 32, block], Plain, false, 80));
            }
        }
    }
    for format in [Format::Bf16, Format::Q4_0] {
        for order in [Order::Rows, Order::Sixteens] {
            let layout = PackedLayout { format, order };
            for pairs in [[2, 2, 2], [2, 20, 2]] {
                // Several experts per block, and several blocks per expert; views of vectors.
                let floats = Arithmetic::Floats;
                cases.push(packed(layout, floats, pairs, [5, 80, 96], Plain, true, 160));
                cases.push(packed(layout, floats, pairs, [3, 80, 96], Cut(3), false, 32));
                cases.push(packed(layout, floats, pairs, [12, 16, 1088], Swapped(0, 1), false, WHOLE));
            }
        }
        let layout = PackedLayout { format, order: Order::Rows };
        // Long rows, which many lanes share.
        cases.push(packed(layout, Arithmetic::Floats, [1, 1, 2], [3, 9, 4128], Plain, true, WHOLE));
    }
    // Rows that end within a run.
    let layout = PackedLayout { format: Format::Bf16, order: Order::Rows };
    for pairs in [[2, 2, 2], [2, 20, 2], [1, 70, 3]] {
        cases.push(packed(layout, Arithmetic::Floats, pairs, [3, 70, 44], Plain, true, WHOLE));
    }
    cases.into_iter()
}

/// A case with a packed stack of this shape, in blocks of up to `most` rows.
fn packed(
    packing: PackedLayout,
    arithmetic: Arithmetic,
    [rows, tokens, slots]: [usize; 3],
    [count, output, input]: [usize; 3],
    layout: Layout,
    shared: bool,
    most: usize,
) -> Case<ExpertLinear> {
    let shapes = ([rows, tokens, slots], [count, output, input], layout, shared, most);
    let name = ("packed", packing.format.name(), packing.order, arithmetic, shapes);
    let case = Case::new(name, move |numbers| {
        let all = numbers.packed_matrix([count * output, input], packing, arithmetic);
        let weight = MatrixStack::read([count, output, input], most, |range| {
            Ok::<_, ()>(Matrix::Packed(all.narrow(range)))
        });
        ExpertLinear {
            x: numbers.tensor([rows, tokens, if shared { 1 } else { slots }, input], layout),
            weight: weight.expect("what is there is read"),
            experts: experts(numbers, [rows, tokens, slots], count),
        }
    });
    // Vectors that are rounded to bytes have a uniform error of up to half a step. The tolerance is six
    // standard deviations of the sum, which no result exceeds.
    let step = if arithmetic == Arithmetic::Integers { LARGEST / 127.0 } else { 0.0 };
    let rounded = 6.0 * (input as f64).sqrt() * LARGEST * step / 12f64.sqrt();
    let lacks = move |path, _| !takes_packed(path, packing);
    case.of_format(packing.format, arithmetic)
        .without(lacks)
        .within(move |want, rounding| tolerance(input, want, rounding) + rounded)
}
