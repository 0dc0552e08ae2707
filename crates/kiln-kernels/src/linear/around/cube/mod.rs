//! The `#[cube]` functions, which take the same steps as the shader. On CUDA, there are others for tensor
//! cores.

mod mma;
mod packed;
mod results;

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::DType,
};
use cubecl::prelude::*;

use self::{
    mma::{Codes, Tile},
    results::write_results,
};
pub(crate) use self::{
    mma::{MOST_ROWS, has_tiles, tile_for},
    packed::{add_products_of_pair, numbers_of_pair, read_scaling, sum_of},
    results::{Partial, add_up, added_up},
};
use super::{Around, Sharing};
use crate::{
    linear::{
        activation::Activation,
        around::Then,
        fours::{Four, dot, four, four_or_zero},
        matrix::Matrix,
        packed_reader::{ONE, Reading, runs_of},
    },
    norm::rms_norm::NormOrder,
    runtime::launch::{LANES, address_type, comes_in_fours, count, empty, in_order, in_rows, primitive},
};

/// The operation that follows a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Nothing,
    Gated(Activation),
    Rotated,
}

/// The compile-time parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    /// Most rows of x per workgroup
    most_rows: usize,
    /// Number of groups of eight lanes along a row of the weight, or of warps with tensor cores
    splits: usize,
    biased: bool,
    added: bool,
    norm: Option<NormOrder>,
    kind: Kind,
}

impl Product {
    /// Names all parameters, so that the figures of a kernel do not depend on the others that a run compiled.
    fn permutation(self) -> String {
        let splits = if self.splits == 1 { String::new() } else { format!("-splits_{}", self.splits) };
        let norm = if self.norm.is_some() { "-normed" } else { "" };
        let kind = match self.kind {
            Kind::Nothing => "",
            Kind::Gated(_) => "-gated",
            Kind::Rotated => "-rotated",
        };
        let bias = if self.biased { "-biased" } else { "" };
        let residual = if self.added { "-added" } else { "" };
        format!("{}{norm}{kind}{bias}{residual}{splits}", self.most_rows)
    }

    /// Lanes that share the sums for four rows of the weight.
    fn together(self) -> usize {
        8 * self.splits
    }

    /// Rows of the weight per workgroup.
    fn outputs(self) -> usize {
        LANES / self.together() * 4
    }

    /// Rows of x whose sums are in memory at the same time.
    fn at_once(self) -> usize {
        self.most_rows.min(4)
    }
}

/// Parameters that are the same for all workgroups.
#[derive(CubeType, CubeLaunch)]
struct Info {
    eps: f32,
    tokens: usize,
    input: usize,
    /// Runs in a row of a packed weight
    runs: usize,
    output: usize,
    rows: usize,
    workgroups: usize,
    pairs: usize,
    head_dim: usize,
    /// Rows of the weight whose results are rotated.
    rotated: usize,
    /// 1 if each sequence has its own angles, 0 otherwise.
    each: usize,
    /// [`ONE`], or the bits that [`Tile::magic`] returns
    one: u32,
}

/// The row of the weight at a place: results that are combined are two places apart.
#[cube]
fn row_at(place: usize, info: &Info, #[comptime] kind: Kind) -> usize {
    let second = place % 4 >= 2;
    if comptime!(matches!(kind, Kind::Gated(_))) {
        let number = place / 4 * 2 + place % 2;
        let half = info.output / 2;
        min(number, half - 1) + select(second, half, 0)
    } else if comptime!(kind == Kind::Rotated) {
        let of_head = place % info.head_dim;
        let row = of_head / 4 * 2 + of_head % 2 + select(second, info.pairs, 0);
        let is_rotated = place < info.rotated && of_head < 2 * info.pairs;
        select(is_rotated, place - of_head + row, place)
    } else {
        place
    }
}

