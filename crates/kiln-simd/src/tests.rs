//! Tests that every set of instructions of this machine gives the results of the portable code.

use crate::{Lanes, Work, portable::Portable};

/// All operations, on some numbers.
struct All;

impl Work for All {
    type Output = Vec<[f32; 16]>;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Vec<[f32; 16]> {
        let words: [u32; 16] = std::array::from_fn(|i| (i as u32 + 1).wrapping_mul(0x9e37_79b9));
        let halves: [u16; 16] =
            std::array::from_fn(|i| 0x0400 * i as u16 + 7 * i as u16 + 0x8000 * (i as u16 % 2));
        let bytes: [u8; 16] = std::array::from_fn(|i| 17 * i as u8);
        let floats: [f32; 16] = std::array::from_fn(|i| i as f32 * 0.37 - 3.0);
        let table: [u8; 16] = std::array::from_fn(|i| 255 - 16 * i as u8);
        let all = lanes.words(&words);
        let small = lanes.and(all, 0x7f7f_7f7f);
        let four = lanes.and(lanes.shift_right(all, 4), 0x0f0f_0f0f);
        let (start, x) = (lanes.integers(-1000), i32::from_le_bytes([127, 129, 1, 200]));
        // If 128 is not subtracted from the bytes, the correction is applied here.
        let sum = 128 * [127, -127, 1, -56].iter().sum::<i32>();
        let wide = lanes.integers(if L::SUBTRACTS_128 { 5 } else { 5 - sum });
        let number = lanes.floats(&floats);
        // The call changes nothing, and the memory ahead need not exist.
        lanes.prefetch(&floats);
        let results = [
            lanes.to_floats(lanes.dot(start, small, x)),
            lanes.to_floats(pairs(lanes, start, four, x)),
            lanes.to_floats(lanes.dot_wide(wide, all, x)),
            lanes.to_floats(lanes.or(lanes.shift_left(four, 3), lanes.look_up(&table, four))),
            lanes.to_floats(lanes.unzip(small, four)[0]),
            lanes.to_floats(lanes.unzip(small, four)[1]),
            lanes.pick(&floats, lanes.and(four, 15)),
            lanes.halves(&halves),
            lanes.bfloats(&halves),
            lanes.bytes(&bytes),
            lanes.signed_bytes(&bytes),
            lanes.add(lanes.mul(number, lanes.splat(0.5)), number),
            // Exact, so that rounding once or twice gives the same.
            lanes.mul_add(lanes.bytes(&bytes), lanes.splat(3.0), lanes.splat(-2.0)),
        ];
        let mut arrays: Vec<_> = results.map(|result| lanes.array(result)).into();
        arrays.push(lanes.word_array(four).map(|word| word as f32));
        let (rounded, sum) = lanes.rounded(lanes.mul(number, lanes.splat(20.5)));
        arrays.push(rounded.map(f32::from));
        let nan = lanes.splat(f32::NAN);
        let mut some_nan = floats;
        (some_nan[2], some_nan[3], some_nan[11]) = (f32::NAN, -f32::NAN, f32::NAN);
        let some_nan = lanes.floats(&some_nan);
        let (without_nan, sum_without) = lanes.rounded(some_nan);
        arrays.push(without_nan.map(f32::from));
        arrays.push([sum_without as f32 + lanes.largest([some_nan, lanes.splat(0.0)]); 16]);
        let largest = [[number, nan], [nan, number], [nan; 2]].map(|floats| lanes.largest(floats));
        arrays.push(std::array::from_fn(|i| [largest[0], largest[1], largest[2], sum as f32][i % 4]));
        let vectors = [number, lanes.halves(&halves), lanes.bytes(&bytes), lanes.splat(0.1)];
        arrays.push(std::array::from_fn(|i| lanes.sums(vectors)[i % 4]));
        arrays
    }
}

/// Eight products of four-bit numbers, whose pairs come close to the limit of 16 bits.
#[inline(always)]
fn pairs<L: Lanes>(lanes: L, start: L::Words, four: L::Words, x: i32) -> L::Words {
    assert!(L::LARGEST_PAIR == 0 || 8 * 254 * 15 <= L::LARGEST_PAIR);
    let mut pairs = lanes.no_pairs();
    for _ in 0..4 {
        pairs = lanes.add_pairs(lanes.add_pairs(pairs, four, x), lanes.integers(0x0f0f_0f0f), 0x7f7f_7f7f);
    }
    lanes.sum_pairs(start, pairs)
}

/// [`All`], in a function of its own.
struct Called;

impl Work for Called {
    type Output = Vec<[f32; 16]>;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Vec<[f32; 16]> {
        lanes.call(All)
    }
}

#[test]
fn instructions_compute_what_plain_code_does() {
    let want = All.run(Portable);
    assert_eq!(crate::run(All), want);
    assert_eq!(crate::run(Called), want);
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(lanes) = crate::x86::Avx2::<false>::detect() {
            assert_eq!(lanes.run(All), want);
        }
        if let Some(lanes) = crate::x86::Avx2::<true>::detect() {
            assert_eq!(lanes.run(All), want);
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        assert_eq!(crate::aarch64::Neon::<false>::detect().map(|lanes| lanes.run(All)), Some(want.clone()));
        if let Some(lanes) = crate::aarch64::Neon::<true>::detect() {
            assert_eq!(lanes.run(All), want);
        }
    }
}

#[test]
fn plain_code_computes_products_of_bytes() {
    // 1·127 + 2·(-127) + 3·1 + 4·(-1) = -128
    let bytes = u32::from_le_bytes([1, 2, 3, 4]);
    let x = i32::from_le_bytes([127, 129, 1, 255]);
    assert_eq!(Portable.dot([0; 16], [bytes; 16], x), [(-128i32).cast_unsigned(); 16]);
    // (1 - 128)·1 + (130 - 128)·3 = -121
    let bytes = u32::from_le_bytes([1, 130, 128, 128]);
    assert_eq!(Portable.dot_wide([0; 16], [bytes; 16], 0x0000_0301), [(-121i32).cast_unsigned(); 16]);
}

/// Conversion of float16 numbers.
struct Halves([u16; 16]);

impl Work for Halves {
    type Output = [f32; 16];

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> [f32; 16] {
        lanes.array(lanes.halves(&self.0))
    }
}

#[test]
fn every_float16_number_is_converted_exactly() {
    for first in (0..=u16::MAX).step_by(16) {
        let halves: [u16; 16] = std::array::from_fn(|i| first + i as u16);
        let wanted = halves.map(|bits| half::f16::from_bits(bits).to_f32());
        for floats in [Halves(halves).run(Portable), crate::run(Halves(halves))] {
            for (got, wanted) in floats.into_iter().zip(wanted) {
                assert!(
                    got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan(),
                    "{got} for {wanted}"
                );
            }
        }
    }
}
