//! Comparison of formats with recordings of gguf and ggml (`tools/weights_cases.py`).

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::gguf::Gguf;
use crate::streams::Table;

static RECORDED: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/weights/formats.gguf"));

fn tensor(name: &str) -> &'static [u8] {
    let gguf = Gguf::read(&mut Cursor::new(RECORDED), RECORDED.len() as u64).expect("the recorded file");
    let range = gguf.tensor(name).expect(name).range.clone();
    &RECORDED[range.start as usize..range.end as usize]
}

fn floats(name: &str) -> Vec<f32> {
    unpacked(Format::F32, tensor(name))
}

fn unpacked(format: Format, bytes: &[u8]) -> Vec<f32> {
    let mut numbers = vec![0.0; bytes.len() / format.block_bytes() * format.block()];
    format.unpack(bytes, &mut numbers).expect("whole blocks");
    numbers
}

fn packed(format: Format, numbers: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; format.bytes_of(numbers.len()).expect("whole blocks")];
    format.pack(numbers, &mut bytes).expect("numbers that can be packed");
    bytes
}

#[test]
fn unpacking_equals_gguf_to_the_bit() {
    for format in Format::in_gguf() {
        let numbers = unpacked(format, tensor(&format!("{format}.blocks")));
        let expected = floats(&format!("{format}.numbers"));
        assert_eq!(numbers.len(), expected.len());
        for (at, (number, expected)) in numbers.iter().zip(expected).enumerate() {
            let same = number.to_bits() == expected.to_bits() || number.is_nan() && expected.is_nan();
            assert!(same, "{format}: number {at} is {number:e}, and gguf has {expected:e}");
        }
    }
}

#[test]
fn recorded_blocks_include_nan_and_negative_numbers() {
    for format in Format::in_gguf().filter(|&format| format != Format::Mxfp4) {
        let numbers = floats(&format!("{format}.numbers"));
        assert!(numbers.iter().any(|x| x.is_nan()), "{format}");
        assert!(numbers.iter().any(|x| x.is_finite() && *x < 0.0), "{format}");
    }
}

#[test]
fn packing_equals_ggml() {
    let numbers = floats("numbers");
    for format in Format::in_gguf() {
        let (bytes, expected) = (packed(format, &numbers), tensor(&format!("{format}.packed")));
        let blocks = bytes.chunks(format.block_bytes()).zip(expected.chunks(format.block_bytes()));
        for (block, (bytes, expected)) in blocks.enumerate() {
            match format.block() {
                // Codes of groups with a scale of 0 are meaningless. ggml leaves its last attempt there.
                256 => {
                    let (numbers, expected) = (unpacked(format, bytes), unpacked(format, expected));
                    assert_eq!(numbers, expected, "{format}: block {block}");
                }
                _ => assert_eq!(bytes, expected, "{format}: block {block}"),
            }
        }
    }
}

#[test]
fn a_format_is_found_by_its_name_and_its_number() {
    for format in Format::ALL {
        assert_eq!(Format::parse(format.name()).expect("its name"), format);
        assert_eq!(Format::parse(&format.name().to_uppercase()).expect("its name"), format);
        if let Some(number) = format.ggml_type() {
            assert_eq!(Format::of_ggml_type(number), Some(format));
        }
    }
    assert_eq!(Format::in_gguf().count(), 16);
    assert_eq!(Format::of_ggml_type(4), None);
    let error = Format::parse("q4_9").expect_err("no such format").to_string();
    assert!(error.starts_with("unknown number format `q4_9`; known: f32, f16, bf16, q4_0"), "{error}");
}

#[test]
fn sizes_are_those_of_whole_blocks() {
    assert_eq!(Format::Q4K.bytes_of(512), Some(288));
    assert_eq!(Format::Q4K.bytes_of(0), Some(0));
    assert_eq!(Format::Q4K.bytes_of(300), None);
    assert_eq!(Format::F32.bytes_of(usize::MAX), None);
    let error = Format::Q8_0.unpack(&[0; 34], &mut [0.0; 33]).expect_err("not a block").to_string();
    assert_eq!(error, "34 bytes do not hold 33 numbers in q8_0; each 32 numbers have 34 bytes");
    assert!(Format::Q8_0.pack(&[0.0; 32], &mut [0; 33]).is_err());
}

#[test]
fn numbers_that_are_not_finite_or_too_large_are_errors_before_writing() {
    for format in Format::ALL.into_iter().filter(|format| format.block() > 1) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = [0.5; 512];
            numbers[300] = bad;
            let mut bytes = vec![7; format.bytes_of(512).expect("whole blocks")];
            let error = format.pack(&numbers, &mut bytes).expect_err("not finite").to_string();
            assert!(error.starts_with("number 300 is "), "{error}");
            assert!(bytes.iter().all(|&byte| byte == 7), "{format}");
        }
    }
    let error = Format::Q4_0.pack(&[1e5; 32], &mut [0; 18]).expect_err("too large").to_string();
    assert_eq!(
        error,
        "number 0 is 1e5 and cannot be packed as q4_0, which takes numbers from -65504 to 65504; check the \
         weights, or keep them in f32"
    );
    assert_eq!(unpacked(Format::F16, &packed(Format::F16, &[1e30])), [f32::INFINITY]);
}

