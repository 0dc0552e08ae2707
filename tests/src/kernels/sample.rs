//! Tokens sampled on the device, compared with the host's processors and a draw in float64.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use half::f16;
use kiln::{
    GenerationConfig, RowState, TokenId,
    expert::{
        Processors,
        kernels::{Choice, Draws, Kernels, Sample, Sampling, TopLogprobs},
        read_back,
    },
};

use super::choices;
use crate::support::some_on;

/// Maximum distance of a draw from the interval of the sampled token, as a fraction of the total weight. An
/// exponential has a few rounding errors and those of its argument, whose magnitude is at most 20 where it
/// matters; a sum has one for each number that a lane adds.
const ROUNDING: f64 = 2e-5;

#[derive(Clone, Copy, Debug)]
enum Scores {
    /// From -8 to 8, or to 24 in a large vocabulary, so that only few tokens have a significant weight.
    Usual,
    /// Few distinct scores, so that each occurs many times.
    Ties,
    Equal,
    /// Every other token is masked out.
    Removed,
    /// Only the last token is possible.
    One,
}
use Scores::{Equal, One, Removed, Ties, Usual};

struct Given {
    vocab: usize,
    scores: Scores,
    config: GenerationConfig,
}

fn cases() -> Vec<Given> {
    let sample = GenerationConfig::new().do_sample(true);
    let all = || sample.clone().top_k(0);
    let configs = [
        sample.clone(),
        all(),
        all().temperature(0.3),
        all().temperature(1e30),
        all().top_k(1),
        all().top_k(3),
        all().top_k(usize::MAX),
        all().top_p(0.9),
        all().top_p(0.53),
        all().top_p(1e-9),
        all().min_p(0.1),
        all().min_p(1.0),
        all().repetition_penalty(1.7),
        sample.clone().repetition_penalty(1.7).temperature(0.8).top_p(0.87).min_p(0.03),
        GenerationConfig::new().repetition_penalty(1.7),
    ];
    let mut cases = Vec::new();
    for config in configs {
        for scores in [Usual, Ties, Equal, Removed, One] {
            cases.push(Given { vocab: 257, scores, config: config.clone() });
        }
        for scores in [Usual, Ties] {
            for vocab in [1, 2, 7, 2048, 32_003] {
                cases.push(Given { vocab, scores, config: config.clone() });
            }
        }
    }
    cases
}

/// Returns a generator of 24-bit numbers, the same on every device.
fn random(mut seed: u64) -> impl FnMut() -> u32 {
    move || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 40) as u32
    }
}

impl Given {
    fn rows(&self) -> usize {
        if self.vocab > 1000 { 4 } else { 24 }
    }

    fn logits(&self, dtype: DType) -> Vec<f32> {
        let mut next = random(self.vocab as u64);
        let logit = |token: usize| {
            let usual = next() as f32 / (1 << 20) as f32 - 8.0;
            let usual = if self.vocab > 10_000 { usual * 3.0 } else { usual };
            let logit = match self.scores {
                Usual => usual,
                Ties => (usual * 0.5).round(),
                Equal => 3.0,
                Removed if token % 2 == 1 && token + 1 < self.vocab => f32::NEG_INFINITY,
                Removed => usual,
                One if token + 1 < self.vocab => f32::NEG_INFINITY,
                One => -2.0,
            };
            if dtype == DType::F16 { f16::from_f32(logit).to_f32() } else { logit }
        };
        (0..self.vocab).map(logit).collect()
    }

    /// Returns tokens that occurred before.
    fn prompt(&self, row: usize) -> Vec<TokenId> {
        [0, row, 3 * row + 1].map(|id| (id % self.vocab) as TokenId).to_vec()
    }

    fn draws(&self) -> bool {
        self.config.do_sample == Some(true)
    }

    fn sampling(&self) -> Sampling {
        self.processors(&self.config).on_device(self.draws()).unwrap()
    }

    fn processors(&self, config: &GenerationConfig) -> Processors {
        Processors::of(config, self.draws()).unwrap()
    }

    fn what(&self) -> String {
        format!("{} {:?} {:?}", self.vocab, self.scores, self.sampling())
    }

