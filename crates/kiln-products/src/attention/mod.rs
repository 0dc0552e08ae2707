//! Attention of a few queries over packed keys and values, which are unpacked in registers alone.

mod codes;
mod few;
mod keys;
mod values;

pub use self::{
    codes::{Codes, Layout, affine},
    few::{Few, attend},
};
