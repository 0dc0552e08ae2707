//! The files of a model, from a Hugging Face folder or a GGUF file, and the tensors in them.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::PathBuf,
    sync::Arc,
};

use burn::tensor::DType;
use kiln_core::{
    Error, Result,
    source::{self, Source},
    tensor_file::TensorFile,
};
use kiln_kernels::{Kernels, PackedLayout};
use kiln_weights::{
    Format, Mixture,
    gguf::names::{self, Heads},
};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sha2::{Digest, Sha256};

mod adapter;
mod convert;
mod decode;
pub(crate) mod foreign;
pub(crate) mod gguf;
mod loader;
mod locate;
pub(crate) mod model_files;
mod places;
mod quantize;
mod quantized;
mod settle;
mod upload;
mod view;

pub use adapter::Adapter;
pub use loader::Loader;
pub(crate) use loader::format_of;
pub use quantize::{PackedTensor, Quantized, packed_tensors, quantize};

use self::{
    convert::Stored,
    gguf::GgufFiles,
    model_files::ModelFiles,
    quantized::Method,
    view::{LastRead, View},
};
use crate::{ConfigFile, config::read_json, configure, nn::names::is_second};

/// The file that names the shard of each tensor.
const INDEX: &str = "model.safetensors.index.json";

/// Upper limit for the number of tensors in a header.
const MOST_TENSORS: usize = 1 << 18;

/// Shapes and numbers of tensors by their names.
pub type SmallTensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Reads all tensors of a safetensors file, in float32.
fn small_tensors(bytes: &[u8]) -> Result<SmallTensors, String> {
    let tensors =
        SafeTensors::deserialize(bytes).map_err(|error| format!("is not a safetensors file: {error}"))?;
    let mut all = SmallTensors::new();
    for (name, view) in tensors.tensors() {
        let data = view.data();
        let half = |number: fn(u16) -> f32| {
            data.as_chunks().0.iter().map(|bytes| number(u16::from_le_bytes(*bytes))).collect()
        };
        let numbers: Vec<f32> = match view.dtype() {
            Dtype::F32 => data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Dtype::F16 => half(|bits| half::f16::from_bits(bits).to_f32()),
            Dtype::BF16 => half(|bits| half::bf16::from_bits(bits).to_f32()),
            other => return Err(format!("holds `{name}` as {other:?}, which is not read here")),
        };
        all.insert(name, (view.shape().to_vec(), numbers));
    }
    Ok(all)
}

/// The config of a model and the headers of its weights, whose files are open. Tensor data is read only when
/// loaded.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder, or the GGUF file, for messages.
    pub folder: PathBuf,
    pub config: ConfigFile,
    source: Arc<dyn Source>,
    files: Files,
    /// Tensors by their names in the files.
    tensors: BTreeMap<String, Entry>,
    /// The formats that tensors are packed in during loading, by file number and offset in the file.
    packed: BTreeMap<(usize, u64), Format>,
    last_read: LastRead,
}

/// The files that hold the tensors.
#[derive(Debug)]
enum Files {
    Safetensors(Vec<TensorFile>),
    Gguf { files: GgufFiles, model_type: String, heads: Heads },
}

/// The location and type of a tensor.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    /// Number of the file.
    file: usize,
    stored: Stored,
    shape: Vec<usize>,
    /// Byte range in the file's data. That of a view begins with its first element and has its size.
    range: Range<u64>,
    /// Order of the elements in the file; `None` if they follow each other.
    view: Option<View>,
}

impl Entry {
    fn elements(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product()
    }

    /// Size in bytes, without its companions.
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Returns the stored tensors of this entry: itself, and the companions of the codes of a quantized
    /// matrix.
    fn tensors(&self) -> impl Iterator<Item = &Self> {
        let parts = match &self.stored {
            Stored::Quantized(group) => Some(group.parts()),
            Stored::Plain(_) | Stored::Packed(_) => None,
        };
        std::iter::once(self).chain(parts.into_iter().flatten())
    }

