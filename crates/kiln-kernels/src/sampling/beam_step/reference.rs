//! The step in plain Burn operations.

use burn::tensor::{Bool, DType, Int, Tensor};

use super::{BeamShape, BeamStep, Beams};

/// Larger than any vocabulary, so that a beam and a token fit in one number.
const TOKENS: i64 = 1 << 24;

pub(super) fn step(inputs: BeamStep) -> Beams {
    let BeamStep { tokens, log_probs, sums, ends, done, shape } = inputs;
    let ([rows, most], BeamShape { beams, groups, diversity_penalty, padding, .. }) = (tokens.dims(), shape);
    let (prompts, of_group) = (rows / beams, shape.of_group());
    let tokens = tokens.reshape([prompts, beams, most]);
    let log_probs = log_probs.reshape([prompts, beams, most]);
    let (sums, done) = (sums.reshape([prompts, beams]), done.reshape([prompts, groups]));
    let mut candidates = Vec::new();
    let mut going_on: Vec<GoingOn> = Vec::new();
    for group in 0..groups {
        let begin = group * of_group;
        let tokens = tokens.clone().narrow(1, begin, of_group);
        let mut scores = log_probs.clone().narrow(1, begin, of_group);
        for chosen in going_on.iter().flat_map(|before| before.tokens.clone().split(1, 1)) {
            let is_chosen = tokens.clone().equal(chosen.unsqueeze_dim::<3>(2).expand(tokens.shape()));
            scores = scores.clone().mask_where(is_chosen, scores - diversity_penalty);
        }
        let own_sums = sums.clone().narrow(1, begin, of_group);
        let is_done = done.clone().narrow(1, group, 1).not_equal_elem(0);
        let no_distribution = tokens.clone().lower_elem(0).reshape([prompts, of_group * most]).any_dim(1);
        let stays = is_done.bool_or(no_distribution);
        let found = Found::of(tokens, scores, own_sums.clone(), shape.candidates);
        going_on.push(found.go_on(ends.clone(), own_sums, &stays, padding).behind(begin));
        candidates.push(found.listed(begin, stays));
    }
    let all = |part: fn(&GoingOn) -> Tensor<2, Int>| {
        let parts = going_on.iter().map(part).collect();
        Tensor::cat(parts, 1).cast(DType::I32)
    };
    Beams {
        candidates: Tensor::cat(candidates, 1),
        next: all(|group| group.tokens.clone()).reshape([rows, 1]),
        parents: all(|group| group.parents.clone()).reshape([rows]),
        sums: Tensor::cat(going_on.iter().map(|group| group.sums.clone()).collect(), 1).reshape([rows]),
    }
}

/// The best continuations of a group, in descending order. All fields are `[prompts, candidates]`.
struct Found {
    /// Beams, counted within the group.
    beams: Tensor<2, Int>,
    tokens: Tensor<2, Int>,
    scores: Tensor<2>,
    sums: Tensor<2>,
}

/// The beams of a group after the step. All fields are `[prompts, beams of a group]`.
struct GoingOn {
    tokens: Tensor<2, Int>,
    parents: Tensor<2, Int>,
    sums: Tensor<2>,
}

impl GoingOn {
    /// Renumbers the parents as rows of the prompt, for the group that begins at row `begin`.
    fn behind(self, begin: usize) -> Self {
        Self { parents: self.parents + begin as i64, ..self }
    }
}

