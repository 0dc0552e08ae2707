//! Cache strategies. Each file in `strategies/` is one strategy; [`STRATEGIES`] is the list.
//!
//! **Invariant:** no model is named here, and no strategy outside its own file and the list.
#![forbid(unsafe_code)]

mod buffer;
pub mod memory;
mod offload;
mod plan;
pub mod quantizers;
mod shared_prefix;
pub mod strategies;

pub use memory::Memory;
pub use offload::{Offload, offload_all, offload_one};
pub use plan::{CacheSpec, Plan};
pub use strategies::{
    CacheSettings, Compat, Flush, KvFactory, KvStrategy, QuantizedSettings, Rotate, STRATEGIES, SinkSettings,
    StaticSettings, samples,
};
