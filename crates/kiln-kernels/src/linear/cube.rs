//! The `#[cube]` function, which takes the steps of the shader.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::DType,
};
use cubecl::prelude::*;

use super::{Around, Sharing};
use crate::{
    Activation, NormOrder,
    gated::cube::activated,
    launch::{LANES, address_type, comes_in_fours, count, empty, primitive},
    normed_linear::Then,
};

/// As `vec4<f32>` of WGSL.
pub(crate) type Four = Vector<f32, Const<4>>;

/// Four numbers of a row of that many, those from 4 c on. What is beyond its end is 0, where fours do not end with it.
#[cube]
pub(crate) fn four<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    stride: usize,
    len: usize,
) -> Four {
    let width = tensor.vector_size();
    if comptime!(width == 4) {
        Four::cast_from(tensor[at / 4 + c])
    } else {
        let mut numbers = Four::new(0.0);
        #[unroll]
        for i in 0..4usize {
            if 4 * c + i < len {
                numbers.insert(i, f32::cast_from(tensor[at + (4 * c + i) * stride]));
            }
        }
        numbers
    }
}

/// [`four`], also where 4 c is beyond the end of the row.
#[cube]
pub(crate) fn four_or_zero<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    stride: usize,
    len: usize,
) -> Four {
    let mut numbers = Four::new(0.0);
    if 4 * c < len {
        numbers = four::<E, N>(tensor, at, c, stride, len);
    }
    numbers
}

/// Adds up, for each of `at_once` rows of x, the four sums of every `together` lanes. What is left of them follows each other in `sums`.
#[cube]
pub(crate) fn add_up(
    sums: &mut Shared<[f32]>,
    lane: usize,
    #[comptime] together: usize,
    #[comptime] at_once: usize,
) {
    sync_cube();
    let first = comptime!(first_added(together));
    if comptime!(first > 1) {
        let left = comptime!(together / first);
        let is_mine = lane < comptime!(LANES / first * at_once);
        let begin = lane / left * together + lane % left;
        let mut sum = Four::new(0.0);
        if is_mine {
            for j in 0..first {
                #[unroll]
                for i in 0..4usize {
                    sum.insert(i, sum.extract(i) + sums[(begin + j * left) * 4 + i]);
                }
            }
        }
        sync_cube();
        if is_mine {
            #[unroll]
            for i in 0..4usize {
                sums[lane * 4 + i] = sum.extract(i);
            }
        }
        sync_cube();
    }
}

/// What was added up for the output of that number of the workgroup, in the row of that number.
#[cube]
pub(crate) fn added_up(sums: &Shared<[f32]>, row: usize, output: usize, #[comptime] together: usize) -> f32 {
    let left = comptime!(together / first_added(together));
    let outputs = comptime!(LANES / together * 4);
    let first = (row * outputs + output) / 4 * left;
    let mut sum = f32::new(0.0);
    for j in 0..left {
        // Outputs begin at different lanes, which are in different banks.
        sum += sums[(first + (j + output / 4) % left) * 4 + output % 4];
    }
    sum
}

/// `Σ a b`. Which products are joined with a sum is said here: compilers choose, and may choose another one in a kernel for
/// more rows.
#[cube]
pub(crate) fn dot(a: Four, b: Four) -> f32 {
    let mut sum = a.extract(0usize) * b.extract(0usize);
    #[unroll]
    for d in 1..4usize {
        sum = fma(a.extract(d), b.extract(d), sum);
    }
    sum
}

/// Lanes of `together` whose sums are added up first.
pub(crate) fn first_added(together: usize) -> usize {
    if together > 16 { 16 } else { 1 }
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Nothing,
    Gated(Activation),
    Rotated,
}

/// What a launch says of rotary positions.
#[derive(CubeType, CubeLaunch)]
struct Heads {
    pairs: usize,
    head_dim: usize,
    /// Rows of the weight whose results are rotated.
    rotated: usize,
    /// 1 where each sequence has angles of its own, else 0.
    each: usize,
}

/// The row of the weight at a place: results that meet are two places apart.
#[cube]
fn row_at(place: usize, output: usize, heads: &Heads, #[comptime] kind: Kind) -> usize {
    let second = place % 4 >= 2;
    if comptime!(matches!(kind, Kind::Gated(_))) {
        let number = place / 4 * 2 + place % 2;
        let half = output / 2;
        min(number, half - 1) + select(second, half, 0)
    } else if comptime!(kind == Kind::Rotated) {
        let of_head = place % heads.head_dim;
        let row = of_head / 4 * 2 + of_head % 2 + select(second, heads.pairs, 0);
        let is_rotated = place < heads.rotated && of_head < 2 * heads.pairs;
        select(is_rotated, place - of_head + row, place)
    } else {
        place
    }
}

