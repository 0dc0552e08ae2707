//! Attention of a few queries over keys and values. Packed ones are unpacked only in registers.

mod codes;
mod dense;
mod few;
mod keys;
mod segments;
mod values;

pub use self::{
    codes::{Codes, Layout, affine},
    dense::{Dense, Numbers},
    few::{Few, Source, attend},
};
