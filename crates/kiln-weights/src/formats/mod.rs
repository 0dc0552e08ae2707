//! The layout of each format, one file for each family, and what all blocks share.
//!
//! Source of layouts in GGUF files: `ggml-common.h` and `ggml-quants.c` of ggml. Numbers of several bytes are little endian.

mod bits;
pub(crate) mod blocks_of_32;
pub(crate) mod k_quants;
pub(crate) mod plain;
pub(crate) mod pytorch;
mod search;
pub(crate) mod tables;

pub use tables::Table;

use half::f16;

use crate::streams::{Order, Parts, Streams};

/// The largest float16. Numbers up to it give scales that float16 holds.
const LARGEST_F16: f32 = 65504.0;

/// What a format is: constants and two functions.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    /// `None` of a format that GGUF files do not have
    pub(crate) ggml_type: Option<u32>,
    /// Numbers of a block
    pub(crate) block: usize,
    pub(crate) block_bytes: usize,
    /// The largest absolute value that can be packed; `None` where every value can, even one that is not finite
    pub(crate) largest: Option<f32>,
    /// Unpacks whole blocks
    pub(crate) unpack: fn(&[u8], &mut [f32]),
    /// Packs whole blocks
    pub(crate) pack: fn(&[f32], &mut [u8]),
    /// How blocks lie in words, where several numbers share one
    pub(crate) streams: Option<Streams>,
    /// Places rows of blocks in words
    pub(crate) arrange: fn(&Streams, &[&[u8]], Order, &mut [u8]),
}

impl Layout {
    /// The layout of blocks of `N` numbers in `B` bytes.
    const fn of<T: Block<N, B>, const N: usize, const B: usize>(
        name: &'static str,
        ggml_type: u32,
        streams: Option<Streams>,
    ) -> Self {
        Self { ggml_type: Some(ggml_type), ..Self::in_no_file::<T, N, B>(name, streams) }
    }

    /// The layout of blocks that GGUF files do not have.
    const fn in_no_file<T: Block<N, B>, const N: usize, const B: usize>(
        name: &'static str,
        streams: Option<Streams>,
    ) -> Self {
        Self {
            name,
            ggml_type: None,
            block: N,
            block_bytes: B,
            largest: Some(LARGEST_F16),
            unpack: |bytes, numbers| {
                for (block, numbers) in bytes.as_chunks().0.iter().zip(numbers.as_chunks_mut().0) {
                    T::read(block).unpack(numbers);
                }
            },
            pack: |numbers, bytes| {
                for (numbers, block) in numbers.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
                    T::pack(numbers).write(block);
                }
            },
            streams,
            arrange: |streams, rows, order, words| {
                streams.arrange(|block: &[u8; B]| T::read(block).parts(), rows, order, words);
            },
        }
    }
}

/// A block of `N` numbers in `B` bytes.
trait Block<const N: usize, const B: usize>: Fields<B> {
    fn unpack(&self, numbers: &mut [f32; N]);

    /// Packs numbers that are finite and not larger than [`Layout::largest`].
    fn pack(numbers: &[f32; N]) -> Self;

    fn parts(&self) -> Parts<N>;
}

/// Fills a longer array.
fn filled<const N: usize, const M: usize>(values: [u8; N]) -> [u8; M] {
    std::array::from_fn(|i| values.get(i).copied().unwrap_or(0))
}

/// A struct whose fields are the `B` bytes of a block.
trait Fields<const B: usize>: Sized {
    fn read(bytes: &[u8; B]) -> Self;
    fn write(&self, bytes: &mut [u8; B]);
}

/// Defines a block as a struct of its fields, in the order of its bytes.
macro_rules! fields {
    ($(#[$doc:meta])* struct $name:ident { $($(#[$field_doc:meta])* $field:ident: [u8; $len:literal],)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        struct $name {
            $($(#[$field_doc])* $field: [u8; $len],)*
        }

        impl $crate::formats::Fields<{ 0 $(+ $len)* }> for $name {
            fn read(bytes: &[u8; 0 $(+ $len)*]) -> Self {
                let mut rest = bytes.as_slice();
                $(let $field = $crate::formats::take(&mut rest);)*
                Self { $($field),* }
            }

            fn write(&self, bytes: &mut [u8; 0 $(+ $len)*]) {
                let mut rest = bytes.as_mut_slice();
                $($crate::formats::put(&mut rest, &self.$field);)*
            }
        }
    };
}
use fields;

/// Removes a field from the beginning of a block. The sizes come from [`fields`], so it is there.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let Some((field, behind)) = rest.split_first_chunk() else { return [0; N] };
    *rest = behind;
    *field
}

/// Writes a field to the beginning of what is left of a block.
fn put<const N: usize>(rest: &mut &mut [u8], field: &[u8; N]) {
    if let Some((place, behind)) = std::mem::take(rest).split_first_chunk_mut() {
        *place = *field;
        *rest = behind;
    }
}

fn widen(scale: [u8; 2]) -> f32 {
    f16::from_le_bytes(scale).to_f32()
}

fn narrow(scale: f32) -> [u8; 2] {
    f16::from_f32(scale).to_le_bytes()
}

/// The reciprocal of a scale, or 0 for a scale of 0.
fn inverse(scale: f32) -> f32 {
    match scale == 0.0 {
        true => 0.0,
        false => 1.0 / scale,
    }
}

/// The first of the numbers with the largest absolute value, or 0.
fn largest<const N: usize>(numbers: &[f32; N]) -> f32 {
    // In two steps, of which the first is vectorised. No number is NaN.
    let size = numbers.iter().fold(0.0, |size: f32, x| if x.abs() > size { x.abs() } else { size });
    numbers.iter().copied().find(|x| x.abs() == size).unwrap_or(0.0)
}
