//! Common parts of mixers with states: taking the memory, convolving, and scanning with a journal.

use std::fmt::Debug;

use burn::tensor::{DType, Tensor};
use kiln_core::{
    Error, Result,
    layer::{Positions, StateLayer},
    model_cache::RowPart,
    need::{RingEntries, RingNeed},
};
use kiln_kernels::{CausalConv, Kernels, MatrixScan};

use super::{
    linear::Linear,
    places::{Frame, Places},
};
use crate::{Part, Weights};

/// A mixer whose memory does not grow with the tokens.
pub(crate) trait StateMixer: Debug + Send + Sync {
    /// Applies the mixer to `x`, and adds `residual` if there is one.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    fn forward(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn StateLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>>;

    /// Returns the size of the weights in bytes.
    fn bytes(&self) -> usize;

    /// The projections that an adapter may change.
    fn linears(&mut self) -> Vec<&mut Linear>;

    /// Returns another mixer with the same weights.
    fn cloned(&self) -> Box<dyn StateMixer>;
}

impl Clone for Box<dyn StateMixer> {
    fn clone(&self) -> Self {
        (**self).cloned()
    }
}

/// The parts of a recurrent layer during a pass, with their frames.
#[derive(Debug)]
pub(super) struct States<'a, const N: usize> {
    parts: Vec<RowPart<'a, dyn StateLayer>>,
    frames: Vec<Frame>,
    positions: Vec<Positions>,
    /// Rings of the parts that have new tokens.
    rings: Vec<Option<[Tensor<4>; N]>>,
}

/// Inputs of a scan over a part of a layer.
#[derive(Debug)]
pub(super) struct Scanned<'a, const N: usize> {
    pub(super) frame: &'a Frame,
    pub(super) positions: &'a Positions,
    pub(super) rings: [Tensor<4>; N],
    /// See [`StateLayer::journaled`].
    pub(super) journaled: usize,
}

