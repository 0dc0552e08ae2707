//! The `#[cube]` function, which takes the same steps as the shader.

use burn::{
    backend::Cube,
    tensor::{DType, Tensor as BurnTensor},
};
use cubecl::prelude::*;

use super::{BeamShape, BeamStep, Beams, MOST_BEAMS};
use crate::{
    runtime::launch::{LANES, count, empty, in_order, to_write},
    sampling::order::key_of,
};

/// Parameters that are the same for all prompts.
#[derive(CubeType, CubeLaunch)]
struct Info {
    prompts: usize,
    beams: usize,
    of_group: usize,
    most: usize,
    candidates: usize,
    penalty: f32,
    padding: i32,
}

/// Whether a continuation comes before another. Each is given by the key of its sum, its beam and its token.
#[cube]
fn comes_before(key: u32, beam: u32, token: u32, than_key: u32, than_beam: u32, than_token: u32) -> bool {
    key > than_key || (key == than_key && (beam < than_beam || (beam == than_beam && token < than_token)))
}

/// The log-probability of a token for a beam, in a group that begins at beam `begin`.
#[cube]
fn score_at(
    tokens: &Tensor<i32>,
    log_probs: &Tensor<f32>,
    chosen: &Shared<[i32]>,
    place: usize,
    begin: usize,
    penalty: f32,
) -> f32 {
    let mut score = log_probs[place];
    for i in 0..begin {
        if chosen[i] == tokens[place] {
            score -= penalty;
        }
    }
    score
}

#[cube]
fn is_end(ends: &Tensor<i32>, token: i32) -> bool {
    let mut found = false;
    for i in 0..ends.shape(0) {
        found = found || ends[i] == token;
    }
    found
}

