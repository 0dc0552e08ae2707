//! A mixture of experts (Shazeer et al., 2017, <https://arxiv.org/abs/1701.06538>): several feed-forwards.
//! A router chooses a few of them for each token and adds up their outputs with its weights.
//! (`MixtralSparseMoeBlock` of transformers)

mod config;
mod elsewhere;
mod host;

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor, activation::sigmoid};
use kiln_core::{Result, model::ExpertTraffic};
use kiln_kernels::{ExpertLinear, Gated, Kernels, MatrixStack, NormOrder, Route, Routing, WeightedSum};

pub(crate) use self::{
    config::{ExpertNames, ExpertsConfig, RouterConfig, RouterNorm, SharedConfig},
    host::COPIED_AT_ONCE,
};
use self::{elsewhere::ExpertsElsewhere, host::HostExperts};
use super::{
    linear::Linear,
    mlp::{Between, Mlp, MlpConfig},
    norm::Norm,
};
use crate::{ExpertPlace, Part, Rows, Weights};

/// A router, and the experts that it chooses from.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    router: Linear,
    /// Projections of hidden states to vectors for experts, and back.
    latent: Option<[Linear; 2]>,
    /// Numbers that are added to scores to choose experts, in float32.
    correction: Option<Tensor<1>>,
    /// The norm of routed vectors, and a factor of the weights of each expert, in float32.
    routed: Option<(Norm, Tensor<1>)>,
    experts: Arc<Placed>,
    shared: Option<SharedExpert>,
    config: ExpertsConfig,
}

/// The location of the experts' weights.
#[derive(Debug)]
enum Placed {
    OnDevice(Stacks),
    InHostMemory(HostExperts),
    Elsewhere(ExpertsElsewhere),
}

/// The weights of all experts, on one device.
#[derive(Debug)]
struct Stacks {
    gate_up_proj: GateUp,
    /// Down projections `[experts, hidden, intermediate]`.
    down_proj: MatrixStack,
    biases: Option<Biases>,
    between: Between,
}

/// Biases of all experts.
#[derive(Clone, Debug)]
struct Biases {
    /// `[experts, 2 · intermediate]`, the gate's before those of `up_proj`.
    gate_up: Tensor<2>,
    /// `[experts, hidden]`
    down: Tensor<2>,
}

impl Biases {
    fn load(
        weights: &mut dyn Weights,
        of_all: &[Names],
        [experts, intermediate, hidden]: [usize; 3],
    ) -> Result<Self> {
        let of = |part: &Part| {
            let module = part.name.strip_suffix(".weight").unwrap_or(&part.name);
            Part::new(format!("{module}.bias"), part.rows)
        };
        let both: Vec<_> = of_all.iter().flat_map(Names::inputs).map(|part| of(&part)).collect();
        let down: Vec<_> = of_all.iter().map(|names| of(&names.down)).collect();
        let width = both.len() / experts * intermediate;
        Ok(Self {
            gate_up: weights.vector(&both)?.reshape([experts, width]),
            down: weights.vector(&down)?.reshape([experts, hidden]),
        })
    }

    fn bytes(&self) -> usize {
        let bytes = |bias: &Tensor<2>| bias.shape().num_elements() * bias.dtype().size();
        bytes(&self.gate_up) + bytes(&self.down)
    }
}

/// Adds to each vector `[rows, pairs, width]` the bias of its expert, one of `biases` `[experts, width]`.
fn add_biases(x: Tensor<3>, biases: &Tensor<2>, experts: &Tensor<3, Int>) -> Tensor<3> {
    let ([rows, pairs, width], count) = (x.dims(), experts.shape().num_elements());
    x + biases.clone().select(0, experts.clone().reshape([count])).reshape([rows, pairs, width])
}

/// The input projections of experts: `gate_proj` and `up_proj`.
#[derive(Debug)]
enum GateUp {
    /// One stack `[experts, 2 · intermediate, hidden]`, the gate's rows before those of `up_proj`; without a
    /// gate `[experts, intermediate, hidden]`.
    Joined(MatrixStack),
    /// Two stacks `[experts, intermediate, hidden]`, for projections packed in different formats.
    Apart([MatrixStack; 2]),
}