impl<'a, const N: usize> States<'a, N> {
    /// Takes the rings of each part that has new tokens, for a pass over `inputs`.
    ///
    /// # Errors
    /// The errors of [`StateLayer::take`]. In that case all rings are back in their layers.
    pub(super) fn take(
        mut parts: Vec<RowPart<'a, dyn StateLayer>>,
        places: &mut Places<'_>,
        inputs: &Tensor<3>,
    ) -> Result<Self> {
        let frames: Vec<Frame> = parts.iter().map(|part| places.state_frame(part)).collect();
        let positions = frames.iter().map(|frame| places.positions(std::slice::from_ref(frame))).collect();
        let mut rings = Vec::with_capacity(parts.len());
        for i in 0..parts.len() {
            let own = frames[i].new_tokens() > 0;
            let taken = own.then(|| parts[i].layer.take(&frames[i].own(inputs))).transpose();
            let sized = |taken: Vec<Tensor<4>>| {
                let wrong = || Error::Execution(format!("the memory of a mixer is not {N} rings"));
                taken.try_into().map_err(|_| wrong())
            };
            match taken.and_then(|taken| taken.map(sized).transpose()) {
                Ok(taken) => rings.push(taken),
                Err(error) => {
                    for (part, rings) in parts.iter_mut().zip(rings) {
                        rings.map_or(Ok(()), |rings: [_; N]| part.layer.store(rings.into(), 0))?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(Self { parts, frames, positions, rings })
    }

    /// Applies `scan` to each part that has new tokens, and joins the results. `scan` returns the rings, too.
    pub(super) fn scan(
        &mut self,
        places: &Places<'_>,
        mut scan: impl FnMut(Scanned<'_, N>) -> (Tensor<3>, [Tensor<4>; N]),
    ) -> Tensor<3> {
        let mut results = Vec::with_capacity(self.parts.len());
        let Self { parts, frames, positions, rings } = self;
        for (((part, frame), positions), own) in parts.iter().zip(frames).zip(positions).zip(rings) {
            let Some(rings) = own.take() else { continue };
            let journaled = part.layer.journaled();
            let (result, rings) = scan(Scanned { frame, positions, rings, journaled });
            *own = Some(rings);
            results.push(result);
        }
        places.joined(results)
    }

    /// Stores the rings.
    pub(super) fn store(self) -> Result<()> {
        for ((part, frame), rings) in self.parts.into_iter().zip(&self.frames).zip(self.rings) {
            if let Some(rings) = rings {
                part.layer.store(rings.into(), frame.new_tokens())?;
            }
        }
        Ok(())
    }
}

/// A causal convolution of each channel.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    /// `[channels, width]`
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    /// Whether SiLU is applied to the result.
    silu: bool,
}

impl Convolution {
    /// Reads `name.weight`, and `name.bias` if `bias` is set. `dtype` is the type of most weights.
    pub(super) fn load(
        weights: &mut dyn Weights,
        name: &str,
        [channels, width]: [usize; 2],
        bias: bool,
        dtype: DType,
    ) -> Result<Self> {
        let part = Part::new(format!("{name}.bias"), channels);
        let bias = bias.then(|| weights.vector(&[part])).transpose()?;
        let weight = weights.float32(&format!("{name}.weight"), &[channels, 1, width])?;
        Ok(Self { weight: weight.reshape([channels, width]).cast(dtype), bias, silu: true })
    }

    /// Leaves the activation out.
    pub(super) fn without_silu(self) -> Self {
        Self { silu: false, ..self }
    }

    pub(super) fn bytes(&self) -> usize {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.shape().num_elements() * bias.dtype().size());
        self.weight.shape().num_elements() * self.weight.dtype().size() + bias
    }

    /// Memory of the inputs of a convolution of this width.
    pub(super) fn need(channels: usize, width: usize) -> RingNeed {
        let reach = width.saturating_sub(1);
        RingNeed { groups: 1, width: channels, entries: RingEntries::Inputs { reach } }
    }

    /// Convolves `x`, which belongs to a part of the layer, with the earlier inputs in `ring`.
    pub(super) fn forward(
        &self,
        x: Tensor<3>,
        ring: Tensor<4>,
        positions: &Positions,
        kernels: &Kernels,
    ) -> (Tensor<3>, Tensor<4>) {
        let (weight, bias, silu) = (self.weight.clone(), self.bias.clone(), self.silu);
        kernels.run(CausalConv { x, weight, bias, silu, ring, positions: positions.clone() })
    }
}

/// Memory of a matrix state per head, of these numbers of heads, keys and values. A token brings along
/// `inputs` numbers.
pub(super) fn matrix_rings([heads, keys, values]: [usize; 3], inputs: usize) -> [RingNeed; 2] {
    [
        RingNeed { groups: heads * keys, width: values, entries: RingEntries::OlderState },
        RingNeed { groups: 1, width: inputs, entries: RingEntries::Journal },
    ]
}

/// Scans the tokens of a part of a layer with `journaled` tokens in its journal. `inputs` are what the tokens
/// bring along. `scan` makes the kernel from such inputs, state and journal, and the numbers of tokens in the
/// journal before and after.
pub(super) fn matrix_scan(
    inputs: [Tensor<3>; 2],
    [convolved, state, journal]: [Tensor<4>; 3],
    journaled: usize,
    scan: impl Fn(Tensor<3>, Tensor<3>, [Tensor<4>; 2], [usize; 2]) -> MatrixScan,
    kernels: &Kernels,
) -> (Tensor<3>, [Tensor<4>; 3]) {
    let (tokens, slots) = (inputs[0].dims()[1], journal.dims()[2]);
    let (mut memory, mut before) = ([state, journal], journaled);
    if before > 0 && before + tokens > slots {
        // New tokens would overwrite those of the journal: the state sees these first.
        let [x, steps] = [0, 1].map(|i: usize| inputs[i].clone().narrow(1, 0, 0));
        (_, memory) = kernels.run(scan(x, steps, memory, [before, 0]));
        before = 0;
    }
    let after = (before + tokens).min(slots / 2);
    let [x, steps] = inputs;
    let (y, [state, journal]) = kernels.run(scan(x, steps, memory, [before, after]));
    (y, [convolved, state, journal])
}
