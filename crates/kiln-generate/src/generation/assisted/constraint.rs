//! The tokens that a grammar allows after drafted tokens.

use kiln_core::{Result, model::TokenId};

use super::Proposal;
use crate::grammar::{Advance, Mask, Masks, Nexts};

/// The tokens that may follow each row, and each of its drafted tokens. Without a grammar, every token may.
#[derive(Debug)]
pub(super) struct Constraint<'m> {
    masks: Option<&'m mut Masks>,
    /// For each row, the mask after its tokens, and one after each drafted token.
    nexts: Vec<Nexts>,
    /// Number of drafted tokens of each row that the masks advanced over.
    ahead: Vec<usize>,
    /// Whether masks are being computed.
    pending: bool,
}

impl<'m> Constraint<'m> {
    /// Waits for the masks of `rows` rows.
    ///
    /// # Errors
    /// The errors of [`Masks::wait`].
    pub(super) fn begin(masks: Option<&'m mut Masks>, rows: usize) -> Result<Self> {
        let pending = masks.is_some();
        let mut constraint = Self { masks, nexts: vec![Nexts::new(); rows], ahead: vec![0; rows], pending };
        constraint.wait()?;
        Ok(constraint)
    }

    /// The tokens that must follow a row.
    pub(super) fn forced(&self, row: usize) -> &[TokenId] {
        self.nexts.get(row).and_then(|nexts| nexts.first()).map_or(&[], |next| &next.forced)
    }

    /// The mask after the first `proposed` drafted tokens of a row; `None`: every token may follow.
    pub(super) fn mask(&self, row: usize, proposed: usize) -> Option<&Mask> {
        self.nexts.get(row)?.get(proposed).map(|next| &next.mask)
    }

    /// Starts to compute the masks after one more drafted token of each row; `None`: the row does not
    /// advance.
    pub(super) fn follow(&mut self, tokens: &[Option<TokenId>]) -> Result<()> {
        let step = tokens.iter().enumerate();
        let step = step.map(|(parent, token)| Advance { tokens: one(*token), ..waits(parent) }).collect();
        self.begin_step(step)?;
        for (ahead, token) in self.ahead.iter_mut().zip(tokens) {
            *ahead += usize::from(token.is_some());
        }
        Ok(())
    }

    /// Waits for the masks that [`follow`](Self::follow) started.
    pub(super) fn wait(&mut self) -> Result<()> {
        let Some(masks) = self.masks.as_mut().filter(|_| self.pending) else { return Ok(()) };
        self.pending = false;
        for ((nexts, ahead), new) in self.nexts.iter_mut().zip(&self.ahead).zip(masks.wait()?) {
            nexts.truncate(*ahead);
            nexts.extend(new);
        }
        Ok(())
    }

    /// Cuts drafts that were made without a grammar before the first token that may not follow.
    pub(super) fn cut(&mut self, proposals: &mut [Proposal]) -> Result<()> {
        self.wait()?;
        let unseen = |row: usize, proposal: &Proposal| self.ahead[row] == 0 && !proposal.tokens.is_empty();
        let step: Vec<Advance> = proposals
            .iter()
            .enumerate()
            .map(|(row, proposal)| match unseen(row, proposal) {
                true => Advance { draft: proposal.tokens.clone(), ..waits(row) },
                false => waits(row),
            })
            .collect();
        if step.iter().any(|row| !row.draft.is_empty()) {
            self.begin_step(step)?;
            self.wait()?;
        }
        if self.masks.is_some() {
            for (proposal, nexts) in proposals.iter_mut().zip(&self.nexts) {
                proposal.tokens.truncate(nexts.len().saturating_sub(1));
            }
        }
        Ok(())
    }

    /// Advances the rows by the `chosen` tokens, of which the first `same` of each row were drafted.
    pub(super) fn accept(mut self, chosen: &[Vec<TokenId>], same: &[usize]) -> Result<()> {
        let step = chosen.iter().zip(same).enumerate().map(|(row, (chosen, &same))| {
            let stays = same.min(self.ahead[row]);
            // If no token was possible, a row stays where it is.
            let allowed =
                |&(i, token): &(usize, &TokenId)| self.mask(row, i).is_some_and(|m| m.allows(*token));
            let tokens = chosen.iter().enumerate().skip(stays).take_while(allowed);
            let tokens = tokens.map(|(_, token)| *token).collect();
            Advance { rewind: self.ahead[row] - stays, tokens, ..waits(row) }
        });
        let step = step.collect();
        self.begin_step(step)
    }

    /// Leaves the rows as they were.
    pub(super) fn give_up(mut self) {
        // The error was returned before, or the next step returns it.
        _ = self.wait();
        if self.ahead.iter().any(|&ahead| ahead > 0) {
            let step = self.ahead.iter().enumerate();
            let step = step.map(|(row, &rewind)| Advance { rewind, ..waits(row) }).collect();
            _ = self.begin_step(step);
        } else if let Some(masks) = self.masks {
            self.nexts.iter_mut().for_each(|nexts| nexts.truncate(1));
            masks.put_back(self.nexts);
        }
    }

    fn begin_step(&mut self, step: Vec<Advance>) -> Result<()> {
        self.wait()?;
        if let Some(masks) = &mut self.masks {
            masks.advance(step)?;
            self.pending = true;
        }
        Ok(())
    }
}

/// The advance of a row that stays where it is.
fn waits(row: usize) -> Advance {
    Advance { parent: row, ..Advance::default() }
}

fn one(token: Option<TokenId>) -> Vec<TokenId> {
    token.into_iter().collect()
}
