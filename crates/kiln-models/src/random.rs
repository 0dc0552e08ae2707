//! Weights made up on the device, to measure speed without a download.

use std::ops::Range;

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use kiln_core::{Result, budget::Claim, read_back, stages::Stages};
use kiln_kernels::{Kernels, Matrix, MatrixStack, PackedLayout, PackedMatrix, Placement, Use};
use kiln_weights::streams::Arithmetic;

use crate::{
    Configured, ExpertPlace, HostMatrix, LoadTarget, Part, Weights, checkpoint::format_of,
    nn::names::is_second,
};

/// Normal noise of the size that transformers initialises with.
#[derive(Debug)]
pub struct RandomWeights {
    /// Devices of the blocks
    pub targets: Stages<LoadTarget>,
    /// The block that is loaded
    pub block: usize,
    pub dtype: DType,
    pub expert_place: ExpertPlace,
    /// The device that weights are made on instead of that of the block
    pub other: Option<LoadTarget>,
    /// Claims to the memory of the weights made so far
    pub claims: Stages<Claim>,
    /// Elements of all of them, wherever they are.
    pub elements: u64,
}

impl RandomWeights {
    fn noise<const D: usize>(&mut self, shape: [usize; D]) -> Result<Tensor<D>> {
        let elements = shape.iter().product::<usize>();
        let bytes = elements * self.dtype.size();
        self.elements += elements as u64;
        let noise = Distribution::Normal(0.0, 0.02);
        if let Some(other) = &self.other {
            return Ok(Tensor::random(shape, noise, (other.device(), DType::F32)));
        }
        let claim = self.claims.of_mut(self.block);
        claim.resize(claim.bytes() + bytes as u64)?;
        let device = self.targets.of(self.block).device();
        Ok(Tensor::random(shape, noise, (device, self.dtype)))
    }

    /// Kernels of the device that weights are made on, and the type that they compute in.
    fn target(&self) -> (&Kernels, DType) {
        match &self.other {
            Some(other) => (&other.kernels, DType::F32),
            None => (&self.targets.of(self.block).kernels, self.dtype),
        }
    }

    /// Returns a matrix in a packed layout for the type of the weights, if there is one, or else dense.
    fn packed_matrix(
        &mut self,
        layout: Option<PackedLayout>,
        parts: &[Part],
        width: usize,
        range: Range<usize>,
    ) -> Result<Matrix> {
        let shape = [range.len(), width];
        let Some((layout, of_words)) = layout.and_then(|layout| Some((layout, layout.words(shape)?))) else {
            return self.dense_matrix(parts, width, range).map(Matrix::Dense);
        };
        let (counted, dtype) = (self.elements, self.target().1);
        let [rows, words] = of_words;
        let numbers = self.noise([rows, words * size_of::<i32>() / dtype.size()])?;
        let is_second = parts.iter().all(|part| is_second(&part.name));
        self.elements = counted + if is_second { 0 } else { (shape[0] * shape[1]) as u64 };
        // Noise in another order is noise, so the words are the numbers as they come.
        let device = numbers.device();
        let bytes = read_back::read(numbers)?.into_bytes();
        let words: Vec<i32> = bytes.as_chunks().0.iter().map(|word| i32::from_ne_bytes(*word)).collect();
        let words = Tensor::<2, Int>::from_data(TensorData::new(words, of_words), (&device, DType::I32));
        let use_as = Use { dtype, arithmetic: Arithmetic::Floats };
        Ok(Matrix::Packed(PackedMatrix::new(words, layout, shape, use_as)))
    }
}

impl Weights for RandomWeights {
    fn begin_block(&mut self, block: usize) {
        self.block = block;
    }

    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        Ok(self.noise([parts.iter().map(|part| part.rows).sum()])? + 1.0)
    }

    fn matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Matrix> {
        let (kernels, dtype) = self.target();
        let layout = format_of(dtype).and_then(|format| PackedLayout::for_matrix(kernels, format, dtype));
        self.packed_matrix(layout, parts, width, range)
    }

    fn stack(&mut self, parts: &[Part], shape: [usize; 3]) -> Result<MatrixStack> {
        let (kernels, dtype) = self.target();
        let layout =
            format_of(dtype).and_then(|format| PackedLayout::for_stack(kernels, format, dtype, shape[1]));
        let most = self.rows_at_once(parts, shape[2])?;
        MatrixStack::read(shape, most, |range| self.packed_matrix(layout, parts, shape[2], range))
    }

    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        let counted = self.elements;
        let matrix = self.noise([range.len(), width])?;
        if parts.iter().all(|part| is_second(&part.name)) {
            self.elements = counted;
        }
        Ok(matrix)
    }

    fn host_matrix(&mut self, _parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        let shape = [range.len(), width];
        self.elements += shape.iter().product::<usize>() as u64;
        let options = (self.targets.of(self.block).device(), self.dtype);
        let numbers = Tensor::<2>::random(shape, Distribution::Normal(0.0, 0.02), options);
        read_back::read(numbers).map(HostMatrix::dense)
    }

    fn expert_place(&self) -> ExpertPlace {
        self.expert_place.clone()
    }

    fn load_to_other(&mut self, target: Option<&LoadTarget>) {
        self.other = target.cloned();
    }

    fn float32(&mut self, _name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let others = std::mem::replace(&mut self.dtype, DType::F32);
        let numbers = self.noise([shape.iter().product()]);
        self.dtype = others;
        numbers
    }

    fn largest_binding(&self) -> usize {
        self.other.as_ref().unwrap_or_else(|| self.targets.of(self.block)).largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }
}

