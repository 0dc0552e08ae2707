//! How the GPU kernels share the work.

use burn::tensor::{Device, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::{AttentionShape, Buffers, LONGEST_CHAIN};
use crate::launch::enough;

/// The longest vectors that there is memory for.
pub(crate) const LARGEST_HEAD: usize = 256;

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
pub(crate) struct Sharing {
    pub(super) kernel: Kernel,
    /// Workgroups for all rows of a head of keys.
    pub(super) tiles: usize,
    /// Workgroups for all keys of each of them. Positions that are seen are shared evenly, whatever they are; where
    /// they are fewer than slots, the last workgroups have none.
    pub(super) splits: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernel {
    /// 64 rows a workgroup.
    Prefill,
    Decode {
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
        let (kernel, together) = if rows > FEW {
            (Kernel::Prefill, 64)
        } else {
            let fours = if rows > 4 && 2 * head_dim <= LARGEST_HEAD { 2 } else { 1 };
            (Kernel::Decode { fours }, 4 * fours)
        };
        let enough = match kernel {
            Kernel::Prefill => enough(device, 256),
            Kernel::Decode { .. } => enough(device, 1024),
        };
        let tiles = rows.div_ceil(together);
        let seen = shape.window.map_or(slots, |window| slots.min(window.saturating_add(new)));
        let splits = enough.div_ceil(batch * kv_heads * tiles).min(seen.div_ceil(WORTH)).min(PARTS);
        Self { kernel, tiles, splits }
    }

    /// How the keys of each of a chain are shared, and all parts of them together.
    pub(super) fn of_chain(q: &Tensor<4>, chain: &[Buffers]) -> (Vec<Self>, usize) {
        let each = |Buffers { keys, shape, .. }: &Buffers| {
            let sharing = Self::new(q.dims(), keys.dims(), shape, &q.device());
            Self { splits: sharing.splits.min((COMBINED / chain.len()).max(1)), ..sharing }
        };
        let sharings: Vec<_> = chain.iter().map(each).collect();
        let splits = sharings.iter().map(|sharing| sharing.splits).sum();
        (sharings, splits)
    }
}

/// Where a launch writes: the whole result, or parts of it, after those that others write.
#[derive(Clone, Copy)]
pub(super) struct Written<'a> {
    pub(super) to: &'a CubeTensor,
    pub(super) parts: usize,
    pub(super) before: usize,
}
