//! Where a model's weights come from: a checkpoint, or a generator.

use std::ops::Range;

use burn::tensor::{Int, Tensor};
use kiln_core::{Error, Result};
use kiln_kernels::Kernels;

/// Hands out weights by their name in the checkpoint. Shapes are those of PyTorch: matrices are `[out, in]`.
pub trait Weights {
    fn vector(&mut self, name: &str, len: usize) -> Result<Tensor<1>>;

    /// Rows `range` of the matrix `name`, whose whole shape is `shape`.
    fn matrix_rows(&mut self, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<Tensor<2>>;

    /// Bytes of the largest tensor that a kernel can be given.
    fn largest_binding(&self) -> usize;

    /// Bytes of one element as it will be stored.
    fn element_bytes(&self) -> usize;

    /// A matrix in one piece.
    ///
    /// # Errors
    /// [`Error::Setting`] if the device cannot bind it.
    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>> {
        let (bytes, most) = (shape[0] * shape[1] * self.element_bytes(), self.largest_binding());
        if bytes > most {
            let why = format!(
                "`{name}` has {bytes} bytes and this device binds at most {most}; try --dtype f16 or the CPU"
            );
            return Err(Error::Setting { name: "--device", why });
        }
        self.matrix_rows(name, shape, 0..shape[0])
    }

    /// A matrix cut into blocks of rows, each small enough to be bound.
    fn rows(&mut self, name: &str, shape: [usize; 2]) -> Result<Rows> {
        let row = (shape[1] * self.element_bytes()).max(1);
        let block = (self.largest_binding() / row).clamp(1, shape[0].max(1));
        let blocks: Result<_> = (0..shape[0])
            .step_by(block)
            .map(|start| self.matrix_rows(name, shape, start..(start + block).min(shape[0])))
            .collect();
        Ok(Rows { blocks: blocks? })
    }
}

/// A matrix `[rows, width]` in blocks of rows: embeddings and heads of real vocabularies are larger than the largest
/// buffer many GPUs can bind (128 MiB is common).
#[derive(Clone, Debug)]
pub struct Rows {
    blocks: Vec<Tensor<2>>,
}

impl Rows {
    /// The rows that `ids` `[batch, tokens]` name, as `[batch, tokens, width]`.
    pub(crate) fn select(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [batch, tokens] = ids.dims();
        let ids = ids.reshape([batch * tokens]);
        // Ids were checked to be in the vocabulary.
        if let [whole] = &self.blocks[..] {
            return whole.clone().select(0, ids).reshape([batch, tokens, whole.dims()[1]]);
        }
        let mut start = 0;
        let mut found: Option<Tensor<2>> = None;
        for block in &self.blocks {
            let [len, width] = block.dims();
            let local = ids.clone() - start as i64;
            let rows = block.clone().select(0, local.clone().clamp(0, len as i64 - 1));
            found = Some(match found {
                None => rows,
                Some(before) => {
                    let here = local.greater_equal_elem(0).reshape([batch * tokens, 1]);
                    before.mask_where(here.expand([batch * tokens, width]), rows)
                }
            });
            start += len;
        }
        let width = self.blocks.first().map_or(0, |block| block.dims()[1]);
        match found {
            Some(rows) => rows.reshape([batch, tokens, width]),
            None => Tensor::zeros([batch, tokens, 0], &ids.device()),
        }
    }

    /// `x` `[batch, tokens, width]` times every row: `[batch, tokens, rows]`.
    pub(crate) fn project(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let mut parts: Vec<Tensor<3>> =
            self.blocks.iter().map(|block| kernels.linear(x.clone(), block.clone(), None)).collect();
        match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, 2),
        }
    }

    /// How many blocks the matrix was cut into.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}