/// Counts the elements of the weights of each stage of a model, without making them.
///
/// `claim` grows by what models derive of weights while they load, which does take memory.
///
/// # Errors
/// The errors of loading; [`Error::OutOfMemory`](kiln_core::Error::OutOfMemory) where there is no room for
/// what is derived.
pub fn count_elements(
    configured: &dyn Configured,
    placement: &Placement,
    claim: Claim,
) -> Result<Stages<u64>> {
    let mut counted = Counted { placement, claim, block: 0, elements: placement.map(|_| 0) };
    configured.load(&mut counted, placement)?;
    Ok(counted.elements)
}

/// Hands out tensors of the shapes that it is asked for, which take no memory: one number, seen many times.
struct Counted<'a> {
    placement: &'a Placement,
    claim: Claim,
    /// The block that is loaded
    block: usize,
    elements: Stages<u64>,
}

impl Counted<'_> {
    fn zeros<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        *self.elements.of_mut(self.block) += shape.iter().map(|&n| n as u64).product::<u64>();
        let device = self.placement.of(self.block).device();
        Tensor::<D>::zeros([1; D], (device, DType::F32)).expand(shape)
    }
}

impl Weights for Counted<'_> {
    fn begin_block(&mut self, block: usize) {
        self.block = block;
    }

    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        Ok(self.zeros([parts.iter().map(|part| part.rows).sum()]))
    }

    fn dense_matrix(&mut self, _parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        Ok(self.zeros([range.len(), width]))
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        self.dense_matrix(parts, width, range).map(|matrix| HostMatrix::dense(matrix.into_data()))
    }

    fn float32(&mut self, _name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let elements: usize = shape.iter().product();
        self.claim.resize(self.claim.bytes() + (elements * DType::F32.size()) as u64)?;
        Ok(self.zeros([elements]))
    }

    fn largest_binding(&self) -> usize {
        usize::MAX
    }

    fn element_bytes(&self) -> usize {
        DType::F32.size()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use burn::tensor::Device;
    use kiln_core::budget::Budget;
    use kiln_kernels::{Choice, Kernels};

    use super::*;
    use crate::{ConfigFile, configure};

    fn elements(config: &str) -> u64 {
        let device = Device::flex();
        let configured = configure(&config.parse::<ConfigFile>().unwrap()).unwrap();
        let claim = Budget::new(None).claim("weights", 0).unwrap();
        let placement = Kernels::new(Choice::Auto, &device).unwrap().into();
        count_elements(&*configured, &placement, claim).unwrap().iter().sum()
    }

    #[test]
    fn numbers_of_parameters_are_those_of_transformers() {
        // mamba-130m, whose vocabulary is filled up to 50,280.
        let mamba = "model_type=mamba,num_hidden_layers=24,hidden_size=768,state_size=16,vocab_size=50280";
        assert_eq!(elements(mamba), 129_135_360);
        let mixtral = "model_type=mixtral,num_hidden_layers=4,hidden_size=512,num_attention_heads=8,\
                       num_key_value_heads=2,intermediate_size=700,num_local_experts=5,num_experts_per_tok=2,\
                       vocab_size=1000";
        assert_eq!(elements(mixtral), 25_164_288);
        let jamba = "model_type=jamba,num_hidden_layers=12,hidden_size=512,num_attention_heads=8,\
                     num_key_value_heads=2,intermediate_size=700,num_experts=5,vocab_size=1000";
        assert_eq!(elements(jamba), 59_057_344);
    }

    #[test]
    fn counting_takes_no_memory_for_matrices() {
        let config = "model_type=llama,num_hidden_layers=4096,hidden_size=65536,num_attention_heads=64,\
                      num_key_value_heads=8,intermediate_size=1048576,vocab_size=1000000";
        assert!(elements(config) > 800_000_000_000_000);
    }
}
