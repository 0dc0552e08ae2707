//! What a new GGUF file will hold: its metadata, and where each tensor comes from.

use std::collections::BTreeMap;

use kiln_core::{Error, Result, files};
use kiln_weights::gguf::{
    self, ConfigMetadata, Metadata, TokenizerFiles, Value,
    names::{self, Heads, Undo},
};
use serde_json::Value as Json;

use super::super::{Checkpoint, Entry, Files};
use crate::configure;

/// Where the numbers of a tensor come from.
#[derive(Debug)]
pub(super) enum Source {
    Numbers(Vec<f32>),
    /// Tensors of the checkpoint, one behind the other, and what is done to each.
    Stored(Vec<Entry>, Undo),
}

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) metadata: Metadata,
    /// Names, shapes and sources in the order of the file.
    pub(super) tensors: Vec<(String, Vec<usize>, Source)>,
}

impl Plan {
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        // Says what is wrong with a config, before anything is made of it.
        let sizes = configure(&checkpoint.config)?.sizes();
        match &checkpoint.files {
            Files::Gguf { files, .. } => Ok(Self::of_gguf(checkpoint, files.metadata())),
            Files::Safetensors(_) => {
                let heads = Heads { heads: sizes.heads, kv_heads: sizes.kv_heads };
                Self::of_folder(checkpoint, heads, sizes.vocab)
            }
        }
    }

    /// The plan of a GGUF file that is packed again, its parts joined.
    fn of_gguf(checkpoint: &Checkpoint, metadata: &Metadata) -> Self {
        let kept = metadata.iter().filter(|(key, _)| !key.starts_with("split."));
        let tensor = |(name, entry): (&String, &Entry)| {
            (name.clone(), entry.shape.clone(), Source::Stored(vec![entry.clone()], Undo::Nothing))
        };
        let mut plan = Self {
            metadata: kept.map(|(key, value)| (key, value.clone())).collect(),
            tensors: checkpoint.tensors.iter().map(tensor).collect(),
        };
        plan.sort();
        plan
    }

    fn of_folder(checkpoint: &Checkpoint, heads: Heads, vocab: usize) -> Result<Self> {
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

        let tokenizer = tokenizer(checkpoint, vocab)?;
        metadata.insert("general.type", Value::String("model".to_owned()));
        metadata.insert("general.name", Value::String(name(checkpoint)?));
        tokenizer.iter().for_each(|(key, value)| _ = metadata.insert(key, value.clone()));
        plan.metadata = metadata;
        Ok(plan)
    }

    /// What is outside of blocks first, then block by block.
    fn sort(&mut self) {
        self.tensors.sort_by(|(a, ..), (b, ..)| (names::block(a), a).cmp(&(names::block(b), b)));
    }
}

/// The tensors of a folder by their names in the file. Those of experts become one.
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
            // Convolutions have one channel in, and a router may have one row.
            _ if name.contains("ssm_conv1d") => first.into_iter().filter(|size| *size != 1).collect(),
            _ => first,
        };
        Ok((name, shape, Source::Stored(parts.into_values().cloned().collect(), undo)))
    };
    found.into_iter().map(tensor).collect()
}

/// The tokenizer of a folder as metadata.
fn tokenizer(checkpoint: &Checkpoint, vocab: usize) -> Result<Metadata> {
    const FILE: &str = "tokenizer.json";
    let json = |file: &str| match checkpoint.text(file)? {
        Some(text) => serde_json::from_str(&text).map_err(|e| Error::File {
            path: checkpoint.path_of(file),
            why: format!("is not valid JSON: {e}"),
        }),
        None => Ok(Json::Null),
    };
    let files = TokenizerFiles {
        tokenizer: json(FILE)?,
        config: json("tokenizer_config.json")?,
        generation: json("generation_config.json")?,
        model: checkpoint.config.json().clone(),
        chat_template: checkpoint.text("chat_template.jinja")?,
    };
    if files.tokenizer.is_null() {
        let path = checkpoint.path_of("tokenizer.model");
        if files::try_open(&path)?.is_some() {
            let why = format!(
                "is not read; make a {FILE} of it with Transformers (`AutoTokenizer`, `save_pretrained`)"
            );
            return Err(Error::File { path, why });
        }
        // As llama.cpp calls a model that is given tokens.
        return Ok(Metadata::from_iter([("tokenizer.ggml.model", Value::String("none".to_owned()))]));
    }
    gguf::tokenizer_metadata(&files, vocab)
        .map_err(|e| Error::File { path: checkpoint.path_of(FILE), why: e.to_string() })
}

/// The name of the model: that of its folder.
fn name(checkpoint: &Checkpoint) -> Result<String> {
    let folder = checkpoint.folder.canonicalize().unwrap_or_else(|_| checkpoint.folder.clone());
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // By this name llama.cpp knows whose added tokens take the white space behind them, for which there is no key.
    let is_phi = ["phi-3", "phi3"].iter().any(|phi| name.to_lowercase().contains(phi));
    let strips = checkpoint.config.model_type()? == "phi3"
        && checkpoint.text("tokenizer.json")?.is_some_and(|text| text.contains("\"rstrip\": true"));
    Ok(if strips && !is_phi { format!("Phi-3 {name}") } else { name })
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
