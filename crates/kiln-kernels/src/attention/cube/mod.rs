//! The `#[cube]` functions, which take the same steps as the shaders.

mod combine;
mod decode;
mod few;
mod packed;
mod prefill;
#[cfg(feature = "cuda")]
mod tiles;

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Device, Int as IntKind, Tensor as BurnTensor},
};
use cubecl::prelude::*;

use burn_cubecl::tensor::CubeTensor;
use kiln_core::packed::{Along, Packing};

use self::combine::{combine_parts, last_of};
use super::{
    Buffers, Limits,
    packed::AttentionPacked,
    sharing::{Combined, Rows, Sharing, Written, over_chain},
};
use crate::runtime::launch::{
    LANES, address_type, comes_in_fours, count, empty, in_order, in_rows, primitive,
};

/// `vec4<f32>` in WGSL.
type Four = Vector<f32, Const<4>>;

const LOWEST: f32 = f32::MIN;

/// Parameters that are the same for all workgroups.
#[derive(CubeType, CubeLaunch)]
struct Info {
    kv_heads: usize,
    /// Query heads per key head.
    group: usize,
    queries: usize,
    slots: usize,
    head_dim: usize,
    origin: usize,
    start: i32,
    window: i32,
    scale: f32,
    /// 0 if there is no cap.
    softcap: f32,
    /// 1 if positions below `bound` are not in this buffer.
    bounded: usize,
    /// Workgroups for all rows, and parts of the keys.
    tiles: usize,
    splits: usize,
    workgroups: usize,
    /// Number of parts of a vector in total, and number before the first of these.
    parts: usize,
    before: usize,
    /// The first position after these keys, where later ones are in other buffers.
    end: i32,
    /// Rows in the batch.
    batch: usize,
    /// Parts begin at multiples of this position; 0 if positions are shared evenly.
    chunk: i32,
}

/// The position of the rows of a workgroup.
#[derive(CubeType)]
struct Place {
    batch: usize,
    kv_head: usize,
    split: usize,
    first_row: usize,
    last_row: usize,
    /// The position of the first query.
    first: i32,
    /// The first visible position: slots hold only so many positions, and padding is hidden.
    earliest: i32,
}

/// Positions that a workgroup goes over: the first one, and the end.
#[derive(CubeType)]
struct Part {
    begin: i32,
    end: i32,
}

#[cube]
impl Place {
    fn new(
        workgroup: usize,
        #[comptime] rows: usize,
        positions: &Tensor<i32>,
        bound: &Tensor<i32>,
        info: &Info,
    ) -> Place {
        let split = workgroup / info.tiles % info.splits;
        let kv_head = workgroup / info.tiles / info.splits % info.kv_heads;
        let batch = workgroup / info.tiles / info.splits / info.kv_heads;
        // The last rows see the most keys, so they begin first.
        let first_row = (info.tiles - 1 - workgroup % info.tiles) * rows;
        let last_row = min(first_row + rows, info.group * info.queries) - 1;
        let first = positions[batch];
        let visible_from = max(positions[info.batch + batch], bound[0] * i32::cast_from(info.bounded));
        let last = min(first + i32::cast_from(info.queries), info.end);
        let kept = last - i32::cast_from(info.slots);
        let earliest = max(max(info.start, visible_from), kept);
        Place { batch, kv_head, split, first_row, last_row, first, earliest }
    }

    fn part(&self, info: &Info) -> Part {
        let begin =
            max(self.earliest, self.first + i32::cast_from(self.first_row / info.group) - info.window + 1);
        let end = min(self.first + i32::cast_from(self.last_row / info.group) + 1, info.end);
        let aligned = chunk_of(begin, end, self.split, info.splits, max(info.chunk, 1));
        let splits = i32::cast_from(info.splits);
        let split = i32::cast_from(self.split);
        let keys = (max(end - begin, 0) + splits - 1) / splits;
        // Whole rounds of the lanes.
        let each = max((keys + 63) / 64 * 64, 128);
        Part {
            begin: select(info.chunk > 0, aligned.begin, begin + split * each),
            end: select(info.chunk > 0, aligned.end, min(begin + (split + 1) * each, end)),
        }
    }

