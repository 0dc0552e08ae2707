//! Routing: the experts of each token and their weights (Shazeer et al., 2017,
//! <https://arxiv.org/abs/1701.06538>).
//!
//! Weights are the `chosen` largest scores of experts, in float32: probabilities of the softmax of the
//! router's logits over all experts, or their sigmoids. Normalised weights are divided by their sum. A bias
//! may decide which experts are chosen, and experts may be chosen from the best groups alone.
//! (`MixtralTopKRouter`, `Qwen3MoeTopKRouter`, `JambaTopKRouter`, `Glm4MoeTopkRouter`,
//! `DeepseekV2TopkRouter` of transformers)

use burn::tensor::{DType, Device, Int, Tensor, activation::sigmoid};
use kiln_core::read_back::{self, ReadBack};

use crate::{
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::{Case, Read, Rounding},
        checked::Checked,
        cut::{Extent, cut},
        numbers::{Layout, Plain, Swapped},
    },
};

/// Selection of the `chosen` best experts of each token, in descending order; ties go to the lower index.
///
/// Experts are always valid indices. If a logit is NaN, weights of softmaxes are NaN.
#[derive(Clone, Debug)]
pub struct Route {
    /// `[rows, tokens, experts]`
    pub logits: Tensor<3>,
    /// Number of experts per token: from 1 to all of them.
    pub chosen: usize,
    /// Whether the weights of a token are divided by their sum.
    pub normalised: bool,
    pub scores: Scores,
    /// `[experts]`, cast to float32: numbers that are added to scores to choose experts. They are not part of
    /// weights.
    pub bias: Option<Tensor<1>>,
    pub groups: Option<Groups>,
    /// Factor of all weights.
    pub scale: f32,
}

/// The function from the logits to the scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scores {
    Softmax,
    Sigmoid,
}

/// A choice of groups of adjacent experts before the choice of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Number of groups, which have equally many experts.
    pub groups: usize,
    /// Number of groups to choose experts from; ties go to the lower index.
    pub chosen: usize,
    /// Number of best experts whose scores are added up to that of a group: 1 or 2.
    pub best: usize,
}

impl Route {
    /// Creates a choice by the softmax of all logits, with weights as they are.
    pub fn softmax(logits: Tensor<3>, chosen: usize, normalised: bool) -> Self {
        Self { logits, chosen, normalised, scores: Scores::Softmax, bias: None, groups: None, scale: 1.0 }
    }

    #[cfg(feature = "cube")]
    fn is_for_gpus(&self) -> bool {
        let groups = self.groups.map_or(1, |groups| groups.groups);
        self.logits.dims()[2] <= MOST_EXPERTS && groups <= MOST_GROUPS
    }

    /// Whether experts are chosen by something else than their logits.
    fn has_choice(&self) -> bool {
        self.bias.is_some() || self.groups.is_some()
    }
}

/// The chosen experts of each token, and their weights.
#[derive(Clone, Debug)]
pub struct Routing {
    /// `[rows, tokens, chosen]`, int32: indices of experts.
    pub experts: Tensor<3, Int>,
    /// `[rows, tokens, chosen]`, float32: factors that the outputs of the experts are multiplied by before
    /// they are added up.
    pub weights: Tensor<3>,
}

/// Maximum number of experts that the GPU kernels have workgroup memory for.
#[cfg(feature = "cube")]
pub(crate) const MOST_EXPERTS: usize = 1024;

/// Maximum number of groups of experts, likewise.
#[cfg(feature = "cube")]
const MOST_GROUPS: usize = 128;

impl Kernel for Route {
    const NAME: &'static str = "route";
    type Output = Routing;

