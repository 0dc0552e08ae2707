//! Products of vectors with packed matrices, and attention over packed keys and values, on the CPU, computed from the codes.
//!
//! Decoding reads every weight once a token, so it takes as long as reading does: bits are speed. A lane is a row of the matrix
//! ([`kiln_simd`]). One vector meets codes as they are read from memory. For several vectors, the codes of sixteen rows are unpacked
//! once, to memory that stays in the first caches.
//!
//! In integers (`integers.rs`), vectors become signed bytes with a scale for each 32, and a product of two bytes is exact. In floats
//! (`floats.rs`), codes become float32.
//!
//! **Invariant:** a number of the result is one sum in one order. So its bits do not depend on how many vectors are multiplied
//! together, or on how rows are shared among threads.

pub mod attention;
mod floats;
mod formats;
pub mod functions;
mod groups;
mod integers;
pub mod threads;
mod tiles;

pub use self::groups::{Group, products_of_groups};
