//! The quantization method of a folder: `quantization_config` of config.json.

use kiln_core::Error;
use kiln_weights::quantized::Zeros;
use serde_json::Value;

use crate::ConfigFile;

/// Upper limit for the columns of a group.
const LARGEST_GROUP: u64 = 1 << 24;

/// A supported method, with the settings that only the config states.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::checkpoint) enum Method {
    Bitsandbytes,
    Gptq {
        bits: usize,
        /// Columns per group; `None` if a row is one group.
        group: Option<usize>,
        zeros: Zeros,
    },
    Awq {
        /// Columns per group; `None` if a row is one group.
        group: Option<usize>,
    },
    /// Experts in MXFP4.
    Mxfp4,
    CompressedTensors {
        /// Bits per code, for all kinds of matrices.
        bits: Vec<usize>,
    },
}

impl Method {
    /// Reads the method of a folder; `None` for a folder of plain matrices.
    ///
    /// # Errors
    /// [`Error::File`] naming an unsupported method or setting.
    pub(in crate::checkpoint) fn read(config: &ConfigFile) -> Result<Option<Self>, Error> {
        // Old versions of compressed-tensors use the second key.
        let found = ["quantization_config", "compression_config"].into_iter();
        let Some(settings) = found.filter_map(|key| config.get(key)).find(|value| !value.is_null()) else {
            return Ok(None);
        };
        let settings = Settings { config, settings };
        let is_bitsandbytes = ["load_in_4bit", "load_in_8bit"].iter().any(|key| settings.is_set(key));
        match settings.text("quant_method") {
            Some("bitsandbytes") => Ok(Self::Bitsandbytes),
            None if is_bitsandbytes => Ok(Self::Bitsandbytes),
            Some("gptq") => settings.gptq(),
            Some("awq") => settings.awq(),
            Some("mxfp4") => Ok(Self::Mxfp4),
            Some("compressed-tensors") => settings.compressed_tensors(),
            Some(other) => Err(settings.unread(&format!("were quantized by {other}"))),
            None => Err(settings.unread("were quantized by an unknown method")),
        }
        .map(Some)
    }
}

struct Settings<'a> {
    config: &'a ConfigFile,
    settings: &'a Value,
}

impl<'a> Settings<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.settings.get(key).filter(|value| !value.is_null())
    }

    fn is_set(&self, key: &str) -> bool {
        self.get(key) == Some(&Value::Bool(true))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    /// Returns the error for weights that are not read.
    fn unread(&self, what: &str) -> Error {
        self.config.error(&format!(
            "its weights {what} (`quantization_config`); bitsandbytes, gptq, awq, mxfp4 and compressed-tensors \
             are read: give such a folder, or that of the unquantized model"
        ))
    }

    /// Refuses a setting that is present with a value outside of `known`.
    fn only(&self, key: &str, known: &[&str]) -> Result<(), Error> {
        match self.get(key) {
            None => Ok(()),
            Some(Value::String(value)) if known.contains(&value.as_str()) => Ok(()),
            Some(other) => {
                let known = known.join(", ");
                Err(self.config.error(&format!(
                    "has `{key}` {other} in `quantization_config`, and {known} are read; quantize the model \
                     so, or give the unquantized model"
                )))
            }
        }
    }

    fn other_bits(&self, bits: u64, known: &str) -> Error {
        self.config.error(&format!(
            "has weights of {bits} bits in `quantization_config`, and {known} are read; quantize the model \
             so, or give the unquantized model"
        ))
    }

    fn bits(&self, keys: [&str; 2]) -> Result<usize, Error> {
        let bits = keys.into_iter().find_map(|key| self.get(key)).and_then(Value::as_u64);
        match bits {
            Some(bits @ (2 | 4 | 8)) => Ok(bits as usize),
            Some(bits) => Err(self.other_bits(bits, "2, 4 and 8")),
            None => Err(self.config.error("has no `bits` in `quantization_config`; get the folder again")),
        }
    }

    fn group(&self, keys: [&str; 2]) -> Result<Option<usize>, Error> {
        let size = keys.into_iter().find_map(|key| self.get(key));
        match size.map(|size| (size.as_i64(), size.as_u64())) {
            Some((Some(-1), _)) => Ok(None),
            Some((_, Some(size))) if (1..=LARGEST_GROUP).contains(&size) => Ok(Some(size as usize)),
            _ => Err(self.config.error(
                "has no possible `group_size` in `quantization_config`, which is a number of columns or -1; \
                 get the folder again",
            )),
        }
    }

    fn gptq(&self) -> Result<Method, Error> {
        if self.is_set("is_marlin_format") {
            return Err(self.unread("are packed for Marlin"));
        }
        self.only("checkpoint_format", &["gptq", "gptq_v2"])?;
        self.only("pack_dtype", &["int32"])?;
        let zeros = match self.text("checkpoint_format") {
            Some("gptq_v2") => Zeros::Plain,
            _ => Zeros::LessOne,
        };
        Ok(Method::Gptq { bits: self.bits(["bits"; 2])?, group: self.group(["group_size"; 2])?, zeros })
    }

    fn awq(&self) -> Result<Method, Error> {
        self.only("version", &["gemm", "GEMM"])?;
        self.only("format", &["gemm", "GEMM"])?;
        match self.bits(["bits", "w_bit"])? {
            4 => Ok(Method::Awq { group: self.group(["group_size", "q_group_size"])? }),
            bits => Err(self.other_bits(bits as u64, "4")),
        }
    }

    fn compressed_tensors(&self) -> Result<Method, Error> {
        if self.get("transform_config").and_then(Value::as_object).is_some_and(|config| !config.is_empty()) {
            let why = "has a `transform_config` in `quantization_config`, which is not read; give the \
                       unquantized model";
            return Err(self.config.error(why));
        }
        if let Some(sparsity) = self.get("sparsity_config") {
            Settings { settings: sparsity, ..*self }.only("format", &["dense"])?;
        }
        let known = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"];
        self.only("format", &[&known[..], &["mixed-precision"]].concat())?;
        let mut bits = Vec::new();
        for group in
            self.get("config_groups").and_then(Value::as_object).into_iter().flat_map(|map| map.values())
        {
            Settings { settings: group, ..*self }.only("format", &known)?;
            if let Some(weights) = group.get("weights").filter(|weights| !weights.is_null()) {
                bits.push(Settings { settings: weights, ..*self }.bits(["num_bits"; 2])?);
            }
        }
        Ok(Method::CompressedTensors { bits })
    }
}