    fn checked(self) -> Self {
        let experts = self.logits.dims()[2];
        assert!((1..=experts).contains(&self.chosen), "route: {} of {experts} experts", self.chosen);
        if let Some(Groups { groups, chosen, best }) = self.groups {
            let each = experts.checked_div(groups).filter(|each| each * groups == experts).unwrap_or(0);
            let is_possible = (1..=groups).contains(&chosen) && (1..=2).contains(&best) && best <= each;
            assert!(is_possible, "route: {:?} of {experts} experts", self.groups);
            assert!(self.chosen <= each * chosen, "route: {} experts of {chosen} groups", self.chosen);
        }
        let bias = self.bias.map(|bias| {
            assert_eq!(bias.dims(), [experts], "route: bias");
            bias.cast(DType::F32)
        });
        Self { bias, ..self }
    }

    fn shape(&self) -> Vec<usize> {
        self.logits.dims().into()
    }

    fn reference(self) -> Routing {
        let has_choice = self.has_choice();
        let Self { logits, chosen, normalised, scores, bias, groups, scale } = self;
        let [rows, tokens, experts] = logits.dims();
        let n = rows * tokens;
        let logits = logits.reshape([n, 1, experts]).cast(DType::F32);
        let powers = match scores {
            Scores::Softmax => (logits.clone() - logits.clone().max_dim(2)).exp(),
            Scores::Sigmoid => sigmoid(logits.clone()),
        };
        let mut choice = match (has_choice, scores) {
            (false, _) => logits.clone(),
            (true, Scores::Softmax) => powers.clone() / powers.clone().sum_dim(2),
            (true, Scores::Sigmoid) => powers.clone(),
        };
        if let Some(bias) = bias {
            choice = choice + bias.reshape([1, 1, experts]);
        }
        if let Some(Groups { groups, chosen, best }) = groups {
            let each = experts / groups;
            let members = choice.clone().reshape([n * groups, 1, each]);
            let places = places_of(members.clone());
            let of_group = members.mask_fill(places.greater_equal_elem(best as i64), 0.0).sum_dim(2);
            let places = places_of(of_group.reshape([n, 1, groups]));
            let hidden = places.greater_equal_elem(chosen as i64).reshape([n, groups, 1]);
            let hidden = hidden.expand([n, groups, each]).reshape([n, 1, experts]);
            choice = choice.mask_fill(hidden, f32::NEG_INFINITY);
        }
        let numbers = count_to(experts, &choice.device());
        let places = places_of(choice).expand([n, chosen, experts]);
        let slots = numbers.clone().narrow(2, 0, chosen).swap_dims(1, 2).expand([n, chosen, experts]);
        let is_chosen = places.equal(slots);
        let not_chosen = is_chosen.bool_not();
        let picked =
            powers.clone().expand([n, chosen, experts]).mask_fill(not_chosen.clone(), 0.0).sum_dim(2);
        let number = numbers.expand([n, chosen, experts]).mask_fill(not_chosen, 0).sum_dim(2);
        let picked = match (normalised, scores) {
            (true, _) => picked.clone() / (picked.sum_dim(1) + TINY),
            (false, Scores::Softmax) => picked / powers.sum_dim(2),
            (false, Scores::Sigmoid) => picked,
        };
        Routing {
            // Ranks of NaN are not unique, so the indices of several experts may have been added up.
            experts: number.clamp(0, experts as i64 - 1).reshape([rows, tokens, chosen]),
            weights: (picked * scale).reshape([rows, tokens, chosen]),
        }
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Routing, Self> {
        native::route(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Routing, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{Launch, empty, primitive, strides},
            shaders::route::Info,
        };

        if !self.is_for_gpus() {
            return Err(self);
        }
        let has_choice = self.has_choice();
        let Self { logits, chosen, normalised, scores, bias, groups, scale } = self;
        let [rows, tokens, experts] = logits.dims();
        let logits = primitive(logits);
        let is_biased = bias.is_some();
        let bias = bias.map_or_else(|| empty(&logits, [1], DType::F32), primitive);
        let [bias_stride] = strides(&bias);
        let groups = groups.unwrap_or(Groups { groups: 1, chosen: 1, best: 1 });
        let numbers = empty(&logits, [rows, tokens, chosen], DType::I32);
        let weights = empty(&logits, [rows, tokens, chosen], DType::F32);
        let vectors = rows * tokens;
        let info = Info {
            strides: strides(&logits),
            tokens: tokens as u32,
            vectors: vectors as u32,
            experts: experts as u32,
            chosen: chosen as u32,
            normalised: u32::from(normalised),
            has_choice: u32::from(has_choice),
            is_biased: u32::from(is_biased),
            bias_stride,
            groups: groups.groups as u32,
            chosen_groups: groups.chosen as u32,
            best: groups.best as u32,
            scale,
        };
        let launch = Launch::new(&SHADER, logits.dtype, &numbers.client).with(&[scores as usize]);
        launch.run(vectors, [&logits, &bias, &numbers, &weights], info);
        Ok(Routing {
            experts: Tensor::from_primitive::<Cube>(numbers),
            weights: Tensor::from_primitive::<Cube>(weights),
        })
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Routing, Self> {
        if self.is_for_gpus() { Ok(cube::launch(self)) } else { Err(self) }
    }
}

impl Checked for Route {
    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, _] = self.logits.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        Self { logits: cut(self.logits, &part, 1), ..self }
    }

