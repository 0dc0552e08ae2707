//! The layouts of all formats, one file per family, and the code that all blocks share.
//!
//! Source of layouts in GGUF files: `ggml-common.h` and `ggml-quants.c` of ggml. Multi-byte numbers are
//! little endian.

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

/// The largest float16. Numbers up to this limit have scales that float16 can hold.
const LARGEST_F16: f32 = 65504.0;

/// The description of a format: constants and functions.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    /// Number in `enum ggml_type`; `None` for a format that GGUF files do not have.
    pub(crate) ggml_type: Option<u32>,
    /// Numbers per block.
    pub(crate) block: usize,
    pub(crate) block_bytes: usize,
    /// The largest absolute value that can be packed; `None` if every value can be, even one that is not
    /// finite.
    pub(crate) largest: Option<f32>,
    /// Unpacks whole blocks.
    pub(crate) unpack: fn(&[u8], &mut [f32]),
    /// Packs whole blocks.
    pub(crate) pack: fn(&[f32], &mut [u8]),
    /// The arrangement of blocks in words, for formats whose words hold several numbers.
    pub(crate) streams: Option<Streams>,
    /// Arranges rows of blocks into words.
    pub(crate) arrange: fn(&Streams, &[&[u8]], Order, &mut [u8]),
}

impl Layout {
    /// Creates the layout of blocks with `N` numbers in `B` bytes.
    const fn of<T: Block<N, B>, const N: usize, const B: usize>(
        name: &'static str,
        ggml_type: u32,
        streams: Option<Streams>,
    ) -> Self {
        Self { ggml_type: Some(ggml_type), ..Self::in_no_file::<T, N, B>(name, streams) }
    }

    /// Creates the layout of blocks that GGUF files do not have.
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

    /// Packs finite numbers whose absolute values are at most [`Layout::largest`].
    fn pack(numbers: &[f32; N]) -> Self;

    fn parts(&self) -> Parts<N>;
}

/// Extends an array with zeros.
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

/// Removes a field from the beginning of a block. The sizes come from [`fields`], so the bytes are there.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let Some((field, behind)) = rest.split_first_chunk() else { return [0; N] };
    *rest = behind;
    *field
}

/// Writes a field to the beginning of the rest of a block.
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

/// Returns the reciprocal of a scale, or 0 for a scale of 0.
fn inverse(scale: f32) -> f32 {
    match scale == 0.0 {
        true => 0.0,
        false => 1.0 / scale,
    }
}

/// Returns the first number with the largest absolute value, or 0.
fn largest<const N: usize>(numbers: &[f32; N]) -> f32 {
    // In two steps, the first of which is vectorised. No number is NaN.
    let size = numbers.iter().fold(0.0, |size: f32, x| if x.abs() > size { x.abs() } else { size });
    numbers.iter().copied().find(|x| x.abs() == size).unwrap_or(0.0)
}
