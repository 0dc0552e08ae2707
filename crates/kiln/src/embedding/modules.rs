//! The settings for embeddings in a folder of sentence-transformers (<https://sbert.net>): `modules.json`,
//! the folders of its modules, `sentence_bert_config.json` and `config_sentence_transformers.json`.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{Error, Result, source::is_plain};
use kiln_kernels::product;
use kiln_models::checkpoint::Checkpoint;
use serde::Deserialize;
use serde_json::Value;

use super::Pooling;
use crate::folder::json;

const MODULES: &str = "modules.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const PROMPTS: &str = "config_sentence_transformers.json";

/// Names of the settings of the first module, by the kinds of models that old versions named them after.
const LIMITS: [&str; 7] = ["bert", "roberta", "distilbert", "xlm-roberta", "camembert", "albert", "xlnet"];

/// The settings for embeddings of a folder.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct EmbeddingConfig {
    /// How the vectors of tokens become one; several are put one after the other. Empty if the folder does
    /// not say it.
    pub poolings: Vec<Pooling>,
    /// Whether the tokens of a prompt are pooled, too.
    pub include_prompt: bool,
    /// Largest number of tokens of a text, if the folder names one.
    pub max_tokens: Option<usize>,
    /// Whether a text that is cut loses its beginning instead of its end.
    pub cuts_beginning: bool,
    /// Whether texts are changed to lower case before they are tokenized.
    pub lower_case: bool,
    /// Texts that are put before inputs, by their names.
    pub prompts: BTreeMap<String, String>,
    /// Name of the prompt that is used if none is asked for.
    pub default_prompt: Option<String>,
    /// Modules after the pooling.
    pub(super) steps: Vec<Step>,
}

/// A module after the pooling.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Scales vectors to length 1.
    Normalize,
    Dense(Dense),
}

/// A product with a matrix, with an activation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Dense {
    /// `[out, in]`
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    sizes: [usize; 2],
    activation: DenseActivation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DenseActivation {
    Identity,
    Tanh,
    Relu,
    Gelu,
    Sigmoid,
}

