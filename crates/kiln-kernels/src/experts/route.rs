//! Routing: the experts of each token and their weights (Shazeer et al., 2017,
//! <https://arxiv.org/abs/1701.06538>).
//!
//! Weights are the `chosen` largest probabilities of the softmax of the router's logits over all experts, in
//! float32. Normalised weights are divided by their sum. (`MixtralTopKRouter`, `Qwen3MoeTopKRouter`,
//! `JambaTopKRouter` of transformers)

use burn::tensor::{DType, Int, Tensor};
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

/// Selection of the `chosen` likeliest experts of each token, in descending order; ties go to the lower
/// index.
///
/// Experts are always valid indices. Weights are NaN if a logit is NaN.
#[derive(Clone, Debug)]
pub struct Route {
    /// `[rows, tokens, experts]`
    pub logits: Tensor<3>,
    /// Number of experts per token: from 1 to all of them.
    pub chosen: usize,
    /// Whether the weights of a token are divided by their sum.
    pub normalised: bool,
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

impl Kernel for Route {
    const NAME: &'static str = "route";
    type Output = Routing;

    fn checked(self) -> Self {
        let experts = self.logits.dims()[2];
        assert!((1..=experts).contains(&self.chosen), "route: {} of {experts} experts", self.chosen);
        self
    }

    fn shape(&self) -> Vec<usize> {
        self.logits.dims().into()
    }

    fn reference(self) -> Routing {
        let Self { logits, chosen, normalised } = self;
        let [rows, tokens, experts] = logits.dims();
        let n = rows * tokens;
        let logits = logits.reshape([n, 1, experts]).cast(DType::F32);
        let largest = logits.clone().max_dim(2);
        let powers = (logits.clone() - largest).exp();
        // The rank of an expert is the number of better ones, from a comparison of all pairs of experts.
        let own = logits.clone().swap_dims(1, 2).expand([n, experts, experts]);
        let others = logits.clone().expand([n, experts, experts]);
        let numbers = Tensor::<3, Int>::ones([1, 1, experts], (&logits.device(), DType::I32)).cumsum(2) - 1;
        let square = |numbers: Tensor<3, Int>| numbers.expand([n, experts, experts]);
        let earlier = square(numbers.clone()).lower(square(numbers.clone().swap_dims(1, 2)));
        let better = others.clone().greater(own.clone()).bool_or(others.equal(own).bool_and(earlier));
        let places = better.int().cast(DType::I32).sum_dim(2).swap_dims(1, 2).expand([n, chosen, experts]);
        let slots = numbers.clone().narrow(2, 0, chosen).swap_dims(1, 2).expand([n, chosen, experts]);
        let is_chosen = places.equal(slots);
        let not_chosen = is_chosen.bool_not();
        let picked =
            powers.clone().expand([n, chosen, experts]).mask_fill(not_chosen.clone(), 0.0).sum_dim(2);
        let number = numbers.expand([n, chosen, experts]).mask_fill(not_chosen, 0).sum_dim(2);
        let whole = if normalised { picked.clone().sum_dim(1) } else { powers.sum_dim(2) };
        Routing {
            // Ranks of NaN are not unique, so the indices of several experts may have been added up.
            experts: number.clamp(0, experts as i64 - 1).reshape([rows, tokens, chosen]),
            weights: (picked / whole).reshape([rows, tokens, chosen]),
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

        let Self { logits, chosen, normalised } = self;
        let [rows, tokens, experts] = logits.dims();
        if experts > MOST_EXPERTS {
            return Err(Self { logits, chosen, normalised });
        }
        let logits = primitive(logits);
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
        };
        let launch = Launch::new(&SHADER, logits.dtype, &numbers.client);
        launch.run(vectors, [&logits, &numbers, &weights], info);
        Ok(Routing {
            experts: Tensor::from_primitive::<Cube>(numbers),
            weights: Tensor::from_primitive::<Cube>(weights),
        })
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Routing, Self> {
        if self.logits.dims()[2] > MOST_EXPERTS { Err(self) } else { Ok(cube::launch(self)) }
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
                Self { logits: if ties { logits.round() } else { logits }, chosen, normalised }
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
        cases
    }
}

impl Read for Routing {
    fn read(self) -> Vec<ReadBack> {
        vec![read_back::start(self.experts), read_back::start(self.weights)]
    }
}

const SHADER: Shader = Shader {
    name: "route",
    bindings: &[reads("logits"), writes("chosen"), writes("weights")],
    text: concat!(
        include_str!("../../../../shaders/route.wgsl"),
        include_str!("../../../../shaders/order.wgsl")
    ),
    options: &[],
};

#[cfg(feature = "cpu")]
mod native {
    use burn::{
        backend::{Flex, flex::FlexTensor},
        tensor::{Tensor, TensorData},
    };

