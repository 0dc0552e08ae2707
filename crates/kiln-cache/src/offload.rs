//! Selection of the blocks whose layers are kept in host memory (transformers' `OffloadedCache` and
//! `OffloadedStaticCache`). [`Memory`](crate::Memory) moves their tensors.

use std::{fmt, ops::Range, str::FromStr};

use kiln_core::{
    Error, Result,
    model_cache::{LayerCache, ModelCache},
    need::LayerNeed,
};

/// The blocks of the model whose cache is in host memory. As in transformers, the text form calls them
/// layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    All,
    /// All but this many last blocks.
    AllBut(usize),
    /// Blocks whose keys and values grow with the text: those with attention and no window (transformers'
    /// `offload_only_non_sliding`).
    Full,
    /// None at first; one block after another when memory runs out.
    AsNeeded,
}

impl FromStr for Offload {
    type Err = Error;

    /// Parses `all`, `full`, `auto` ([`AsNeeded`](Self::AsNeeded)), or `layers=N`
    /// ([`AllBut`](Self::AllBut)): the last N blocks stay on the device.
    ///
    /// # Errors
    /// [`Error::Unknown`] for any other text.
    fn from_str(text: &str) -> Result<Self> {
        match (text, text.strip_prefix("layers=").map(str::parse)) {
            ("all", _) => Ok(Self::All),
            ("full", _) => Ok(Self::Full),
            ("auto", _) => Ok(Self::AsNeeded),
            (_, Some(Ok(kept))) => Ok(Self::AllBut(kept)),
            _ => Err(Error::Unknown {
                what: "way to offload",
                name: text.to_owned(),
                known: ["all", "full", "auto", "layers=N"].map(str::to_owned).into(),
            }),
        }
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Full => f.write_str("full"),
            Self::AsNeeded => f.write_str("auto"),
            Self::AllBut(kept) => write!(f, "layers={kept}"),
        }
    }
}

impl Offload {
    /// Whether the layer of a block is in host memory from the start, for a model with these needs. With
    /// [`AsNeeded`](Self::AsNeeded) none is: [`offload_one`] moves them later.
    pub(crate) fn selects(self, block: usize, needs: &[LayerNeed]) -> bool {
        match self {
            Self::All => true,
            Self::AllBut(kept) => block + kept < needs.len(),
            Self::Full => needs[block].attention.as_ref().is_some_and(|need| need.window.is_none()),
            Self::AsNeeded => false,
        }
    }
}

/// Moves all layers to host memory.
///
/// # Errors
/// The device's error in reading a layer; that layer is lost then, and the cache can only be reset.
pub fn offload_all(cache: &mut ModelCache) -> Result<()> {
    cache.layers_mut().try_for_each(|(_, layer)| layer.offload())
}

/// Moves the layers of the first of these blocks that is on its device to host memory. Returns false if there
/// is no such block.
///
/// # Errors
/// The errors of [`offload_all`].
pub fn offload_one(cache: &mut ModelCache, blocks: &Range<usize>) -> Result<bool> {
    let here = |layer: &LayerCache| !layer.is_empty() && !layer.is_offloaded();
    let mut layers = cache.layers_mut().filter(|(block, _)| blocks.contains(block));
    let first = layers.find_map(|(block, layer)| here(layer).then_some(block));
    drop(layers);
    let Some(first) = first else {
        return Ok(false);
    };
    cache.layers_mut().filter(|(block, _)| *block == first).try_for_each(|(_, layer)| layer.offload())?;
    Ok(true)
}