#[derive(Deserialize)]
struct Module {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DenseFields {
    in_features: usize,
    out_features: usize,
    #[serde(default = "yes")]
    bias: bool,
    activation_function: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct LimitFields {
    max_seq_length: Option<usize>,
    do_lower_case: bool,
    /// Everything else, which must be off.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizerFields {
    model_max_length: Option<f64>,
    truncation_side: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PromptFields {
    prompts: BTreeMap<String, String>,
    default_prompt_name: Option<String>,
}

fn yes() -> bool {
    true
}

impl EmbeddingConfig {
    /// Reads the settings of a folder. Without `modules.json`, they name no pooling.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let mut config = Self { include_prompt: true, ..Self::default() };
        // As in sentence-transformers.
        config.prompts = ["query", "document"].map(|name| (name.to_owned(), String::new())).into();
        let tokenizer = json(checkpoint, TOKENIZER_CONFIG)?;
        if !tokenizer.is_null() {
            let TokenizerFields { model_max_length, truncation_side } =
                parsed(checkpoint, TOKENIZER_CONFIG, tokenizer)?;
            // Tokenizers without a limit name a huge number.
            config.max_tokens =
                model_max_length.filter(|most| (1.0..1e9).contains(most)).map(|most| most as usize);
            config.cuts_beginning = truncation_side.as_deref() == Some("left");
        }
        let wrong = |why: String| Error::File { path: checkpoint.path_of(MODULES), why };
        let modules: Vec<Module> = match json(checkpoint, MODULES)? {
            Value::Null => return Ok(config),
            modules => parsed(checkpoint, MODULES, modules)?,
        };
        if modules.is_empty() {
            return Err(wrong("lists no modules".to_owned()));
        }
        for (i, Module { path, kind }) in modules.iter().enumerate() {
            if !path.is_empty() && !path.split('/').all(is_plain) {
                return Err(wrong(format!("names the folder `{path}`, which is not one of its own")));
            }
            let settings = || json(checkpoint, &inside(path, "config.json"));
            let is_pooled = !config.poolings.is_empty();
            // Versions differ in the modules of Python that classes are in.
            match kind.rsplit('.').next().unwrap_or_default() {
                "Transformer" if i == 0 && path.is_empty() => {}
                "Transformer" => {
                    return Err(wrong(format!("has its model in the folder `{path}`; name that folder")));
                }
                _ if i == 0 => return Err(wrong(format!("begins with `{kind}` in place of a Transformer"))),
                "Pooling" if is_pooled => return Err(wrong("lists several kinds of pooling".to_owned())),
                "Dense" | "Normalize" if !is_pooled => {
                    return Err(wrong(format!("lists `{kind}` before the pooling, which is not computed")));
                }
                "Pooling" => {
                    let (poolings, include_prompt) = read_pooling(&settings()?).map_err(|why| {
                        Error::File { path: checkpoint.path_of(&inside(path, "config.json")), why }
                    })?;
                    (config.poolings, config.include_prompt) = (poolings, include_prompt);
                }
                "Dense" => config.steps.push(Step::Dense(Dense::read(checkpoint, path)?)),
                "Normalize" => config.steps.push(Step::Normalize),
                // It only drops numbers in training.
                "Dropout" => {}
                other => return Err(wrong(format!("asks for the module `{other}`, which is not computed"))),
            }
        }
        for name in LIMITS {
            let file = format!("sentence_{name}_config.json");
            let settings = json(checkpoint, &file)?;
            if !settings.is_null() {
                let LimitFields { max_seq_length, do_lower_case, others } =
                    parsed(checkpoint, &file, settings)?;
                if let Some((name, _)) = others.iter().find(|(name, value)| !is_usual(name, value)) {
                    let why = format!("asks for `{name}`, which is not supported");
                    return Err(Error::File { path: checkpoint.path_of(&file), why });
                }
                config.max_tokens = max_seq_length.or(config.max_tokens);
                config.lower_case = do_lower_case;
                break;
            }
        }
        let prompts = json(checkpoint, PROMPTS)?;
        if !prompts.is_null() {
            let PromptFields { prompts, default_prompt_name } = parsed(checkpoint, PROMPTS, prompts)?;
            config.prompts.extend(prompts);
            if let Some(name) =
                default_prompt_name.as_ref().filter(|name| !config.prompts.contains_key(*name))
            {
                let why = format!("names the default prompt `{name}`, and has none of that name");
                return Err(Error::File { path: checkpoint.path_of(PROMPTS), why });
            }
            config.default_prompt = default_prompt_name;
        }
        Ok(config)
    }

    /// Length of the vectors that these poolings of hidden states of this width give.
    ///
    /// # Errors
    /// [`Error::Setting`] if a matrix has another width.
    pub(super) fn width(&self, hidden: usize, poolings: &[Pooling]) -> Result<usize> {
        self.steps.iter().try_fold(hidden * poolings.len(), |width, step| match step {
            Step::Normalize => Ok(width),
            Step::Dense(Dense { sizes: [out, inputs], .. }) if *inputs == width => Ok(*out),
            Step::Dense(Dense { sizes: [_, inputs], .. }) => {
                let why = format!("gives vectors of {width} numbers, and the next module takes {inputs}");
                Err(Error::Setting { name: "pooling", why })
            }
        })
    }

    /// The prompt with this name.
    pub(super) fn prompt(&self, name: &str) -> Result<&str> {
        self.prompts.get(name).map(String::as_str).ok_or_else(|| Error::Unknown {
            what: "prompt of the folder",
            name: name.to_owned(),
            known: self.prompts.keys().cloned().collect(),
        })
    }

    pub(super) fn default_prompt(&self) -> Option<&str> {
        self.prompts.get(self.default_prompt.as_ref()?).map(String::as_str)
    }

    /// The text in the case that the folder asks for.
    pub(super) fn cased(&self, text: &str) -> String {
        if self.lower_case { text.to_lowercase() } else { text.to_owned() }
    }
}

/// Whether a setting of the first module is off, or that of every model of texts.
fn is_usual(name: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty() || name == "modality_config",
        Value::String(text) => matches!(
            (name, text.as_str()),
            ("transformer_task", "feature-extraction") | ("module_output_name", "token_embeddings")
        ),
        _ => false,
    }
}

/// Reads the kinds of pooling, and whether tokens of a prompt are pooled.
fn read_pooling(settings: &Value) -> Result<(Vec<Pooling>, bool), String> {
    /// Switches in the order in which their vectors follow each other.
    const SWITCHES: [(&str, Pooling); 6] = [
        ("pooling_mode_cls_token", Pooling::Cls),
        ("pooling_mode_max_tokens", Pooling::Max),
        ("pooling_mode_mean_tokens", Pooling::Mean),
        ("pooling_mode_mean_sqrt_len_tokens", Pooling::MeanSqrtLen),
        ("pooling_mode_weightedmean_tokens", Pooling::WeightedMean),
        ("pooling_mode_lasttoken", Pooling::LastToken),
    ];

    if !settings.is_object() {
        return Err("is missing, and says how the vectors of tokens become one".to_owned());
    }
    let switch = |name: &str, default: bool| match settings.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(on)) => Ok(*on),
        Some(_) => Err(format!("has a `{name}` that is neither true nor false")),
    };
    let named = |name: &Value| {
        let name = name.as_str().ok_or("`pooling_mode` is not a name")?;
        name.to_lowercase().parse::<Pooling>().map_err(|error| error.to_string())
    };
    let poolings: Vec<Pooling> = match settings.get("pooling_mode") {
        None | Some(Value::Null) => {
            let mut found = Vec::new();
            for (name, pooling) in SWITCHES {
                // Of all switches, only that of the mean is on by default.
                found.extend(switch(name, pooling == Pooling::Mean)?.then_some(pooling));
            }
            found
        }
        Some(Value::Array(names)) => names.iter().map(named).collect::<Result<_, String>>()?,
        Some(name) => vec![named(name)?],
    };
    if poolings.is_empty() {
        return Err("names no kind of pooling".to_owned());
    }
    Ok((poolings, switch("include_prompt", true)?))
}

