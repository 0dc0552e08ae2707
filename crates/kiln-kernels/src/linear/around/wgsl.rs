//! The launches of the shader.

use burn::{
    backend::Cube,
    tensor::{DType, Tensor},
};

use super::{Around, PACKED, SHADER, Sharing};
use crate::{
    linear::{around::Then, matrix::Matrix, packed_lines},
    norm::rms_norm::NormOrder,
    runtime::launch::{Launch, comes_in_fours, empty, in_order, primitive, strides},
    shaders::linear::Info,
};

pub(crate) fn launch(Around { x, weight, bias, residual, norm, then }: Around) -> Tensor<3> {
    let ([batch, tokens, input], output) = (x.dims(), weight.rows());
    let (rows, device) = (batch * tokens, x.device());
    let (biased, added) = (bias.is_some(), residual.is_some());
    let format = match &weight {
        Matrix::Dense(_) => None,
        Matrix::Packed(packed) => packed_lines::pick(packed.format()),
    };
    let packed = format.is_some();
    let Sharing { splits, together, workgroups } =
        Sharing::new(rows, [then.places(output), input], packed, &device);
    // Packed weights are read by fours, and so are the vectors that they are multiplied with.
    let x = if packed { in_order(x) } else { primitive(x) };
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, then.width(output)], x.dtype);
    let fused = then.option(norm.is_some());
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
    let info = Info {
        x_strides: strides(&x),
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
        shift: f32::from(u8::from(shift)),
    };
    let picks = [together.ilog2() as usize, splits.ilog2() as usize, fused];
    let launch = if let Some(format) = format {
        Launch::new(&PACKED, x.dtype, &y.client).with(&[&[format], &picks[..]].concat()).unpacking_on(&device)
    } else {
        let fours = [&x, &weight, &scales].into_iter().all(comes_in_fours);
        Launch::new(&SHADER, x.dtype, &y.client).with(&[&[usize::from(!fours)], &picks[..]].concat())
    };
    launch.run(workgroups, [&x, &weight, &bias, &residual, &y, &scales, &cos, &sin], info);
    Tensor::from_primitive::<Cube>(y)
}
