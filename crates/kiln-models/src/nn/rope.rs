//! Rotary positions (Su et al., 2021) and the ways to stretch them, following transformers'
//! `modeling_rope_utils`.
//!
//! Frequencies, angles, sines and cosines are float32 and computed on the host: they are few, and devices
//! disagree about sines of large angles.

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Result,
    layer::RowPosition,
    need::{RotaryNeed, RotaryPairs},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::ConfigFile;

/// `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RopeParameters {
    pub(crate) rope_type: Option<String>,
    /// Old name of `rope_type`; some versions write both.
    r#type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<usize>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    /// Growth of the query temperature of Ministral 3.
    pub(crate) llama_4_scaling_beta: Option<f64>,
}

const KNOWN: [&str; 7] = ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"];

impl RopeParameters {
    /// Gathers the parameters from the places where the versions of transformers write them.
    pub(crate) fn read(config: &ConfigFile) -> Result<Self> {
        // The old name takes precedence if both are present: people add it to the configs of newer versions.
        let is_empty = |json: &&serde_json::Value| json.as_object().is_some_and(serde_json::Map::is_empty);
        let scaling = config.get("rope_scaling").filter(|json| !is_empty(json));
        let section = scaling.or_else(|| config.get("rope_parameters"));
        let mut parameters = match section {
            Some(json) if json.get("full_attention").is_some() => {
                return Err(
                    config.error("has rope parameters for each kind of attention; this model has only one")
                );
            }
            Some(json) => Self::parse(config, json.clone())?,
            None => Self::default(),
        };
        let number = |key: &str| match config.get(key) {
            Some(value) if value.is_object() => Err(config.error(&format!("`{key}` is no finite number"))),
            value => Ok(value.and_then(Value::as_f64)),
        };
        parameters.rope_theta = parameters.rope_theta.or(number("rope_theta")?);
        parameters.partial_rotary_factor =
            parameters.partial_rotary_factor.or(number("partial_rotary_factor")?);
        // The value outside the section takes precedence, as in the reference.
        if let Some(trained) = number("original_max_position_embeddings")? {
            parameters.original_max_position_embeddings = Some(trained as usize);
        }
        Ok(parameters)
    }

    /// Parses only the parameters in `section`.
    pub(crate) fn parse(config: &ConfigFile, section: serde_json::Value) -> Result<Self> {
        let wrong = |_| config.error(&format!("the rope parameters `{section}` are not understood"));
        ConfigFile::from_json(section.clone()).parse().map_err(wrong)
    }

    /// Returns the parameters for text: all parts of a multimodal position are equal. `theta`: the default
    /// base.
    pub(crate) fn of_text(mut self, theta: f64) -> Self {
        self = self.or(theta, 1.0);
        if self.kind() == "mrope" {
            self.rope_type = Some("default".to_owned());
        }
        self
    }

    /// Returns the factor of the scores of latent attention, which stretched positions enlarge.
    pub(crate) fn score_factor(&self) -> f64 {
        match (self.mscale_all_dim, self.factor) {
            (Some(all), Some(factor)) if all != 0.0 && self.kind() != "default" => {
                magnitude(factor, all).powi(2)
            }
            _ => 1.0,
        }
    }

    /// Parameters of Ministral 3 if the config has none.
    pub(crate) fn ministral3() -> Self {
        Self {
            rope_type: Some("yarn".to_owned()),
            rope_theta: Some(1e6),
            factor: Some(16.0),
            original_max_position_embeddings: Some(16_384),
            mscale: Some(1.0),
            mscale_all_dim: Some(1.0),
            llama_4_scaling_beta: Some(0.1),
            ..Self::default()
        }
    }

    /// Returns the parameters of gpt-oss if the config has none but the base.
    pub(crate) fn gpt_oss(self) -> Self {
        Self {
            rope_type: Some("yarn".to_owned()),
            factor: Some(32.0),
            beta_fast: Some(32.0),
            beta_slow: Some(1.0),
            truncate: Some(false),
            original_max_position_embeddings: Some(4096),
            ..self
        }
    }

