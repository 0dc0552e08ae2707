//! Properties of each weight format that are known at compile time, and access to its blocks of sixteen rows
//! ([`Order::Sixteens`](kiln_weights::streams::Order::Sixteens)).

use std::marker::PhantomData;

use kiln_simd::Lanes;
use kiln_weights::{
    Format,
    streams::{GroupScales, ScaleType, Streams},
};

/// Number of elements in a run. The vector that weights are multiplied by has a scale per run.
pub(crate) const RUN: usize = 32;

/// A format of packed codes. Sizes are those of a block of sixteen rows, in words of 32 bits.
pub(crate) trait Packed: 'static {
    const STREAMS: Streams;

    /// The table that codes are indices into, if all its entries are integers.
    const INTEGERS: Option<&'static [i8; 16]> = match Self::STREAMS.table {
        Some(table) => table.integers(),
        None => None,
    };

    /// Amount that is added to the entries of a table of integers, so that they are unsigned bytes: the
    /// smallest entry is at least -128 (IQ4_NL and IQ4_XS), or -12 (MXFP4).
    const RAISED: u8 = match Self::INTEGERS {
        Some(table) if table[0] < -12 => 128,
        Some(_) => 12,
        None => 0,
    };

    /// Amount that is subtracted from a byte, the code or its entry in [`TABLE`](Self::TABLE), before it is
    /// scaled.
    const OFFSET: i32 = (Self::STREAMS.offset + Self::RAISED) as i32;

    /// Whether bytes may be larger than 127, so that products need [`Lanes::dot_wide`].
    const WIDE: bool = Self::OFFSET == 128 || Self::STREAMS.low == 8;

    /// Largest value of a byte.
    const LARGEST: usize = match Self::INTEGERS {
        Some(_) => largest(&Self::TABLE),
        None => (1 << (Self::STREAMS.low + Self::STREAMS.high)) - 1,
    };

    /// The entries of the table of integers as unsigned bytes: increased by [`RAISED`](Self::RAISED).
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

    /// The table that codes are indices into, if its entries are not integers.
    const FLOATS: Option<[f32; 16]> = match (Self::STREAMS.table, Self::INTEGERS) {
        (Some(table), None) => Some(table.numbers()),
        _ => None,
    };

    /// Number of words for the scales of the whole block, one per row, including float16 minimums.
    const WHOLE: usize = Self::STREAMS.parts()[4] * 4;

    /// Number of words for the scales of groups, or for zero points.
    const SCALES: usize = Self::STREAMS.parts()[2] * 4;

    /// Number of words for the minimums of groups.
    const MINIMUMS: usize = Self::STREAMS.parts()[3] * 4;

    /// Number of words in the block.
    const WORDS: usize = Self::STREAMS.block_words();

    /// Number of runs per block.
    const RUNS: usize = Self::STREAMS.block / RUN;

    /// Number of groups per run.
    const GROUPS: usize = if Self::STREAMS.group < RUN { RUN / Self::STREAMS.group } else { 1 };

    /// Whether each row of a block has a minimum beside its scale.
    const HAS_MINIMUM: bool = Self::STREAMS.has_minimum;

    /// Whether each row of a block has a zero point, the code of the number 0.
    const HAS_ZEROS: bool = matches!(Self::STREAMS.groups, GroupScales::Zeros);
}

/// Returns the largest of the bytes.
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

/// A format of unpacked floats.
pub(crate) trait Plain: 'static {
    /// A number, or its bits.
    type Number: bytemuck::Pod + Default + Sync;

    /// Converts sixteen numbers to float32.
    fn floats<L: Lanes>(lanes: L, numbers: &[Self::Number; 16]) -> L::Floats;
}

/// A computation that is compiled for every format; [`visit`] selects the one for a given format.
pub(crate) trait Visitor {
    /// Visits a format whose codes are integers, or indices into a table of integers.
    fn packed<P: Packed>(self);
    /// Visits a format whose codes are indices into a table of floats.
    fn looked_up<P: Packed>(self);
    /// Visits a format of unpacked floats.
    fn plain<N: Plain>(self);
}