/// Zeros for the sums of `rows` rows of x: of products with four rows of the weight, and of squares.
#[cube]
fn no_sums(#[comptime] rows: usize) -> (Array<Four>, Array<f32>) {
    let mut products = Array::<Four>::new(rows);
    let mut squares = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        products[r] = Four::new(0.0);
        squares[r] = 0.0;
    }
    (products, squares)
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
    info: &Info,
    #[comptime] product: Product,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= info.workgroups {
        terminate!();
    }
    let (tokens, input, rows) = (info.tokens, info.input, info.rows);
    let lane = UNIT_POS as usize;
    let (most_rows, together) = comptime!((product.most_rows, product.together()));
    let (norm, kind) = comptime!((product.norm, product.kind));
    let tiles = rows.div_ceil(most_rows);
    let first_row = workgroup % tiles * most_rows;
    let first_output = workgroup / tiles * comptime!(product.outputs());
    let first = first_output + lane / together * 4;
    let (mut products, mut squares) = no_sums(most_rows);
    let columns = input.div_ceil(4);
    let mut c = lane % together * 2;
    while c < columns {
        let mut weights = Array::<Four>::new(8usize);
        #[unroll]
        for i in 0..4usize {
            // Indices past the last row read the last one.
            let own = min(row_at(first + i, info, kind), info.output - 1);
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
    let sums = Shared::<[f32]>::new_slice(comptime!(4 * LANES * product.at_once()));
    write_results::<E>(
        sums,
        &mut products,
        &squares,
        bias,
        residual,
        y,
        cosines,
        sines,
        info,
        first_row,
        first_output,
        product,
    );
}

/// Computes the product in `kernel`, for as many rows of x as
/// [`are_few_of_one_type`](crate::linear::are_few_of_one_type) allows.
pub(crate) fn launch(kernel: &str, around: Around) -> burn::tensor::Tensor<3> {
    let Around { x, weight, bias, residual, norm, then } = around;
    let ([batch, tokens, input], output) = (x.dims(), weight.rows());
    let rows = batch * tokens;
    // Vectors that are multiplied with packed weights or by tensor cores are read by fours or eights.
    let packed = matches!(weight, Matrix::Packed(_));
    let shape = [then.places(output), input];
    let tile = mma::tile_for(kernel, &weight);
    let Sharing { splits, together, workgroups } = match tile {
        Some(_) => Sharing::by_mma(rows, shape, &x.device()),
        None => Sharing::new(rows, shape, packed, &x.device()),
    };
    let (biased, added, order) = (bias.is_some(), residual.is_some(), norm.as_ref().map(|norm| norm.order));
    let x = if packed || tile.is_some() { in_order(x) } else { primitive(x) };
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, then.width(output)], x.dtype);
    let eps = norm.as_ref().map_or(0.0, |norm| norm.eps) as f32;
    let scales = match norm {
        Some(norm) if packed || tile.is_some() => in_order(norm.scale),
        Some(norm) => primitive(norm.scale),
        None => empty(&x, [4], x.dtype),
    };
    let table = || empty(&x, [1; 3], DType::F32);
    let (kind, cos, sin, [pairs, head_dim, rotated, each]) = match then {
        Then::Nothing => (Kind::Nothing, table(), table(), [0; 4]),
        Then::Gate(activation) => (Kind::Gated(activation), table(), table(), [0; 4]),
        Then::Rotate { cos, sin, heads, head_dim } => {
            let [tables, _, pairs] = cos.dims();
            let heads = [pairs, head_dim, heads * head_dim, usize::from(tables > 1)];
            (Kind::Rotated, primitive(cos), primitive(sin), heads)
        }
    };
    let info = || {
        InfoLaunch::new(
            eps,
            tokens,
            input,
            runs_of(input),
            output,
            rows,
            workgroups,
            pairs,
            head_dim,
            rotated,
            each,
            tile.map_or(ONE, Tile::magic),
        )
    };
    let (x, rests, order, tile) = match (order, tile) {
        (Some(norm), Some(tile)) if together > mma::NORMED_ROWS => {
            let (x, rests) = mma::normed(x, &scales, norm, packed, info());
            (x, Some(rests), None, Some(tile.after_norm()))
        }
        _ => (x, None, order, tile),
    };
    let rests = || rests.clone().unwrap_or_else(|| empty(&y, [1], DType::F32));
    let product = Product { most_rows: together, splits, biased, added, norm: order, kind };
    let elem = dtype_to_storage_type(x.dtype);
    let (client, groups, lanes) = (y.client.clone(), count(workgroups), CubeDim::new_1d(LANES as u32));
    macro_rules! launch {
        ($function:path, $weight:expr $(, by $width:expr)?; $($more:expr),*; $($compiled:expr),*) => {
            $function(
                &client,
                groups,
                lanes,
                address_type([&x, &$weight, &bias, &residual, &y]),
                $($width,)?
                x.into_tensor_arg(),
                $weight.into_tensor_arg(),
                bias.into_tensor_arg(),
                residual.into_tensor_arg(),
                y.clone().into_tensor_arg(),
                scales.into_tensor_arg(),
                cos.into_tensor_arg(),
                sin.into_tensor_arg(),
                $($more.into_tensor_arg(),)*
                info(),
                product,
                $($compiled,)*
                elem,
            )
        };
    }
    match (weight, tile) {
        (Matrix::Dense(weight), Some(tile)) => {
            let weight = primitive(weight);
            launch!(mma::linear_mma::launch, weight; rests(); tile);
        }
        (Matrix::Dense(weight), None) => {
            let weight = primitive(weight);
            let fours = [&x, &weight, &scales].into_iter().all(comes_in_fours);
            launch!(linear::launch, weight, by if fours { 4 } else { 1 }; ;);
        }
        (Matrix::Packed(matrix), _) => {
            let format = matrix.format();
            let words = in_rows(matrix.words);
            let reading = Reading::new(format, &words, y.dtype != DType::F32);
            match tile.zip(Codes::new(reading)) {
                Some((tile, codes)) => launch!(mma::linear_packed_mma::launch, words; rests(); tile, codes),
                None => launch!(packed::linear_packed::launch, words, by 4; ; reading),
            }
        }
    }
    burn::tensor::Tensor::from_primitive::<Cube>(y)
}
