//! How the GPU kernels share the work.

use burn::{
    backend::Cube,
    tensor::{DType, Device, Tensor},
};
use burn_cubecl::tensor::CubeTensor;

use super::{AttentionShape, Buffers, LONGEST_CHAIN};
use crate::launch::{empty, empty_like, enough, primitive};

/// The longest vectors that there is memory for.
pub(super) const LARGEST_HEAD: usize = 256;

/// Rows, which are the queries of heads that share keys, that are few.
const FEW: usize = 16;

/// Keys that are worth a workgroup.
const WORTH: usize = 256;

/// Parts that can be combined.
const COMBINED: usize = LONGEST_CHAIN;

/// Parts of the keys of a buffer: packed and recent keys are combined.
const PARTS: usize = COMBINED / 2;

/// Which workgroup has what. Shapes alone say it: a captured step is replayed with other positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    pub(super) rows: Rows,
    /// Workgroups for all rows of a head of keys.
    pub(super) tiles: usize,
    /// Workgroups for all keys of each of them. Positions that are seen are shared evenly, whatever they are; where
    /// they are fewer than slots, the last workgroups have none.
    pub(super) splits: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Rows {
    /// 64 rows a workgroup.
    Many,
    Few {
        /// Rows of a workgroup, in fours.
        fours: usize,
    },
}

impl Sharing {
    pub(super) fn new(
        [batch, heads, new, head_dim]: [usize; 4],
        [_, kv_heads, slots, _]: [usize; 4],
        shape: &AttentionShape,
        device: &Device,
    ) -> Self {
        let rows = heads / kv_heads * new;
        let (which, together) = if rows > FEW {
            (Rows::Many, 64)
        } else {
            let fours = if rows > 4 && 2 * head_dim <= LARGEST_HEAD { 2 } else { 1 };
            (Rows::Few { fours }, 4 * fours)
        };
        let enough = match which {
            Rows::Many => enough(device, 256),
            Rows::Few { .. } => enough(device, 1024),
        };
        let tiles = rows.div_ceil(together);
        let seen = shape.window.map_or(slots, |window| slots.min(window.saturating_add(new)));
        let splits = enough.div_ceil(batch * kv_heads * tiles).min(seen.div_ceil(WORTH)).min(PARTS);
        Self { rows: which, tiles, splits }
    }
}

/// Where a launch writes: the whole result, or parts of it, after those that others write.
#[derive(Clone, Copy)]
pub(super) struct Written<'a> {
    pub(super) to: &'a CubeTensor,
    pub(super) parts: usize,
    pub(super) before: usize,
}

/// Goes over a chain of buffers: a launch for each and, where they make more than one part, one that combines these.
pub(super) fn over_chain(
    q: Tensor<4>,
    chain: Vec<Buffers>,
    launch: impl Fn(CubeTensor, Buffers, Sharing, Written<'_>),
    combine: impl FnOnce(CubeTensor, DType, [usize; 4]) -> Tensor<4>,
) -> Tensor<4> {
    let (dims, dtype) = (q.dims(), q.dtype());
    let [batch, heads, queries, head_dim] = dims;
    let most = (COMBINED / chain.len()).max(1);
    let share = |Buffers { keys, shape, .. }: &Buffers| {
        let sharing = Sharing::new(dims, keys.dims(), shape, &q.device());
        Sharing { splits: sharing.splits.min(most), ..sharing }
    };
    let sharings: Vec<_> = chain.iter().map(share).collect();
    let splits = sharings.iter().map(|sharing| sharing.splits).sum();
    let q = primitive(q);
    let to = match splits {
        1 => empty_like(&q),
        _ => empty(&q, [batch * heads * queries, splits, head_dim + 2], DType::F32),
    };
    let mut written = Written { to: &to, parts: splits, before: 0 };
    for (buffers, sharing) in chain.into_iter().zip(sharings) {
        launch(q.clone(), buffers, sharing, written);
        written.before += sharing.splits;
    }
    if splits == 1 { Tensor::from_primitive::<Cube>(to) } else { combine(to, dtype, dims) }
}