    /// The index of a vector in the result.
    fn vector(&self, row: usize, info: &Info) -> usize {
        let head = (self.batch * info.kv_heads + self.kv_head) * info.group + row % info.group;
        head * info.queries + row / info.group
    }
}

/// The part with index `split`, where all parts begin at multiples of `chunk`. The last part takes all that
/// is left.
#[cube]
fn chunk_of(begin: i32, end: i32, split: usize, splits: usize, chunk: i32) -> Part {
    let from = (begin / chunk + i32::cast_from(split)) * chunk;
    let until = select(split + 1 == splits, end, min(from + chunk, end));
    Part { begin: max(from, begin), end: until }
}

/// Reduces `slot` modulo `slots`, for a ring that has wrapped once at most.
#[cube]
fn turn(slot: usize, slots: usize) -> usize {
    select(slot >= slots, slot - slots, slot)
}

/// Reads four numbers, from 4 c on, of a vector of length `dim`. Numbers past its end are 0.
#[cube]
fn four<E: Float, N: Size>(tensor: &Tensor<Vector<E, N>>, at: usize, c: usize, dim: usize) -> Four {
    let width = tensor.vector_size();
    if comptime!(width == 4) {
        Four::cast_from(tensor[at / 4 + c])
    } else {
        let mut numbers = Four::new(0.0);
        #[unroll]
        for i in 0..4usize {
            let d = 4 * c + i;
            if d < dim {
                numbers.insert(i, f32::cast_from(tensor[at + d * tensor.stride(3)]));
            }
        }
        numbers
    }
}

/// `softcap * tanh(scores / softcap)`. The hyperbolic tangent of 10 is 1; some GPUs fail to compute it for
/// larger numbers.
#[cube]
fn cap(scores: Four, softcap: f32) -> Four {
    let scores = clamp(scores / Four::new(softcap), Four::new(-10.0), Four::new(10.0));
    scores.tanh() * Four::new(softcap)
}

/// Writes four numbers of the result, or of a part of it.
#[cube]
fn write<R: Float>(
    y: &mut Tensor<R>,
    number: usize,
    vector: Four,
    largest: f32,
    sum: f32,
    c: usize,
    dim: usize,
    #[comptime] split: bool,
) {
    if comptime!(split) {
        let at = number * (dim + 2);
        #[unroll]
        for i in 0..4usize {
            if 4 * c + i < dim {
                y[at + 4 * c + i] = R::cast_from(vector.extract(i));
            }
        }
        if c == 0 {
            y[at + dim] = R::cast_from(largest);
            y[at + dim + 1] = R::cast_from(sum);
        }
    } else {
        // A query that sees nothing gives 0. A single part gives the same bits.
        let scale = select(sum == 0.0, 0.0, 1.0 / sum);
        #[unroll]
        for i in 0..4usize {
            if 4 * c + i < dim {
                y[number * dim + 4 * c + i] = R::cast_from(vector.extract(i) * scale);
            }
        }
    }
}

pub(super) fn dense(
    q: BurnTensor<4>,
    chain: Vec<Buffers>,
    positions: BurnTensor<2, IntKind>,
    sinks: Option<BurnTensor<1>>,
) -> BurnTensor<4> {
    let launch = |q, buffers, sharing, written: Written<'_>| {
        launch(q, buffers, None, positions.clone(), sharing, written);
    };
    over_chain(q, chain, sinks, tickets, launch, combine_parts)
}

/// Attends with one query of each row, after its key and its value were written into the buffers.
pub(super) fn appending(
    q: BurnTensor<4>,
    buffers: Buffers,
    new: &[BurnTensor<4>; 2],
    positions: BurnTensor<2, IntKind>,
    sinks: Option<BurnTensor<1>>,
) -> BurnTensor<4> {
    let launch = |q, buffers, sharing, written: Written<'_>| {
        launch(q, buffers, Some(new), positions.clone(), sharing, written);
    };
    over_chain(q, vec![buffers], sinks, tickets, launch, combine_parts)
}

