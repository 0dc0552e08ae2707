//! Reader for the header of a GGUF file. It trusts nothing in the file.
//!
//! **Invariant:** no allocation has a size that only the file claims. Memory grows with the bytes that were
//! read.

use std::collections::HashSet;
use std::io::{BufReader, Read};

use super::tensor::{DIMENSIONS, bytes_of};
use super::{Array, LONGEST_NAME, MOST_TENSORS, Metadata, TensorInfo, Value, damaged, shown};
use crate::{Error, Format};

/// Maximum size of metadata and table in bytes. A model with 256,000 tokens has about 20 MB.
const LARGEST_HEADER: u64 = 128 << 20;
const MOST_ENTRIES: u64 = 1 << 16;
/// Number of bytes of a text to read before allocating memory for more.
const PIECE: usize = 64 << 10;

/// Reads consecutive values, and keeps track of the bytes that may still be read.
pub(super) struct Reader<R> {
    file: BufReader<R>,
    position: u64,
    /// Upper limit for the end of the header.
    end: u64,
    /// Length of the file.
    len: u64,
}

impl<R: Read> Reader<R> {
    /// Creates a reader for a file of `len` bytes. `file` must be at its beginning.
    pub(super) fn new(file: R, len: u64) -> Self {
        Self { file: BufReader::new(file), position: 0, end: len.min(LARGEST_HEADER), len }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Reads and checks the version, and returns the numbers of tensors and of entries.
    pub(super) fn counts(&mut self) -> Result<(u64, u64), Error> {
        let unsupported = |why: &str| Err(Error::Unsupported(why.to_owned()));
        match self.array("the beginning of the file") {
            Ok([b'G', b'G', b'U', b'F']) => {}
            Ok(_) | Err(Error::Damaged(_)) => return unsupported("it does not begin with `GGUF`"),
            Err(error) => return Err(error),
        }
        match u32::from_le_bytes(self.array("the version")?) {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=3) => {
                return unsupported(
                    "its numbers are big-endian; convert it with gguf_convert_endian.py of llama.cpp",
                );
            }
            version => {
                return unsupported(&format!(
                    "its version is {version}, and those that are known are 2 and 3; make it again with the current \
                     convert_hf_to_gguf.py of llama.cpp"
                ));
            }
        }
        let tensors = self.count("tensors", MOST_TENSORS)?;
        let entries = self.count("metadata entries", MOST_ENTRIES)?;
        Ok((tensors, entries))
    }