    /// Sets the base, and the rotated part of each head, if the config does not say them.
    pub(crate) fn or(self, theta: f64, partial: f64) -> Self {
        Self {
            rope_theta: self.rope_theta.or(Some(theta)),
            partial_rotary_factor: self.partial_rotary_factor.or(Some(partial)),
            ..self
        }
    }

    pub(crate) fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default")
    }
}

/// Rotary parameters for each kind of attention, as Gemma 3 and OLMo 3 have them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LayerRopes {
    /// In old configs, parameters of blocks without a window, in addition to those in `rope_parameters`.
    rope_scaling: Map<String, Value>,
    rope_parameters: Sections,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Sections {
    full_attention: Option<Map<String, Value>>,
    sliding_attention: Option<Map<String, Value>>,
}

impl LayerRopes {
    pub(crate) fn read(config: &ConfigFile) -> Result<Self> {
        config.parse()
    }

    /// Creates the rotary positions of blocks without a window and with one, whose heads have the sizes
    /// `dims`. `thetas`: their bases if the config does not say.
    pub(crate) fn ropes(
        self,
        config: &ConfigFile,
        dims: [usize; 2],
        positions: usize,
        thetas: [f64; 2],
    ) -> Result<Ropes> {
        let rope = |section: Map<String, Value>, i: usize| {
            let parameters = RopeParameters::parse(config, section.into())?.or(thetas[i], 1.0);
            Rope::new(config, &parameters, dims[i], positions)
        };
        let Sections { full_attention, sliding_attention } = self.rope_parameters;
        let mut full = full_attention.unwrap_or_default();
        full.extend(self.rope_scaling);
        Ok(Ropes { full: rope(full, 0)?, sliding: Some(rope(sliding_attention.unwrap_or_default(), 1)?) })
    }
}

/// Rotary positions of a model's blocks.
#[derive(Clone, Debug)]
pub struct Ropes {
    pub full: Rope,
    /// Rotary positions of blocks with a window; `None` if they equal `full`.
    pub sliding: Option<Rope>,
}

impl From<Rope> for Ropes {
    fn from(full: Rope) -> Self {
        Self { full, sliding: None }
    }
}

impl Ropes {
    pub(crate) fn of(&self, kind: RopeKind) -> &Rope {
        self.sliding.as_ref().filter(|_| kind == RopeKind::Sliding).unwrap_or(&self.full)
    }

    /// Returns the index in [`all`](Self::all) of [`of`](Self::of).
    pub(crate) fn index(&self, kind: RopeKind) -> usize {
        usize::from(self.sliding.is_some() && kind == RopeKind::Sliding)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Rope> {
        std::iter::once(&self.full).chain(&self.sliding)
    }
}

/// Which of a model's [`Ropes`] a block uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RopeKind {
    Full,
    Sliding,
}

/// Rotary positions of some blocks.
#[derive(Clone, Debug)]
pub struct Rope {
    frequencies: Frequencies,
    /// Factor that cosines and sines are multiplied by.
    pub attention_scaling: f32,
    pairs: RotaryPairs,
    /// Number of positions that the stretched model reaches; 0 if the config already has this number.
    reach: f64,
}

#[derive(Clone, Debug)]
enum Frequencies {
    /// Radians per position, one for each pair of dimensions.
    Fixed(Vec<f32>),
    /// The base grows with the length of the sequence beyond `trained`.
    Dynamic { base: f64, factor: f64, trained: usize, dim: usize },
    /// One set of frequencies up to `trained` positions, another beyond.
    Long { short: Vec<f32>, long: Vec<f32>, trained: usize },
}

impl Rope {
    /// Reads the rotary positions from a config.
    ///
    /// # Errors
    /// An unknown type, or a missing or impossible number.
    pub fn read(config: &ConfigFile, head_dim: usize, positions: usize) -> Result<Self> {
        Self::new(config, &RopeParameters::read(config)?, head_dim, positions)
    }

