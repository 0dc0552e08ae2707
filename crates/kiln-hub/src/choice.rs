//! Selection of the files of a repository that make up the requested model.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{Error, Part, Result, Spec, names, spec::is_gguf};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";

/// Files that Kiln reads from a model folder besides the weights. Chat templates in
/// `additional_chat_templates/` are added.
pub const TEXTS: [&str; 8] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
];

/// The list of the modules that turn the vectors of tokens into an embedding (sentence-transformers).
const MODULES: &str = "modules.json";

/// The folder of named chat templates.
const TEMPLATES: &str = "additional_chat_templates/";

/// The format that is chosen if a repository has several and none was requested, as in llama.cpp.
const USUAL_QUANT: &str = "Q4_K_M";

/// Maximum number of parts of a split GGUF file that is downloaded.
const MOST_PARTS: u32 = 1000;

/// The files to download.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// A model folder: these text files, and `model.safetensors` or, if `indexed`, the files named by the
    /// index.
    Folder { texts: Vec<String>, indexed: bool },
    /// A GGUF file: all of its parts, in order.
    Gguf(Vec<String>),
}

/// The reason why nothing was chosen, worded to follow the name of the repository.
#[derive(Debug)]
pub(crate) enum Unchosen {
    /// A part of a split file is missing.
    Part(String),
    /// No file matches the request.
    Nothing(String),
    /// The request matches more than one model.
    Several(String),
}

impl Unchosen {
    /// Converts this to the error that is reported for `repo`, `ORG/NAME`.
    pub(crate) fn of(self, repo: &str) -> Error {
        let why = match self {
            Self::Part(file) => format!("lacks the file `{file}`"),
            Self::Nothing(why) | Self::Several(why) => why,
        };
        Error::Choice { repo: repo.to_owned(), why }
    }
}

/// Chooses the files of a repository that `spec` asks for, from a list of all its files.
///
/// # Errors
/// [`Error::Choice`] if no file matches, or too many.
pub fn choose(spec: &Spec, files: &[String]) -> Result<Choice> {
    choice(spec, files).map_err(|unchosen| unchosen.of(spec.repo()))
}

/// Chooses as [`choose`]. The reason tells what else could be tried.
pub(crate) fn choice(spec: &Spec, files: &[String]) -> Result<Choice, Unchosen> {
    let has = |name: &str| files.iter().any(|file| file == name);
    if spec.part().is_none() && has(CONFIG) && (has(INDEX) || has(WEIGHTS)) {
        let template = |file: &str| file.starts_with(TEMPLATES) && file.ends_with(".jinja");
        let embeds = has(MODULES);
        let wanted = |file: &&String| {
            TEXTS.contains(&file.as_str()) || template(file) || embeds && is_of_embeddings(file)
        };
        let texts = files.iter().filter(wanted).filter(|file| names::is_safe(file)).cloned();
        return Ok(Choice::Folder { texts: texts.collect(), indexed: !has(WEIGHTS) });
    }
    gguf_model(spec, files)?.complete()
}

/// Whether a file has settings or weights for embeddings: one of the folder, or of the folder of a module,
/// such as `1_Pooling`.
fn is_of_embeddings(file: &str) -> bool {
    match file.split_once('/') {
        None => {
            let limits = file.starts_with("sentence_") && file.ends_with("_config.json");
            limits || [MODULES, "config_sentence_transformers.json"].contains(&file)
        }
        Some((folder, file)) => {
            let is_number = |number: &str| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            let is_numbered = folder.split_once('_').is_some_and(|(number, _)| is_number(number));
            let lower = folder.to_lowercase();
            let is_named = ["pooling", "dense", "normalize"].iter().any(|kind| lower.contains(kind));
            (is_numbered || is_named) && [CONFIG, WEIGHTS].contains(&file)
        }
    }
}

/// Whether a model cannot be loaded without this file.
pub(crate) fn is_needed(file: &str) -> bool {
    matches!(file, CONFIG | INDEX) || file.ends_with(".safetensors") || is_gguf(file)
}

