//! Mixtures: the choice of a format for each tensor of a model, such as `q4_k_m`.
//!
//! Source: `llama_tensor_get_type` of llama.cpp (`src/llama-quant.cpp`), without an importance matrix. Names
//! of tensors are those of GGUF files. `nf4` does not exist in llama.cpp.

use crate::{
    Error, Format,
    gguf::{Metadata, names},
};

#[cfg(test)]
mod tests;

/// A choice of formats for the tensors of a model. Most matrices have the format at the beginning of the
/// name; the head, and the value and down projections of some blocks, have more bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mixture {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q3KS,
    Q3KM,
    Q3KL,
    Q4KS,
    #[default]
    Q4KM,
    Q5KS,
    Q5KM,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    /// The format of bitsandbytes, which GGUF files do not have
    Nf4,
}

/// The facts about a model that a mixture depends on, in addition to the tensor itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Number of blocks.
    pub blocks: usize,
    /// Numbers of the blocks that have attention, in ascending order.
    pub attention: Vec<usize>,
    /// Experts per block; 0 if there are none.
    pub experts: usize,
    /// Query heads per key-value head in the first block; 0 if it has no attention.
    pub queries_per_head: usize,
    /// Whether the head shares the matrix of the embeddings.
    pub tied: bool,
    /// Whether this is one of the large models, with 80 blocks, whose values get more bits (`LLM_TYPE_70B`).
    pub large: bool,
}

impl Outline {
    /// Creates the outline of a model in a GGUF file, from its metadata and the names of its tensors.
    ///
    /// # Errors
    /// Keys of wrong types, and a file without `general.architecture` or `block_count`.
    pub fn of<'a>(
        metadata: &Metadata,
        tensors: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<Self, Error> {
        const KEY: &str = "general.architecture";
        let missing = |key: &str| Error::Metadata { key: key.to_owned(), why: "is missing".to_owned() };
        let architecture = metadata.text(KEY)?.ok_or_else(|| missing(KEY))?;
        // Some models have a list with a number per block.
        let number = |key: &str| {
            let key = format!("{architecture}.{key}");
            let is_list = metadata.get(&key).is_some_and(|value| value.as_array().is_some());
            Ok::<_, Error>(match is_list {
                true => metadata.integers(&key)?.and_then(|list| list.first().copied()),
                false => metadata.unsigned(&key)?,
            })
        };
        let blocks = number("block_count")?.ok_or_else(|| missing("block_count"))? as usize;
        let heads = number("attention.head_count")?.unwrap_or(0);
        let kv_heads = number("attention.head_count_kv")?.unwrap_or(heads);
        let is_value = |name: &&str| matches!(Role::of(name), Role::Values);
        let mut attention: Vec<usize> = tensors.clone().filter(is_value).filter_map(names::block).collect();
        attention.sort_unstable();
        attention.dedup();
        let shares = heads != kv_heads;
        Ok(Self {
            blocks,
            attention,
            experts: number("expert_count")?.unwrap_or(0) as usize,
            queries_per_head: heads.checked_div(kv_heads).unwrap_or(0) as usize,
            tied: tensors.clone().all(|name| name != "output.weight"),
            large: blocks == 80 && (architecture == "qwen2" || architecture == "llama" && shares),
        })
    }
}

/// The role of a matrix, as far as mixtures distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Embeddings,
    Head,
    /// Value projection, also if it is one matrix with queries and keys.
    Values,
    Keys,
    AttentionOutput,
    Down,
    Other,
}

impl Role {
    fn of(name: &str) -> Self {
        match name {
            "output.weight" => return Self::Head,
            "token_embd.weight" => return Self::Embeddings,
            _ => {}
        }
        let part = name.split('.').nth(2).unwrap_or_default();
        match part {
            _ if !name.ends_with(".weight") => Self::Other,
            "attn_v" | "attn_qkv" => Self::Values,
            "attn_k" => Self::Keys,
            "attn_output" => Self::AttentionOutput,
            part if part.starts_with("ffn_down") => Self::Down,
            _ => Self::Other,
        }
    }
}

