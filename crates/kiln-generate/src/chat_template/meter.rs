//! Limits on memory and time of a template, counted while it runs.

use std::borrow::Cow;

use minijinja::{Error, ErrorKind, State, Value, value::ValueKind};

use web_time::Instant;

type Made<T> = Result<T, Error>;

/// Maximum size in bytes of a text, and of the prompt.
pub(super) const LONGEST: usize = 32 << 20;
/// Maximum number of bytes written to the prompt and to variables together.
const WRITTEN: usize = 128 << 20;
/// Maximum number of bytes created in total, whether or not they are kept.
const MADE: usize = 2 << 30;
/// Maximum time, for templates with few steps that each take long.
const SECONDS: u64 = 5;
/// Maximum nesting of lists and dicts; JSON from outside may have 128 levels.
const NESTED: usize = 150;
/// Maximum number of values within a value; a long text counts as several.
const PARTS: usize = 1 << 20;
/// Number of bytes of a text that count as one value.
const PART: usize = 128;
/// Limits on the number of parts, and on their depth, in a namespace that is inside another value, which
/// grows when the namespace is set.
const HELD: (usize, usize) = (4096, NESTED / 2);

/// Resources that a rendering has used so far.
#[derive(Debug)]
pub(super) struct Meter {
    written: usize,
    made: usize,
    /// Whether a namespace is inside another value.
    holds_namespaces: bool,
    pub(super) started: Started,
}

impl Meter {
    /// The meter of a rendering, which is started on the first call.
    pub(super) fn of<'s>(state: &'s mut State<'_, '_>) -> &'s mut Self {
        state.get_or_insert_extension_with(|| Self {
            written: 0,
            made: 0,
            holds_namespaces: false,
            started: Started(Instant::now()),
        })
    }

    pub(super) fn writes(&mut self, bytes: usize) -> Made<()> {
        self.started.in_time()?;
        count(&mut self.written, bytes, WRITTEN)
    }

    /// Counts a new `value` and returns it.
    pub(super) fn made(&mut self, value: Value) -> Made<Value> {
        self.makes(&value).map(|()| value)
    }

    /// Checks `value`, to which an attribute of a namespace is set. Only a namespace inside `value` could
    /// make it contain itself.
    pub(super) fn stored(&self, value: Value) -> Made<Value> {
        let most = if self.holds_namespaces { HELD } else { (PARTS, NESTED) };
        match is_namespace(&value) || Parts::of(&value, most)?.namespaces {
            true => Err(wrong("it puts a namespace into another one")),
            false => Ok(value),
        }
    }

    fn makes(&mut self, value: &Value) -> Made<()> {
        self.started.in_time()?;
        if let Some(text) = value.as_str() {
            return match text.len() {
                bytes @ ..=LONGEST => count(&mut self.made, bytes, MADE),
                _ => Err(too_much()),
            };
        }
        if matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
            self.holds_namespaces |= Parts::of(value, (PARTS, NESTED))?.namespaces;
            count(&mut self.made, value.len().unwrap_or(0).saturating_mul(size_of::<Value>()), MADE)?;
        }
        Ok(())
    }
}

fn count(counter: &mut usize, bytes: usize, most: usize) -> Made<()> {
    *counter = counter.saturating_add(bytes);
    if *counter > most { Err(too_much()) } else { Ok(()) }
}

/// When a rendering started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Started(Instant);

impl Started {
    pub(super) fn in_time(self) -> Made<()> {
        match self.0.elapsed().as_secs() >= SECONDS {
            true => Err(wrong(format!("it takes more than {SECONDS} seconds"))),
            false => Ok(()),
        }
    }
}

pub(super) fn too_much() -> Error {
    wrong(format!("it makes more text than the {} MiB it may", LONGEST >> 20))
}

pub(super) fn wrong(why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Size of the contents of a value.
#[derive(Default)]
struct Parts {
    count: usize,
    /// Whether they include a namespace.
    namespaces: bool,
}

impl Parts {
    /// Counts the values within `value`. Fails if there are more than `most`, or if they are nested more
    /// deeply.
    fn of(value: &Value, most: (usize, usize)) -> Made<Self> {
        let mut parts = Self::default();
        parts.add(value, 0, most).map(|()| parts)
    }

    fn add(&mut self, value: &Value, depth: usize, most: (usize, usize)) -> Made<()> {
        self.count += 1 + value.as_str().map_or(0, |text| text.len() / PART);
        if self.count > most.0 || depth > most.1 {
            return Err(wrong(format!(
                "it makes a value of more than {} parts, or nested over {} deep",
                most.0, most.1
            )));
        }
        match value.kind() {
            ValueKind::Map => {
                let pairs = value.as_object().and_then(|map| map.try_iter_pairs());
                for (key, value) in pairs.into_iter().flatten() {
                    self.add_inner(&key, depth + 1, most)?;
                    self.add_inner(&value, depth + 1, most)?;
                }
                Ok(())
            }
            // A repeated list is an iterable of any length.
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.try_for_each(|item| self.add_inner(&item, depth + 1, most))
            }
            _ => Ok(()),
        }
    }

    /// Adds an inner value. A namespace counts as its maximum contents.
    fn add_inner(&mut self, value: &Value, depth: usize, most: (usize, usize)) -> Made<()> {
        if !is_namespace(value) {
            return self.add(value, depth, most);
        }
        if Self::of(value, HELD)?.namespaces {
            return Err(wrong("it puts a namespace that holds another one into a value"));
        }
        self.namespaces = true;
        self.count += HELD.0;
        self.add(&Value::UNDEFINED, depth + HELD.1, most)
    }
}
