//! Locating: which bytes of which file a requested tensor has.

use std::{collections::BTreeSet, ops::Range};

use kiln_core::{Error, Result};
use kiln_weights::gguf::{
    FACTORS,
    names::{self, Heads, Undo},
};

use super::{Checkpoint, Entry, Files};
use crate::Part;

/// The place of a requested tensor.
pub(super) struct Located<'a> {
    /// Name in the file.
    pub(super) name: String,
    pub(super) entry: &'a Entry,
    /// Offset of the first byte.
    pub(super) start: u64,
    /// Size of a row in bytes.
    pub(super) row: usize,
    pub(super) undo: Undo,
}

/// Consecutive rows of a tensor in a file.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) name: &'a str,
    pub(super) entry: &'a Entry,
    pub(super) rows: usize,
    /// Number of the first row.
    pub(super) first: usize,
    /// Number of rows of the whole tensor.
    pub(super) of: usize,
    /// Numbers per row.
    pub(super) columns: usize,
    /// Offset of the tensor in the file's data.
    pub(super) start: u64,
    /// Size of a row in the file in bytes.
    pub(super) row: usize,
    /// The change that the conversion of the file made, to be undone.
    pub(super) undo: Undo,
}

impl Piece<'_> {
    /// Offset of a row of the tensor.
    pub(super) fn row_start(&self, row: usize) -> u64 {
        self.start + self.undo.row(row, self.of) as u64 * self.row as u64
    }

    /// Range of row numbers in the tensor.
    pub(super) fn rows(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    /// Returns the runs of rows that are contiguous in the file: offset and number of rows of each.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, usize)> {
        let (end, together) = (self.first + self.rows, self.undo.together(self.of));
        let mut row = self.first;
        std::iter::from_fn(move || {
            // Runs begin at multiples of `together`, also if the piece does not.
            let each = (together - row % together).min(end - row);
            let start = (each > 0).then(|| self.row_start(row));
            row += each;
            Some((start?, each))
        })
    }
}

/// Locates tensors, and records which of them were requested.
pub(super) struct Locator<'a> {
    checkpoint: &'a Checkpoint,
    used: BTreeSet<String>,
}

impl<'a> Locator<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, used: BTreeSet::new() }
    }

    /// Locates the tensor `name`, and checks its shape.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Located<'a>> {
        let located = self.checkpoint.locate(name, shape)?;
        self.used.insert(located.name.clone());
        Ok(located)
    }

    /// Locates all rows of a tensor.
    pub(super) fn whole<'p>(&mut self, name: &'p str, shape: &[usize]) -> Result<Piece<'p>>
    where
        'a: 'p,
    {
        let Located { entry, start, row, undo, .. } = self.tensor(name, shape)?;
        let columns = shape.iter().skip(1).product();
        let rows = shape.first().copied().unwrap_or(1);
        Ok(Piece { name, entry, rows, first: 0, of: rows, columns, start, row, undo })
    }

    /// Locates rows `range` of the concatenation of all `parts`. Each row has the shape `row`.
    pub(super) fn rows<'p>(
        &mut self,
        parts: &'p [Part],
        row: &[usize],
        range: &Range<usize>,
    ) -> Result<Vec<Piece<'p>>>
    where
        'a: 'p,
    {
        let mut pieces = Vec::new();
        let mut start = 0;
        for part in parts {
            let whole = self.whole(&part.name, &[&[part.rows], row].concat())?;
            let mine = |at: usize| at.saturating_sub(start).min(part.rows);
            let (first, end) = (mine(range.start), mine(range.end));
            start += part.rows;
            if first < end {
                pieces.push(Piece { first, rows: end - first, ..whole });
            }
        }
        Ok(pieces)
    }

    /// Checks that every tensor was requested.
    ///
    /// # Errors
    /// [`Error::File`] naming the tensors left over: the config describes another model than the weights.
    pub(super) fn finish(self) -> Result<()> {
        self.checkpoint.check_used(&self.used)
    }
}

impl Checkpoint {
    /// Whether there is a tensor that a Hugging Face folder calls `name`.
    pub(super) fn has(&self, name: &str) -> bool {
        let stored = match &self.files {
            Files::Safetensors(_) => None,
            Files::Gguf { model_type, heads, .. } => names::source(model_type, name, *heads),
        };
        self.tensors.contains_key(stored.as_ref().map_or(name, |source| &source.name))
    }