impl Mixture {
    pub const ALL: [Self; 20] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3KS,
        Self::Q3KM,
        Self::Q3KL,
        Self::Q4KS,
        Self::Q4KM,
        Self::Q5KS,
        Self::Q5KM,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Nf4,
    ];

    /// Returns the name, the format of most matrices, and the number in `enum llama_ftype`, if there is one.
    const fn entry(self) -> (&'static str, Format, Option<u32>) {
        match self {
            Self::F32 => ("f32", Format::F32, Some(0)),
            Self::F16 => ("f16", Format::F16, Some(1)),
            Self::Bf16 => ("bf16", Format::Bf16, Some(32)),
            Self::Q8_0 => ("q8_0", Format::Q8_0, Some(7)),
            Self::Q4_0 => ("q4_0", Format::Q4_0, Some(2)),
            Self::Q4_1 => ("q4_1", Format::Q4_1, Some(3)),
            Self::Q5_0 => ("q5_0", Format::Q5_0, Some(8)),
            Self::Q5_1 => ("q5_1", Format::Q5_1, Some(9)),
            Self::Q2K => ("q2_k", Format::Q2K, Some(10)),
            Self::Q3KS => ("q3_k_s", Format::Q3K, Some(11)),
            Self::Q3KM => ("q3_k_m", Format::Q3K, Some(12)),
            Self::Q3KL => ("q3_k_l", Format::Q3K, Some(13)),
            Self::Q4KS => ("q4_k_s", Format::Q4K, Some(14)),
            Self::Q4KM => ("q4_k_m", Format::Q4K, Some(15)),
            Self::Q5KS => ("q5_k_s", Format::Q5K, Some(16)),
            Self::Q5KM => ("q5_k_m", Format::Q5K, Some(17)),
            Self::Q6K => ("q6_k", Format::Q6K, Some(18)),
            Self::Iq4Nl => ("iq4_nl", Format::Iq4Nl, Some(25)),
            Self::Iq4Xs => ("iq4_xs", Format::Iq4Xs, Some(30)),
            Self::Nf4 => ("nf4", Format::Nf4, None),
        }
    }

    /// Returns the name in lower case, such as `q4_k_m`.
    pub fn name(self) -> &'static str {
        self.entry().0
    }

    /// Returns the format of most matrices.
    pub fn format(self) -> Format {
        self.entry().1
    }

    /// Returns the number in `general.file_type` (`enum llama_ftype`); `None` for a mixture that GGUF files
    /// cannot have.
    pub fn file_type(self) -> Option<u32> {
        self.entry().2
    }

    /// Returns the mixture with this name, in upper or lower case.
    ///
    /// # Errors
    /// [`Error::UnknownMixture`] if there is none.
    pub fn parse(name: &str) -> Result<Self, Error> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|mixture| mixture.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| Error::UnknownMixture { name: name.to_owned() })
    }

    /// Returns the format of the tensor `name` of this shape, rows first. Norms, biases, routers,
    /// convolutions and all vectors are float32.
    ///
    /// The columns are a whole number of the format's blocks.
    pub fn format_of(self, name: &str, shape: &[usize], model: &Outline) -> Format {
        let columns = shape.last().copied().unwrap_or(1);
        match is_packed(name, shape) {
            false => Format::F32,
            true if self.format().block() == 1 => self.format(),
            true => fitting(self.preferred(name, columns, model), columns),
        }
    }

    /// Returns the preferred format, which applies if the columns are a whole number of its blocks.
    fn preferred(self, name: &str, columns: usize, model: &Outline) -> Format {
        let block = names::block(name).unwrap_or(0);
        let blocks = model.blocks;
        let common = self.format();
        let has_eight = model.experts == 8;
        match Role::of(name) {
            // bitsandbytes packs neither of them.
            Role::Embeddings | Role::Head if self == Self::Nf4 => Format::Q8_0,
            Role::Embeddings if !model.tied => common,
            Role::Embeddings | Role::Head => match self {
                Self::Q8_0 => common,
                _ if !columns.is_multiple_of(common.block()) => Format::Q8_0,
                _ => Format::Q6K,
            },
            Role::Values if has_eight => Format::Q8_0,
            Role::Values => {
                let place = model.attention.iter().take_while(|attends| **attends < block).count();
                match self.of_values(place, model) {
                    Format::Q3K | Format::Q4K if model.large => Format::Q5K,
                    format => format,
                }
            }
            Role::Keys if has_eight => Format::Q8_0,
            Role::AttentionOutput => match self {
                Self::Q2K | Self::Q3KS | Self::Q3KM | Self::Q4KS | Self::Q4KM | Self::Iq4Nl | Self::Iq4Xs
                    if has_eight =>
                {
                    Format::Q5K
                }
                Self::Q2K if !has_eight => Format::Q3K,
                Self::Q3KM => Format::Q4K,
                Self::Q3KL if !has_eight => Format::Q5K,
                _ => common,
            },
            Role::Down => match self {
                Self::Q2K => Format::Q3K,
                Self::Q3KM if block < blocks / 16 => Format::Q5K,
                Self::Q3KM => Format::Q4K,
                Self::Q3KL => Format::Q5K,
                Self::Q4KM | Self::Q5KM if needs_more(block, blocks) => Format::Q6K,
                Self::Q4KS | Self::Iq4Nl | Self::Iq4Xs if block < blocks / 8 => Format::Q5K,
                _ => common,
            },
            Role::Keys | Role::Other => common,
        }
    }

    /// Returns the format of a value projection. `place` is the number of earlier blocks with attention.
    fn of_values(self, place: usize, model: &Outline) -> Format {
        let is_shared = model.queries_per_head >= 4;
        match self {
            Self::Q2K => {
                if is_shared {
                    Format::Q4K
                } else {
                    Format::Q3K
                }
            }
            Self::Q3KM if place < 2 => Format::Q5K,
            Self::Q3KM => Format::Q4K,
            Self::Q3KL => Format::Q5K,
            Self::Iq4Nl | Self::Iq4Xs if is_shared => Format::Q5K,
            Self::Q4KM | Self::Q5KM if needs_more(place, model.attention.len()) => Format::Q6K,
            Self::Q4KS if place < 4 => Format::Q5K,
            _ => self.format(),
        }
    }
}