    /// Size of all its tensors in bytes.
    fn bytes(&self) -> u64 {
        self.tensors().map(Self::len).sum()
    }
}

impl Checkpoint {
    /// Reads the config and the headers of all weights in `folder`, or those of a GGUF file.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is missing, damaged or contradicts itself.
    pub fn open(folder: &std::path::Path) -> Result<Self> {
        Self::of_files(ModelFiles::at(folder)?)
    }

    /// Reads the config and the headers of all weights in a source: those of a folder if it has a
    /// `config.json`, or else those of its GGUF file.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is missing, damaged or contradicts itself.
    pub fn from_source(source: Arc<dyn Source>) -> Result<Self> {
        Self::of_files(ModelFiles::of(source)?)
    }

    fn of_files(place: ModelFiles) -> Result<Self> {
        if let Some(name) = &place.gguf {
            return Self::of_gguf(&place, name);
        }
        let source = place.source.clone();
        let config = ConfigFile::from_source(&*source)?;
        let method = Method::read(&config)?;
        let mut checkpoint = Self {
            folder: place.path(),
            config,
            source: place.source,
            files: Files::Safetensors(Vec::new()),
            tensors: BTreeMap::new(),
            packed: BTreeMap::new(),
            last_read: LastRead::default(),
        };
        // As in Transformers: an index beside a whole file is left over from the shards it was merged from.
        if !checkpoint.add("model.safetensors")? {
            let json = read_json(&*source, INDEX)?.ok_or_else(|| foreign::no_weights(&*source))?;
            checkpoint.add_indexed(&json)?;
        }
        if let Some(method) = method {
            checkpoint.gather(&method)?;
        }
        checkpoint.settle()?;
        Ok(checkpoint)
    }

    fn of_gguf(place: &ModelFiles, name: &str) -> Result<Self> {
        let (source, folder) = (place.source.clone(), place.path());
        let files = GgufFiles::open(&*source, name)?;
        let config = ConfigFile::of_gguf(&folder, &files)?;
        let number = |key: &str| Some(config.get(key)?.as_u64()? as usize);
        let heads = number("num_attention_heads").unwrap_or(0);
        let heads = Heads {
            heads,
            kv_heads: number("num_key_value_heads").unwrap_or(heads),
            state_heads: number("linear_num_key_heads").unwrap_or(0),
        };
        let model_type = config.model_type()?;
        let mut tensors = BTreeMap::new();
        for (file, part) in files.parts().iter().enumerate() {
            for tensor in part.tensors() {
                let entry = Entry {
                    file,
                    stored: Stored::of(tensor.format),
                    shape: tensor.shape.clone(),
                    range: tensor.range.clone(),
                    view: None,
                };
                if tensors.insert(tensor.name.clone(), entry).is_some() {
                    let why = format!("`{}` is in another part, too", tensor.name);
                    return Err(Error::File { path: part.path.clone(), why });
                }
            }
        }
        // Blocks that predict further tokens are not read.
        if let Some((blocks, further)) = number("num_hidden_layers").zip(number("num_nextn_predict_layers")) {
            let all = blocks..blocks.saturating_add(further);
            tensors.retain(|name, _| names::block(name).is_none_or(|block| !all.contains(&block)));
        }
        // Blocks that use the keys of others may have some of their own.
        if let Ok(configured) = configure(&config) {
            for (module, _) in configured.tensor_names().unread {
                let unread = names::source(&model_type, &format!("{module}weight"), heads);
                unread.map(|unread| tensors.remove(&unread.name));
            }
        }
        let files = Files::Gguf { files, model_type, heads };
        let (packed, last_read) = (BTreeMap::new(), LastRead::default());
        Ok(Self { folder, config, source, files, tensors, packed, last_read })
    }

