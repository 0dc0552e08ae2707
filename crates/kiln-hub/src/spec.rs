//! Names of models: `ORG/NAME[:FILE or QUANT][@REVISION]`.

use std::{fmt, str::FromStr};

use crate::{Error, Result, names};

/// A model on the hub, as a user names it: `ORG/NAME[:FILE or QUANT][@REVISION]`.
///
/// ```
/// use kiln_hub::{Part, Spec};
///
/// let spec: Spec = "Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0@main".parse()?;
/// assert_eq!(spec.repo(), "Qwen/Qwen2.5-0.5B-Instruct-GGUF");
/// assert_eq!(spec.part(), Some(&Part::Quant("q8_0".to_owned())));
/// # Ok::<(), kiln_hub::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    repo: String,
    part: Option<Part>,
    revision: Option<String>,
}

/// Selects a GGUF file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The file whose name contains this word, ignoring case: `Q4_K_M`.
    Quant(String),
    /// The file with this name.
    File(String),
}

impl Spec {
    /// Returns the repository, `ORG/NAME`.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// Returns the requested GGUF file.
    pub fn part(&self) -> Option<&Part> {
        self.part.as_ref()
    }

    /// Returns the requested branch, tag or commit.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// Returns the requested branch, tag or commit, or `main` if none was requested.
    pub(crate) fn revision_or_main(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        let wrong = |why: &str| Error::Spec { spec: spec.to_owned(), why: why.to_owned() };
        let (rest, revision) = match spec.rsplit_once('@') {
            Some((rest, revision)) => (rest, Some(revision)),
            None => (spec, None),
        };
        let (repo, part) = match rest.split_once(':') {
            Some((repo, part)) => (repo, Some(part)),
            None => (rest, None),
        };
        let named = repo.split_once('/').is_some_and(|(org, name)| is_name(org) && is_name(name));
        if !named {
            return Err(wrong("does not name a model on the hub; write ORG/NAME, such as Qwen/Qwen3-0.6B"));
        }
        // Model names do not end like this; file names do.
        if is_gguf(repo) || repo.to_ascii_lowercase().ends_with(".safetensors") {
            return Err(wrong("is the name of a file; a file on the hub is ORG/NAME:FILE.gguf"));
        }
        if revision.is_some_and(|revision| !names::is_safe(revision)) {
            return Err(wrong("names a revision that cannot be one"));
        }
        let part = part.map(|part| match part {
            _ if !names::is_safe(part) => Err(wrong("names a file that cannot be one")),
            _ if is_gguf(part) => Ok(Part::File(part.to_owned())),
            _ if part.contains('/') || part.ends_with(".safetensors") || part.ends_with(".bin") => {
                Err(wrong("names a file that is no GGUF file; leave it out to get the safetensors files"))
            }
            _ => Ok(Part::Quant(part.to_owned())),
        });
        let revision = revision.map(str::to_owned);
        Ok(Self { repo: repo.to_owned(), part: part.transpose()?, revision })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        match &self.part {
            Some(Part::Quant(part) | Part::File(part)) => write!(f, ":{part}")?,
            None => {}
        }
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))
    }
}

/// Whether the hub allows this name (`validate_repo_id` of `huggingface_hub`). Allowed names contain no `--`,
/// which therefore can replace the slash in the cache.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let edge = ['-', '.'];
    (1..=96).contains(&name.len())
        && name.chars().all(plain)
        && !name.starts_with(edge)
        && !name.ends_with(edge)
        && !name.contains("--")
        && !name.contains("..")
}

pub(crate) fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_spec_prints_the_text_that_it_is_read_from() {
        for text in [
            "a/b",
            "a/b:Q4_K_M",
            "a/b:x/m-00001-of-00002.gguf",
            "a/b@v1",
            "a/b:UD-Q2_K_XL@refs/pr/1",
            "0-x/y.z_1",
        ] {
            assert_eq!(text.parse::<Spec>().unwrap().to_string(), text);
        }
        let spec: Spec = "a/b:M.GGUF@c".parse().unwrap();
        assert_eq!(spec.part(), Some(&Part::File("M.GGUF".to_owned())));
        assert_eq!((spec.repo(), spec.revision()), ("a/b", Some("c")));
    }

    #[test]
    fn invalid_names_of_models_are_errors() {
        for text in [
            "",
            "a",
            "/a",
            "a/",
            "a/b/c",
            "./a",
            "../a",
            "a/..",
            "~/a",
            "a--b/c",
            "a/b--c",
            "-a/b",
            "a/b.",
            "a b/c",
            "a/b.gguf",
            "a/b.safetensors",
            "a/b:",
            "a/b@",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a/b@../x",
            "a/b:model.bin",
            "a/b:x/y",
            "é/b",
            "C:\\a/b",
        ] {
            assert!(text.parse::<Spec>().is_err(), "{text}");
        }
        assert!(format!("{}/b", "x".repeat(97)).parse::<Spec>().is_err());
    }
}
