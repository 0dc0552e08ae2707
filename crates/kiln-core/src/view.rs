//! What attention reads.

use burn::tensor::Tensor;

/// Keys and values as a layer hands them out, `[batch, kv_heads, tokens, head_dim]`.
///
/// Closed on purpose: attention has one fast path per variant.
#[derive(Clone, Debug)]
pub enum KvView {
    Dense { keys: Tensor<4>, values: Tensor<4> },
}

impl KvView {
    pub fn into_dense(self) -> (Tensor<4>, Tensor<4>) {
        match self {
            Self::Dense { keys, values } => (keys, values),
        }
    }
}