    /// Returns the text of a small file of the folder, or its counterpart from a GGUF file; `None` if there
    /// is none.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read.
    pub fn text(&self, file: &str) -> Result<Option<String>> {
        match &self.files {
            Files::Safetensors(_) => source::read_text(&*self.source, file),
            Files::Gguf { files, .. } => files.text(file),
        }
    }

    /// Reads all tensors of a small file beside the weights, in float32, with their shapes; `None` if there
    /// is no such file.
    ///
    /// # Errors
    /// [`Error::File`] for a damaged file, and for numbers that are not float32, float16 or bfloat16.
    pub fn small_tensors(&self, file: &str) -> Result<Option<SmallTensors>> {
        let Some(bytes) = source::read(&*self.source, file, source::LONGEST_TEXT)? else { return Ok(None) };
        let wrong = |why: String| Error::File { path: self.path_of(file), why };
        small_tensors(&bytes).map(Some).map_err(wrong)
    }

    /// Returns the names of the files in a folder within the folder. A GGUF file has none.
    pub fn names(&self, folder: &str) -> Vec<String> {
        match &self.files {
            Files::Safetensors(_) => self.source.names(folder),
            Files::Gguf { .. } => Vec::new(),
        }
    }

    /// Whether this is a GGUF file rather than a folder.
    pub fn is_gguf(&self) -> bool {
        matches!(self.files, Files::Gguf { .. })
    }

    /// Path of a small file of the folder, for messages.
    pub fn path_of(&self, file: &str) -> PathBuf {
        match &self.files {
            Files::Safetensors(_) => self.source.path(file),
            Files::Gguf { .. } => self.folder.clone(),
        }
    }

    /// Returns the number of elements and of bytes per dtype name.
    pub fn by_dtype(&self) -> BTreeMap<String, (u64, u64)> {
        let mut sums = BTreeMap::<String, (u64, u64)>::new();
        for (_, entry) in self.tensors.iter().filter(|(name, _)| !is_second(name)) {
            let sum = sums.entry(entry.stored.to_string()).or_default();
            sum.0 += entry.elements();
            sum.1 += entry.bytes();
        }
        sums
    }

    /// Packs matrices during loading, in the formats of a mixture. With `only`, packs just the tensors with
    /// these GGUF names.
    ///
    /// # Errors
    /// [`Error::File`] for a model that [`quantize`] cannot write either.
    pub fn pack_as(&mut self, mixture: Mixture, only: Option<&BTreeSet<String>>) -> Result<()> {
        self.packed = quantize::formats(self, mixture, only)?;
        Ok(())
    }

    /// Returns the first tensor that is already packed in the file, with its name there and its type; `None`
    /// if all tensors hold plain numbers.
    pub fn packed_before(&self) -> Option<(&str, String)> {
        let is_packed = |entry: &Entry| !matches!(entry.stored, Stored::Plain(_));
        let (name, entry) = self.tensors.iter().find(|(_, entry)| is_packed(entry))?;
        Some((name, entry.stored.to_string()))
    }

    /// Returns the format that a tensor is packed in during loading, or else its stored format.
    fn format(&self, entry: &Entry) -> Option<Format> {
        let packed = self.packed.get(&(entry.file, entry.range.start)).copied();
        packed.or_else(|| match &entry.stored {
            Stored::Quantized(group) => group.format(),
            stored => stored.format(),
        })
    }

    /// Returns the size of all loaded weights in bytes. Matrices that `kernels` can compute with stay packed;
    /// the other tensors have elements of `dtype`.
    pub fn held_bytes(&self, kernels: &Kernels, dtype: DType) -> u64 {
        self.tensors.iter().map(|(name, entry)| self.held(name, entry, kernels, dtype)).sum()
    }

    /// Returns [`held_bytes`](Self::held_bytes) for the experts of mixtures alone.
    pub fn held_expert_bytes(&self, kernels: &Kernels, dtype: DType) -> u64 {
        let experts = self.tensors.iter().filter(|(name, _)| is_of_experts(name));
        experts.map(|(name, entry)| self.held(name, entry, kernels, dtype)).sum()
    }