    fn part_of(Routing { experts, weights }: Routing, part: Extent) -> Routing {
        Routing { experts: cut(experts, &part, 1), weights: cut(weights, &part, 1) }
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |logits: [usize; 3], layout: Layout, chosen: usize, normalised: bool, ties: bool| {
            let case = Case::new((logits, layout, chosen, normalised, ties), move |numbers| {
                let logits = numbers.tensor(logits, layout) * 4.0;
                Self::softmax(if ties { logits.round() } else { logits }, chosen, normalised)
            });
            // The quotient of an exponential, with an argument up to 16, and a sum of them in another order;
            // GPUs round each a few times.
            let n = logits[2] as f64;
            case.within(move |want, Rounding { single, .. }| want.abs() * single * (n.sqrt() + 32.0))
        };
        let mut cases = vec![
            case([1, 1, 1], Plain, 1, false, false),
            case([2, 3, 5], Swapped(0, 1), 3, true, false),
            case([1, 60, 8], Plain, 1, false, false),
            case([2, 30, 8], Plain, 2, true, true),
            case([2, 2, 1000], Plain, 8, true, true),
        ];
        for normalised in [false, true] {
            cases.push(case([1, 1, 8], Plain, 2, normalised, false));
            cases.push(case([4, 4, 128], Swapped(0, 2), 8, normalised, false));
            cases.push(case([2, 2, 300], Swapped(1, 2), 6, normalised, true));
        }
        let others =
            |logits: [usize; 3], scores, chosen, normalised, biased: bool, groups: Option<Groups>| {
                let name = (logits, scores, chosen, normalised, biased, groups);
                let case = Case::new(name, move |numbers| {
                    let bias = biased.then(|| numbers.float32([logits[2]]));
                    let logits = numbers.tensor(logits, Plain) * 4.0;
                    Self { logits, chosen, normalised, scores, bias, groups, scale: 2.5 }
                });
                let n = logits[2] as f64;
                case.within(move |want, Rounding { single, .. }| want.abs() * single * (n.sqrt() + 32.0))
            };
        let groups = |groups, chosen, best| Some(Groups { groups, chosen, best });
        for normalised in [false, true] {
            for (logits, chosen) in [([1, 1, 8], 2), ([3, 5, 64], 6)] {
                cases.push(others(logits, Scores::Sigmoid, chosen, normalised, false, None));
                cases.push(others(logits, Scores::Sigmoid, chosen, normalised, true, None));
                cases.push(others(logits, Scores::Softmax, chosen, normalised, true, None));
                cases.push(others(logits, Scores::Sigmoid, chosen, normalised, true, groups(4, 2, 2)));
                cases.push(others(logits, Scores::Softmax, chosen, normalised, false, groups(4, 3, 1)));
            }
        }
        cases.push(others([2, 2, 256], Scores::Sigmoid, 8, true, true, groups(8, 4, 2)));
        cases
    }
}

/// Smallest sum of weights that are normalised.
const TINY: f32 = 1e-20;

