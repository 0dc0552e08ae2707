//! Settings of a mixture of experts.

use kiln_core::Result;
use kiln_kernels::{Gate, Groups, Scores};

use crate::{
    ConfigFile,
    nn::mlp::{Between, MlpConfig},
};

/// Settings of a mixture of experts. The rest is in [`MlpConfig`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsConfig {
    pub(crate) experts: usize,
    /// Number of experts per token.
    pub(crate) chosen: usize,
    /// Width of each expert.
    pub(crate) intermediate: usize,
    /// Numbers of the vectors that experts see and return, if these are projections of hidden states and are
    /// projected back (`fc1_latent_proj`, `fc2_latent_proj`); `None` for hidden states themselves.
    pub(crate) latent: Option<usize>,
    /// The shared expert, which all tokens use; `None` if there is none.
    pub(crate) shared: Option<SharedConfig>,
    pub(crate) router: RouterConfig,
    /// Whether the router and the experts have biases.
    pub(crate) bias: bool,
    /// The gate of the experts, if it is not the activation in [`MlpConfig`].
    pub(crate) gate: Option<Gate>,
    pub(crate) names: ExpertNames,
}

/// Settings of the choice of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterConfig {
    pub(crate) scores: Scores,
    /// Whether logits are computed in float32, whatever the type of the weights.
    pub(crate) float32: bool,
    /// Whether the weights of a token's experts are divided by their sum.
    pub(crate) normalised: bool,
    /// Name of a tensor beside the router's that is added to scores to choose experts.
    pub(crate) correction: Option<&'static str>,
    pub(crate) groups: Option<Groups>,
    /// Factor of the weights.
    pub(crate) scale: f32,
    /// The norm of the vectors that are routed; `None` if there is none.
    pub(crate) norm: Option<RouterNorm>,
    /// Whether weights are factors of the vectors that experts see, instead of those that they return.
    pub(crate) weighs_inputs: bool,
}

/// A norm of the vectors that are routed, and factors of the weights of experts (`Gemma4TextRouter`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterNorm {
    pub(crate) eps: f64,
    /// Names of the weights of the norm, which are divided by the root of their number, and of the factors.
    pub(crate) names: [&'static str; 2],
}

impl RouterConfig {
    /// Creates the choice by the softmax of all logits.
    pub(crate) fn softmax(normalised: bool) -> Self {
        Self {
            scores: Scores::Softmax,
            float32: false,
            normalised,
            correction: None,
            groups: None,
            scale: 1.0,
            norm: None,
            weighs_inputs: false,
        }
    }
}

/// Settings of a shared expert.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedConfig {
    pub(crate) width: usize,
    pub(crate) name: &'static str,
    /// Whether its output is multiplied by a gate, `shared_expert_gate`.
    pub(crate) gated: bool,
}

/// Checkpoint names that differ between architectures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    pub(crate) router: &'static str,
    /// `None` for experts without a gate.
    pub(crate) gate: Option<&'static str>,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// Order of tensors that hold all experts: see [`ExpertTensors`](crate::nn::names::ExpertTensors).
    pub(crate) transposed: bool,
    pub(crate) interleaved: bool,
}

impl ExpertNames {
    /// Returns the most common names.
    pub(crate) fn new(router: &'static str) -> Self {
        Self {
            router,
            gate: Some("gate_proj"),
            up: "up_proj",
            down: "down_proj",
            transposed: false,
            interleaved: false,
        }
    }
}

impl Default for ExpertsConfig {
    /// Settings of Mixtral.
    fn default() -> Self {
        Self {
            experts: 8,
            chosen: 2,
            intermediate: 0,
            latent: None,
            shared: None,
            router: RouterConfig::softmax(true),
            bias: false,
            gate: None,
            names: ExpertNames::new("gate"),
        }
    }
}

impl ExpertsConfig {
    pub(super) fn between(&self, mlp: &MlpConfig) -> Between {
        match self.names.gate {
            Some(_) => Between::Gate(self.gate.unwrap_or(Gate::Activated(mlp.activation))),
            None => Between::Activation(mlp.activation),
        }
    }

    /// Numbers of experts and of the vectors between and around their projections, for hidden states of
    /// `hidden` numbers.
    pub(super) fn widths(&self, hidden: usize) -> [usize; 3] {
        [self.experts, self.intermediate, self.latent.unwrap_or(hidden)]
    }

    /// Checks that the numbers of experts are possible; `field` is the config field with the number of
    /// experts.
    pub(crate) fn check(&self, config: &ConfigFile, field: &str) -> Result<()> {
        // Limits far above any model, and far below the point where the product of two overflows.
        config.check(field, self.experts, 1 << 14)?;
        config.check("num_experts_per_tok", self.chosen, self.experts)?;
        if let Some(SharedConfig { width, .. }) = self.shared {
            config.check("shared experts", width, 1 << 24)?;
        }
        if let Some(Groups { groups, chosen, best }) = self.router.groups {
            config.check("n_group", groups, self.experts)?;
            config.check("topk_group", chosen, groups)?;
            let each = self.experts / groups;
            if each * groups != self.experts || each < best || each * chosen < self.chosen {
                let why = format!(
                    "{} experts in {groups} groups, of which {chosen} are chosen, give no {} experts a token",
                    self.experts, self.chosen
                );
                return Err(config.error(&why));
            }
        }
        config.check("moe_latent_size", self.latent.unwrap_or(1), 1 << 20)?;
        config.check("moe_intermediate_size", self.intermediate, 1 << 24)
    }
}
