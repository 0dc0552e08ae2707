//! The plan of a new GGUF file: its metadata, and the source of each tensor.

use std::{collections::BTreeMap, ops::Range};

use kiln_core::{Error, Result};
use kiln_weights::gguf::{
    self, ConfigMetadata, Metadata, Value,
    names::{self, Heads, Undo},
};

use serde_json::Value as Json;

use super::super::{Checkpoint, Entry, Files};
use crate::{configure, nn::names::TRANSPOSED};

/// The source of a tensor's numbers.
#[derive(Debug)]
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
                let state_heads = checkpoint.config.get("linear_num_key_heads").and_then(Json::as_u64);
                let heads = Heads {
                    heads: sizes.heads,
                    kv_heads: sizes.kv_heads,
                    state_heads: state_heads.unwrap_or(16) as usize,
                };
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
        tensors.extend(stored(checkpoint, &Sizes { model_type: &model_type, heads, config })?);
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

/// Sizes that the places of rows in a file depend on.
struct Sizes<'a> {
    model_type: &'a str,
    heads: Heads,
    config: &'a Json,
}

impl Sizes<'_> {
    fn size(&self, field: &str, default: u64) -> usize {
        self.config.get(field).and_then(Json::as_u64).unwrap_or(default) as usize
    }
}

/// A tensor of a folder that is part of a tensor of a file.
struct Part<'a> {
    /// Name in the folder.
    name: String,
    source: names::Source,
    entry: &'a Entry,
    rows: Range<usize>,
}

impl Part<'_> {
    fn all(&self) -> Rows {
        Rows { entry: self.entry.clone(), rows: self.rows.clone() }
    }

    fn shape(&self) -> Vec<usize> {
        match self.rows.len() == rows_of(self.entry) {
            true => self.entry.shape.clone(),
            false => vec![self.rows.len(), columns_of(self.entry)],
        }
    }
}

/// Returns the parts of a tensor of a folder that are tensors of their own in a file, with their rows.
fn apart(model_type: &str, name: &str, entry: &Entry) -> Vec<(String, Range<usize>)> {
    let rows = rows_of(entry);
    match name.split_once(".shared_mlp.gate_up_proj.") {
        Some((block, end)) if model_type == "granitemoehybrid" => {
            let half = |part: &str, rows| (format!("{block}.shared_mlp.{part}.{end}"), rows);
            vec![half("gate_proj", 0..rows / 2), half("up_proj", rows / 2..rows)]
        }
        _ => vec![(name.to_owned(), 0..rows)],
    }
}

/// Returns the tensors of a folder by their GGUF names. Those that are one tensor in a file are joined.
fn stored(checkpoint: &Checkpoint, sizes: &Sizes<'_>) -> Result<Vec<(String, Vec<usize>, Source)>> {
    let wrong = |why: String| Error::File { path: checkpoint.folder.clone(), why };
    let mut found = BTreeMap::<String, Vec<Part<'_>>>::new();
    for (name, entry) in &checkpoint.tensors {
        // A file has only the second form.
        let second = name.strip_suffix(".weight").map(|module| format!("{module}{TRANSPOSED}.weight"));
        if second.is_some_and(|second| checkpoint.tensors.contains_key(&second)) {
            continue;
        }
        for (name, rows) in apart(sizes.model_type, name, entry) {
            let source = names::source(sizes.model_type, &name, sizes.heads).ok_or_else(|| {
                wrong(format!("a GGUF file of `{}` has no tensor for `{name}`", sizes.model_type))
            })?;
            let whole = names::whole(sizes.model_type, &source.name);
            found.entry(whole).or_default().push(Part { name, source, entry, rows });
        }
    }
    let tensor = |(name, parts): (String, Vec<Part<'_>>)| {
        let (shape, rows, undo) = match &parts[..] {
            [part] if part.source.expert.is_none() => (
                part.shape(),
                in_file(part, sizes).ok_or_else(|| unseen(checkpoint, part))?,
                part.source.undo,
            ),
            _ => joined(&parts).map_err(|why| wrong(format!("`{name}` {why}")))?,
        };
        Ok((name.clone(), in_shape(&name, shape, sizes), Source::Stored(rows, undo)))
    };
    found.into_iter().map(tensor).collect()
}

