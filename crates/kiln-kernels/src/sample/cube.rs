//! The `#[cube]` function, which takes the steps of the shader.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Int as IntKind, Tensor as BurnTensor},
};
use cubecl::prelude::*;

use super::{Draws, Sample};
use crate::{
    launch::{LANES, address_type, count, empty, primitive, to_write},
    order::{HIGHEST, LOWEST, key_of, score_of},
};

/// Bins of three bits, and parts of the vocabulary; each has some of the lanes.
const PARTS: usize = 8;
const TOGETHER: usize = LANES / PARTS;

// What is added up: tokens, those whose key is the lowest that is kept, weights.
const COUNT: u32 = 0;
const TIES: u32 = 1;
const WEIGHTS: u32 = 2;

/// What is the same for all rows.
#[derive(CubeType, CubeLaunch)]
struct Info {
    rows: usize,
    vocab: usize,
    top_k: usize,
    penalty: f32,
    temperature: f32,
    tail: f32,
    min_p: f32,
}

/// What is left of a row.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    /// The row's keys.
    first_key: usize,
    /// The key of the largest score.
    largest: u32,
    /// Keys from this one on; of those that equal it, tokens from this one on; weights from this one on.
    lowest: u32,
    first: usize,
    least: f32,
}

/// One of several sums: its number, what is before it, and the sum itself.
#[derive(CubeType, Clone, Copy)]
struct Pick {
    at: u32,
    before: f32,
    sum: f32,
}

#[cube]
fn processed(logit: f32, penalized: bool, info: &Info) -> f32 {
    let mut score = logit;
    if (u32::reinterpret(logit) & 0x7fff_ffffu32) < 0x7f80_0000u32 {
        if penalized {
            score = select(score < 0.0, score * info.penalty, score / info.penalty);
        }
        if info.temperature != 1.0 {
            score /= info.temperature;
        }
    }
    score
}

/// The largest score weighs 1.
#[cube]
fn weight(key: u32, largest: u32) -> f32 {
    let quotient = f32::exp(score_of(key) - score_of(largest));
    select(key <= LOWEST, 0.0, select(key == largest, 1.0, quotient))
}

#[cube]
fn mass(keys: &mut Tensor<u32>, token: usize, kept: &Kept, #[comptime] what: u32) -> f32 {
    let mut mass = f32::new(1.0);
    if comptime!(what != COUNT) {
        let key = keys[kept.first_key + token];
        if comptime!(what == TIES) {
            mass = select(key == kept.lowest, 1.0, 0.0);
        } else {
            let own = weight(key, kept.largest);
            let left = key > kept.lowest || (key == kept.lowest && token >= kept.first);
            mass = select(left && own >= kept.least, own, 0.0);
        }
    }
    mass
}

/// Adds up each part's lanes: its sum is then at its first.
#[cube]
fn add_up(sum: f32, sums: &mut Shared<[f32]>) {
    let lane = UNIT_POS as usize;
    sums[lane] = sum;
    let mut left = CUBE_DIM as usize / (2 * PARTS);
    while left > 0 {
        sync_cube();
        if lane % TOGETHER < left {
            sums[lane] += sums[lane + left];
        }
        left /= 2;
    }
    sync_cube();
}

/// The first of the sums with which all up to it exceed the limit; else the last that is not 0.
#[cube]
fn pick(sums: &mut Shared<[f32]>, count: usize, step: usize, before: f32, limit: f32) -> Pick {
    let mut at = 0u32;
    let mut before_it = before;
    let mut its = f32::new(0.0);
    let mut all = before;
    let mut exceeds = false;
    for i in 0..count {
        let sum = sums[i * step];
        if sum > 0.0 && !exceeds {
            at = u32::cast_from(i);
            before_it = all;
            its = sum;
            all += sum;
            exceeds = all > limit;
        }
    }
    Pick { at, before: before_it, sum: its }
}

#[cube]
fn total(keys: &mut Tensor<u32>, vocab: usize, kept: &Kept, sums: &mut Shared<[f32]>) -> f32 {
    let mut sum = f32::new(0.0);
    let mut token = UNIT_POS as usize;
    while token < vocab {
        sum += mass(keys, token, kept, WEIGHTS);
        token += LANES;
    }
    add_up(sum, sums);
    let mut all = f32::new(0.0);
    for i in 0..PARTS {
        all += sums[i * TOGETHER];
    }
    sync_cube();
    all
}

