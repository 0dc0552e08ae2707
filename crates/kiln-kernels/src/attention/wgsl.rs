//! The launches of the shaders.

use burn::{
    backend::Cube,
    tensor::{DType, Int, Tensor},
};

use burn_cubecl::tensor::CubeTensor;

use super::{
    Buffers, COMBINE, DECODE, Limits, PREFILL,
    sharing::{Rows, Sharing, Written, over_chain},
    tiles,
};
use crate::runtime::launch::{Launch, comes_in_fours, empty, in_order, primitive, strides};

pub(super) fn dense(q: Tensor<4>, chain: Vec<Buffers>, positions: Tensor<2, Int>) -> Tensor<4> {
    let launch = |q, buffers, sharing, written: Written<'_>| {
        launch(q, buffers, positions.clone(), sharing, written);
    };
    over_chain(q, chain, launch, combine)
}

pub(super) fn launch(
    q: CubeTensor,
    buffers: Buffers,
    positions: Tensor<2, Int>,
    Sharing { rows, tiles, splits }: Sharing,
    written: Written<'_>,
) {
    let [_, kv_heads, slots, head_dim] = buffers.keys.dims();
    let [batch, heads, queries] = [0, 1, 2].map(|dim| q.meta.shape()[dim]);
    let Limits { scale, softcap, window, start, origin, end } = buffers.limits();
    let Buffers { keys, values, from, .. } = buffers;
    let device = keys.device();
    let bounded = from.is_some();
    let (keys, values, positions) = (primitive(keys), primitive(values), in_order(positions));
    let from = from.map_or_else(|| empty(&positions, [1], DType::I32), primitive);
    let workgroups = batch * kv_heads * tiles * splits;

    let [[q0, q1, q2, q3], [key0, key1, key2, key3], [value0, value1, value2, value3]] =
        [strides(&q), strides(&keys), strides(&values)];
    #[rustfmt::skip]
    let info = [
        q0, q1, q2, q3,
        key0, key1, key2, key3,
        value0, value1, value2, value3,
        kv_heads as u32, (heads / kv_heads) as u32, queries as u32, slots as u32,
        head_dim as u32, origin as u32, start as u32, window as u32,
        scale.to_bits(), softcap.unwrap_or(0.0).to_bits(), u32::from(bounded), tiles as u32,
        splits as u32, workgroups as u32, written.parts as u32, written.before as u32,
        end as u32, batch as u32, rows.chunk() as u32,
    ];
    let split = usize::from(written.parts > 1);
    let (shader, picks) = match rows {
        Rows::Few { fours, .. } => {
            let in_fours = [&keys, &values].into_iter().all(comes_in_fours);
            (&DECODE, [usize::from(!in_fours), split, fours - 1])
        }
        Rows::Many => match tiles::picks([&q, &keys, &values], split, &device) {
            Some(picks) => (&tiles::SHADER, picks),
            None => {
                let in_fours = [&q, &keys, &values].into_iter().all(comes_in_fours);
                let parts = match head_dim.div_ceil(64) {
                    1 => 2,
                    2 => 1,
                    _ => 0,
                };
                (&PREFILL, [usize::from(!in_fours), split, parts])
            }
        },
    };
    let client = q.client.clone();
    let launch = Launch::new(shader, q.dtype, &client).with(&picks);
    let launch = launch.reads(q).reads(keys).reads(values).reads(positions).reads(from);
    launch.writes(written.to).run(workgroups, &info);
}

/// The result of all parts.
pub(super) fn combine(parts: CubeTensor, dtype: DType, shape: [usize; 4]) -> Tensor<4> {
    let [vectors, splits] = [0, 1].map(|dim| parts.meta.shape()[dim]);
    let (y, client) = (empty(&parts, shape, dtype), parts.client.clone());
    let launch = Launch::new(&COMBINE, dtype, &client).reads(parts).writes(&y);
    launch.run(vectors, &[vectors as u32, splits as u32, shape[3] as u32]);
    Tensor::from_primitive::<Cube>(y)
}