/// Returns the parts of the requested GGUF file that are listed in `files`.
pub(crate) fn parts_of(spec: &Spec, files: &[String]) -> Result<Vec<String>, Unchosen> {
    gguf_model(spec, files).map(|model| model.files.into_iter().collect())
}

fn gguf_model(spec: &Spec, files: &[String]) -> Result<GgufModel, Unchosen> {
    let mut models = gguf_models(files);
    let of = |models: &mut Vec<GgufModel>, quant: &str| -> Vec<GgufModel> {
        models.extract_if(.., |model| holds_word(&model.stem, quant)).collect()
    };
    let nothing = |why: String| Err(Unchosen::Nothing(why));
    match spec.part() {
        None if models.is_empty() => {
            let why =
                "has no safetensors files with a config.json and no GGUF file, which is what Kiln reads";
            nothing(why.to_owned())
        }
        None => {
            let listed = labels_of(&models);
            let mut usual = if models.len() == 1 { models } else { of(&mut models, USUAL_QUANT) };
            match (usual.pop(), usual.is_empty()) {
                (Some(model), true) => Ok(model),
                _ => {
                    let repo = spec.repo();
                    let why = format!("has several GGUF files; write {repo}:QUANT with one of {listed}");
                    Err(Unchosen::Several(why))
                }
            }
        }
        Some(Part::Quant(_)) if models.is_empty() => nothing("has no GGUF files".to_owned()),
        Some(Part::Quant(quant)) => {
            let mut found = of(&mut models, quant);
            let listed = several(found.iter().map(|model| model.stem.as_str()));
            match (found.pop(), found.is_empty()) {
                (Some(model), true) => Ok(model),
                (Some(_), false) => {
                    let why = format!("has several GGUF files of `{quant}`; name the file: {listed}");
                    Err(Unchosen::Several(why))
                }
                (None, _) => nothing(format!("has no GGUF file of `{quant}`; it has {}", labels_of(&models))),
            }
        }
        Some(Part::File(name)) => {
            let found = gguf_files(files, |_| true).into_iter().find(|model| model.files.contains(name));
            found.ok_or_else(|| {
                let ggufs = files.iter().map(String::as_str).filter(|file| is_gguf(file));
                let near = names::nearest(name, ggufs);
                let near = near.map_or_else(String::new, |near| format!("; the nearest is `{near}`"));
                Unchosen::Nothing(format!("has no file `{name}`{near}"))
            })
        }
    }
}

/// Returns the weight files that `model.safetensors.index.json` names.
///
/// # Errors
/// Describes what is wrong with the index, in a sentence without its subject.
pub fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    let index: Value = serde_json::from_slice(index).map_err(|e| format!("is not JSON: {e}"))?;
    let map = index.get("weight_map").and_then(Value::as_object).ok_or("has no object `weight_map`")?;
    let mut shards = BTreeSet::new();
    for file in map.values() {
        let file = file.as_str().ok_or("has a file that is no text")?;
        if !names::is_safe(file) || !file.ends_with(".safetensors") {
            return Err(format!("names the file `{file}`, which is no safetensors file of the repository"));
        }
        if !shards.contains(file) {
            shards.insert(file.to_owned());
        }
    }
    match shards.is_empty() {
        true => Err("names no files".to_owned()),
        false => Ok(shards),
    }
}

/// Returns the names of the weights among `files`: `safetensors`, and the formats of the GGUF files.
pub(crate) fn labels(files: &[String]) -> Vec<String> {
    let safetensors = files.iter().any(|file| file == INDEX || file == WEIGHTS);
    let safetensors = safetensors.then(|| "safetensors".to_owned());
    safetensors.into_iter().chain(gguf_models(files).into_iter().map(|model| model.label)).collect()
}

/// A GGUF file, whole or split.
#[derive(Debug)]
struct GgufModel {
    /// File name without the part number and the extension.
    stem: String,
    /// Number format, or the stem if the name contains no format.
    label: String,
    /// Parts that are listed.
    files: BTreeSet<String>,
    parts: Option<u32>,
}

