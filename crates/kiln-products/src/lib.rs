//! Products of vectors with packed matrices, and attention of a few queries, on the CPU. Products with packed
//! numbers are computed from their codes.
//!
//! Decoding reads every weight once per token, so it takes as long as reading does: fewer bits are faster. A
//! lane is a row of the matrix ([`kiln_simd`]). Vectors are multiplied in tiles, by codes as they are read:
//! rows stay in the caches while the tiles pass by. Where registers are few and vectors are many, the codes
//! of sixteen rows are unpacked once.
//!
//! In integers (`integers.rs`), vectors become signed bytes with a scale for each 32, and a product of two
//! bytes is exact. In floats (`floats.rs`), codes become float32.
//!
//! **Invariant:** every number of the result is one sum in a fixed order. The bits therefore do not depend on
//! how many vectors are multiplied together, or on how rows are divided among threads.

pub mod attention;
mod floats;
mod formats;
pub mod functions;
mod groups;
mod integers;
pub mod threads;
mod tiles;
mod vectors;
mod widths;

pub use self::groups::{Group, products_of_groups};
