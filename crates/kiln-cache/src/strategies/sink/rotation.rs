//! Moving rotated keys to other positions.

use burn::tensor::{Tensor, TensorData};
use kiln_core::need::{AttentionNeed, RotaryNeed};
use kiln_kernels::{Kernels, Rotary};

/// Rotates keys from one position to another.
#[derive(Clone, Debug)]
pub(super) struct Rotation {
    /// `None` if keys are not rotated at all.
    rotary: Option<RotaryNeed>,
    kernels: Kernels,
}

impl Rotation {
    pub(super) fn new(need: &AttentionNeed, kernels: &Kernels) -> Self {
        Self { rotary: need.rotary.clone(), kernels: kernels.clone() }
    }

    /// Moves all `keys`, `[batch, heads, tokens, width]`, by `by` positions.
    pub(super) fn shift(&self, keys: Tensor<4>, by: i64) -> Tensor<4> {
        let Some(rotary) = self.rotary.as_ref().filter(|_| by != 0 && keys.dims()[2] > 0) else {
            return keys;
        };
        let RotaryNeed { frequencies, pairs, .. } = rotary;
        let (shape, device) = ([1, 1, frequencies.len()], keys.device());
        let angles = frequencies.iter().map(|frequency| by as f32 * frequency);
        let (sin, cos): (Vec<f32>, Vec<f32>) = angles.map(f32::sin_cos).unzip();
        let upload = |table: Vec<f32>| {
            let all = [1, keys.dims()[2], frequencies.len()];
            Tensor::<3>::from_data(TensorData::new(table, shape), &device).expand(all)
        };
        let (cos, sin) = (upload(cos), upload(sin));
        self.kernels.run(Rotary { x: keys, cos, sin, pairs: *pairs })
    }
}
