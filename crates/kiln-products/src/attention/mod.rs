//! Attention of a few queries over packed keys and values, which are unpacked only in registers.

mod codes;
mod few;
mod keys;
mod values;

pub use self::{
    codes::{Codes, Layout, affine},
    few::{Few, attend},
};
