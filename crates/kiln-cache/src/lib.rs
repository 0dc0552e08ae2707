//! Cache strategies. Each file in `strategies/` is one strategy; [`STRATEGIES`] is the list.
//!
//! **Invariant:** no model is named here, and no strategy outside its own file and the list.
#![forbid(unsafe_code)]

mod buffer;
mod chain;
mod cross;
mod offload;
mod plan;
pub mod quantizers;
mod recurrent;
mod restored;
pub mod strategies;

pub use offload::{Offload, offload, offload_one, offloaded};
pub use plan::{CacheSpec, Plan};
pub use strategies::{KvFactory, KvStrategy, STRATEGIES, Settings};