impl Found {
    /// Finds the best continuations, from tokens and their scores, `[prompts, beams, most]`, and the sums of
    /// the beams.
    fn of(tokens: Tensor<3, Int>, scores: Tensor<3>, sums: Tensor<2>, candidates: usize) -> Self {
        let [prompts, beams, most] = tokens.dims();
        let shape = [prompts, beams * most];
        let sums =
            (scores.clone() + sums.unsqueeze_dim::<3>(2).expand([prompts, beams, most])).reshape(shape);
        // Ties go to the lower beam, then to the lower token.
        let beam = Tensor::<1, Int>::ones([beams], (&tokens.device(), DType::I32)).cumsum(0) - 1;
        let places = tokens + beam.reshape([1, beams, 1]).expand([prompts, beams, most]) * TOKENS;
        let (places, scores) = (places.reshape(shape), scores.reshape(shape));
        // Continuations that were taken become -inf. Sums of -inf are raised above that, because they may be
        // wanted, too.
        let mut left = sums.clone().clamp_min(f32::MIN);
        let mut found: [Vec<Tensor<2>>; 2] = Default::default();
        let mut at = Vec::new();
        for _ in 0..candidates {
            let is_best = left.clone().equal(left.clone().max_dim(1).expand(shape));
            let first = places.clone().mask_fill(is_best.bool_not(), i64::from(i32::MAX)).min_dim(1);
            let is_it = places.clone().equal(first.clone().expand(shape));
            for (found, all) in found.iter_mut().zip([&scores, &sums]) {
                found.push(all.clone().mask_fill(is_it.clone().bool_not(), 0.0).sum_dim(1));
            }
            left = left.mask_fill(is_it, f32::NEG_INFINITY);
            at.push(first);
        }
        let (at, [scores, sums]) = (Tensor::cat(at, 1), found.map(|found| Tensor::cat(found, 1)));
        Self { beams: at.clone() / TOKENS, tokens: at % TOKENS, scores, sums }
    }

    /// Selects the beams that go on: the first whose token is not in `ends`, and if these are too few, the
    /// first of the others. If a group `stays`, its beams are fed `padding` and keep their sums.
    fn go_on(&self, ends: Tensor<1, Int>, sums: Tensor<2>, stays: &Tensor<2, Bool>, padding: u32) -> GoingOn {
        let ([prompts, candidates], of_group) = (self.tokens.dims(), sums.dims()[1]);
        let wide = [prompts, candidates, ends.dims()[0]];
        let is_end = self
            .tokens
            .clone()
            .unsqueeze_dim::<3>(2)
            .expand(wide)
            .equal(ends.reshape([1, 1, wide[2]]).expand(wide));
        let is_end = is_end.any_dim(2).reshape([prompts, candidates]).int();
        let goes_on = -(is_end.clone() - 1);
        // The place of each continuation, with those that go on first.
        let behind = goes_on.clone().sum_dim(1).expand([prompts, candidates]) + is_end.clone().cumsum(1);
        let place = goes_on.clone().cumsum(1).mask_where(is_end.not_equal_elem(0), behind) - 1;
        let picked = |beam: usize| place.clone().not_equal_elem(beam as i64);
        let ints = |all: &Tensor<2, Int>| {
            Tensor::cat(
                (0..of_group).map(|beam| all.clone().mask_fill(picked(beam), 0).sum_dim(1)).collect(),
                1,
            )
        };
        let own =
            (0..of_group).map(|beam| self.sums.clone().mask_fill(picked(beam), 0.0).sum_dim(1)).collect();
        let stays = stays.clone().expand([prompts, of_group]);
        let parents = ints(&self.beams);
        let place = Tensor::<1, Int>::ones([of_group], (&parents.device(), parents.dtype())).cumsum(0) - 1;
        GoingOn {
            tokens: ints(&self.tokens).mask_fill(stays.clone(), i64::from(padding)),
            parents: parents.mask_where(stays.clone(), place.unsqueeze::<2>().expand([prompts, of_group])),
            sums: Tensor::cat(own, 1).mask_where(stays, sums),
        }
    }

    /// Lists the continuations as `[prompts, candidates, 4]`.
    fn listed(self, begin: usize, stays: Tensor<2, Bool>) -> Tensor<3> {
        let stays = stays.expand(self.tokens.dims());
        let ints =
            |ints: Tensor<2, Int>, none: i64| ints.mask_fill(stays.clone(), none).float().cast(DType::F32);
        let floats = |floats: Tensor<2>| floats.mask_fill(stays.clone(), 0.0);
        let (beams, tokens) = (ints(self.beams + begin as i64, 0), ints(self.tokens, -1));
        Tensor::stack(vec![beams, tokens, floats(self.scores), floats(self.sums)], 2)
    }
}