    /// Returns [`held_bytes`](Self::held_bytes) without the blocks that are not in `blocks`.
    pub fn held_bytes_of(&self, blocks: &[usize], kernels: &Kernels, dtype: DType) -> u64 {
        let kept = |name: &str| block_of(name).is_none_or(|(block, _)| blocks.contains(&block));
        let kept = self.tensors.iter().filter(|(name, _)| kept(name));
        kept.map(|(name, entry)| self.held(name, entry, kernels, dtype)).sum()
    }

    /// Describes the tensors of each block, with types and shapes, in a text that is equal for equal blocks.
    /// For 0 blocks, describes the tensors outside all blocks.
    pub fn block_kinds(&self, blocks: usize) -> Vec<String> {
        let mut kinds = vec![String::new(); blocks.max(1)];
        for (name, entry) in &self.tensors {
            let format =
                self.format(entry).map_or_else(|| entry.stored.to_string(), |format| format.to_string());
            let (block, rest) = match block_of(name) {
                Some((block, rest)) if blocks > 0 => (block, rest),
                None if blocks == 0 => (0, name.as_str()),
                _ => continue,
            };
            if let Some(kind) = kinds.get_mut(block) {
                *kind += &format!("{rest} {format} {:?}\n", entry.shape);
            }
        }
        kinds
    }

    /// Returns the formats of weights that stay packed with these kernels.
    pub fn packed_formats(&self, kernels: &Kernels, dtype: DType) -> Vec<Format> {
        let used: Vec<_> = self.tensors.values().filter_map(|entry| self.format(entry)).collect();
        let packed = Format::ALL
            .into_iter()
            .filter(|format| PackedLayout::for_matrix(kernels, *format, dtype).is_some());
        packed.filter(|format| used.contains(format)).collect()
    }

    fn held(&self, name: &str, entry: &Entry, kernels: &Kernels, dtype: DType) -> u64 {
        let numbers = entry.elements();
        let (count, rows, columns) = match entry.shape[..] {
            [rows, columns] => (1, rows, columns),
            [count, rows, columns] if is_of_experts(name) => (count, rows, columns),
            _ => return numbers * dtype.size() as u64,
        };
        let layout = loader::layout_from(self.format(entry), dtype, |format| match is_of_experts(name) {
            true => PackedLayout::for_stack(kernels, format, dtype, rows),
            false => PackedLayout::for_matrix(kernels, format, dtype),
        });
        let packed = layout.and_then(|layout| layout.words([rows, columns]));
        let size = |[rows, words]: [usize; 2]| [count, rows, words, 4].map(|n| n as u64).iter().product();
        packed.map_or(numbers * dtype.size() as u64, size)
    }

