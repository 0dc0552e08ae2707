//! Writer for GGUF files, version 3, in one pass.

use std::collections::{HashSet, VecDeque};
use std::io::Write;

use super::tensor::{aligned, bytes_of};
use super::{Array, LONGEST_NAME, MOST_TENSORS, Metadata, Value, alignment, shown};
use crate::{Error, Format};

const VERSION: u32 = 3;

/// Maximum length of a tensor's name in bytes, by the specification. llama.cpp refuses longer ones.
const LONGEST_TENSOR_NAME: usize = 63;

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    pub name: String,
    /// Sizes with rows before columns, as in PyTorch.
    pub shape: Vec<usize>,
    pub format: Format,
}

/// A writer for a GGUF file: the header first, then the tensors in order, as their bytes become available.
#[derive(Debug)]
pub struct GgufWriter<W> {
    file: W,
    alignment: u64,
    /// Number of missing bytes of each incomplete tensor.
    missing: VecDeque<u64>,
    written: u64,
}

impl<W: Write> GgufWriter<W> {
    /// Writes the header. Tensors are aligned to 32 bytes, or to `general.alignment` of the metadata.
    ///
    /// # Errors
    /// [`Error::Unwritable`] for names that are too long or not unique and for impossible shapes,
    /// [`Error::Metadata`] for an impossible alignment, and [`Error::Io`].
    pub fn new(file: W, metadata: &Metadata, tensors: &[NewTensor]) -> Result<Self, Error> {
        let alignment = alignment(metadata)?;
        if tensors.len() as u64 > MOST_TENSORS {
            let why = format!("it has {} tensors; at most {MOST_TENSORS} are possible", tensors.len());
            return Err(Error::Unwritable(why));
        }
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata.iter() {
            if key.is_empty() || key.len() as u64 > LONGEST_NAME {
                return Err(Error::Unwritable(format!(
                    "the metadata key {} is empty or too long",
                    shown(key)
                )));
            }
            put_string(&mut header, key);
            put_value(&mut header, value);
        }
        let missing = put_table(&mut header, tensors, alignment)?;
        let mut writer = Self { file, alignment, missing, written: 0 };
        writer.put(&header)?;
        writer.pad()?;
        Ok(writer)
    }

    /// Writes the next bytes of the first incomplete tensor.
    ///
    /// # Errors
    /// [`Error::Unwritable`] for more bytes than the tensor has; nothing is written in that case.
    /// [`Error::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let missing = self.missing.front().copied().unwrap_or(0);
        let Some(left) = missing.checked_sub(bytes.len() as u64) else {
            let why = format!("{} bytes are given, and the tensor has only {missing} more", bytes.len());
            return Err(Error::Unwritable(why));
        };
        self.put(bytes)?;
        match left {
            0 => {
                self.missing.pop_front();
                self.pad()
            }
            _ => {
                self.missing.front_mut().into_iter().for_each(|missing| *missing = left);
                Ok(())
            }
        }
    }

    /// Completes the file and returns the underlying writer.
    ///
    /// # Errors
    /// [`Error::Unwritable`] if bytes of a tensor are missing, and [`Error::Io`].
    pub fn finish(mut self) -> Result<W, Error> {
        match self.missing.len() {
            0 => {
                self.file.flush()?;
                Ok(self.file)
            }
            tensors => Err(Error::Unwritable(format!("{tensors} tensors are not complete"))),
        }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self) -> Result<(), Error> {
        let padding = aligned(self.written, self.alignment).map_or(0, |end| end - self.written);
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), padding), &mut self.file)?;
        self.written += padding;
        Ok(())
    }
}

/// Appends the table of tensors. Returns the size of each in bytes.
fn put_table(header: &mut Vec<u8>, tensors: &[NewTensor], alignment: u64) -> Result<VecDeque<u64>, Error> {
    let mut sizes = VecDeque::new();
    let mut names = HashSet::new();
    let mut offset = 0_u64;
    for NewTensor { name, shape, format } in tensors {
        let unwritable = |why: &str| Error::Unwritable(format!("tensor {} {why}", shown(name)));
        if name.len() > LONGEST_TENSOR_NAME {
            return Err(unwritable(&format!("has a name of more than {LONGEST_TENSOR_NAME} bytes")));
        }
        if !names.insert(name) {
            return Err(unwritable("is there twice"));
        }
        let bytes = bytes_of(shape, *format).map_err(|why| unwritable(&why))?;
        put_string(header, name);
        header.extend((shape.len() as u32).to_le_bytes());
        for &size in shape.iter().rev() {
            header.extend((size as u64).to_le_bytes());
        }
        let number = format.ggml_type();
        let number =
            number.ok_or_else(|| unwritable(&format!("is in {format}, which GGUF files do not have")))?;
        header.extend(number.to_le_bytes());
        header.extend(offset.to_le_bytes());
        let end = offset.checked_add(bytes).and_then(|end| aligned(end, alignment));
        offset = end.ok_or_else(|| unwritable("makes the file too large"))?;
        sizes.push_back(bytes);
    }
    Ok(sizes)
}

fn put_string(header: &mut Vec<u8>, text: &str) {
    header.extend((text.len() as u64).to_le_bytes());
    header.extend(text.as_bytes());
}

/// Appends the number of the type, and the value.
fn put_value(header: &mut Vec<u8>, value: &Value) {
    let mut put = |value_type: u32, bytes: &[u8]| {
        header.extend(value_type.to_le_bytes());
        header.extend(bytes);
    };
    match value {
        Value::U8(n) => put(0, &n.to_le_bytes()),
        Value::I8(n) => put(1, &n.to_le_bytes()),
        Value::U16(n) => put(2, &n.to_le_bytes()),
        Value::I16(n) => put(3, &n.to_le_bytes()),
        Value::U32(n) => put(4, &n.to_le_bytes()),
        Value::I32(n) => put(5, &n.to_le_bytes()),
        Value::F32(x) => put(6, &x.to_le_bytes()),
        Value::Bool(b) => put(7, &[u8::from(*b)]),
        Value::String(text) => {
            put(8, &[]);
            put_string(header, text);
        }
        Value::Array(array) => {
            put(9, &[]);
            put_array(header, array);
        }
        Value::U64(n) => put(10, &n.to_le_bytes()),
        Value::I64(n) => put(11, &n.to_le_bytes()),
        Value::F64(x) => put(12, &x.to_le_bytes()),
    }
}

/// Appends the number of the type, the length, and the values.
fn put_array(header: &mut Vec<u8>, array: &Array) {
    let mut put = |value_type: u32, values: &mut dyn Iterator<Item = u8>| {
        header.extend(value_type.to_le_bytes());
        header.extend((array.len() as u64).to_le_bytes());
        header.extend(values);
    };
    match array {
        Array::U8(v) => put(0, &mut v.iter().copied()),
        Array::I8(v) => put(1, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::U16(v) => put(2, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::I16(v) => put(3, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::U32(v) => put(4, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::I32(v) => put(5, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::F32(v) => put(6, &mut v.iter().flat_map(|x| x.to_le_bytes())),
        Array::Bool(v) => put(7, &mut v.iter().map(|&b| u8::from(b))),
        Array::String(v) => {
            put(8, &mut std::iter::empty());
            v.iter().for_each(|text| put_string(header, text));
        }
        Array::U64(v) => put(10, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::I64(v) => put(11, &mut v.iter().flat_map(|n| n.to_le_bytes())),
        Array::F64(v) => put(12, &mut v.iter().flat_map(|x| x.to_le_bytes())),
    }
}