impl GateUp {
    fn load(
        weights: &mut dyn Weights,
        of_all: &[Names],
        [experts, intermediate, hidden]: [usize; 3],
    ) -> Result<Self> {
        let stack = |weights: &mut dyn Weights, parts: Vec<Part>| {
            let rows = parts.len() / experts * intermediate;
            weights.stack(&parts, [experts, rows, hidden])
        };
        // All experts are packed like the first one.
        let first = of_all.first().map_or_else(Vec::new, Names::inputs);
        if weights.runs(&first, hidden)?.len() <= 1 {
            let all = of_all.iter().flat_map(Names::inputs).collect();
            return Ok(Self::Joined(stack(weights, all)?));
        }
        let gates = of_all.iter().filter_map(|names| names.gate.clone()).collect();
        let ups = of_all.iter().map(|names| names.up.clone()).collect();
        Ok(Self::Apart([stack(weights, gates)?, stack(weights, ups)?]))
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Joined(both) => both.bytes(),
            Self::Apart(stacks) => stacks.iter().map(MatrixStack::bytes).sum(),
        }
    }
}

/// The expert that all tokens use. Its output is multiplied by the sigmoid of `gate`, if there is one.
#[derive(Clone, Debug)]
struct SharedExpert {
    /// Gate `[1, hidden]`.
    gate: Option<Linear>,
    mlp: Mlp,
}

/// The tensors of one expert in a checkpoint.
struct Names {
    gate: Option<Part>,
    up: Part,
    down: Part,
}

impl Names {
    /// The matrices of the first projection.
    fn inputs(&self) -> Vec<Part> {
        self.gate.iter().chain([&self.up]).cloned().collect()
    }
}