/// Joins the parts of a tensor: the matrices of all experts, the halves of each head, or queries, keys and
/// values.
fn joined(parts: &[Part<'_>]) -> std::result::Result<(Vec<usize>, Vec<Rows>, Undo), String> {
    let first = &parts[0];
    if first.source.expert.is_some() {
        let mut experts: Vec<&Part<'_>> = parts.iter().collect();
        // The gate of an expert comes before its values.
        experts.sort_by_key(|part| (part.source.expert, part.source.name.contains(".ffn_up_exps.")));
        let each = experts.iter().filter(|part| part.source.expert == Some(0)).count().max(1);
        let is_complete = experts.iter().enumerate().all(|(i, part)| part.source.expert == Some(i / each));
        let shape = &first.entry.shape;
        if !is_complete || parts.iter().any(|part| part.entry.shape != *shape) {
            return Err("has experts that are not complete, or differ in shape".to_owned());
        }
        let mut of_all = [&[parts.len() / each], &shape[..]].concat();
        of_all[1] *= each;
        let rows = experts.iter().map(|part| part.all()).collect();
        return Ok((of_all, rows, first.source.undo));
    }
    let of_all: usize = parts.iter().filter_map(|part| part.entry.shape.first()).sum();
    let shape = [&[of_all], first.entry.shape.get(1..).unwrap_or_default()].concat();
    let columns = columns_of(first.entry);
    if parts.iter().any(|part| columns_of(part.entry) != columns) {
        return Err("has parts whose rows differ in length".to_owned());
    }
    match (parts, first.source.undo) {
        ([_, _], Undo::Half { heads, .. }) => {
            let is_second = |part: &&Part<'_>| matches!(part.source.undo, Undo::Half { second: true, .. });
            let (Some(second), Some(first)) =
                (parts.iter().find(is_second), parts.iter().find(|part| !is_second(part)))
            else {
                return Err("has two equal halves".to_owned());
            };
            let own = rows_of(first.entry).checked_div(heads).unwrap_or(0);
            let of_head = |head: usize| {
                let rows = head * own..(head + 1) * own;
                [first, second].map(|part| Rows { entry: part.entry.clone(), rows: rows.clone() })
            };
            Ok((shape, (0..heads).flat_map(of_head).collect(), Undo::Nothing))
        }
        ([_, _, _], Undo::Nothing) => {
            let mut in_order: Vec<&Part<'_>> = parts.iter().collect();
            let place = |part: &Part<'_>| {
                ["q_proj.", "in_proj_q.", "k_proj.", "in_proj_k."]
                    .iter()
                    .position(|name| part.name.contains(name))
            };
            in_order.sort_by_key(|part| place(part).unwrap_or(4));
            Ok((shape, in_order.into_iter().map(Part::all).collect(), Undo::Nothing))
        }
        _ => {
            let names: Vec<_> = parts.iter().map(|part| format!("`{}`", part.name)).collect();
            Err(format!("is one tensor in a GGUF file, and here {}", names.join(", ")))
        }
    }
}

/// Returns the rows of a tensor in the order of the file; `None` if it cannot be read so.
fn in_file(part: &Part<'_>, sizes: &Sizes<'_>) -> Option<Vec<Rows>> {
    let whole = Some(vec![part.all()]);
    let Some((_, of_mixer)) = part.name.split_once(".linear_attn.") else { return whole };
    if !sizes.model_type.starts_with("qwen3_5") {
        return whole;
    }
    // Value heads that share a key are adjacent in a folder. In a file, the first of each key come first.
    let keys = sizes.size("linear_num_key_heads", 16);
    let sharing = sizes.size("linear_num_value_heads", 32).checked_div(keys)?;
    let width = sizes.size("linear_value_head_dim", 128);
    let before = 2 * keys * sizes.size("linear_key_head_dim", 128);
    let (before, own) = match of_mixer.split('.').next()? {
        "in_proj_qkv" | "conv1d" => (before, width),
        "in_proj_z" => (0, width),
        "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias" => (0, 1),
        "out_proj" => {
            let (rows, columns) = (rows_of(part.entry), columns_of(part.entry));
            let head = [(sharing, width as u64), (keys, (sharing * width) as u64), (width, 1)];
            let dims = [&[(rows, columns as u64)], &head[..]].concat();
            return Some(vec![Rows::all(&part.entry.view(part.entry.shape.clone(), 0, &dims)?)]);
        }
        _ => return whole,
    };
    let heads = (0..sharing).flat_map(|first| (0..keys).map(move |key| key * sharing + first));
    let rows = heads.map(|head| before + head * own..before + (head + 1) * own);
    let all = std::iter::once(0..before).filter(|rows| !rows.is_empty()).chain(rows);
    Some(all.map(|rows| Rows { entry: part.entry.clone(), rows }).collect())
}

fn unseen(checkpoint: &Checkpoint, part: &Part<'_>) -> Error {
    let why = format!("`{}` is stored in a form that cannot be put into the order of a GGUF file", part.name);
    Error::File { path: checkpoint.path(part.entry), why }
}

/// Returns the shape in a file of a tensor with this name and shape.
fn in_shape(name: &str, shape: Vec<usize>, sizes: &Sizes<'_>) -> Vec<usize> {
    let part = names::in_block_of(name);
    let of_heads = |heads: usize| match shape[..] {
        [rows, columns] if heads > 0 && rows.is_multiple_of(heads) => vec![heads, rows / heads, columns],
        _ => shape.clone(),
    };
    match (sizes.model_type, part) {
        // Convolutions have one input channel.
        (_, "ssm_conv1d.weight" | "shortconv.conv.weight") => {
            shape.into_iter().filter(|size| *size != 1).collect()
        }
        ("mamba2" | "granitemoehybrid" | "nemotron_h", "ssm_a" | "ssm_d") => [&shape[..], &[1]].concat(),
        ("mamba2" | "granitemoehybrid" | "nemotron_h", "ssm_norm.weight") => {
            let (name, default) = match sizes.model_type {
                "granitemoehybrid" => ("mamba_n_groups", 1),
                _ => ("n_groups", 8),
            };
            let groups = sizes.size(name, default).max(1);
            vec![groups, shape.iter().product::<usize>() / groups]
        }
        (_, "attn_k_b.weight" | "attn_v_b.weight") => of_heads(sizes.heads.heads),
        _ => shape,
    }
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
