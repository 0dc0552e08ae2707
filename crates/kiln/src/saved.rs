//! Caches on disk: a safetensors file, with what it belongs to in its metadata.
//!
//! Tensors are named `LAYER.SLOT.NUMBER`. The metadata holds the fingerprint of the model's weights, the type of its
//! numbers, the cache as the command line names it, the tokens, and a SHA-256 of all of it.

use std::{collections::HashMap, fs, path::Path};

use burn::tensor::{DType, TensorData};
use kiln_cache::Plan;
use kiln_core::{Error, Result, layer::LayerState, model::TokenId, model_cache::ModelCache, trusted};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Model;

const FORMAT: &str = "kiln.cache/1";

/// A cache, and the text that it is the memory of.
#[derive(Debug)]
pub struct SavedCache {
    pub cache: ModelCache,
    /// The tokens of each row, padding left out. The cache holds all of them, or all but the latest few.
    pub tokens: Vec<Vec<TokenId>>,
    /// Padding slots at the start of each row.
    pub left_pad: Vec<usize>,
}

/// What stands beside the tensors.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    model: String,
    dtype: String,
    cache: String,
    tokens: Vec<Vec<TokenId>>,
    left_pad: Vec<usize>,
    /// Of each layer: its counts, and how many tensors each of its slots holds.
    layers: Vec<(Vec<usize>, Vec<usize>)>,
}

impl Model {
    /// Writes `cache`, which was built by `plan` and is the memory of `tokens`, to a file.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be written: then what was there before is still there. [`Error::Setting`] for a model
    /// that came from no folder.
    pub fn save_cache(
        &self,
        path: &Path,
        plan: &Plan,
        cache: &mut ModelCache,
        tokens: &[Vec<TokenId>],
        left_pad: &[usize],
    ) -> Result<()> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let states = cache.save()?;
        let header = Header {
            model: self.fingerprint()?.to_owned(),
            dtype: self.dtype().name().to_owned(),
            cache: plan.describe(&self.causal().needs()),
            tokens: tokens.to_vec(),
            left_pad: left_pad.to_vec(),
            layers: (states.iter())
                .map(|state| (state.counts.clone(), state.slots.iter().map(Vec::len).collect()))
                .collect(),
        };
        let header = serde_json::to_string(&header).map_err(|e| wrong(e.to_string()))?;
        let mut hash = Sha256::new();
        hash.update(&header);
        let mut views = Vec::new();
        for (name, data) in named(&states) {
            hash.update(data.as_bytes());
            let dtype =
                stored(data.dtype()).ok_or_else(|| wrong(format!("{:?} is not stored", data.dtype())))?;
            let view = TensorView::new(dtype, data.shape().to_vec(), data.as_bytes());
            views.push((name, view.map_err(|e| wrong(e.to_string()))?));
        }
        let metadata = HashMap::from([
            ("format".to_owned(), FORMAT.to_owned()),
            ("header".to_owned(), header),
            ("sha256".to_owned(), hex(hash)),
        ]);
        // Beside it first: a full disk must not cost what was saved before.
        let mut beside = path.as_os_str().to_owned();
        beside.push(".part");
        let written = safetensors::serialize_to_file(views, Some(metadata), Path::new(&beside))
            .map_err(|e| wrong(e.to_string()))
            .and_then(|()| fs::rename(&beside, path).map_err(|e| wrong(e.to_string())));
        if written.is_err() {
            _ = fs::remove_file(&beside);
        }
        written
    }

    /// Reads a cache that this model and a plan like `plan` left.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is damaged, or belongs to another model, type or cache.
    pub fn load_cache(&self, path: &Path, plan: &Plan) -> Result<SavedCache> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let map = trusted::map_file(path).map_err(|e| wrong(e.to_string()))?;
        let damaged = |e: String| wrong(format!("is not a whole cache file ({e})"));
        let (_, metadata) = SafeTensors::read_metadata(&map).map_err(|e| damaged(e.to_string()))?;
        let metadata = metadata.metadata().clone().unwrap_or_default();
        if metadata.get("format").map(String::as_str) != Some(FORMAT) {
            return Err(wrong(format!("is not a cache that Kiln saved ({FORMAT})")));
        }
        let text = metadata.get("header").map_or("", String::as_str);
        let header: Header = serde_json::from_str(text).map_err(|e| damaged(e.to_string()))?;
        let needs = self.causal().needs();
        for (what, saved, here) in [
            ("model", header.model.as_str(), self.fingerprint()?),
            ("type of numbers", header.dtype.as_str(), self.dtype().name()),
            ("cache", header.cache.as_str(), plan.describe(&needs).as_str()),
        ] {
            if saved != here {
                return Err(wrong(match what {
                    "model" => "was saved with another model's weights".to_owned(),
                    _ => format!("was saved with the {what} `{saved}`, and this is `{here}`"),
                }));
            }
        }
        let tensors = SafeTensors::deserialize(&map).map_err(|e| damaged(e.to_string()))?;
        let mut hash = Sha256::new();
        hash.update(text);
        let mut read = |name: String| {
            let view = tensors.tensor(&name).map_err(|e| damaged(e.to_string()))?;
            let dtype =
                held(view.dtype()).ok_or_else(|| damaged(format!("{:?} in `{name}`", view.dtype())))?;
            hash.update(view.data());
            Ok(TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype))
        };
        let mut states = Vec::new();
        for (layer, (counts, slots)) in header.layers.iter().enumerate() {
            let mut state = LayerState { counts: counts.clone(), slots: Vec::new() };
            for (slot, &len) in slots.iter().enumerate() {
                if len > tensors.len() {
                    return Err(damaged(format!("{len} tensors in a slot")));
                }
                state.slots.push((0..len).map(|i| read(name(layer, slot, i))).collect::<Result<_>>()?);
            }
            states.push(state);
        }
        if metadata.get("sha256") != Some(&hex(hash)) {
            return Err(wrong("was altered since it was saved: its checksum is another".to_owned()));
        }
        let mut cache = self.cache(plan)?;
        cache.restore(states, self.device())?;
        let Header { tokens, left_pad, .. } = header;
        let fits = |(row, pad): (&Vec<TokenId>, &usize)| {
            row.len() + pad >= cache.seq_len() && row.iter().all(|&id| (id as usize) < self.sizes().vocab)
        };
        if tokens.is_empty() || tokens.len() != left_pad.len() || !tokens.iter().zip(&left_pad).all(fits) {
            return Err(damaged("its tokens do not belong to its tensors".to_owned()));
        }
        Ok(SavedCache { cache, tokens, left_pad })
    }
}

fn name(layer: usize, slot: usize, i: usize) -> String {
    format!("{layer}.{slot}.{i}")
}

fn named(states: &[LayerState]) -> impl Iterator<Item = (String, &TensorData)> {
    states.iter().enumerate().flat_map(|(layer, state)| {
        let slots = state.slots.iter().enumerate();
        slots.flat_map(move |(slot, host)| {
            host.iter().enumerate().map(move |(i, data)| (name(layer, slot, i), data))
        })
    })
}

fn stored(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::U32 => Dtype::U32,
        _ => return None,
    })
}

fn held(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::U32 => DType::U32,
        _ => return None,
    })
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