    use super::{Route, Routing};
    use crate::runtime::native::{Storage, Vectors, by_storage, primitive};

    /// Routes tokens on the CPU.
    ///
    /// # Errors
    /// Returns the inputs, for types without an implementation.
    #[allow(clippy::result_large_err, reason = "the inputs are given back")]
    pub(super) fn route(kernel: Route) -> Result<Routing, Route> {
        by_storage!(kernel.logits.dtype(), E => Ok(route_in::<E>(kernel)), else Err(kernel))
    }

    /// Routes tokens whose logits are stored as `E`.
    fn route_in<E: Storage>(Route { logits, chosen, normalised }: Route) -> Routing {
        let [rows, tokens, experts] = logits.dims();
        let logits = primitive(logits);
        let mut widened = Vec::new();
        let logits = Vectors::of::<E>(&logits, &mut widened);
        let (mut numbers, mut weights) = (Vec::new(), Vec::new());
        for (row, token) in (0..rows).flat_map(|row| (0..tokens).map(move |token| (row, token))) {
            // For `total_cmp`: NaN is the largest, whatever its sign, and -0 equals 0.
            let logit = |&x: &f32| if x.is_nan() { f32::NAN } else { x + 0.0 };
            let logits: Vec<f32> = logits.at(row, token)[..experts].iter().map(logit).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let largest = logits[order[0]];
            let power = |&expert: &usize| (logits[expert] - largest).exp();
            let picked = &order[..chosen];
            let whole: f32 = match normalised {
                true => picked.iter().map(power).sum(),
                false => (0..experts).map(|expert| power(&expert)).sum(),
            };
            weights.extend(picked.iter().map(|expert| power(expert) / whole));
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

    use super::{MOST_EXPERTS, Route, Routing};
    use crate::{
        runtime::launch::{LANES, address_type, count, empty, primitive},
        sampling::order::{is_better, key_of, score_of},
    };

    /// Routes one token per workgroup. `numbers`: indices of experts, `[rows, tokens, chosen]`; `vectors`:
    /// number of tokens in all rows.
    #[cube(launch, address_type = "dynamic")]
    fn route<E: Float>(
        logits: &Tensor<E>,
        numbers: &mut Tensor<i32>,
        weights: &mut Tensor<f32>,
        vectors: usize,
        chosen: usize,
        #[comptime] normalised: bool,
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
            powers[e] = f32::exp(score_of(keys[e]) - score_of(largest));
            e += LANES;
        }
        sync_cube();
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
            } else {
                for e in 0..experts {
                    sum += powers[e];
                }
            }
            weights[vector * chosen + i] = picked[i] / sum;
            i += LANES;
        }
    }

    pub(super) fn launch(Route { logits, chosen, normalised }: Route) -> Routing {
        let [rows, tokens, _] = logits.dims();
        let logits = primitive(logits);
        let numbers = empty(&logits, [rows, tokens, chosen], DType::I32);
        let weights = empty(&logits, [rows, tokens, chosen], DType::F32);
        let elem = dtype_to_storage_type(logits.dtype);
        route::launch(
            &numbers.client,
            count(rows * tokens),
            CubeDim::new_1d(LANES as u32),
            address_type([&logits, &numbers, &weights]),
            logits.into_tensor_arg(),
            numbers.clone().into_tensor_arg(),
            weights.clone().into_tensor_arg(),
            rows * tokens,
            chosen,
            normalised,
            elem,
        );
        Routing {
            experts: BurnTensor::from_primitive::<Cube>(numbers),
            weights: BurnTensor::from_primitive::<Cube>(weights),
        }
    }
}