/// Numbers from 0 on, `[1, 1, n]`.
fn count_to(n: usize, device: &Device) -> Tensor<3, Int> {
    Tensor::<3, Int>::ones([1, 1, n], (device, DType::I32)).cumsum(2) - 1
}

/// Number of better scores, from a comparison of all pairs: `[n, 1, scores]`, unchanged.
fn places_of(scores: Tensor<3>) -> Tensor<3, Int> {
    let [n, _, count] = scores.dims();
    let own = scores.clone().swap_dims(1, 2).expand([n, count, count]);
    let others = scores.clone().expand([n, count, count]);
    let numbers = count_to(count, &scores.device());
    let square = |numbers: Tensor<3, Int>| numbers.expand([n, count, count]);
    let earlier = square(numbers.clone()).lower(square(numbers.swap_dims(1, 2)));
    let better = others.clone().greater(own.clone()).bool_or(others.equal(own).bool_and(earlier));
    better.int().cast(DType::I32).sum_dim(2).swap_dims(1, 2)
}

impl Read for Routing {
    fn read(self) -> Vec<ReadBack> {
        vec![read_back::start(self.experts), read_back::start(self.weights)]
    }
}

const SHADER: Shader = Shader {
    name: "route",
    bindings: &[reads("logits"), reads("bias"), writes("chosen"), writes("weights")],
    text: concat!(
        include_str!("../../../../shaders/route.wgsl"),
        include_str!("../../../../shaders/order.wgsl")
    ),
    options: &[|| &["const SIGMOID = false;", "const SIGMOID = true;"]],
};

#[cfg(feature = "cpu")]
mod native {
    use burn::{
        backend::{Flex, flex::FlexTensor},
        tensor::{Tensor, TensorData},
    };

    use super::{Groups, Route, Routing, Scores, TINY};
    use crate::runtime::native::{Storage, Vectors, by_storage, primitive};

    /// Routes tokens on the CPU.
    ///
    /// # Errors
    /// Returns the inputs, for types without an implementation.
    #[allow(clippy::result_large_err, reason = "the inputs are given back")]
    pub(super) fn route(kernel: Route) -> Result<Routing, Route> {
        by_storage!(kernel.logits.dtype(), E => Ok(route_in::<E>(kernel)), else Err(kernel))
    }

    /// Returns the indices of scores in descending order.
    fn in_order(scores: &[f32]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order
    }

    /// Hides the scores of experts that are not in one of the best groups.
    fn in_groups(choice: &[f32], Groups { groups, chosen, best }: Groups) -> Vec<f32> {
        let members = choice.chunks_exact(choice.len() / groups);
        let of_group = |members: &[f32]| in_order(members)[..best].iter().map(|&i| members[i]).sum::<f32>();
        let order = in_order(&members.clone().map(of_group).collect::<Vec<_>>());
        let hidden = |group: usize| !order[..chosen].contains(&group);
        let choose = |(group, members): (usize, &[f32])| {
            members.iter().map(|&x| if hidden(group) { f32::NEG_INFINITY } else { x }).collect::<Vec<_>>()
        };
        members.enumerate().flat_map(choose).collect()
    }

