//! Packing a model: the format of each tensor, and one GGUF file of all of them.

mod loss;
mod plan;
mod write;

use std::collections::{BTreeMap, BTreeSet};

use kiln_core::{Error, Result};
use kiln_weights::{Format, Mixture, Outline};

pub use self::{
    loss::{PackedTensor, packed_tensors},
    write::{Quantized, quantize},
};

use self::plan::{Plan, Rows, Source};
use super::Checkpoint;

/// Returns the format of each stored tensor in a file that [`quantize`] would write, by file number and
/// offset in the file. `only` restricts the result to tensors with these names in the new file.
pub(super) fn formats(
    checkpoint: &Checkpoint,
    mixture: Mixture,
    only: Option<&BTreeSet<String>>,
) -> Result<BTreeMap<(usize, u64), Format>> {
    let plan = Plan::of(checkpoint)?;
    let outline = outline(checkpoint, &plan)?;
    let mut formats = BTreeMap::new();
    let is_meant = |name: &String| only.is_none_or(|only| only.contains(name));
    for (name, shape, source) in plan.tensors.iter().filter(|(name, ..)| is_meant(name)) {
        if let Source::Stored(parts, _) = source {
            let format = mixture.format_of(name, shape, &outline);
            let mut entries = parts.iter().map(|Rows { entry, .. }| entry);
            if let Some(entry) = entries.clone().find(|entry| !entry.stored.is_read()) {
                let why = format!("`{name}` {}", entry.stored.unread());
                return Err(Error::File { path: checkpoint.path(entry), why });
            }
            formats.extend(entries.by_ref().map(|entry| ((entry.file, entry.range.start), format)));
        }
    }
    Ok(formats)
}

fn outline(checkpoint: &Checkpoint, plan: &Plan) -> Result<Outline> {
    let names = plan.tensors.iter().map(|(name, ..)| &**name);
    Outline::of(&plan.metadata, names)
        .map_err(|e| Error::File { path: checkpoint.folder.clone(), why: e.to_string() })
}
