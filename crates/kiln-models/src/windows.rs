//! Attention windows: which blocks see every token, and which only the latest.

use kiln_core::Result;

use crate::ConfigFile;

/// Upper limit for a window; equals the longest sequence that a config may name.
const LARGEST: usize = 1 << 30;

/// Returns the number of latest tokens that each of `layers` blocks sees, `None` for all.
///
/// `window` is the field `sliding_window`. It applies to the blocks that `layer_types` marks, or, without
/// such a list, to those that `sliding` selects.
///
/// # Errors
/// A list with another length or with other types; a window that is 0 or missing.
pub(crate) fn windows(
    config: &ConfigFile,
    layers: usize,
    window: Option<usize>,
    layer_types: Option<&[String]>,
    sliding: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    if let Some(window) = window {
        config.check("sliding_window", window, LARGEST)?;
    }
    let sliding: Vec<bool> = match layer_types {
        None => (0..layers).map(sliding).collect(),
        Some(types) if types.len() != layers => {
            let why = format!("`layer_types` has {} entries, `num_hidden_layers` is {layers}", types.len());
            return Err(config.error(&why));
        }
        Some(types) => types.iter().map(|name| is_sliding(config, name)).collect::<Result<_>>()?,
    };
    if window.is_none() && sliding.contains(&true) {
        return Err(config.error("has blocks of sliding attention, and `sliding_window` is missing"));
    }
    Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

fn is_sliding(config: &ConfigFile, layer_type: &str) -> Result<bool> {
    match layer_type {
        "sliding_attention" => Ok(true),
        // Old configs use the second name.
        "full_attention" | "attention" => Ok(false),
        _ => Err(config
            .error(&format!("`layer_types` has `{layer_type}`; known: full_attention, sliding_attention"))),
    }
}