    /// Routes tokens whose logits are stored as `E`.
    fn route_in<E: Storage>(kernel: Route) -> Routing {
        let has_choice = kernel.has_choice();
        let Route { logits, chosen, normalised, scores, bias, groups, scale } = kernel;
        let [rows, tokens, experts] = logits.dims();
        let bias: Option<Vec<f32>> = bias.map(|bias| primitive(bias).into_data().iter().collect());
        let logits = primitive(logits);
        let mut widened = Vec::new();
        let logits = Vectors::of::<E>(&logits, &mut widened);
        let (mut numbers, mut weights) = (Vec::new(), Vec::new());
        for (row, token) in (0..rows).flat_map(|row| (0..tokens).map(move |token| (row, token))) {
            // For `total_cmp`: NaN is the largest, whatever its sign, and -0 equals 0.
            let logit = |&x: &f32| if x.is_nan() { f32::NAN } else { x + 0.0 };
            let logits: Vec<f32> = logits.at(row, token)[..experts].iter().map(logit).collect();
            let largest = logits.iter().copied().max_by(f32::total_cmp).unwrap_or(0.0);
            let power = |&expert: &usize| match scores {
                Scores::Softmax => (logits[expert] - largest).exp(),
                Scores::Sigmoid => 1.0 / (1.0 + (-logits[expert]).exp()),
            };
            let of_all = || (0..experts).map(|expert| power(&expert)).sum::<f32>();
            let choice: Vec<f32> = match has_choice {
                false => logits.clone(),
                true => {
                    let whole = if scores == Scores::Softmax { of_all() } else { 1.0 };
                    let bias = |expert: usize| bias.as_ref().map_or(0.0, |bias| bias[expert]);
                    let choice = (0..experts).map(|expert| power(&expert) / whole + bias(expert)).collect();
                    groups.map_or_else(|| Vec::clone(&choice), |groups| in_groups(&choice, groups))
                }
            };
            let order = in_order(&choice);
            let picked = &order[..chosen];
            let whole: f32 = match (normalised, scores) {
                (true, _) => picked.iter().map(power).sum::<f32>() + TINY,
                (false, Scores::Softmax) => of_all(),
                (false, Scores::Sigmoid) => 1.0,
            };
            weights.extend(picked.iter().map(|expert| power(expert) / whole * scale));
            numbers.extend(picked.iter().map(|&expert| expert as i32));
        }
        let shape = [rows, tokens, chosen];
        let numbers = FlexTensor::from_data(TensorData::new(numbers, shape));
        let weights = FlexTensor::from_data(TensorData::new(weights, shape));
        Routing {
            experts: Tensor::from_primitive::<Flex>(numbers),
            weights: Tensor::from_primitive::<Flex>(weights),
        }
    }
}

#[cfg(feature = "cube")]
mod cube {
    use burn::{
        backend::{Cube, cubecl::dtype_to_storage_type},
        tensor::{DType, Tensor as BurnTensor},
    };
    use cubecl::prelude::*;

    use super::{Groups, MOST_EXPERTS, MOST_GROUPS, Route, Routing, Scores, TINY};
    use crate::{
        linear::activation::cube::sigmoid,
        runtime::launch::{LANES, address_type, count, empty, primitive},
        sampling::order::{LOWEST, is_better, key_of, score_of},
    };

