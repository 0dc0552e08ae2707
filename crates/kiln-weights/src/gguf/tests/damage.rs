//! Damaged and malicious GGUF files.

use super::*;

/// Writes the parts of a header, valid or not.
#[derive(Default)]
struct Header(Vec<u8>);

impl Header {
    fn of(tensors: u64, entries: u64) -> Self {
        Self::default().bytes(b"GGUF").u32(3).u64(tensors).u64(entries)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn u32(self, n: u32) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    fn u64(self, n: u64) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    fn text(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    fn tensor(self, name: &str, dimensions: &[u64], ggml_type: u32, offset: u64) -> Self {
        let shape = self.text(name).u32(dimensions.len() as u32);
        dimensions.iter().fold(shape, |header, &size| header.u64(size)).u32(ggml_type).u64(offset)
    }

    /// Returns the error of a file with this header, followed by data.
    fn refused(mut self) -> String {
        self.0.resize(self.0.len().next_multiple_of(32) + 256, 0);
        read(&self.0).expect_err("a damaged file").to_string()
    }
}

#[track_caller]
fn assert_refused(header: Header, why: &str) {
    let error = header.refused();
    assert!(error.contains(why), "`{error}` does not say `{why}`");
}

#[test]
fn other_formats_and_versions_are_errors() {
    assert_refused(Header::default().bytes(b"GGML"), "it does not begin with `GGUF`");
    assert_refused(
        Header::default().bytes(b"GGUF").u32(1),
        "its version is 1, and those that are known are 2 and 3",
    );
    assert_refused(Header::default().bytes(b"GGUF").u32(4), "its version is 4");
    assert_refused(Header::default().bytes(b"GGUF").u32(3_u32.swap_bytes()), "its numbers are big-endian");
    assert!(read(b"GG").expect_err("too short").to_string().contains("does not begin with `GGUF`"));
    assert!(
        read(b"GGUF\x02\0")
            .expect_err("too short")
            .to_string()
            .contains("it ends, after 6 bytes, within the version")
    );
}

#[test]
fn gguf_version_2_is_read() {
    let header = Header::default().bytes(b"GGUF").u32(2).u64(0).u64(1).text("a").u32(8).text("b");
    let gguf = read(&header.0).expect("a file of version 2");
    assert_eq!(gguf.metadata().text("a").expect("a string"), Some("b"));
}

#[test]
fn impossible_counts_and_lengths_are_errors() {
    assert_refused(Header::of(65_537, 0), "it has 65537 tensors; at most 65536 are possible");
    assert_refused(Header::of(u64::MAX, 0), "tensors; at most");
    assert_refused(Header::of(0, 1 << 63), "9223372036854775808 metadata entries; at most");
    assert_refused(
        Header::of(0, 1).u64(1 << 63),
        "a metadata key has 9223372036854775808 bytes; at most 65536",
    );
    assert_refused(Header::of(0, 1).u64(65_000), "within a metadata key of 65000 bytes");
    let array = |value_type: u32, len: u64| Header::of(0, 1).text("a").u32(9).u32(value_type).u64(len);
    for value_type in (0..13).filter(|&value_type| value_type != 9) {
        assert_refused(
            array(value_type, 1 << 63),
            "within metadata `a`, an array of 9223372036854775808 values",
        );
        assert_refused(array(value_type, 1000), "within metadata `a`, an array of 1000 values");
    }
    // Each string has at least the 8 bytes of its length, and the file has fewer.
    assert_refused(array(8, 40), "an array of 40 values");
    assert_refused(
        Header::of(0, 1).text("a").u32(8).u64(1 << 63),
        "a metadata value of 9223372036854775808 bytes",
    );
    assert_refused(Header::of(1, 0).u64(70_000), "the name of a tensor has 70000 bytes; at most 65536");
}

/// Checks that a file that only claims to be large is refused: sizes are not trusted before their bytes were
/// read.
#[test]
fn huge_claimed_lengths_are_errors() {
    let text = Header::of(0, 1).text("a").u32(8).u64(1 << 26).0;
    let array = Header::of(0, 1).text("a").u32(9).u32(8).u64(1 << 23).0;
    for bytes in [text, array] {
        let error = Gguf::read(&mut Cursor::new(bytes), u64::MAX).expect_err("nothing is there");
        assert!(error.to_string().contains("more than 134217728 bytes"), "{error}");
    }
}

#[test]
fn impossible_metadata_is_an_error() {
    assert_refused(Header::of(0, 1).text(""), "a metadata key is empty");
    assert_refused(Header::of(0, 1).u64(2).bytes(&[0xFF, 0xFE]), "a metadata key is not UTF-8");
    assert_refused(Header::of(0, 1).text("a").u32(13), "metadata `a` has the type 13, which does not exist");
    assert_refused(Header::of(0, 1).text("a").u32(9).u32(77).u64(0), "an array of the type 77");
    assert_refused(Header::of(0, 1).text("a").u32(9).u32(9).u64(1), "metadata `a` is an array of arrays");
    let twice = Header::of(0, 2).text("a").u32(0).bytes(&[1]).text("a").u32(0).bytes(&[1]);
    assert_refused(twice, "metadata `a` is there twice");
    // A terminal would interpret it.
    assert_refused(Header::of(0, 1).text("\x1b[2J").u32(13), r"metadata `\u{1b}[2J` has the type 13");
    for (value_type, alignment) in [(4, 0), (4, 48), (5, 32)] {
        let header = Header::of(0, 1).text("general.alignment").u32(value_type).u32(alignment);
        assert_refused(header, "`general.alignment` must be a power of two");
    }
}

#[test]
fn impossible_tensors_are_errors() {
    let one =
        |dimensions: &[u64], ggml_type, offset| Header::of(1, 0).tensor("a", dimensions, ggml_type, offset);
    assert_refused(one(&[1, 1, 1, 1, 1], 0, 0), "tensor `a` has 5 dimensions; at most 4 are possible");
    assert_refused(one(&[4, 0], 0, 0), "tensor `a` has the shape [0, 4], which is empty");
    assert_refused(one(&[48, 2], 8, 0), "tensor `a` has 48 columns; q8_0 needs a multiple of 32");
    assert_refused(one(&[1 << 32, 1 << 32], 0, 0), "which is too large");
    assert_refused(one(&[1 << 62], 0, 0), "which is too large");
    assert_refused(one(&[u64::MAX], 0, 0), "which is too large");
    assert_refused(one(&[8], 0, u64::MAX), "tensor `a` begins at 18446744073709551615, which is too far");
    assert_refused(one(&[8], 0, u64::MAX - 63), "before tensor `a` does");
    assert_refused(
        one(&[8], 0, 16),
        "tensor `a` begins at byte 16 of the data, which is no multiple of the alignment 32",
    );
    assert_refused(one(&[256], 0, 0), "before tensor `a` does; get it again");
    assert_refused(
        one(&[256], 17, 0),
        "tensor `a` has the type iq2_xs, which is not supported; use a file with these types: f32, f16",
    );
    assert_refused(one(&[256], 1234, 0), "tensor `a` has the type 1234, which is not supported");
    let two = |first: &str, at: u64| Header::of(2, 0).tensor(first, &[16], 0, at).tensor("b", &[16], 0, 64);
    assert_refused(two("b", 0), "tensor `b` is there twice");
    assert_refused(two("a", 32), "tensors `a` and `b` overlap");
    assert_refused(two("a", 64), "tensors `a` and `b` overlap");
}

/// Checks the invariant of [`Gguf`].
fn check(gguf: &Gguf, len: u64) {
    let mut ranges: Vec<_> = gguf.tensors().iter().map(|tensor| tensor.range.clone()).collect();
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:?}");
    assert!(ranges.iter().all(|range| range.start < range.end && range.end <= len), "{ranges:?}");
}

proptest! {
    #[test]
    fn damaged_files_are_errors_or_consistent(
        (metadata, tensors) in files(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = written(&metadata, &tensors);
        let part = &bytes[..cut.index(bytes.len())];
        // The missing bytes can be padding after the last tensor.
        if let Ok(gguf) = read(part) {
            prop_assert_eq!(gguf.tensors().len(), tensors.len());
            check(&gguf, part.len() as u64);
        }
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if let Ok(gguf) = read(&bytes) {
            check(&gguf, bytes.len() as u64);
        }
    }

    #[test]
    fn random_bytes_are_errors_or_consistent(tensors in 0..3_u64, entries in 0..3_u64, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(gguf) = read(&Header::of(tensors, entries).bytes(&bytes).0) {
            check(&gguf, 24 + bytes.len() as u64);
        }
        prop_assert!(read(&bytes).is_err());
    }
}
