//! Keeps the first tokens and the latest ones, and can go on forever (StreamingLLM, Xiao et al., 2023,
//! <https://arxiv.org/abs/2309.17453>; transformers' `SinkCache`).
//!
//! Positions are places in the window, not in the text: when tokens are evicted, later ones close the gap.
//! `compat=4.47` counts them as in transformers 4.47.

mod compat;
mod policy;
mod rotation;

use kiln_core::{Error, Result, layer::KvLayer, need::AttentionNeed, setters};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use self::{compat::CompatPolicy, policy::SinkPolicy, rotation::Rotation};
use super::{CacheSettings, Compat, KvFactory, KvStrategy, settings::check_count};
use crate::{CacheSpec, memory::Memory};

pub(super) static SINK: KvStrategy = KvStrategy {
    name: "sink",
    aliases: &[],
    offloaded_aliases: &[],
    summary: "keeps the first tokens and the latest ones; a text can have any length",
    settings: &[
        ("window", "tokens it holds, sinks included (default 1024)"),
        ("sinks", "first tokens that are never evicted (default 4)"),
        ("compat", "4.47 counts positions as transformers 4.47 did"),
    ],
    samples: &["window=6,sinks=2", "window=6,sinks=0", "window=200,sinks=4", "window=12,sinks=3,compat=4.47"],
    windowed: None,
    read: CacheSpec::read::<SinkSettings>,
};

/// Settings of a `sink` cache (transformers' `SinkCache`). The default holds 1024 tokens, 4 of them sinks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct SinkSettings {
    /// Number of tokens held, including sinks (transformers' `window_length`).
    pub window: usize,
    /// Number of first tokens that are never evicted; fewer than `window` (transformers' `num_sink_tokens`).
    pub sinks: usize,
    /// Version of transformers whose way of counting positions is used.
    pub compat: Option<Compat>,
}

setters!(SinkSettings { window: usize, sinks: usize, compat: Compat });

impl Default for SinkSettings {
    fn default() -> Self {
        Self { window: 1024, sinks: 4, compat: None }
    }
}

impl CacheSettings for SinkSettings {
    const STRATEGY: &'static KvStrategy = &SINK;

    fn validate(&self) -> Result<(), String> {
        let Self { window, sinks, .. } = *self;
        check_count("window", window)?;
        if sinks >= window {
            return Err(format!("{sinks} sinks leave no room in a window of {window}, which includes them"));
        }
        Ok(())
    }
}

impl KvFactory for SinkSettings {
    fn exact(&self) -> bool {
        false
    }

    fn check(&self, need: &AttentionNeed) -> Result<()> {
        let up_to = need.rotary.as_ref().and_then(|rotary| rotary.up_to);
        match up_to {
            Some(up_to) if self.compat.is_none() && self.window >= up_to => Err(Error::Setting {
                name: "cache",
                why: format!(
                    "a sink window of {} does not fit the {up_to} positions that the model's rotary frequencies are \
                     trained for; make it smaller",
                    self.window
                ),
            }),
            _ => Ok(()),
        }
    }

    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(tokens.min(self.window + self.slack(need)))
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        self.check(need)?;
        let Self { window, sinks, compat } = *self;
        let (slack, need) = (self.slack(need), need.clone());
        let rotation = Rotation::new(&need, kernels);
        if compat.is_some() {
            let policy = CompatPolicy { need, rotation, window, sinks };
            return Ok(Box::new(Memory::new(policy, kernels.device())));
        }
        let policy = SinkPolicy { need, kernels: kernels.clone(), rotation, window, sinks, slack };
        Ok(Box::new(Memory::new(policy, kernels.device())))
    }
}

impl SinkSettings {
    /// Number of positions beyond the window that tokens may drift to before they are moved back.
    fn slack(&self, need: &AttentionNeed) -> usize {
        let up_to = need.rotary.as_ref().and_then(|rotary| rotary.up_to).unwrap_or(usize::MAX);
        self.window.min(up_to.saturating_sub(self.window)).max(1)
    }
}