    /// Routes one token per workgroup. `numbers`: indices of experts, `[rows, tokens, chosen]`; `vectors`:
    /// number of tokens in all rows.
    #[cube(launch, address_type = "dynamic")]
    fn route<E: Float>(
        logits: &Tensor<E>,
        bias: &Tensor<f32>,
        numbers: &mut Tensor<i32>,
        weights: &mut Tensor<f32>,
        vectors: usize,
        chosen: usize,
        groups: usize,
        chosen_groups: usize,
        scale: f32,
        #[comptime] normalised: bool,
        #[comptime] scores: Scores,
        #[comptime] is_biased: bool,
        // 0: experts are chosen from all groups.
        #[comptime] best: usize,
        #[define(E)] _elem: ElemType,
    ) {
        let vector = CUBE_POS;
        if vector >= vectors {
            terminate!();
        }
        let lane = UNIT_POS as usize;
        let (tokens, experts) = (logits.shape(1), logits.shape(2));
        let mut keys = Shared::<[u32]>::new_slice(MOST_EXPERTS);
        let mut powers = Shared::<[f32]>::new_slice(MOST_EXPERTS);
        let mut picked = Shared::<[f32]>::new_slice(MOST_EXPERTS);
        let mut of_groups = Shared::<[u32]>::new_slice(MOST_GROUPS);
        let at = vector / tokens * logits.stride(0) + vector % tokens * logits.stride(1);
        let mut e = lane;
        while e < experts {
            keys[e] = key_of(f32::cast_from(logits[at + e * logits.stride(2)]));
            e += LANES;
        }
        sync_cube();
        let mut largest = 0u32;
        for e in 0..experts {
            largest = max(largest, keys[e]);
        }
        let mut e = lane;
        while e < experts {
            if comptime!(scores == Scores::Sigmoid) {
                powers[e] = sigmoid(score_of(keys[e]));
            } else {
                powers[e] = f32::exp(score_of(keys[e]) - score_of(largest));
            }
            e += LANES;
        }
        sync_cube();
        if comptime!(is_biased || best > 0) {
            let mut whole = f32::new(1.0);
            if comptime!(scores == Scores::Softmax) {
                whole = f32::new(0.0);
                for e in 0..experts {
                    whole += powers[e];
                }
            }
            let mut e = lane;
            while e < experts {
                let mut choice = powers[e] / whole;
                if comptime!(is_biased) {
                    choice += bias[e * bias.stride(0)];
                }
                keys[e] = key_of(choice);
                e += LANES;
            }
            sync_cube();
        }
        if comptime!(best > 0) {
            let each = experts / groups;
            let mut group = lane;
            while group < groups {
                let mut first = u32::cast_from(LOWEST);
                let mut second = u32::cast_from(LOWEST);
                for i in 0..each {
                    let key = keys[group * each + i];
                    second = max(second, min(first, key));
                    first = max(first, key);
                }
                if comptime!(best == 2) {
                    first = key_of(score_of(first) + score_of(second));
                }
                of_groups[group] = first;
                group += LANES;
            }
            sync_cube();
            let mut e = lane;
            while e < experts {
                let own = e / each;
                let mut place = 0usize;
                for other in 0..groups {
                    if is_better(of_groups[other], u32::cast_from(other), of_groups[own], u32::cast_from(own))
                    {
                        place += 1;
                    }
                }
                if place >= chosen_groups {
                    keys[e] = LOWEST;
                }
                e += LANES;
            }
            sync_cube();
        }
        let mut e = lane;
        while e < experts {
            let own = keys[e];
            let mut place = 0usize;
            for other in 0..experts {
                if is_better(keys[other], u32::cast_from(other), own, u32::cast_from(e)) {
                    place += 1;
                }
            }
            if place < chosen {
                numbers[vector * chosen + place] = i32::cast_from(e);
                picked[place] = powers[e];
            }
            e += LANES;
        }
        sync_cube();
        let mut i = lane;
        while i < chosen {
            let mut sum = f32::new(0.0);
            if comptime!(normalised) {
                for e in 0..chosen {
                    sum += picked[e];
                }
                sum += TINY;
            } else if comptime!(scores == Scores::Softmax) {
                for e in 0..experts {
                    sum += powers[e];
                }
            } else {
                sum = f32::new(1.0);
            }
            weights[vector * chosen + i] = picked[i] / sum * scale;
            i += LANES;
        }
    }

    pub(super) fn launch(kernel: Route) -> Routing {
        let Route { logits, chosen, normalised, scores, bias, groups, scale } = kernel;
        let [rows, tokens, _] = logits.dims();
        let logits = primitive(logits);
        let is_biased = bias.is_some();
        let bias = bias.map_or_else(|| empty(&logits, [1], DType::F32), primitive);
        let Groups { groups, chosen: chosen_groups, best } =
            groups.unwrap_or(Groups { groups: 1, chosen: 1, best: 0 });
        let numbers = empty(&logits, [rows, tokens, chosen], DType::I32);
        let weights = empty(&logits, [rows, tokens, chosen], DType::F32);
        let elem = dtype_to_storage_type(logits.dtype);
        route::launch(
            &numbers.client,
            count(rows * tokens),
            CubeDim::new_1d(LANES as u32),
            address_type([&logits, &numbers, &weights]),
            logits.into_tensor_arg(),
            bias.into_tensor_arg(),
            numbers.clone().into_tensor_arg(),
            weights.clone().into_tensor_arg(),
            rows * tokens,
            chosen,
            groups,
            chosen_groups,
            scale,
            normalised,
            scores,
            is_biased,
            best,
            elem,
        );
        Routing {
            experts: BurnTensor::from_primitive::<Cube>(numbers),
            weights: BurnTensor::from_primitive::<Cube>(weights),
        }
    }
}
