//! Adapters: low-rank changes of matrices, in folders of peft (<https://huggingface.co/docs/peft>).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use indexmap::IndexMap;
use kiln_core::{
    Error, Result,
    model::{LowRank, LowRankSource},
    source::{self, Source},
};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{SmallTensors, small_tensors};
use crate::{TensorNames, multimodal::text_name};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Most bytes of the weights of an adapter.
const MOST_BYTES: u64 = 8 << 30;

/// Fields of the config that have no effect here: how the adapter was made, and which modules it changes,
/// which its tensors say, too.
const IDLE: [&str; 21] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

const READ: [&str; 8] = [
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "use_rslora",
];

/// Ways to make an adapter that change the weights beside it, too.
const CHANGE_THE_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    use_rslora: bool,
    /// The first pattern that fits counts, so order matters.
    rank_pattern: Option<IndexMap<String, usize>>,
    alpha_pattern: Option<IndexMap<String, f64>>,
    bias: String,
    init_lora_weights: Value,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            peft_type: String::new(),
            r: 8,
            lora_alpha: 8.0,
            use_rslora: false,
            rank_pattern: None,
            alpha_pattern: None,
            bias: "none".to_owned(),
            init_lora_weights: Value::Bool(true),
        }
    }
}

/// The low-rank changes of a folder.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    /// Shapes and numbers of both matrices, by the names of modules of the model.
    changes: BTreeMap<String, Matrices>,
    /// Modules whose changes were taken.
    taken: BTreeSet<String>,
    fields: Fields,
    scale: f32,
    fingerprint: String,
}

/// The change of a module, as it is read.
#[derive(Debug, Default)]
struct Matrices {
    /// Name of the module in the file, which patterns look at.
    own: String,
    /// `a` and `b`
    both: [Option<(Vec<usize>, Vec<f32>)>; 2],
}

impl Adapter {
    /// Reads an adapter for a model with these names. Its changes are multiplied by `scale`.
    ///
    /// # Errors
    /// [`Error::File`] for a file that is missing or damaged, and for kinds of adapters that are not
    /// computed.
    pub fn read(source: &dyn Source, names: &TensorNames, scale: f32) -> Result<Self> {
        let file = |name: &str, why: String| Error::File { path: source.path(name), why };
        if !scale.is_finite() {
            return Err(Error::Setting {
                name: "adapter",
                why: format!("has the scale {scale}; use a number"),
            });
        }
        let Some(text) = source::read_text(source, CONFIG)? else {
            let why = "is missing; name the folder of a LoRA adapter, as peft saves it".to_owned();
            return Err(file(CONFIG, why));
        };
        let fields = checked(&text).map_err(|why| file(CONFIG, why))?;
        let Some(bytes) = source::read(source, WEIGHTS, MOST_BYTES)? else {
            let why = "is missing; only safetensors are read, so save the adapter again with a new version";
            return Err(file(WEIGHTS, why.to_owned()));
        };
        let mut hash = Sha256::new();
        hash.update(&text);
        hash.update(&bytes);
        hash.update(scale.to_le_bytes());
        let tensors = small_tensors(&bytes).map_err(|why| file(WEIGHTS, why))?;
        let changes = changes(tensors, names).map_err(|why| file(WEIGHTS, why))?;
        for pattern in fields.patterns() {
            if !changes.values().any(|matrices| ends_with(&matrices.own, pattern)) {
                return Err(file(CONFIG, format!("has a pattern `{pattern}`, which no module has")));
            }
        }
        Ok(Self {
            path: source.path(WEIGHTS),
            changes,
            taken: BTreeSet::new(),
            fields,
            scale,
            fingerprint: hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect(),
        })
    }

    /// Identifies the changes.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Number of elements of all changes.
    pub fn parameters(&self) -> u64 {
        let count = |matrix: &(Vec<usize>, Vec<f32>)| matrix.1.len() as u64;
        self.changes.values().flat_map(|matrices| matrices.both.iter().flatten()).map(count).sum()
    }

    /// Checks that each change was taken.
    ///
    /// # Errors
    /// [`Error::File`] with the module that the model does not have, or that cannot be changed.
    pub fn finish(&self) -> Result<()> {
        let Some(left) = self.changes.keys().find(|module| !self.taken.contains(*module)) else {
            return Ok(());
        };
        Err(self.wrong(format!(
            "changes `{left}`, which this model does not have, or cannot change (experts, embeddings, a head that is \
             tied to them, and matrices that are divided by head)"
        )))
    }

    fn wrong(&self, why: String) -> Error {
        Error::File { path: self.path.clone(), why }
    }
}

