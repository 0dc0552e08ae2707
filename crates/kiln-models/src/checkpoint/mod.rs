//! A Hugging Face folder: which files it has, and which tensors are in them.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use kiln_core::{Error, Result, tensor_file::TensorFile};
use kiln_kernels::PackedFormat;
use safetensors::Dtype;
use serde_json::Value;
use sha2::{Digest, Sha256};

mod convert;
pub(crate) mod foreign;
mod loader;

pub use loader::Loader;

use crate::{ConfigFile, config::read_json};

/// More tensors than any model has; a header may not ask for more.
const MOST_TENSORS: usize = 1 << 16;

/// The config of a folder and the headers of its weights, whose files are open. Nothing is read until it is loaded.
#[derive(Debug)]
pub struct Checkpoint {
    pub folder: PathBuf,
    pub config: ConfigFile,
    shards: Vec<TensorFile>,
    tensors: BTreeMap<String, Entry>,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes of the shard's data
    range: Range<usize>,
}

impl Checkpoint {
    /// Reads the config and the headers of all weights in `folder`.
    ///
    /// # Errors
    /// [`Error::File`] for what is missing, damaged or contradicts itself.
    pub fn open(folder: &Path) -> Result<Self> {
        let config = ConfigFile::read(folder)?;
        foreign::check_packed(&config)?;
        let mut checkpoint =
            Self { folder: folder.to_owned(), config, shards: Vec::new(), tensors: BTreeMap::new() };
        let index = folder.join("model.safetensors.index.json");
        match read_json(&index)? {
            Some(json) => checkpoint.add_indexed(&index, &json)?,
            None if folder.join("model.safetensors").exists() => {
                checkpoint.add(&folder.join("model.safetensors"))?;
            }
            None => return Err(foreign::no_weights(folder)),
        }
        Ok(checkpoint)
    }

    /// Tensors by dtype name: how many elements, how many bytes.
    pub fn by_dtype(&self) -> BTreeMap<String, (u64, u64)> {
        let mut sums = BTreeMap::<String, (u64, u64)>::new();
        for entry in self.tensors.values() {
            let sum = sums.entry(format!("{:?}", entry.dtype)).or_default();
            sum.0 += entry.shape.iter().product::<usize>() as u64;
            sum.1 += entry.range.len() as u64;
        }
        sums
    }

    /// Elements of the matrices that are stored in bfloat16 and can stay so.
    pub fn bf16_elements(&self) -> u64 {
        let stays = |entry: &&Entry| {
            entry.dtype == Dtype::BF16
                && entry.shape.len() == 2
                && PackedFormat::Bf16.words(entry.shape[1]).is_some()
        };
        let elements = |entry: &Entry| entry.shape.iter().product::<usize>() as u64;
        self.tensors.values().filter(stays).map(elements).sum()
    }

    /// Bytes of all weights as they are stored.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// A name for these weights: the SHA-256 of the config, of every tensor's name, type and shape, and of samples of its
    /// numbers. Models that differ in any tensor have another, and no weight needs to be read in whole.
    ///
    /// # Errors
    /// [`Error::File`] where a file cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        /// Bytes of each sample; every tensor gives one at its beginning, its middle and its end.
        const SAMPLE: usize = 256;

        let mut hash = Sha256::new();
        hash.update(self.config.text());
        for (name, entry) in &self.tensors {
            hash.update(format!("{name} {:?} {:?}\n", entry.dtype, entry.shape));
            let (len, mut sample) = (entry.range.len(), [0; SAMPLE]);
            for start in [0, len / 2, len.saturating_sub(SAMPLE)] {
                let sample = &mut sample[..SAMPLE.min(len - start)];
                self.read(entry, entry.range.start + start, sample)?;
                hash.update(sample);
            }
        }
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// How many files hold the weights.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    fn add_indexed(&mut self, index: &Path, json: &Value) -> Result<()> {
        let wrong = |why: String| Error::File { path: index.to_owned(), why };
        let map = json
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| wrong("`weight_map` is missing".to_owned()))?;
        let mut files = Vec::new();
        for file in map.values() {
            let name = file.as_str().unwrap_or_default();
            // A plain name: an index may not point out of its folder.
            if Path::new(name).file_name().is_none_or(|plain| plain != name) {
                return Err(wrong(format!("`{file}` is not the name of a file beside it")));
            }
            files.push(name);
        }
        files.sort_unstable();
        files.dedup();
        for file in files {
            self.add(&self.folder.join(file))?;
        }
        match map.keys().find(|name| !self.tensors.contains_key(*name)) {
            Some(name) => Err(wrong(format!("`{name}` is listed, but not in the file named for it"))),
            None => Ok(()),
        }
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = TensorFile::open(path)?;
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let tensors = file.tensors();
        if tensors.len() + self.tensors.len() > MOST_TENSORS {
            return Err(wrong(format!("more than {MOST_TENSORS} tensors are not read")));
        }
        for (name, info) in tensors {
            let range = info.data_offsets.0..info.data_offsets.1;
            let entry =
                Entry { shard: self.shards.len(), dtype: info.dtype, shape: info.shape.clone(), range };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(wrong(format!("`{name}` is in another file too")));
            }
        }
        self.shards.push(file);
        Ok(())
    }

    /// Reads from `start` on, which counts as the range of `entry` does.
    fn read(&self, entry: &Entry, start: usize, bytes: &mut [u8]) -> Result<()> {
        match self.shards.get(entry.shard) {
            Some(file) => file.read(start as u64, bytes),
            None => Err(Error::File { path: self.folder.clone(), why: "has lost a file".to_owned() }),
        }
    }

    fn path(&self, entry: &Entry) -> PathBuf {
        self.shards.get(entry.shard).map_or(&*self.folder, TensorFile::path).to_owned()
    }
}
