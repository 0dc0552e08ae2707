//! Checks that numbers survive the arrangement in words bit for bit.

use super::*;

#[test]
fn arranged_weights_unpack_to_the_numbers_of_the_file() {
    for format in Format::ALL {
        let columns = 512;
        for rows in [1, 16, 37] {
            // Every bit pattern of codes and scales, except scales that are not finite, which equal nothing.
            let mut state = 7u32;
            let mut bytes: Vec<u8> = (0..rows * format.bytes_of(columns).unwrap_or(0))
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            let mut want = vec![0.0; rows * columns];
            format.unpack(&bytes, &mut want).expect("they fit");
            for block in bytes.chunks_mut(format.block_bytes()) {
                let mut numbers = vec![0.0; format.block()];
                format.unpack(block, &mut numbers).expect("they fit");
                if numbers.iter().any(|number| !number.is_finite()) {
                    block.fill(1);
                }
            }
            format.unpack(&bytes, &mut want).expect("they fit");
            for order in [Order::Rows, Order::Sixteens] {
                let len = format.words(order, rows, columns).expect("whole blocks");
                let mut words = vec![0; len * 4];
                format.arrange(order, columns, &bytes, &mut words).expect("they fit");
                let numbers = format.numbers_of_rows(order, columns, &words, 0..rows).expect("they fit");
                for (i, (got, want)) in numbers.iter().zip(&want).enumerate() {
                    assert_eq!(
                        got.to_bits(),
                        want.to_bits(),
                        "{format} {order:?} {rows}: number {i}: {got}, {want}"
                    );
                }
            }
            // At most four percent more bytes than the file has, or a byte per block; then whole 16 bytes.
            let file = format.bytes_of(columns).unwrap_or(0);
            let words = format.words(Order::Rows, 1, columns).expect("whole blocks");
            let most = (file + (file / 25).max(columns / format.block()) + 4).next_multiple_of(16);
            assert!(words * 4 <= most && words.is_multiple_of(4), "{format}");
        }
    }
}

#[test]
fn mismatched_lengths_are_errors() {
    for format in [Format::Q4_0, Format::Q6K] {
        let bytes = vec![0; format.bytes_of(512).unwrap_or(0)];
        let mut words = vec![0; 4 * format.words(Order::Rows, 1, 512).unwrap_or(0)];
        assert!(format.arrange(Order::Rows, 512, &bytes, &mut words[4..]).is_err());
        assert!(format.arrange(Order::Rows, 500, &bytes, &mut words).is_err());
        assert!(format.numbers_of_rows(Order::Rows, 512, &words, [1]).is_err());
        assert!(format.numbers_of_rows(Order::Rows, 0, &words, [0]).is_err());
    }
    assert_eq!(Format::F16.words(Order::Rows, 1, 511), None);
}
