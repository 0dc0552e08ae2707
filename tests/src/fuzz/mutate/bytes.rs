//! Mutations of arbitrary bytes.

use super::Random;

/// Maximum length of an input in bytes. Longer inputs find nothing that shorter ones do not.
const LONGEST: usize = 1 << 20;

const NUMBERS: [u64; 10] = [0, 1, 7, 0x7F, 0xFF, 0xFFFF, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX];

pub(super) fn mutated(bytes: &[u8], others: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..random.rounds() {
        let at = random.below(bytes.len() + 1);
        let end = (at + random.below(16)).min(bytes.len());
        match random.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next() as u8,
            2 => bytes.insert(at, random.next() as u8),
            3 => drop(bytes.drain(at..end)),
            4 => bytes.truncate(at),
            5 => {
                let copy = bytes[at..end].repeat(1 + random.below(40));
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            6 if !others.is_empty() => {
                let other = &others[random.below(others.len())];
                let from = random.below(other.len());
                bytes.splice(at.., other[from..].iter().copied());
            }
            7 => {
                let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
                let len = [1, 2, 4, 8][random.below(4)];
                let end = (at + len).min(bytes.len());
                bytes.splice(at..end, number[..len].iter().copied());
            }
            // Two bytes that are not valid UTF-8, or a character that is not displayed.
            _ => drop(
                bytes.splice(
                    at..at,
                    [&b"\xFF\xC0"[..], b"\x1b[2J", b"\0", b"\xE2\x80\xAE", b"\r\n"][random.below(5)]
                        .iter()
                        .copied(),
                ),
            ),
        }
    }
    bytes.truncate(LONGEST);
    bytes
}