#[cube(launch)]
fn beam_step(
    tokens: &Tensor<i32>,
    log_probs: &Tensor<f32>,
    sums: &mut Tensor<f32>,
    ends: &Tensor<i32>,
    done: &Tensor<i32>,
    candidates: &mut Tensor<f32>,
    next: &mut Tensor<i32>,
    parents: &mut Tensor<i32>,
    info: &Info,
) {
    let prompt = CUBE_POS;
    if prompt >= info.prompts {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let mut keys = Shared::<[u32]>::new_slice(LANES);
    let mut own_beams = Shared::<[u32]>::new_slice(LANES);
    let mut own_tokens = Shared::<[u32]>::new_slice(LANES);
    let mut places = Shared::<[u32]>::new_slice(LANES);
    // Tokens and sums of the beams so far.
    let mut chosen = Shared::<[i32]>::new_slice(MOST_BEAMS);
    let mut chosen_sums = Shared::<[f32]>::new_slice(MOST_BEAMS);

    let first = prompt * info.beams;
    let mut begin = 0usize;
    while begin < info.beams {
        let group = (first + begin) / info.of_group;
        let out = group * info.candidates * 4;
        // Whether the group continues: it is not done, and the scores of all its beams are distributions.
        let mut is_open = done[group] == 0;
        for beam in 0..info.of_group {
            is_open = is_open && tokens[(first + begin + beam) * info.most] >= 0;
        }
        if is_open {
            // The last continuation that was found: its key, initially larger than any, its beam and its
            // token.
            let mut last_key = 0xffff_ffffu32;
            let mut last_beam = 0u32;
            let mut last_token = 0u32;
            let mut kept = 0usize;
            for i in 0..info.candidates {
                let mut own_key = 0u32;
                let mut own_beam = 0xffff_ffffu32;
                let mut own_token = 0xffff_ffffu32;
                let mut own_place = 0u32;
                let mut at = lane;
                while at < info.of_group * info.most {
                    let place = (first + begin) * info.most + at;
                    let score = score_at(tokens, log_probs, &chosen, place, begin, info.penalty);
                    let beam = at / info.most;
                    let key = key_of(score + sums[first + begin + beam]);
                    let beam = u32::cast_from(beam);
                    let token = u32::cast_from(tokens[place]);
                    if comes_before(last_key, last_beam, last_token, key, beam, token)
                        && comes_before(key, beam, token, own_key, own_beam, own_token)
                    {
                        own_key = key;
                        own_beam = beam;
                        own_token = token;
                        own_place = u32::cast_from(place);
                    }
                    at += LANES;
                }
                keys[lane] = own_key;
                own_beams[lane] = own_beam;
                own_tokens[lane] = own_token;
                places[lane] = own_place;
                let mut left = CUBE_DIM as usize / 2;
                while left > 0 {
                    sync_cube();
                    if lane < left {
                        let other = lane + left;
                        let (key, beam, token) = (keys[other], own_beams[other], own_tokens[other]);
                        if comes_before(key, beam, token, keys[lane], own_beams[lane], own_tokens[lane]) {
                            keys[lane] = key;
                            own_beams[lane] = beam;
                            own_tokens[lane] = token;
                            places[lane] = places[other];
                        }
                    }
                    left /= 2;
                }
                sync_cube();
                last_key = keys[0];
                last_beam = own_beams[0];
                last_token = own_tokens[0];
                let last_place = places[0];
                if lane == 0 {
                    let parent = begin + usize::cast_from(last_beam);
                    let place = usize::cast_from(last_place);
                    let score = score_at(tokens, log_probs, &chosen, place, begin, info.penalty);
                    let sum = score + sums[first + parent];
                    let token = i32::cast_from(last_token);
                    let to = out + i * 4;
                    candidates[to] = f32::cast_from(parent as u32);
                    candidates[to + 1] = f32::cast_from(last_token);
                    candidates[to + 2] = score;
                    candidates[to + 3] = sum;
                    if kept < info.of_group && !is_end(ends, token) {
                        next[first + begin + kept] = token;
                        parents[first + begin + kept] = i32::cast_from(parent as u32);
                        chosen[begin + kept] = token;
                        chosen_sums[begin + kept] = sum;
                        kept += 1;
                    }
                }
                sync_cube();
            }
            if lane == 0 {
                // If too few continuations go on, the best of those that end replace the missing ones.
                for i in 0..info.candidates {
                    let from = out + i * 4;
                    let token = i32::cast_from(candidates[from + 1]);
                    if kept < info.of_group && is_end(ends, token) {
                        next[first + begin + kept] = token;
                        parents[first + begin + kept] = i32::cast_from(candidates[from]);
                        chosen[begin + kept] = token;
                        chosen_sums[begin + kept] = candidates[from + 3];
                        kept += 1;
                    }
                }
            }
        } else {
            let mut i = lane;
            while i < info.candidates * 4 {
                candidates[out + i] = select(i % 4 == 1, f32::new(-1.0), f32::new(0.0));
                i += LANES;
            }
            if lane < info.of_group {
                let beam = begin + lane;
                next[first + beam] = info.padding;
                parents[first + beam] = i32::cast_from(beam as u32);
                chosen[beam] = info.padding;
                chosen_sums[beam] = sums[first + beam];
            }
        }
        sync_cube();
        begin += info.of_group;
    }
    if lane < info.beams {
        sums[first + lane] = chosen_sums[lane];
    }
}

pub(super) fn launch(BeamStep { tokens, log_probs, sums, ends, done, shape }: BeamStep) -> Beams {
    let [rows, most] = tokens.dims();
    let BeamShape { beams, groups, candidates, diversity_penalty, padding } = shape;
    let sums = to_write(in_order(sums));
    let tokens = in_order(tokens);
    let found = empty(&sums, [rows / beams, groups * candidates, 4], DType::F32);
    let next = empty(&tokens, [rows, 1], DType::I32);
    let parents = empty(&tokens, [rows], DType::I32);
    beam_step::launch(
        &sums.client,
        count(rows / beams),
        CubeDim::new_1d(LANES as u32),
        tokens.into_tensor_arg(),
        in_order(log_probs).into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        in_order(ends).into_tensor_arg(),
        in_order(done).into_tensor_arg(),
        found.clone().into_tensor_arg(),
        next.clone().into_tensor_arg(),
        parents.clone().into_tensor_arg(),
        InfoLaunch::new(
            rows / beams,
            beams,
            shape.of_group(),
            most,
            candidates,
            diversity_penalty,
            padding as i32,
        ),
    );
    Beams {
        candidates: BurnTensor::from_primitive::<Cube>(found),
        next: BurnTensor::from_primitive::<Cube>(next),
        parents: BurnTensor::from_primitive::<Cube>(parents),
        sums: BurnTensor::from_primitive::<Cube>(sums),
    }
}
