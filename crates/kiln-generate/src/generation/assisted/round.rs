//! One pass: tokens are proposed, checked, and forgotten where they are wrong.

use burn::tensor::Device;
use kiln_core::{Error, Result, batch::Batch, model::TokenId, model_cache::ModelCache, read_back};

use super::{Asked, Assisted, draft_model::uneven, verify::Verification};
use crate::{
    generation::{
        Options,
        rows::{Row, Stopping},
        search::Search,
    },
    prefill::Feeder,
    stats::Stats,
};

/// What a pass is made with.
#[derive(Debug)]
pub(super) struct Round<'a> {
    pub(super) options: &'a Options,
    pub(super) rows: &'a [Row],
    /// Tokens of each row that were delivered.
    pub(super) generated: usize,
    pub(super) limit: Option<usize>,
    pub(super) stopping: Stopping<'a>,
    pub(super) device: &'a Device,
}

impl Assisted<'_> {
    /// Has tokens proposed for the rows that wait for them, and checks them in one pass.
    pub(super) async fn round(
        &mut self,
        round: &Round<'_>,
        feeder: &mut Feeder<'_>,
        search: &mut Search,
        stats: &mut Stats,
    ) -> Result<()> {
        let Round { options, rows, generated, limit, stopping, device } = *round;
        let vocab = feeder.running.model.vocab();
        let seen = feeder.running.cache.seq_lens(rows.len());
        let waits: Vec<bool> = self
            .rows
            .iter()
            .zip(rows)
            .map(|(ahead, row)| ahead.accepted.is_empty() && !row.finished())
            .collect();
        // Tokens that the cache does not hold, the last one at least.
        let unfed: Vec<usize> = rows
            .iter()
            .zip(&seen)
            .map(|(row, seen)| (row.prompt_end + generated).saturating_sub(*seen))
            .collect();
        let room = feeder.running.cache.capacity().unwrap_or(usize::MAX);
        let at_once = feeder.running.cache.at_once_by_row(rows.len());
        let asked: Vec<Asked<'_>> = (0..rows.len())
            .map(|i| {
                let left = limit.map_or(usize::MAX, |limit| limit - generated).saturating_sub(1);
                let room = room.saturating_sub(seen[i] + unfed[i]).min(at_once[i].saturating_sub(unfed[i]));
                let most = if waits[i] { self.rows[i].proposes.min(left).min(room) } else { 0 };
                Asked { state: rows[i].state(generated, limit), most }
            })
            .collect();
        let proposals = self.drafter.propose(&asked, &options.settings, vocab).await?;
        let new: Vec<Vec<TokenId>> = (0..rows.len())
            .map(|i| match rows[i].ids.len().checked_sub(unfed[i]) {
                Some(fed) if waits[i] => [&rows[i].ids[fed..], &proposals[i].tokens].concat(),
                _ => Vec::new(),
            })
            .collect();
        // All that is fed now may have to be forgotten.
        let longest = new.iter().map(Vec::len).max().unwrap_or(0);
        feeder.running.cache.keep_history(longest + 1);
        let batch = uneven(&new, &seen, &feeder.running.left_pad, device);
        let logits = check(feeder, batch).await?;
        let columns = logits.len() / (rows.len() * vocab).max(1);
        for i in (0..rows.len()).filter(|&i| waits[i]) {
            let behind = proposals[i].tokens.len() + 1;
            let end = (i + 1) * columns * vocab;
            let verification = Verification {
                row: i,
                asked: &asked[i],
                proposal: &proposals[i],
                logits: &logits[end - behind * vocab..end],
                vocab,
                options,
                stopping,
            };
            let accepted = verification.accepted(search.sampler())?;
            let proposed = &proposals[i].tokens;
            let same = proposed.iter().zip(&accepted).take_while(|(token, chosen)| **token == chosen.token);
            let same = same.count();
            stats.proposed += proposed.len();
            stats.accepted += same;
            self.rows[i].learn(&self.drafter, &options.settings.assisted, same, proposed.len());
            self.rows[i].accepted.extend(accepted);
        }
        // The last token of each row was not fed.
        let ends = rows.iter().zip(&self.rows).zip(&seen).map(|((row, ahead), seen)| {
            (row.prompt_end + generated + ahead.accepted.len()).saturating_sub(1).max(*seen)
        });
        go_back(&mut feeder.running.cache, rows, generated, &ends.collect::<Vec<_>>(), &waits)
    }
}

/// Feeds a batch; logits `[rows, columns, vocab]` of all its tokens.
async fn check(feeder: &mut Feeder<'_>, batch: Batch) -> Result<Vec<f32>> {
    let logits = feeder.check(&batch)?;
    let read = read_back::start(logits).finish().await;
    if read.is_err() {
        feeder.running.cache.poison();
    }
    read?.try_into_vec().map_err(|e| Error::Execution(e.to_string()))
}

/// Has the cache forget all tokens of each row behind `ends`. One that can only return to an earlier length does, and is fed what is missing
/// with the next pass.
fn go_back(
    cache: &mut ModelCache,
    rows: &[Row],
    generated: usize,
    ends: &[usize],
    waits: &[bool],
) -> Result<()> {
    let points = cache.rewind_points(ends);
    // A row that ends here has nothing behind it.
    let can_be_fed =
        (0..rows.len()).all(|i| !waits[i] || points[i] + rows[i].ids.len() >= rows[i].prompt_end + generated);
    cache.truncate_rows(if can_be_fed { &points } else { ends })
}
