//! The tensors of one quantized matrix.

use std::{collections::BTreeMap, fmt};

use kiln_weights::{
    Format,
    quantized::{Blocks, CodeType, Gptq, Nested, Quantized, Zeros, group_in_order},
};
use safetensors::Dtype;

use crate::checkpoint::{
    Checkpoint, Entry,
    convert::{Failed, Stored},
};

/// The tensors that a checkpoint stores beside the codes of a quantized matrix: scales, zero points, tables.
/// The codes themselves are the [`Entry`] that this group belongs to. (A group of columns that share a scale
/// is another matter.)
#[derive(Clone, Debug, PartialEq)]
pub(in crate::checkpoint) struct Group {
    pub(super) kind: Kind,
    /// The packed format that holds the matrix without loss; `None` if it must be unpacked.
    pub(super) format: Option<Format>,
    /// Tensors by the end of their names, such as `.scales`, after the name of the matrix's module.
    pub(super) parts: BTreeMap<&'static str, Entry>,
}

/// The quantization method, with its settings. A `group` is a number of columns; `None`: all columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// NF4 or FP4 of bitsandbytes. `block`: number of consecutive elements, row after row, that share a
    /// scale.
    FourBits {
        name: &'static str,
        block: usize,
        nested: Option<NestedBlocks>,
    },
    /// LLM.int8 of bitsandbytes: one scale per row.
    LlmInt8,
    Gptq {
        bits: usize,
        group: Option<usize>,
        zeros: Zeros,
    },
    /// AWQ with 4 bits.
    Awq {
        group: Option<usize>,
    },
    /// compressed-tensors.
    Compressed(CodeType),
    Mxfp4,
}

/// Scales of bitsandbytes that are quantized themselves (`bnb_4bit_use_double_quant`): `block` of them share
/// a scale, and `offset` is added to each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct NestedBlocks {
    pub(super) block: usize,
    pub(super) offset: f32,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::FourBits { name, .. } => write!(f, "{name} (bitsandbytes, 4 bits)"),
            Kind::LlmInt8 => f.write_str("LLM.int8 (bitsandbytes, 8 bits)"),
            Kind::Gptq { bits, .. } => write!(f, "GPTQ ({bits} bits)"),
            Kind::Awq { .. } => f.write_str("AWQ (4 bits)"),
            Kind::Compressed(CodeType::Packed { bits }) => write!(f, "INT{bits} (compressed-tensors)"),
            Kind::Compressed(CodeType::Int8) => f.write_str("INT8 (compressed-tensors)"),
            Kind::Compressed(CodeType::Float8) => f.write_str("F8_E4M3 (compressed-tensors)"),
            Kind::Mxfp4 => f.write_str("MXFP4"),
        }
    }
}

