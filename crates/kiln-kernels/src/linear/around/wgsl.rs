//! The launches of the shader.

use burn::{
    backend::Cube,
    tensor::{DType, Tensor},
};

use burn_cubecl::tensor::CubeTensor;
use kiln_weights::streams::Arithmetic;

use super::{Around, BYTES, PACKED, ROWS_IN_BYTES, SHADER, Sharing};
use crate::{
    linear::{around::Then, matrix::Matrix, packed_lines},
    norm::rms_norm::NormOrder,
    runtime::{
        device::opened::has_few_registers,
        launch::{Launch, comes_in_fours, empty, in_order, primitive, strides},
    },
    shaders::{linear::Info, rows_in_bytes},
};

/// The text for packed weights.
#[derive(Clone, Copy)]
enum Text {
    /// With the index of the format in [`packed_lines::FORMATS`]
    Floats(usize),
    /// With the index of the format in [`packed_lines::OF_BYTES`]
    Bytes(usize),
}

impl Text {
    fn of(weight: &Matrix) -> Option<Self> {
        let Matrix::Packed(packed) = weight else { return None };
        let format = packed.format();
        let bytes = packed_lines::pick_of_bytes(format);
        match bytes.filter(|_| packed.use_as.arithmetic == Arithmetic::Integers) {
            Some(pick) => Some(Self::Bytes(pick)),
            None => packed_lines::pick(format).map(Self::Floats),
        }
    }
}

/// Rounds rows of x to bytes, after a norm with `scales` if there is one: its epsilon, and what is added to
/// the scales. Returns the bytes, and the scale and sums of each run of 32 numbers.
fn in_bytes(
    x: &CubeTensor,
    [rows, input]: [usize; 2],
    scales: &CubeTensor,
    norm: Option<[f32; 2]>,
) -> [CubeTensor; 2] {
    let bytes = empty(x, [rows, input / 4], DType::U32);
    let runs = empty(x, [rows, input / 32 * 4], DType::F32);
    let [eps, shift] = norm.unwrap_or_default();
    let info = rows_in_bytes::Info { rows: rows as u32, input: input as u32, eps, shift };
    let launch = Launch::new(&ROWS_IN_BYTES, x.dtype, &bytes.client).with(&[usize::from(norm.is_some())]);
    launch.run(rows, [x, scales, &bytes, &runs], info);
    [bytes, runs]
}

pub(crate) fn launch(Around { x, weight, bias, residual, norm, then }: Around) -> Tensor<3> {
    let ([batch, tokens, input], output) = (x.dims(), weight.rows());
    let (rows, device) = (batch * tokens, x.device());
    let (biased, added) = (bias.is_some(), residual.is_some());
    let text = Text::of(&weight);
    let packed = text.is_some();
    let sharing = Sharing::new(rows, [then.places(output), input], packed, &device);
    // Intel's compiler spills up to 226 registers for eight rows of packed weights, and few for bytes.
    let by_four = matches!(text, Some(Text::Floats(_))) && has_few_registers(&device);
    let Sharing { splits, together, workgroups } = if by_four { sharing.by_four(rows) } else { sharing };
    // Packed weights are read by fours, and so are the vectors that they are multiplied with.
    let x = if packed { in_order(x) } else { primitive(x) };
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, then.width(output)], x.dtype);
    let (fused, after, normed) = (then.option(norm.is_some()), then.after(), norm.is_some());
    let shift = norm.as_ref().is_some_and(|norm| norm.order == NormOrder::ScaleThenCast);
    let (scales, eps) = match norm {
        Some(norm) => (if packed { in_order(norm.scale) } else { primitive(norm.scale) }, norm.eps as f32),
        None => (empty(&x, [4], x.dtype), 0.0),
    };
    let (weight, w_strides) = match weight {
        Matrix::Dense(weight) => {
            let weight = primitive(weight);
            let strides = strides(&weight);
            (weight, strides)
        }
        Matrix::Packed(packed) => {
            let words = packed.words.dims()[1];
            (in_order(packed.words), [words as u32, 1])
        }
    };
    let (cos, sin, each, [pairs, head_dim, rotated]) = match then {
        Then::Rotate { cos, sin, heads, head_dim } => {
            let [tables, _, pairs] = cos.dims();
            (primitive(cos), primitive(sin), u32::from(tables > 1), [pairs, head_dim, heads * head_dim])
        }
        _ => (empty(&x, [1; 3], DType::F32), empty(&x, [1; 3], DType::F32), 0, [0; 3]),
    };
    let ([bias_stride], [scale_stride]) = (strides(&bias), strides(&scales));
    let [[cos0, cos1, cos2], [sin0, sin1, sin2]] = [strides(&cos), strides(&sin)];
    let shift = f32::from(u8::from(shift));
    let (x, scales, x_strides) = match text {
        Some(Text::Bytes(_)) => {
            let [bytes, runs] = in_bytes(&x, [rows, input], &scales, normed.then_some([eps, shift]));
            // In vectors of four words.
            let of_row = (input / 16) as u32;
            (bytes, runs, [tokens as u32 * of_row, of_row, 1])
        }
        Some(Text::Floats(_)) | None => {
            let strides = strides(&x);
            (x, scales, strides)
        }
    };
    let info = Info {
        x_strides,
        tokens: tokens as u32,
        w_strides,
        input: input as u32,
        output: output as u32,
        residual_strides: strides(&residual),
        added: u32::from(added),
        rows: rows as u32,
        biased: u32::from(biased),
        bias_stride,
        workgroups: workgroups as u32,
        cos_strides: [cos0 * each, cos1, cos2],
        pairs: pairs as u32,
        sin_strides: [sin0 * each, sin1, sin2],
        head_dim: head_dim as u32,
        rotated: rotated as u32,
        scale_stride,
        eps,
        shift,
    };
    let picks = |text, after| [text, together.ilog2() as usize, splits.ilog2() as usize, after];
    let launch = match text {
        Some(Text::Floats(format)) => {
            Launch::new(&PACKED, y.dtype, &y.client).with(&picks(format, fused)).unpacking_on(&device)
        }
        Some(Text::Bytes(format)) => {
            Launch::new(&BYTES, y.dtype, &y.client).with(&picks(format, after)).unpacking_on(&device)
        }
        None => {
            let fours = [&x, &weight, &scales].into_iter().all(comes_in_fours);
            Launch::new(&SHADER, y.dtype, &y.client).with(&picks(usize::from(!fours), fused))
        }
    };
    launch.run(workgroups, [&x, &weight, &bias, &residual, &y, &scales, &cos, &sin], info);
    Tensor::from_primitive::<Cube>(y)
}
