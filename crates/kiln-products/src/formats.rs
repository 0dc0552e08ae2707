//! What is known of each format when code is compiled for it.

use std::marker::PhantomData;

use kiln_simd::Lanes;
use kiln_weights::{
    Format,
    streams::{GroupScales, ScaleType, Streams},
};

/// Numbers in a run: those that share a scale in a vector.
pub(crate) const RUN: usize = 32;

/// Packed codes.
pub(crate) trait Packed: 'static {
    const STREAMS: Streams;

    /// A table of integers
    const INTEGERS: Option<&'static [i8; 16]> = match Self::STREAMS.table {
        Some(table) => table.integers(),
        None => None,
    };

    /// What a table's entries are increased by, to be bytes.
    const RAISED: u8 = match Self::INTEGERS {
        Some(table) if table[0] < -12 => 128,
        Some(_) => 12,
        None => 0,
    };

    /// What is subtracted from a byte.
    const OFFSET: i32 = (Self::STREAMS.offset + Self::RAISED) as i32;

    /// Whether bytes are larger than 127.
    const WIDE: bool = Self::OFFSET == 128 || Self::STREAMS.low == 8;

    /// The largest byte
    const LARGEST: usize = match Self::INTEGERS {
        Some(_) => largest(&Self::TABLE),
        None => (1 << (Self::STREAMS.low + Self::STREAMS.high)) - 1,
    };

    /// A table's entries as bytes.
    const TABLE: [u8; 16] = {
        let mut bytes = [0; 16];
        if let Some(table) = Self::INTEGERS {
            let mut i = 0;
            while i < 16 {
                bytes[i] = (table[i] as i16 + Self::RAISED as i16) as u8;
                i += 1;
            }
        }
        bytes
    };

    /// A table of floats
    const FLOATS: Option<[f32; 16]> = match (Self::STREAMS.table, Self::INTEGERS) {
        (Some(table), None) => Some(table.numbers()),
        _ => None,
    };

    /// Words of the scales of a block of sixteen rows, with the minimums in float16
    const WHOLE: usize = Self::STREAMS.parts()[4] * 4;

    /// Words of the scales of groups, or of zero points
    const SCALES: usize = Self::STREAMS.parts()[2] * 4;

    /// Words of the minimums of groups
    const MINIMUMS: usize = Self::STREAMS.parts()[3] * 4;

    /// Words of a block of sixteen rows.
    const WORDS: usize = Self::STREAMS.block_words();

    /// Runs of a block
    const RUNS: usize = Self::STREAMS.block / RUN;

    /// Groups of a run
    const GROUPS: usize = if Self::STREAMS.group < RUN { RUN / Self::STREAMS.group } else { 1 };

    const HAS_MINIMUM: bool = Self::STREAMS.has_minimum;

    /// Whether each row of a block has the code of the number 0
    const HAS_ZEROS: bool = matches!(Self::STREAMS.groups, GroupScales::Zeros);
}

const fn largest(bytes: &[u8; 16]) -> usize {
    let (mut largest, mut i) = (0, 0);
    while i < 16 {
        if bytes[i] as usize > largest {
            largest = bytes[i] as usize;
        }
        i += 1;
    }
    largest
}

/// Floats as they are.
pub(crate) trait Plain: 'static {
    /// The number of each row, for one column.
    type Column: bytemuck::Pod + Sync;

    fn floats<L: Lanes>(lanes: L, column: &Self::Column) -> L::Floats;
}

/// What is compiled for every format.
pub(crate) trait Visitor {
    /// Codes that are integers, or places in a table of integers
    fn packed<P: Packed>(self);
    /// Places in a table of floats
    fn looked_up<P: Packed>(self);
    fn plain<N: Plain>(self);
}

macro_rules! packed {
    ($($name:ident)*; $($table:ident)*) => {
        $(
            struct $name;

            impl Packed for $name {
                const STREAMS: Streams = match Format::$name.streams() {
                    Some(streams) => streams,
                    None => unreachable!(),
                };
            }
        )*

        $(
            struct $table;

            impl Packed for $table {
                const STREAMS: Streams = match Format::$table.streams() {
                    Some(streams) => streams,
                    None => unreachable!(),
                };
            }
        )*

        /// Calls the visitor with a format.
        pub(crate) fn visit(format: Format, visitor: impl Visitor) {
            match format {
                $(Format::$name => visitor.packed::<$name>(),)*
                $(Format::$table => visitor.looked_up::<$table>(),)*
                Format::F32 => visitor.plain::<F32>(),
                Format::F16 => visitor.plain::<F16>(),
                Format::Bf16 => visitor.plain::<Bf16>(),
            }
        }
    };
}

packed!(
    Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Iq4Nl Iq4Xs Mxfp4 Int4In32 Int4In64 Int4In128 Int8;
    Nf4 Fp4
);

struct F32;
struct F16;
struct Bf16;

impl Plain for F32 {
    type Column = [f32; 16];

    #[inline(always)]
    fn floats<L: Lanes>(lanes: L, column: &[f32; 16]) -> L::Floats {
        lanes.floats(column)
    }
}

impl Plain for F16 {
    type Column = [u16; 16];

    #[inline(always)]
    fn floats<L: Lanes>(lanes: L, column: &[u16; 16]) -> L::Floats {
        lanes.halves(column)
    }
}

impl Plain for Bf16 {
    type Column = [u16; 16];

    #[inline(always)]
    fn floats<L: Lanes>(lanes: L, column: &[u16; 16]) -> L::Floats {
        lanes.bfloats(column)
    }
}

/// A block of sixteen rows.
pub(crate) struct Block<'a> {
    whole: &'a [u32],
    scales: &'a [[u8; 16]],
    minimums: &'a [[u8; 16]],
    codes: &'a [[u32; 16]],
}

