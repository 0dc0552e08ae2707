//! The launches of the shaders.

use burn::{
    backend::Cube,
    tensor::{DType, Int, Tensor},
};

use super::{
    CANDIDATES, CHOICE, Draws, SCORES, Sample,
    sharing::{BINS, Candidates, Sharing, TOPS},
};
use crate::runtime::launch::{Launch, empty, primitive, strides, to_write};

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
    let ([word0, word1], [occurred0, occurred1], [used0]) =
        (strides(&words), strides(&occurred), strides(&used));
    let dtype = logits.dtype;
    #[rustfmt::skip]
    let info = [
        rows as u32, vocab as u32, shares as u32, share as u32,
        logit0, logit2, occurred0, occurred1,
        u32::from(penalized), sampling.repetition_penalty.to_bits(), sampling.temperature.to_bits(), u32::from(sampling.draws),
        u32::from(counted),
    ];
    let client = keys.client.clone();
    let scores = Launch::new(&SCORES, dtype, &client).reads(logits).reads(occurred.clone());
    scores.writes(&keys).writes(&tops).writes(&bins).run(rows * shares, &info);

    let found = empty(&keys, [rows, shares, 3], DType::F32);
    let list = empty(&keys, if listed { [rows, 2, vocab, 2] } else { [1, 1, 1, 2] }, DType::U32);
    if sampling.draws {
        #[rustfmt::skip]
        let info = [
            rows as u32, vocab as u32, shares as u32, share as u32,
            top_k as u32, least.to_bits(), tail.to_bits(),
        ];
        let find = Launch::new(&CANDIDATES, DType::F32, &client).with(&[usize::from(!listed)]);
        let find = find.reads(keys.clone()).reads(tops.clone()).reads(bins);
        find.writes(&list).writes(&found).run(rows * shares, &info);
    }

    let chosen = empty(&keys, [rows, 1], DType::I32);
    #[rustfmt::skip]
    let info = [
        rows as u32, vocab as u32, shares as u32, share as u32,
        word0, word1, steps as u32, used0,
        occurred0, occurred1, u32::from(penalized), u32::from(sampling.draws),
        sampling.top_k as u32, sampling.tail.to_bits(), sampling.min_p.to_bits(),
    ];
    let entries = if listed { list } else { keys };
    let choose = Launch::new(&CHOICE, DType::F32, &client).with(&[usize::from(!listed)]);
    let choose = choose.reads(tops).updates(&entries).reads(found).reads(words.clone());
    choose.updates(&used).updates(&occurred).writes(&chosen).run(rows, &info);
    let draws = Draws {
        words: Tensor::from_primitive::<Cube>(words),
        used: Tensor::from_primitive::<Cube>(used),
        occurred: penalized.then(|| Tensor::from_primitive::<Cube>(occurred)),
    };
    (Tensor::from_primitive::<Cube>(chosen), draws)
}
