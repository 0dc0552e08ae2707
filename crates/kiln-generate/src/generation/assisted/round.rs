//! A pass of assisted decoding: tokens are drafted, verified, and forgotten if they are wrong.

use kiln_core::{Error, Result, batch::Batch, model::TokenId, model_cache::ModelCache, read_back};
use kiln_kernels::INVARIANT_UP_TO;

use super::{
    Asked, Drafts, EachRow, Proposal, constraint::Constraint, draft_model::uneven, verify::Verification,
};
use crate::{
    feeder::Feeder,
    generation::{
        rows::{Rows, Stopping},
        step::StepState,
    },
    sampler::Sampler,
    settings::Settings,
};

impl Drafts {
    /// Drafts tokens for the rows that wait for them, and verifies them in one pass by the choice of `each`.
    /// Returns false if nothing is drafted, so that a step of one token of each row does as well. Then
    /// nothing has changed.
    pub(super) async fn round(&mut self, each: &mut EachRow, state: &mut StepState<'_, '_>) -> Result<bool> {
        let EachRow { sampler, masks } = each;
        let mut constraint = Constraint::begin(masks.as_mut(), state.rows.len())?;
        match self.checked(state, sampler.as_mut(), &mut constraint).await {
            Ok(Some(Chosen { tokens, same })) => constraint.accept(&tokens, &same).map(|()| true),
            Ok(None) => {
                constraint.give_up();
                Ok(false)
            }
            Err(error) => {
                constraint.give_up();
                Err(error)
            }
        }
    }

    async fn checked(
        &mut self,
        state: &mut StepState<'_, '_>,
        mut sampler: Option<&mut Sampler>,
        constraint: &mut Constraint<'_>,
    ) -> Result<Option<Chosen>> {
        let StepState { runner, options, recorder, .. } = state;
        let (all, options, runner, stats) = (state.rows, *options, &mut **runner, &mut recorder.stats);
        let (feeder, device) = (&mut runner.feeder, &runner.device);
        let Rows { list: rows, limit, delivered: generated, .. } = all;
        let (limit, generated) = (*limit, *generated);
        let stopping = Stopping { options, out_of_time: false };
        let vocab = feeder.model.vocab();
        let seen = feeder.cache.seq_lens(rows.len());
        let waits: Vec<bool> = self.waiting(all);
        // Number of tokens that the cache does not hold, including the last one.
        let unfed: Vec<usize> = rows
            .iter()
            .zip(&seen)
            .map(|(row, seen)| (row.prompt_end + generated).saturating_sub(*seen))
            .collect();
        let room = feeder.cache.capacity().unwrap_or(usize::MAX);
        let at_once = feeder.cache.at_once_by_row(rows.len());
        let most = |i: usize| {
            let left = limit.map_or(usize::MAX, |limit| limit - generated).saturating_sub(1);
            let room = room.saturating_sub(seen[i] + unfed[i]).min(at_once[i].saturating_sub(unfed[i]));
            if waits[i] { left.min(room) } else { 0 }
        };
        // Few enough that no number of a pass differs from that of single steps.
        let forced_most = (INVARIANT_UP_TO / rows.len()).saturating_sub(1);
        let forced: Vec<Vec<TokenId>> = (0..rows.len())
            .map(|i| constraint.forced(i).iter().copied().take(most(i).min(forced_most)).collect())
            .collect();
        let asked: Vec<Asked<'_>> = (0..rows.len())
            .map(|i| {
                let most = if forced[i].is_empty() { most(i).min(self.rows[i].proposes) } else { 0 };
                Asked { state: rows[i].state(generated, limit), most }
            })
            .collect();
        let mut proposals = self.proposed(&asked, &forced, &options.settings, vocab, constraint).await?;
        constraint.cut(&mut proposals)?;
        // The next step feeds one token of each row, after the fed ones.
        let even = (0..rows.len()).all(|i| {
            let own = rows[i].prompt_end + rows[i].ids.len() - rows[i].prompt;
            seen[i] + 1 >= own && (waits[i] || rows[i].finished())
        });
        if even && proposals.iter().all(|proposal| proposal.tokens.is_empty()) {
            return Ok(None);
        }
        let new: Vec<Vec<TokenId>> = (0..rows.len())
            .map(|i| match rows[i].ids.len().checked_sub(unfed[i]) {
                Some(fed) if waits[i] => [&rows[i].ids[fed..], &proposals[i].tokens].concat(),
                _ => Vec::new(),
            })
            .collect();
        // All that is fed now may have to be forgotten.
        let longest = new.iter().map(Vec::len).max().unwrap_or(0);
        feeder.cache.keep_history(longest + 1);
        let batch = uneven(&new, &seen, &feeder.left_pad, device);
        let logits = check(feeder, batch).await?;
        let columns = logits.len() / (rows.len() * vocab).max(1);
        let mut chosen = Chosen { tokens: vec![Vec::new(); rows.len()], same: vec![0; rows.len()] };
        for i in (0..rows.len()).filter(|&i| waits[i]) {
            let behind = proposals[i].tokens.len() + 1;
            let end = (i + 1) * columns * vocab;
            let verification = Verification {
                row: i,
                asked: &asked[i],
                proposal: &proposals[i],
                constraint,
                logits: &logits[end - behind * vocab..end],
                vocab,
                options,
                stopping,
            };
            let accepted = verification.accepted(sampler.as_deref_mut())?;
            let proposed = &proposals[i].tokens;
            let same = proposed.iter().zip(&accepted).take_while(|(token, chosen)| **token == chosen.token);
            let same = same.count();
            if forced[i].is_empty() {
                stats.proposed += proposed.len();
                stats.accepted += same;
                self.learn(i, &options.settings.assisted, same, proposed.len());
            } else {
                stats.forced += same;
            }
            chosen.tokens[i] = accepted.iter().map(|accepted| accepted.token).collect();
            chosen.same[i] = same;
            self.rows[i].accepted.extend(accepted);
        }
        // The last token of each row was not fed.
        let ends = rows.iter().zip(&self.rows).zip(&seen).map(|((row, ahead), seen)| {
            (row.prompt_end + generated + ahead.accepted.len()).saturating_sub(1).max(*seen)
        });
        go_back(&mut feeder.cache, all, &ends.collect::<Vec<_>>(), &waits)?;
        Ok(Some(chosen))
    }

