//! Matches the tensors of a folder with the model of its config: renames them, chooses between two heads, and
//! sets unused ones aside.
//!
//! Source: `core_model_loading.py` (`rename_source_key`) and `PreTrainedModel.tie_weights` of Transformers.

use std::collections::BTreeMap;

use kiln_core::{Error, Result};

use super::{Checkpoint, Entry, convert::Stored};
use crate::{
    configure,
    multimodal::text_name,
    nn::names::{ByHead, ExpertTensors, HEADS, StoredOrder, TRANSPOSED, TensorNames},
};

/// Suffixes of scales for rounding attention, or the cache, to 8-bit formats. Kiln does not round them.
const SCALES: [&str; 9] = [
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".prob_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
];

/// Modules that a text model does not use: heads for training and classification, and encoders of images and
/// sounds.
const BESIDE: [&str; 15] = [
    "score",
    "classifier",
    "qa_outputs",
    "summary",
    "mtp",
    "medusa",
    "visual",
    "vision_model",
    "vision_tower",
    "vision_embedder",
    "embed_vision",
    "embed_audio",
    "audio_tower",
    "mm_projector",
    "multi_modal_projector",
];

/// Number of elements of two matrices to compare at a time.
const AT_ONCE: usize = 1 << 18;

/// Upper limit for the number of experts.
pub(super) const MOST_EXPERTS: usize = 1 << 14;

/// Number of tensor names in a warning.
const SHOWN: usize = 8;

impl Checkpoint {
    /// Renames the tensors to the names that the model requests, where only the spelling differs, and leaves
    /// out those that cannot change a text.
    ///
    /// # Errors
    /// [`Error::File`] for tensors that are duplicated or contradict the config.
    pub(super) fn settle(&mut self) -> Result<()> {
        // An invalid config is reported by the functions that need it. The small files beside it can still be
        // read.
        let Ok(configured) = configure(&self.config) else { return Ok(()) };
        let names = configured.tensor_names();
        self.rename(&names)?;
        self.view_others(&names)?;
        self.part_experts(&names)?;
        if configured.sizes().tied {
            self.settle_head(&names)?;
        }
        self.set_aside(&names)
    }

    fn rename(&mut self, names: &TensorNames) -> Result<()> {
        let stored = std::mem::take(&mut self.tensors);
        for (name, entry) in stored {
            let is_part = self.config.text_of().is_some();
            let known = names.known(&if is_part { text_name(&name) } else { name.clone() });
            self.insert(known, &name, entry)?;
        }
        Ok(())
    }

    /// Inserts a tensor that the files call `stored` under the model's name for it.
    fn insert(&mut self, known: String, stored: &str, entry: Entry) -> Result<()> {
        match self.tensors.get(&known) {
            Some(_) => {
                let why = format!("`{known}` is there twice, also as `{stored}`; get the weights again");
                Err(Error::File { path: self.path(&entry), why })
            }
            None => {
                self.tensors.insert(known, entry);
                Ok(())
            }
        }
    }

    /// Replaces tensors that are stored in another order by views in the order of the model.
    fn view_others(&mut self, names: &TensorNames) -> Result<()> {
        for (end, order) in &names.stored {
            let ends = |name: &&String| name.strip_suffix(end).is_some_and(|module| module.ends_with('.'));
            let all: Vec<String> = self.tensors.keys().filter(ends).cloned().collect();
            for name in all {
                let Some(entry) = self.tensors.remove(&name) else { continue };
                let module = name.strip_suffix(end).unwrap_or_default();
                let views = match order {
                    StoredOrder::Transposed => entry.transposed().map(|view| vec![(name.clone(), view)]),
                    StoredOrder::ByHead(order) => by_head(&entry, order).map(|views| {
                        let kind = end.rsplit('.').next().unwrap_or_default();
                        let named = |(part, view)| (format!("{module}{part}.{kind}"), view);
                        views.into_iter().map(named).collect()
                    }),
                };
                let why = match &entry.stored {
                    Stored::Plain(_) => format!("has shape {:?}, which {order} has not", entry.shape),
                    packed => format!(
                        "is packed as {packed}, and {order} is read only from numbers; take a folder that is not quantized"
                    ),
                };
                let wrong = || Error::File { path: self.path(&entry), why: format!("`{name}` {why}") };
                for (known, view) in views.ok_or_else(wrong)? {
                    self.insert(known, &name, view)?;
                }
            }
        }
        Ok(())
    }

