//! Choosing tokens on the device: nothing is read back for it, and nothing uploaded but random numbers, for many steps at
//! once.

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{Error, Result, model::TokenId};
use kiln_kernels::{Draws, Kernels, Sample, Sampling, likeliest};

use crate::sampler::Sampler;

/// Steps that random numbers are uploaded for at once.
const TABLE: usize = 2048;

/// What chooses the tokens of steps, one after the other. Nothing of a step that failed before it is used up.
#[derive(Debug)]
pub(crate) enum DeviceSampler {
    Likeliest,
    Sampled(Box<Sampled>),
}

/// After processors, and drawn where there is a sampler.
#[derive(Debug)]
pub(crate) struct Sampled {
    kernels: Kernels,
    sampling: Sampling,
    sampler: Option<Sampler>,
    /// Nothing else ever holds it, so that it is written in place. Gone only while a step is launched.
    draws: Option<Draws>,
    /// Steps that there are still random numbers for.
    left: usize,
}

impl DeviceSampler {
    /// The likeliest token of each row, of equals the first, where there is no kernel for it.
    pub(crate) fn likeliest() -> Self {
        Self::Likeliest
    }

    /// What `sampling` says, by `kernels` that have a kernel for it. `prompts`: tokens that occurred, below `vocab`.
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

    /// Has random numbers for a step; whether they are others, which a recording does not know.
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

    /// Tokens `[rows, 1]` for logits `[rows, 1, vocab]`; -1 where the scores are no distribution.
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

    /// After a step that chose tokens was replayed.
    pub(crate) fn repeated(&mut self) {
        if let Self::Sampled(sampled) = self {
            sampled.left -= 1;
        }
    }
}

/// Random numbers `[rows, steps]`, and for how many steps.
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

    /// By the reference, for more steps than there are random numbers for at once; rows by streams of their own.
    #[test]
    fn each_row_takes_a_word_a_step() {
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
