use std::fmt;

use kiln_core::{Result, layer::KvLayer, need::AttentionNeed};

mod dynamic;
mod none;

/// Builds the memory of one attention block.
pub trait KvStrategy: fmt::Debug + Sync {
    /// Name on the command line.
    fn name(&self) -> &'static str;

    /// What it does, in a phrase: the help of the command line.
    fn summary(&self) -> &'static str;

    /// Whether it keeps what it is given. One that does not is fed the whole sequence at every step.
    fn remembers(&self) -> bool {
        true
    }

    /// Whether attention gets every key the model may see.
    fn exact(&self) -> bool {
        true
    }

    /// Bytes that `tokens` tokens of one row take in one block, with elements of `element` bytes.
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize;

    fn build(&self, need: &AttentionNeed) -> Result<Box<dyn KvLayer>>;
}

/// Every strategy. A line here makes it selectable and puts it through the laws.
pub static STRATEGIES: &[&dyn KvStrategy] = &[
    &dynamic::Dynamic, //
    &none::NoCache,
];
