//! Lists the models in the cache and removes them.

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

/// Deepest level of nested folders in `refs` that is searched: revisions such as `refs/pr/1` contain slashes.
const DEEPEST_REF: usize = 8;

/// A repository in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredModel {
    /// `ORG/NAME`
    pub repo: String,
    /// Available weights: `safetensors`, and the formats of the GGUF files
    pub weights: Vec<String>,
    /// Size on disk in bytes, including unfinished downloads
    pub bytes: u64,
    /// Whether a download is unfinished
    pub unfinished: bool,
    /// Time of the last read of any file, if the file system records it; otherwise of the last write
    pub last_used: Option<SystemTime>,
}

/// Files of the cache to remove.
#[derive(Debug)]
pub struct Removal {
    /// Number of bytes that are freed
    pub bytes: u64,
    /// Names of the files in the repository
    pub files: Vec<String>,
    paths: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Hub {
    /// Returns the repositories in the cache, sorted by name.
    ///
    /// # Errors
    /// [`Error::File`] if the cache cannot be read.
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
        // Snapshots contain copies instead of links on file systems without links; they count too.
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

    /// Determines the files to remove for a model: the whole repository, the GGUF file that the spec names,
    /// or the revision that it names. Blobs that other revisions use are kept. Nothing is removed yet.
    ///
    /// # Errors
    /// [`Error::NotStored`] for a model that is not in the cache; [`Error::Choice`] for a GGUF file that is
    /// not in it.
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
            // Includes unfinished downloads and the locks.
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
    /// [`Error::File`] for a file that cannot be removed. Files removed before it stay removed.
    pub fn run(self) -> Result<()> {
        let there = |path: &Path, removed: io::Result<()>| match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::file(path, &e)),
            _ => Ok(()),
        };
        self.paths.iter().try_for_each(|path| there(path, fs::remove_file(path)))?;
        // Removes links, not their targets.
        self.folders.iter().try_for_each(|folder| there(folder, fs::remove_dir_all(folder)))
    }
}

/// Returns the repository of a cache folder, `ORG/NAME`.
fn repo_of(folder: &str) -> Option<String> {
    let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
    (is_name(org) && is_name(name)).then(|| format!("{org}/{name}"))
}

/// Returns the commits in the cache.
fn snapshots(cache: &RepoCache) -> Vec<String> {
    let entries = fs::read_dir(cache.root().join("snapshots")).into_iter().flatten().flatten();
    let mut commits: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    commits.sort();
    commits
}

/// A file of a snapshot.
struct Link {
    commit: String,
    /// Name of the file in the repository
    file: String,
    /// Name of the blob that the link points to, which may not exist; `None` for a copy
    blob: Option<OsString>,
}

/// Returns the files of all snapshots.
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

/// Returns the refs that point to these commits.
fn refs_to(cache: &RepoCache, commits: &BTreeSet<&str>) -> Vec<PathBuf> {
    let mut refs = Vec::new();
    walk(&cache.refs(), "", DEEPEST_REF, &mut |_, path| {
        if commit_in(path).is_some_and(|commit| commits.contains(commit.as_str())) {
            refs.push(path.to_owned());
        }
    });
    refs
}
