//! Resolves the name of a model to a path in the cache, downloading missing files.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use crate::{
    Error, Hub, Result, Spec,
    cache::RepoCache,
    choice::{self, CONFIG, Choice, INDEX, Unchosen, WEIGHTS, choose},
    client::{Client, FileFacts},
    download::{self, Wanted},
    names,
};

/// Size limit in bytes of a weight index.
const LONGEST_INDEX: u64 = 64 << 20;

/// The progress of a download.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DownloadProgress<'a> {
    /// Name in the repository of the file that is being downloaded.
    pub file: &'a str,
    /// Number of bytes that are in the cache, of all files to download.
    pub read: u64,
    /// Total size in bytes of the files to download.
    pub total: u64,
}

impl Hub {
    /// Downloads the missing files of a model. Returns the path in the cache of its folder or GGUF file.
    ///
    /// The hub is asked which commit the revision points to. If it cannot be reached, a complete model in the
    /// cache is used with a warning. A complete commit in the cache is used without any request.
    ///
    /// The files are those of the GGUF file that the spec names; otherwise `model.safetensors`, or the files
    /// of its index, with the text files next to them; otherwise the only GGUF file, or the `Q4_K_M` one, as
    /// in llama.cpp.
    ///
    /// # Errors
    /// See [`Error`]. Downloaded bytes are kept, and the next call resumes from them.
    pub fn fetch(&self, spec: &Spec, mut on_progress: impl FnMut(DownloadProgress<'_>)) -> Result<PathBuf> {
        let cache = RepoCache::new(self.cache(), spec.repo());
        let pinned = spec.revision().is_some_and(names::is_commit);
        let stored = self.stored(spec, &cache);
        if self.offline || pinned && stored.is_ok() {
            return stored;
        }
        let client = Client::new(self)?;
        match patient(self, || client.listing(spec)) {
            Ok(listing) => {
                cache.set_commit(spec.revision_or_main(), &listing.commit)?;
                let fetch =
                    Fetch { hub: self, client: &client, cache: &cache, spec, commit: &listing.commit };
                let choice = choose(spec, &listing.files)?;
                fetch.choice(&choice, &listing.files, &mut on_progress)
            }
            Err(error) if error.is_transient() && stored.is_ok() => {
                tracing::warn!(target: "kiln::hub", "{error}");
                stored
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the path of a model that is complete in the cache.
    fn stored(&self, spec: &Spec, cache: &RepoCache) -> Result<PathBuf> {
        let cache_path = || self.cache().display().to_string();
        let missing =
            |file: String| Error::Offline { repo: spec.repo().to_owned(), file, cache: cache_path() };
        let commit = cache.commit(spec.revision_or_main());
        let files = commit.as_ref().map(|commit| cache.files(commit)).unwrap_or_default();
        let Some(commit) = commit.filter(|_| !files.is_empty()) else {
            return Err(Error::OfflineModel { spec: spec.to_string(), cache: cache_path() });
        };
        let folder = cache.snapshot(&commit);
        let has = |name: &str| files.iter().any(|file| file == name);
        if spec.part().is_none() && has(CONFIG) && !has(INDEX) && !has(WEIGHTS) {
            return Err(missing(WEIGHTS.to_owned()));
        }
        match choice::choice(spec, &files) {
            Err(Unchosen::Part(file)) => Err(missing(file)),
            Err(Unchosen::Nothing(_)) => {
                Err(Error::OfflineModel { spec: spec.to_string(), cache: cache_path() })
            }
            Err(several @ Unchosen::Several(_)) => Err(several.of(spec.repo())),
            Ok(Choice::Folder { indexed: false, .. }) => Ok(folder),
            Ok(Choice::Folder { .. }) => {
                let shards = read_index(&folder.join(INDEX))?;
                shards.into_iter().find(|shard| !has(shard)).map_or(Ok(folder), |shard| Err(missing(shard)))
            }
            Ok(Choice::Gguf(parts)) => Ok(first_of(&folder, &parts)),
        }
    }
}

/// A commit of a repository that is being fetched.
struct Fetch<'a> {
    hub: &'a Hub,
    client: &'a Client<'a>,
    cache: &'a RepoCache,
    spec: &'a Spec,
    commit: &'a str,
}

impl Fetch<'_> {
    fn choice(
        &self,
        choice: &Choice,
        listed: &[String],
        on_progress: &mut dyn FnMut(DownloadProgress<'_>),
    ) -> Result<PathBuf> {
        let folder = self.cache.snapshot(self.commit);
        match choice {
            Choice::Gguf(parts) => {
                self.files(parts, on_progress)?;
                Ok(first_of(&folder, parts))
            }
            Choice::Folder { texts, indexed } => {
                self.files(texts, on_progress)?;
                let weights = if *indexed {
                    self.files(&[INDEX.to_owned()], on_progress)?;
                    read_index(&folder.join(INDEX))?.into_iter().collect()
                } else {
                    vec![WEIGHTS.to_owned()]
                };
                if let Some(shard) = weights.iter().find(|shard| !listed.contains(shard)) {
                    let why = format!("has no file `{shard}`, which {INDEX} names");
                    return Err(Error::Choice { repo: self.spec.repo().to_owned(), why });
                }
                self.files(&weights, on_progress)?;
                Ok(folder)
            }
        }
    }

    /// Downloads the files that the snapshot lacks. Their sizes are requested first, so that the total is
    /// known.
    fn files(&self, files: &[String], on_progress: &mut dyn FnMut(DownloadProgress<'_>)) -> Result<()> {
        let stored = self.cache.files(self.commit);
        let mut lacking: Vec<(&str, FileFacts)> = Vec::new();
        for file in files.iter().filter(|file| !stored.contains(file)) {
            let facts = patient(self.hub, || self.client.facts(self.spec, self.commit, file))?;
            if facts.size == 0 && choice::is_needed(file) {
                let why = format!("has an empty file `{file}`, so there is no model in it");
                return Err(Error::Choice { repo: self.spec.repo().to_owned(), why });
            }
            lacking.push((file, facts));
        }
        let total = lacking.iter().fold(0u64, |total, (_, facts)| total.saturating_add(facts.size));
        let mut before = 0u64;
        for (file, facts) in &lacking {
            let wanted = Wanted { spec: self.spec, commit: self.commit, file, facts };
            download::blob(self.hub, self.client, self.cache, &wanted, &mut |read| {
                on_progress(DownloadProgress { file, read: before.saturating_add(read), total });
            })?;
            self.cache.link(self.commit, file, &facts.etag)?;
            before = before.saturating_add(facts.size);
        }
        Ok(())
    }
}

/// Sends a small request, and repeats it once after a pause if the error is transient.
fn patient<T>(hub: &Hub, request: impl Fn() -> Result<T>) -> Result<T> {
    match request() {
        Err(error) if error.is_transient() => {
            tracing::debug!(target: "kiln::hub", "{error}");
            std::thread::sleep(hub.pause);
            request()
        }
        answer => answer,
    }
}

/// Returns the path of a GGUF file, which is the path of its first part.
fn first_of(folder: &Path, parts: &[String]) -> PathBuf {
    parts.first().map_or_else(|| folder.to_owned(), |first| folder.join(first))
}

/// Reads an index and returns the files that it names.
fn read_index(path: &Path) -> Result<std::collections::BTreeSet<String>> {
    let mut index = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LONGEST_INDEX).read_to_end(&mut index));
    read.map_err(|e| Error::file(path, &e))?;
    choice::shards(&index).map_err(|why| Error::File { path: path.to_owned(), why })
}
