//! Checks of state that comes from a file.

use burn::tensor::TensorData;
use kiln_core::{Error, Result, layer::LayerState, need::AttentionNeed};

/// More tokens than any sequence has; a file may not ask for more.
pub(crate) const MOST_TOKENS: usize = 1 << 40;

/// The counts and the slots of a state that has `C` and `S` of them.
pub(crate) fn parts<const C: usize, const S: usize>(
    state: LayerState,
) -> Result<([usize; C], [Vec<TensorData>; S])> {
    let counts: [usize; C] =
        state.counts.try_into().map_err(|_| wrong("it is the state of another kind of cache"))?;
    if counts.iter().any(|&count| count > MOST_TOKENS) {
        return Err(wrong("a count is out of range"));
    }
    let slots = state.slots.try_into().map_err(|_| wrong("it is the state of another kind of cache"))?;
    Ok((counts, slots))
}

/// Tokens that a pair of keys and values holds; 0 for nothing.
pub(crate) fn tokens(pair: &[TensorData], need: &AttentionNeed) -> Result<usize> {
    match pair {
        [] => Ok(0),
        [keys, values] => match (&keys.shape()[..], &values.shape()[..]) {
            (&[rows, heads, tokens, dim], same)
                if same == [rows, heads, tokens, dim]
                    && rows > 0
                    && tokens > 0
                    && (heads, dim) == (need.kv_heads, need.head_dim)
                    && keys.dtype() == values.dtype()
                    && keys.dtype().is_float() =>
            {
                Ok(tokens)
            }
            _ => Err(wrong("keys and values do not have the model's shape")),
        },
        _ => Err(wrong("tensors are missing or left over")),
    }
}

pub(crate) fn wrong(why: &str) -> Error {
    Error::Import { why: why.to_owned() }
}

/// Says no unless `possible`.
pub(crate) fn check(possible: bool) -> Result<()> {
    if possible { Ok(()) } else { Err(wrong("its counts contradict its tensors")) }
}
