//! The place of a model: the files of a folder, or a GGUF file that holds everything.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kiln_core::{Error, Result, files::FolderSource, source::Source};
use kiln_weights::gguf;

use super::foreign::no_model;

/// The files of a model.
#[derive(Clone, Debug)]
pub(crate) struct ModelFiles {
    pub(crate) source: Arc<dyn Source>,
    /// Name of the GGUF file that the model is in, or of one of its parts.
    pub(crate) gguf: Option<String>,
}

impl ModelFiles {
    /// Finds a model at `path`: a folder, or a file with the GGUF magic or the extension `.gguf`.
    ///
    /// # Errors
    /// [`Error::File`] if there is neither, and for a file whose name is not UTF-8.
    pub(crate) fn at(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self { source: Arc::new(FolderSource::new(path)), gguf: None });
        }
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            let why = "has a name that is not UTF-8; rename it";
            let wrong = || Error::File { path: path.to_owned(), why: why.to_owned() };
            let name = name.to_str().ok_or_else(wrong)?;
            let source = FolderSource::new(path.parent().unwrap_or(path));
            if is_called_gguf(name) || begins_as_gguf(&source, name) {
                return Ok(Self { source: Arc::new(source), gguf: Some(name.to_owned()) });
            }
        }
        Err(no_model(path))
    }

    /// Finds the model in a source: the files of a folder if `config.json` is among them, or else a GGUF
    /// file.
    ///
    /// # Errors
    /// [`Error::File`] if there are several GGUF files that are not parts of one model.
    pub(crate) fn of(source: Arc<dyn Source>) -> Result<Self> {
        let mut names = source.names("");
        if names.iter().any(|name| name == "config.json") {
            return Ok(Self { source, gguf: None });
        }
        names.retain(|name| is_called_gguf(name));
        names.sort_unstable();
        if let [first, others @ ..] = &names[..] {
            let parts = gguf::part_names(first).unwrap_or_default();
            if let Some(other) = others.iter().find(|other| !parts.contains(other)) {
                let why = format!("holds `{first}` and `{other}`, which are two models; give one of them");
                return Err(Error::File { path: source.path(""), why });
            }
        }
        Ok(Self { gguf: names.into_iter().next(), source })
    }

    /// The folder or the GGUF file, for messages.
    pub(crate) fn path(&self) -> PathBuf {
        self.source.path(self.gguf.as_deref().unwrap_or_default())
    }
}

pub(super) fn is_called_gguf(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, extension)| extension.eq_ignore_ascii_case("gguf"))
}

fn begins_as_gguf(source: &dyn Source, name: &str) -> bool {
    let mut beginning = [0; 4];
    let file = source.open(name).wait().ok().flatten();
    file.is_some_and(|file| file.read(0, &mut beginning).wait().is_ok()) && beginning == *b"GGUF"
}