/// Implements [`Packed`] for formats of integers, or tables of integers; and, after the semicolon, for those
/// with tables of floats. Defines [`visit`].
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

        /// Calls the method of `visitor` for `format`, with the type that implements it.
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

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct Bf16;

impl Plain for F32 {
    type Number = f32;

    #[inline(always)]
    fn floats<L: Lanes>(lanes: L, numbers: &[f32; 16]) -> L::Floats {
        lanes.floats(numbers)
    }
}

impl Plain for F16 {
    type Number = u16;

    #[inline(always)]
    fn floats<L: Lanes>(lanes: L, numbers: &[u16; 16]) -> L::Floats {
        lanes.halves(numbers)
    }
}

impl Plain for Bf16 {
    type Number = u16;

    #[inline(always)]
    fn floats<L: Lanes>(lanes: L, numbers: &[u16; 16]) -> L::Floats {
        lanes.bfloats(numbers)
    }
}

/// A block of sixteen rows, one per lane.
pub(crate) struct Block<'a> {
    /// Scales of the rows, then their minimums, if there are any.
    whole: &'a [u32],
    /// Scale, or zero point, of each group: `[groups][rows]`.
    scales: &'a [[u8; 16]],
    /// Minimum of each group: `[groups][rows]`.
    minimums: &'a [[u8; 16]],
    /// Words of the codes of each run: `[runs · bits][rows]`, low bits before high bits.
    codes: &'a [[u32; 16]],
}

impl<'a> Block<'a> {
    /// Splits a block of `P::WORDS` words into its parts.
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

    /// Returns the scale of each row, and its minimum, or 0 if there is none.
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
            // Callers add minimums, and formats with several groups subtract them.
            _ => [scale, lanes.mul(minimum, lanes.splat(-1.0))],
        }
    }

    /// Returns the scale of a group in each row and its minimum, given those of the [whole](Self::whole)
    /// block.
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

    /// Returns the number that is added to the codes of each row: minus the zero point, or minus
    /// [`OFFSET`](Packed::OFFSET).
    #[inline(always)]
    pub(crate) fn zeros<L: Lanes, P: Packed>(&self, lanes: L) -> L::Floats {
        match P::HAS_ZEROS {
            true => lanes.mul(lanes.bytes(&self.scales[0]), lanes.splat(-1.0)),
            false => lanes.splat(-P::OFFSET as f32),
        }
    }

    /// Prefetches the scales of later blocks ([`Lanes::prefetch`]).
    #[inline(always)]
    pub(crate) fn prefetch_scales<L: Lanes, P: Packed>(&self, lanes: L) {
        // The scales of small blocks are in the cache lines of codes.
        if P::RUNS > 1 {
            lanes.prefetch(self.whole);
            lanes.prefetch(self.scales);
            lanes.prefetch(self.minimums);
        }
    }

    /// Prefetches the codes of later runs ([`Lanes::prefetch`]).
    #[inline(always)]
    pub(crate) fn prefetch_codes<L: Lanes, P: Packed>(&self, lanes: L, run: usize) {
        let bits = P::STREAMS.low + P::STREAMS.high;
        lanes.prefetch(&self.codes[run * bits..(run + 1) * bits]);
    }

    /// Returns the codes of a run.
    #[inline(always)]
    pub(crate) fn run<P: Packed>(&self, run: usize) -> CodesOfRun<'a, P> {
        let bits = P::STREAMS.low + P::STREAMS.high;
        CodesOfRun { words: &self.codes[run * bits..(run + 1) * bits], format: PhantomData }
    }
}

/// The packed codes of a run of sixteen rows.
pub(crate) struct CodesOfRun<'a, P> {
    words: &'a [[u32; 16]],
    format: PhantomData<P>,
}

impl<P: Packed> CodesOfRun<'_, P> {
    /// Returns quad `q`: codes `4 q` to `4 q + 3` of each row, or their entries in a table of integers, as
    /// the four bytes of the row's word.
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
