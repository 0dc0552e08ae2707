//! A buffer of fixed length, allocated once (transformers' `StaticCache`), so that every step has the same
//! launches and can be captured.

use kiln_core::{
    Error, Result,
    layer::{Footprint, Kv, KvLayer, Limits, Parents, Positions, Reorders, StepShape},
    need::{AttentionNeed, Stream},
    setters,
    slot::Slot,
    view::KvView,
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use super::{CacheSettings, KvFactory, KvStrategy, Sliding, settings::check_count};
use crate::{
    CacheSpec,
    buffer::{self, Buffer, Lifetime},
    memory::{KvPolicy, Memory, Policy, Progress, check},
};

pub(super) static STATIC: KvStrategy = KvStrategy {
    name: "static",
    aliases: &["fixed"],
    offloaded_aliases: &["offloaded_static"],
    summary: "keeps every key and value, in a buffer allocated once; decoding is captured and replayed",
    settings: &[("len", "tokens it holds; unset: what the generation is going to reach")],
    samples: &["len=256"],
    windowed: Some(CacheSpec::default_of::<Sliding>),
    read: CacheSpec::read::<StaticSettings>,
};

/// Settings of a `static` cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct StaticSettings {
    /// Number of tokens held, 1 or more; unset: as many as the generation is going to reach.
    pub len: Option<usize>,
}

setters!(StaticSettings { len: usize });

impl CacheSettings for StaticSettings {
    const STRATEGY: &'static KvStrategy = &STATIC;

    fn validate(&self) -> Result<(), String> {
        self.len.map_or(Ok(()), |len| check_count("len", len))
    }
}

impl KvFactory for StaticSettings {
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(self.len.unwrap_or(tokens))
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        let policy = StaticPolicy { need: need.clone(), kernels: kernels.clone(), len: self.len };
        Ok(Box::new(Memory::new(policy, kernels.device())))
    }
}

/// The first `seq_len` slots of the buffer are valid.
#[derive(Clone, Debug)]
struct StaticPolicy {
    need: AttentionNeed,
    kernels: Kernels,
    /// Length as set by the user.
    len: Option<usize>,
}

impl StaticPolicy {
    /// Number of slots of the buffer once it holds `end` tokens. Without a length from the user, the buffer
    /// is as long as the sequence is going to be, or, if that is unknown, as the tokens fed.
    fn slots_for(&self, end: usize, at: &Progress<()>, buffer: &Buffer) -> usize {
        self.len.unwrap_or_else(|| at.horizon.max(buffer.slots()).max(end))
    }
}

impl Policy for StaticPolicy {
    const NAME: &'static str = "static";
    type Counts = ();
    type Tensors = Buffer;

    fn admits(&self, at: &Progress<()>, tokens: usize, _padded: bool) -> Result<()> {
        let needed = at.seq_len + tokens;
        match self.len {
            Some(capacity) if needed > capacity => Err(Error::Full { capacity, needed }),
            _ => Ok(()),
        }
    }

    fn footprint(&self, at: &Progress<()>, buffer: &Buffer, step: &StepShape) -> Footprint {
        let slots = self.slots_for(at.seq_len + step.tokens, at, buffer);
        buffer::footprint(&self.need, buffer.slots(), slots, step)
    }

    fn reorders(&self, _: &Buffer) -> Reorders {
        Reorders::InPlace
    }

    fn reorder_on_device(&self, buffer: &mut Buffer, parents: &Parents) -> Result<()> {
        buffer.reorder_on_device(&self.kernels, parents)
    }

    /// Keeps the buffer for the next sequence.
    fn reset(&self, _: &mut Buffer) {}

    fn trim(&self, at: &mut Progress<()>, buffer: &mut Buffer) -> Result<()> {
        buffer.truncate(at.seq_len)
    }

    fn validate(&self, at: &Progress<()>, buffer: &Buffer) -> Result<()> {
        check(buffer.validate(&self.need)? == at.seq_len)?;
        self.admits(at, 0, false)
    }
}

impl KvPolicy for StaticPolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn limits(&self, _: &Progress<()>) -> Limits {
        Limits { capacity: self.len, fixed_buffers: true, ..Limits::default() }
    }

    fn append(
        &self,
        at: &mut Progress<()>,
        buffer: &mut Buffer,
        new: Kv,
        positions: &Positions,
    ) -> Result<KvView> {
        let slots = self.slots_for(at.seq_len + new.0.dims()[2], at, buffer);
        buffer.resize(slots, at.seq_len, &new, Lifetime::AsLongAsTheSequence)?;
        buffer.write(&self.kernels, new, positions)?;
        buffer.view(0)
    }

    fn slots_for(&self, at: &Progress<()>, buffer: &Buffer, tokens: usize) -> Option<usize> {
        Some(Self::slots_for(self, at.seq_len + tokens, at, buffer))
    }

    fn buffer<'a>(&self, buffer: &'a mut Buffer) -> Option<&'a mut Slot<Kv>> {
        Some(buffer.slot())
    }

    fn start_in_place(&self, at: &Progress<()>, buffer: &Buffer, n: usize) -> Option<usize> {
        (at.seq_len > 0 && Self::slots_for(self, at.seq_len + n, at, buffer) == buffer.slots()).then_some(0)
    }

    fn gather(&self, at: &Progress<()>, buffer: &Buffer) -> Result<Option<Kv>> {
        buffer.gather(self.span(at, 0))
    }

    fn replayable(&self, at: &Progress<()>, buffer: &Buffer) -> usize {
        let grows = self.len.unwrap_or(at.horizon) > buffer.slots();
        if grows { 0 } else { buffer.slots().saturating_sub(at.seq_len) }
    }
}