impl Experts {
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: &ExpertsConfig,
        mlp: &MlpConfig,
    ) -> Result<Self> {
        let (names, hidden) = (config.names, mlp.hidden);
        let [experts, intermediate, width] = config.widths(hidden);
        let expert = |expert: usize| {
            let part = |part, rows| Part::new(format!("{name}.experts.{expert}.{part}.weight"), rows);
            Names {
                gate: names.gate.map(|gate| part(gate, intermediate)),
                up: part(names.up, intermediate),
                down: part(names.down, width),
            }
        };
        let of_all: Vec<_> = (0..experts).map(expert).collect();
        let router = format!("{name}.{}", names.router);
        let router = match config.router.float32 {
            true => {
                let numbers = weights.float32(&format!("{router}.weight"), &[experts, hidden])?;
                Linear::from(Rows::from(numbers.reshape([experts, hidden])))
            }
            false => Linear::load(weights, &router, [hidden, experts], config.bias)?,
        };
        let correction = config
            .router
            .correction
            .map(|correction| weights.float32(&format!("{name}.{correction}"), &[experts]));
        let routed = config.router.norm.map(|RouterNorm { eps, names: [of_norm, of_experts] }| {
            let scale = weights.vector(&[Part::new(format!("{name}.{of_norm}"), hidden)])?;
            let weight = scale * (hidden as f64).powf(-0.5);
            let factors = weights.float32(&format!("{name}.{of_experts}"), &[experts])?;
            let norm = Norm::Rms { weight, eps, order: NormOrder::CastThenScale };
            Ok::<_, kiln_core::Error>((norm, factors.reshape([experts])))
        });
        let shared = config.shared.map(|shared| {
            let mlp = MlpConfig { intermediate: shared.width, ..*mlp };
            let gate = format!("{name}.shared_expert_gate");
            let gate = shared.gated.then(|| Linear::load(weights, &gate, [hidden, 1], false)).transpose()?;
            let module = format!("{name}.{}", shared.name);
            let mlp = match names.gate {
                Some(_) => Mlp::gated(weights, &module, &mlp)?,
                None => {
                    let parts = [names.up, names.down].map(|part| format!("{module}.{part}"));
                    Mlp::plain(weights, parts, &mlp)?
                }
            };
            Ok(SharedExpert { gate, mlp })
        });
        let latent = config.latent.map(|latent| {
            let part = |part: &str| format!("{name}.{part}");
            let into = Linear::load(weights, &part("fc1_latent_proj"), [hidden, latent], mlp.bias)?;
            Ok([into, Linear::load(weights, &part("fc2_latent_proj"), [latent, hidden], mlp.bias)?])
        });
        Ok(Self {
            router,
            latent: latent.transpose()?,
            correction: correction.transpose()?,
            routed: routed.transpose()?,
            shared: shared.transpose()?,
            experts: Arc::new(match weights.expert_place() {
                ExpertPlace::Device => Placed::OnDevice(Stacks::load(weights, of_all, config, mlp)?),
                ExpertPlace::HostMemory { resident } => {
                    Placed::InHostMemory(HostExperts::load(weights, of_all, resident, config, mlp)?)
                }
                ExpertPlace::Elsewhere(target) => {
                    weights.load_to_other(Some(&target));
                    let stacks = Stacks::load(weights, of_all, config, mlp);
                    weights.load_to_other(None);
                    Placed::Elsewhere(ExpertsElsewhere::new(stacks?, target.kernels))
                }
            }),
            config: *config,
        })
    }

    /// The projections that an adapter may change: those that are not of routed experts.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        let shared =
            self.shared.iter_mut().flat_map(|shared| shared.gate.iter_mut().chain(shared.mlp.linears()));
        let latent = self.latent.iter_mut().flatten();
        std::iter::once(&mut self.router).chain(latent).chain(shared).collect()
    }

    /// Returns the size of all weights in bytes, on the device and in host memory.
    pub(crate) fn bytes(&self) -> usize {
        let shared =
            |SharedExpert { gate, mlp }: &SharedExpert| gate.as_ref().map_or(0, Linear::bytes) + mlp.bytes();
        let latent = self.latent.iter().flatten().map(Linear::bytes).sum::<usize>();
        let vector = |vector: &Tensor<1>| vector.shape().num_elements() * vector.dtype().size();
        let correction = self.correction.as_ref().map_or(0, vector);
        let routed = self.routed.as_ref().map_or(0, |(norm, factors)| norm.bytes() + vector(factors));
        self.router.bytes()
            + correction
            + routed
            + latent
            + self.expert_bytes()
            + self.shared.as_ref().map_or(0, shared)
    }

    /// Returns the size in bytes of the experts that a token does not use.
    pub(crate) fn idle_bytes(&self) -> usize {
        let ExpertsConfig { experts, chosen, .. } = self.config;
        self.expert_bytes() / experts * (experts - chosen)
    }

    /// Returns the size in bytes of the experts in host memory.
    pub(crate) fn host_bytes(&self) -> usize {
        match &*self.experts {
            Placed::OnDevice(_) => 0,
            Placed::InHostMemory(experts) => experts.bytes(),
            Placed::Elsewhere(experts) => experts.stacks().bytes(),
        }
    }

    /// Returns the statistics of copies; `None` if experts are computed where they are.
    pub(crate) fn traffic(&self) -> Option<ExpertTraffic> {
        match &*self.experts {
            Placed::OnDevice(_) | Placed::Elsewhere(_) => None,
            Placed::InHostMemory(experts) => Some(experts.traffic()),
        }
    }

    fn expert_bytes(&self) -> usize {
        match &*self.experts {
            Placed::OnDevice(stacks) => stacks.bytes(),
            Placed::InHostMemory(experts) => experts.bytes(),
            Placed::Elsewhere(experts) => experts.stacks().bytes(),
        }
    }

    /// Applies the mixture to `x`, and adds `residual` if there is one. Experts are chosen by `routed`.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    ///
    /// # Errors
    /// With experts in host memory: device errors from reading the routing and from copying weights or
    /// vectors.
    pub(crate) fn forward(
        &self,
        residual: Option<Tensor<3>>,
        routed: Tensor<3>,
        x: Tensor<3>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let ExpertsConfig { chosen, router, .. } = self.config;
        let RouterConfig { scores, float32, normalised, groups, scale, .. } = router;
        let routed = match &self.routed {
            Some((norm, _)) => norm.forward(routed, kernels),
            None => routed,
        };
        let routed = if float32 { routed.cast(DType::F32) } else { routed };
        let logits = self.router.forward(routed, kernels);
        let Routing { experts, weights } = kernels.run(Route {
            logits,
            chosen,
            normalised,
            scores,
            bias: self.correction.clone(),
            groups,
            scale,
        });
        let weights = match &self.routed {
            Some((_, factors)) => {
                let [batch, tokens, chosen] = experts.dims();
                let own = factors.clone().select(0, experts.clone().reshape([batch * tokens * chosen]));
                weights.clone() * own.reshape([batch, tokens, chosen]).cast(weights.dtype())
            }
            None => weights,
        };
        let residual = match &self.shared {
            None => residual,
            Some(shared) => Some(shared.forward(residual, x.clone(), kernels)),
        };
        let x = match &self.latent {
            Some([into, _]) => into.forward(x, kernels),
            None => x,
        };
        let routing = Routing { experts, weights };
        let (own, after) = match &self.latent {
            Some(_) => (None, residual),
            None => (residual, None),
        };
        let sum = match &*self.experts {
            Placed::OnDevice(stacks) => {
                let forward = |x, experts| Ok(stacks.forward(x, experts, kernels));
                self.mixed(x, routing, own, kernels, forward)?
            }
            Placed::InHostMemory(host) => {
                let forward = |x, experts| host.forward(x, experts, kernels);
                self.mixed(x, routing, own, kernels, forward)?
            }
            Placed::Elsewhere(there) => {
                let sum = there.compute(x, routing, |x, routing, kernels| {
                    let forward = |x, experts| Ok(there.stacks().forward(x, experts, kernels));
                    self.mixed(x, routing, None, kernels, forward)
                })?;
                match own {
                    Some(residual) => residual + sum,
                    None => sum,
                }
            }
        };
        Ok(match &self.latent {
            Some([_, out]) => out.forward_onto(after, sum, kernels),
            None => sum,
        })
    }

    /// Applies the chosen experts to `x` by `forward`, and adds up what they return, and `residual`.
    fn mixed(
        &self,
        x: Tensor<3>,
        Routing { experts, weights }: Routing,
        residual: Option<Tensor<3>>,
        kernels: &Kernels,
        forward: impl FnOnce(Tensor<4>, Tensor<3, Int>) -> Result<Tensor<4>>,
    ) -> Result<Tensor<3>> {
        let ([batch, tokens, width], [.., chosen]) = (x.dims(), experts.dims());
        let x = x.reshape([batch, tokens, 1, width]);
        let (x, weights) = match self.config.router.weighs_inputs {
            true => {
                let ones = weights.ones_like();
                (x.clone() * weights.cast(x.dtype()).reshape([batch, tokens, chosen, 1]), ones)
            }
            false => (x, weights),
        };
        let x = forward(x, experts)?;
        Ok(kernels.run(WeightedSum { x, weights, residual }))
    }
}

