//! The launches of the shaders.

use burn::{
    backend::Cube,
    tensor::{DType, Int, Tensor},
};

use super::{
    AttentionShape, COMBINE, DECODE, Limits, PREFILL,
    sharing::{Kernel, Sharing},
};
use crate::launch::{Launch, comes_in_fours, empty, empty_like, primitive, strides};

pub(crate) fn wgsl(
    q: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    first: Tensor<1, Int>,
    left_pad: Option<Tensor<1, Int>>,
    shape: &AttentionShape,
) -> Tensor<4> {
    let [batch, heads, queries, head_dim] = q.dims();
    let [_, kv_heads, slots, _] = keys.dims();
    let Sharing { kernel, tiles, splits } = Sharing::new(q.dims(), keys.dims(), shape);
    let padded = left_pad.is_some();
    let (q, keys, values, first) = (primitive(q), primitive(keys), primitive(values), primitive(first));
    let left_pad = left_pad.map_or_else(|| empty(&first, [1], DType::I32), primitive);
    let y = empty_like(&q);
    let workgroups = batch * kv_heads * tiles * splits;

    let Limits { scale, softcap, window, start, origin } = shape.limits(slots);
    let [[q0, q1, q2, q3], [key0, key1, key2, key3], [value0, value1, value2, value3]] =
        [strides(&q), strides(&keys), strides(&values)];
    #[rustfmt::skip]
    let info = [
        q0, q1, q2, q3,
        key0, key1, key2, key3,
        value0, value1, value2, value3,
        kv_heads as u32, (heads / kv_heads) as u32, queries as u32, slots as u32,
        head_dim as u32, origin as u32, start as u32, window as u32,
        scale.to_bits(), softcap.unwrap_or(0.0).to_bits(), u32::from(padded), tiles as u32,
        splits as u32, workgroups as u32,
    ];
    let (shader, fours, size) = match kernel {
        Kernel::Decode { fours } => (&DECODE, [&keys, &values].into_iter().all(comes_in_fours), fours - 1),
        Kernel::Prefill => {
            let parts = match head_dim.div_ceil(64) {
                1 => 2,
                2 => 1,
                _ => 0,
            };
            (&PREFILL, [&q, &keys, &values].into_iter().all(comes_in_fours), parts)
        }
    };
    let vectors = batch * heads * queries;
    let parts = (splits > 1).then(|| empty(&q, [vectors, splits, head_dim + 2], DType::F32));
    let (elem, client) = (q.dtype, y.client.clone());
    let launch =
        Launch::new(shader, elem, &client).with(&[usize::from(!fours), usize::from(splits > 1), size]);
    let launch = launch.reads(q).reads(keys).reads(values).reads(first).reads(left_pad);
    launch.writes(parts.as_ref().unwrap_or(&y)).run(workgroups, &info);
    if let Some(parts) = parts {
        let launch = Launch::new(&COMBINE, elem, &client).reads(parts).writes(&y);
        launch.run(vectors, &[vectors as u32, splits as u32, head_dim as u32]);
    }
    Tensor::from_primitive::<Cube>(y)
}
