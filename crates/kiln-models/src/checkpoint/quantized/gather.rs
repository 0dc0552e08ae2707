//! Gathers the tensors of each quantized matrix into one entry with the name and shape of the matrix.

use std::collections::BTreeMap;

use kiln_core::{Error, Result};
use kiln_weights::quantized::CodeType;
use safetensors::Dtype;
use serde_json::Value;

use super::{
    group::{Group, Kind, NestedBlocks},
    method::Method,
};
use crate::checkpoint::{Checkpoint, Entry, convert::Stored, settle::MOST_EXPERTS};

/// Suffixes of the settings tensor of a 4-bit bitsandbytes matrix, with the format that each stands for.
const FOUR_BITS: [(&str, &str); 2] =
    [(".weight.quant_state.bitsandbytes__nf4", "NF4"), (".weight.quant_state.bitsandbytes__fp4", "FP4")];

/// Suffixes of the tensors that accompany the codes of a matrix, for all methods.
const PARTS: [&str; 12] = [
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    ".SCB",
    ".weight_format",
    ".scales",
    ".qzeros",
    ".g_idx",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
];

/// Suffixes of compressed-tensors entries that describe how activations, keys and values are rounded. Kiln
/// does not round them.
const OF_ACTIVATIONS: [&str; 6] =
    [".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale"];

/// Upper limit for the description of a matrix, in bytes.
const LONGEST_STATE: u64 = 1 << 12;

/// A matrix whose codes were found.
struct Found {
    /// Name of the matrix without `.weight`.
    module: String,
    codes: Entry,
    parts: BTreeMap<&'static str, Entry>,
}

impl Checkpoint {
    /// Gathers the tensors of all quantized matrices.
    ///
    /// # Errors
    /// [`Error::File`] naming a tensor that does not match what its method stores.
    pub(in crate::checkpoint) fn gather(&mut self, method: &Method) -> Result<()> {
        match method {
            Method::Bitsandbytes => {
                for (state, name) in FOUR_BITS {
                    self.each(state, |checkpoint, module| checkpoint.four_bits(module, state, name))?;
                }
                self.each(".SCB", Self::llm_int8)
            }
            Method::Gptq { .. } => {
                self.each(".qweight", |checkpoint, module| checkpoint.gptq(module, method))
            }
            Method::Awq { group } => self.each(".qweight", |checkpoint, module| {
                let found = checkpoint.take(module, ".qweight")?;
                let [columns, words] = checkpoint.matrix(&found, &[Dtype::I32])?;
                let rows = words.saturating_mul(8);
                checkpoint.put(found, [rows, columns], Kind::Awq { group: *group })
            }),
            Method::Mxfp4 => self.each("_blocks", Self::mxfp4),
            Method::CompressedTensors { bits } => {
                self.tensors.retain(|name, _| !OF_ACTIVATIONS.iter().any(|end| name.ends_with(end)));
                self.each(".weight_packed", |checkpoint, module| checkpoint.packed(module, bits))?;
                self.each(".weight_scale", Self::bytes_or_floats)
            }
        }
    }

    /// Calls `gather` for each module that has a tensor with the suffix `end`.
    fn each(&mut self, end: &str, mut gather: impl FnMut(&mut Self, &str) -> Result<()>) -> Result<()> {
        let modules: Vec<_> =
            self.tensors.keys().filter_map(|name| name.strip_suffix(end).map(str::to_owned)).collect();
        modules.iter().try_for_each(|module| gather(self, module))
    }

    /// Takes the codes of a matrix, whose suffix is `codes`, and all its parts.
    fn take(&mut self, module: &str, codes: &str) -> Result<Found> {
        let name = format!("{module}{codes}");
        let Some(codes) = self.tensors.remove(&name) else {
            let why =
                format!("the weights have no tensor `{name}`, which others belong to; get the folder again");
            return Err(Error::File { path: self.folder.clone(), why });
        };
        let part = |&end: &&'static str| Some((end, self.tensors.remove(&format!("{module}{end}"))?));
        Ok(Found { module: module.to_owned(), codes, parts: PARTS.iter().filter_map(part).collect() })
    }

    /// Replaces the tensors of a matrix by one entry.
    fn put(&mut self, found: Found, shape: [usize; 2], kind: Kind) -> Result<()> {
        let Found { module, codes, parts } = found;
        let name = format!("{module}.weight");
        // Later code computes this product unchecked.
        if shape[0].checked_mul(shape[1]).is_none() {
            let why = format!("`{name}` has shape {shape:?}, more numbers than can be addressed");
            return Err(Error::File { path: self.path(&codes), why });
        }
        let stored = Stored::Quantized(Box::new(Group::new(self, kind, shape[1], parts)));
        let entry = Entry { stored, shape: shape.to_vec(), ..codes };
        match self.tensors.insert(name, entry) {
            None => Ok(()),
            Some(other) => {
                let why =
                    format!("`{module}.weight` is there twice, quantized and plain; get the folder again");
                Err(Error::File { path: self.path(&other), why })
            }
        }
    }

