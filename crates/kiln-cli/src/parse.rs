//! Parsers for values of options.

use std::path::PathBuf;

use kiln::Mixture;

/// Parses a number of bytes such as `800MB`, `6GiB`, `1.5g` or a plain number.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size; write it as 800MB, 6GiB or a number of bytes");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(wrong()),
    };
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit;
    if bytes >= 1.0 && bytes < 2f64.powi(63) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// Parses a number of bytes, or `none`.
pub(crate) fn size_or_none(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { size(text) }
}

/// Parses a number of tokens, where 0 means all.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a number of tokens; give a whole number above 0, or 0 for all"))
}

/// Parses the name of a mixture of number formats.
pub(crate) fn mixture(name: &str) -> Result<Mixture, String> {
    Mixture::parse(name).map_err(|e| e.to_string())
}

/// Parses `DIR[=SCALE]`, the folder of an adapter and a factor of its changes.
pub(crate) fn adapter(text: &str) -> Result<(PathBuf, f32), String> {
    match text.rsplit_once('=').map(|(folder, scale)| (folder, scale.parse::<f32>())) {
        Some((folder, Ok(scale))) if scale.is_finite() => Ok((folder.into(), scale)),
        _ => Ok((text.into(), 1.0)),
    }
}