/// The smallest key such that it and all below exceed the limit.
#[cube]
fn threshold(
    keys: &mut Tensor<u32>,
    vocab: usize,
    kept: &Kept,
    limit: f32,
    bins: &mut Shared<[f32]>,
    sums: &mut Shared<[f32]>,
    #[comptime] what: u32,
) -> Pick {
    let lane = UNIT_POS as usize;
    let mut mask = 0u32;
    let mut at = 0u32;
    let mut before = f32::new(0.0);
    let mut its = f32::new(0.0);
    for pass in 0..11u32 {
        let shift = 30u32 - 3u32 * pass;
        for bin in 0..PARTS {
            bins[bin * LANES + lane] = 0.0;
        }
        let mut token = lane;
        while token < vocab {
            let key = keys[kept.first_key + token];
            if (key & mask) == at {
                let bin = usize::cast_from((key >> shift) & 7u32) * LANES + lane;
                bins[bin] += mass(keys, token, kept, what);
            }
            token += LANES;
        }
        sync_cube();
        let mut sum = f32::new(0.0);
        let bin = lane / TOGETHER * LANES + lane % TOGETHER;
        for i in 0..PARTS {
            sum += bins[bin + i * TOGETHER];
        }
        add_up(sum, sums);
        let digit = pick(sums, PARTS, TOGETHER, before, limit);
        at |= digit.at << shift;
        before = digit.before;
        its = digit.sum;
        mask |= 7u32 << shift;
        sync_cube();
    }
    Pick { at, before, sum: its }
}

/// The first token such that it and all before it exceed the limit.
#[cube]
fn find(
    keys: &mut Tensor<u32>,
    vocab: usize,
    kept: &Kept,
    limit: f32,
    sums: &mut Shared<[f32]>,
    #[comptime] what: u32,
) -> usize {
    let lane = UNIT_POS as usize;
    let mut begin = 0usize;
    let mut end = vocab;
    let mut before = f32::new(0.0);
    let mut width = vocab;
    while width > LANES {
        width = width.div_ceil(PARTS);
        let first = begin + lane / TOGETHER * width;
        let beyond = min(first + width, end);
        let mut sum = f32::new(0.0);
        let mut token = first + lane % TOGETHER;
        while token < beyond {
            sum += mass(keys, token, kept, what);
            token += TOGETHER;
        }
        add_up(sum, sums);
        let part = pick(sums, PARTS, TOGETHER, before, limit);
        begin += usize::cast_from(part.at) * width;
        end = min(begin + width, end);
        before = part.before;
        sync_cube();
    }
    let mut own = f32::new(0.0);
    if begin + lane < end {
        own = mass(keys, begin + lane, kept, what);
    }
    sums[lane] = own;
    sync_cube();
    let token = begin + usize::cast_from(pick(sums, LANES, 1usize, before, limit).at);
    sync_cube();
    token
}