    /// Computes the host's scores after all processors; `None` if a different rounding would remove other
    /// tokens.
    fn scores(&self, logits: &[f32], ids: &[TokenId]) -> Option<Vec<f32>> {
        let mut scores = logits.to_vec();
        let row = RowState { index: 0, ids, generated: 0, padding: 0, len: ids.len(), remaining: None };
        let config = &self.config;
        // One processor at a time, in order.
        let alone = GenerationConfig::new().do_sample(true).top_k(0);
        let mut one = [alone.clone(), alone.clone(), alone.clone(), alone.clone(), alone];
        one[0].repetition_penalty = config.repetition_penalty;
        one[1].temperature = config.temperature;
        one[2].top_k = config.top_k.or(Some(50));
        one[3].top_p = config.top_p;
        one[4].min_p = config.min_p;
        for config in &one {
            let processors = self.processors(config);
            if processors.names().any(|name| self.is_on_a_rounding(name, &scores)) {
                return None;
            }
            processors.apply(&row, &mut scores).unwrap();
        }
        Some(scores)
    }

    fn is_on_a_rounding(&self, processor: &str, scores: &[f32]) -> bool {
        let weights = weights(scores);
        let total: f64 = weights.iter().sum();
        let near = |a: f64, b: f64| (a - b).abs() < ROUNDING;
        match (processor, self.config.min_p) {
            ("top_p", _) => {
                let mut ascending = weights;
                ascending.sort_by(f64::total_cmp);
                // The last token always stays.
                ascending.pop();
                let limit = f64::from(self.sampling().tail);
                let mut sum = 0.0;
                ascending.into_iter().any(|weight| {
                    sum += weight / total;
                    near(sum, limit)
                })
            }
            ("min_p", Some(limit)) => {
                weights.into_iter().any(|weight| weight < 1.0 && near(weight, f64::from(limit)))
            }
            _ => false,
        }
    }

    /// Returns the reason why `token` does not match a draw of `word` from the host's scores, if any.
    fn wrong(&self, scores: &[f32], word: u32, token: i64) -> Option<String> {
        let at = usize::try_from(token).ok().filter(|&at| at < scores.len());
        let Some(at) = at else { return Some(format!("{token} is no token")) };
        if !self.draws() {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = scores.iter().position(|score| *score == largest);
            return (first != Some(at)).then(|| format!("{at} is not the first of the largest, {first:?}"));
        }
        let weights = weights(scores);
        let total: f64 = weights.iter().sum();
        let target = f64::from(word) / f64::from(1 << 24);
        let before = weights[..at].iter().sum::<f64>() / total;
        let after = before + weights[at] / total;
        let off = (before - target).max(target - after);
        if weights[at] == 0.0 {
            return Some(format!("{at} was removed"));
        }
        (off > ROUNDING).then(|| format!("{at} is from {before} to {after}, {target} was drawn"))
    }
}

fn weights(scores: &[f32]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter().map(|&score| (f64::from(score) - f64::from(largest)).exp()).collect()
}

fn sample(kernels: &Kernels, logits: Tensor<3>, draws: Draws, sampling: Sampling) -> (Tensor<2, Int>, Draws) {
    kernels.run(Sample { logits, draws, sampling })
}

