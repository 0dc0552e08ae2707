//! Remembers nothing: every step recomputes the whole sequence (transformers' `use_cache=False`).
//!
//! The reference in tests of every other strategy: slow, but without stored tensors that could be wrong.

use kiln_core::{
    Result,
    layer::{Kv, KvLayer, Positions},
    need::AttentionNeed,
    view::KvView,
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use super::{CacheSettings, KvFactory, KvStrategy};
use crate::{
    CacheSpec,
    memory::{KvPolicy, Memory, Policy, Progress, check},
};

pub(super) static NONE: KvStrategy = KvStrategy {
    name: "none",
    aliases: &[],
    offloaded_aliases: &[],
    summary: "remembers nothing and recomputes the whole sequence at every step",
    settings: &[],
    samples: &[],
    windowed: None,
    read: CacheSpec::read::<NoCache>,
};

/// Settings and policy of the strategy `none`, which has neither settings nor tensors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoCache {}

impl CacheSettings for NoCache {
    const STRATEGY: &'static KvStrategy = &NONE;
}

impl KvFactory for NoCache {
    fn remembers(&self) -> bool {
        false
    }

    fn bytes(&self, _need: &AttentionNeed, _tokens: usize, _element: usize) -> usize {
        0
    }

    fn build(&self, _need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        Ok(Box::new(Memory::new(Self {}, kernels.device())))
    }
}

impl Policy for NoCache {
    const NAME: &'static str = "none";
    type Counts = ();
    type Tensors = ();

    fn can_rewind(&self) -> bool {
        false
    }

    fn validate(&self, at: &Progress<()>, _: &()) -> Result<()> {
        check(at.seq_len == 0)
    }
}

impl KvPolicy for NoCache {
    fn append(&self, _: &mut Progress<()>, _: &mut (), (keys, values): Kv, _: &Positions) -> Result<KvView> {
        Ok(KvView::from_zero(keys, values))
    }

    /// Does not count tokens, because none are stored.
    fn advance(&self, _: &mut Progress<()>, _: &(), _n: usize) {}

    fn gather(&self, _: &Progress<()>, _: &()) -> Result<Option<Kv>> {
        Ok(None)
    }
}