impl GgufModel {
    fn complete(&self) -> Result<Choice, Unchosen> {
        let whole = || Choice::Gguf(self.files.iter().cloned().collect());
        let Some(parts) = self.parts else { return Ok(whole()) };
        if !(1..=MOST_PARTS).contains(&parts) {
            let why = format!("has `{}` in {parts} parts; 1 to {MOST_PARTS} are possible", self.stem);
            return Err(Unchosen::Nothing(why));
        }
        let there: BTreeSet<u32> =
            self.files.iter().filter_map(|file| split(file).1).map(|(part, _)| part).collect();
        match (1..=parts).find(|part| !there.contains(part)) {
            Some(missing) => Err(Unchosen::Part(format!("{}-{missing:05}-of-{parts:05}.gguf", self.stem))),
            None => Ok(whole()),
        }
    }
}

/// Groups GGUF files into models. Image projectors and importance matrices are not models.
fn gguf_models(files: &[String]) -> Vec<GgufModel> {
    gguf_files(files, |file| {
        let name = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
        !name.starts_with("mmproj") && !name.contains("imatrix")
    })
}

fn gguf_files(files: &[String], keep: impl Fn(&str) -> bool) -> Vec<GgufModel> {
    let mut models: BTreeMap<(String, Option<u32>), GgufModel> = BTreeMap::new();
    for file in files.iter().filter(|file| is_gguf(file) && names::is_safe(file) && keep(file)) {
        let (stem, part) = split(file);
        let parts = part.map(|(_, parts)| parts);
        let model = models.entry((stem.to_owned(), parts)).or_insert_with(|| {
            let label = quant_of(stem).unwrap_or(stem).to_owned();
            GgufModel { stem: stem.to_owned(), label, files: BTreeSet::new(), parts }
        });
        model.files.insert(file.clone());
    }
    models.into_values().collect()
}

/// Splits the name of a GGUF file into its stem, without the extension and the part number, and the part
/// number with the number of parts (`llama_split_path` of llama.cpp: `NAME-00001-of-00003.gguf`).
fn split(file: &str) -> (&str, Option<(u32, u32)>) {
    let stem = file.get(..file.len().saturating_sub(".gguf".len())).unwrap_or(file);
    let numbered = || {
        let (rest, parts) = stem.rsplit_once("-of-")?;
        let (name, part) = rest.rsplit_once('-')?;
        let number =
            |digits: &str| match digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit()) {
                true => digits.parse::<u32>().ok(),
                false => None,
            };
        Some((name, (number(part)?, number(parts)?)))
    };
    match numbered() {
        Some((name, part)) => (name, Some(part)),
        None => (stem, None),
    }
}

/// Whether a name contains `word` other than as a part of a longer word: `Q4_K` is not in `model-Q4_K_M`, and
/// `Q4_K_M` is not in `model-IQ4_K_M`. An underscore may precede the word.
fn holds_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    name.match_indices(&word).any(|(at, _)| {
        let before = name.get(..at).and_then(|text| text.chars().next_back());
        let behind = name.get(at + word.len()..).and_then(|text| text.chars().next());
        !before.is_some_and(char::is_alphanumeric) && !behind.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

/// Finds the word of a name that is a number format: `Q4_K_M`, `IQ3_XS`, `F16`, `BF16`, `MXFP4`, with `UD-`
/// if it precedes the word.
fn quant_of(stem: &str) -> Option<&str> {
    let is_quant = |word: &str| {
        let upper = word.to_ascii_uppercase();
        let number = ["IQ", "TQ", "Q", "BF", "F", "MXFP"].iter().find_map(|kind| upper.strip_prefix(kind));
        number.is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit()))
    };
    let word = stem.rsplit(['-', '.', '/']).find(|word| is_quant(word))?;
    // The position of the word in the stem tells what precedes it.
    let before = stem.rfind(word).and_then(|at| stem.get(..at)).unwrap_or_default();
    match before.strip_suffix("UD-") {
        Some(rest) => stem.get(rest.len()..rest.len() + "UD-".len() + word.len()),
        None => Some(word),
    }
}

fn labels_of(models: &[GgufModel]) -> String {
    several(models.iter().map(|model| model.label.as_str()))
}

/// Formats a list for a message, truncated to a readable length.
fn several<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 24;

    let names: Vec<&str> = names.collect();
    let shown = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests;
