//! The metadata of a GGUF file: typed values by key, in the order of the file.

use std::collections::HashMap;

use crate::Error;

/// A metadata value. Each variant is a value type of GGUF.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of values of one type. GGUF also allows nested arrays; no known model uses them, and they are not
/// supported.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// Returns the value as an unsigned integer, if it is a non-negative integer of any width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// Returns the value as a number, if it is an integer or a float of any width.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(x) => Some(x.into()),
            Self::F64(x) => Some(x),
            Self::I8(n) => Some(n.into()),
            Self::I16(n) => Some(n.into()),
            Self::I32(n) => Some(n.into()),
            Self::I64(n) => Some(n as f64),
            _ => self.as_u64().map(|n| n as f64),
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(b) => Some(b),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::String(strings) => Some(strings),
            _ => None,
        }
    }

    /// Returns the elements as unsigned integers, if they are non-negative integers of any width.
    pub fn to_u64s(&self) -> Option<Vec<u64>> {
        fn widen<T: Copy + TryInto<u64>>(numbers: &[T]) -> Option<Vec<u64>> {
            numbers.iter().map(|&n| n.try_into().ok()).collect()
        }
        match self {
            Self::U8(v) => widen(v),
            Self::U16(v) => widen(v),
            Self::U32(v) => widen(v),
            Self::U64(v) => Some(v.clone()),
            Self::I8(v) => widen(v),
            Self::I16(v) => widen(v),
            Self::I32(v) => widen(v),
            Self::I64(v) => widen(v),
            _ => None,
        }
    }

    /// Returns the elements as numbers, if they are floats.
    pub fn to_f64s(&self) -> Option<Vec<f64>> {
        match self {
            Self::F32(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Self::F64(v) => Some(v.clone()),
            _ => None,
        }
    }
}

/// The metadata of a file: values by key, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Index of each key in `entries`.
    places: HashMap<String, usize>,
}

impl Metadata {
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a value and returns the previous one. An existing key keeps its place.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) -> Option<Value> {
        let key = key.into();
        match self.places.get(&key).and_then(|&place| self.entries.get_mut(place)) {
            Some((_, old)) => Some(std::mem::replace(old, value)),
            None => {
                self.places.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
                None
            }
        }
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        let place = *self.places.get(key)?;
        self.entries.get(place).map(|(_, value)| value)
    }

    pub fn contains(&self, key: &str) -> bool {
        self.places.contains_key(key)
    }

    /// Returns the entries in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the integer of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value is not an integer, or is negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "an integer that is not negative", Value::as_u64)
    }

    /// Returns the number of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value is not a number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Returns the boolean of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Returns the text of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    /// Returns the strings of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, Error> {
        self.typed(key, "an array of strings", |value| value.as_array()?.as_strings())
    }

    /// Returns the integers of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value is not an array of integers, or if one of them is negative.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, Error> {
        self.typed(key, "an array of integers that are not negative", |value| value.as_array()?.to_u64s())
    }

    /// Returns the numbers of `key`, or `None` if there is no such key.
    ///
    /// # Errors
    /// Returns an error if the value is not an array of floats.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, Error> {
        self.typed(key, "an array of floats", |value| value.as_array()?.to_f64s())
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || Error::Metadata { key: key.to_owned(), why: format!("must be {wanted}") };
        read(value).map(Some).ok_or_else(wrong)
    }
}

impl<K: Into<String>> FromIterator<(K, Value)> for Metadata {
    /// Collects entries; of equal keys, the last value is kept.
    fn from_iter<I: IntoIterator<Item = (K, Value)>>(entries: I) -> Self {
        let mut metadata = Self::new();
        for (key, value) in entries {
            metadata.insert(key, value);
        }
        metadata
    }
}
