//! What the cache holds, and removing it.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{
    Error, Hub, Result, Spec,
    cache::{RepoCache, commit_in, walk},
    choice::{labels, parts_of},
    spec::is_name,
};

/// Folders within `refs` that are looked into: revisions such as `refs/pr/1` have slashes.
const DEEPEST_REF: usize = 8;

/// A repository in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredModel {
    /// `ORG/NAME`
    pub repo: String,
    /// Its weights: `safetensors`, and the formats of its GGUF files
    pub weights: Vec<String>,
    /// Bytes on the disk, with those of unfinished downloads
    pub bytes: u64,
    /// Whether a download was not finished
    pub unfinished: bool,
    /// When one of its files was last read, as far as the file system notes it; else written
    pub last_used: Option<SystemTime>,
}

/// Files of the cache that are to be removed.
#[derive(Debug)]
pub struct Removal {
    /// Bytes that become free
    pub bytes: u64,
    /// Their names in the repository
    pub files: Vec<String>,
    paths: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Hub {
    /// The repositories in the cache, by name.
    ///
    /// # Errors
    /// [`Error::File`] for a cache that cannot be read.
    pub fn list(&self) -> Result<Vec<StoredModel>> {
        let entries = match fs::read_dir(self.cache()) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::file(self.cache(), &e)),
        };
        let mut models: Vec<StoredModel> = entries
            .flatten()
            .filter_map(|entry| repo_of(&entry.file_name().into_string().ok()?))
            .map(|repo| self.stored_model(repo))
            .collect();
        models.sort_by(|a, b| a.repo.cmp(&b.repo));
        Ok(models)
    }

    fn stored_model(&self, repo: String) -> StoredModel {
        let cache = RepoCache::new(self.cache(), &repo);
        let names: BTreeSet<String> =
            snapshots(&cache).iter().flat_map(|commit| cache.files(commit)).collect();
        let names: Vec<String> = names.into_iter().collect();
        let (mut bytes, mut unfinished, mut last_used) = (0u64, false, None);
        // What is no link is a copy, on file systems without links.
        walk(&cache.root(), "", usize::from(u8::MAX), &mut |name, path| {
            let Ok(metadata) = fs::symlink_metadata(path) else { return };
            if metadata.is_file() && !name.starts_with("refs/") {
                bytes = bytes.saturating_add(metadata.len());
                unfinished |= name.ends_with(".incomplete");
                last_used = last_used.max(metadata.accessed().or_else(|_| metadata.modified()).ok());
            }
        });
        StoredModel { repo, weights: labels(&names), bytes, unfinished, last_used }
    }

    /// What has to be removed to remove a model: its repository; the GGUF file that the spec names; the revision that it
    /// names. Blobs that other revisions use stay. Nothing is removed yet.
    ///
    /// # Errors
    /// [`Error::NotStored`] for what is not there; [`Error::Choice`] for a GGUF file that is not there.
    pub fn removal(&self, spec: &Spec) -> Result<Removal> {
        let cache = RepoCache::new(self.cache(), spec.repo());
        let not_stored =
            || Error::NotStored { spec: spec.to_string(), cache: self.cache().display().to_string() };
        if !fs::symlink_metadata(cache.root()).is_ok_and(|metadata| metadata.is_dir()) {
            return Err(not_stored());
        }
        let all = links(&cache);
        let commit = match spec.revision() {
            Some(revision) => Some(cache.commit(revision).ok_or_else(not_stored)?),
            None => None,
        };
        let of_revision = |link: &&Link| commit.as_ref().is_none_or(|commit| link.commit == *commit);
        let parts = match spec.part() {
            Some(_) => {
                let files: Vec<String> =
                    all.iter().filter(of_revision).map(|link| link.file.clone()).collect();
                Some(parts_of(spec, &files).map_err(|unchosen| unchosen.of(spec.repo()))?)
            }
            None => None,
        };
        let of_part = |link: &Link| parts.as_ref().is_none_or(|parts| parts.contains(&link.file));
        let (removed, kept): (Vec<Link>, Vec<Link>) =
            all.into_iter().partition(|link| of_revision(&link) && of_part(link));
        if removed.is_empty() && commit.is_some() {
            return Err(not_stored());
        }
        let mut files: Vec<String> = removed.iter().map(|link| link.file.clone()).collect();
        files.sort();
        files.dedup();
        if kept.is_empty() {
            // With what was not finished, and the locks.
            let folders = vec![cache.root(), cache.locks()];
            let bytes = self.stored_model(spec.repo().to_owned()).bytes;
            return Ok(Removal { bytes, files, paths: Vec::new(), folders });
        }
        let used: BTreeSet<&OsString> = kept.iter().filter_map(|link| link.blob.as_ref()).collect();
        let blobs: BTreeSet<&OsString> = removed.iter().filter_map(|link| link.blob.as_ref()).collect();
        let blobs = blobs.difference(&used).map(|blob| cache.root().join("blobs").join(blob));
        let links = removed.iter().map(|link| cache.snapshot(&link.commit).join(&link.file));
        let gone: BTreeSet<&str> = removed
            .iter()
            .map(|link| link.commit.as_str())
            .filter(|commit| !kept.iter().any(|link| link.commit == *commit))
            .collect();
        let paths: Vec<PathBuf> = links.chain(blobs).chain(refs_to(&cache, &gone)).collect();
        let size = |path: &PathBuf| {
            let metadata = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file);
            metadata.map_or(0, |metadata| metadata.len())
        };
        let bytes = paths.iter().map(size).fold(0, u64::saturating_add);
        let folders = gone.iter().map(|commit| cache.snapshot(commit)).collect();
        Ok(Removal { bytes, files, paths, folders })
    }
}

