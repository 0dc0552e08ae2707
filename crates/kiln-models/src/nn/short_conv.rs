//! A gated short convolution (Liquid AI, 2025; transformers' `Lfm2ShortConv`): `C · conv(B · x)`, with `B`,
//! `C` and `x` projected from the hidden state.

use burn::tensor::{DType, Tensor};
use kiln_core::{Result, layer::StateLayer, model_cache::RowPart, need::RecurrentNeed};
use kiln_kernels::Kernels;

use super::{
    linear::Linear,
    places::Places,
    states::{Convolution, StateMixer, States},
};
use crate::Weights;

/// Settings of a gated short convolution.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShortConvConfig {
    pub(crate) hidden: usize,
    /// Number of inputs that the convolution sees, including the token's own.
    pub(crate) width: usize,
    /// Whether the convolution and both projections have biases.
    pub(crate) bias: bool,
}

impl ShortConvConfig {
    pub(crate) fn need(&self) -> RecurrentNeed {
        RecurrentNeed { rings: vec![Convolution::need(self.hidden, self.width)] }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ShortConv {
    /// Projection to `B`, `C` and `x`.
    in_proj: Linear,
    conv: Convolution,
    out_proj: Linear,
    hidden: usize,
}

impl ShortConv {
    /// Reads the weights of mixer `name`. `dtype` is the type of most weights.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        config: ShortConvConfig,
        dtype: DType,
    ) -> Result<Self> {
        let ShortConvConfig { hidden, width, bias } = config;
        let part = |part: &str| format!("{name}.{part}");
        let conv = Convolution::load(weights, &part("conv"), [hidden, width], bias, dtype)?;
        Ok(Self {
            in_proj: Linear::load(weights, &part("in_proj"), [hidden, 3 * hidden], bias)?,
            conv: conv.without_silu(),
            out_proj: Linear::load(weights, &part("out_proj"), [hidden, hidden], bias)?,
            hidden,
        })
    }
}

impl StateMixer for ShortConv {
    fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.in_proj, &mut self.out_proj].into()
    }

    fn cloned(&self) -> Box<dyn StateMixer> {
        Box::new(self.clone())
    }

    fn bytes(&self) -> usize {
        self.in_proj.bytes() + self.conv.bytes() + self.out_proj.bytes()
    }

    fn forward(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn StateLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let all = self.in_proj.forward(x, kernels);
        let [b, c, x] = [0, 1, 2].map(|i| all.clone().narrow(2, i * self.hidden, self.hidden));
        let x = b * x;
        let mut memory = States::take(parts, places, &x)?;
        let y = memory.scan(places, |part| {
            let [inputs] = part.rings;
            let (y, inputs) = self.conv.forward(part.frame.own(&x), inputs, part.positions, kernels);
            (y, [inputs])
        });
        memory.store()?;
        Ok(self.out_proj.forward_onto(residual, c * y, kernels))
    }
}