    /// Creates rotary positions from parsed parameters. `config` is only used in error messages.
    pub(crate) fn new(
        config: &ConfigFile,
        p: &RopeParameters,
        head_dim: usize,
        positions: usize,
    ) -> Result<Self> {
        let kind = p.kind();
        let wrong = |why: String| config.error(&format!("rope type `{kind}`: {why}"));
        let positive = |name: &str, value: Option<f64>| match value {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(wrong(format!("`{name}` is {value}, must be positive"))),
            None => Err(wrong(format!("`{name}` is missing"))),
        };
        let base = positive("rope_theta", Some(p.rope_theta.unwrap_or(10000.0)))?;
        let share = positive("partial_rotary_factor", Some(p.partial_rotary_factor.unwrap_or(1.0)))?;
        if kind == "proportional" {
            return Self::proportional(head_dim, base, share, p.factor.unwrap_or(1.0)).map_err(wrong);
        }
        let dim = (head_dim as f64 * share) as usize;
        if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
            return Err(wrong(format!("{dim} of {head_dim} dimensions cannot be rotated in pairs")));
        }
        let trained = p.original_max_position_embeddings.unwrap_or(positions);
        if trained == 0 {
            return Err(wrong("`original_max_position_embeddings` is 0".to_owned()));
        }
        // The given factor, or the ratio of the lengths if only those are present.
        let factor = || positive("factor", p.factor.or(Some(positions as f64 / trained as f64)));
        let plain = inverse_powers(base, dim);