    /// Size of all stored weights in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(Entry::bytes).sum()
    }

    /// Returns a name for these weights: the SHA-256 of the config, of every tensor's name, type and shape,
    /// and of samples of its numbers. Models that differ in any tensor get different names, and no weight is
    /// read in full.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        /// Size of a sample in bytes; each tensor is sampled at its beginning, middle and end.
        const SAMPLE: usize = 256;

        let mut hash = Sha256::new();
        hash.update(self.config.text());
        for (name, entry) in &self.tensors {
            hash.update(format!("{name} {} {:?}\n", entry.stored, entry.shape));
            for tensor in entry.tensors() {
                let (len, mut sample) = (tensor.len(), [0; SAMPLE]);
                for start in [0, len / 2, len.saturating_sub(SAMPLE as u64)] {
                    let sample = &mut sample[..SAMPLE.min((len - start) as usize)];
                    self.read(tensor, tensor.range.start + start, sample)?;
                    hash.update(sample);
                }
            }
        }
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Number of files that hold the weights.
    pub fn shards(&self) -> usize {
        match &self.files {
            Files::Safetensors(shards) => shards.len(),
            Files::Gguf { files, .. } => files.parts().len(),
        }
    }

    fn add_indexed(&mut self, json: &Value) -> Result<()> {
        let source = self.source.clone();
        let wrong = |why: String| Error::File { path: source.path(INDEX), why };
        let map = json
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| wrong("`weight_map` is missing".to_owned()))?;
        let mut files = Vec::new();
        for file in map.values() {
            let name = file.as_str().unwrap_or_default();
            // Only a plain name: an index may not point out of its folder.
            if !source::is_plain(name) {
                return Err(wrong(format!("`{file}` is not the name of a file beside it")));
            }
            files.push(name);
        }
        files.sort_unstable();
        files.dedup();
        for file in files {
            if !self.add(file)? {
                let why = "there is no such file".to_owned();
                return Err(Error::File { path: source.path(file), why });
            }
        }
        match map.keys().find(|name| !self.tensors.contains_key(*name)) {
            Some(name) => Err(wrong(format!("`{name}` is listed, but not in the file named for it"))),
            None => Ok(()),
        }
    }

    /// Adds the tensors of a safetensors file; `false` if there is no such file.
    fn add(&mut self, name: &str) -> Result<bool> {
        let path = self.source.path(name);
        let Some(file) = self.source.open(name).wait()? else { return Ok(false) };
        let file = TensorFile::new(&path, file)?;
        let wrong = |why: String| Error::File { path: path.clone(), why };
        let tensors = file.tensors();
        if tensors.len() + self.tensors.len() > MOST_TENSORS {
            return Err(wrong(format!("more than {MOST_TENSORS} tensors are not read")));
        }
        let Files::Safetensors(shards) = &mut self.files else { return Ok(false) };
        for (name, info) in tensors {
            let range = info.data_offsets.0..info.data_offsets.1;
            let stored = Stored::Plain(info.dtype);
            let entry = Entry { file: shards.len(), stored, shape: info.shape.clone(), range, view: None };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(wrong(format!("`{name}` is in another file too")));
            }
        }
        shards.push(file);
        Ok(true)
    }

    /// The error for a tensor that does not fit the address space.
    fn too_large(&self, entry: &Entry) -> Error {
        let why = "has a tensor larger than this machine can address".to_owned();
        Error::File { path: self.path(entry), why }
    }

    /// Reads from offset `start`, which has the same origin as the range of `entry`.
    fn read(&self, entry: &Entry, start: u64, bytes: &mut [u8]) -> Result<()> {
        match &entry.view {
            Some(view) => self.read_view(entry, view, start - entry.range.start, bytes),
            None => self.read_file(entry, start, bytes),
        }
    }

    /// Reads from offset `start` of the file's data.
    fn read_file(&self, entry: &Entry, start: u64, bytes: &mut [u8]) -> Result<()> {
        let read = match &self.files {
            Files::Safetensors(shards) => shards.get(entry.file).map(|file| file.read(start, bytes)),
            Files::Gguf { files, .. } => files.parts().get(entry.file).map(|file| file.read(start, bytes)),
        };
        read.unwrap_or_else(|| {
            Err(Error::File { path: self.folder.clone(), why: "has lost a file".to_owned() })
        })
    }

    fn path(&self, entry: &Entry) -> PathBuf {
        let path = match &self.files {
            Files::Safetensors(shards) => shards.get(entry.file).map(TensorFile::path),
            Files::Gguf { files, .. } => files.parts().get(entry.file).map(|part| &*part.path),
        };
        path.unwrap_or(&self.folder).to_owned()
    }
}

/// Returns the block number in the name of a tensor (of a folder or a GGUF file), and the rest of the name.
fn block_of(name: &str) -> Option<(usize, &str)> {
    let after = ["layers.", "blk.", "transformer.h."]
        .into_iter()
        .find_map(|before| Some(name.split_once(before)?.1))?;
    let (number, rest) = after.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

/// Whether a tensor holds weights of routed experts, by its name in a folder or a GGUF file.
fn is_of_experts(name: &str) -> bool {
    name.contains(".experts.") || name.contains("_exps.")
}
