//! The results of projections that are stacked: one tensor for each block of their matrix. There are several
//! blocks if the projections are packed in different formats.

use std::ops::Range;

use burn::tensor::Tensor;

/// Results `[batch, tokens, numbers]` of blocks, which follow each other.
pub(super) struct Projections {
    blocks: Vec<Tensor<3>>,
}

impl From<Vec<Tensor<3>>> for Projections {
    fn from(blocks: Vec<Tensor<3>>) -> Self {
        Self { blocks }
    }
}

impl From<Tensor<3>> for Projections {
    fn from(whole: Tensor<3>) -> Self {
        Self { blocks: vec![whole] }
    }
}

impl Projections {
    /// Returns `numbers`, counted through all blocks. Nothing is copied if they are in one block.
    pub(super) fn numbers(&self, numbers: Range<usize>) -> Tensor<3> {
        let mut parts: Vec<_> =
            self.parts(&numbers).map(|(block, own)| block.clone().narrow(2, own.start, own.len())).collect();
        if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
    }

    /// Returns `heads` vectors of `width` numbers that begin with number `first`:
    /// `[batch, tokens, heads, width]`.
    pub(super) fn heads(&self, first: usize, heads: usize, width: usize) -> Tensor<4> {
        let [batch, tokens] = self.rows();
        match self.as_vectors(first, heads, width) {
            Some((block, all, first)) => block.reshape([batch, tokens, all, width]).narrow(2, first, heads),
            None => self.numbers(first..first + heads * width).reshape([batch, tokens, heads, width]),
        }
    }

    /// Returns the same vectors as [`heads`](Self::heads), `[batch · tokens, heads, width]`.
    pub(super) fn vectors(&self, first: usize, heads: usize, width: usize) -> Tensor<3> {
        let [batch, tokens] = self.rows();
        match self.as_vectors(first, heads, width) {
            Some((block, all, first)) => block.reshape([batch * tokens, all, width]).narrow(1, first, heads),
            None => self.numbers(first..first + heads * width).reshape([batch * tokens, heads, width]),
        }
    }

    /// The block with all of these vectors, if it consists of vectors of this width; their number, and the
    /// index of the first that is meant. A block that is cut into vectors first, and narrowed then, is not
    /// copied.
    fn as_vectors(&self, first: usize, heads: usize, width: usize) -> Option<(Tensor<3>, usize, usize)> {
        let numbers = first..first + heads * width;
        let (block, own) = self.parts(&numbers).next()?;
        let len = block.dims()[2];
        let fits = own.len() == numbers.len() && len.is_multiple_of(width) && own.start.is_multiple_of(width);
        fits.then(|| (block.clone(), len / width, own.start / width))
    }

    /// The blocks that have some of `numbers`, and which numbers of each block these are.
    fn parts(&self, numbers: &Range<usize>) -> impl Iterator<Item = (&Tensor<3>, Range<usize>)> {
        let mut end = 0;
        self.blocks.iter().filter_map(move |block| {
            let start = end;
            end += block.dims()[2];
            let own = numbers.start.max(start)..numbers.end.min(end);
            (!own.is_empty()).then(|| (block, own.start - start..own.end - start))
        })
    }

    /// Number of rows and of tokens.
    fn rows(&self) -> [usize; 2] {
        self.blocks.first().map_or([0; 2], |block| [block.dims()[0], block.dims()[1]])
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    /// The numbers 0.. in blocks of these lengths, for one token.
    fn projections(lens: &[usize]) -> Projections {
        let device: Device = Device::flex();
        let mut next = 0;
        let block = |len: &usize| {
            let numbers: Vec<f32> = (next..next + len).map(|number| number as f32).collect();
            next += len;
            Tensor::from_data(TensorData::new(numbers, [1, 1, *len]), (&device, DType::F32))
        };
        lens.iter().map(block).collect::<Vec<_>>().into()
    }

    #[test]
    fn heads_are_the_same_however_the_matrix_is_cut() {
        for lens in [&[24][..], &[16, 8], &[8, 8, 8], &[6, 18], &[3, 3, 18]] {
            let all = projections(lens);
            for (first, heads, width) in [(0, 4, 4), (16, 2, 4), (8, 2, 4), (4, 3, 6), (5, 1, 7)] {
                let want: Vec<f32> = (first..first + heads * width).map(|number| number as f32).collect();
                let heads_of = all.heads(first, heads, width);
                assert_eq!(heads_of.dims(), [1, 1, heads, width]);
                assert_eq!(
                    heads_of.into_data().as_slice::<f32>().expect("they are float32"),
                    want,
                    "{lens:?}"
                );
                let vectors = all.vectors(first, heads, width);
                assert_eq!(vectors.dims(), [1, heads, width]);
                assert_eq!(
                    vectors.into_data().as_slice::<f32>().expect("they are float32"),
                    want,
                    "{lens:?}"
                );
            }
        }
    }
}
