//! Caches on disk: a safetensors file, with metadata that identifies the model.
//!
//! Tensors are named `LAYER.SLOT.NUMBER`. The metadata holds the fingerprint of the model's weights, the type
//! of its numbers, the plan of the cache, the tokens, and a SHA-256 of everything.

mod prefixes;

use std::{collections::HashMap, path::Path};

use burn::tensor::{DType, TensorData};
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    files::{self, NewFile},
    layer::LayerState,
    model::TokenId,
    model_cache::{CacheState, ModelCache},
    tensor_file::TensorFile,
};
use safetensors::{Dtype, tensor::TensorView};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use crate::Model;

const FORMAT: &str = "kiln.cache/2";

/// A cache and its tokens.
#[derive(Debug)]
#[non_exhaustive]
pub struct SavedCache {
    /// The keys, values and states that were computed from the tokens.
    pub cache: ModelCache,
    /// The tokens of each row, without padding. The cache holds all of them, or all but the latest few.
    pub tokens: Vec<Vec<TokenId>>,
    /// Number of padding slots at the start of each row.
    pub left_pad: Vec<usize>,
}

/// The metadata of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    model: String,
    dtype: String,
    cache: String,
    tokens: Vec<Vec<TokenId>>,
    left_pad: Vec<usize>,
    /// Number of rows in each group of rows with one length; empty if all rows have the same length. Each
    /// group has all layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    groups: Vec<usize>,
    layers: Vec<LayerHeader>,
}

/// A [`LayerState`] without its tensors.
#[derive(Debug, Serialize, Deserialize)]
struct LayerHeader {
    seq_len: usize,
    history: usize,
    /// Counters of the strategy, by name.
    counts: serde_json::Value,
    /// Number of tensors in each slot.
    slots: Vec<usize>,
}

impl Model {
    /// Checks whether a cache built by `plan` could be saved to `path`, before the work whose result it will
    /// hold.
    ///
    /// # Errors
    /// [`Error::Setting`] for a plan that stores nothing, and for a model that was not loaded from a folder;
    /// [`Error::File`] for a path that cannot be written.
    pub fn check_saving(&self, path: &Path, plan: &Plan) -> Result<()> {
        self.fingerprint()?;
        if !plan.remembers(&self.causal().needs()) {
            let why = format!("`{}` remembers nothing, so there is nothing to save", plan.global);
            return Err(Error::Setting { name: "cache", why });
        }
        files::check_writable(path)
    }

    /// The plan of the cache that is saved in `path`.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is not a saved cache.
    pub fn plan_of_saved(&self, path: &Path) -> Result<Plan> {
        let (_, header) = opened(path)?;
        saved_plan(&header, path)
    }

