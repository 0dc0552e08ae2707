//! Writes the keys or values of new tokens into a buffer of fixed capacity, at a position that the device knows.
//!
//! `buffer[.., position + i, ..] = new[.., i, ..]` for `[batch, kv_heads, capacity, head_dim]` and
//! `[batch, kv_heads, n, head_dim]`, where `position + i` is a slot of the buffer; what falls outside is dropped.

use burn::tensor::{Int, Tensor};

/// Never in place, and moves the whole buffer: what it is for is to say what the others do.
pub(crate) fn definition(buffer: Tensor<4>, new: Tensor<4>, position: Tensor<1, Int>) -> Tensor<4> {
    let [batch, heads, capacity, dim] = buffer.dims();
    let [_, _, n, _] = new.dims();
    if n == 0 {
        return buffer;
    }
    let slots = Tensor::<1, Int>::arange(0..capacity as i64, (&buffer.device(), position.dtype()));
    // Which new token a slot would get, if there are that many.
    let token = slots - position;
    let last = n as i64 - 1;
    let written = token.clone().greater_equal_elem(0).bool_and(token.clone().lower_equal_elem(last));
    let written = written.reshape([1, 1, capacity, 1]).expand([batch, heads, capacity, dim]);
    buffer.mask_where(written, new.select(2, token.clamp(0, last)))
}
