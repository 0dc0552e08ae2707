//! The squared error of packed matrices: a measure of the loss that needs no text.

use kiln_core::{Error, Result};
use kiln_weights::{Format, Mixture};

use super::{
    super::Checkpoint,
    outline,
    plan::{Plan, Rows, Source},
    write::Pieces,
};

/// A tensor that a mixture packs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PackedTensor {
    /// Name in GGUF files, such as `blk.0.attn_v.weight`.
    pub name: String,
    /// Format of the packed tensor.
    pub format: Format,
    pub numbers: u64,
    /// Sum of the squared numbers.
    pub squares: f64,
    /// Sum of the squared differences between the numbers and their packed values.
    pub squared_errors: f64,
}

impl PackedTensor {
    /// Returns the role of the tensor in the model, without its block number, such as `attn_v` or
    /// `token_embd`.
    pub fn kind(&self) -> &str {
        let name = self.name.strip_suffix(".weight").unwrap_or(&self.name);
        match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((_, kind)) => kind,
            None => name,
        }
    }

    /// Size of the packed tensor in bytes.
    pub fn bytes(&self) -> u64 {
        usize::try_from(self.numbers).ok().and_then(|n| self.format.bytes_of(n)).unwrap_or(0) as u64
    }
}

/// Measures the tensors that a mixture packs in blocks, in the order of a GGUF file. Each is read and packed
/// piece by piece, and no packed data is kept.
///
/// `on_read` receives the number of weight bytes read.
///
/// # Errors
/// The errors of [`quantize`](super::quantize()) for its model.
pub fn packed_tensors(
    checkpoint: &Checkpoint,
    mixture: Mixture,
    on_read: &mut dyn FnMut(u64),
) -> Result<Vec<PackedTensor>> {
    let plan = Plan::of(checkpoint)?;
    let outline = outline(checkpoint, &plan)?;
    let mut packed = Vec::new();
    for (name, shape, source) in &plan.tensors {
        let format = mixture.format_of(name, shape, &outline);
        let Source::Stored(parts, undo) = source else { continue };
        if format.block() == 1 {
            continue;
        }
        let mut tensor =
            PackedTensor { name: name.clone(), format, numbers: 0, squares: 0.0, squared_errors: 0.0 };
        for Rows { entry, rows } in parts {
            let pieces = |format| Pieces { checkpoint, name, entry, undo: *undo, format };
            // Rows have equal places in both.
            let (wide, packed) = (pieces(Format::F32), pieces(format));
            let mut start = rows.start;
            while start < rows.end {
                let (right, read, _) = wide.pack(start..rows.end)?;
                let (bytes, _, next) = packed.pack(start..rows.end)?;
                let (right, _) = right.as_chunks();
                let mut numbers = vec![0.0; right.len()];
                format.unpack(&bytes, &mut numbers).map_err(|e| Error::File {
                    path: checkpoint.path(entry),
                    why: format!("`{name}` {e}"),
                })?;
                for (number, right) in numbers.into_iter().zip(right) {
                    let right = f64::from(f32::from_le_bytes(*right));
                    tensor.squares += right * right;
                    tensor.squared_errors += (f64::from(number) - right).powi(2);
                }
                tensor.numbers += right.len() as u64;
                start = next;
                on_read(read);
            }
        }
        packed.push(tensor);
    }
    Ok(packed)
}
