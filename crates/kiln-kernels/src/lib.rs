//! Every custom kernel, in up to four implementations that agree.
//!
//! | kernel | definition | native (CPU) | WGSL (wgpu) | `#[cube]` twin (CUDA, wgpu) |
//! |---|---|---|---|---|
//! | `rms_norm` | yes | | yes | yes |
//! | `rotary` | yes | | yes | yes |
//! | `kv_append` | yes | yes | yes | yes |
//! | `linear` | yes | yes | few rows | few rows |
//! | `gated` | yes | | yes | yes |
//! | `attention` | yes | yes | yes | yes |
//! | `kv_pack` | yes | | yes | yes |
//! | `kv_unpack` | yes | | yes | yes |
//! | `attention_packed` | yes | yes | yes | yes |
//! | `sample` | yes | | yes | yes |
//!
//! The definition is written in plain Burn operations, runs on every device, and says what the others must compute.
//!
//! **Invariant:** nothing outside this crate launches a kernel of its own, or names cubecl or wgpu.
#![forbid(unsafe_code)]

mod attention;
mod choice;
pub mod device;
mod gated;
mod half;
mod kv_append;
mod kv_pack;
mod kv_unpack;
#[cfg(feature = "cube")]
mod launch;
mod linear;
mod matrix;
#[cfg(feature = "cpu")]
mod native;
mod packed;
mod rms_norm;
mod rotary;
mod sample;
mod shader;

use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor};
use kiln_core::{Result, layer::Positions, view::DenseKv};

pub use attention::AttentionShape;
pub use choice::{Choice, Path, Ran};
pub use gated::Activation;
pub use matrix::Matrix;
pub use rms_norm::NormOrder;
pub use sample::{Draws, Sampling, likeliest};

use attention::Buffers;
use choice::{Kernel, Recorder};

/// The kernels of one device. A model holds them; clones share their counts.
///
/// # Panics
/// Tensors on another device than the one that [`Kernels::new`] was given, or of shapes that do not fit together, are a
/// mistake of the caller's. Kernels answer it as every operation of Burn does.
#[derive(Clone, Debug)]
pub struct Kernels {
    recorder: Recorder,
    device: Device,
}