impl Removal {
    /// Removes the files.
    ///
    /// # Errors
    /// [`Error::File`] for what cannot be removed. What was removed before stays so.
    pub fn run(self) -> Result<()> {
        let there = |path: &Path, removed: io::Result<()>| match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::file(path, &e)),
            _ => Ok(()),
        };
        self.paths.iter().try_for_each(|path| there(path, fs::remove_file(path)))?;
        // Links are removed, and not what they lead to.
        self.folders.iter().try_for_each(|folder| there(folder, fs::remove_dir_all(folder)))
    }
}

/// The repository of a folder of the cache.
fn repo_of(folder: &str) -> Option<String> {
    let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
    (is_name(org) && is_name(name)).then(|| format!("{org}/{name}"))
}

/// The commits in the cache.
fn snapshots(cache: &RepoCache) -> Vec<String> {
    let entries = fs::read_dir(cache.root().join("snapshots")).into_iter().flatten().flatten();
    let mut commits: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    commits.sort();
    commits
}

/// A file of a snapshot.
struct Link {
    commit: String,
    /// Its name in the repository
    file: String,
    /// The name of the blob that it leads to, which may be gone; `None` for a copy
    blob: Option<OsString>,
}

/// The files of all snapshots.
fn links(cache: &RepoCache) -> Vec<Link> {
    let mut links = Vec::new();
    for commit in snapshots(cache) {
        walk(&cache.snapshot(&commit), "", usize::from(u8::MAX), &mut |file, path| {
            let blob = fs::read_link(path).ok().and_then(|target| target.file_name().map(OsString::from));
            links.push(Link { commit: commit.clone(), file, blob });
        });
    }
    links
}

/// The refs to these commits.
fn refs_to(cache: &RepoCache, commits: &BTreeSet<&str>) -> Vec<PathBuf> {
    let mut refs = Vec::new();
    walk(&cache.refs(), "", DEEPEST_REF, &mut |_, path| {
        if commit_in(path).is_some_and(|commit| commits.contains(commit.as_str())) {
            refs.push(path.to_owned());
        }
    });
    refs
}
