//! Division of the work among the workgroups of the GPU kernels.

use burn::{
    backend::Cube,
    tensor::{DType, Device, Tensor},
};
use burn_cubecl::tensor::CubeTensor;

use super::{AttentionShape, Buffers, LARGEST_HEAD};
use crate::runtime::{
    device::opened::has_few_registers,
    kernel::INVARIANT_UP_TO,
    launch::{empty, empty_like, enough, prefers_few_groups, primitive},
};

/// Fewest keys that are worth a workgroup of many rows.
const WORTH: usize = 256;

/// Most parts into which the keys of a buffer are divided for many rows.
const PARTS: usize = 128;

/// The division of the work. It depends on shapes alone, because a captured step is replayed with other
/// positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    pub(super) rows: Rows,
    /// Workgroups for all rows of a key head.
    pub(super) tiles: usize,
    /// Workgroups per tile, each for one part of the keys. If fewer positions are visible than there are
    /// slots, the last workgroups have none.
    pub(super) splits: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Rows {
    /// 64 rows per workgroup.
    Many,
    /// Up to 16 queries. The result of each depends on nothing but its keys.
    Few {
        /// Rows per workgroup, in fours.
        fours: usize,
        /// Parts of the keys begin at multiples of this position. The last part takes all that is left.
        chunk: usize,
    },
}

impl Rows {
    /// 0 if parts have equal size, wherever they begin.
    pub(super) fn chunk(self) -> usize {
        match self {
            Self::Many => 0,
            Self::Few { chunk, .. } => chunk,
        }
    }
}

impl Sharing {
    pub(super) fn new(
        q: [usize; 4],
        [_, kv_heads, slots, _]: [usize; 4],
        shape: &AttentionShape,
        device: &Device,
    ) -> Self {
        let [batch, heads, new, head_dim] = q;
        let rows = heads / kv_heads * new;
        if new <= INVARIANT_UP_TO {
            return Self::few(rows, rows, new, head_dim, slots, shape, device);
        }
        let tiles = rows.div_ceil(64);
        let seen = shape.window.map_or(slots, |window| slots.min(window.saturating_add(new)));
        let enough = enough(device, 256).div_ceil(batch * kv_heads * tiles);
        Self { rows: Rows::Many, tiles, splits: enough.min(seen.div_ceil(WORTH)).min(PARTS) }
    }

    /// The sharing of packed keys among up to 16 queries.
    pub(super) fn of_codes(
        [_, heads, new, head_dim]: [usize; 4],
        [_, kv_heads, slots, _]: [usize; 4],
        shape: &AttentionShape,
        device: &Device,
    ) -> Self {
        // With packed keys, the rows of a workgroup decide how lanes share values, so they must not depend on
        // the queries.
        let group = heads / kv_heads;
        Self::few(group * new, group, new, head_dim, slots, shape, device)
    }

    /// The sharing for few queries. `together` is the number of rows that are worth one workgroup.
    fn few(
        rows: usize,
        together: usize,
        new: usize,
        head_dim: usize,
        slots: usize,
        shape: &AttentionShape,
        device: &Device,
    ) -> Self {
        let is_worth_two = together > 4 && 2 * head_dim <= LARGEST_HEAD && !has_few_registers(device);
        let fours = if is_worth_two { 2 } else { 1 };
        // Rounds of 256 keys. A part is most expensive on software GPUs.
        let chunk = if prefers_few_groups(device) { 1024 } else { 256 };
        let splits = match shape.window {
            Some(window) if window <= chunk => 1,
            // Windows begin and end in the middle of a part.
            Some(window) if slots > chunk => (slots.min(window.saturating_add(new)) - 2) / chunk + 2,
            _ => slots.div_ceil(chunk),
        };
        Self { rows: Rows::Few { fours, chunk }, tiles: rows.div_ceil(4 * fours), splits }
    }
}

/// The destination of a launch: the whole result, or parts of it, after `before` parts from other launches.
#[derive(Clone, Copy)]
pub(super) struct Written<'a> {
    pub(super) to: &'a CubeTensor,
    pub(super) parts: usize,
    pub(super) before: usize,
    /// Whether parts are written, even if there is only one.
    pub(super) is_split: bool,
    /// The destination of all parts together, if this launch combines them.
    pub(super) combined: Option<&'a Combined>,
}

/// The destination of a launch that combines all parts of the result.
pub(super) struct Combined {
    pub(super) y: CubeTensor,
    pub(super) sinks: Option<CubeTensor>,
    /// See [`tickets`](crate::runtime::tickets).
    pub(super) tickets: CubeTensor,
}

impl Combined {
    /// Prepares the last launch for queries `q`. `None` if more than four rows share a workgroup, for which
    /// NVIDIA's compiler would need too many registers on some GPUs, or if there are fewer `tickets`.
    pub(super) fn new(
        q: &CubeTensor,
        kv_heads: usize,
        sinks: Option<&Tensor<1>>,
        last: Sharing,
        device: &Device,
        tickets: impl FnOnce(&Device, usize) -> Option<CubeTensor>,
    ) -> Option<Self> {
        if !matches!(last.rows, Rows::Few { fours: 1, .. }) {
            return None;
        }
        let tickets = tickets(device, q.meta.shape()[0] * kv_heads * last.tiles)?;
        Some(Self { y: empty_like(q), sinks: sinks.cloned().map(primitive), tickets })
    }
}

/// Goes over a chain of buffers, with a launch for each. If they write more than one part, or if there are
/// sinks, the parts are combined: by the last of these launches if [`Combined::new`] prepares it, and by one
/// more otherwise.
pub(super) fn over_chain(
    q: Tensor<4>,
    chain: Vec<Buffers>,
    sinks: Option<Tensor<1>>,
    tickets: impl FnOnce(&Device, usize) -> Option<CubeTensor>,
    launch: impl Fn(CubeTensor, Buffers, Sharing, Written<'_>),
    combine: impl FnOnce(CubeTensor, Option<Tensor<1>>, DType, [usize; 4]) -> Tensor<4>,
) -> Tensor<4> {
    let (dims, dtype, device) = (q.dims(), q.dtype(), q.device());
    let [batch, heads, queries, head_dim] = dims;
    let share = |buffers: &Buffers| {
        let [rows, kv_heads, _, dim] = buffers.keys.dims();
        Sharing::new(dims, [rows, kv_heads, buffers.slots(), dim], &buffers.shape, &device)
    };
    let sharings: Vec<_> = chain.iter().map(share).collect();
    let parts = sharings.iter().map(|sharing| sharing.splits).sum();
    let is_split = parts > 1 || sinks.is_some();
    let q = primitive(q);
    let to = match is_split {
        false => empty_like(&q),
        true => empty(&q, [batch * heads * queries, parts, head_dim + 2], DType::F32),
    };
    let combined = match (chain.last(), sharings.last()) {
        (Some(buffers), Some(&last)) if is_split => {
            Combined::new(&q, buffers.keys.dims()[1], sinks.as_ref(), last, &device, tickets)
        }
        _ => None,
    };
    let (mut before, launches) = (0, chain.len());
    for (i, (buffers, sharing)) in chain.into_iter().zip(sharings).enumerate() {
        let combined = combined.as_ref().filter(|_| i + 1 == launches);
        launch(q.clone(), buffers, sharing, Written { to: &to, parts, before, is_split, combined });
        before += sharing.splits;
    }
    match combined {
        Some(Combined { y, .. }) => Tensor::from_primitive::<Cube>(y),
        None if is_split => combine(to, sinks, dtype, dims),
        None => Tensor::from_primitive::<Cube>(to),
    }
}
