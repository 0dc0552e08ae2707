//! Rotary positions as metadata: their base, and the ways to stretch them.
//!
//! Source: `rope_parameters` of Transformers 5, or `rope_theta` and `rope_scaling` of 4;
//! `set_gguf_parameters` and `generate_extra_tensors` of llama.cpp's converter.

use std::f32::consts::TAU;

use serde_json::Value as Json;

use super::config::{Folder, text, wrong};
use crate::{Error, gguf::shown};

/// Upper limit for the pairs of dimensions in a head.
const MOST_PAIRS: u64 = 1 << 14;

impl Folder<'_> {
    /// Returns the parameters of blocks with full attention, from wherever this version of Transformers
    /// writes them.
    fn section(&self) -> Option<&Json> {
        // The old name takes precedence if both are present.
        let is_empty = |json: &&Json| json.as_object().is_some_and(serde_json::Map::is_empty);
        let scaling = self.get("rope_scaling").filter(|json| !is_empty(json));
        let section = scaling.or_else(|| self.get("rope_parameters"))?;
        // Gemma 3 has one section for each kind of block.
        section.get("full_attention").or(Some(section)).filter(|section| !section.is_null())
    }

    /// Returns a number from the section, or else the one outside of it.
    pub(super) fn parameter(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.section().and_then(|section| section.get(key)).filter(|value| !value.is_null()) {
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(wrong(format!("`{key}` of the rope parameters must be a number"))),
            },
            None => self.number(key),
        }
    }

    /// Returns the number of rotated dimensions in a head.
    pub(super) fn rotated(&self) -> Result<u64, Error> {
        let size = self.head_dim()?;
        let default = self.architecture.defaults.rotated;
        // The name in old configs of GPT-NeoX.
        let share =
            self.parameter("partial_rotary_factor")?.or(self.number("rotary_pct")?).unwrap_or(default);
        let rotated = (size as f64 * share) as u64;
        match rotated {
            2.. if rotated <= size && rotated / 2 <= MOST_PAIRS => Ok(rotated),
            _ => Err(wrong(format!("{rotated} of {size} dimensions of a head cannot be rotated"))),
        }
    }

    /// Returns the length that the model was trained with before its positions were stretched. The field
    /// outside the section takes precedence.
    pub(super) fn trained(&self) -> Result<Option<u64>, Error> {
        const KEY: &str = "original_max_position_embeddings";
        match self.unsigned(KEY)? {
            Some(trained) => Ok(Some(trained)),
            None => Ok(self.parameter(KEY)?.map(|trained| trained as u64)),
        }
    }

    /// Returns the base of blocks with a window, which Gemma 3 has.
    pub(super) fn local_theta(&self) -> Result<f64, Error> {
        let section = self.get("rope_parameters").and_then(|section| section.get("sliding_attention"));
        let theta = section.and_then(|section| section.get("rope_theta")).and_then(Json::as_f64);
        Ok(theta.or(self.number("rope_local_base_freq")?).unwrap_or(1e4))
    }

    /// Returns the base of blocks with a window; that of the others if none is stated.
    pub(super) fn theta_of_windows(&self) -> Result<f64, Error> {
        let section = self.get("rope_parameters").and_then(|section| section.get("sliding_attention"));
        let theta = section.and_then(|section| section.get("rope_theta")).and_then(Json::as_f64);
        let usual = || Ok(self.parameter("rope_theta")?.unwrap_or(self.architecture.defaults.theta));
        theta.map_or_else(usual, Ok)
    }

    /// Writes the keys and vectors of rotary positions.
    pub(super) fn rope(&mut self) -> Result<(), Error> {
        let rotated = self.rotated()?;
        if rotated != self.head_dim()? {
            self.count("rope.dimension_count", rotated)?;
        }
        self.rope_of(rotated)
    }

    /// Writes the base and the stretching of `rotated` dimensions.
    pub(super) fn rope_of(&mut self, rotated: u64) -> Result<(), Error> {
        let theta = match self.parameter("rope_theta")? {
            Some(theta) => theta,
            // The name in old configs of GPT-NeoX.
            None => self.number("rotary_emb_base")?.unwrap_or(self.architecture.defaults.theta),
        };
        self.real("rope.freq_base", theta);
        let of = |section: &Json, key: &str| section.get(key).and_then(Json::as_str).map(str::to_owned);
        let kind = self.section().and_then(|section| of(section, "rope_type").or(of(section, "type")));
        let is_phi = self.architecture.model_type == "phi3";
        match kind.as_deref().unwrap_or("default") {
            "default" => Ok(()),
            // Old names of `longrope`.
            "su" | "yarn" | "longrope" if is_phi => self.long_rope(rotated, false),
            "longrope" => self.long_rope(rotated, true),
            "linear" => {
                let factor = self.factor()?;
                self.set("rope.scaling.type", text("linear"));
                self.real("rope.scaling.factor", factor);
                Ok(())
            }
            "yarn" => self.yarn(),
            "llama3" => {
                let factors = self.llama3(theta as f32, rotated)?;
                self.described.factors.push(("rope_freqs.weight", factors));
                Ok(())
            }
            other => Err(wrong(format!(
                "the rope type is {}, which GGUF has no key for; known: default, linear, llama3, yarn, longrope",
                shown(other)
            ))),
        }
    }

    /// Returns the factor that stretches positions; the ratio of the lengths if only those are present.
    fn factor(&self) -> Result<f64, Error> {
        if let Some(factor) = self.parameter("factor")? {
            return Ok(factor);
        }
        let trained = self.trained()?.filter(|trained| *trained > 0);
        let trained = trained.ok_or_else(|| wrong("`factor` of the rope parameters is missing"))?;
        Ok(self.positions()? as f64 / trained as f64)
    }

    fn yarn(&mut self) -> Result<(), Error> {
        const LOG: &str = "rope.scaling.yarn_log_multiplier";
        let model_type = self.architecture.model_type;
        let [scale, of_all] = [self.parameter("mscale")?, self.parameter("mscale_all_dim")?];
        match (model_type, scale, of_all) {
            (_, None, None) => {}
            ("ministral3", None | Some(1.0), of_all) => self.real(LOG, of_all.unwrap_or(0.0)),
            // llama.cpp expects a tenth.
            ("deepseek_v2" | "deepseek_v3" | "glm4_moe_lite", Some(scale), Some(of_all))
                if scale == of_all =>
            {
                self.real(LOG, 0.1 * of_all);
            }
            _ => {
                let why =
                    "`mscale` or `mscale_all_dim` of the rope parameters has a value that GGUF cannot say";
                return Err(wrong(why));
            }
        }
        // Files of gpt-oss never round the limits of frequencies, and others always do.
        let truncates = self.section().and_then(|section| section.get("truncate"));
        let truncates = truncates.and_then(Json::as_bool).unwrap_or(true);
        if truncates == (model_type == "gpt_oss") {
            let why = format!("`truncate` of the rope parameters is {truncates}, which GGUF has no key for");
            return Err(wrong(why));
        }
        let (factor, trained) = (self.factor()?, self.trained()?);
        self.set("rope.scaling.type", text("yarn"));
        self.real("rope.scaling.factor", factor);
        let trained = match trained {
            Some(trained) => trained,
            None => self.positions()?,
        };
        self.count("rope.scaling.original_context_length", trained)?;
        for (field, key) in [
            ("attention_factor", "rope.scaling.yarn_attn_factor"),
            ("beta_fast", "rope.scaling.yarn_beta_fast"),
            ("beta_slow", "rope.scaling.yarn_beta_slow"),
        ] {
            if let Some(number) = self.parameter(field)? {
                self.real(key, number);
            }
        }
        Ok(())
    }

    /// Writes a `longrope`. `typed` is whether the architecture requires the type before it looks for the
    /// vectors.
    fn long_rope(&mut self, rotated: u64, typed: bool) -> Result<(), Error> {
        let trained = self.trained()?.unwrap_or(4096);
        if typed {
            self.set("rope.scaling.type", text("longrope"));
            self.count("rope.scaling.original_context_length", trained)?;
        }
        let attention = match self.parameter("attention_factor")? {
            Some(factor) => factor,
            None => {
                let stretch = match self.parameter("factor")? {
                    Some(factor) => factor,
                    None => self.positions()? as f64 / trained as f64,
                };
                if stretch > 1.0 { (1.0 + stretch.ln() / (trained as f64).ln()).sqrt() } else { 1.0 }
            }
        };
        self.real("rope.scaling.attn_factor", attention);
        for (field, name) in
            [("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")]
        {
            let list = self.section().and_then(|section| section.get(field)).and_then(Json::as_array);
            let numbers = list.map(|list| list.iter().filter_map(Json::as_f64).map(|n| n as f32).collect());
            let numbers: Vec<f32> = numbers.unwrap_or_default();
            if numbers.len() as u64 != rotated / 2 {
                return Err(wrong(format!(
                    "`{field}` of the rope parameters must have {} numbers, one for each pair of dimensions",
                    rotated / 2
                )));
            }
            self.described.factors.push((name, numbers));
        }
        Ok(())
    }

    /// Returns the divisor of each frequency, in float32 as the converter computes it.
    fn llama3(&self, base: f32, rotated: u64) -> Result<Vec<f32>, Error> {
        let number = |key: &str, default: f64| Ok::<_, Error>(self.parameter(key)?.unwrap_or(default) as f32);
        let factor = number("factor", 8.0)?;
        let (low, high) = (number("low_freq_factor", 1.0)?, number("high_freq_factor", 4.0)?);
        let trained = self.trained()?.unwrap_or(8192) as f32;
        let divisor = |pair: u64| {
            let frequency = 1.0 / base.powf((2 * pair) as f32 / rotated as f32);
            let wavelength = TAU / frequency;
            if wavelength < trained / high {
                1.0
            } else if wavelength > trained / low {
                factor
            } else {
                let smooth = (trained / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        Ok((0..rotated / 2).map(divisor).collect())
    }
}