impl Stacks {
    fn load(
        weights: &mut dyn Weights,
        of_all: Vec<Names>,
        config: &ExpertsConfig,
        mlp: &MlpConfig,
    ) -> Result<Self> {
        let widths = config.widths(mlp.hidden);
        let biases = match config.bias {
            true => Some(Biases::load(weights, &of_all, widths)?),
            false => None,
        };
        let gate_up_proj = GateUp::load(weights, &of_all, widths)?;
        let down: Vec<_> = of_all.into_iter().map(|names| names.down).collect();
        let [experts, intermediate, hidden] = widths;
        let down_proj = weights.stack(&down, [experts, hidden, intermediate])?;
        Ok(Self { gate_up_proj, down_proj, biases, between: config.between(mlp) })
    }

    fn bytes(&self) -> usize {
        let biases = self.biases.as_ref().map_or(0, Biases::bytes);
        self.gate_up_proj.bytes() + self.down_proj.bytes() + biases
    }

    /// Applies the chosen experts to each token.
    ///
    /// # Shapes
    /// `x`: `[batch, tokens, 1 or chosen, hidden]`; `experts`: `[batch, tokens, chosen]`; the result:
    /// `[batch, tokens, chosen, hidden]`.
    fn forward(&self, x: Tensor<4>, experts: Tensor<3, Int>, kernels: &Kernels) -> Tensor<4> {
        let ([batch, tokens, _, hidden], [.., chosen]) = (x.dims(), experts.dims());
        let project = |x: Tensor<4>, weight: &MatrixStack| {
            kernels.run(ExpertLinear { x, weight: weight.clone(), experts: experts.clone() })
        };
        let into = |weight: &MatrixStack| {
            let y = project(x.clone(), weight);
            let width = y.dims()[3];
            y.reshape([batch, tokens * chosen, width])
        };
        let joined = || match &self.gate_up_proj {
            GateUp::Joined(both) => into(both),
            GateUp::Apart([gate, up]) => Tensor::cat(vec![into(gate), into(up)], 2),
        };
        let inner = match (&self.gate_up_proj, self.between, &self.biases) {
            (GateUp::Apart([gate, up]), Between::Gate(by), None) => {
                kernels.run(Gated { gate: into(gate), up: into(up), by })
            }
            (.., None) => self.between.apply(joined(), kernels),
            (.., Some(biases)) => {
                self.between.apply(add_biases(joined(), &biases.gate_up, &experts), kernels)
            }
        };
        let intermediate = inner.dims()[2];
        let y = project(inner.reshape([batch, tokens, chosen, intermediate]), &self.down_proj);
        match &self.biases {
            Some(biases) => {
                let y = y.reshape([batch, tokens * chosen, hidden]);
                add_biases(y, &biases.down, &experts).reshape([batch, tokens, chosen, hidden])
            }
            None => y,
        }
    }
}

impl SharedExpert {
    /// Applies the shared expert to `x`, and adds `residual` if there is one.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    fn forward(&self, residual: Option<Tensor<3>>, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let [batch, tokens, hidden] = x.dims();
        let Some(gate) = &self.gate else { return self.mlp.forward(residual, x, kernels) };
        let weights = sigmoid(gate.forward(x.clone(), kernels));
        let x = self.mlp.forward(None, x, kernels).reshape([batch, tokens, 1, hidden]);
        kernels.run(WeightedSum { x, weights, residual })
    }
}