/// At least `number` tickets for a launch whose last workgroups combine parts. `None` on devices where a
/// workgroup cannot know that it is the last.
#[cfg(feature = "cuda")]
fn tickets(device: &Device, number: usize) -> Option<CubeTensor> {
    use crate::runtime::tickets::{TICKETS, of_stream};

    if number <= TICKETS { of_stream(device) } else { None }
}

#[cfg(not(feature = "cuda"))]
fn tickets(_: &Device, _: usize) -> Option<CubeTensor> {
    None
}

fn launch(
    q: CubeTensor,
    buffers: Buffers,
    new: Option<&[BurnTensor<4>; 2]>,
    positions: BurnTensor<2, IntKind>,
    Sharing { rows, tiles, splits }: Sharing,
    written: Written<'_>,
) {
    let ([_, kv_heads, _, head_dim], slots) = (buffers.keys.dims(), buffers.slots());
    let [batch, heads, queries] = [0, 1, 2].map(|dim| q.meta.shape()[dim]);
    let Limits { scale, softcap, window, start, origin, end } = buffers.limits();
    let Buffers { keys, values, from, .. } = buffers;
    #[cfg(feature = "cuda")]
    let device = keys.device();
    let bounded = from.is_some();
    let (keys, values, positions) = (primitive(keys), primitive(values), in_order(positions));
    let bound = from.map_or_else(|| empty(&positions, [1], DType::I32), primitive);

    let workgroups = batch * kv_heads * tiles * splits;
    let info = InfoLaunch::new(
        kv_heads,
        heads / kv_heads,
        queries,
        slots,
        head_dim,
        origin as usize,
        start,
        window,
        scale,
        softcap.unwrap_or(0.0),
        usize::from(bounded),
        tiles,
        splits,
        workgroups,
        written.parts,
        written.before,
        end,
        batch,
        rows.chunk() as i32,
    );
    let (client, lanes) = (q.client.clone(), CubeDim::new_1d(LANES as u32));
    let (mixed, is_split) = (written.to.clone(), written.is_split);
    let address = address_type([&q, &keys, &values, &mixed]);
    let elems = [q.dtype, mixed.dtype].map(dtype_to_storage_type);
    let pack = |fours| if fours { 4 } else { 1 };
    let new = new.map(|new| new.each_ref().map(|x| primitive(x.clone())));
    let buffers = pack([&keys, &values].into_iter().chain(new.iter().flatten()).all(comes_in_fours));
    let all = pack([&q, &keys, &values].into_iter().all(comes_in_fours));
    match (rows, new) {
        (Rows::Few { fours, .. }, Some([new_keys, new_values])) => decode::append::launch(
            &client,
            count(workgroups),
            lanes,
            address,
            buffers,
            q.into_tensor_arg(),
            keys.into_tensor_arg(),
            values.into_tensor_arg(),
            positions.into_tensor_arg(),
            bound.into_tensor_arg(),
            mixed.into_tensor_arg(),
            last_of(written.combined),
            new_keys.into_tensor_arg(),
            new_values.into_tensor_arg(),
            info,
            fours,
            is_split,
            elems,
        ),
        (Rows::Few { fours, .. }, None) => decode::decode::launch(
            &client,
            count(workgroups),
            lanes,
            address,
            buffers,
            q.into_tensor_arg(),
            keys.into_tensor_arg(),
            values.into_tensor_arg(),
            positions.into_tensor_arg(),
            bound.into_tensor_arg(),
            mixed.into_tensor_arg(),
            last_of(written.combined),
            info,
            fours,
            is_split,
            elems,
        ),
        #[cfg(feature = "cuda")]
        (Rows::Many, _) if tiles::takes([&q, &keys, &values], &device) => tiles::attention_tiles::launch(
            &client,
            count(workgroups),
            CubeDim::new_1d(tiles::LANES as u32),
            address,
            q.into_tensor_arg(),
            keys.into_tensor_arg(),
            values.into_tensor_arg(),
            positions.into_tensor_arg(),
            bound.into_tensor_arg(),
            mixed.into_tensor_arg(),
            info,
            head_dim,
            is_split,
            elems,
        ),
        (Rows::Many, _) => prefill::prefill::launch(
            &client,
            count(workgroups),
            lanes,
            address,
            all,
            q.into_tensor_arg(),
            keys.into_tensor_arg(),
            values.into_tensor_arg(),
            positions.into_tensor_arg(),
            bound.into_tensor_arg(),
            mixed.into_tensor_arg(),
            info,
            head_dim.div_ceil(64),
            is_split,
            elems,
        ),
    }
}

