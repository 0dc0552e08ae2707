//! A mixture of experts (Shazeer et al., 2017, <https://arxiv.org/abs/1701.06538>): several gated feed-forwards, of which each token goes to
//! the few that a router chooses for it. What they make of it is added up, by the router's weights. (`MixtralSparseMoeBlock` of
//! transformers)

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::{Activation, ExpertLinear, Gated, Kernels, MatrixStack, Route, Routing, WeightedSum};

use super::{linear::Linear, mlp::MlpConfig};
use crate::{ConfigFile, Part, Weights};

/// What architectures say of a mixture of experts. The rest is in [`MlpConfig`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsConfig {
    pub(crate) experts: usize,
    /// Experts that a token goes to.
    pub(crate) chosen: usize,
    /// Width of each expert.
    pub(crate) intermediate: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub(crate) normalised: bool,
    pub(crate) names: ExpertNames,
}

/// Names of the parts of a checkpoint, where architectures differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    pub(crate) router: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

impl ExpertNames {
    /// As most name them.
    pub(crate) fn new(router: &'static str) -> Self {
        Self { router, gate: "gate_proj", up: "up_proj", down: "down_proj" }
    }
}

impl ExpertsConfig {
    /// Says whether the numbers of experts are possible; `field` is what their number is called.
    pub(crate) fn check(&self, config: &ConfigFile, field: &str) -> Result<()> {
        // Far above any model, far below where products of two overflow.
        config.check(field, self.experts, 1 << 14)?;
        config.check("num_experts_per_tok", self.chosen, self.experts)?;
        config.check("moe_intermediate_size", self.intermediate, 1 << 24)
    }
}

#[derive(Debug)]
pub(crate) struct Experts {
    router: Linear,
    /// `[experts, 2 · intermediate, hidden]`: `gate_proj` and `up_proj`, one above the other
    gate_up_proj: MatrixStack,
    /// `[experts, hidden, intermediate]`
    down_proj: MatrixStack,
    activation: Activation,
    config: ExpertsConfig,
}

impl Experts {
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: &ExpertsConfig,
        mlp: &MlpConfig,
    ) -> Result<Self> {
        let &ExpertsConfig { experts, intermediate, names, .. } = config;
        let hidden = mlp.hidden;
        let parts = |names: &[&str], rows: usize| -> Vec<Part> {
            let of = |expert| {
                names
                    .iter()
                    .map(move |part| Part::new(format!("{name}.experts.{expert}.{part}.weight"), rows))
            };
            (0..experts).flat_map(of).collect()
        };
        let gate_up = parts(&[names.gate, names.up], intermediate);
        let down = parts(&[names.down], hidden);
        Ok(Self {
            router: Linear::load(weights, &format!("{name}.{}", names.router), [hidden, experts], false)?,
            gate_up_proj: weights.stack(&gate_up, [experts, 2 * intermediate, hidden])?,
            down_proj: weights.stack(&down, [experts, hidden, intermediate])?,
            activation: mlp.activation,
            config: *config,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.router.bytes() + self.gate_up_proj.bytes() + self.down_proj.bytes()
    }

    /// Bytes of the experts that a token does not go to.
    pub(crate) fn idle_bytes(&self) -> usize {
        let ExpertsConfig { experts, chosen, .. } = self.config;
        (self.gate_up_proj.bytes() + self.down_proj.bytes()) / experts * (experts - chosen)
    }

    /// What they make of `x`, added to `residual` where there is one.
    ///
    /// # Shapes
    /// `[batch, tokens, hidden]`, all of them
    pub(crate) fn forward(&self, residual: Option<Tensor<3>>, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let [batch, tokens, hidden] = x.dims();
        let ExpertsConfig { chosen, intermediate, normalised, .. } = self.config;
        let logits = self.router.forward(x.clone(), kernels);
        let Routing { experts, weights } = kernels.run(Route { logits, chosen, normalised });
        let project = |x: Tensor<4>, weight: &MatrixStack| {
            kernels.run(ExpertLinear { x, weight: weight.clone(), experts: experts.clone() })
        };
        let both = project(x.reshape([batch, tokens, 1, hidden]), &self.gate_up_proj);
        let both = both.reshape([batch, tokens * chosen, 2 * intermediate]);
        let (gate, up) =
            (both.clone().narrow(2, 0, intermediate), both.narrow(2, intermediate, intermediate));
        let inner = kernels.run(Gated { gate, up, activation: self.activation });
        let x = project(inner.reshape([batch, tokens, chosen, intermediate]), &self.down_proj);
        kernels.run(WeightedSum { x, weights, residual })
    }
}