    /// Writes `cache`, which was built by `plan` and holds `tokens`, to a file.
    ///
    /// # Errors
    /// The errors of [`check_saving`](Self::check_saving). An existing file is left as it was in this case.
    pub fn save_cache(
        &self,
        path: &Path,
        plan: &Plan,
        cache: &mut ModelCache,
        tokens: &[Vec<TokenId>],
        left_pad: &[usize],
    ) -> Result<()> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let needs = self.causal().needs();
        // Layers may have been packed since then, when memory ran out.
        let plan = plan.of_cache(&needs, cache)?;
        self.check_saving(path, &plan)?;
        let new = NewFile::create(path)?;
        let CacheState { rows: groups, layers: states } = cache.save()?;
        let header = Header {
            model: self.fingerprint()?.to_owned(),
            dtype: self.dtype().name().to_owned(),
            // Offloading does not change the contents of layers.
            cache: Plan { offload: None, ..plan }.to_string(),
            tokens: tokens.to_vec(),
            left_pad: left_pad.to_vec(),
            groups,
            layers: LayerHeader::of(&states),
        };
        let (views, metadata) = contents(FORMAT, &header, named("", &states)).map_err(wrong)?;
        safetensors::serialize_to_file(views, Some(metadata), new.temporary())
            .map_err(|e| wrong(format!("cannot be written: {e}")))?;
        new.finish()
    }

    /// Loads a cache that this model wrote with a plan like `plan`.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is damaged, or belongs to another model, type or cache.
    pub fn load_cache(&self, path: &Path, plan: &Plan) -> Result<SavedCache> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let damaged = |e: String| wrong(not_whole(&e));
        let (mut file, header) = opened(path)?;
        let needs = self.causal().needs();
        let saved = saved_plan(&header, path)?;
        let other = |what, saved: &str, here: &str| {
            Err(wrong(format!("was saved with the {what} `{saved}`, and this is `{here}`")))
        };
        if header.model != self.fingerprint()? {
            return Err(wrong("was saved with another model's weights".to_owned()));
        }
        if header.dtype != self.dtype().name() {
            return other("type of numbers", &header.dtype, self.dtype().name());
        }
        if saved.used(&needs) != plan.used(&needs) {
            return other("cache", &saved.describe(&needs), &plan.describe(&needs));
        }
        let Header { tokens, left_pad, groups: rows, layers, .. } = header;
        let layers = file.layers("", layers, self.dtype())?;
        file.check()?;
        let mut cache = self.cache(plan)?;
        cache.restore(CacheState { rows, layers }).map_err(|e| match e {
            Error::Import { why } => damaged(why),
            other => other,
        })?;
        let fits = |((row, &pad), seen): ((&Vec<TokenId>, &usize), usize)| {
            let end = row.len().checked_add(pad);
            pad <= seen
                && end.is_some_and(|end| end >= seen)
                && row.iter().all(|&id| (id as usize) < self.sizes().vocab)
        };
        if !cache.is_of_rows(tokens.len())
            || tokens.is_empty()
            || tokens.len() != left_pad.len()
            || !tokens.iter().zip(&left_pad).zip(cache.seq_lens(tokens.len())).all(fits)
        {
            return Err(damaged("its tokens do not belong to its tensors".to_owned()));
        }
        Ok(SavedCache { cache, tokens, left_pad })
    }
}

/// The plan of a saved cache.
fn saved_plan(header: &Header, path: &Path) -> Result<Plan> {
    Plan::named(&header.cache).map_err(|e| Error::File { path: path.to_owned(), why: e.to_string() })
}

/// Opens a saved cache, and reads its header.
fn opened(path: &Path) -> Result<(Contents, Header)> {
    Contents::new(TensorFile::open(path)?, FORMAT, "a cache that Kiln saved")
}

/// The tensors of a file, and a hash of those that were read.
struct Contents {
    file: TensorFile,
    hash: Sha256,
    /// The hash that the file states.
    sha256: String,
}

impl Contents {
    /// Reads the header of a file of this format. `what`: a name of the format for messages.
    fn new<H: DeserializeOwned>(file: TensorFile, format: &str, what: &str) -> Result<(Self, H)> {
        let wrong = |why: String| Error::File { path: file.path().to_owned(), why };
        let metadata = file.metadata().cloned().unwrap_or_default();
        match metadata.get("format").map(String::as_str) {
            Some(found) if found == format => {}
            Some(other) if other.split('/').next() == format.split('/').next() => {
                return Err(wrong(format!(
                    "was saved by another version of Kiln ({other}; this one reads {format}); save it again"
                )));
            }
            _ => return Err(wrong(format!("is not {what} ({format})"))),
        }
        let entry = |key: &str| metadata.get(key).cloned().unwrap_or_default();
        let (text, sha256) = (entry("header"), entry("sha256"));
        let header = serde_json::from_str(&text).map_err(|e| wrong(not_whole(&e.to_string())))?;
        let hash = Sha256::new_with_prefix(text);
        Ok((Self { file, hash, sha256 }, header))
    }

    fn wrong(&self, why: String) -> Error {
        Error::File { path: self.file.path().to_owned(), why }
    }

