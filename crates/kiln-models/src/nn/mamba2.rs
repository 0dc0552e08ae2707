//! The mixer of Mamba-2 (Dao and Gu, 2024, <https://arxiv.org/abs/2405.21060>; transformers' `Mamba2Mixer`):
//! a short convolution, and a matrix state per head, to which each token adds its key times its value.

use burn::tensor::{DType, Tensor};
use kiln_core::{Result, layer::StateLayer, model_cache::RowPart, need::RecurrentNeed};
use kiln_kernels::{Activation, Gated, Kernels, MatrixRule, MatrixScan};

use super::{
    linear::{Factors, Linear},
    norm::{Norm, NormKind},
    places::Places,
    states::{Convolution, Scanned, StateMixer, States, matrix_rings, matrix_scan},
};
use crate::{Part, Weights};

/// Settings of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mamba2Config {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    /// Numbers of a value.
    pub(crate) head_dim: usize,
    /// Number of pairs of key and query (`B` and `C`), each of which some heads share.
    pub(crate) groups: usize,
    /// Numbers of a key.
    pub(crate) state_dim: usize,
    /// Number of inputs that the convolution sees, including the token's own.
    pub(crate) conv_width: usize,
    pub(crate) in_bias: bool,
    pub(crate) conv_bias: bool,
    pub(crate) out_bias: bool,
    /// The smallest and the largest step size of tokens that come together. As in Transformers, a token that
    /// comes alone has no limits.
    pub(crate) step_limits: Option<[f32; 2]>,
    /// The norm of results, divided into `groups`; `None` if there is none.
    pub(crate) norm: Option<ResultNorm>,
    /// Factors of hidden states, of gate, values, keys, queries and step sizes, and of the output.
    pub(crate) factors: Factors<5>,
}

/// The norm of results, which also have a gate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResultNorm {
    pub(crate) eps: f64,
    /// Whether results are normed before they are multiplied by the gate, and not after.
    pub(crate) before_gate: bool,
}

impl Mamba2Config {
    /// Numbers of all values.
    pub(crate) fn values(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: values, keys and queries.
    pub(crate) fn channels(&self) -> usize {
        self.values() + 2 * self.groups * self.state_dim
    }

    pub(crate) fn need(&self) -> RecurrentNeed {
        let &Self { heads, head_dim, state_dim, conv_width, .. } = self;
        let channels = self.channels();
        let [state, journal] = matrix_rings([heads, state_dim, head_dim], channels + heads);
        RecurrentNeed { rings: vec![Convolution::need(channels, conv_width), state, journal] }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Mamba2 {
    /// Projection to gate, values, keys, queries and step sizes.
    in_proj: Linear,
    conv: Convolution,
    /// See [`MatrixScan::heads`].
    heads: Tensor<2>,
    /// Limits of the projected step sizes, before bias and softplus, `[1, 1, heads]`.
    limits: Option<[Tensor<3>; 2]>,
    norm: Option<GroupNorm>,
    out_proj: Linear,
    config: Mamba2Config,
}

impl Mamba2 {
    /// Reads the weights of mixer `name`. `dtype` is the type of most weights.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: Mamba2Config,
        dtype: DType,
    ) -> Result<Self> {
        let Mamba2Config { hidden, heads, groups, state_dim, conv_width, norm, factors, .. } = config;
        let (channels, values) = (config.channels(), config.values());
        let part = |part: &str| format!("{name}.{part}");
        let inputs = values + channels + heads;
        let in_proj = Linear::load(weights, &part("in_proj"), [hidden, inputs], config.in_bias)?;
        let widths = [values, values, groups * state_dim, groups * state_dim, heads];
        let of_inputs: Vec<_> = factors.parts.into_iter().zip(widths).collect();
        let in_proj = in_proj.times(factors.input, &of_inputs);
        let sizes = [channels, conv_width];
        let conv = Convolution::load(weights, &part("conv1d"), sizes, config.conv_bias, dtype)?;
        let rate = -weights.float32(&part("A_log"), &[heads])?.exp();
        let bias = weights.float32(&part("dt_bias"), &[heads])?;
        let d = weights.float32(&part("D"), &[heads])?;
        let norm = norm
            .map(|norm| GroupNorm::load(weights, &part("norm"), [values, groups], norm.eps))
            .transpose()?;
        let out_proj = Linear::load(weights, &part("out_proj"), [values, hidden], config.out_bias)?;
        let out_proj = out_proj.times(1.0, &[(factors.output, hidden)]);
        let limit = |limit: f32| {
            // The inverse of softplus, ln(exp(x) - 1).
            let raw = limit + (-(-limit).exp_m1()).ln();
            (Tensor::full([heads], raw, (&bias.device(), DType::F32)) - bias.clone()).reshape([1, 1, heads])
        };
        let limits = config.step_limits.map(|limits| limits.map(limit));
        let heads = Tensor::cat(vec![rate, bias, d], 0).reshape([3, heads]);
        Ok(Self { in_proj, conv, heads, limits, norm, out_proj, config })
    }
}

impl StateMixer for Mamba2 {
    fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.in_proj, &mut self.out_proj].into()
    }