impl Group {
    /// Creates the group of a matrix with `columns` columns. Reads its smallest tensors to find out which
    /// packed format can hold it.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        kind: Kind,
        columns: usize,
        parts: BTreeMap<&'static str, Entry>,
    ) -> Self {
        // Errors in a part are reported when the matrix is loaded.
        let format = Parts { checkpoint, parts: &parts }.format(kind, columns).ok().flatten();
        Self { kind, format, parts }
    }

    pub(in crate::checkpoint) fn format(&self) -> Option<Format> {
        self.format
    }

    pub(in crate::checkpoint) fn parts(&self) -> impl Iterator<Item = &Entry> {
        self.parts.values()
    }

    /// Reads all tensors of a matrix `[rows, columns]` except its codes.
    ///
    /// # Errors
    /// [`Failed`] if a tensor is missing, has another type or length, or cannot be read.
    pub(super) fn read(
        &self,
        checkpoint: &Checkpoint,
        rows: usize,
        columns: usize,
    ) -> Result<Quantized, Failed> {
        let parts = Parts { checkpoint, parts: &self.parts };
        let quantized = match self.kind {
            Kind::FourBits { block, nested, .. } => {
                let table = parts.floats(".weight.quant_map", 16)?;
                let blocks = rows.saturating_mul(columns).div_ceil(block.max(1));
                match nested {
                    None => {
                        let scales = Blocks::Plain(parts.floats(".weight.absmax", blocks)?);
                        Quantized::four_bits(rows, columns, &table, block, scales)
                    }
                    Some(NestedBlocks { block: nested, offset }) => {
                        let scales = Blocks::Nested(Nested {
                            codes: &parts.bytes(".weight.absmax", Dtype::U8, blocks)?,
                            table: &parts.floats(".weight.nested_quant_map", 256)?,
                            scales: &parts.floats(".weight.nested_absmax", blocks.div_ceil(nested.max(1)))?,
                            block: nested,
                            offset,
                        });
                        Quantized::four_bits(rows, columns, &table, block, scales)
                    }
                }
            }
            Kind::LlmInt8 => Quantized::llm_int8(rows, columns, parts.floats(".SCB", rows)?),
            Kind::Gptq { bits, group, zeros } => {
                let groups = parts.lines(".scales")?;
                let order = parts.order(".g_idx", columns)?;
                let matrix = Gptq {
                    rows,
                    columns,
                    bits,
                    scales: &parts.floats(".scales", groups.saturating_mul(rows))?,
                    zeros: &parts.words(".qzeros", groups.saturating_mul(rows.saturating_mul(bits) / 32))?,
                    stored_zeros: zeros,
                    group: group.unwrap_or(columns),
                    columns_in_groups: order.as_deref(),
                };
                matrix.quantized()
            }
            Kind::Awq { group } => {
                let groups = parts.lines(".scales")?;
                let scales = parts.floats(".scales", groups.saturating_mul(rows))?;
                let zeros = parts.words(".qzeros", groups.saturating_mul(rows / 8))?;
                Quantized::awq(rows, columns, &scales, &zeros, group.unwrap_or(columns))
            }
            Kind::Compressed(codes) => return parts.compressed(rows, columns, codes),
            Kind::Mxfp4 => {
                let blocks = rows.saturating_mul(columns) / 32;
                Quantized::mxfp4(rows, columns, &parts.bytes("_scales", Dtype::U8, blocks)?)
            }
        };
        Ok(quantized?)
    }
}

impl From<kiln_weights::Error> for Failed {
    fn from(error: kiln_weights::Error) -> Self {
        Self::Convert(format!("cannot be unpacked: {error}"))
    }
}

/// The tensors of a [`Group`], to be read from the checkpoint. Each is checked before it is read.
struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    parts: &'a BTreeMap<&'static str, Entry>,
}