    /// Reads the layers of a cache with numbers of this type. Names of tensors begin with `prefix`.
    fn layers(&mut self, prefix: &str, headers: Vec<LayerHeader>, own: DType) -> Result<Vec<LayerState>> {
        let tensors = self.file.tensors().len();
        let mut layers = Vec::new();
        for (layer, LayerHeader { seq_len, history, counts, slots: lens }) in headers.into_iter().enumerate()
        {
            let mut slots = Vec::new();
            for (slot, len) in lens.into_iter().enumerate() {
                if len > tensors {
                    return Err(self.wrong(not_whole(&format!("{len} tensors in a slot"))));
                }
                let tensors = (0..len).map(|i| self.tensor(&name(prefix, layer, slot, i), own));
                slots.push(tensors.collect::<Result<_>>()?);
            }
            layers.push(LayerState { seq_len, history, counts, slots });
        }
        Ok(layers)
    }

    fn tensor(&mut self, name: &str, own: DType) -> Result<TensorData> {
        let damaged = |why: String| self.wrong(not_whole(&why));
        let info = self.file.tensor(name).ok_or_else(|| damaged(format!("`{name}` is missing")))?;
        // States, and scales of packed keys and values, are float32 in all models.
        let dtype = held(info.dtype).filter(|dtype| [DType::I32, DType::F32, own].contains(dtype));
        let dtype = dtype.ok_or_else(|| damaged(format!("{:?} in `{name}`", info.dtype)))?;
        let bytes = self.file.read_tensor(info)?;
        self.hash.update(&bytes);
        Ok(TensorData::from_bytes_vec(bytes, info.shape.clone(), dtype))
    }

    /// Checks that the tensors that were read are those that were saved.
    fn check(self) -> Result<()> {
        if self.sha256 == hex(self.hash.clone()) {
            return Ok(());
        }
        Err(self.wrong("was altered since it was saved: its checksum is another".to_owned()))
    }
}

/// The tensors and the metadata of a file.
#[expect(clippy::type_complexity, reason = "the types of safetensors")]
fn contents<'a>(
    format: &str,
    header: &impl Serialize,
    tensors: impl Iterator<Item = (String, &'a TensorData)>,
) -> Result<(Vec<(String, TensorView<'a>)>, HashMap<String, String>), String> {
    let header = serde_json::to_string(header).map_err(|e| e.to_string())?;
    let mut hash = Sha256::new_with_prefix(&header);
    let mut views = Vec::new();
    for (name, data) in tensors {
        hash.update(data.as_bytes());
        let dtype = stored(data.dtype()).ok_or_else(|| format!("{:?} is not stored", data.dtype()))?;
        let view = TensorView::new(dtype, data.shape().to_vec(), data.as_bytes());
        views.push((name, view.map_err(|e| e.to_string())?));
    }
    let metadata = [("format", format.to_owned()), ("header", header), ("sha256", hex(hash))];
    Ok((views, metadata.map(|(key, value)| (key.to_owned(), value)).into()))
}

impl LayerHeader {
    fn of(states: &[LayerState]) -> Vec<Self> {
        let header = |LayerState { seq_len, history, counts, slots }: &LayerState| Self {
            seq_len: *seq_len,
            history: *history,
            counts: counts.clone(),
            slots: slots.iter().map(Vec::len).collect(),
        };
        states.iter().map(header).collect()
    }
}

fn not_whole(why: &str) -> String {
    format!("is not a whole cache file ({why})")
}

fn name(prefix: &str, layer: usize, slot: usize, i: usize) -> String {
    format!("{prefix}{layer}.{slot}.{i}")
}

/// The tensors of layers, with their names.
fn named<'a>(prefix: &'a str, states: &'a [LayerState]) -> impl Iterator<Item = (String, &'a TensorData)> {
    states.iter().enumerate().flat_map(move |(layer, state)| {
        let slots = state.slots.iter().enumerate();
        slots.flat_map(move |(slot, host)| {
            host.iter().enumerate().map(move |(i, data)| (name(prefix, layer, slot, i), data))
        })
    })
}

fn stored(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        _ => return None,
    })
}

fn held(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::I32,
        _ => return None,
    })
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
