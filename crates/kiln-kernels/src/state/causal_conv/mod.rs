//! The causal depthwise convolution of a state-space mixer (Gu and Dao, 2023,
//! <https://arxiv.org/abs/2312.00752>), which remembers its latest inputs.
//!
//! `y[b, t, c] = silu(bias[c] + Σ_k weight[c, k] · input[b, first[b] + t - width + 1 + k, c])`, or the same
//! without silu. Inputs at positions before the row begins, or in its padding, are 0, and so are the results
//! for padding. Inputs before `first` are in a ring buffer. Sums are float32, and rounded once.
//! (`causal_conv1d_fn` and `causal_conv1d_update` of transformers)

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Int, Tensor, activation::silu};
use kiln_core::layer::{Positions, RowPosition};

use crate::{
    cache::kv_append::written,
    runtime::{
        kernel::{Kernel, checked_positions},
        shader::{Shader, reads, updates, writes},
    },
    testing::{
        case::{Case, LARGEST, Rounding},
        checked::Checked,
        cut::{Extent, cut_positions, cut_rows},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Convolves each channel with its own earlier inputs. Returns the result and the ring buffer, which then
/// holds the latest inputs.
///
/// The ring is written in place if it is the only handle of its memory, and to a copy otherwise. The result
/// for a token has the same bits however tokens are divided into passes.
///
/// # Shapes
/// The result has the shape of x.
#[derive(Clone, Debug)]
pub struct CausalConv {
    /// `[rows, tokens, channels]`
    pub x: Tensor<3>,
    /// `[channels, width]`, cast to the type of x; the last column is for the token itself
    pub weight: Tensor<2>,
    /// `[channels]`, cast to the type of x
    pub bias: Option<Tensor<1>>,
    /// Whether SiLU is applied to the result
    pub silu: bool,
    /// `[rows, 1, slots, channels]` with `slots ≥ width - 1`, in the type of x: the input at position `p` is
    /// in slot `p mod slots`
    pub ring: Tensor<4>,
    /// Positions of the tokens. Positions before `visible_from` are padding.
    pub positions: Positions,
}

impl Kernel for CausalConv {
    const NAME: &'static str = "causal_conv";
    type Output = (Tensor<3>, Tensor<4>);

    fn checked(self) -> Self {
        let Self { x, weight, bias, silu, ring, positions } = self;
        let ([rows, _, channels], [of, width]) = (x.dims(), weight.dims());
        assert_eq!(of, channels, "causal_conv: weight and x {:?}", x.dims());
        let [ring_rows, one, slots, of] = ring.dims();
        assert_eq!([ring_rows, one, of], [rows, 1, channels], "causal_conv: ring and x {:?}", x.dims());
        assert!(width > 0 && slots + 1 >= width.max(2), "causal_conv: {slots} slots for {width} inputs");
        let dtype = x.dtype();
        assert_eq!(ring.dtype(), dtype, "causal_conv: ring and x");
        let bias = bias.map(|bias| {
            assert_eq!(bias.dims(), [channels], "causal_conv: bias and x");
            bias.cast(dtype)
        });
        let positions = checked_positions(positions, rows, Self::NAME);
        Self { weight: weight.cast(dtype), bias, silu, x, ring, positions }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    /// Computes the result without writing in place.
    fn reference(self) -> Self::Output {
        let Self { x, weight, bias, silu: activated, ring, positions } = self;
        let ([rows, tokens, channels], [_, width]) = (x.dims(), weight.dims());
        let (slots, dtype) = (ring.dims()[2], x.dtype());
        let first = positions.on_device.clone().narrow(0, 0, 1).transpose();
        let visible_from = positions.on_device.narrow(0, 1, 1).transpose();
        if tokens == 0 {
            return (x, ring);
        }
        // Whether inputs count, for `n` positions from `before` positions before the first: `[rows, n, 1]`.
        let counts = |before: usize, n: usize| {
            let positions = ascending(n, &first) + first.clone() - before as i64;
            positions.greater_equal(visible_from.clone().expand([rows, n])).reshape([rows, n, 1])
        };
        let only = |x: Tensor<3>, counts: Tensor<3, burn::tensor::Bool>| {
            let shape = x.shape();
            x.mask_fill(counts.expand(shape).bool_not(), 0.0)
        };
        let x = only(x, counts(0, tokens));
        let mut inputs = vec![x.clone()];
        if width > 1 {
            let places = (ascending(width - 1, &first) + first.clone() - (width as i64 - 1))
                .remainder_scalar(slots as i64)
                .reshape([rows, 1, width - 1, 1])
                .expand([rows, 1, width - 1, channels]);
            let before = ring.clone().gather(2, places).reshape([rows, width - 1, channels]);
            inputs.insert(0, only(before, counts(width - 1, width - 1)));
        }
        let inputs = Tensor::cat(inputs, 1).cast(DType::F32);
        let mut sum = match bias {
            Some(bias) => bias.cast(DType::F32).reshape([1, 1, channels]).expand([rows, tokens, channels]),
            None => Tensor::zeros([rows, tokens, channels], (&inputs.device(), DType::F32)),
        };
        for k in 0..width {
            let weight = weight.clone().narrow(1, k, 1).cast(DType::F32).reshape([1, 1, channels]);
            sum = sum + inputs.clone().narrow(1, k, tokens) * weight;
        }
        let sum = if activated { silu(sum) } else { sum };
        let y = only(sum.cast(dtype), counts(0, tokens));

        let kept = tokens.min(slots);
        let latest = x.narrow(1, tokens - kept, kept).reshape([rows, 1, kept, channels]);
        (y, written(ring, latest, first + (tokens - kept) as i64))
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Self::Output, Self> {
        native::convolved(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Self::Output, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, empty, empty_like, in_order, primitive, strides, to_write},
            shaders::causal_conv::Info,
        };

        let ([rows, tokens, channels], [_, width]) = (self.x.dims(), self.weight.dims());
        let Some(width_option) = WIDTHS.iter().position(|&known| known == width) else { return Err(self) };
        let Self { x, weight, bias, silu, ring, positions } = self;
        let slots = ring.dims()[2];
        let (x, weight, ring) = (primitive(x), primitive(weight), to_write(primitive(ring)));
        let biased = bias.is_some();
        let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
        let y = empty_like(&x);
        let blocks = tokens.div_ceil(BLOCK);
        let invocations = rows * blocks * channels;
        let positions = in_order(positions.on_device);
        let ([bias_stride], [ring0, _, ring2, ring3]) = (strides(&bias), strides(&ring));
        let info = Info {
            x_strides: strides(&x),
            tokens: tokens as u32,
            ring_strides: [ring0, ring2, ring3],
            slots: slots as u32,
            weight_strides: strides(&weight),
            bias_stride,
            biased: u32::from(biased),
            activated: u32::from(silu),
            channels: channels as u32,
            blocks: blocks as u32,
            invocations: invocations as u32,
        };
        let launch = Launch::new(&SHADER, x.dtype, &y.client).with(&[width_option]);
        launch.run(invocations.div_ceil(LANES), [&x, &weight, &bias, &ring, &positions, &y], info);
        Ok((Tensor::from_primitive::<Cube>(y), Tensor::from_primitive::<Cube>(ring)))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Self::Output, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for CausalConv {
    /// Rows only, because a token depends on the ones before it.
    fn extent(&self) -> [usize; 2] {
        [self.x.dims()[0], 1]
    }

    fn part(self, part: Extent) -> Self {
        let positions = cut_positions(&self.positions, &part, 0, usize::MAX);
        let [rows, _] = &part;
        Self { x: cut_rows(self.x, rows), ring: cut_rows(self.ring, rows), positions, ..self }
    }

    fn part_of((y, ring): Self::Output, [rows, _]: Extent) -> Self::Output {
        (cut_rows(y, &rows), cut_rows(ring, &rows))
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let mut cases = Vec::new();
        for (rows, tokens, channels) in
            [(1, 1, 1), (1, 1, 260), (3, 1, 48), (2, 5, 33), (1, 37, 8), (3, 18, 5)]
        {
            let base = Given { x: [rows, tokens, channels], ..GIVEN };
            // The beginning, fewer positions before it than the convolution reaches, more; then rings that
            // wrap.
            cases.extend([0, 1, 2, 3, 50].map(|first| Given { first, ..base }));
            cases.extend([4, 9].map(|slots| Given { slots, first: 12, ..base }));
            cases.push(Given { first: 5, apart: 4, ..base });
            // Padding that ends before the tokens, among them, and after them.
            cases.extend([3, 7, 60].map(|padding| Given { padding, first: 5, ..base }));
            cases.push(Given { bias: false, ..base });
            cases.push(Given { silu: false, ..base });
        }
        cases.extend([1, 2, 3, 5, 8].map(|width| Given { width, slots: 7, first: 9, ..GIVEN }));
        cases.extend([Cut(2), Swapped(0, 1), Swapped(1, 2)].map(|layout| Given { layout, ..GIVEN }));
        cases.push(Given { x: [2, 0, 8], ..GIVEN });
        cases.into_iter().map(Given::case).collect()
    }
}

/// Widths that the shader supports, each a line of its option.
#[cfg(feature = "wgpu")]
const WIDTHS: [usize; 4] = [4, 3, 2, 8];

/// Tokens per invocation.
#[cfg(feature = "cube")]
const BLOCK: usize = 16;

const SHADER: Shader = Shader {
    name: "causal_conv",
    bindings: &[reads("x"), reads("weight"), reads("bias"), updates("ring"), reads("positions"), writes("y")],
    text: include_str!("../../../../../shaders/causal_conv.wgsl"),
    options: &[|| &["const WIDTH = 4u;", "const WIDTH = 3u;", "const WIDTH = 2u;", "const WIDTH = 8u;"]],
};

/// Returns `0..n` as `[1, n]`. Not `arange`: it uploads its numbers, which a captured step must not do.
pub(crate) fn ascending(n: usize, like: &Tensor<2, Int>) -> Tensor<2, Int> {
    Tensor::<2, Int>::ones([1, n], (&like.device(), like.dtype())).cumsum(1) - 1
}

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    x: [usize; 3],
    layout: Layout,
    width: usize,
    slots: usize,
    first: usize,
    /// Row `b` starts `apart · b` positions after the first row.
    apart: usize,
    /// Padding of the first row.
    padding: usize,
    bias: bool,
    silu: bool,
}

const GIVEN: Given = Given {
    x: [2, 5, 33],
    layout: Plain,
    width: 4,
    slots: 3,
    first: 6,
    apart: 0,
    padding: 0,
    bias: true,
    silu: true,
};

impl Given {
    fn inputs(&self, numbers: &mut Numbers) -> CausalConv {
        let Self { x, layout, width, slots, first, apart, padding, bias, silu } = *self;
        let [rows, _, channels] = x;
        let row = |row| RowPosition {
            first: first + row * apart,
            visible_from: if row == 0 { padding } else { 0 },
            base: 0,
        };
        CausalConv {
            x: numbers.tensor(x, layout),
            weight: numbers.tensor([channels, width], Plain),
            bias: bias.then(|| numbers.tensor([channels], Plain)),
            silu,
            ring: numbers.tensor([rows, 1, slots, channels], Plain),
            positions: Positions::new((0..rows).map(row).collect(), numbers.device()),
        }
    }

    fn case(self) -> Case<CausalConv> {
        // A sum of `width` products and the bias, each with an error of one rounding of a sum that is no
        // larger; SiLU magnifies by 1.1 at most, and adds a few roundings of its own.
        let terms = self.width as f64 + 1.0;
        let case = Case::new(self, move |numbers| self.inputs(numbers));
        let width = self.width;
        let case = case.without(move |path, _| {
            path == crate::runtime::choice::Implementation::Wgsl && ![2, 3, 4, 8].contains(&width)
        });
        case.within(move |want, Rounding { single, ulp, .. }| {
            single * (1.1 * terms + 8.0) * terms * LARGEST * LARGEST + want.abs() * ulp
        })
    }
}