/// A result, with its bias: that of a row of x that has its sums in memory, at a place of the workgroup.
#[cube]
fn result<E: Float>(
    sums: &Shared<[f32]>,
    bias: &Tensor<E>,
    own_row: usize,
    own_place: usize,
    row: usize,
    #[comptime] together: usize,
    #[comptime] biased: bool,
) -> f32 {
    let sum = added_up(sums, own_row, own_place, together);
    if comptime!(biased) { sum + f32::cast_from(bias[row * bias.stride(0)]) } else { sum }
}

#[cube(launch, address_type = "dynamic")]
fn linear<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<Vector<E, N>>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    scales: &Tensor<Vector<E, N>>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    heads: &Heads,
    eps: f32,
    tokens: usize,
    input: usize,
    output: usize,
    rows: usize,
    workgroups: usize,
    #[comptime] most_rows: usize,
    #[comptime] splits: usize,
    #[comptime] biased: bool,
    #[comptime] added: bool,
    #[comptime] norm: Option<NormOrder>,
    #[comptime] kind: Kind,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let together = comptime!(8 * splits);
    let outputs = comptime!(LANES / (8 * splits) * 4);
    let tiles = rows.div_ceil(most_rows);
    let first_row = workgroup % tiles * most_rows;
    let first_output = workgroup / tiles * outputs;
    let first = first_output + lane / together * 4;
    let mut products = Array::<Four>::new(most_rows);
    #[unroll]
    for r in 0..most_rows {
        products[r] = Four::new(0.0);
    }
    let mut squares = Array::<f32>::new(most_rows);
    #[unroll]
    for r in 0..most_rows {
        squares[r] = 0.0;
    }
    let columns = input.div_ceil(4);
    let mut c = lane % together * 2;
    while c < columns {
        let mut weights = Array::<Four>::new(8usize);
        #[unroll]
        for i in 0..4usize {
            // Those beyond the last are the last.
            let own = min(row_at(first + i, output, heads, kind), output - 1);
            weights[i] = four::<E, N>(w, own * w.stride(0), c, w.stride(1), input);
            weights[i + 4] = four_or_zero::<E, N>(w, own * w.stride(0), c + 1, w.stride(1), input);
        }
        let mut own_scales = Array::<Four>::new(2usize);
        if comptime!(norm.is_some()) {
            #[unroll]
            for half in 0..2usize {
                let mut four = four_or_zero::<E, N>(scales, 0usize, c + half, scales.stride(0), input);
                if comptime!(norm == Some(NormOrder::ScaleThenCast)) {
                    four += Four::new(1.0);
                }
                own_scales[half] = four;
            }
        }
        #[unroll]
        for r in 0..most_rows {
            let row = min(first_row + r, rows - 1);
            let at = row / tokens * x.stride(0) + row % tokens * x.stride(1);
            let mut numbers = four::<E, N>(x, at, c, x.stride(2), input);
            let mut next = four_or_zero::<E, N>(x, at, c + 1, x.stride(2), input);
            if comptime!(norm.is_some()) {
                squares[r] += dot(numbers, numbers) + dot(next, next);
                numbers *= own_scales[0];
                next *= own_scales[1];
            }
            let mut sums = products[r];
            #[unroll]
            for i in 0..4usize {
                sums.insert(i, sums.extract(i) + dot(numbers, weights[i]) + dot(next, weights[i + 4]));
            }
            products[r] = sums;
        }
        c += comptime!(2 * together);
    }
    // Rows whose sums are in memory together.
    let at_once = comptime!(if most_rows < 4 { most_rows } else { 4 });
    let mut sums = Shared::<[f32]>::new_slice(comptime!(4 * LANES * at_once));
    if comptime!(norm.is_some()) {
        #[unroll]
        for from in 0..comptime!(most_rows / at_once) {
            #[unroll]
            for r in 0..at_once {
                sums[lane * 4 + r] = squares[from * at_once + r];
            }
            add_up(&mut sums, lane, together, at_once);
            // All lanes that share sums of four rows of the weight have met all of x.
            let left = comptime!(together / first_added(together));
            #[unroll]
            for r in 0..at_once {
                let mut sum = f32::new(0.0);
                for j in 0..left {
                    sum += sums[j * 4 + r];
                }
                let root = f32::sqrt(sum / f32::cast_from(input) + eps);
                products[from * at_once + r] /= Four::new(root);
            }
            sync_cube();
        }
    }
    #[unroll]
    for from in 0..comptime!(most_rows / at_once) {
        #[unroll]
        for r in 0..at_once {
            #[unroll]
            for i in 0..4usize {
                sums[(r * LANES + lane) * 4 + i] = products[from * at_once + r].extract(i);
            }
        }
        add_up(&mut sums, lane, together, at_once);
        let mut i = lane;
        while i < outputs * at_once {
            let row = first_row + from * at_once + i / outputs;
            let place = first_output + i % outputs;
            let out = row_at(place, output, heads, kind);
            let (own_row, own_place) = (i / outputs, i % outputs);
            if comptime!(matches!(kind, Kind::Gated(_))) {
                let activation = comptime!(match kind {
                    Kind::Gated(activation) => activation,
                    _ => Activation::Silu,
                });
                let half = output / 2;
                if row < rows && place % 4 < 2 && place / 4 * 2 + place % 2 < half {
                    let gate = result::<E>(&sums, bias, own_row, own_place, out, together, biased);
                    let up = result::<E>(&sums, bias, own_row, own_place + 2, out + half, together, biased);
                    y[row * half + out] = E::cast_from(activated(gate, activation) * up);
                }
            } else if row < rows && place < output {
                let mut value = result::<E>(&sums, bias, own_row, own_place, out, together, biased);
                if comptime!(kind == Kind::Rotated) {
                    let of_head = out % heads.head_dim;
                    if out < heads.rotated && of_head < 2 * heads.pairs {
                        let (sequence, token, pair) =
                            (row / tokens * heads.each, row % tokens, of_head % heads.pairs);
                        let at = sequence * cosines.stride(0) + token * cosines.stride(1);
                        let c = f32::cast_from(E::cast_from(cosines[at + pair * cosines.stride(2)]));
                        let at = sequence * sines.stride(0) + token * sines.stride(1);
                        let s = f32::cast_from(E::cast_from(sines[at + pair * sines.stride(2)]));
                        let is_first = of_head < heads.pairs;
                        let other_place = select(is_first, own_place + 2, own_place - 2);
                        let other_row = select(is_first, out + heads.pairs, out - heads.pairs);
                        let other =
                            result::<E>(&sums, bias, own_row, other_place, other_row, together, biased);
                        value = value * c + select(is_first, -other, other) * s;
                    }
                }
                if comptime!(added) {
                    let at = row / tokens * residual.stride(0) + row % tokens * residual.stride(1);
                    value += f32::cast_from(residual[at + out * residual.stride(2)]);
                }
                y[row * output + out] = E::cast_from(value);
            }
            i += LANES;
        }
        if comptime!(most_rows > at_once) {
            // All lanes have read what was there.
            sync_cube();
        }
    }
}

