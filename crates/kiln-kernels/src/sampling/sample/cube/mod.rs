//! The `#[cube]` functions, which take the same steps as the shaders.

mod candidates;
mod choice;
mod scores;

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Int, Tensor},
};
use cubecl::prelude::*;

use super::{
    Draws, Sample,
    sharing::{BINS, Candidates, Sharing, TOPS},
};
use crate::runtime::launch::{LANES, address_type, count, empty, primitive, to_write};

/// The division of the tokens among workgroups.
#[derive(CubeType, CubeLaunch)]
struct Share {
    rows: usize,
    vocab: usize,
    /// Workgroups per row, and tokens per workgroup.
    shares: usize,
    share: usize,
}

pub(super) fn launch(Sample { logits, draws, sampling }: Sample) -> (Tensor<2, Int>, Draws) {
    let [rows, _, vocab] = logits.dims();
    let penalized = draws.occurred.is_some();
    let (logits, words) = (primitive(logits), primitive(draws.words));
    let used = to_write(primitive(draws.used));
    let occurred = draws
        .occurred
        .map_or_else(|| empty(&logits, [1, 1], DType::I32), |occurred| to_write(primitive(occurred)));
    let sharing = Sharing::new(vocab);
    let Sharing { shares, share } = sharing;
    let own = || ShareLaunch::new(rows, vocab, shares, share);
    let tops = empty(&logits, [rows, shares * TOPS, 2], DType::U32);
    let keys = empty(&logits, if sampling.draws { [rows, vocab] } else { [1, 1] }, DType::U32);
    let Candidates { listed, top_k, least, tail } = Candidates::new(&sampling, sharing);
    let counted = tail > 0.0;
    let bins = empty(&logits, if counted { [rows, shares, BINS + 1] } else { [1; 3] }, DType::U32);
    let (client, lanes) = (keys.client.clone(), CubeDim::new_1d(LANES as u32));
    let elem = dtype_to_storage_type(logits.dtype);
    scores::scores::launch(
        &client,
        count(rows * shares),
        lanes,
        address_type([&logits, &occurred, &keys]),
        logits.into_tensor_arg(),
        occurred.clone().into_tensor_arg(),
        keys.clone().into_tensor_arg(),
        tops.clone().into_tensor_arg(),
        bins.clone().into_tensor_arg(),
        own(),
        sampling.repetition_penalty,
        sampling.temperature,
        penalized,
        sampling.draws,
        counted,
        elem,
    );

    let found = empty(&keys, [rows, shares, 3], DType::F32);
    let list = empty(&keys, if listed { [rows, 2, vocab, 2] } else { [1, 1, 1, 2] }, DType::U32);
    if sampling.draws {
        candidates::candidates::launch(
            &client,
            count(rows * shares),
            lanes,
            address_type([&keys, &list]),
            keys.clone().into_tensor_arg(),
            tops.clone().into_tensor_arg(),
            bins.into_tensor_arg(),
            list.clone().into_tensor_arg(),
            found.clone().into_tensor_arg(),
            own(),
            top_k as u32,
            least,
            tail,
            listed,
            counted,
        );
    }

    let chosen = empty(&keys, [rows, 1], DType::I32);
    let entries = if listed { list } else { keys };
    choice::choice::launch(
        &client,
        count(rows),
        lanes,
        address_type([&entries, &words, &occurred]),
        tops.into_tensor_arg(),
        entries.into_tensor_arg(),
        found.into_tensor_arg(),
        words.clone().into_tensor_arg(),
        used.clone().into_tensor_arg(),
        occurred.clone().into_tensor_arg(),
        chosen.clone().into_tensor_arg(),
        own(),
        choice::FiltersLaunch::new(sampling.top_k, sampling.tail, sampling.min_p),
        penalized,
        sampling.draws,
        listed,
    );
    let draws = Draws {
        words: Tensor::from_primitive::<Cube>(words),
        used: Tensor::from_primitive::<Cube>(used),
        occurred: penalized.then(|| Tensor::from_primitive::<Cube>(occurred)),
    };
    (Tensor::from_primitive::<Cube>(chosen), draws)
}