    /// Locates the tensor that a Hugging Face folder calls `name`, and checks its shape.
    pub(super) fn locate(&self, name: &str, shape: &[usize]) -> Result<Located<'_>> {
        let (source, is_gguf) = match &self.files {
            Files::Safetensors(_) => (None, false),
            Files::Gguf { model_type, heads, .. } => (names::source(model_type, name, *heads), true),
        };
        let (stored_name, expert, undo) = match source {
            Some(source) => (source.name, source.expert, source.undo),
            None => (name.to_owned(), None, Undo::Nothing),
        };
        let (stored_name, undo) = match names::joined_experts(&stored_name) {
            Some(both) if is_gguf && !self.tensors.contains_key(&stored_name) => both,
            _ => (stored_name, undo),
        };
        let (stored_name, joined) = match &self.files {
            Files::Gguf { heads, .. } => self.joined(stored_name, *heads),
            Files::Safetensors(_) => (stored_name, None),
        };
        let Some(entry) = self.tensors.get(&stored_name) else {
            let why =
                format!("the weights have no tensor `{stored_name}`, which {} asks for", self.config_name());
            return Err(Error::File { path: self.folder.clone(), why });
        };
        // GGUF files leave out dimensions of 1, and store all experts in one tensor.
        let own = if expert.is_some() { entry.shape.get(1..).unwrap_or_default() } else { &entry.shape };
        let of_joined: Vec<usize>;
        let is_half = matches!(undo, Undo::Half { .. });
        let own = match &joined {
            None if is_half => {
                let rows = own.first().map_or(0, |rows| rows / 2);
                of_joined = [rows].into_iter().chain(own.iter().skip(1).copied()).collect();
                &of_joined
            }
            Some(rows) => {
                of_joined = [rows.len()].into_iter().chain(own.iter().skip(1).copied()).collect();
                &of_joined
            }
            None => own,
        };
        let count = if expert.is_some() { entry.shape.first().copied().unwrap_or(0) } else { 1 };
        let fits = match is_gguf {
            true => {
                let is_vector = shape.len() == 1 && own.iter().product::<usize>() == shape[0];
                // The matrices of all heads.
                let is_stack = matches!((own, shape), (&[heads, rows, width], &[all, columns])
                    if heads.checked_mul(rows) == Some(all) && width == columns);
                is_vector
                    || is_stack
                    || own.iter().filter(|size| **size != 1).eq(shape.iter().filter(|size| **size != 1))
            }
            false => own == shape,
        };
        let number = expert.unwrap_or(0);
        if !fits || number >= count {
            let why = format!(
                "`{stored_name}` has shape {:?}, and {} asks for {shape:?}",
                entry.shape,
                self.config_name()
            );
            return Err(Error::File { path: self.path(entry), why });
        }
        // The header was checked: the tensor has exactly the bytes that its shape needs.
        let bytes = entry.bytes() / count as u64;
        let whole = if expert.is_some() { entry.shape.get(1) } else { entry.shape.first() };
        let rows = if joined.is_some() || is_half { whole } else { shape.first() };
        let row = bytes / rows.copied().unwrap_or(1).max(1) as u64;
        let before = joined.map_or(0, |rows| rows.start as u64) * row;
        let start = entry.range.start + number as u64 * bytes + before;
        let row = usize::try_from(row).map_err(|_| self.too_large(entry))?;
        Ok(Located { name: stored_name, entry, start, row, undo })
    }

    /// Returns the tensor that contains `name` of a GGUF file, and the rows of `name` in it, if the file has
    /// queries, keys and values in one tensor.
    fn joined(&self, name: String, Heads { heads, kv_heads, .. }: Heads) -> (String, Option<Range<usize>>) {
        let parts =
            [(".attn_q.", 0, heads), (".attn_k.", heads, kv_heads), (".attn_v.", heads + kv_heads, kv_heads)];
        let found =
            parts.into_iter().find(|(part, ..)| name.contains(part) && !self.tensors.contains_key(&name));
        let Some((part, before, own)) = found else { return (name, None) };
        let whole = name.replacen(part, ".attn_qkv.", 1);
        let each = |entry: &Entry| entry.shape.first()?.checked_div(heads + 2 * kv_heads);
        match self.tensors.get(&whole).and_then(each) {
            Some(rows) => (whole, Some(before * rows..(before + own) * rows)),
            None => (name, None),
        }
    }

    /// Name of the source of the config, for messages.
    fn config_name(&self) -> &'static str {
        match &self.files {
            Files::Safetensors(_) => "config.json",
            Files::Gguf { .. } => "the metadata",
        }
    }

    /// Whether a tensor belongs to the config, as vectors in some GGUF files do.
    fn is_of_config(&self, name: &str) -> bool {
        matches!(self.files, Files::Gguf { .. }) && FACTORS.contains(&name)
    }

    /// Checks that all tensors are in `used`, by their names in the files.
    ///
    /// # Errors
    /// [`Error::File`] naming the tensors left over: the config describes another model than the weights.
    pub(super) fn check_used(&self, used: &BTreeSet<String>) -> Result<()> {
        let left: Vec<_> =
            self.tensors.keys().filter(|name| !used.contains(*name) && !self.is_of_config(name)).collect();
        let Some(first) = left.first() else { return Ok(()) };
        let why = format!(
            "the weights hold {} tensors that {} has no place for, such as `{first}`; they belong to another config",
            left.len(),
            self.config_name()
        );
        Err(Error::File { path: self.path_of("config.json"), why })
    }
}