/// Weights are dense.
pub(crate) fn launch(Around { x, weight, bias, residual, norm, then }: Around) -> burn::tensor::Tensor<3> {
    let weight = weight.numbers();
    let ([batch, tokens, input], [output, _]) = (x.dims(), weight.dims());
    let rows = batch * tokens;
    let (biased, added) = (bias.is_some(), residual.is_some());
    let Sharing { splits, together, workgroups } =
        Sharing::new(rows, input, then.places(output), &x.device());
    let (x, weight) = (primitive(x), primitive(weight));
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, then.width(output)], x.dtype);
    let (order, eps) = (norm.as_ref().map(|norm| norm.order), norm.as_ref().map_or(0.0, |norm| norm.eps));
    let scales = norm.map_or_else(|| empty(&x, [4], x.dtype), |norm| primitive(norm.scale));
    let fours = [&x, &weight, &scales].into_iter().all(comes_in_fours);
    let table = || empty(&x, [1; 3], DType::F32);
    let (kind, cos, sin, heads) = match then {
        Then::Nothing => (Kind::Nothing, table(), table(), HeadsLaunch::new(0, 0, 0, 0)),
        Then::Gate(activation) => (Kind::Gated(activation), table(), table(), HeadsLaunch::new(0, 0, 0, 0)),
        Then::Rotate { cos, sin, heads, head_dim } => {
            let [tables, _, pairs] = cos.dims();
            let heads = HeadsLaunch::new(pairs, head_dim, heads * head_dim, usize::from(tables > 1));
            (Kind::Rotated, primitive(cos), primitive(sin), heads)
        }
    };
    let elem = dtype_to_storage_type(x.dtype);
    linear::launch(
        &y.client,
        count(workgroups),
        CubeDim::new_1d(LANES as u32),
        address_type([&x, &weight, &bias, &residual, &y]),
        if fours { 4 } else { 1 },
        x.into_tensor_arg(),
        weight.into_tensor_arg(),
        bias.into_tensor_arg(),
        residual.into_tensor_arg(),
        y.clone().into_tensor_arg(),
        scales.into_tensor_arg(),
        cos.into_tensor_arg(),
        sin.into_tensor_arg(),
        heads,
        eps as f32,
        tokens,
        input,
        output,
        rows,
        workgroups,
        together,
        splits,
        biased,
        added,
        order,
        kind,
        elem,
    );
    burn::tensor::Tensor::from_primitive::<Cube>(y)
}