/// Launches attention over packed and recent keys like the shaders, but the recent ones last, because that
/// launch may combine all parts.
pub(super) fn packed(
    AttentionPacked { q, packed: kv, recent, positions, shape, sinks }: AttentionPacked,
    [of_packed, of_recent]: [Sharing; 2],
) -> BurnTensor<4> {
    let (dims, dtype, device) = (q.dims(), q.dtype(), q.device());
    let [batch, heads, queries, head_dim] = dims;
    let [_, kv_heads, slots, _] = kv.keys.codes.dims();
    let q = primitive(q);
    let all = of_packed.splits + of_recent.splits;
    let parts = empty(&q, [batch * heads * queries, all, head_dim + 2], DType::F32);

    let (of_rows, end) = (in_order(positions.on_device.clone()), primitive(kv.end.clone()));
    let [keys, key_scales, values, value_scales] =
        [kv.keys.codes, kv.keys.scales, kv.values.codes, kv.values.scales].map(in_rows);
    let Sharing { rows: Rows::Few { fours, chunk }, tiles, splits } = of_packed else {
        unreachable!("many queries have dense copies")
    };
    let Limits { scale, softcap, window, start, origin, .. } = shape.limits(recent.start, kv.origin, slots);
    let workgroups = batch * kv_heads * tiles * splits;
    let (key, value) = (kv.key_packing, kv.value_packing);
    let info = packed::PackedInfoLaunch::new(
        kv_heads,
        heads / kv_heads,
        queries,
        slots,
        head_dim,
        origin as usize,
        start,
        window,
        scale,
        softcap.unwrap_or(0.0),
        batch,
        tiles,
        splits,
        workgroups,
        all,
        chunk as i32,
        key.channels_together(head_dim),
        key.words_together(head_dim),
        key.group(),
        value.channels_together(head_dim),
        value.words_together(head_dim),
        value.group(),
    );
    let codes = |packing: Packing| packed::Codes {
        along_tokens: packing.along() == Along::Tokens,
        bits: packing.bits() as u32,
    };
    let piece = match value.bits() {
        3 => 5,
        8 => 4,
        _ => 8 / fours,
    };
    packed::decode_codes::launch(
        &parts.client,
        count(workgroups),
        CubeDim::new_1d(LANES as u32),
        address_type([&q, &keys, &key_scales, &values, &value_scales, &parts]),
        q.clone().into_tensor_arg(),
        keys.into_tensor_arg(),
        key_scales.into_tensor_arg(),
        values.into_tensor_arg(),
        value_scales.into_tensor_arg(),
        of_rows.into_tensor_arg(),
        end.into_tensor_arg(),
        parts.clone().into_tensor_arg(),
        info,
        fours,
        codes(key),
        codes(value),
        piece,
        dtype_to_storage_type(dtype),
    );

    let recent = Buffers::new(recent, &shape).from(kv.end).seen_at(&positions);
    let combined = Combined::new(&q, kv_heads, sinks.as_ref(), of_recent, &device, tickets);
    let before = of_packed.splits;
    let written = Written { to: &parts, parts: all, before, is_split: true, combined: combined.as_ref() };
    launch(q, recent, None, positions.on_device, of_recent, written);
    match combined {
        Some(Combined { y, .. }) => BurnTensor::from_primitive::<Cube>(y),
        None => combine_parts(parts, sinks, dtype, dims),
    }
}
