//! Models in several files, as `llama-gguf-split` writes them.

use super::Gguf;
use crate::Error;

/// The position of a file among the parts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Number of this part, from 0
    pub part: u64,
    /// Number of parts
    pub count: u64,
    /// Number of tensors in all parts together
    pub tensors: u64,
}

impl Gguf {
    /// Returns the position of this file among the parts of a model. `None` for a whole model.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the entries `split.*` contradict each other.
    pub fn parts(&self) -> Result<Option<Parts>, Error> {
        let metadata = self.metadata();
        let Some(count) = metadata.unsigned("split.count")? else { return Ok(None) };
        let number = |key: &str| {
            let missing = || Error::Metadata { key: key.to_owned(), why: "is missing".to_owned() };
            metadata.unsigned(key)?.ok_or_else(missing)
        };
        let (part, tensors) = (number("split.no")?, number("split.tensors.count")?);
        if part >= count {
            let why = format!("is {part}, and there are {count} parts, from 0 on");
            return Err(Error::Metadata { key: "split.no".to_owned(), why });
        }
        Ok(Some(Parts { part, count, tensors }))
    }
}

/// Returns the names of all parts, given the name of one: `NAME-00001-of-00003.gguf`. `None` for other names.
pub fn part_names(name: &str) -> Option<Vec<String>> {
    let number = |digits: &str| match digits.len() == 5 && digits.bytes().all(|c| c.is_ascii_digit()) {
        true => digits.parse::<u32>().ok(),
        false => None,
    };
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (model, part) = rest.rsplit_once('-')?;
    let (part, count) = (number(part)?, number(count)?);
    if part == 0 || part > count {
        return None;
    }
    Some((1..=count).map(|part| format!("{model}-{part:05}-of-{count:05}.gguf")).collect())
}
