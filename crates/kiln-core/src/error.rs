//! All errors between a folder and a token. Each is one sentence: what was wrong, and what to do.

use std::path::PathBuf;

use crate::device_state::REFUSAL;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layer no longer holds the state that it would have to return to. Nothing was changed.
    #[error("the {layer} layer cannot return to {len} tokens; call keep_history before more are fed")]
    CannotTruncate { layer: &'static str, len: usize },

    /// A pass failed in the middle, and the cache could not be restored to its earlier state.
    #[error("the cache failed in the middle of a forward pass; reset it")]
    Poisoned,

    /// An error in one row of a batch; rows are counted from 0.
    #[error("row {row}: {why}")]
    Row { row: usize, why: Box<Self> },

    /// The model asked a block for memory of another kind.
    #[error("layer {layer} has no {wanted} memory; build the cache from this model's needs")]
    WrongMemory { layer: usize, wanted: &'static str },

    /// The encoder's keys and values were written already; they are written once per prompt.
    #[error("the encoder's output is already stored; reset the cache before another input")]
    AlreadyConditioned,

    /// The saved state does not belong to the layer that it was given to.
    #[error("the saved state does not fit the layer: {why}")]
    Import { why: String },

    /// The number of rows differs from that of the batch in the cache. Nothing was stored.
    #[error(
        "the cache holds {rows} rows and {given} are given; reset it, or reorder it to as many rows first"
    )]
    WrongRows { rows: usize, given: usize },

    /// A cache of fixed size is full. Nothing was stored.
    #[error(
        "the cache has room for {capacity} tokens and {needed} are needed; give it more (`len=`), or use `dynamic`"
    )]
    Full { capacity: usize, needed: usize },

    /// More tokens were fed at once than the cache can take. Nothing was stored.
    #[error(
        "{given} tokens are fed at once and this cache takes at most {most}; feed them in smaller chunks"
    )]
    TooManyAtOnce { given: usize, most: usize },

    /// The batch has no such row.
    #[error("row {row} is asked for, but the cache has rows 0 to {}", .rows.saturating_sub(1))]
    NoSuchRow { row: usize, rows: usize },

    /// No registered implementation has this name.
    #[error("unknown {what} `{name}`; known: {}", .known.join(", "))]
    Unknown { what: &'static str, name: String, known: Vec<String> },

    /// The device does not exist, or cannot be used.
    #[error("device `{device}` cannot be used: {why}")]
    Device { device: String, why: String },

    /// The file is missing, damaged, of the wrong kind, or contradicts another file.
    #[error("{}: {why}", .path.display())]
    File { path: PathBuf, why: String },

    /// The setting is impossible, alone or in combination with others.
    #[error("{name}: {why}")]
    Setting { name: &'static str, why: String },

    /// The tokens in the cache are not a prefix of the requested tokens. Nothing was changed.
    #[error(
        "the sequence holds {held} tokens, of which the new ones repeat the first {common}; rewind it, or reset it"
    )]
    NotAContinuation { common: usize, held: usize },

    /// The chat template is invalid, rejected the conversation, or exceeded a limit.
    #[error("the chat template cannot be used: {why}")]
    ChatTemplate { why: String },

    /// The prompt cannot be run.
    #[error("{why}")]
    Prompt { why: String },

    /// The prompt has more tokens than the model has positions.
    #[error("the prompt has {why}")]
    TooLong { why: String },

    /// The samples are not valid sound.
    #[error("the sound {why}")]
    Audio { why: String },

    /// More memory is needed than is left, found before an allocation or reported by the device. Nothing was
    /// changed. `needed` is 0 if unknown, because the device refused the allocation. `advice` is the smallest
    /// change that helps, as far as it is known.
    #[error("out of memory: {}; {advice}", shortage(what, *.needed, *.available))]
    OutOfMemory { what: String, needed: u64, available: u64, advice: String },

    /// The cache needs a buffer larger than any that the device supports. Nothing was changed.
    #[error(
        "a layer's keys need {} in one buffer, and those of this device have {} at most; use a smaller context, or a \
         cache that is packed (`quantized`) or bounded (`sink`)",
        bytes(*.needed), bytes(*.largest)
    )]
    BufferTooLarge { needed: u64, largest: u64 },

    /// The device failed while computing.
    #[error("the device failed: {0}")]
    Execution(String),

    /// The device is gone, with everything that it held. Opening it again may help; on CUDA only a new
    /// process can.
    #[error(
        "the device was lost ({0}); load the model again, with a smaller limit (`memory`) if it ran out of memory"
    )]
    DeviceLost(String),
}