#[cube(launch, address_type = "dynamic")]
fn sample<E: Float>(
    logits: &Tensor<E>,
    words: &Tensor<i32>,
    used: &mut Tensor<i32>,
    occurred: &mut Tensor<i32>,
    keys: &mut Tensor<u32>,
    chosen: &mut Tensor<i32>,
    info: &Info,
    #[comptime] penalized: bool,
    #[comptime] draws: bool,
    #[define(E)] _elem: ElemType,
) {
    let row = CUBE_POS;
    if row >= info.rows {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let mut top_keys = Shared::<[u32]>::new_slice(LANES);
    let mut top_tokens = Shared::<[u32]>::new_slice(LANES);
    let mut bins = Shared::<[f32]>::new_slice(comptime!(PARTS * LANES));
    let mut sums = Shared::<[f32]>::new_slice(LANES);
    let first_key = row * info.vocab;
    let at_used = row * used.stride(0);
    let step = min(usize::cast_from(used[at_used]), words.shape(1) - 1);

    let mut top_key = 0u32;
    let mut top_token = 0u32;
    let mut token = lane;
    while token < info.vocab {
        let mut penalize = false;
        if comptime!(penalized) {
            penalize = occurred[row * occurred.stride(0) + token * occurred.stride(1)] != 0;
        }
        let logit = f32::cast_from(logits[row * logits.stride(0) + token * logits.stride(2)]);
        let key = key_of(processed(logit, penalize, info));
        if comptime!(draws) {
            keys[first_key + token] = key;
        }
        if key > top_key {
            top_key = key;
            top_token = u32::cast_from(token);
        }
        token += LANES;
    }
    top_keys[lane] = top_key;
    top_tokens[lane] = top_token;
    let mut left = CUBE_DIM as usize / 2;
    while left > 0 {
        sync_cube();
        if lane < left {
            let key = top_keys[lane + left];
            let token = top_tokens[lane + left];
            let own = top_keys[lane];
            if key > own || (key == own && token < top_tokens[lane]) {
                top_keys[lane] = key;
                top_tokens[lane] = token;
            }
        }
        left /= 2;
    }
    // Other lanes' keys are read from here on.
    sync_storage();
    sync_cube();
    let largest = top_keys[0];
    let mut token = i32::cast_from(top_tokens[0]);

    if comptime!(draws) {
        let vocab = info.vocab;
        let all = Kept { first_key, largest, lowest: 0u32, first: 0usize, least: f32::new(0.0) };
        let mut lowest = 0u32;
        if info.top_k > 0 && info.top_k < vocab {
            let limit = f32::cast_from(vocab - info.top_k);
            lowest = threshold(keys, vocab, &all, limit, &mut bins, &mut sums, COUNT).at;
        }
        let mut first = 0usize;
        if info.tail > 0.0 {
            let kept = Kept { first_key, largest, lowest, first: 0usize, least: f32::new(0.0) };
            let limit = info.tail * total(keys, vocab, &kept, &mut sums);
            let last = threshold(keys, vocab, &kept, limit, &mut bins, &mut sums, WEIGHTS);
            lowest = last.at;
            // Of those that equal it, the first go; of the largest, not the last.
            let each = weight(last.at, largest);
            let ties = f32::round(last.sum / each) - select(last.at == largest, 1.0, 0.0);
            let go = min(max(f32::floor((limit - last.before) / each), 0.0), max(ties, 0.0));
            let tied = Kept { first_key, largest, lowest, first: 0usize, least: f32::new(0.0) };
            let last_gone = find(keys, vocab, &tied, go - 0.5, &mut sums, TIES);
            first = select(go > 0.0, last_gone + 1, 0);
        }
        let kept = Kept { first_key, largest, lowest, first, least: info.min_p };
        let word = words[row * words.stride(0) + step * words.stride(1)];
        let limit = f32::cast_from(word) / 16777216.0 * total(keys, vocab, &kept, &mut sums);
        token = i32::cast_from(find(keys, vocab, &kept, limit, &mut sums, WEIGHTS));
    }
    token = select(largest > LOWEST && largest < HIGHEST, token, -1);
    if lane == 0 {
        chosen[row] = token;
        used[at_used] = i32::cast_from(step) + 1;
        if comptime!(penalized) && token >= 0 {
            let at = row * occurred.stride(0) + usize::cast_from(token) * occurred.stride(1);
            occurred[at] = 1;
        }
    }
}

pub(super) fn launch(Sample { logits, draws, sampling }: Sample) -> (BurnTensor<2, IntKind>, Draws) {
    let [rows, _, vocab] = logits.dims();
    let penalized = draws.occurred.is_some();
    let (logits, words) = (primitive(logits), primitive(draws.words));
    let used = to_write(primitive(draws.used));
    let occurred = draws
        .occurred
        .map_or_else(|| empty(&logits, [1, 1], DType::I32), |occurred| to_write(primitive(occurred)));
    let keys = empty(&logits, [rows, vocab], DType::U32);
    let chosen = empty(&logits, [rows, 1], DType::I32);
    let elem = dtype_to_storage_type(logits.dtype);
    sample::launch(
        &chosen.client,
        count(rows),
        CubeDim::new_1d(LANES as u32),
        address_type([&logits, &words, &occurred, &keys]),
        logits.into_tensor_arg(),
        words.clone().into_tensor_arg(),
        used.clone().into_tensor_arg(),
        occurred.clone().into_tensor_arg(),
        keys.into_tensor_arg(),
        chosen.clone().into_tensor_arg(),
        InfoLaunch::new(
            rows,
            vocab,
            sampling.top_k.min(vocab),
            sampling.repetition_penalty,
            sampling.temperature,
            sampling.tail,
            sampling.min_p,
        ),
        penalized,
        sampling.draws,
        elem,
    );
    let draws = Draws {
        words: BurnTensor::from_primitive::<Cube>(words),
        used: BurnTensor::from_primitive::<Cube>(used),
        occurred: penalized.then(|| BurnTensor::from_primitive::<Cube>(occurred)),
    };
    (BurnTensor::from_primitive::<Cube>(chosen), draws)
}