        let (frequencies, scaling) = match kind {
            "default" => (Frequencies::Fixed(plain), 1.0),
            "linear" => {
                let factor = positive("factor", p.factor)? as f32;
                (Frequencies::Fixed(plain.iter().map(|f| f / factor).collect()), 1.0)
            }
            "dynamic" => {
                if dim < 4 {
                    return Err(wrong(format!("needs at least 4 rotated dimensions, not {dim}")));
                }
                let factor = positive("factor", p.factor)?;
                (Frequencies::Dynamic { base, factor, trained: positions, dim }, 1.0)
            }
            "llama3" => {
                let [factor, low, high] = [
                    positive("factor", p.factor)?,
                    positive("low_freq_factor", p.low_freq_factor)?,
                    positive("high_freq_factor", p.high_freq_factor)?,
                ];
                if high <= low {
                    return Err(wrong(format!("`high_freq_factor` {high} is not above {low}")));
                }
                (Frequencies::Fixed(llama3(plain, factor, low, high, trained as f64)), 1.0)
            }
            "yarn" => {
                let factor = factor()?;
                // Zero counts as absent.
                let or = |value: Option<f64>, default| Some(value.filter(|&v| v != 0.0).unwrap_or(default));
                let [fast, slow] = [
                    positive("beta_fast", or(p.beta_fast, 32.0))?,
                    positive("beta_slow", or(p.beta_slow, 1.0))?,
                ];
                let truncate = p.truncate.unwrap_or(true);
                let frequencies = yarn(&plain, factor, base, dim, trained as f64, [fast, slow], truncate);
                (
                    Frequencies::Fixed(frequencies),
                    p.attention_factor.unwrap_or_else(|| yarn_scaling(p, factor)),
                )
            }
            "longrope" => {
                let factor = factor()?;
                let divided = |name: &str, by: &Option<Vec<f64>>| match by {
                    Some(by) if by.len() == plain.len() && by.iter().all(|f| f.is_finite() && *f > 0.0) => {
                        Ok(plain.iter().zip(by).map(|(f, &by)| f / by as f32).collect::<Vec<f32>>())
                    }
                    Some(by) => Err(wrong(format!(
                        "`{name}` needs {} positive numbers, has {}",
                        plain.len(),
                        by.len()
                    ))),
                    None => Err(wrong(format!("`{name}` is missing"))),
                };
                let short = divided("short_factor", &p.short_factor)?;
                let long = divided("long_factor", &p.long_factor)?;
                let scaling = match p.attention_factor {
                    Some(given) => given,
                    None if factor <= 1.0 || trained < 2 => 1.0,
                    None => (1.0 + factor.ln() / (trained as f64).ln()).sqrt(),
                };
                (Frequencies::Long { short, long, trained }, scaling)
            }
            _ => return Err(wrong(format!("is unknown; known: {}", KNOWN.join(", ")))),
        };
        let reach = match kind {
            // The config has the trained number of positions.
            "linear" | "dynamic" => positions as f64 * p.factor.unwrap_or(1.0),
            // The config has either the trained or the stretched number.
            "yarn" => trained as f64 * factor()?,
            // The config has the stretched number.
            _ => 0.0,
        };
        let pairs = RotaryPairs::Halves;
        Ok(Self { frequencies, attention_scaling: scaling as f32, pairs, reach })
    }

    /// Creates rotary positions of whole heads, of which a share moves. Other pairs have a frequency of 0.
    fn proportional(
        head_dim: usize,
        base: f64,
        share: f64,
        factor: f64,
    ) -> std::result::Result<Self, String> {
        if !head_dim.is_multiple_of(2) || share > 1.0 || !factor.is_finite() || factor <= 0.0 {
            return Err(format!(
                "share {share} of {head_dim} dimensions, divided by {factor}, is impossible"
            ));
        }
        let moving = (share * head_dim as f64 / 2.0) as usize;
        let mut frequencies = inverse_powers(base, head_dim);
        frequencies.iter_mut().for_each(|frequency| *frequency /= factor as f32);
        frequencies[moving..].fill(0.0);
        let pairs = RotaryPairs::Halves;
        Ok(Self { frequencies: Frequencies::Fixed(frequencies), attention_scaling: 1.0, pairs, reach: 0.0 })
    }

    /// Returns rotary positions that rotate adjacent dimensions together.
    pub(crate) fn adjacent(self) -> Self {
        Self { pairs: RotaryPairs::Adjacent, ..self }
    }

    pub(crate) fn pairs(&self) -> RotaryPairs {
        self.pairs
    }

    /// Returns the number of positions that a model was made to reach if its config says `positions`.
    pub fn stretched(&self, positions: usize) -> usize {
        // Limited to stay as far below overflow as the numbers in the config.
        positions.max(self.reach.min((1u64 << 40) as f64) as usize)
    }

    /// Returns radians per position for a sequence of `len` positions.
    pub fn inverse_frequencies(&self, len: usize) -> Vec<f32> {
        match &self.frequencies {
            Frequencies::Fixed(frequencies) => frequencies.clone(),
            Frequencies::Dynamic { base, factor, trained, dim } => {
                let stretch = factor * len.max(*trained) as f64 / *trained as f64 - (factor - 1.0);
                inverse_powers(base * stretch.powf(*dim as f64 / (*dim as f64 - 2.0)), *dim)
            }
            Frequencies::Long { short, long, trained } => if len > *trained { long } else { short }.clone(),
        }
    }

    /// Computes cosines and sines `[1 or rows, steps, rotated / 2]` for tokens that are fed one at a time,
    /// starting at `rows`. The entry of a token is for a sequence that ends with it.
    pub(crate) fn step_tables(
        &self,
        rows: &[RowPosition],
        steps: usize,
        device: &Device,
    ) -> (Tensor<3>, Tensor<3>) {
        // If all rows are equal, they share one table.
        let alike = rows.windows(2).all(|pair| pair[0] == pair[1]);
        let own = if alike { &rows[..rows.len().min(1)] } else { rows };
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for row in own {
            // Among rows padded to one length, the longest determines the length of the sequence.
            let together = rows.iter().filter(|other| other.first == row.first);
            let shortest_pad = together.map(|other| other.visible_from).min().unwrap_or(0);
            for slot in row.first..row.first + steps {
                let frequencies = self.inverse_frequencies((slot + 1).saturating_sub(shortest_pad));
                self.push_angles(slot.saturating_sub(row.visible_from), &frequencies, &mut cos, &mut sin);
            }
        }
        upload([own.len(), steps], cos, sin, device)
    }

    fn push_angles(&self, position: usize, frequencies: &[f32], cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for frequency in frequencies {
            let (s, c) = (position as f32 * frequency).sin_cos();
            cos.push(c * self.attention_scaling);
            sin.push(s * self.attention_scaling);
        }
    }

    /// Returns the rotation data that a cache needs to move keys.
    pub fn need(&self) -> RotaryNeed {
        let up_to = match self.frequencies {
            Frequencies::Fixed(_) => None,
            Frequencies::Dynamic { trained, .. } | Frequencies::Long { trained, .. } => Some(trained),
        };
        RotaryNeed { frequencies: self.inverse_frequencies(1), pairs: self.pairs, up_to }
    }

    /// Computes cosines and sines `[rows, tokens, rotated / 2]`, given the positions and the sequence length
    /// of each row.
    pub(crate) fn tables(&self, rows: &[(Vec<usize>, usize)], device: &Device) -> (Tensor<3>, Tensor<3>) {
        let tokens = rows.first().map_or(0, |(positions, _)| positions.len());
        self.tables_of([rows.len(), tokens], rows, device)
    }

    /// Computes cosines and sines of rows of any length, one after the other: `[1, tokens, rotated / 2]`.
    pub(crate) fn flat_tables(
        &self,
        rows: &[(Vec<usize>, usize)],
        device: &Device,
    ) -> (Tensor<3>, Tensor<3>) {
        self.tables_of([1, rows.iter().map(|(positions, _)| positions.len()).sum()], rows, device)
    }

    fn tables_of(
        &self,
        shape: [usize; 2],
        rows: &[(Vec<usize>, usize)],
        device: &Device,
    ) -> (Tensor<3>, Tensor<3>) {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for (positions, len) in rows {
            let frequencies = self.inverse_frequencies(*len);
            for &position in positions {
                self.push_angles(position, &frequencies, &mut cos, &mut sin);
            }
        }
        upload(shape, cos, sin, device)
    }
}

