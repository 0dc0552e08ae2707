//! Keeps everything (transformers' `DynamicCache`).
//!
//! Keys are in a buffer that doubles when it is full, so that a step writes its own tokens in place and
//! copies nothing, and so that shapes repeat. If the final length of the sequence is known, the last doubling
//! ends there. After a prefix shared with a snapshot there is another buffer that doubles ([`SharedPrefix`]).

use kiln_core::{
    Result,
    layer::{Footprint, Kv, KvLayer, Parents, Positions, Reorders, StepShape},
    need::{AttentionNeed, Stream},
    slot::Slot,
    view::KvView,
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use super::{CacheSettings, KvFactory, KvStrategy, Sliding};
use crate::{
    CacheSpec,
    memory::{KvPolicy, Memory, Policy, Progress, check},
    shared_prefix::SharedPrefix,
};

/// Number of slots of the smallest buffer, if the final length of the sequence is unknown.
const SMALLEST: usize = 64;

/// Number of slots that are allocated at once if they will be needed: a smaller buffer would save a few
/// megabytes for a few lines of text, and would be copied when it is full.
const AT_ONCE: usize = 256;

pub(super) static DYNAMIC: KvStrategy = KvStrategy {
    name: "dynamic",
    aliases: &["hybrid"],
    offloaded_aliases: &["offloaded"],
    summary: "keeps every key and value, in a buffer that doubles",
    settings: &[],
    samples: &[],
    windowed: Some(CacheSpec::default_of::<Sliding>),
    read: CacheSpec::read::<Dynamic>,
};

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Dynamic {}

impl CacheSettings for Dynamic {
    const STRATEGY: &'static KvStrategy = &DYNAMIC;
}

impl KvFactory for Dynamic {
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(tokens)
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        let policy = DynamicPolicy { need: need.clone(), kernels: kernels.clone() };
        Ok(Box::new(Memory::new(policy, kernels.device())))
    }

    fn check_encoder(&self) -> Result<()> {
        Ok(())
    }
}

/// The first `seq_len` positions of the chain are valid.
#[derive(Clone, Debug)]
struct DynamicPolicy {
    need: AttentionNeed,
    kernels: Kernels,
}

/// Returns the first position without room once the chain holds `end` tokens of a sequence that is expected
/// to reach `horizon`.
fn room_for(end: usize, horizon: usize, filled: usize, chain: &SharedPrefix) -> usize {
    let origin = chain.next_origin(filled);
    if origin == chain.origin() && end <= chain.end() {
        return chain.end();
    }
    origin + slots_for(end - origin, horizon.saturating_sub(origin))
}

/// Number of slots of a buffer once it holds `end` of the `horizon` tokens that it is expected to hold.
fn slots_for(end: usize, horizon: usize) -> usize {
    if end > horizon {
        // Room for at least one more: a prompt is followed by a token.
        return (end + 1).next_power_of_two().max(SMALLEST);
    }
    // The expected length, halved as often as it still fits, so that the last doubling ends where the
    // sequence does.
    let mut slots = horizon;
    while slots.div_ceil(2) >= end.max(AT_ONCE) {
        slots = slots.div_ceil(2);
    }
    slots
}

impl Policy for DynamicPolicy {
    const NAME: &'static str = "dynamic";
    type Counts = ();
    type Tensors = SharedPrefix;

    fn footprint(&self, at: &Progress<()>, chain: &SharedPrefix, step: &StepShape) -> Footprint {
        let end = at.seq_len + step.tokens;
        let horizon = if step.last { end } else { at.horizon };
        chain.footprint(&self.need, room_for(end, horizon, at.seq_len, chain), at.seq_len, step)
    }

    fn rewind(&self, _: &mut Progress<()>, chain: &mut SharedPrefix, len: usize) -> Result<()> {
        chain.keep(len);
        Ok(())
    }

    fn shares_row(&self, at: &Progress<()>, chain: &SharedPrefix) -> bool {
        chain.shares_row(at.seq_len)
    }

    fn reorders(&self, chain: &SharedPrefix) -> Reorders {
        chain.reorders()
    }

    fn reorder_on_device(&self, chain: &mut SharedPrefix, parents: &Parents) -> Result<()> {
        chain.reorder_on_device(&self.kernels, parents)
    }

    fn trim(&self, at: &mut Progress<()>, chain: &mut SharedPrefix) -> Result<()> {
        chain.unite(at.seq_len)
    }

    fn validate(&self, at: &Progress<()>, chain: &SharedPrefix) -> Result<()> {
        check(chain.validate(&self.need)? == at.seq_len)
    }
}

impl KvPolicy for DynamicPolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn append(
        &self,
        at: &mut Progress<()>,
        chain: &mut SharedPrefix,
        new: Kv,
        positions: &Positions,
    ) -> Result<KvView> {
        let (filled, end) = (at.seq_len, at.seq_len + new.0.dims()[2]);
        if end > filled {
            chain.branch(filled);
        }
        if filled == 0 || end > chain.end() {
            chain.resize(room_for(end, at.horizon, filled, chain), filled, &new)?;
        }
        chain.write(&self.kernels, new, positions)?;
        chain.view()
    }

    fn slots_for(&self, at: &Progress<()>, chain: &SharedPrefix, tokens: usize) -> Option<usize> {
        let end = at.seq_len + tokens;
        chain.is_one_buffer().then(|| room_for(end, at.horizon, at.seq_len, chain))
    }

    fn buffer<'a>(&self, chain: &'a mut SharedPrefix) -> Option<&'a mut Slot<Kv>> {
        chain.only_buffer()
    }

    fn start_in_place(&self, at: &Progress<()>, chain: &SharedPrefix, n: usize) -> Option<usize> {
        let filled = at.seq_len;
        let stays = chain.is_one_buffer() && chain.next_origin(filled) == chain.origin();
        (stays && filled > 0 && filled + n <= chain.end()).then_some(0)
    }

    fn gather(&self, at: &Progress<()>, chain: &SharedPrefix) -> Result<Option<Kv>> {
        chain.gather(at.seq_len)
    }

    fn replayable(&self, at: &Progress<()>, chain: &SharedPrefix) -> usize {
        chain.end().saturating_sub(at.seq_len)
    }
}
