//! The plan of a new GGUF file: its metadata, and the source of each tensor.

use std::{collections::BTreeMap, ops::Range};

use kiln_core::{Error, Result};
use kiln_weights::gguf::{
    self, ConfigMetadata, Metadata, Value,
    names::{self, Heads, Undo},
};

use super::super::{Checkpoint, Entry, Files};
use crate::configure;

/// The source of a tensor's numbers.
#[derive(Debug)]
#[cfg_attr(target_family = "wasm", expect(dead_code, reason = "a browser packs, and writes no files"))]
pub(super) enum Source {
    Numbers(Vec<f32>),
    /// Rows of the checkpoint's tensors to concatenate, and the change to make to each. [`Undo::Permuted`]
    /// needs whole tensors.
    Stored(Vec<Rows>, Undo),
}

/// Rows of a tensor of the checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) entry: Entry,
    pub(super) rows: Range<usize>,
}

impl Rows {
    fn all(entry: &Entry) -> Self {
        Self { entry: entry.clone(), rows: 0..rows_of(entry) }
    }
}

/// Numbers per row. A vector has rows of one number, so that it can be permuted like a matrix.
pub(super) fn columns_of(entry: &Entry) -> usize {
    entry.shape.get(1..).and_then(<[usize]>::last).copied().unwrap_or(1).max(1)
}

pub(super) fn rows_of(entry: &Entry) -> usize {
    entry.shape.iter().product::<usize>() / columns_of(entry)
}

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) metadata: Metadata,
    /// Names, shapes and sources in the order of the file.
    pub(super) tensors: Vec<(String, Vec<usize>, Source)>,
}

impl Plan {
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        // Reports an invalid config before using it.
        let sizes = configure(&checkpoint.config)?.sizes();
        match &checkpoint.files {
            Files::Gguf { files, .. } => Ok(Self::of_gguf(checkpoint, files.metadata())),
            Files::Safetensors(_) => {
                let heads = Heads { heads: sizes.heads, kv_heads: sizes.kv_heads, state_heads: 0 };
                Self::of_folder(checkpoint, heads)
            }
        }
    }

    /// Plans a GGUF file that is packed again, with its parts joined.
    fn of_gguf(checkpoint: &Checkpoint, metadata: &Metadata) -> Self {
        let kept = metadata.iter().filter(|(key, _)| !key.starts_with("split."));
        let tensor = |(name, entry): (&String, &Entry)| {
            (name.clone(), entry.shape.clone(), Source::Stored(vec![Rows::all(entry)], Undo::Nothing))
        };
        let mut plan = Self {
            metadata: kept.map(|(key, value)| (key, value.clone())).collect(),
            tensors: checkpoint.tensors.iter().map(tensor).collect(),
        };
        plan.sort();
        plan
    }

    fn of_folder(checkpoint: &Checkpoint, heads: Heads) -> Result<Self> {
        let of_config = |e: kiln_weights::Error| Error::File {
            path: checkpoint.path_of("config.json"),
            why: e.to_string(),
        };
        let model_type = checkpoint.config.model_type()?;
        let config = checkpoint.config.json();
        let ConfigMetadata { mut metadata, factors } = gguf::config_metadata(config).map_err(of_config)?;
        let mut tensors: Vec<_> = factors
            .into_iter()
            .map(|(name, factors)| (name.to_owned(), vec![factors.len()], Source::Numbers(factors)))
            .collect();
        tensors.extend(stored(checkpoint, &model_type, heads)?);
        let mut plan = Self { metadata: Metadata::new(), tensors };
        plan.sort();
        gguf::check_config(config, &metadata, &mut Planned(&plan)).map_err(of_config)?;

        metadata.insert("general.type", Value::String("model".to_owned()));
        plan.metadata = metadata;
        Ok(plan)
    }

    /// Sorts tensors: first those outside of blocks, then block by block.
    fn sort(&mut self) {
        self.tensors.sort_by(|(a, ..), (b, ..)| (names::block(a), a).cmp(&(names::block(b), b)));
    }
}

/// Returns the tensors of a folder by their GGUF names. The tensors of all experts are joined into one.
fn stored(
    checkpoint: &Checkpoint,
    model_type: &str,
    heads: Heads,
) -> Result<Vec<(String, Vec<usize>, Source)>> {
    let wrong = |why: String| Error::File { path: checkpoint.folder.clone(), why };
    let mut found = BTreeMap::<String, (Undo, BTreeMap<Option<usize>, &Entry>)>::new();
    for (name, entry) in &checkpoint.tensors {
        let source = names::source(model_type, name, heads)
            .ok_or_else(|| wrong(format!("a GGUF file of `{model_type}` has no tensor for `{name}`")))?;
        let (_, parts) = found.entry(source.name.clone()).or_insert((source.undo, BTreeMap::new()));
        if parts.insert(source.expert, entry).is_some() {
            return Err(wrong(format!(
                "`{name}` and another tensor are both `{}` in a GGUF file",
                source.name
            )));
        }
    }
    let tensor = |(name, (undo, parts)): (String, (Undo, BTreeMap<Option<usize>, &Entry>))| {
        let first = parts.values().next().map(|entry| entry.shape.clone()).unwrap_or_default();
        let is_complete = parts.keys().enumerate().all(|(i, expert)| expert.is_none_or(|expert| expert == i));
        if !is_complete || parts.values().any(|entry| entry.shape != first) {
            return Err(wrong(format!("the experts of `{name}` are not complete, or differ in shape")));
        }
        let shape = match parts.keys().next() {
            Some(Some(_)) => [vec![parts.len()], first].concat(),
            // Convolutions have one input channel, and a router may have one row.
            _ if name.contains("ssm_conv1d") => first.into_iter().filter(|size| *size != 1).collect(),
            _ => first,
        };
        Ok((name, shape, Source::Stored(parts.into_values().map(Rows::all).collect(), undo)))
    };
    found.into_iter().map(tensor).collect()
}

/// The planned tensors, as the config of the new file will see them.
struct Planned<'a>(&'a Plan);

impl gguf::Tensors for Planned<'_> {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let found = self.0.tensors.iter().find(|(planned, ..)| planned == name);
        found.map(|(_, shape, _)| shape.clone())
    }

    fn numbers(&mut self, name: &str) -> Result<Vec<f32>, kiln_weights::Error> {
        match self.0.tensors.iter().find(|(planned, ..)| planned == name) {
            Some((.., Source::Numbers(numbers))) => Ok(numbers.clone()),
            _ => Err(kiln_weights::Error::Damaged(format!("the tensor `{name}` is not planned"))),
        }
    }
}
