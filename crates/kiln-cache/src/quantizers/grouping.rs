//! Grouping of elements that share a scale.

use burn::tensor::Tensor;

/// Rule that divides the elements of a tensor `[batch, kv_heads, tokens, head_dim]` into groups of `group`
/// elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Adjacent elements in memory: channels of a token (quanto's axis 0, HQQ's axis 1).
    Neighbours,
    /// Every n-th element in memory, if there are n groups (HQQ's axis 0).
    Strided,
    /// Tokens of a channel, continuing over heads and rows (quanto's axis -1).
    PerChannel,
}

impl Grouping {
    /// Splits a tensor into `[groups, group]`, a row per group; its number of elements must be a multiple of
    /// `group`.
    pub fn split(self, x: Tensor<4>, group: usize) -> Tensor<2> {
        let (groups, dim) = (x.shape().num_elements() / group, x.dims()[3]);
        match self {
            Self::Neighbours => x.reshape([groups, group]),
            Self::Strided => x.reshape([group, groups]).transpose(),
            Self::PerChannel => {
                x.reshape([groups / dim, group, dim]).permute([2, 0, 1]).reshape([groups, group])
            }
        }
    }

    /// Undoes [`split`](Self::split): returns the tensor of shape `[batch, kv_heads, tokens, head_dim]`.
    pub fn join(self, x: Tensor<2>, shape: [usize; 4]) -> Tensor<4> {
        let ([groups, group], dim) = (x.dims(), shape[3]);
        match self {
            Self::Neighbours => x.reshape(shape),
            Self::Strided => x.transpose().reshape(shape),
            Self::PerChannel => x.reshape([dim, groups / dim, group]).permute([1, 2, 0]).reshape(shape),
        }
    }
}