impl Kernels {
    /// # Errors
    /// [`kiln_core::Error::Setting`] where `device` cannot run `choice`.
    pub fn new(choice: Choice, device: &Device) -> Result<Self> {
        Ok(Self { recorder: Recorder::new(choice, device)?, device: device.clone() })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// `x / sqrt(mean(x²) + eps)` times the weight, over the last dimension; statistics in float32.
    ///
    /// # Shapes
    /// - x: `[rows, tokens, hidden]`, and so is the result
    /// - weight: `[hidden]`, cast to the type of x
    pub fn rms_norm(&self, x: Tensor<3>, weight: Tensor<1>, eps: f64, order: NormOrder) -> Tensor<3> {
        assert_eq!(weight.dims(), [x.dims()[2]], "rms_norm: weight and x {:?}", x.dims());
        let weight = weight.cast(x.dtype());
        match self.recorder.run(Kernel::RmsNorm, &x.dims()) {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => rms_norm::wgsl(x, weight, eps, order),
            #[cfg(feature = "cube")]
            Path::Cube => rms_norm::cube(x, weight, eps, order),
            _ => rms_norm::definition(x, weight, eps, order),
        }
    }

    /// Rotates the first dimensions of every head, in pairs `(i, i + rotary_dim / 2)`; copies the others.
    ///
    /// # Shapes
    /// - x: `[batch, heads, tokens, head_dim]`, and so is the result
    /// - cos, sin: `[batch or 1, tokens, rotary_dim / 2]`, float32; rounded to the type of x before use
    pub fn rotary(&self, x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<4> {
        let ([batch, _, tokens, head_dim], [tables, _, pairs]) = (x.dims(), cos.dims());
        let tables_fit = (tables == 1 || tables == batch) && 2 * pairs <= head_dim;
        assert!(
            tables_fit && cos.dims() == [tables, tokens, pairs],
            "rotary: cos {:?} and x {:?}",
            cos.dims(),
            x.dims()
        );
        assert_eq!(sin.dims(), cos.dims(), "rotary: sin and cos");
        let (cos, sin) = (cos.cast(FloatDType::F32), sin.cast(FloatDType::F32));
        match self.recorder.run(Kernel::Rotary, &x.dims()) {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => rotary::wgsl(x, cos, sin),
            #[cfg(feature = "cube")]
            Path::Cube => rotary::cube(x, cos, sin),
            _ => rotary::definition(x, cos, sin),
        }
    }

    /// Writes new keys and values into rings of slots: token `i` of row `b` into slot `(first[b] - origin + i) mod capacity`
    /// of `buffers`.
    ///
    /// In place where a buffer is the only handle of its memory, else on a copy. The positions stay on the device, so
    /// that a captured step can advance them.
    ///
    /// # Shapes
    /// - buffers, of keys and of values: `[batch, kv_heads, capacity, head_dim]`, and so are the results
    /// - new, cast to the type of the first buffer: `[batch, kv_heads, n, head_dim]`, with `n <= capacity`
    /// - positions: those of `batch` rows
    pub fn kv_append(
        &self,
        buffers: [Tensor<4>; 2],
        new: [Tensor<4>; 2],
        positions: &Positions,
        origin: usize,
    ) -> [Tensor<4>; 2] {
        let ([batch, heads, capacity, head_dim], [_, _, n, _]) = (buffers[0].dims(), new[0].dims());
        assert_eq!(buffers[1].dims(), buffers[0].dims(), "kv_append: buffers of keys and of values");
        assert_eq!(new[1].dims(), new[0].dims(), "kv_append: new keys and values");
        assert_eq!(new[0].dims(), [batch, heads, n, head_dim], "kv_append: new and buffers");
        assert!(n <= capacity, "kv_append: {n} tokens into {capacity} slots");
        let dtype = buffers[0].dtype();
        assert_eq!(buffers[1].dtype(), dtype, "kv_append: buffers of keys and of values");
        let (new, positions) = (new.map(|new| new.cast(dtype)), on_device("kv_append", positions, batch));
        let origin = i32::try_from(origin % capacity.max(1)).unwrap_or(0);
        match self.recorder.run(Kernel::KvAppend, &new[0].dims()) {
            #[cfg(feature = "cpu")]
            Path::Native => kv_append::native(buffers, new, positions, origin),
            #[cfg(feature = "wgpu")]
            Path::Wgsl => kv_append::wgsl(buffers, new, positions, origin),
            #[cfg(feature = "cube")]
            Path::Cube => kv_append::cube(buffers, new, positions, origin),
            _ => kv_append::definition(buffers, new, positions, origin),
        }
    }

    /// `y = x Wᵀ + b + r`.
    ///
    /// More than 4 rows take the definition on a GPU, whatever the choice: Burn's matrix products are the fast ones there.
    ///
    /// # Shapes
    /// - x: `[rows, tokens, in]`; the result is `[rows, tokens, out]`
    /// - weight: `[out, in]`, as checkpoints store it
    /// - bias: `[out]`
    /// - residual: as the result
    pub fn linear(
        &self,
        x: Tensor<3>,
        weight: &Matrix,
        bias: Option<Tensor<1>>,
        residual: Option<Tensor<3>>,
    ) -> Tensor<3> {
        let ([rows, tokens, input], output) = (x.dims(), weight.rows());
        assert_eq!(weight.columns(), input, "linear: columns of the weight and x");
        assert!(
            residual.as_ref().is_none_or(|residual| residual.dims() == [rows, tokens, output]),
            "linear: the residual and the result"
        );
        let Matrix::Dense(weight) = weight.clone();
        #[cfg(feature = "cpu")]
        if self.recorder.is_native()
            && let Some(y) = linear::native(&x, &weight, bias.as_ref(), residual.as_ref())
        {
            self.recorder.record(Kernel::Linear, Path::Native, &x.dims());
            return y;
        }
        #[cfg(feature = "cube")]
        if linear::has_kernel(&x, &weight, bias.as_ref(), residual.as_ref()) {
            match self.recorder.run(Kernel::Linear, &x.dims()) {
                #[cfg(feature = "wgpu")]
                Path::Wgsl => return linear::wgsl(x, weight, bias, residual),
                Path::Cube => return linear::cube(x, weight, bias, residual),
                _ => return linear::definition(x, weight, bias, residual),
            }
        }
        self.recorder.record(Kernel::Linear, Path::Definition, &x.dims());
        linear::definition(x, weight, bias, residual)
    }

    /// `act(gate) · up`, what a gated feed-forward block does between its projections; the activation in float32.
    ///
    /// # Shapes
    /// gate, up: `[rows, tokens, width]`, and so is the result; up is cast to the type of gate
    pub fn gated(&self, gate: Tensor<3>, up: Tensor<3>, activation: Activation) -> Tensor<3> {
        assert_eq!(gate.dims(), up.dims(), "gated: gate and up");
        let up = up.cast(gate.dtype());
        match self.recorder.run(Kernel::Gated, &gate.dims()) {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => gated::wgsl(gate, up, activation),
            #[cfg(feature = "cube")]
            Path::Cube => gated::cube(gate, up, activation),
            _ => gated::definition(gate, up, activation),
        }
    }

    /// `softmax(scale · q kᵀ) v` over the keys that each query sees, in a buffer of which only some slots count.
    ///
    /// Query `i` of row `b` stands at `first[b] + i` and sees the positions `p` with
    /// `max(start, visible_from[b], first[b] + i - window + 1) <= p <= first[b] + i`, as far as slots still hold them. A
    /// query that sees nothing, a padded one, gives zeros. The positions stay on the device, so that a captured step can
    /// advance them. Nothing that is as large as `new * slots` is held in memory.
    ///
    /// Vectors of more than 256 numbers take the definition on a GPU, whatever the choice.
    ///
    /// # Shapes
    /// - q: `[batch, heads, new, head_dim]`, and so is the result
    /// - keys, values: `[batch, kv_heads, slots, head_dim]`, cast to the type of q; query head `h` sees those of
    ///   `h / (heads / kv_heads)`
    /// - positions: those of `batch` rows
    pub fn attention(
        &self,
        q: Tensor<4>,
        keys: Tensor<4>,
        values: Tensor<4>,
        positions: &Positions,
        shape: &AttentionShape,
    ) -> Tensor<4> {
        let chain = vec![DenseKv { keys, values, start: shape.start, origin: shape.origin }];
        self.attention_chained(q, chain, positions, shape)
    }

    /// [`attention`](Self::attention) over buffers that continue each other: each has the positions from its origin to that
    /// of the next, in slots from 0 on, and maybe slots that do not count. Nothing is copied.
    ///
    /// # Shapes
    /// As above; buffers differ in their slots only, and are 256 at most.
    pub fn attention_chained(
        &self,
        q: Tensor<4>,
        chain: Vec<DenseKv>,
        positions: &Positions,
        shape: &AttentionShape,
    ) -> Tensor<4> {
        let (dims, most) = (q.dims(), attention::LONGEST_CHAIN);
        assert!((1..=most).contains(&chain.len()), "attention: {} buffers, not 1 to {most}", chain.len());
        let positions = on_device("attention", positions, dims[0]);
        let (y, path) = self.attend(q, Buffers::chain(chain, shape), positions);
        self.recorder.record(Kernel::Attention, path, &dims);
        y
    }

    /// The path beside the result, which is not recorded.
    fn attend(&self, q: Tensor<4>, chain: Vec<Buffers>, positions: Tensor<2, Int>) -> (Tensor<4>, Path) {
        let chain: Vec<_> = chain.into_iter().map(|buffers| buffers.for_queries(&q)).collect();
        #[cfg(feature = "cpu")]
        if self.recorder.is_native()
            && let Some(y) = attention::native(&q, &chain, &positions)
        {
            return (y, Path::Native);
        }
        #[cfg(feature = "cube")]
        if q.dims()[3] > attention::LARGEST_HEAD
            || q.shape().num_elements() == 0
            || chain.iter().any(Buffers::are_empty)
        {
            return (attention::definition(q, chain, positions), Path::Definition);
        }
        let path = self.recorder.path(Kernel::Attention);
        let y = match path {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => attention::wgsl(q, chain, positions),
            #[cfg(feature = "cube")]
            Path::Cube => attention::cube(q, chain, positions),
            _ => attention::definition(q, chain, positions),
        };
        (y, path)
    }

    /// Whether [`sample`](Self::sample) is a kernel here. The definition sorts, which Burn does on the host.
    pub fn samples(&self) -> bool {
        matches!(self.recorder.path(Kernel::Sample), Path::Wgsl | Path::Cube)
    }

    /// The next token of each row, as transformers' processors and a draw make it of logits; -1 where the scores are no
    /// distribution: one of them is not a number or infinite, or none is left.
    ///
    /// In place where `draws` holds the only handles of its memory: a captured step goes on from the step before.
    ///
    /// # Shapes
    /// - logits: `[rows, 1, vocab]`
    /// - the token: `[rows, 1]`, int32
    pub fn sample(
        &self,
        logits: Tensor<3>,
        mut draws: Draws,
        sampling: &Sampling,
    ) -> (Tensor<2, Int>, Draws) {
        let [rows, tokens, vocab] = logits.dims();
        assert!(tokens == 1 && vocab > 0, "sample: logits {:?}", logits.dims());
        assert!(draws.words.dims()[0] == rows && draws.words.dims()[1] > 0, "sample: words");
        assert_eq!(draws.used.dims(), [rows], "sample: steps of each row");
        draws.words = draws.words.cast(IntDType::I32);
        draws.used = draws.used.cast(IntDType::I32);
        draws.occurred = draws.occurred.map(|occurred| {
            assert_eq!(occurred.dims(), [rows, vocab], "sample: tokens that occurred");
            occurred.cast(IntDType::I32)
        });
        match self.recorder.run(Kernel::Sample, &logits.dims()) {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => sample::wgsl(logits, draws, sampling),
            #[cfg(feature = "cube")]
            Path::Cube => sample::cube(logits, draws, sampling),
            _ => sample::definition(logits, draws, sampling),
        }
    }

    /// What was launched so far, here and in clones. What a captured graph repeats is not counted again.
    pub fn ran(&self) -> Vec<Ran> {
        self.recorder.ran()
    }
}

/// The positions of `rows` rows, as kernels read them.
fn on_device(kernel: &str, positions: &Positions, rows: usize) -> Tensor<2, Int> {
    assert_eq!(positions.on_device.dims(), [2, rows], "{kernel}: positions");
    positions.on_device.clone().cast(IntDType::I32)
}

/// The finished text of every WGSL shader in every permutation, under a name that says which.
pub fn shaders() -> Vec<(String, String)> {
    let shaders = [
        rms_norm::SHADER,
        rotary::SHADER,
        kv_append::SHADER,
        kv_unpack::SHADER,
        linear::SHADER,
        gated::SHADER,
        sample::SHADER,
    ];
    let shaders = shaders.into_iter().chain(kv_pack::SHADERS).chain(attention::SHADERS);
    shaders.flat_map(|shader| shader.permutations()).collect()
}