    fn wrong(&self, found: &Found, why: &str) -> Error {
        let why = format!("`{}.weight` {why}", found.module);
        Error::File { path: self.path(&found.codes), why }
    }

    /// Returns the shape of the codes, if they are a matrix of one of the types in `known`.
    fn matrix(&self, found: &Found, known: &[Dtype]) -> Result<[usize; 2]> {
        match (&found.codes.stored, &found.codes.shape[..]) {
            (Stored::Plain(dtype), &[lines, words]) if known.contains(dtype) => Ok([lines, words]),
            (stored, shape) => {
                let why =
                    format!("has codes in {stored} of shape {shape:?}; a matrix of {known:?} is needed");
                Err(self.wrong(found, &why))
            }
        }
    }

    fn four_bits(&mut self, module: &str, state: &str, name: &'static str) -> Result<()> {
        let found = self.take(module, ".weight")?;
        let Some(entry) = self.tensors.remove(&format!("{module}{state}")) else { return Ok(()) };
        if entry.len() > LONGEST_STATE {
            return Err(
                self.wrong(&found, &format!("has a `*{state}` longer than any; get the folder again"))
            );
        }
        let mut text = vec![0; entry.len() as usize];
        self.read(&entry, entry.range.start, &mut text)?;
        let damaged = |why: &str| format!("has a `*{state}` that {why}; get the folder again");
        let state: Value = serde_json::from_slice(&text)
            .map_err(|e| self.wrong(&found, &damaged(&format!("is no JSON ({e})"))))?;
        let size = |value: Option<&Value>| {
            value.and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0)
        };
        let shape = state.get("shape").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let (Some(block), [rows, columns]) = (size(state.get("blocksize")), shape) else {
            return Err(self.wrong(&found, &damaged("lacks a `blocksize`, or a `shape` of two numbers")));
        };
        let (Some(rows), Some(columns)) = (size(Some(rows)), size(Some(columns))) else {
            return Err(self.wrong(&found, &damaged("has an impossible `shape`")));
        };
        let numbers = rows.checked_mul(columns);
        if numbers.map(|numbers| numbers.div_ceil(2) as u64) != Some(found.codes.len()) {
            let why = format!("says [{rows}, {columns}], and there are {} bytes", found.codes.len());
            return Err(self.wrong(&found, &damaged(&why)));
        }
        let nested = match found.parts.contains_key(".weight.nested_absmax") {
            false => None,
            true => match (
                size(state.get("nested_blocksize")),
                state.get("nested_offset").and_then(Value::as_f64),
            ) {
                (Some(block), Some(offset)) => Some(NestedBlocks { block, offset: offset as f32 }),
                _ => {
                    let why = "lacks `nested_blocksize` or `nested_offset`";
                    return Err(self.wrong(&found, &damaged(why)));
                }
            },
        };
        self.put(found, [rows, columns], Kind::FourBits { name, block, nested })
    }

    fn llm_int8(&mut self, module: &str) -> Result<()> {
        let found = self.take(module, ".weight")?;
        let shape = self.matrix(&found, &[Dtype::I8])?;
        if let Some(format) = found.parts.get(".weight_format") {
            let mut order = [0];
            if format.len() == 1 {
                self.read(format, format.range.start, &mut order)?;
            }
            // Other values are layouts for certain GPUs, which old versions stored.
            if format.len() != 1 || order != [0] {
                let why =
                    "is in the order of a GPU (`*.weight_format`); save it again with a new bitsandbytes";
                return Err(self.wrong(&found, why));
            }
        }
        self.put(found, shape, Kind::LlmInt8)
    }

    fn gptq(&mut self, module: &str, method: &Method) -> Result<()> {
        let &Method::Gptq { bits, group, zeros } = method else { return Ok(()) };
        let found = self.take(module, ".qweight")?;
        let [lines, rows] = self.matrix(&found, &[Dtype::I32])?;
        let all = lines.saturating_mul(32);
        // The order lists a number for each column. If matrices differ in bits, the config has the bits of
        // most.
        let columns = match found.parts.get(".g_idx").map(|order| &order.shape[..]) {
            Some(&[columns]) if columns > 0 => columns,
            _ => all / bits,
        };
        let bits = all.checked_div(columns).filter(|bits| bits.checked_mul(columns) == Some(all));
        match bits.filter(|bits| [2, 4, 8].contains(bits)) {
            Some(bits) => self.put(found, [rows, columns], Kind::Gptq { bits, group, zeros }),
            None => {
                let why =
                    format!("has {lines} lines of codes for {columns} columns, not 2, 4 or 8 bits each");
                Err(self.wrong(&found, &why))
            }
        }
    }

    fn packed(&mut self, module: &str, bits: &[usize]) -> Result<()> {
        let found = self.take(module, ".weight_packed")?;
        let [lines, words] = self.matrix(&found, &[Dtype::I32])?;
        let Some(shape) = self.tensors.remove(&format!("{module}.weight_shape")) else {
            return Err(self.wrong(&found, "has no tensor `*.weight_shape` beside it; get the folder again"));
        };
        let mut sizes = [[0; 8]; 2];
        match (&shape.stored, &shape.shape[..]) {
            (Stored::Plain(Dtype::I64), [2]) => {
                self.read(&shape, shape.range.start, sizes.as_flattened_mut())?;
            }
            _ => {
                return Err(
                    self.wrong(&found, "has a `*.weight_shape` that is not two I64; get the folder again")
                );
            }
        }
        let [rows, columns] = sizes.map(|size| usize::try_from(i64::from_le_bytes(size)).unwrap_or(0));
        let fits = |bits: &&usize| columns.checked_mul(**bits).map(|bits| bits.div_ceil(32)) == Some(words);
        match bits.iter().find(fits).filter(|_| rows == lines && columns > 0) {
            Some(&bits) => self.put(found, [rows, columns], Kind::Compressed(CodeType::Packed { bits })),
            None => {
                let why = format!(
                    "has codes of shape [{lines}, {words}], which are no matrix [{rows}, {columns}] of \
                     {bits:?} bits; get the folder again"
                );
                Err(self.wrong(&found, &why))
            }
        }
    }

    /// Gathers the experts in one tensor of codes `[experts, rows, blocks, 16]` and one of exponents. Rows of
    /// gate and up projections alternate.
    fn mxfp4(&mut self, module: &str) -> Result<()> {
        let Some(codes) = self.tensors.remove(&format!("{module}_blocks")) else { return Ok(()) };
        let wrong = |checkpoint: &Self, why: String| Error::File {
            path: checkpoint.path(&codes),
            why: format!("`{module}_blocks` {why}; get the folder again"),
        };
        let Some(exponents) = self.tensors.remove(&format!("{module}_scales")) else {
            return Err(wrong(self, "has no `_scales` beside it".to_owned()));
        };
        let (own, part) = module.rsplit_once('.').unwrap_or(("", module));
        let parts: &[&str] = match part {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            _ => &[part],
        };
        let is_bytes = |entry: &Entry| entry.stored == Stored::Plain(Dtype::U8);
        let ([experts, rows, blocks, 16], true) = (&codes.shape[..], is_bytes(&codes)) else {
            let why = format!(
                "has {} of shape {:?}, and bytes [experts, rows, blocks, 16] are needed",
                codes.stored, codes.shape
            );
            return Err(wrong(self, why));
        };
        let (experts, rows, blocks) = (*experts, *rows, *blocks);
        if exponents.shape[..] != [experts, rows, blocks]
            || !is_bytes(&exponents)
            || !rows.is_multiple_of(parts.len())
        {
            return Err(wrong(
                self,
                format!("of shape {:?} has `_scales` of shape {:?}", codes.shape, exponents.shape),
            ));
        }
        if experts > MOST_EXPERTS {
            return Err(wrong(self, format!("has {experts} experts, and at most {MOST_EXPERTS} are read")));
        }
        let own_rows = rows / parts.len();
        for (expert, i) in (0..experts).flat_map(|expert| (0..parts.len()).map(move |i| (expert, i))) {
            let view = |entry: &Entry, width: usize| {
                let first = ((expert * rows + i) * width) as u64;
                entry.view(
                    vec![own_rows, width],
                    first,
                    &[(own_rows, (parts.len() * width) as u64), (width, 1)],
                )
            };
            let Some((codes, exponents)) = view(&codes, blocks * 16).zip(view(&exponents, blocks)) else {
                return Err(wrong(self, format!("has shape {:?}", codes.shape)));
            };
            let found = Found {
                module: format!("{own}.{expert}.{}", parts[i]),
                codes,
                parts: BTreeMap::from([("_scales", exponents)]),
            };
            self.put(found, [own_rows, blocks * 32], Kind::Mxfp4)?;
        }
        Ok(())
    }

    /// Gathers codes in bytes or in floats of 8 bits.
    fn bytes_or_floats(&mut self, module: &str) -> Result<()> {
        let found = self.take(module, ".weight")?;
        let shape = self.matrix(&found, &[Dtype::I8, Dtype::F8_E4M3])?;
        let is_float = found.codes.stored == Stored::Plain(Dtype::F8_E4M3);
        self.put(found, shape, Kind::Compressed(if is_float { CodeType::Float8 } else { CodeType::Int8 }))
    }
}
