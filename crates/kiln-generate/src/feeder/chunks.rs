//! The chunks of a prompt.

use std::ops::Range;

use burn::tensor::Tensor;
use kiln_core::batch::Batch;

/// The part of a prompt that is still to be fed. Each row is cut into the chunks that it would be cut into
/// alone.
#[derive(Debug)]
pub(super) struct Remaining {
    /// Columns of each row that are left.
    columns: Vec<Range<usize>>,
    /// Whether outputs of all tokens are kept, not of the last one alone.
    all: bool,
    /// The outputs of each row so far, `[1, tokens, width]` for each chunk.
    kept: Vec<Vec<Tensor<3>>>,
}

impl Remaining {
    pub(super) fn new(batch: &Batch, all: bool) -> Self {
        let columns = batch.skip.iter().map(|&skip| skip..batch.len()).collect();
        Self { columns, all, kept: vec![Vec::new(); batch.rows()] }
    }

    /// The columns of the next chunk, up to `limits` of each row.
    pub(super) fn next(&self, limits: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
        let of_row = |(left, limit): (&Range<usize>, usize)| {
            left.start..left.end.min(left.start.saturating_add(limit))
        };
        self.columns.iter().zip(limits).map(of_row).collect()
    }

    /// Takes the output of a chunk. Returns the output of all chunks after the last one.
    pub(super) fn fed(&mut self, chunk: Vec<Range<usize>>, given: Tensor<3>) -> Option<Tensor<3>> {
        let is_first = self.kept.iter().all(Vec::is_empty);
        for (columns, fed) in self.columns.iter_mut().zip(&chunk) {
            columns.start = columns.start.max(fed.end);
        }
        let is_last = self.columns.iter().all(Range::is_empty);
        if is_first && is_last {
            return Some(given);
        }
        let width = given.dims()[1];
        for (row, fed) in chunk.into_iter().enumerate().filter(|(_, fed)| !fed.is_empty()) {
            // Chunks end together.
            let tokens = if self.all { fed.len() } else { 1 };
            if self.all || self.columns[row].is_empty() {
                self.kept[row].push(given.clone().narrow(0, row, 1).narrow(1, width - tokens, tokens));
            }
        }
        is_last.then(|| side_by_side(std::mem::take(&mut self.kept)))
    }
}

/// The outputs of rows that end together, `[rows, tokens, width]`. Shorter rows begin with zeros.
fn side_by_side(rows: Vec<Vec<Tensor<3>>>) -> Tensor<3> {
    let rows: Vec<Tensor<3>> = rows.into_iter().map(|chunks| Tensor::cat(chunks, 1)).collect();
    let longest = rows.iter().map(|row| row.dims()[1]).max().unwrap_or(0);
    let filled = rows.into_iter().map(|row| {
        let missing = longest - row.dims()[1];
        row.pad([(0, 0), (missing, 0), (0, 0)], 0.0)
    });
    Tensor::cat(filled.collect(), 0)
}
