//! Experts on another device than their block: the CPU, whose memory holds what a GPU has no room for.
//!
//! The vectors of the tokens and their routing are read back in every block, and the sum of the experts'
//! outputs is sent back: kilobytes a token, where the experts themselves are megabytes. Such a step cannot be
//! captured.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_core::{Error, Result, read_back};
use kiln_kernels::{Kernels, Routing};

use super::Stacks;

#[derive(Debug)]
pub(super) struct ExpertsElsewhere {
    stacks: Stacks,
    /// The kernels of the other device.
    kernels: Kernels,
}

impl ExpertsElsewhere {
    pub(super) fn new(stacks: Stacks, kernels: Kernels) -> Self {
        Self { stacks, kernels }
    }

    pub(super) fn stacks(&self) -> &Stacks {
        &self.stacks
    }

    /// Moves `x` `[batch, tokens, hidden]` and its routing to the experts, computes, and moves the result
    /// back.
    ///
    /// # Errors
    /// The errors of the device that is read from.
    pub(super) fn compute(
        &self,
        x: Tensor<3>,
        routing: Routing,
        compute: impl FnOnce(Tensor<3>, Routing, &Kernels) -> Result<Tensor<3>>,
    ) -> Result<Tensor<3>> {
        let ([batch, tokens, hidden], [.., chosen], dtype) = (x.dims(), routing.experts.dims(), x.dtype());
        let (here, there) = (x.device(), self.kernels.device());
        // One read: numbers of experts are exact in float32.
        let numbers = routing.experts.float().cast(DType::F32);
        let together = Tensor::cat(vec![x.cast(DType::F32), routing.weights.cast(DType::F32), numbers], 2);
        let read = read_back::read(together)?;
        let read = read.as_slice::<f32>().map_err(|e| Error::Execution(e.to_string()))?;
        let (mut vectors, mut weights, mut experts) = (Vec::new(), Vec::new(), Vec::<i32>::new());
        for token in read.chunks_exact(hidden + 2 * chosen) {
            let (vector, routing) = token.split_at(hidden);
            let (own, numbers) = routing.split_at(chosen);
            vectors.extend_from_slice(vector);
            weights.extend_from_slice(own);
            experts.extend(numbers.iter().map(|&number| number as i32));
        }
        let floats = |numbers: Vec<f32>, width| {
            Tensor::<3>::from_data(TensorData::new(numbers, [batch, tokens, width]), (there, DType::F32))
        };
        let experts = TensorData::new(experts, [batch, tokens, chosen]);
        let routing = Routing {
            experts: Tensor::<3, Int>::from_data(experts, (there, DType::I32)),
            weights: floats(weights, chosen),
        };
        let sum = compute(floats(vectors, hidden), routing, &self.kernels)?;
        Ok(read_back::moved(sum, &here)?.cast(dtype))
    }
}
