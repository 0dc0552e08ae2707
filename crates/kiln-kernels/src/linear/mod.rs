//! `y = x Wᵀ + b + r` for `[rows, tokens, in]` and weights `[out, in]`, as checkpoints store them.
//!
//! Decoding multiplies each weight by a handful of vectors, once a token: it takes as long as reading the weights does.
//! The native code reads each weight once, on all threads. Since both factors are stored along the sum, it rearranges
//! neither, which is what a general product spends its time on where there are few rows. So do the GPU kernels, which
//! are for few rows alone.

#[cfg(feature = "cpu")]
mod native;
#[cfg(feature = "cube")]
mod twin;

#[cfg(feature = "cpu")]
pub(crate) use native::native;
#[cfg(feature = "cube")]
pub(crate) use twin::launch as cube;

#[cfg(feature = "cube")]
use burn::tensor::Device;
use burn::tensor::Tensor;

#[cfg(feature = "cube")]
use crate::launch::enough;
use crate::shader::{Lines, Shader};

pub(crate) fn definition(
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<3>>,
) -> Tensor<3> {
    let [rows, tokens, input] = x.dims();
    let [output, _] = weight.dims();
    // One product of two matrices, which the CPU backend computes in parallel; one product a row it would not.
    let y = x.reshape([rows * tokens, input]).matmul(weight.transpose());
    let y = match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    };
    let y = y.reshape([rows, tokens, output]);
    match residual {
        Some(residual) => y + residual,
        None => y,
    }
}

/// Rows that are few: for more, Burn's matrix products are the fast ones.
#[cfg(feature = "cube")]
const FEW: usize = 4;

/// Which workgroup has what. Shapes alone say it: a captured step is replayed.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
struct Sharing {
    /// Parts that rows of the weight are split into: 1, 2 or 4.
    splits: usize,
    workgroups: usize,
}

#[cfg(feature = "cube")]
impl Sharing {
    fn new(input: usize, output: usize, device: &Device) -> Self {
        /// Numbers of a row of the result that a workgroup makes, where rows of the weight are not split.
        const OUTPUTS: usize = crate::launch::LANES / 8 * 4;
        /// Numbers along which eight lanes are worth having.
        const WORTH: usize = 128;

        let most = (input / WORTH).min(enough(device, 256) * OUTPUTS / output);
        let splits = match most {
            0..2 => 1,
            2..4 => 2,
            _ => 4,
        };
        Self { splits, workgroups: output.div_ceil(OUTPUTS / splits) }
    }
}

/// Whether there is a GPU kernel for these.
#[cfg(feature = "cube")]
pub(crate) fn has_kernel(
    x: &Tensor<3>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    residual: Option<&Tensor<3>>,
) -> bool {
    let ([rows, tokens, input], [output, _]) = (x.dims(), weight.dims());
    let others = bias.map(Tensor::dtype).into_iter().chain(residual.map(Tensor::dtype));
    let of_one_type = others.chain([weight.dtype()]).all(|dtype| dtype == x.dtype());
    of_one_type && rows * tokens <= FEW && rows * tokens * input * output > 0
}

/// How tensors are read: by fours where their layout allows.
const PACK: Lines = &["alias pack = vec4<elem>;\nconst WIDTH = 4u;", "alias pack = elem;\nconst WIDTH = 1u;"];

pub(crate) const SHADER: Shader = Shader {
    name: "linear",
    text: include_str!("../../../../shaders/linear.wgsl"),
    options: &[
        PACK,
        &["const ROWS = 1u;", "const ROWS = 2u;", "const ROWS = 4u;"],
        &["const SPLITS = 1u;", "const SPLITS = 2u;", "const SPLITS = 4u;"],
    ],
};

#[cfg(feature = "wgpu")]
pub(crate) fn wgsl(
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<3>>,
) -> Tensor<3> {
    use burn::backend::Cube;

    use crate::launch::{Launch, comes_in_fours, empty, primitive, strides};

    let ([batch, tokens, input], [output, _]) = (x.dims(), weight.dims());
    let rows = batch * tokens;
    let (biased, added) = (bias.is_some(), residual.is_some());
    let Sharing { splits, workgroups } = Sharing::new(input, output, &x.device());
    let (x, weight) = (primitive(x), primitive(weight));
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, output], x.dtype);
    let fours = comes_in_fours(&x) && comes_in_fours(&weight);
    let ([x0, x1, x2], [w0, w1], [bias0]) = (strides(&x), strides(&weight), strides(&bias));
    let [residual0, residual1, residual2] = strides(&residual);
    #[rustfmt::skip]
    let info = [
        x0, x1, x2, tokens as u32,
        w0, w1, input as u32, output as u32,
        residual0, residual1, residual2, u32::from(added),
        rows as u32, u32::from(biased), bias0, workgroups as u32,
    ];
    let picks = [usize::from(!fours), rows.next_power_of_two().ilog2() as usize, splits.ilog2() as usize];
    let launch = Launch::new(&SHADER, x.dtype, &y.client).with(&picks);
    launch.reads(x).reads(weight).reads(bias).reads(residual).writes(&y).run(workgroups, &info);
    Tensor::from_primitive::<Cube>(y)
}