impl Parts<'_> {
    /// Returns the packed format that [`Quantized::format`] is going to return once all tensors are read.
    fn format(&self, kind: Kind, columns: usize) -> Result<Option<Format>, Failed> {
        // Number of columns that share a scale, if those columns are contiguous.
        let in_order = |name, group| match self.order(name, columns) {
            Ok(None) => Ok(Some(group)),
            Ok(Some(listed)) => Ok(group_in_order(&listed)),
            Err(failed) => Err(failed),
        };
        let (bits, group) = match kind {
            Kind::FourBits { block, .. } => {
                return Ok(Format::of_table(&self.floats(".weight.quant_map", 16)?, block, columns));
            }
            Kind::Mxfp4 => return Ok(Some(Format::Mxfp4)),
            Kind::LlmInt8 => (8, Some(columns)),
            Kind::Gptq { bits, group, .. } => (bits, in_order(".g_idx", group.unwrap_or(columns))?),
            Kind::Awq { group } => (4, Some(group.unwrap_or(columns))),
            Kind::Compressed(codes) => {
                let bits = match codes {
                    CodeType::Packed { bits } => bits,
                    CodeType::Int8 => 8,
                    CodeType::Float8 => return Ok(None),
                };
                // Zero points of other types are not integers, which the packed formats need.
                let zeros = self.parts.get(".weight_zero_point").map(|part| &part.stored);
                if !matches!(zeros, None | Some(Stored::Plain(Dtype::I8 | Dtype::I32))) {
                    return Ok(None);
                }
                (bits, in_order(".weight_g_idx", columns / self.groups()?.max(1))?)
            }
        };
        Ok(group.and_then(|group| Format::of_integers(bits, group, columns)))
    }

    /// Number of groups of columns per row, in compressed-tensors.
    fn groups(&self) -> Result<usize, Failed> {
        Ok(self.part(".weight_scale")?.shape.get(1).copied().unwrap_or(1))
    }

    /// Returns the tensor whose name ends with `name`.
    fn part(&self, name: &str) -> Result<&Entry, Failed> {
        let missing = || Failed::Convert(format!("has no tensor `*{name}` beside it; get the folder again"));
        self.parts.get(name).ok_or_else(missing)
    }

    /// Returns the first dimension of a part; 1 for a scalar.
    fn lines(&self, name: &str) -> Result<usize, Failed> {
        Ok(self.part(name)?.shape.first().copied().unwrap_or(1))
    }

    /// Reads a part, which must have `len` elements of a type in `known`. Returns its type and its bytes.
    fn checked(&self, name: &str, len: usize, known: &[Dtype]) -> Result<(Dtype, Vec<u8>), Failed> {
        let part = self.part(name)?;
        let dtype = match part.stored {
            Stored::Plain(dtype) if known.contains(&dtype) => dtype,
            _ => {
                let why = format!("has `*{name}` in {} beside it; {known:?} are read", part.stored);
                return Err(Failed::Convert(why));
            }
        };
        if part.elements() != len as u64 {
            let why = format!(
                "has `*{name}` of shape {:?} beside it, where {len} numbers are needed; get the folder again",
                part.shape
            );
            return Err(Failed::Convert(why));
        }
        let mut bytes = vec![0; part.len() as usize];
        self.checkpoint.read(part, part.range.start, &mut bytes)?;
        Ok((dtype, bytes))
    }

    /// Reads a part of `len` elements of type `dtype`.
    fn bytes(&self, name: &str, dtype: Dtype, len: usize) -> Result<Vec<u8>, Failed> {
        Ok(self.checked(name, len, &[dtype])?.1)
    }

    /// Reads a part of `len` floats, or signed bytes, as float32.
    fn floats(&self, name: &str, len: usize) -> Result<Vec<f32>, Failed> {
        let (dtype, bytes) = self.checked(name, len, &[Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::I8])?;
        let format = match dtype {
            Dtype::F16 => Format::F16,
            Dtype::BF16 => Format::Bf16,
            Dtype::F32 => Format::F32,
            _ => return Ok(bytes.iter().map(|byte| byte.cast_signed().into()).collect()),
        };
        let mut numbers = vec![0.0; len];
        format.unpack(&bytes, &mut numbers)?;
        Ok(numbers)
    }

    /// Reads a part of `len` words of 32 bits.
    fn words(&self, name: &str, len: usize) -> Result<Vec<u32>, Failed> {
        let bytes = self.bytes(name, Dtype::I32, len)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Returns the group of each column, if the file lists them; `None`: the columns of a group are
    /// contiguous.
    fn order(&self, name: &str, columns: usize) -> Result<Option<Vec<i32>>, Failed> {
        if !self.parts.contains_key(name) {
            return Ok(None);
        }
        let groups: Vec<_> = self.words(name, columns)?.iter().map(|group| group.cast_signed()).collect();
        // compressed-tensors writes -1 if columns are in order.
        Ok(Some(groups).filter(|groups| groups.iter().any(|group| *group != -1)))
    }

    /// Reads the tensors of a matrix of compressed-tensors.
    fn compressed(&self, rows: usize, columns: usize, codes: CodeType) -> Result<Quantized, Failed> {
        // Scales are `[rows, groups]`, `[rows, 1]`, or a single one for the whole matrix.
        let groups = self.groups()?;
        let lines = if self.lines(".weight_scale")? == 1 { 1 } else { rows };
        let count = groups.saturating_mul(lines);
        let scales = self.floats(".weight_scale", count)?;
        let zeros = match (codes, self.parts.get(".weight_zero_point")) {
            (_, None) => None,
            // Old versions have packed codes, but zero points in bytes.
            (CodeType::Packed { bits }, Some(part)) if part.stored != Stored::Plain(Dtype::I8) => {
                let words = rows.saturating_mul(bits).div_ceil(32).saturating_mul(groups);
                Some(Quantized::packed_zeros(rows, groups, bits, &self.words(".weight_zero_point", words)?)?)
            }
            _ => Some(self.floats(".weight_zero_point", count)?),
        };
        let order = self.order(".weight_g_idx", columns)?;
        Ok(Quantized::compressed(rows, columns, codes, &scales, zeros.as_deref(), order.as_deref())?)
    }
}
