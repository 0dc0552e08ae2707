//! Drafts of a model with another tokenizer, translated as text. (transformers'
//! `AssistedCandidateGeneratorDifferentTokenizers`)

use std::sync::Arc;

use kiln_core::{Result, model::TokenId};

use super::{Asked, DraftModel, Proposal, verify::probabilities};
use crate::{AssistedSettings, Tokenizer, sampler::greedy};

/// The tokenizers of a model and of its draft model, and the rows as tokens of both.
#[derive(Debug)]
pub(super) struct Translation {
    model: Arc<Tokenizer>,
    draft: Arc<Tokenizer>,
    rows: Vec<Translated>,
}

/// A row as tokens of the model, and the same text as tokens of the draft model.
#[derive(Clone, Debug, Default)]
struct Translated {
    model: Vec<TokenId>,
    draft: Vec<TokenId>,
}

impl Translation {
    pub(super) fn new(model: Arc<Tokenizer>, draft: Arc<Tokenizer>) -> Self {
        Self { model, draft, rows: Vec::new() }
    }

    /// The text of row `i`, which now has the tokens `ids`, as tokens of the draft model; none if it cannot
    /// be translated. New tokens are turned into text together with the last `lookbehind` tokens before them.
    fn for_draft(&mut self, i: usize, ids: &[TokenId], lookbehind: usize) -> &[TokenId] {
        self.rows.resize(self.rows.len().max(i + 1), Translated::default());
        let draft = self.continued(&self.rows[i], ids, lookbehind).or_else(|| {
            let text = self.model.decode(ids, true).ok()?;
            self.draft.encode(&text, true).ok()
        });
        let row = &mut self.rows[i];
        *row = Translated { model: ids.to_vec(), draft: draft.unwrap_or_default() };
        &row.draft
    }

    /// The tokens of the draft model for `ids`, which continue `row`; `None` if only the whole text has them.
    fn continued(&self, row: &Translated, ids: &[TokenId], lookbehind: usize) -> Option<Vec<TokenId>> {
        let start = row.model.len().checked_sub(lookbehind).filter(|&start| start > 0)?;
        ids.starts_with(&row.model).then_some(())?;
        let encoded = |ids| self.draft.encode(&self.model.decode(ids, true).ok()?, false).ok();
        let (before, after) = (encoded(&row.model[start..])?, encoded(&ids[start..])?);
        // The last tokens may change with the tokens that follow.
        let same = before.iter().zip(&after).take_while(|(before, after)| before == after).count();
        let kept = row.draft.strip_suffix(&before[same..]).filter(|_| same > 0)?;
        Some([kept, &after[same..]].concat())
    }

    /// The tokens of the model for `proposed`, which continues row `i` in tokens of the draft model. They are
    /// turned into text together with the last `lookbehind` tokens before them.
    fn for_model(&self, i: usize, proposed: &[TokenId], lookbehind: usize) -> Option<Vec<TokenId>> {
        let ids = &self.rows.get(i)?.draft;
        let last = &ids[ids.len().saturating_sub(lookbehind)..];
        let before = self.draft.decode(last, true).ok()?;
        let after = self.draft.decode(&[last, proposed].concat(), true).ok()?;
        // A character may be incomplete.
        let after = after.trim_end_matches('\u{FFFD}');
        let new = after.strip_prefix(&before)?;
        let encoded = |text| self.model.encode(text, false).ok();
        match encoded(after)?.strip_prefix(&encoded(&before)?[..]) {
            Some(tokens) => Some(tokens.to_vec()),
            // The last token of the row would change, and it cannot any more.
            None => encoded(new),
        }
    }
}

impl DraftModel {
    /// Drafts the likeliest tokens for each row, as the text of this model has them.
    pub(super) async fn propose_translated(
        &mut self,
        translation: &mut Translation,
        asked: &[Asked<'_>],
        settings: &AssistedSettings,
    ) -> Result<Vec<Proposal>> {
        let rows: Vec<Vec<TokenId>> = (asked.iter().enumerate())
            .map(|(i, row)| match row.most {
                0 => Vec::new(),
                _ => translation.for_draft(i, row.state.ids, settings.target_lookbehind).to_vec(),
            })
            .collect();
        let mut open: Vec<bool> = rows.iter().map(|row| !row.is_empty()).collect();
        let mut proposed: Vec<Vec<TokenId>> = vec![Vec::new(); rows.len()];
        if open.contains(&true) {
            let most = asked.iter().map(|row| row.most).max().unwrap_or(0);
            let wanted = rows.iter().zip(&open).map(|(row, open)| open.then_some(&row[..]));
            let mut new = self.go_back(&wanted.collect::<Vec<_>>(), most)?;
            while open.contains(&true) {
                let logits = self.feed(&new).await?;
                new = vec![Vec::new(); rows.len()];
                for (i, row) in asked.iter().enumerate() {
                    if !open[i] {
                        continue;
                    }
                    let scores = &logits[i * self.vocab()..(i + 1) * self.vocab()];
                    let token = greedy(scores).filter(|&token| !translation.draft.is_special(token));
                    let likely = token.and_then(|token| probabilities(scores).get(token as usize).copied());
                    proposed[i].extend(token);
                    open[i] = likely.is_some_and(|likely| likely >= f64::from(settings.confidence_threshold))
                        && proposed[i].len() < row.most;
                    new[i].extend(token.filter(|_| open[i]));
                }
            }
        }
        let tokens = |(i, (row, proposed)): (usize, (&Asked<'_>, &Vec<TokenId>))| {
            let mut tokens = match proposed.is_empty() {
                true => Vec::new(),
                false => {
                    translation.for_model(i, proposed, settings.assistant_lookbehind).unwrap_or_default()
                }
            };
            tokens.truncate(row.most);
            Proposal { tokens, drawn_from: Vec::new() }
        };
        Ok(asked.iter().zip(&proposed).enumerate().map(tokens).collect())
    }
}

#[cfg(test)]
mod tests;
