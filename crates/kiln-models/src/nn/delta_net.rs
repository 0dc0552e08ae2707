//! The gated delta net (Yang et al., 2024, <https://arxiv.org/abs/2412.06464>; transformers'
//! `Qwen3_5GatedDeltaNet`): a short convolution, and a matrix state per head, to which each token adds what
//! its value differs from what the state has for its key.

use burn::tensor::{DType, Tensor};
use kiln_core::{Result, layer::StateLayer, model_cache::RowPart, need::RecurrentNeed};
use kiln_kernels::{Activation, Gated, Kernels, MatrixRule, MatrixScan};

use super::{
    linear::Linear,
    norm::{Norm, NormKind},
    places::Places,
    states::{Convolution, Scanned, StateMixer, States, matrix_rings, matrix_scan},
};
use crate::Weights;

/// Settings of a gated delta net.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaNetConfig {
    pub(crate) hidden: usize,
    /// Heads of values; each has a state.
    pub(crate) heads: usize,
    /// Heads of queries and keys, which `heads` share.
    pub(crate) key_heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// Number of inputs that the convolution sees, including the token's own.
    pub(crate) conv_width: usize,
    /// Epsilon of the norm of results.
    pub(crate) eps: f64,
    /// Whether the projections of queries, keys and values are three matrices, and not one.
    pub(crate) apart: bool,
    /// See [`MatrixScan::alternates`].
    pub(crate) alternates: bool,
}

impl DeltaNetConfig {
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub(crate) fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    pub(crate) fn need(&self) -> RecurrentNeed {
        let &Self { heads, key_dim, value_dim, conv_width, .. } = self;
        let channels = self.channels();
        let [state, journal] = matrix_rings([heads, key_dim, value_dim], channels + 2 * heads);
        RecurrentNeed { rings: vec![Convolution::need(channels, conv_width), state, journal] }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct DeltaNet {
    /// Projections to queries, keys, values, gate, gains and step sizes, stacked.
    in_proj: Linear,
    conv: Convolution,
    /// See [`MatrixScan::heads`].
    heads: Tensor<2>,
    /// Norm of the results of each head.
    norm: Norm,
    out_proj: Linear,
    config: DeltaNetConfig,
}

impl DeltaNet {
    /// Reads the weights of mixer `name`. `dtype` is the type of most weights.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: DeltaNetConfig,
        dtype: DType,
    ) -> Result<Self> {
        let DeltaNetConfig { hidden, heads, value_dim, conv_width, eps, apart, .. } = config;
        let (channels, keys, values) = (config.channels(), config.keys(), config.values());
        let part = |part: &str| format!("{name}.{part}");
        let inputs = match apart {
            true => vec![("in_proj_q", keys), ("in_proj_k", keys), ("in_proj_v", values)],
            false => vec![("in_proj_qkv", channels)],
        };
        let rest = [("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads)];
        let parts: Vec<_> = inputs.into_iter().chain(rest).map(|(name, rows)| (part(name), rows)).collect();
        let parts: Vec<_> = parts.iter().map(|(name, rows)| (&**name, *rows)).collect();
        let in_proj = Linear::stacked(weights, &parts, hidden, false)?;
        let conv = Convolution::load(weights, &part("conv1d"), [channels, conv_width], false, dtype)?;
        let rate = -weights.float32(&part("A_log"), &[heads])?.exp();
        let bias = weights.float32(&part("dt_bias"), &[heads])?;
        let norm = Norm::load(weights, &part("norm"), value_dim, NormKind::rms(eps))?;
        let out_proj = Linear::load(weights, &part("out_proj"), [values, hidden], false)?;
        let heads = Tensor::cat(vec![rate.clone(), bias, rate.zeros_like()], 0).reshape([3, heads]);
        Ok(Self { in_proj, conv, heads, norm, out_proj, config })
    }
}

impl StateMixer for DeltaNet {
    fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.in_proj, &mut self.out_proj].into()
    }

    fn cloned(&self) -> Box<dyn StateMixer> {
        Box::new(self.clone())
    }

    fn bytes(&self) -> usize {
        let heads = self.heads.shape().num_elements() * self.heads.dtype().size();
        self.in_proj.bytes() + self.conv.bytes() + heads + self.norm.bytes() + self.out_proj.bytes()
    }

    fn forward(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn StateLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let DeltaNetConfig { heads, value_dim, key_heads, alternates, .. } = self.config;
        let (channels, values) = (self.config.channels(), self.config.values());
        let all = self.in_proj.forward(x, kernels);
        let x = all.clone().narrow(2, 0, channels);
        let gate = all.clone().narrow(2, channels, values);
        let steps = all.narrow(2, channels + values, 2 * heads);

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
                rule: MatrixRule::GatedDelta,
                key_heads,
                alternates,
                positions: positions.clone(),
            };
            matrix_scan([&x, &steps].map(|x| frame.own(x)), rings, journaled, scan, kernels)
        });
        memory.store()?;

        let [batch, tokens, _] = mixed.dims();
        let normed = self.norm.forward(mixed.reshape([batch * tokens, heads, value_dim]), kernels);
        let up = normed.reshape([batch, tokens, values]);
        let gated = kernels.run(Gated { gate, up, by: Activation::Silu.into() });
        Ok(self.out_proj.forward_onto(residual, gated, kernels))
    }
}