fn integers<const D: usize>(numbers: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

fn tokens(tensor: Tensor<2, Int>) -> Vec<i64> {
    read_back::read(tensor).unwrap().iter().collect()
}

fn every(mut check: impl FnMut(&str, &Device, &str, &Kernels)) {
    for (name, device) in kiln_testkit::devices() {
        // The implementation of `auto` is one of the other choices.
        for (choice, kernels) in
            choices(&name, &device).into_iter().filter(|(choice, _)| *choice != Choice::Auto)
        {
            check(&name, &device, &choice.to_string(), &kernels);
        }
    }
}

#[test]
fn sampled_tokens_are_those_of_the_host() {
    let mut failures = Vec::new();
    let (mut drawn, mut passed_over) = (0, 0);
    every(|name, device, choice, kernels| {
        for dtype in [DType::F32, DType::F16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            // On a GPU, Burn takes seconds for cumulative sums of many numbers.
            let most = if choice == "reference" && name != "cpu" { 300 } else { usize::MAX };
            let given = cases().into_iter().filter(|given| given.vocab <= most);
            for given in some_on(name, given) {
                let (rows, vocab, logits) = (given.rows(), given.vocab, given.logits(dtype));
                let tensor = Tensor::<3>::from_data(
                    TensorData::new(logits.clone(), [1, 1, vocab]),
                    (device, DType::F32),
                );
                let tensor = tensor.cast(dtype).expand([rows, 1, vocab]);
                let mut next = random(7);
                let mut words: Vec<u32> = (0..2 * rows).map(|_| next()).collect();
                // The smallest and the largest word.
                (words[0], words[2]) = (0, (1 << 24) - 1);
                let mut ids: Vec<Vec<TokenId>> = (0..rows).map(|row| given.prompt(row)).collect();
                let occurred = given.config.repetition_penalty.is_some().then(|| {
                    let mut occurred = vec![0; rows * vocab];
                    for (row, ids) in ids.iter().enumerate() {
                        ids.iter().for_each(|&id| occurred[row * vocab + id as usize] = 1);
                    }
                    integers(occurred, [rows, vocab], device)
                });
                let mut draws = Draws {
                    words: integers(words.iter().map(|&word| word as i32).collect(), [rows, 2], device),
                    used: integers(vec![0; rows], [rows], device),
                    occurred,
                };
                for step in 0..2 {
                    let (chosen, after) = sample(kernels, tensor.clone(), draws, given.sampling());
                    draws = after;
                    assert_eq!(chosen.dims(), [rows, 1]);
                    let mut scores = given.scores(&logits, &ids[0]);
                    for (row, token) in tokens(chosen).into_iter().enumerate() {
                        if given.config.repetition_penalty.is_some() {
                            scores = given.scores(&logits, &ids[row]);
                        }
                        drawn += 1;
                        ids[row].push(token.max(0) as TokenId);
                        let Some(scores) = &scores else {
                            passed_over += 1;
                            continue;
                        };
                        if let Some(why) = given.wrong(scores, words[2 * row + step], token) {
                            failures.push(format!(
                                "{choice} on {name}, {dtype:?}, row {row}, step {step}: {}: {why}",
                                given.what()
                            ));
                        }
                    }
                }
            }
        }
    });
    assert!(passed_over * 20 < drawn, "{passed_over} of {drawn} draws are not looked at");
    assert!(
        failures.is_empty(),
        "{} of {drawn} draws fail:\n{}",
        failures.len(),
        failures[..failures.len().min(40)].join("\n")
    );
}

/// Ties of top_p at the cutoff, which the other test skips: the number of remaining tokens is known.
#[test]
fn top_p_removes_the_first_of_equal_tokens() {
    every(|name, device, choice, kernels| {
        // Probabilities of 1/8: the first three reach 3/8, which is at most 1 - 0.6; a fourth would not.
        let equal = [2.0; 8];
        // The last of the largest stays, however small `top_p` is.
        let largest = [1.0, 5.0, 0.0, 5.0, 5.0, 1.0, -3.0, 2.0];
        for (logits, top_p, stay) in [(equal, 0.6, 3..8), (largest, 1e-9, 4..5)] {
            let sampling = Sampling {
                repetition_penalty: 1.0,
                temperature: 1.0,
                top_k: 0,
                tail: 1.0 - top_p,
                min_p: 0.0,
                draws: true,
            };
            let rows = 64;
            let logits = Tensor::<1>::from_data(logits, (device, DType::F32));
            let logits = logits.reshape([1, 1, 8]).expand([rows, 1, 8]);
            let words = (0..rows).map(|row| (row << 18) as i32).collect();
            let draws = Draws {
                words: integers(words, [rows, 1], device),
                used: integers(vec![0; rows], [rows], device),
                occurred: None,
            };
            let mut drawn = tokens(sample(kernels, logits, draws, sampling).0);
            drawn.dedup();
            assert_eq!(drawn, stay.collect::<Vec<_>>(), "{choice} on {name}");
        }
    });
}

#[test]
fn logits_that_are_not_a_distribution_give_no_token() {
    every(|name, device, choice, kernels| {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let rows = [
            [0.0, nan, 1.0],
            [0.0, -nan, 1.0],
            [0.0, inf, 1.0],
            [-inf, -inf, -inf],
            // Becomes infinite after division by the temperature.
            [0.0, f32::MAX, 1.0],
            [-inf, 0.0, -inf],
        ];
        let n = rows.len();
        for (draws, top_k, tail) in
            [(false, 0, 0.0), (true, 0, 0.0), (true, 2, 0.0), (true, 0, 0.5), (true, 2, 0.5)]
        {
            let sampling =
                Sampling { repetition_penalty: 2.0, temperature: 0.5, top_k, tail, min_p: 0.0, draws };
            let logits = TensorData::new(rows.concat(), [n, 1, 3]);
            let draws = Draws {
                words: integers(vec![1 << 23; n], [n, 1], device),
                used: integers(vec![0; n], [n], device),
                occurred: Some(integers(vec![0; 3 * n], [n, 3], device)),
            };
            let logits = Tensor::from_data(logits, (device, DType::F32));
            let (chosen, draws) = sample(kernels, logits, draws, sampling);
            let what = format!("{choice} on {name}, {sampling:?}");
            assert_eq!(tokens(chosen), [-1, -1, -1, -1, -1, 1], "{what}");
            let mut marked = vec![0; 3 * n];
            marked[3 * n - 2] = 1;
            assert_eq!(tokens(draws.occurred.unwrap()), marked, "{what}");
        }
    });
}

#[test]
fn logits_that_are_not_a_distribution_have_no_likeliest_tokens() {
    every(|name, device, choice, kernels| {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let rows = [
            [0.0, nan, 1.0],
            [0.0, -nan, 1.0],
            [0.0, inf, 1.0],
            [-inf, -inf, -inf],
            [-inf, 0.0, -inf],
            [2.0, 2.0, 3.0],
        ];
        let logits = TensorData::new(rows.concat(), [rows.len(), 1, 3]);
        let logits = Tensor::from_data(logits, (device, DType::F32));
        let (chosen, log_probs) = kernels.run(TopLogprobs { logits, most: 2 });
        let what = format!("{choice} on {name}");
        assert_eq!(tokens(chosen), [[-1; 8].to_vec(), vec![1, 0, 2, 0]].concat(), "{what}");
        let log_probs: Vec<f32> = read_back::read(log_probs).unwrap().iter().collect();
        assert_eq!(log_probs[8..10], [0.0, -inf], "{what}");
        assert!((log_probs[10] + 0.551_445).abs() < 1e-5, "{what}: {log_probs:?}");
    });
}

/// Views that are not contiguous, and words that are not adjacent.
#[test]
fn the_memory_layout_of_inputs_changes_no_token() {
    every(|name, device, choice, kernels| {
        let (rows, vocab) = (5, 300);
        let mut next = random(3);
        let logits: Vec<f32> = (0..rows * vocab).map(|_| next() as f32 / (1 << 20) as f32 - 8.0).collect();
        let words: Vec<i32> = (0..2 * rows).map(|_| next() as i32).collect();
        let sampling = Sampling {
            repetition_penalty: 1.5,
            temperature: 1.0,
            top_k: 40,
            tail: 0.1,
            min_p: 0.01,
            draws: true,
        };
        let run = |logits: Tensor<3>, swapped: bool| {
            let swap = |tensor: Tensor<2, Int>| match swapped {
                // Transposed in memory, and transposed back as a view.
                true => (tensor.swap_dims(0, 1) + 0).swap_dims(0, 1),
                false => tensor,
            };
            let occurred = (0..rows * vocab).map(|i| i32::from(i % 3 == 0)).collect();
            let mut draws = Draws {
                words: swap(integers(words.clone(), [rows, 2], device)),
                used: integers(vec![0; rows], [rows], device),
                occurred: Some(swap(integers(occurred, [rows, vocab], device))),
            };
            let mut all = Vec::new();
            for _ in 0..2 {
                let (chosen, after) = sample(kernels, logits.clone(), draws, sampling);
                draws = after;
                all.extend(tokens(chosen));
            }
            (all, tokens(draws.occurred.unwrap()))
        };
        let logits = Tensor::<3>::from_data(TensorData::new(logits, [rows, 1, vocab]), (device, DType::F32));
        let apart = (logits.clone().swap_dims(0, 2) * 1.0).swap_dims(0, 2);
        let want = run(logits.clone(), false);
        assert_eq!(run(logits, false), want, "{choice} on {name} repeats itself");
        assert_eq!(run(apart, true), want, "{choice} on {name}");
    });
}

#[test]
fn tokens_are_sampled_with_their_probabilities() {
    every(|name, device, choice, kernels| {
        let (rows, vocab) = (20_000, 16);
        let logits: Vec<f32> = (0..vocab).map(|token| (token * 7 % 11) as f32 / 4.0).collect();
        let tensor = TensorData::new(logits.clone(), [1, 1, vocab]);
        let tensor = Tensor::<3>::from_data(tensor, (device, DType::F32)).expand([rows, 1, vocab]);
        let mut next = random(11);
        let draws = Draws {
            words: integers((0..rows).map(|_| next() as i32).collect(), [rows, 1], device),
            used: integers(vec![0; rows], [rows], device),
            occurred: None,
        };
        let sampling = Sampling {
            repetition_penalty: 1.0,
            temperature: 1.0,
            top_k: 0,
            tail: 0.0,
            min_p: 0.0,
            draws: true,
        };
        let mut counts = vec![0.0; vocab];
        for token in tokens(sample(kernels, tensor, draws, sampling).0) {
            counts[token as usize] += 1.0;
        }
        let weights = weights(&logits);
        let total: f64 = weights.iter().sum();
        let wanted = weights.iter().map(|weight| rows as f64 * weight / total);
        let squares: f64 = counts.iter().zip(wanted).map(|(got, want)| (got - want).powi(2) / want).sum();
        // The value that chi-square with 15 degrees of freedom exceeds with a probability of 0.001.
        assert!(squares < 37.7, "{choice} on {name}: {squares}, {counts:?}");
    });
}
