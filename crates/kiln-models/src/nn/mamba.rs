//! The mixer of Mamba (Gu and Dao, 2023, <https://arxiv.org/abs/2312.00752>): a convolution over a few
//! tokens, and a state per channel, updated by each token with a time step that the token determines.
//! (`MambaMixer` of transformers)

use burn::tensor::{DType, Tensor};
use kiln_core::{
    Result,
    layer::StateLayer,
    model_cache::RowPart,
    need::{RecurrentNeed, RingEntries, RingNeed},
};
use kiln_kernels::{Kernels, SelectiveScan};

use super::{
    linear::Linear,
    norm::{Norm, NormKind},
    places::Places,
    states::{Convolution, StateMixer, States},
};
use crate::Weights;

/// Settings of a Mamba mixer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MambaConfig {
    pub(crate) hidden: usize,
    pub(crate) channels: usize,
    /// Numbers in a channel's state.
    pub(crate) state_dim: usize,
    /// Number of inputs that the convolution sees, including the token's own.
    pub(crate) conv_width: usize,
    /// Numbers that time steps are projected from.
    pub(crate) time_step_rank: usize,
    /// Whether the input and output projections have a bias.
    pub(crate) bias: bool,
    pub(crate) conv_bias: bool,
    pub(crate) norms: MixerNorms,
}

/// The norms of time steps and of the vectors `B` and `C`, which lead into and out of the state. The number
/// is the epsilon that is added to the mean square.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MixerNorms {
    None,
    /// Norms without weights.
    Plain(f64),
    /// Norms with the weights `dt_layernorm`, `b_layernorm` and `c_layernorm`.
    Weighted(f64),
}

impl MambaConfig {
    pub(crate) fn need(&self) -> RecurrentNeed {
        let &Self { channels: width, conv_width, state_dim, .. } = self;
        let inputs = Convolution::need(width, conv_width);
        let states = RingNeed { groups: state_dim, width, entries: RingEntries::States };
        RecurrentNeed { rings: vec![inputs, states] }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Mamba {
    /// Projection to the mixer's input and to the gate.
    in_proj: Linear,
    conv: Convolution,
    /// Projection to time steps and to the vectors `B` and `C`, which lead into and out of the state.
    x_proj: Linear,
    dt_proj: Linear,
    /// Norms of the three outputs of `x_proj`.
    norms: Option<[Norm; 3]>,
    /// `-exp(A_log)` and `D` as `[state_dim + 1, channels]` in float32.
    ad: Tensor<2>,
    out_proj: Linear,
    config: MambaConfig,
}

impl Mamba {
    /// Reads the weights of mixer `name`. `dtype` is the type of most weights.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: MambaConfig,
        dtype: DType,
    ) -> Result<Self> {
        let MambaConfig { hidden, channels, state_dim, conv_width, time_step_rank, .. } = config;
        let part = |part: &str| format!("{name}.{part}");
        let in_proj = Linear::load(weights, &part("in_proj"), [hidden, 2 * channels], config.bias)?;
        let x_proj =
            Linear::load(weights, &part("x_proj"), [channels, time_step_rank + 2 * state_dim], false)?;
        let dt_proj = Linear::load(weights, &part("dt_proj"), [time_step_rank, channels], true)?;
        let out_proj = Linear::load(weights, &part("out_proj"), [channels, hidden], config.bias)?;
        let sizes = [channels, conv_width];
        let conv = Convolution::load(weights, &part("conv1d"), sizes, config.conv_bias, dtype)?;
        let a_log = weights.float32(&part("A_log"), &[channels, state_dim])?;
        let d = weights.float32(&part("D"), &[channels])?;
        let a = -a_log.reshape([channels, state_dim]).transpose().exp();
        let norms = match config.norms {
            MixerNorms::None => None,
            MixerNorms::Plain(eps) => Some(
                [time_step_rank, state_dim, state_dim].map(|len| Norm::plain(len, eps, (&d.device(), dtype))),
            ),
            MixerNorms::Weighted(eps) => {
                let mut norm = |name: &str, len| Norm::load(weights, &part(name), len, NormKind::rms(eps));
                Some([
                    norm("dt_layernorm", time_step_rank)?,
                    norm("b_layernorm", state_dim)?,
                    norm("c_layernorm", state_dim)?,
                ])
            }
        };
        Ok(Self {
            norms,
            conv,
            ad: Tensor::cat(vec![a, d.clone().reshape([1, channels])], 0),
            in_proj,
            x_proj,
            dt_proj,
            out_proj,
            config,
        })
    }
}

impl StateMixer for Mamba {
    fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.in_proj, &mut self.x_proj, &mut self.dt_proj, &mut self.out_proj].into()
    }

    fn cloned(&self) -> Box<dyn StateMixer> {
        Box::new(self.clone())
    }

    fn bytes(&self) -> usize {
        let linears = [&self.in_proj, &self.x_proj, &self.dt_proj, &self.out_proj];
        let norms = self.norms.iter().flatten().map(Norm::bytes).sum::<usize>();
        let ad = self.ad.shape().num_elements() * self.ad.dtype().size();
        linears.into_iter().map(Linear::bytes).sum::<usize>() + self.conv.bytes() + norms + ad
    }

    fn forward(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn StateLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let MambaConfig { channels, state_dim, time_step_rank, .. } = self.config;
        let both = self.in_proj.forward(x, kernels);
        let (x, gate) = (both.clone().narrow(2, 0, channels), both.narrow(2, channels, channels));
        let mut memory = States::take(parts, places, &x)?;
        let x = memory.scan(places, |part| {
            let [inputs, states] = part.rings;
            let (y, inputs) = self.conv.forward(part.frame.own(&x), inputs, part.positions, kernels);
            (y, [inputs, states])
        });

        let selected = self.x_proj.forward(x.clone(), kernels);
        let dt = selected.clone().narrow(2, 0, time_step_rank);
        let bc = selected.narrow(2, time_step_rank, 2 * state_dim);
        let (dt, bc) = match &self.norms {
            None => (dt, bc),
            Some([dt_norm, b_norm, c_norm]) => {
                let b = b_norm.forward(bc.clone().narrow(2, 0, state_dim), kernels);
                let c = c_norm.forward(bc.narrow(2, state_dim, state_dim), kernels);
                (dt_norm.forward(dt, kernels), Tensor::cat(vec![b, c], 2))
            }
        };
        let dt = self.dt_proj.forward(dt, kernels);

        let mixed = memory.scan(places, |part| {
            let [inputs, states] = part.rings;
            let (y, states) = kernels.run(SelectiveScan {
                x: part.frame.own(&x),
                dt: part.frame.own(&dt),
                bc: part.frame.own(&bc),
                gate: part.frame.own(&gate),
                ad: self.ad.clone(),
                ring: states,
                positions: part.positions.clone(),
            });
            (y, [inputs, states])
        });
        memory.store()?;
        Ok(self.out_proj.forward_onto(residual, mixed, kernels))
    }
}
