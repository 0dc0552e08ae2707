//! How much a template may make and take, counted while it runs.

use std::{
    borrow::Cow,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

use crate::stats::now;

type Made<T> = Result<T, Error>;

/// Bytes of the longest text, of the prompt too.
pub(super) const LONGEST: usize = 32 << 20;
/// Bytes of all that is written, into the prompt or into variables.
const WRITTEN: usize = 128 << 20;
/// Bytes of all that is made on the way, whether or not it is kept.
const MADE: usize = 2 << 30;
/// For templates that take few steps, each of which takes long.
const SECONDS: u64 = 5;
/// Lists and dicts within each other; JSON that is read may be 128 deep.
const NESTED: usize = 150;
/// Values within a value.
const PARTS: usize = 1 << 20;

/// What a rendering has taken so far.
#[derive(Debug)]
pub(super) struct Meter {
    written: AtomicUsize,
    made: AtomicUsize,
    /// Where there is a clock.
    started: Option<Instant>,
}

impl Meter {
    pub(super) fn new() -> Self {
        Self { written: AtomicUsize::new(0), made: AtomicUsize::new(0), started: now() }
    }

    pub(super) fn writes(&self, bytes: usize) -> Made<()> {
        count(&self.written, bytes, WRITTEN)
    }

    pub(super) fn makes(&self, bytes: usize) -> Made<()> {
        match bytes {
            ..=LONGEST => count(&self.made, bytes, MADE),
            _ => Err(too_much()),
        }
    }

    pub(super) fn makes_value(&self, value: &Value) -> Made<()> {
        if self.started.is_some_and(|started| started.elapsed().as_secs() >= SECONDS) {
            return Err(wrong(format!("it takes more than {SECONDS} seconds")));
        }
        if let Some(text) = value.as_str() {
            return self.makes(text.len());
        }
        if matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
            self.makes(value.len().unwrap_or(0).saturating_mul(size_of::<Value>()))?;
            check_parts(value)?;
        }
        Ok(())
    }
}

fn count(counter: &AtomicUsize, bytes: usize, most: usize) -> Made<()> {
    match counter.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= most {
        true => Ok(()),
        false => Err(too_much()),
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

/// Whether `value` is of no more values, and no deeper, than a template may make.
pub(super) fn check_parts(value: &Value) -> Made<()> {
    parts(value, 0, &mut 0)
}

/// Counts the values within `value`. A namespace may stand nowhere but in a variable: only through one could a value
/// come to hold itself.
fn parts(value: &Value, depth: usize, count: &mut usize) -> Made<()> {
    *count += 1;
    if *count > PARTS || depth > NESTED {
        return Err(wrong(format!(
            "it makes a value of more than {PARTS} parts, or nested over {NESTED} deep"
        )));
    }
    let mut inside = |inside: &Value| match is_namespace(inside) {
        true => Err(wrong("it puts a namespace into another value")),
        false => parts(inside, depth + 1, count),
    };
    match value.kind() {
        ValueKind::Map => {
            let Some(pairs) = value.as_object().and_then(|map| map.try_iter_pairs()) else { return Ok(()) };
            for (key, value) in pairs {
                inside(&key)?;
                inside(&value)?;
            }
        }
        // A list that is repeated is an iterable of any length.
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.try_for_each(|item| inside(&item))?,
        _ => {}
    }
    Ok(())
}