    /// Drafts tokens for each row: the `forced` ones, if there are any.
    async fn proposed(
        &mut self,
        asked: &[Asked<'_>],
        forced: &[Vec<TokenId>],
        settings: &Settings,
        vocab: usize,
        constraint: &mut Constraint<'_>,
    ) -> Result<Vec<Proposal>> {
        let mut proposals = match &mut self.drafter {
            Some(drafter) => drafter.propose(asked, settings, vocab, constraint).await?,
            None => asked.iter().map(|_| Proposal::default()).collect(),
        };
        for (proposal, forced) in proposals.iter_mut().zip(forced).filter(|(_, forced)| !forced.is_empty()) {
            proposal.tokens.clone_from(forced);
        }
        Ok(proposals)
    }
}

/// The choice of a pass for each row.
#[derive(Debug)]
struct Chosen {
    tokens: Vec<Vec<TokenId>>,
    /// Number of tokens that were drafted.
    same: Vec<usize>,
}

/// Feeds a batch. Returns the logits `[rows, columns, vocab]` of all its tokens.
async fn check(feeder: &mut Feeder<'_>, batch: Batch) -> Result<Vec<f32>> {
    let logits = feeder.check(&batch)?;
    let read = read_back::start(logits).finish().await;
    if read.is_err() {
        feeder.cache.poison();
    }
    read?.try_into_vec().map_err(|e| Error::Execution(e.to_string()))
}

/// Makes the cache forget all tokens of each row after `ends`. If it can only return to an earlier length,
/// the missing tokens are fed in the next pass.
fn go_back(cache: &mut ModelCache, rows: &Rows, ends: &[usize], waits: &[bool]) -> Result<()> {
    let points = cache.rewind_points(ends);
    // No token follows a row that ends here.
    let can_be_fed = rows
        .list
        .iter()
        .zip(waits)
        .zip(&points)
        .all(|((row, waits), point)| !waits || point + row.ids.len() >= row.prompt_end + rows.delivered);
    cache.truncate_rows(if can_be_fed { &points } else { ends })
}