    pub(super) fn metadata(&mut self, entries: u64) -> Result<Metadata, Error> {
        let mut metadata = Metadata::new();
        for _ in 0..entries {
            let key = self.string("a metadata key", LONGEST_NAME)?;
            if key.is_empty() {
                return Err(damaged("a metadata key is empty".to_owned()));
            }
            let value = self.value(&key)?;
            if metadata.contains(&key) {
                return Err(damaged(format!("metadata {} is there twice", shown(&key))));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    /// Reads the table of tensors. Ranges are relative to the first byte after the header.
    pub(super) fn tensors(&mut self, count: u64) -> Result<Vec<TensorInfo>, Error> {
        let mut names = HashSet::new();
        let mut tensors = Vec::new();
        for _ in 0..count {
            let name = self.string("the name of a tensor", LONGEST_NAME)?;
            if !names.insert(name.clone()) {
                return Err(damaged(format!("tensor {} is there twice", shown(&name))));
            }
            tensors.push(self.tensor(name)?);
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: String) -> Result<TensorInfo, Error> {
        let dimensions = u32::from_le_bytes(self.array("the shape of a tensor")?);
        if dimensions as usize > DIMENSIONS {
            let name = shown(&name);
            return Err(damaged(format!(
                "tensor {name} has {dimensions} dimensions; at most {DIMENSIONS} are possible"
            )));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = u64::from_le_bytes(self.array("the shape of a tensor")?);
            // A size that does not fit is too large for any tensor, too.
            shape.push(usize::try_from(size).unwrap_or(usize::MAX));
        }
        shape.reverse();
        let ggml_type = u32::from_le_bytes(self.array("the format of a tensor")?);
        let Some(format) = Format::of_ggml_type(ggml_type) else {
            return Err(Error::Unsupported(format!(
                "tensor {} has the type {}, which is not supported; use a file with these types: {}",
                shown(&name),
                type_name(ggml_type),
                Format::in_gguf().map(Format::name).collect::<Vec<_>>().join(", ")
            )));
        };
        let offset = u64::from_le_bytes(self.array("the place of a tensor")?);
        let bytes =
            bytes_of(&shape, format).map_err(|why| damaged(format!("tensor {} {why}", shown(&name))))?;
        let end = offset.checked_add(bytes);
        let end = end.ok_or_else(|| {
            damaged(format!("tensor {} begins at {offset}, which is too far", shown(&name)))
        })?;
        Ok(TensorInfo { name, shape, format, range: offset..end })
    }

    fn value(&mut self, key: &str) -> Result<Value, Error> {
        const VALUE: &str = "a metadata value";
        let value = match u32::from_le_bytes(self.array("the type of a metadata value")?) {
            0 => Value::U8(u8::from_le_bytes(self.array(VALUE)?)),
            1 => Value::I8(i8::from_le_bytes(self.array(VALUE)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(VALUE)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(VALUE)?)),
            4 => Value::U32(u32::from_le_bytes(self.array(VALUE)?)),
            5 => Value::I32(i32::from_le_bytes(self.array(VALUE)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(VALUE)?)),
            7 => Value::Bool(self.array(VALUE)? != [0]),
            8 => Value::String(self.string(VALUE, u64::MAX)?),
            9 => Value::Array(self.values(key)?),
            10 => Value::U64(u64::from_le_bytes(self.array(VALUE)?)),
            11 => Value::I64(i64::from_le_bytes(self.array(VALUE)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(VALUE)?)),
            other => {
                return Err(damaged(format!(
                    "metadata {} has the type {other}, which does not exist",
                    shown(key)
                )));
            }
        };
        Ok(value)
    }

    fn values(&mut self, key: &str) -> Result<Array, Error> {
        let value_type = u32::from_le_bytes(self.array("the type of an array")?);
        let len = u64::from_le_bytes(self.array("the length of an array")?);
        let array = match value_type {
            0 => Array::U8(self.numbers(len, key, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(len, key, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(len, key, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(len, key, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(len, key, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(len, key, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(len, key, f32::from_le_bytes)?),
            7 => Array::Bool(self.numbers(len, key, |byte| byte != [0])?),
            8 => Array::String(self.strings(len, key)?),
            9 => {
                let why = format!("metadata {} is an array of arrays, which is not supported", shown(key));
                return Err(Error::Unsupported(why));
            }
            10 => Array::U64(self.numbers(len, key, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(len, key, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(len, key, f64::from_le_bytes)?),
            other => {
                return Err(damaged(format!(
                    "metadata {} is an array of the type {other}, which does not exist",
                    shown(key)
                )));
            }
        };
        Ok(array)
    }

    fn numbers<T, const N: usize>(
        &mut self,
        len: u64,
        key: &str,
        read: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        self.check_len(len, N as u64, key)?;
        (0..len).map(|_| Ok(read(self.array("an array of the metadata")?))).collect()
    }

    fn strings(&mut self, len: u64, key: &str) -> Result<Vec<String>, Error> {
        // Each string begins with its length.
        self.check_len(len, size_of::<u64>() as u64, key)?;
        (0..len).map(|_| self.string("an array of the metadata", u64::MAX)).collect()
    }

    fn check_len(&self, len: u64, smallest: u64, key: &str) -> Result<(), Error> {
        match len.checked_mul(smallest).is_some_and(|bytes| bytes <= self.end - self.position) {
            true => Ok(()),
            false => Err(self.ends_in(&format!("metadata {}, an array of {len} values", shown(key)))),
        }
    }

    fn count(&mut self, what: &str, most: u64) -> Result<u64, Error> {
        let count = u64::from_le_bytes(self.array(&format!("the number of {what}"))?);
        match count <= most {
            true => Ok(count),
            false => Err(damaged(format!("it has {count} {what}; at most {most} are possible"))),
        }
    }

    fn string(&mut self, what: &str, longest: u64) -> Result<String, Error> {
        let len = u64::from_le_bytes(self.array(what)?);
        if len > longest {
            return Err(damaged(format!("{what} has {len} bytes; at most {longest} are possible")));
        }
        if len > self.end - self.position {
            return Err(self.ends_in(&format!("{what} of {len} bytes")));
        }
        let mut bytes = Vec::new();
        let mut missing = len as usize;
        while missing > 0 {
            let piece = missing.min(PIECE);
            let start = bytes.len();
            bytes.resize(start + piece, 0);
            self.fill(&mut bytes[start..], what)?;
            missing -= piece;
        }
        String::from_utf8(bytes).map_err(|error| {
            let text = String::from_utf8_lossy(error.as_bytes());
            damaged(format!("{what} is not UTF-8: {}", shown(&text)))
        })
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Result<(), Error> {
        if bytes.len() as u64 > self.end - self.position {
            return Err(self.ends_in(what));
        }
        match self.file.read_exact(bytes) {
            Ok(()) => self.position += bytes.len() as u64,
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Err(self.ends_in(what)),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Returns the error for a value that extends beyond the end.
    fn ends_in(&self, what: &str) -> Error {
        match self.end < self.len {
            true => Error::Unsupported(format!("its metadata has more than {LARGEST_HEADER} bytes")),
            false => damaged(format!("it ends, after {} bytes, within {what}", self.len)),
        }
    }
}

/// Returns ggml's current or former name for an unsupported type.
fn type_name(ggml_type: u32) -> String {
    const NAMES: [(u32, &str); 27] = [
        (4, "q4_2"),
        (5, "q4_3"),
        (9, "q8_1"),
        (15, "q8_k"),
        (16, "iq2_xxs"),
        (17, "iq2_xs"),
        (18, "iq3_xxs"),
        (19, "iq1_s"),
        (21, "iq3_s"),
        (22, "iq2_s"),
        (24, "i8"),
        (25, "i16"),
        (26, "i32"),
        (27, "i64"),
        (28, "f64"),
        (29, "iq1_m"),
        (31, "q4_0_4_4"),
        (32, "q4_0_4_8"),
        (33, "q4_0_8_8"),
        (34, "tq1_0"),
        (35, "tq2_0"),
        (36, "iq4_nl_4_4"),
        (37, "iq4_nl_4_8"),
        (38, "iq4_nl_8_8"),
        (40, "nvfp4"),
        (41, "q1_0"),
        (42, "q2_0"),
    ];
    match NAMES.iter().find(|(known, _)| *known == ggml_type) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("{ggml_type}"),
    }
}
