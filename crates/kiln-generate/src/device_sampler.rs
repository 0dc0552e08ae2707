//! The choice of tokens on the device. Nothing is read back for it, and only random words are uploaded, for
//! many steps at once.

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{Error, Result, model::TokenId};
use kiln_kernels::{Draws, Kernels, Sample, Sampling, likeliest};

use crate::sampler::Sampler;

/// Number of steps whose random words are uploaded at once.
const TABLE: usize = 2048;

/// Chooses the tokens of steps, one after the other. A step that failed earlier uses up nothing.
#[derive(Debug)]
pub(crate) enum DeviceSampler {
    Likeliest,
    Sampled(Box<Sampled>),
}

/// Chooses after processors, and samples if there is a sampler.
#[derive(Debug)]
pub(crate) struct Sampled {
    kernels: Kernels,
    sampling: Sampling,
    sampler: Option<Sampler>,
    /// Random words, and the tokens that occurred. They have one owner, so that they are written in place.
    /// `None` only while a step is launched.
    draws: Option<Draws>,
    /// Number of steps that random words are left for.
    left: usize,
}

impl DeviceSampler {
    /// Chooses the likeliest token of each row, the first of equals, without a kernel.
    pub(crate) fn likeliest() -> Self {
        Self::Likeliest
    }

    /// Chooses by `sampling`, with the kernel `sample` of `kernels`. `prompts`: tokens that occurred, below
    /// `vocab`.
    pub(crate) fn new(
        kernels: &Kernels,
        sampling: Sampling,
        mut sampler: Option<Sampler>,
        prompts: &[&[TokenId]],
        vocab: usize,
        device: &Device,
    ) -> Self {
        let rows = prompts.len();
        let occurred = (sampling.repetition_penalty != 1.0).then(|| {
            let mut occurred = vec![0i32; rows * vocab];
            for (row, prompt) in occurred.chunks_exact_mut(vocab).zip(prompts) {
                for &id in *prompt {
                    row[id as usize] = 1;
                }
            }
            Tensor::from_data(TensorData::new(occurred, [rows, vocab]), device)
        });
        let (words, left) = words(sampler.as_mut(), rows, device);
        let draws = Draws { words, used: zeros(rows, device), occurred };
        Self::Sampled(Box::new(Sampled {
            kernels: kernels.clone(),
            sampling,
            sampler,
            draws: Some(draws),
            left,
        }))
    }

    /// Prepares the random words of a step. Returns true if a buffer was replaced, so that a captured step
    /// must be recorded again.
    pub(crate) fn prepare(&mut self) -> bool {
        let Self::Sampled(sampled) = self else { return false };
        let Sampled { sampler, draws: Some(draws), left: left @ 0, .. } = &mut **sampled else {
            return false;
        };
        let (rows, device) = (draws.used.dims()[0], draws.used.device());
        (draws.words, *left) = words(sampler.as_mut(), rows, &device);
        draws.used = zeros(rows, &device);
        true
    }

    /// Chooses tokens `[rows, 1]` for logits `[rows, 1, vocab]`; -1 if the scores are not a distribution.
    pub(crate) fn choose(&mut self, logits: Tensor<3>) -> Result<Tensor<2, Int>> {
        self.prepare();
        let Self::Sampled(sampled) = self else {
            let [rows, _, vocab] = logits.dims();
            return Ok(likeliest(logits.reshape([rows, vocab])));
        };
        let Some(draws) = sampled.draws.take() else {
            return Err(Error::Execution("the step before was given up".into()));
        };
        let (tokens, draws) = sampled.kernels.run(Sample { logits, draws, sampling: sampled.sampling });
        sampled.draws = Some(draws);
        sampled.left -= 1;
        Ok(tokens)
    }

    /// Counts a step that chose tokens and was replayed.
    pub(crate) fn repeated(&mut self) {
        if let Self::Sampled(sampled) = self {
            sampled.left -= 1;
        }
    }
}

/// Random words `[rows, steps]`, and the number of steps.
fn words(sampler: Option<&mut Sampler>, rows: usize, device: &Device) -> (Tensor<2, Int>, usize) {
    let Some(sampler) = sampler else {
        return (Tensor::from_data(TensorData::new(vec![0i32; rows], [rows, 1]), device), usize::MAX);
    };
    let words: Vec<i32> = (0..rows * TABLE).map(|i| sampler.word(i / TABLE) as i32).collect();
    (Tensor::from_data(TensorData::new(words, [rows, TABLE]), device), TABLE)
}

fn zeros(rows: usize, device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(vec![0i32; rows], [rows]), device)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use kiln_core::read_back;
    use kiln_kernels::Choice;

    use super::*;
    use crate::{
        GenerationConfig,
        processors::{Processors, RowState},
    };

    /// With the reference kernel, for more steps than a table has words; each row has a stream of its own.
    #[test]
    fn each_row_uses_one_random_word_per_step() {
        let device = Device::flex();
        let kernels = Kernels::new(Choice::Reference, &device).unwrap();
        let config = GenerationConfig::new().top_k(9).top_p(0.9).temperature(0.7).repetition_penalty(1.2);
        let processors = Processors::of(&config, true).unwrap();
        let sampling = processors.on_device(true).unwrap();
        let logits: Vec<f32> = (0..23).map(|token| (token * 7 % 11) as f32 / 3.0 - 1.0).collect();
        let [mut host, draws] = [(); 2].map(|()| Sampler::new(Some(4)).unwrap());
        let mut ids = vec![vec![3, 1, 4], vec![1, 5]];
        let mut device_sampler =
            DeviceSampler::new(&kernels, sampling, Some(draws), &[&ids[0], &ids[1]], logits.len(), &device);
        let mut others = 0;
        for step in 0..2 * TABLE + 5 {
            let tensor = TensorData::new(logits.repeat(2), [2, 1, 23]);
            others += usize::from(device_sampler.prepare());
            let tokens = device_sampler.choose(Tensor::from_data(tensor, &device)).unwrap();
            let tokens: Vec<TokenId> = read_back::read(tokens).unwrap().iter().collect();
            for (row, (&token, ids)) in tokens.iter().zip(&mut ids).enumerate() {
                let mut scores = logits.clone();
                let state = RowState {
                    index: row,
                    ids,
                    generated: step,
                    padding: 0,
                    len: ids.len(),
                    remaining: None,
                };
                processors.apply(&state, &mut scores).unwrap();
                assert_eq!(Ok(token), host.sample(row, &scores), "step {step}, row {row}");
                if !ids.contains(&token) {
                    ids.push(token);
                }
            }
        }
        assert_eq!(others, 2, "tables of {TABLE} steps");
    }
}