impl LowRankSource for Adapter {
    fn take(&mut self, module: &str, [outputs, inputs]: [usize; 2]) -> Result<Option<LowRank>> {
        let Some(Matrices { own, both: [a, b] }) = self.changes.get(module) else { return Ok(None) };
        let (Some((of_a, a)), Some((of_b, b))) = (a, b) else {
            return Err(self.wrong(format!("has only one of the two matrices of `{module}`")));
        };
        let rank = self.fields.rank(own);
        if rank == 0 {
            return Err(self.wrong(format!("has rank 0 for `{module}`")));
        }
        if (&of_a[..], &of_b[..]) != (&[rank, inputs], &[outputs, rank]) {
            return Err(self.wrong(format!(
                "has matrices {of_a:?} and {of_b:?} for `{module}`, and [{rank}, {inputs}] and [{outputs}, {rank}] \
                 fit; the adapter belongs to another model"
            )));
        }
        let factor = self.fields.scale(own, rank) * f64::from(self.scale);
        let b: Vec<f32> = b.iter().map(|number| (f64::from(*number) * factor) as f32).collect();
        if !a.iter().chain(&b).all(|number| number.is_finite()) {
            return Err(
                self.wrong(format!("changes `{module}` by numbers that are not finite, times {factor}"))
            );
        }
        let change = LowRank { rank, a: a.clone(), b };
        self.taken.insert(module.to_owned());
        Ok(Some(change))
    }
}

impl Fields {
    /// The names of all patterns.
    fn patterns(&self) -> impl Iterator<Item = &String> {
        let of_ranks = self.rank_pattern.iter().flat_map(IndexMap::keys);
        of_ranks.chain(self.alpha_pattern.iter().flat_map(IndexMap::keys))
    }

    fn rank(&self, module: &str) -> usize {
        of_pattern(&self.rank_pattern, module).unwrap_or(self.r)
    }

    fn scale(&self, module: &str, rank: usize) -> f64 {
        let alpha = of_pattern(&self.alpha_pattern, module).unwrap_or(self.lora_alpha);
        alpha / if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 }
    }
}

/// The value of the first pattern that a module ends with.
fn of_pattern<T: Copy>(patterns: &Option<IndexMap<String, T>>, module: &str) -> Option<T> {
    patterns.as_ref()?.iter().find(|(pattern, _)| ends_with(module, pattern)).map(|(_, value)| *value)
}

/// Whether the last parts of a module's name are `pattern`.
fn ends_with(module: &str, pattern: &str) -> bool {
    module.strip_suffix(pattern).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Parses the config, and refuses what is not computed.
fn checked(text: &str) -> Result<Fields, String> {
    let wrong = |error: serde_json::Error| error.to_string();
    let all: BTreeMap<String, Value> = serde_json::from_str(text).map_err(wrong)?;
    for (name, value) in &all {
        let is_off = match value {
            Value::Null => true,
            Value::Bool(on) => !on,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        if !is_off && !IDLE.contains(&name.as_str()) && !READ.contains(&name.as_str()) {
            return Err(format!("asks for `{name}`, which is not computed"));
        }
    }
    let fields: Fields = serde_json::from_str(text).map_err(wrong)?;
    if fields.peft_type != "LORA" {
        return Err(format!("is one of a `{}` adapter; only LORA is computed", fields.peft_type));
    }
    if fields.bias != "none" {
        return Err(format!("has biases (`bias` is `{}`), which are not read", fields.bias));
    }
    if let Some(how) = fields.init_lora_weights.as_str()
        && CHANGE_THE_BASE.iter().any(|name| how.to_lowercase().starts_with(name))
    {
        return Err(format!(
            "was made by `{how}`, which changes the model's own weights, too; convert it to LoRA"
        ));
    }
    if let Some(pattern) =
        fields.patterns().find(|name| name.contains(|c: char| "[](){}*+?|^$\\".contains(c)))
    {
        return Err(format!("has the pattern `{pattern}`; only names of modules are read"));
    }
    if !fields.lora_alpha.is_finite()
        || fields.alpha_pattern.iter().flat_map(IndexMap::values).any(|alpha| !alpha.is_finite())
    {
        return Err("has a `lora_alpha` that is not a number".to_owned());
    }
    Ok(fields)
}

/// Sorts the tensors of an adapter by the modules of a model.
fn changes(tensors: SmallTensors, names: &TensorNames) -> Result<BTreeMap<String, Matrices>, String> {
    let mut changes = BTreeMap::<String, Matrices>::new();
    for (name, tensor) in tensors {
        let own = name.strip_prefix("base_model.model.").unwrap_or(&name);
        let found = [".lora_A.weight", ".lora_B.weight"].iter().position(|end| own.ends_with(end));
        let (Some(which), Some((module, _))) = (found, own.split_once(".lora_")) else {
            return Err(format!(
                "has a tensor `{name}`, which is not one of LoRA's two matrices for a module"
            ));
        };
        let known = names.known(&text_name(&format!("{module}.weight")));
        let known = known.strip_suffix(".weight").unwrap_or(&known).to_owned();
        let change = changes.entry(known).or_default();
        change.own = module.to_owned();
        change.both[which] = Some(tensor);
    }
    if changes.is_empty() {
        return Err("has no tensors".to_owned());
    }
    Ok(changes)
}
