//! The launches of the shaders.

use burn::{
    backend::Cube,
    tensor::{DType, Int, Tensor},
};

use super::{
    CANDIDATES, CHOICE, Draws, SCORES, Sample,
    sharing::{BINS, Candidates, Sharing, TOPS},
};
use crate::{
    runtime::launch::{Launch, empty, primitive, strides, to_write},
    shaders::{sample, sample_candidates, sample_scores},
};

pub(super) fn launch(Sample { logits, draws, sampling }: Sample) -> (Tensor<2, Int>, Draws) {
    let ([rows, _, vocab], [_, steps]) = (logits.dims(), draws.words.dims());
    let penalized = draws.occurred.is_some();
    let (logits, words) = (primitive(logits), primitive(draws.words));
    let used = to_write(primitive(draws.used));
    let occurred = draws
        .occurred
        .map_or_else(|| empty(&logits, [1, 1], DType::I32), |occurred| to_write(primitive(occurred)));
    let sharing = Sharing::new(vocab);
    let Sharing { shares, share } = sharing;
    let tops = empty(&logits, [rows, shares * TOPS, 2], DType::U32);
    let keys = empty(&logits, if sampling.draws { [rows, vocab] } else { [1, 1] }, DType::U32);
    let Candidates { listed, top_k, least, tail } = Candidates::new(&sampling, sharing);
    let counted = tail > 0.0;
    let bins = empty(&logits, if counted { [rows, shares, BINS + 1] } else { [1; 3] }, DType::U32);
    let [logit0, _, logit2] = strides(&logits);
    let [used_stride] = strides(&used);
    let dtype = logits.dtype;
    let client = keys.client.clone();
    let info = sample_scores::Info {
        rows: rows as u32,
        vocab: vocab as u32,
        shares: shares as u32,
        share: share as u32,
        logit_strides: [logit0, logit2],
        occurred_strides: strides(&occurred),
        penalized: u32::from(penalized),
        penalty: sampling.repetition_penalty,
        temperature: sampling.temperature,
        draws: u32::from(sampling.draws),
        counted: u32::from(counted),
    };
    let scores = Launch::new(&SCORES, dtype, &client);
    scores.run(rows * shares, [&logits, &occurred, &keys, &tops, &bins], info);

    let found = empty(&keys, [rows, shares, 3], DType::F32);
    let list = empty(&keys, if listed { [rows, 2, vocab, 2] } else { [1, 1, 1, 2] }, DType::U32);
    if sampling.draws {
        let info = sample_candidates::Info {
            rows: rows as u32,
            vocab: vocab as u32,
            shares: shares as u32,
            share: share as u32,
            top_k: top_k as u32,
            least,
            tail,
        };
        let find = Launch::new(&CANDIDATES, DType::F32, &client).with(&[usize::from(!listed)]);
        find.run(rows * shares, [&keys, &tops, &bins, &list, &found], info);
    }

    let chosen = empty(&keys, [rows, 1], DType::I32);
    let info = sample::Info {
        rows: rows as u32,
        vocab: vocab as u32,
        shares: shares as u32,
        share: share as u32,
        word_strides: strides(&words),
        steps: steps as u32,
        used_stride,
        occurred_strides: strides(&occurred),
        penalized: u32::from(penalized),
        draws: u32::from(sampling.draws),
        top_k: sampling.top_k as u32,
        tail: sampling.tail,
        min_p: sampling.min_p,
    };
    let entries = if listed { list } else { keys };
    let choose = Launch::new(&CHOICE, DType::F32, &client).with(&[usize::from(!listed)]);
    choose.run(rows, [&tops, &entries, &found, &words, &used, &occurred, &chosen], info);
    let draws = Draws {
        words: Tensor::from_primitive::<Cube>(words),
        used: Tensor::from_primitive::<Cube>(used),
        occurred: penalized.then(|| Tensor::from_primitive::<Cube>(occurred)),
    };
    (Tensor::from_primitive::<Cube>(chosen), draws)
}
