//! The launches of the shaders.

use burn::{
    backend::Cube,
    tensor::{DType, Int, Tensor},
};

use burn_cubecl::tensor::CubeTensor;

use super::{
    APPEND, Buffers, COMBINE, DECODE, Limits, PREFILL,
    sharing::{Rows, Sharing, Written, over_chain},
    tiles,
};
use crate::{
    runtime::launch::{LANES, Launch, comes_in_fours, empty, in_order, primitive, strides},
    shaders::{attention_combine, attention_decode, attention_many},
};

pub(super) fn dense(
    q: Tensor<4>,
    chain: Vec<Buffers>,
    positions: Tensor<2, Int>,
    sinks: Option<Tensor<1>>,
) -> Tensor<4> {
    let launch = |q, buffers, sharing, written: Written<'_>| {
        launch(q, buffers, None, positions.clone(), sharing, written);
    };
    over_chain(q, chain, sinks, |_, _| None, launch, combine)
}

/// Attends with one query of each row, after its key and its value were written into the buffers.
pub(super) fn appending(
    q: Tensor<4>,
    buffers: Buffers,
    new: &[Tensor<4>; 2],
    positions: Tensor<2, Int>,
    sinks: Option<Tensor<1>>,
) -> Tensor<4> {
    let launch = |q, buffers, sharing, written: Written<'_>| {
        launch(q, buffers, Some(new), positions.clone(), sharing, written);
    };
    over_chain(q, vec![buffers], sinks, |_, _| None, launch, combine)
}

pub(super) fn launch(
    q: CubeTensor,
    buffers: Buffers,
    new: Option<&[Tensor<4>; 2]>,
    positions: Tensor<2, Int>,
    Sharing { rows, tiles, splits }: Sharing,
    written: Written<'_>,
) {
    let ([_, kv_heads, _, head_dim], slots) = (buffers.keys.dims(), buffers.slots());
    let [batch, heads, queries] = [0, 1, 2].map(|dim| q.meta.shape()[dim]);
    let Limits { scale, softcap, window, start, origin, end } = buffers.limits();
    let Buffers { keys, values, from, .. } = buffers;
    let device = keys.device();
    let bounded = from.is_some();
    let (keys, values, positions) = (primitive(keys), primitive(values), in_order(positions));
    let from = from.map_or_else(|| empty(&positions, [1], DType::I32), primitive);
    let workgroups = batch * kv_heads * tiles * splits;

    // Both shaders have these fields.
    macro_rules! info {
        ($shader:ident $(, $more:ident)*) => {
            Vec::from($shader::Info {
                q_strides: strides(&q),
                key_strides: strides(&keys),
                value_strides: strides(&values),
                kv_heads: kv_heads as u32,
                group: (heads / kv_heads) as u32,
                queries: queries as u32,
                slots: slots as u32,
                head_dim: head_dim as u32,
                origin: origin.cast_unsigned(),
                start,
                window,
                scale,
                softcap: softcap.unwrap_or(0.0),
                bounded: u32::from(bounded),
                tiles: tiles as u32,
                splits: splits as u32,
                workgroups: workgroups as u32,
                parts: written.parts as u32,
                before: written.before as u32,
                end,
                batch: batch as u32,
                $($more,)*
            })
        };
    }
    let split = usize::from(written.is_split);
    let (shader, picks, info) = match rows {
        Rows::Few { fours, chunk } => {
            let (chunk, new) = (chunk as i32, new.map(|new| new.each_ref().map(|x| primitive(x.clone()))));
            let [new_key_strides, new_value_strides] = match &new {
                Some(new) => new.each_ref().map(strides),
                None => Default::default(),
            };
            let info = info!(attention_decode, new_key_strides, new_value_strides, chunk);
            let in_fours = [&keys, &values].into_iter().chain(new.iter().flatten()).all(comes_in_fours);
            let picks = [usize::from(!in_fours), split, fours - 1];
            if let Some([new_keys, new_values]) = new {
                let tensors = [&q, &keys, &values, &positions, &from, written.to, &new_keys, &new_values];
                return Launch::new(&APPEND, q.dtype, &q.client).with(&picks).run(workgroups, tensors, info);
            }
            (&DECODE, picks, info)
        }
        Rows::Many => match tiles::picks([&q, &keys, &values], split, &device) {
            Some(picks) => (&tiles::SHADER, picks, info!(attention_many)),
            None => {
                let in_fours = [&q, &keys, &values].into_iter().all(comes_in_fours);
                let parts = match head_dim.div_ceil(64) {
                    1 => 2,
                    2 => 1,
                    _ => 0,
                };
                (&PREFILL, [usize::from(!in_fours), split, parts], info!(attention_many))
            }
        },
    };
    let launch = Launch::new(shader, q.dtype, &q.client).with(&picks);
    launch.run(workgroups, [&q, &keys, &values, &positions, &from, written.to], info);
}

/// Combines all parts into the result.
pub(super) fn combine(
    parts: CubeTensor,
    sinks: Option<Tensor<1>>,
    dtype: DType,
    shape: [usize; 4],
) -> Tensor<4> {
    let [vectors, splits] = [0, 1].map(|dim| parts.meta.shape()[dim]);
    let y = empty(&parts, shape, dtype);
    let has_sinks = sinks.is_some();
    let sinks = sinks.map_or_else(|| empty(&parts, [1], DType::F32), primitive);
    let [sink_stride] = strides(&sinks);
    let info = attention_combine::Info {
        vectors: vectors as u32,
        splits: splits as u32,
        heads: shape[1] as u32,
        queries: shape[2] as u32,
        head_dim: shape[3] as u32,
        sink_stride,
    };
    let launch = Launch::new(&COMBINE, dtype, &parts.client).with(&[usize::from(has_sinks)]);
    launch.run((vectors * shape[3].div_ceil(4)).div_ceil(LANES), [&parts, &sinks, &y], info);
    Tensor::from_primitive::<Cube>(y)
}