    /// Splits tensors that hold all experts into one tensor per expert: `experts.gate_up_proj`
    /// `[experts, 2 · intermediate, hidden]` and `experts.down_proj`, as newer versions of Transformers write
    /// them, and their biases.
    fn part_experts(&mut self, names: &TensorNames) -> Result<()> {
        let Some(ExpertTensors { gate, up, down, transposed, interleaved }) = names.experts else {
            return Ok(());
        };
        let first = match gate {
            Some(gate) => ("gate_up_proj", vec![gate, up]),
            None => ("up_proj", vec![up]),
        };
        for (end, parts) in [first, ("down_proj", vec![down])] {
            for (suffix, kind) in [("", "weight"), ("_bias", "bias")] {
                let end = format!(".experts.{end}{suffix}");
                let ends = |(name, entry): &(&String, &Entry)| {
                    matches!(entry.stored, Stored::Plain(_)) && name.ends_with(&end)
                };
                let all: Vec<_> = self.tensors.iter().filter(ends).map(|(name, _)| name.clone()).collect();
                for name in all {
                    let Some(entry) = self.tensors.remove(&name) else { continue };
                    let module = name.rsplit_once('.').map_or("", |(module, _)| module);
                    let order = ExpertOrder { transposed, interleaved, parts: parts.len() };
                    let wrong = || Error::File {
                        path: self.path(&entry),
                        why: format!(
                            "`{name}` has shape {:?}, which no matrices of experts have",
                            entry.shape
                        ),
                    };
                    let views = order.views(&entry).ok_or_else(wrong)?;
                    let of_experts = (0..).flat_map(|expert| parts.iter().map(move |part| (expert, part)));
                    for ((expert, part), view) in of_experts.zip(views) {
                        self.insert(format!("{module}.{expert}.{part}.{kind}"), &name, view)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Decides which matrix is the head of a model whose config ties it to the embeddings. If only the head
    /// is stored, it serves as both. If both are stored and differ, the stored head counts: merging an
    /// adapter leaves such folders.
    fn settle_head(&mut self, names: &TensorNames) -> Result<()> {
        let (embedding, head) = (&names.embedding, names.head_weight());
        match (self.tensors.get(embedding), self.tensors.get(&head)) {
            (None, Some(_)) => {
                let only = self.tensors.remove(&head);
                self.tensors.extend(only.map(|only| (embedding.clone(), only)));
            }
            (Some(embeddings), Some(own)) if self.is_same(embeddings, own)? => {
                self.tensors.remove(&head);
            }
            (Some(_), Some(_)) => {
                tracing::warn!(
                    target: "kiln::weights",
                    "{}: `tie_word_embeddings` is true in config.json, and `{head}` differs from `{embedding}`; the stored head is \
                     used (set it to false)",
                    self.folder.display()
                );
                self.config.set("tie_word_embeddings", false.into());
                // The old name of LFM2.
                self.config.set("tie_embedding", serde_json::Value::Null);
            }
            (_, None) => {}
        }
        Ok(())
    }

    /// Whether two tensors hold equal numbers.
    fn is_same(&self, one: &Entry, other: &Entry) -> Result<bool> {
        if one.shape != other.shape || !one.stored.is_read() || !other.stored.is_read() {
            return Ok(false);
        }
        let numbers = one.shape.iter().product::<usize>();
        for first in (0..numbers).step_by(AT_ONCE) {
            let len = AT_ONCE.min(numbers - first);
            let [ours, theirs] = [self.bytes_from(one, first, len)?, self.bytes_from(other, first, len)?];
            // Equal numbers nearly always have equal bytes.
            let is_copied = one.stored == other.stored && ours == theirs;
            if !is_copied && self.unpacked(one, &ours, len)? != self.unpacked(other, &theirs, len)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads the bytes of `len` numbers of a tensor, starting at number `first`.
    fn bytes_from(&self, entry: &Entry, first: usize, len: usize) -> Result<Vec<u8>> {
        let Entry { stored, range, .. } = entry;
        let sizes = stored.bytes_of(first).zip(stored.bytes_of(len));
        let (before, len) = sizes.ok_or_else(|| Error::File {
            path: self.path(entry),
            why: format!("holds a tensor that {}", stored.unread()),
        })?;
        let mut bytes = vec![0; len];
        self.read(entry, range.start + before as u64, &mut bytes)?;
        Ok(bytes)
    }

    fn unpacked(&self, entry: &Entry, bytes: &[u8], len: usize) -> Result<Vec<f32>> {
        let mut numbers = vec![0.0; len];
        let unpacked = entry.stored.unpack(bytes, &mut numbers);
        unpacked.map_err(|why| Error::File { path: self.path(entry), why })?;
        Ok(numbers)
    }

    /// Leaves out the tensors that the config has no place for and that cannot change a text, with a warning.
    fn set_aside(&mut self, names: &TensorNames) -> Result<()> {
        let mut aside = BTreeMap::<&str, Vec<String>>::new();
        for (name, entry) in &self.tensors {
            if let Some(why) = self.why_aside(name, entry, names)? {
                aside.entry(why).or_default().push(name.clone());
            }
        }
        for (why, found) in aside {
            found.iter().for_each(|name| drop(self.tensors.remove(name)));
            if why == MODULES
                && let Some(whole) = self.config.text_of()
            {
                tracing::info!(
                    target: "kiln::weights",
                    "{}: the text model of {whole} is loaded; {} tensors beside it are passed over, such as `{}`",
                    self.folder.display(),
                    found.len(),
                    found.first().map_or("", String::as_str),
                );
            } else if why == HEADS {
                tracing::info!(target: "kiln::weights", "{}: passed over: {why}", self.folder.display());
            } else if why != TABLES {
                let shown: Vec<_> = found.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
                let more = match found.len().saturating_sub(SHOWN) {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                tracing::warn!(
                    target: "kiln::weights",
                    "{}: passed over, because config.json has no place for them: {why}, {}{more}",
                    self.folder.display(),
                    shown.join(", "),
                );
            }
        }
        Ok(())
    }

    /// Describes a tensor that cannot change a text; `None` for other tensors.
    fn why_aside(&self, name: &str, entry: &Entry, names: &TensorNames) -> Result<Option<&'static str>> {
        if name.contains("lora_") {
            return Ok(None);
        }
        if name.ends_with("rotary_emb.inv_freq") || name.ends_with("embeddings.position_ids") {
            return Ok(Some(TABLES));
        }
        if MASKS.iter().any(|end| name.ends_with(end)) {
            return Ok(Some(TABLES));
        }
        if name.contains(".rotary_emb.") {
            return Ok(Some("tables of rotary positions"));
        }
        if SCALES.iter().any(|end| name.ends_with(end)) {
            return Ok(Some("scales for attention in 8 bits"));
        }
        if let Some((_, what)) = names.unread.iter().find(|(module, _)| name.starts_with(module)) {
            return Ok(Some(what));
        }
        let beyond = |(prefix, blocks): &(String, usize)| {
            let (number, _) = name.strip_prefix(prefix)?.split_once('.')?;
            Some(number.parse::<usize>().ok()? >= *blocks)
        };
        if names.blocks.iter().find_map(beyond).unwrap_or(false) {
            return Ok(Some("blocks beyond those that it counts"));
        }
        let within = name.strip_prefix(names.base).and_then(|rest| rest.strip_prefix('.')).unwrap_or(name);
        let module = within.split('.').next().unwrap_or_default();
        let is_head = module != names.head && (module.ends_with("_head") || module.ends_with("_heads"));
        if is_head || BESIDE.contains(&module) {
            return Ok(Some(MODULES));
        }
        let of = name.strip_suffix(".bias").and_then(|module| module.rsplit('.').next());
        if !of.is_some_and(|module| names.without_bias.contains(&module)) {
            return Ok(None);
        }
        if entry.stored.is_read() {
            let len = entry.shape.iter().product();
            let bias = self.unpacked(entry, &self.bytes_from(entry, 0, len)?, len)?;
            if bias.iter().all(|number| *number == 0.0) {
                return Ok(Some("biases of zeros"));
            }
        }
        let why = format!(
            "`{name}` is a bias that config.json has no place for, and not of zeros; it belongs to another config"
        );
        Err(Error::File { path: self.path(entry), why })
    }
}

/// Modules that a text model does not use.
const MODULES: &str = "modules beside the model";

/// Divides the rows of a tensor, which are sorted by head, into its parts, with their names.
fn by_head(entry: &Entry, ByHead { heads, parts, transposed }: &ByHead) -> Option<Vec<(String, Entry)>> {
    let (&rows, rest) = entry.shape.split_first()?;
    let of_head: usize = parts.iter().map(|(_, rows)| rows).sum();
    if heads.checked_mul(of_head)? != rows {
        return None;
    }
    let columns: usize = rest.iter().product();
    let head = (*heads, (of_head * columns) as u64);
    let (mut first, mut views) = (0, Vec::new());
    for &(name, rows) in parts {
        let (row, column) = ((rows, columns as u64), (columns, 1));
        let shape = [&[heads * rows], rest].concat();
        views.push((name.to_owned(), entry.view(shape, first, &[head, row, column])?));
        if *transposed == Some(name) {
            let view = entry.view(vec![heads * columns, rows], first, &[head, column, row])?;
            views.push((format!("{name}{TRANSPOSED}"), view));
        }
        first += (rows * columns) as u64;
    }
    Some(views)
}

/// Order of the numbers of experts in one tensor, whose rows are those of several matrices.
struct ExpertOrder {
    /// Whether matrices are `[experts, in, out]`.
    transposed: bool,
    /// Whether rows of the matrices alternate, instead of following each other.
    interleaved: bool,
    /// Number of matrices per expert.
    parts: usize,
}

impl ExpertOrder {
    /// Returns the matrices, or biases, of the first expert, then those of the second, and so on.
    fn views(&self, entry: &Entry) -> Option<Vec<Entry>> {
        let Self { transposed, interleaved, parts } = *self;
        let (experts, rows, columns) = match entry.shape[..] {
            [experts, columns, rows] if transposed => (experts, rows, Some(columns)),
            [experts, rows, columns] => (experts, rows, Some(columns)),
            [experts, rows] => (experts, rows, None),
            _ => return None,
        };
        if !rows.is_multiple_of(parts) || experts > MOST_EXPERTS {
            return None;
        }
        let (own, width) = (rows / parts, columns.unwrap_or(1));
        let (row, column) = if transposed { (1, rows as u64) } else { (width as u64, 1) };
        let (row, first) = if interleaved { (row * parts as u64, row) } else { (row, row * own as u64) };
        let shape: Vec<usize> = [own].into_iter().chain(columns).collect();
        let view = |(expert, part): (u64, u64)| {
            let start = expert * (rows * width) as u64 + part * first;
            entry.view(shape.clone(), start, &[(own, row), (width, column)])
        };
        let all = (0..experts as u64).flat_map(|expert| (0..parts as u64).map(move |part| (expert, part)));
        all.map(view).collect()
    }
}

/// Ends of the names of the causal masks of GPT-2 and GPT-NeoX. Their projections are `attn.c_attn` and
/// `attention.query_key_value`.
const MASKS: [&str; 4] = [".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"];

/// Tables that old versions stored and every version recomputes: no warning is needed.
const TABLES: &str = "tables that are recomputed";