impl<'a> Block<'a> {
    /// A block of `P::WORDS` words.
    #[inline(always)]
    pub(crate) fn of<P: Packed>(words: &'a [u32]) -> Self {
        let (whole, words) = words.split_at(P::WHOLE);
        let (scales, words) = words.split_at(P::SCALES);
        let (minimums, codes) = words.split_at(P::MINIMUMS);
        Self {
            whole,
            scales: bytemuck::cast_slice(scales),
            minimums: bytemuck::cast_slice(minimums),
            codes: codes.as_chunks().0,
        }
    }

    /// The scale of the block, and its minimum or 0.
    #[inline(always)]
    pub(crate) fn whole<L: Lanes, P: Packed>(&self, lanes: L) -> [L::Floats; 2] {
        let halves: &[[u16; 16]] = bytemuck::cast_slice(self.whole);
        let scale = match P::STREAMS.scale {
            ScaleType::F16 => lanes.halves(&halves[0]),
            ScaleType::Bf16 => lanes.bfloats(&halves[0]),
            ScaleType::F32 => lanes.floats(&bytemuck::cast_slice::<u32, [f32; 16]>(self.whole)[0]),
        };
        let minimum = if P::HAS_MINIMUM { lanes.halves(&halves[1]) } else { lanes.splat(0.0) };
        match P::STREAMS.groups {
            GroupScales::One | GroupScales::Zeros => [scale, minimum],
            // It is subtracted.
            _ => [scale, lanes.mul(minimum, lanes.splat(-1.0))],
        }
    }

    /// The scale of a group and its minimum, from those of the block.
    #[inline(always)]
    pub(crate) fn of_group<L: Lanes, P: Packed>(
        &self,
        lanes: L,
        [scale, minimum]: [L::Floats; 2],
        group: usize,
    ) -> [L::Floats; 2] {
        match P::STREAMS.groups {
            GroupScales::One | GroupScales::Zeros => [scale, minimum],
            GroupScales::Signed => [lanes.mul(scale, lanes.signed_bytes(&self.scales[group])), minimum],
            GroupScales::Bytes => {
                let [s, m] = [lanes.bytes(&self.scales[group]), lanes.bytes(&self.minimums[group])];
                [lanes.mul(scale, s), lanes.mul(minimum, m)]
            }
            GroupScales::Nibbles => {
                let (mut low, mut high) = (self.scales[group], self.scales[group]);
                for lane in 0..16 {
                    low[lane] &= 15;
                    high[lane] >>= 4;
                }
                let [s, m] = [lanes.bytes(&low), lanes.bytes(&high)];
                [lanes.mul(scale, s), lanes.mul(minimum, m)]
            }
        }
    }

    /// What is added to a code: the code of the number 0, negative.
    #[inline(always)]
    pub(crate) fn zeros<L: Lanes, P: Packed>(&self, lanes: L) -> L::Floats {
        match P::HAS_ZEROS {
            true => lanes.mul(lanes.bytes(&self.scales[0]), lanes.splat(-1.0)),
            false => lanes.splat(-P::OFFSET as f32),
        }
    }

    /// Asks for the scales of the blocks that come.
    #[inline(always)]
    pub(crate) fn prefetch_scales<L: Lanes, P: Packed>(&self, lanes: L) {
        // Those of small blocks are in the lines of codes.
        if P::RUNS > 1 {
            lanes.prefetch(self.whole);
            lanes.prefetch(self.scales);
            lanes.prefetch(self.minimums);
        }
    }

    /// Asks for the codes of the runs that come.
    #[inline(always)]
    pub(crate) fn prefetch_codes<L: Lanes, P: Packed>(&self, lanes: L, run: usize) {
        let bits = P::STREAMS.low + P::STREAMS.high;
        lanes.prefetch(&self.codes[run * bits..(run + 1) * bits]);
    }

    /// The codes of a run.
    #[inline(always)]
    pub(crate) fn run<P: Packed>(&self, run: usize) -> CodesOfRun<'a, P> {
        let bits = P::STREAMS.low + P::STREAMS.high;
        CodesOfRun { words: &self.codes[run * bits..(run + 1) * bits], format: PhantomData }
    }
}

/// The codes of a run of sixteen rows, as they are packed.
pub(crate) struct CodesOfRun<'a, P> {
    words: &'a [[u32; 16]],
    format: PhantomData<P>,
}

impl<P: Packed> CodesOfRun<'_, P> {
    /// The codes `4 q` to `4 q + 3` of each row, as the bytes of its word.
    #[inline(always)]
    pub(crate) fn quad<L: Lanes>(&self, lanes: L, q: usize) -> L::Words {
        let (low, high) = self.words.split_at(P::STREAMS.low);
        let mut quad = match P::STREAMS.low {
            8 => lanes.words(&low[q]),
            4 => lanes.and(lanes.shift_right(lanes.words(&low[q % 4]), q as u32 / 4 * 4), 0x0f0f_0f0f),
            _ => lanes.and(lanes.shift_right(lanes.words(&low[q / 4]), q as u32 % 4 * 2), 0x0303_0303),
        };
        if P::STREAMS.high > 0 {
            let (word, right, mask) = match P::STREAMS.high {
                2 => (q / 4, q as u32 % 4 * 2, 0x0303_0303),
                _ => (0, q as u32, 0x0101_0101),
            };
            let bits = lanes.and(lanes.shift_right(lanes.words(&high[word]), right), mask);
            quad = lanes.or(quad, lanes.shift_left(bits, P::STREAMS.low as u32));
        }
        if P::INTEGERS.is_some() { lanes.look_up(&P::TABLE, quad) } else { quad }
    }
}