impl std::fmt::Display for Mixture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether a tensor may have another format than float32.
fn is_packed(name: &str, shape: &[usize]) -> bool {
    // ggml treats a single row as a vector.
    let rows = shape.iter().rev().skip(1).any(|size| *size > 1);
    let kept = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ssm_conv1d",
        "shortconv.conv.weight",
        "per_layer_model_proj",
        "position_embd",
    ];
    rows && name.ends_with(".weight") && !kept.iter().any(|part| name.contains(part))
}

/// Whether a block gets more bits: the first and the last eighth, and every third between them.
fn needs_more(place: usize, of: usize) -> bool {
    let eighth = of / 8;
    place < eighth || place >= 7 * of / 8 || (place - eighth) % 3 == 2
}

/// Returns a format with a similar number of bits whose blocks divide the columns.
fn fitting(format: Format, columns: usize) -> Format {
    let fits = |format: Format| columns.is_multiple_of(format.block());
    let smaller = match format {
        _ if fits(format) => format,
        Format::Iq4Xs => Format::Iq4Nl,
        Format::Q2K | Format::Q3K => Format::Q4_0,
        Format::Q4K => Format::Q5_0,
        Format::Q5K => Format::Q5_1,
        Format::Q6K => Format::Q8_0,
        other => other,
    };
    if fits(smaller) { smaller } else { Format::F16 }
}
