//! The memory of one block as in transformers 4.47's `SinkCache`, including its mistakes.
//!
//! Queries and new keys have absolute positions, however long the text, and every eviction moves the kept
//! keys back by as many positions as tokens came; so distances between queries and kept keys grow. Keys also
//! move in the step that fills the window, in which nothing is evicted yet.

use kiln_core::{
    Error, Result,
    layer::{Footprint, Kv, KvSpan, Limits, Positions, StepShape},
    need::{AttentionNeed, Stream},
    slot::Slot,
    view::{DenseKv, KvView},
};
use serde::{Deserialize, Serialize};

use super::rotation::Rotation;
use crate::{
    buffer::{self, behind, narrow},
    memory::{KvPolicy, Policy, Progress, check},
};

#[derive(Clone, Debug)]
pub(super) struct CompatPolicy {
    pub(super) need: AttentionNeed,
    pub(super) rotation: Rotation,
    pub(super) window: usize,
    pub(super) sinks: usize,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    held: usize,
}

type At = Progress<Counts>;

impl CompatPolicy {
    /// Number of tokens held after `n` more.
    fn held_after(&self, at: &At, n: usize) -> usize {
        match at.counts.held {
            0 => n,
            held => (held + n).min(self.window),
        }
    }
}

impl Policy for CompatPolicy {
    const NAME: &'static str = "sink";
    type Counts = Counts;
    type Tensors = Slot<Kv>;

    fn admits(&self, at: &At, tokens: usize, _padded: bool) -> Result<()> {
        // With more tokens the reference takes a suffix of something else. If there is no room at all between
        // sinks and window, only one token is kept.
        match self.limits(at).at_once {
            Some(most) if tokens > most => Err(Error::TooManyAtOnce { given: tokens, most }),
            _ => Ok(()),
        }
    }

    /// The buffer is created again at every step.
    fn footprint(&self, at: &At, _: &Slot<Kv>, step: &StepShape) -> Footprint {
        let token = self.need.token_bytes(step.element).saturating_mul(step.rows);
        let tokens = self.held_after(at, step.tokens);
        let largest = self.need.largest_bytes(step.element).saturating_mul(step.rows).saturating_mul(tokens);
        let passing = token.saturating_mul(at.counts.held);
        Footprint { held: token.saturating_mul(tokens), largest, passing }
    }

    /// Exact until something is evicted or moved.
    fn rewind_point(&self, at: &At, at_most: usize) -> Option<usize> {
        let untouched = at.counts.held == at.seq_len && at.seq_len < self.window;
        (at_most == at.seq_len || untouched).then_some(at_most)
    }

    fn can_rewind(&self) -> bool {
        false
    }

    fn rewind(&self, at: &mut At, kv: &mut Slot<Kv>, len: usize) -> Result<()> {
        if let Some(old) = kv.take()?
            && len > 0
        {
            kv.set(narrow(&old, 0, len));
        }
        at.counts.held = len;
        Ok(())
    }

    fn validate(&self, at: &At, kv: &Slot<Kv>) -> Result<()> {
        check(buffer::validate(kv, &self.need)? == at.counts.held && at.counts.held <= at.seq_len)
    }
}

impl KvPolicy for CompatPolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn span(&self, at: &At, n: usize) -> KvSpan {
        let len = self.held_after(at, n);
        KvSpan { start: at.seq_len + n - len, len }
    }

    fn limits(&self, at: &At) -> Limits {
        let room = (self.window - self.sinks).saturating_sub(1).max(1);
        Limits { at_once: (at.counts.held > 0).then_some(room), by_pass: true, ..Limits::default() }
    }

    fn append(&self, at: &mut At, kv: &mut Slot<Kv>, new: Kv, _: &Positions) -> Result<KvView> {
        let n = new.0.dims()[2];
        let (held, span) = (at.counts.held, self.span(at, n));
        let (keys, values) = match kv.take()? {
            Some(old) if held + n >= self.window => {
                let kept = self.window - self.sinks - n;
                let mut all = (self.sinks > 0).then(|| narrow(&old, 0, self.sinks));
                if kept > 0 {
                    let (keys, values) = narrow(&old, held - kept, kept);
                    all = Some(behind(all, (self.rotation.shift(keys, -(n as i64)), values)));
                }
                behind(all, new)
            }
            old => behind(old, new),
        };
        kv.set((keys.clone(), values.clone()));
        at.counts.held = span.len;
        Ok(KvView::Dense(DenseKv { keys, values, start: span.start, origin: span.start, shared: None }))
    }

    fn gather(&self, _: &At, kv: &Slot<Kv>) -> Result<Option<Kv>> {
        Ok(kv.get()?.cloned())
    }
}