/// The name of a file in a folder; in the whole folder if `folder` is empty.
fn inside(folder: &str, file: &str) -> String {
    if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") }
}

fn parsed<T: serde::de::DeserializeOwned>(checkpoint: &Checkpoint, file: &str, json: Value) -> Result<T> {
    let wrong = |e: serde_json::Error| Error::File { path: checkpoint.path_of(file), why: e.to_string() };
    serde_json::from_value(json).map_err(wrong)
}

impl Step {
    /// Applies the module to `[texts, width]`.
    pub(super) fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Normalize => {
                // Torch's lower bound of a length.
                let length = x.clone().square().sum_dim(1).sqrt().clamp_min(1e-12);
                x / length
            }
            Self::Dense(dense) => dense.apply(x),
        }
    }
}

impl Dense {
    fn read(checkpoint: &Checkpoint, path: &str) -> Result<Self> {
        const WEIGHTS: &str = "model.safetensors";
        let (settings, weights) = (inside(path, "config.json"), inside(path, WEIGHTS));
        let wrong = |file: &str, why: String| Error::File { path: checkpoint.path_of(file), why };
        let DenseFields { in_features, out_features, bias, activation_function } =
            parsed(checkpoint, &settings, json(checkpoint, &settings)?)?;
        let named = activation_function.as_deref().unwrap_or("Tanh").rsplit('.').next();
        let activation = match named.unwrap_or_default() {
            "Identity" => DenseActivation::Identity,
            "Tanh" => DenseActivation::Tanh,
            "ReLU" => DenseActivation::Relu,
            "GELU" => DenseActivation::Gelu,
            "Sigmoid" => DenseActivation::Sigmoid,
            other => {
                let why =
                    format!("asks for the activation `{other}`; known: Identity, Tanh, ReLU, GELU, Sigmoid");
                return Err(wrong(&settings, why));
            }
        };
        if in_features == 0 || out_features == 0 {
            return Err(wrong(&settings, "has a matrix without numbers".to_owned()));
        }
        let mut tensors = checkpoint.small_tensors(&weights)?.ok_or_else(|| {
            let why = "is missing; only safetensors are read, so save the model again with a new version";
            wrong(&weights, why.to_owned())
        })?;
        let mut take = |name: &str, shape: &[usize]| match tensors.remove(name) {
            Some((found, numbers)) if found == shape => Ok(numbers),
            Some((found, _)) => Err(wrong(
                &weights,
                format!("has `{name}` of shape {found:?}, and its config asks for {shape:?}"),
            )),
            None => Err(wrong(&weights, format!("has no tensor `{name}`"))),
        };
        let weight = take("linear.weight", &[out_features, in_features])?;
        let bias = if bias { Some(take("linear.bias", &[out_features])?) } else { None };
        if let Some(name) = tensors.keys().next() {
            return Err(wrong(&weights, format!("has a tensor `{name}`, which its config has no place for")));
        }
        Ok(Self { weight, bias, sizes: [out_features, in_features], activation })
    }

    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        let device: Device = x.device();
        let weight = Tensor::<2>::from_data(TensorData::new(self.weight.clone(), self.sizes), &device);
        let y = product(x, weight.transpose());
        let y = match &self.bias {
            Some(bias) => y + Tensor::<2>::from_data(TensorData::new(bias.clone(), [1, bias.len()]), &device),
            None => y,
        };
        match self.activation {
            DenseActivation::Identity => y,
            DenseActivation::Tanh => y.tanh(),
            DenseActivation::Relu => y.clamp_min(0.0),
            DenseActivation::Gelu => burn::tensor::activation::gelu(y),
            DenseActivation::Sigmoid => burn::tensor::activation::sigmoid(y),
        }
    }
}
