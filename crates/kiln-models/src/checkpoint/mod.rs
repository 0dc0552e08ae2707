//! A Hugging Face folder: which files it has, and which tensors are in them.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use kiln_core::{Error, Result, trusted};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sha2::{Digest, Sha256};

mod convert;
mod loader;

pub use loader::Loader;

use crate::{ConfigFile, config::read_json};

/// More tensors than any model has; a header may not ask for more.
const MOST_TENSORS: usize = 1 << 16;

/// The weights of a folder, mapped into memory, and its config. Nothing is copied until it is loaded.
#[derive(Debug)]
pub struct Checkpoint {
    pub folder: PathBuf,
    pub config: ConfigFile,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes of the shard's file
    range: Range<usize>,
}

impl Checkpoint {
    /// Reads the config and the headers of all weights in `folder`.
    ///
    /// # Errors
    /// [`Error::File`] for what is missing, damaged or contradicts itself.
    pub fn open(folder: &Path) -> Result<Self> {
        let config = ConfigFile::read(folder)?;
        let mut checkpoint =
            Self { folder: folder.to_owned(), config, shards: Vec::new(), tensors: BTreeMap::new() };
        let index = folder.join("model.safetensors.index.json");
        match read_json(&index)? {
            Some(json) => checkpoint.add_indexed(&index, &json)?,
            None => checkpoint.add(&folder.join("model.safetensors"))?,
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

    /// Bytes of all weights as they are stored.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// A name for these weights: the SHA-256 of the config, of every tensor's name, type and shape, and of samples of its
    /// numbers. Models that differ in any tensor have another, and no weight needs to be read in whole.
    pub fn fingerprint(&self) -> String {
        /// Bytes of each sample; every tensor gives one at its beginning, its middle and its end.
        const SAMPLE: usize = 256;

        let mut hash = Sha256::new();
        hash.update(self.config.text());
        for (name, entry) in &self.tensors {
            hash.update(format!("{name} {:?} {:?}\n", entry.dtype, entry.shape));
            let data = self.data(entry);
            for start in [0, data.len() / 2, data.len().saturating_sub(SAMPLE)] {
                hash.update(&data[start..(start + SAMPLE).min(data.len())]);
            }
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
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
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let map = trusted::map_file(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                wrong("there is no such file; weights are read from safetensors files".to_owned())
            }
            _ => wrong(e.to_string()),
        })?;
        // Checks the header's length, that offsets lie in order without gaps, and that they cover the file exactly.
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| wrong(format!("is not a whole safetensors file ({e}); download it again")))?;
        let data = header.checked_add(8).ok_or_else(|| wrong("its header has no end".to_owned()))?;
        let tensors = metadata.tensors();
        if tensors.len() + self.tensors.len() > MOST_TENSORS {
            return Err(wrong(format!("more than {MOST_TENSORS} tensors are not read")));
        }
        for (name, info) in tensors {
            let (start, end) = info.data_offsets;
            let range = match (data.checked_add(start), data.checked_add(end)) {
                (Some(start), Some(end)) if start <= end && end <= map.len() => start..end,
                _ => return Err(wrong(format!("`{name}` lies outside the file"))),
            };
            let entry =
                Entry { shard: self.shards.len(), dtype: info.dtype, shape: info.shape.clone(), range };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(wrong(format!("`{name}` is in another file too")));
            }
        }
        self.shards.push(Shard { path: path.to_owned(), map });
        Ok(())
    }

    /// The bytes of `entry`. Ranges were checked when the header was read.
    fn data(&self, entry: &Entry) -> &[u8] {
        self.shards.get(entry.shard).and_then(|shard| shard.map.get(entry.range.clone())).unwrap_or_default()
    }

    fn path(&self, entry: &Entry) -> PathBuf {
        self.shards.get(entry.shard).map_or_else(|| self.folder.clone(), |shard| shard.path.clone())
    }
}