/// Generates numbers of all magnitudes that can be packed, in groups of similar magnitude.
fn numbers() -> impl Strategy<Value = Vec<f32>> {
    let group = (-30..16_i32, prop::collection::vec(-1.0..1.0_f32, 16))
        .prop_map(|(exponent, group)| group.into_iter().map(move |x| x * 2_f32.powi(exponent)));
    prop::collection::vec(group, 32).prop_map(|groups| groups.into_iter().flatten().collect())
}

proptest! {
    #[test]
    fn unpacking_any_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..1024)) {
        for format in Format::ALL {
            let blocks = bytes.len() / format.block_bytes();
            unpacked(format, &bytes[..blocks * format.block_bytes()]);
        }
    }

    /// A step is 1 / 15 or 1 / 255 of the range from the smallest to the largest number, extended to include
    /// 0. Rounding a code loses half a step, and rounding the zero point another half.
    #[test]
    fn integers_with_a_zero_point_lose_at_most_a_step(numbers in numbers()) {
        for (format, codes) in
            [(Format::Int4In32, 15.0), (Format::Int4In64, 15.0), (Format::Int4In128, 15.0), (Format::Int8, 255.0)]
        {
            let unpacked = unpacked(format, &packed(format, &numbers));
            for (numbers, unpacked) in numbers.chunks(format.block()).zip(unpacked.chunks(format.block())) {
                let (low, high) = numbers.iter().fold((0.0, 0.0), |(l, h): (f32, f32), x| (l.min(*x), h.max(*x)));
                let most = (high - low) / codes * (1.0 + 512.0 * f32::EPSILON);
                for (x, unpacked) in numbers.iter().zip(unpacked) {
                    prop_assert!((x - unpacked).abs() <= most, "{format}: {x} became {unpacked}");
                }
            }
        }
    }

    /// Each number becomes the nearest entry of the table, and the largest number stays unchanged.
    #[test]
    fn numbers_are_packed_as_the_nearest_entry_of_a_table(numbers in numbers()) {
        for (format, table) in [(Format::Nf4, Table::Nf4), (Format::Fp4, Table::Fp4)] {
            let unpacked = unpacked(format, &packed(format, &numbers));
            for (numbers, unpacked) in numbers.chunks(64).zip(unpacked.chunks(64)) {
                let largest = numbers.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
                for (x, unpacked) in numbers.iter().zip(unpacked) {
                    let distances = table.numbers().map(|entry| (entry * largest - x).abs());
                    let least = distances.into_iter().fold(f32::INFINITY, f32::min);
                    prop_assert!((x - unpacked).abs() <= least + largest * 4.0 * f32::EPSILON, "{format}: {x} became {unpacked}");
                }
            }
        }
    }

    /// Relative to the largest number, a step is 1 / 8 (Q4_0), 2 / 15 (Q4_1), 1 / 16 (Q5_0), 2 / 31 (Q5_1)
    /// and 1 / 127 (Q8_0). Rounding a code loses half a step. Q4_0 and Q5_0 have one code fewer on one side
    /// of 0, and lose a whole step there.
    ///
    /// Rounding scales and minimums to float16 loses 1 / 2048 of them, or half of the smallest float16. A
    /// scale is multiplied by up to `codes`, which gives at most twice the largest number, and a minimum is
    /// added once.
    #[test]
    fn blocks_of_32_lose_at_most_a_step(numbers in numbers()) {
        const LEAST_F16: f32 = 1.0 / 16_777_216.0;
        let losses = [
            (Format::Q4_0, 1.0 / 8.0, 8.0),
            (Format::Q4_1, 1.0 / 15.0, 15.0),
            (Format::Q5_0, 1.0 / 16.0, 16.0),
            (Format::Q5_1, 1.0 / 31.0, 31.0),
            (Format::Q8_0, 0.5 / 127.0, 127.0),
        ];
        for (format, loss, codes) in losses {
            let unpacked = unpacked(format, &packed(format, &numbers));
            for (numbers, unpacked) in numbers.chunks(32).zip(unpacked.chunks(32)) {
                let largest = numbers.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
                let by_scales = largest * 3.0 / 2048.0 + (codes + 1.0) * LEAST_F16 / 2.0;
                // Allowance for the few float32 sums and products.
                let most = (largest * loss + by_scales) * (1.0 + 8.0 * f32::EPSILON);
                for (x, unpacked) in numbers.iter().zip(unpacked) {
                    prop_assert!((x - unpacked).abs() <= most, "{format}: {x} became {unpacked}");
                }
            }
        }
    }

    #[test]
    fn blocks_do_not_depend_on_their_neighbours(numbers in numbers(), blocks in 0..17_usize) {
        for format in Format::ALL {
            let some = &numbers[..(blocks * format.block()).min(512)];
            let (whole, part) = (packed(format, &numbers), packed(format, some));
            prop_assert_eq!(&whole[..part.len()], &part, "{}", format);
            prop_assert_eq!(&unpacked(format, &whole)[..some.len()], unpacked(format, &part), "{}", format);
        }
    }

    #[test]
    fn packed_numbers_are_finite_when_unpacked(numbers in numbers()) {
        for format in Format::ALL {
            let unpacked = unpacked(format, &packed(format, &numbers));
            prop_assert!(unpacked.iter().all(|x| x.is_finite()), "{format}");
        }
    }
}