    fn cloned(&self) -> Box<dyn StateMixer> {
        Box::new(self.clone())
    }

    fn bytes(&self) -> usize {
        let numbers = 3 + 2 * usize::from(self.limits.is_some());
        let heads = numbers * self.config.heads * size_of::<f32>();
        let norm = self.norm.as_ref().map_or(0, GroupNorm::bytes);
        self.in_proj.bytes() + self.conv.bytes() + heads + norm + self.out_proj.bytes()
    }

    fn forward(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn StateLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let Mamba2Config { heads, groups, .. } = self.config;
        let (channels, values) = (self.config.channels(), self.config.values());
        let all = self.in_proj.forward(x, kernels);
        let gate = all.clone().narrow(2, 0, values);
        let x = all.clone().narrow(2, values, channels);
        let steps = all.narrow(2, values + channels, heads);

        let mut memory = States::take(parts, places, &x)?;
        let x = memory.scan(places, |part| {
            let [inputs, state, journal] = part.rings;
            let (y, inputs) = self.conv.forward(part.frame.own(&x), inputs, part.positions, kernels);
            (y, [inputs, state, journal])
        });
        let mixed = memory.scan(places, |Scanned { frame, positions, rings, journaled }| {
            let scan = |x, steps, [state, journal]: [Tensor<4>; 2], journaled| MatrixScan {
                x,
                steps,
                heads: self.heads.clone(),
                state,
                journal,
                journaled,
                rule: MatrixRule::Mamba2,
                key_heads: groups,
                alternates: false,
                positions: positions.clone(),
            };
            let [x, steps] = [&x, &steps].map(|x| frame.own(x));
            let steps = match &self.limits {
                Some(limits) if !frame.is_one_more() => {
                    let [smallest, largest] = limits.clone().map(|limit| limit.cast(steps.dtype()));
                    steps.max_pair(smallest).min_pair(largest)
                }
                _ => steps,
            };
            matrix_scan([x, steps], rings, journaled, scan, kernels)
        });
        memory.store()?;

        let gated = |up| kernels.run(Gated { gate, up, by: Activation::Silu.into() });
        let result = match &self.norm {
            None => gated(mixed),
            Some(norm) if self.config.norm.is_some_and(|norm| norm.before_gate) => {
                gated(norm.forward(mixed, kernels))
            }
            Some(norm) => norm.forward(gated(mixed), kernels),
        };
        Ok(self.out_proj.forward_onto(residual, result, kernels))
    }
}

/// An RMSNorm of vectors in groups.
#[derive(Clone, Debug)]
struct GroupNorm {
    /// The norm of a group; without weights if there are several.
    norm: Norm,
    /// Weights of all groups, if there are several.
    weight: Option<Tensor<1>>,
    groups: usize,
}

impl GroupNorm {
    /// Reads `name.weight`.
    fn load(weights: &mut dyn Weights, name: &str, [width, groups]: [usize; 2], eps: f64) -> Result<Self> {
        if groups == 1 {
            let norm = Norm::load(weights, name, width, NormKind::rms(eps))?;
            return Ok(Self { norm, weight: None, groups });
        }
        let weight = weights.vector(&[Part::new(format!("{name}.weight"), width)])?;
        let norm = Norm::plain(width / groups, eps, (&weight.device(), weight.dtype()));
        Ok(Self { norm, weight: Some(weight), groups })
    }

    fn bytes(&self) -> usize {
        let bytes = |weight: &Tensor<1>| weight.shape().num_elements() * weight.dtype().size();
        self.norm.bytes() + self.weight.as_ref().map_or(0, bytes)
    }

    /// Norms `x` `[batch, tokens, width]`.
    fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let Some(weight) = &self.weight else { return self.norm.forward(x, kernels) };
        let [batch, tokens, width] = x.dims();
        let grouped = x.reshape([batch, tokens * self.groups, width / self.groups]);
        self.norm.forward(grouped, kernels).reshape([batch, tokens, width])
            * weight.clone().reshape([1, 1, width])
    }
}