impl Error {
    /// Returns the error without the row that it belongs to.
    pub fn cause(&self) -> &Self {
        match self {
            Self::Row { why, .. } => why.cause(),
            error => error,
        }
    }

    /// Classifies an error message of a device.
    /// [`DeviceState::error`](crate::device_state::DeviceState::error) also counts refusals.
    pub fn of_device(error: impl std::fmt::Display) -> Self {
        // The last is cubecl's message about memory whose allocation panicked.
        const REFUSED: [&str; 3] = [REFUSAL, "out-of-memory", "Memory location was never initialized"];
        const LOST: &str = "The device is poisoned";

        let text = error.to_string();
        if let Some((_, reasons)) = text.rsplit_once(LOST) {
            let mut reasons = reasons.lines().map(str::trim).filter(|line| !line.is_empty());
            return Self::DeviceLost(reasons.find(|line| *line != "Caused by:").unwrap_or(LOST).to_owned());
        }
        match REFUSED.iter().any(|refused| text.contains(refused)) {
            true => Self::refused("a tensor"),
            false => Self::Execution(text),
        }
    }

    /// Creates the error for a device that had no room for `what`.
    pub fn refused(what: &str) -> Self {
        let advice =
            "keep the cache in host memory (`offload`), or use a smaller cache or context".to_owned();
        Self::OutOfMemory { what: what.to_owned(), needed: 0, available: 0, advice }
    }

    /// Replaces the advice of an out-of-memory error, for callers that know what would help. Other errors are
    /// unchanged.
    pub fn advised(mut self, with: impl Into<String>) -> Self {
        if let Self::OutOfMemory { advice, .. } = &mut self {
            *advice = with.into();
        }
        self
    }
}

/// Returns the text on one line without control characters: parts of a message may come from files, and a
/// terminal would obey them.
pub fn plain(text: &str) -> String {
    let mut plain = String::new();
    for c in text.trim_end().chars() {
        match c {
            '\n' | '\t' => plain.push(' '),
            '\r' => {}
            c if c.is_control() => plain.extend(c.escape_default()),
            c => plain.push(c),
        }
    }
    plain
}

/// Describes which memory is short, and by how much.
fn shortage(what: &str, needed: u64, available: u64) -> String {
    match (needed, available) {
        (0, _) => format!("the device has no room for {what}"),
        (_, 0) => format!("no room for {what}: {} more needed, nothing left", bytes(needed)),
        _ => format!("no room for {what}: {} more needed, {} left", bytes(needed), bytes(available)),
    }
}

/// Formats a number of bytes: `1610612736` as `1.5 GiB`.
fn bytes(n: u64) -> String {
    in_units(n, |tenths| tenths.round())
}

/// Formats a number of bytes to ask for, rounded up so that the printed amount is enough.
pub fn at_least(n: u64) -> String {
    in_units(n, f64::ceil)
}

fn in_units(n: u64, round: impl Fn(f64) -> f64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];

    let mut amount = n as f64 / 1024.0;
    let mut unit = 0;
    while amount >= 1024.0 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    match n {
        0..1024 => format!("{n} bytes"),
        _ => format!("{:.1} {}", round(10.0 * amount) / 10.0, UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_devices_become_errors_of_their_kind() {
        let lost = "An error happened during execution\nCaused by:\n  The device is poisoned\nCaused by:\n  Unknown: gone\n\
                    Backtrace:\n 1: main";
        assert_eq!(Error::of_device(lost), Error::DeviceLost("Unknown: gone".to_owned()));
        let refused =
            "Caused by:\n  couldn't find resource for that handle: Memory location was never initialized";
        assert_eq!(Error::of_device(refused), Error::refused("a tensor"));
        let text = Error::refused("a tensor").to_string();
        assert!(
            text.contains("no room for a tensor; keep the cache") && !text.contains("`memory`"),
            "{text}"
        );
        assert_eq!(Error::of_device("no such kernel"), Error::Execution("no such kernel".to_owned()));
    }
}
