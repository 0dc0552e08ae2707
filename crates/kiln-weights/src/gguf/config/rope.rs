//! Rotary positions: their base, the fraction of each head that is rotated, and the ways to stretch them.
//!
//! Llama 3 and Phi-3 have the divisors of frequencies as tensors, which the converter computes from the
//! config.

use std::f64::consts::TAU;

use serde_json::{Value, json};

use super::{Fields, File, fields};
use crate::{Error, gguf::shown};

/// Tensors that are part of the config instead of the model's weights.
pub const FACTORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

impl File<'_> {
    /// Returns the fields of rotary positions.
    pub(super) fn rope(&mut self) -> Result<Fields, Error> {
        self.rope_with(&[])
    }

    /// Returns the fields of rotary positions of a model that reads the keys in `read` itself.
    pub(super) fn rope_with(&mut self, read: &[&str]) -> Result<Fields, Error> {
        const DIMENSIONS: &str = "rope.dimension_count";
        let size = self.head_dim()?;
        let rotated = self.unsigned(DIMENSIONS)?.unwrap_or(size);
        if rotated == 0 || rotated > size {
            return Err(self.wrong(
                DIMENSIONS,
                format!("is {rotated}, must be between 1 and the {size} dimensions of a head"),
            ));
        }
        let mut rope = self.rope_of(rotated, read)?;
        if rotated != size {
            // The next larger number, if the product would be rounded down.
            let share = rotated as f64 / size as f64;
            let product = (size as f64 * share) as u64;
            rope.insert(
                "partial_rotary_factor".to_owned(),
                if product < rotated { share.next_up() } else { share }.into(),
            );
        }
        Ok(rope)
    }

    /// Returns the base and the stretching of `rotated` dimensions. See [`rope_with`](Self::rope_with) for
    /// `read`.
    pub(super) fn rope_of(&mut self, rotated: u64, read: &[&str]) -> Result<Fields, Error> {
        let base = self.number("rope.freq_base")?.unwrap_or(1e4);
        let mut rope = fields([("rope_theta", base.into())]);
        rope.extend(self.scaling(base, rotated, read)?.map(|scaling| ("rope_scaling".to_owned(), scaling)));
        Ok(rope)
    }

    /// Returns `rope_scaling`; `None` if frequencies are not stretched.
    fn scaling(&mut self, base: f64, rotated: u64, read: &[&str]) -> Result<Option<Value>, Error> {
        const TYPE: &str = "rope.scaling.type";
        let kind = self.metadata.text(&self.key(TYPE))?.unwrap_or("linear").to_owned();
        // 0 stands for none, and the second key is an old name.
        let factor = self.number("rope.scaling.factor")?.or(self.number("rope.scale_linear")?);
        let stretched = match (&*kind, factor.filter(|factor| *factor != 0.0)) {
            ("yarn", Some(factor)) => Some(self.yarn(factor, read)?),
            ("yarn", None) => return Err(self.missing("rope.scaling.factor")),
            ("linear", Some(factor)) if factor != 1.0 => {
                Some(json!({ "rope_type": "linear", "factor": factor }))
            }
            ("linear" | "none" | "longrope", _) => None,
            _ => {
                let why =
                    format!("is {}, which is unknown; known: none, linear, yarn, longrope", shown(&kind));
                return Err(self.wrong(TYPE, why));
            }
        };
        let needs_factors = kind == "longrope";
        let attention = self.attention()?;
        match (stretched, FACTORS.map(|name| self.has(name).then_some(name))) {
            (None, [None, Some(short), Some(long)]) => {
                let (short, long) = (self.factors(short, rotated)?, self.factors(long, rotated)?);
                self.long_rope(&short, &long).map(Some)
            }
            (None, [Some(all), None, None]) if !needs_factors => {
                let factors = self.factors(all, rotated)?;
                match llama3(&factors, base, rotated).filter(|_| attention == 1.0) {
                    Some(scaling) => Ok(Some(scaling)),
                    // The same factors for sequences of any length.
                    None => self.long_rope(&factors, &factors).map(Some),
                }
            }
            // In config.json, the factor of sines and cosines has a field only if there are frequency
            // factors.
            (_, [None, None, None]) if attention != 1.0 && matches!(&*kind, "linear" | "none") => {
                let divisor =
                    factor.filter(|factor| *factor != 0.0 && kind == "linear").unwrap_or(1.0) as f32;
                let factors = vec![divisor; (rotated / 2) as usize];
                self.long_rope(&factors, &factors).map(Some)
            }
            (stretched, [None, None, None]) if !needs_factors => Ok(stretched),
            (_, found) => {
                let found: Vec<_> = found.into_iter().flatten().collect();
                let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
                let why = format!("is `{kind}`, which does not fit the factors that the file has: {found}");
                Err(self.wrong(TYPE, why))
            }
        }
    }

    /// Returns the divisors of frequencies, one for each pair of dimensions.
    fn factors(&mut self, name: &str, rotated: u64) -> Result<Vec<f32>, Error> {
        let factors = self.tensors.numbers(name)?;
        let sound = factors.len() as u64 == rotated / 2
            && factors.iter().all(|factor| factor.is_finite() && *factor > 0.0);
        match sound {
            true => Ok(factors),
            false => {
                Err(Error::Damaged(format!("the tensor `{name}` must have {} positive numbers", rotated / 2)))
            }
        }
    }

    fn long_rope(&self, short: &[f32], long: &[f32]) -> Result<Value, Error> {
        let numbers = |factors: &[f32]| factors.iter().map(|factor| f64::from(*factor)).collect::<Vec<_>>();
        let trained =
            self.unsigned("rope.scaling.original_context_length")?.or(self.unsigned("context_length")?);
        Ok(json!({
            "rope_type": "longrope",
            "short_factor": numbers(short),
            "long_factor": numbers(long),
            "original_max_position_embeddings": trained,
            "attention_factor": self.attention()?,
        }))
    }

    /// Returns the factor of sines and cosines, in addition to the factor of the scaling type.
    pub(super) fn attention(&self) -> Result<f64, Error> {
        const KEY: &str = "rope.scaling.attn_factor";
        match self.number(KEY)? {
            Some(factor) if factor <= 0.0 => Err(self.wrong(KEY, format!("is {factor}, must be positive"))),
            factor => Ok(factor.unwrap_or(1.0)),
        }
    }

    fn yarn(&self, factor: f64, read: &[&str]) -> Result<Value, Error> {
        for (key, neutral) in
            [("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)]
        {
            if let Some(other) = self.number(key)?.filter(|other| *other != neutral && !read.contains(&key)) {
                return Err(self.wrong(key, format!("is {other}, and only {neutral} is supported")));
            }
        }
        let mut scaling = fields([("rope_type", "yarn".into()), ("factor", factor.into())]);
        let trained =
            self.unsigned("rope.scaling.original_context_length")?.or(self.unsigned("context_length")?);
        scaling.insert("original_max_position_embeddings".to_owned(), trained.into());
        let (stated, more) = (self.number("rope.scaling.yarn_attn_factor")?, self.attention()?);
        // The paper's value, if none is stated.
        let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
        if stated.is_some() || more != 1.0 {
            scaling.insert("attention_factor".to_owned(), (stated.unwrap_or(usual) * more).into());
        }
        for (field, key) in
            [("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")]
        {
            scaling.extend(self.number(key)?.map(|number| (field.to_owned(), number.into())));
        }
        Ok(scaling.into())
    }
}

/// Returns `rope_scaling` of type `llama3`, if it yields these factors with the parameters that all such
/// models share.
fn llama3(factors: &[f32], base: f64, rotated: u64) -> Option<Value> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const TRAINED: f64 = 8192.0;
    // The converter computes in float32, whose errors add up to a few millionths; another trained length
    // changes factors by tenths.
    const CLOSE: f64 = 1e-4;
    // The slowest frequency is stretched by the whole factor.
    let factor = f64::from(*factors.last()?);
    let expected = |i: usize| {
        let wavelength = TAU * base.powf((2 * i) as f64 / rotated as f64);
        let smooth = ((TRAINED / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    };
    let is_close = |(i, found): (usize, &f32)| (f64::from(*found) / expected(i) - 1.0).abs() < CLOSE;
    let same = factor > 1.0 && factors.iter().enumerate().all(is_close);
    same.then(|| {
        json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": TRAINED as u64,
        })
    })
}