fn upload(
    [rows, tokens]: [usize; 2],
    cos: Vec<f32>,
    sin: Vec<f32>,
    device: &Device,
) -> (Tensor<3>, Tensor<3>) {
    let shape = [rows, tokens, cos.len() / (rows * tokens).max(1)];
    let upload = |table: Vec<f32>| Tensor::from_data(TensorData::new(table, shape), device);
    (upload(cos), upload(sin))
}

/// Returns `base^(-2i / dim)`, in the float32 arithmetic of the reference.
fn inverse_powers(base: f64, dim: usize) -> Vec<f32> {
    (0..dim / 2).map(|i| 1.0 / (base as f32).powf((2 * i) as f32 / dim as f32)).collect()
}

/// Applies Llama 3's scaling: divides slow frequencies, keeps fast ones, and interpolates between them.
fn llama3(plain: Vec<f32>, factor: f64, low: f64, high: f64, trained: f64) -> Vec<f32> {
    let scaled = |frequency: f32| {
        let wavelength = std::f64::consts::TAU / f64::from(frequency);
        let stretched = f64::from(frequency) / factor;
        if wavelength > trained / low {
            stretched as f32
        } else if wavelength < trained / high {
            frequency
        } else {
            let smooth = (trained / wavelength - low) / (high - low);
            ((1.0 - smooth) * stretched + smooth * f64::from(frequency)) as f32
        }
    };
    plain.into_iter().map(scaled).collect()
}

/// Applies YaRN (Peng et al., 2023): like `llama3`, but by the number of turns of a dimension over the
/// trained length.
fn yarn(
    plain: &[f32],
    factor: f64,
    base: f64,
    dim: usize,
    trained: f64,
    [fast, slow]: [f64; 2],
    truncate: bool,
) -> Vec<f32> {
    let dimension =
        |turns: f64| dim as f64 * (trained / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
    let (mut low, mut high) = (dimension(fast), dimension(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let mix = |(i, &frequency): (usize, &f32)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        let frequency = f64::from(frequency);
        (frequency / factor * ramp + frequency * (1.0 - ramp)) as f32
    };
    plain.iter().enumerate().map(mix).collect()
}

/// Returns YaRN's factor for cosines and sines, for configs that do not state it.
fn yarn_scaling(parameters: &RopeParameters, factor: f64) -> f64 {
    let mscale = |m: f64| magnitude(factor, m);
    match (parameters.mscale, parameters.mscale_all_dim) {
        // Zero counts as absent.
        (Some(m), Some(all)) if m != 0.0 && all != 0.0 => mscale(m) / mscale(all),
        _ => mscale(1.0),
    }
}

/// Magnitude of sines and cosines when positions are stretched by `factor` (`yarn_get_mscale` of
/// transformers).
fn magnitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}
