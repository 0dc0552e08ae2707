//! DoLa on a model whose logits are a hash of every token, and of the layer.
#![allow(clippy::unwrap_used, reason = "these are tests")]

use kiln_core::{batch::Batch, model::TokenId};

use super::*;
use crate::{
    Generation, GenerationConfig, Options,
    generation::tests::fake::{self, Hashing, VOCAB, cache},
    sampler::greedy,
};

/// A model of so many layers.
#[derive(Debug)]
struct Deep(Hashing, usize, bool);

impl CausalModel for Deep {
    fn needs(&self) -> Vec<kiln_core::need::LayerNeed> {
        vec![self.0.needs().remove(0); self.1]
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn ties_embeddings(&self) -> bool {
        self.2
    }

    fn head(&self, hidden: burn::tensor::Tensor<3>) -> burn::tensor::Tensor<3> {
        self.0.head(hidden)
    }

    fn compute(
        &self,
        batch: &Batch,
        logits: kiln_core::model::Logits<'_>,
        pass: &mut kiln_core::model_cache::Pass<'_>,
    ) -> Result<burn::tensor::Tensor<3>> {
        self.0.compute(batch, logits, pass)
    }
}

#[test]
fn candidate_layers_are_those_of_transformers() {
    let candidates = |wanted: DolaLayers, layers, tied| wanted.of(&Deep(Hashing::default(), layers, tied));
    let step = |range: std::ops::Range<usize>| Ok(range.step_by(2).collect::<Vec<_>>());
    assert_eq!(candidates(DolaLayers::Low, 12, false), step(0..6));
    assert_eq!(candidates(DolaLayers::Low, 12, true), step(2..6));
    assert_eq!(candidates(DolaLayers::High, 13, true), step(6..13));
    assert_eq!(candidates(DolaLayers::Low, 41, false), step(0..20));
    assert_eq!(candidates(DolaLayers::High, 41, false), step(21..41));
    assert_eq!(candidates(DolaLayers::Low, 40, false), step(0..20));
    for (layers, tied, low) in [(1, false, 0), (1, true, 0), (2, true, 1), (4, true, 2), (5, true, 2)] {
        assert_eq!(candidates(DolaLayers::Low, layers, tied), Ok(vec![low]), "{layers} layers");
    }
    assert_eq!(candidates(DolaLayers::These(vec![3, 0, 9, 3]), 5, true), Ok(vec![0, 3]));
    for none in [DolaLayers::These(vec![3]), DolaLayers::Low] {
        let said = candidates(none, 3, true).unwrap_err().to_string();
        assert!(said.starts_with("dola_layers: names no layer"), "{said}");
    }
}

/// The result of transformers 4.47 for logits of two earlier layers and the last (`_dola_select_contrast`).
#[test]
fn the_layer_that_differs_most_is_subtracted() {
    let last = [1.0, 3.0, 0.0, 2.5];
    let near = [1.0, 2.9, 0.0, 2.4];
    let far = [4.0, 0.0, 1.0, 0.0];
    let (logits, begin) = contrast(&[near, far, last].concat(), 2, 4);
    assert_eq!(logits, last);
    let (p, q) = (log_softmax(&last), log_softmax(&far));
    // Only 0.0 is more than ln 10 below 3.0.
    assert_eq!(begin, [p[0] - q[0], p[1] - q[1], f32::NEG_INFINITY, p[3] - q[3]]);
    let (_, other) = contrast(&[far, near, last].concat(), 2, 4);
    assert_eq!(other, begin, "wherever it is");
    let (_, only) = contrast(&[near, last].concat(), 1, 4);
    assert_eq!(only[1], p[1] - log_softmax(&near)[1]);
}

#[test]
fn each_token_has_the_largest_contrast_of_the_layers() {
    let prompts = [vec![3, 1, 4, 1, 5], vec![7]];
    let layers = || DolaLayers::These(vec![0]);
    for (cache, chunk) in [(cache::keeps(), None), (cache::keeps(), Some(2)), (cache::forgets(), None)] {
        let config = GenerationConfig::new().dola_layers(layers()).max_new_tokens(6);
        let settings = config.resolve().unwrap();
        let options = Options { settings, prefill_chunk: chunk, keep_logits: true, ..Options::default() };
        let model = Hashing::default();
        let batch = Batch::left_padded(&prompts, 0, &fake::device()).unwrap();
        let steps = Generation::new(model.shared(), cache, batch, prompts.to_vec(), options).unwrap();
        let mut rows = prompts.to_vec();
        for step in steps {
            let step = step.unwrap();
            for (row, ids) in rows.iter_mut().enumerate() {
                let last = fake::logits(ids);
                let (_, begin) = contrast(&[fake::early(ids, 0), last.clone()].concat(), 1, VOCAB);
                let token: TokenId = greedy(&begin).unwrap();
                assert_eq!(step.tokens[row], Some(token), "row {row}");
                assert_eq!(step.logits.as_ref().unwrap()[row], last);
                ids.push(token);
            }
        }
    }
}

#[test]
fn layers_are_contrasted_only_by_greedy_decoding_and_sampling() {
    let dola = || GenerationConfig::new().dola_layers(DolaLayers::High);
    assert!(dola().resolve().is_ok() && dola().do_sample(true).resolve().is_ok());
    let said = dola().num_beams(2).resolve().unwrap_err().to_string();
    assert!(said.starts_with("dola_layers: "), "{said}");
}
