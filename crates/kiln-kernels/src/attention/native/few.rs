//! Attention of few queries. The result of a query has the same bits whatever is computed beside it.

use std::ops::Range;

use kiln_products::attention::{Few, attend};

use super::{Block, Given, Storage};

/// Computes the part of the result that some positions give for the queries of a block, as a
/// [`Mixed::Part`](super::rows::Mixed::Part).
pub(super) fn attend_few<E: Storage>(
    given: &Given<'_, E>,
    block: &Block,
    positions: Range<i32>,
    part: &mut [f32],
) {
    let Block { row, kv_head, ref queries } = *block;
    let (dim, new, limits) = (given.head_dim, queries.len(), given.limits());
    let rows = given.group * new;
    let (mut vectors, mut seen) = (vec![0.0; rows * dim], Vec::with_capacity(rows));
    for (r, vector) in vectors.chunks_exact_mut(dim).enumerate() {
        let (head, query) = (kv_head * given.group + r / new, queries.start + r % new);
        given.q.read([row, head, query], vector);
        vector.iter_mut().for_each(|x| *x *= limits.scale);
        seen.push(given.seen(row, query));
    }
    attend(Few {
        queries: vectors,
        seen,
        softcap: limits.softcap,
        source: given.source(row, kv_head),
        origin: limits.origin as usize,
        slots: given.slots,
        positions: positions.start as usize..positions.end as usize,
        part,
    });
}
