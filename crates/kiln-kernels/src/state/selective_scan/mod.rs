//! The selective scan of a state-space mixer (Gu and Dao, 2023, <https://arxiv.org/abs/2312.00752>).
//!
//! Each channel of a row has a state `h` of `n` numbers. With `Δ = softplus(dt)`, token by token,
//!
//! `h ← exp(Δ a) h + Δ x b`, and `y = (Σ c h + d x) · silu(gate)`.
//!
//! The state and all intermediate numbers are float32; the result is rounded once. The channels of a row are
//! scanned in parallel, and tokens one after the other. So nothing of shape `[tokens, channels, n]` is ever
//! in memory, and the result for a token has the same bits however tokens are divided into passes.
//! (`selective_scan_fn` and `selective_state_update` of transformers)

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Tensor, activation::silu};
use kiln_core::layer::{Positions, RowPosition};

use crate::{
    cache::kv_append::written,
    runtime::{
        kernel::{Kernel, checked_positions},
        shader::{Shader, reads, updates, writes},
    },
    state::functions::softplus,
    testing::{
        case::{Case, LARGEST, Rounding},
        checked::Checked,
        cut::{Extent, cut_positions, cut_rows},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Scans the tokens of each row, starting from the state in a ring buffer. Returns the result and the ring,
/// which then holds the latest states.
///
/// The ring is written in place if it is the only handle of its memory, and to a copy otherwise.
///
/// # Shapes
/// The result has the shape of x.
#[derive(Clone, Debug)]
pub struct SelectiveScan {
    /// `[rows, tokens, channels]`
    pub x: Tensor<3>,
    /// Step size of each token before softplus, in the shape of x and cast to its type
    pub dt: Tensor<3>,
    /// `[rows, tokens, 2 n]`: how a token enters the `n` numbers of a state, and how it reads them; cast to
    /// the type of x
    pub bc: Tensor<3>,
    /// Gate of the result, in the shape of x and cast to its type
    pub gate: Tensor<3>,
    /// `[n + 1, channels]`, cast to float32: `a`, which is negative, and `d` in the last row
    pub ad: Tensor<2>,
    /// `[rows, n, slots, channels]` in float32: the state after `i` tokens is in slot `i mod slots`
    pub ring: Tensor<4>,
    /// Positions of the tokens. The state before position 0 is 0.
    pub positions: Positions,
}

impl Kernel for SelectiveScan {
    const NAME: &'static str = "selective_scan";
    type Output = (Tensor<3>, Tensor<4>);

    fn checked(self) -> Self {
        let Self { x, dt, bc, gate, ad, ring, positions } = self;
        let ([rows, tokens, channels], [ring_rows, states, slots, of]) = (x.dims(), ring.dims());
        assert_eq!([dt.dims(), gate.dims()], [x.dims(); 2], "selective_scan: dt, gate and x");
        assert_eq!(bc.dims(), [rows, tokens, 2 * states], "selective_scan: bc and x {:?}", x.dims());
        assert_eq!(ad.dims(), [states + 1, channels], "selective_scan: ad and x {:?}", x.dims());
        assert_eq!([ring_rows, of], [rows, channels], "selective_scan: ring and x {:?}", x.dims());
        assert!(states > 0 && slots > 0, "selective_scan: {states} numbers in {slots} slots");
        assert_eq!(ring.dtype(), DType::F32, "selective_scan: ring");
        let dtype = x.dtype();
        let positions = checked_positions(positions, rows, Self::NAME);
        let [dt, bc, gate] = [dt, bc, gate].map(|tensor| tensor.cast(dtype));
        Self { dt, bc, gate, ad: ad.cast(DType::F32), x, ring, positions }
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    /// Takes several launches per token, and never writes in place.
    fn reference(self) -> Self::Output {
        let Self { x, dt, bc, gate, ad, ring, positions } = self;
        let ([rows, tokens, channels], [_, states, slots, _]) = (x.dims(), ring.dims());
        if rows * tokens * channels == 0 {
            return (x, ring);
        }
        let dtype = x.dtype();
        let [x, dt, bc, gate] = [x, dt, bc, gate].map(|tensor| tensor.cast(DType::F32));
        let a = ad.clone().narrow(0, 0, states).reshape([1, states, channels]);
        let d = ad.narrow(0, states, 1).reshape([1, 1, channels]);
        let dt = softplus(dt);

        let first = positions.on_device.narrow(0, 0, 1).transpose();
        let place = first.clone().remainder_scalar(slots as i64).reshape([rows, 1, 1, 1]);
        let h = ring.clone().gather(2, place.expand([rows, states, 1, channels]));
        let is_first = first.clone().equal_elem(0).reshape([rows, 1, 1]).expand([rows, states, channels]);
        let mut h = h.reshape([rows, states, channels]).mask_fill(is_first, 0.0);

        let kept = tokens.min(slots);
        let (mut latest, mut sums) = (Vec::with_capacity(kept), Vec::with_capacity(tokens));
        for t in 0..tokens {
            let at = |tensor: &Tensor<3>| tensor.clone().narrow(1, t, 1);
            let column = |from| at(&bc).narrow(2, from, states).reshape([rows, states, 1]);
            let (dt, x) = (at(&dt), at(&x));
            h = (dt.clone() * a.clone()).exp() * h + dt * x * column(0);
            sums.push((h.clone() * column(states)).sum_dim(1));
            if t + kept >= tokens {
                latest.push(h.clone().reshape([rows, states, 1, channels]));
            }
        }
        let y = (Tensor::cat(sums, 1) + x * d) * silu(gate);
        let ring = written(ring, Tensor::cat(latest, 2), first + (tokens - kept + 1) as i64);
        (y.cast(dtype), ring)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Self::Output, Self> {
        native::scanned(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Self::Output, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{Launch, empty_like, in_order, primitive, strides, to_write},
            shaders::selective_scan::Info,
        };

        let ([rows, tokens, channels], [_, states, slots, _]) = (self.x.dims(), self.ring.dims());
        let fours = states.div_ceil(4);
        let Some(option) = FOURS.iter().position(|&most| fours <= most) else { return Err(self) };
        let Self { x, dt, bc, gate, ad, ring, positions } = self;
        let [x, dt, bc, gate] = [x, dt, bc, gate].map(primitive);
        let (ad, ring) = (primitive(ad), to_write(primitive(ring)));
        let y = empty_like(&x);
        let groups = channels.div_ceil(SCAN_LANES);
        let positions = in_order(positions.on_device);
        let info = Info {
            x_strides: strides(&x),
            tokens: tokens as u32,
            dt_strides: strides(&dt),
            channels: channels as u32,
            bc_strides: strides(&bc),
            states: states as u32,
            gate_strides: strides(&gate),
            slots: slots as u32,
            ring_strides: strides(&ring),
            ad_strides: strides(&ad),
            groups: groups as u32,
            workgroups: (rows * groups) as u32,
        };
        let launch = Launch::new(&SHADER, x.dtype, &y.client).with(&[option]);
        launch.run(rows * groups, [&x, &dt, &bc, &gate, &ad, &ring, &positions, &y], info);
        Ok((Tensor::from_primitive::<Cube>(y), Tensor::from_primitive::<Cube>(ring)))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Self::Output, Self> {
        cube::launch(self)
    }
}

impl Checked for SelectiveScan {
    /// Rows only, because a token depends on the ones before it.
    fn extent(&self) -> [usize; 2] {
        [self.x.dims()[0], 1]
    }

    fn part(self, part: Extent) -> Self {
        let positions = cut_positions(&self.positions, &part, 0, usize::MAX);
        let [rows, _] = &part;
        let [x, dt, bc, gate] = [self.x, self.dt, self.bc, self.gate].map(|tensor| cut_rows(tensor, rows));
        Self { x, dt, bc, gate, ring: cut_rows(self.ring, rows), positions, ..self }
    }

    fn part_of((y, ring): Self::Output, [rows, _]: Extent) -> Self::Output {
        (cut_rows(y, &rows), cut_rows(ring, &rows))
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let mut cases = Vec::new();
        for (rows, tokens, channels) in [(1, 1, 1), (3, 1, 260), (1, 5, 33), (2, 37, 70), (3, 4, 16)] {
            let base = Given { x: [rows, tokens, channels], ..GIVEN };
            cases.extend([0, 1, 6].map(|first| Given { first, ..base }));
            cases.extend([2, 5, 40].map(|slots| Given { slots, first: 12, ..base }));
            // One of the rows begins at position 0.
            cases.push(Given { first: 0, apart: 3, slots: 2, ..base });
        }
        cases.extend([1, 4, 6, 20, 33, 64, 70].map(|states| Given { states, ..GIVEN }));
        cases.extend([Cut(2), Swapped(0, 1), Swapped(1, 2)].map(|layout| Given { layout, ..GIVEN }));
        // With exponentials larger than any number, or NaN.
        cases.push(Given { times: 60.0, ..GIVEN });
        cases.push(Given { x: [2, 0, 8], ..GIVEN });
        cases.into_iter().map(Given::case).collect()
    }
}

/// Fours of numbers in a state, for each variant of the shader.
#[cfg(feature = "cube")]
const FOURS: [usize; 4] = [4, 2, 8, 16];

/// Channels per workgroup: few, so that there are many workgroups.
#[cfg(feature = "cube")]
const SCAN_LANES: usize = 64;

const SHADER: Shader = Shader {
    name: "selective_scan",
    bindings: &[
        reads("x"),
        reads("dt"),
        reads("bc"),
        reads("gate"),
        reads("ad"),
        updates("ring"),
        reads("positions"),
        writes("y"),
    ],
    text: include_str!("../../../../../shaders/selective_scan.wgsl"),
    options: &[|| &["const FOURS = 4u;", "const FOURS = 2u;", "const FOURS = 8u;", "const FOURS = 16u;"]],
};

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    x: [usize; 3],
    layout: Layout,
    states: usize,
    slots: usize,
    first: usize,
    /// Row `b` starts `apart · b` positions after the first row.
    apart: usize,
    /// Factor of `dt` and the gate.
    times: f64,
}

const GIVEN: Given =
    Given { x: [2, 5, 33], layout: Plain, states: 16, slots: 1, first: 6, apart: 0, times: 1.0 };

impl Given {
    fn inputs(&self, numbers: &mut Numbers) -> SelectiveScan {
        let Self { x, layout, states, slots, first, apart, times } = *self;
        let [rows, tokens, channels] = x;
        let row = |row| RowPosition { first: first + row * apart, ..RowPosition::default() };
        let a = numbers.float32([states, channels]);
        let ad = Tensor::cat(vec![-(a.abs() + 0.1) * 2.0, numbers.float32([1, channels])], 0);
        SelectiveScan {
            x: numbers.tensor(x, layout),
            dt: numbers.tensor(x, Plain) * times,
            bc: numbers.tensor([rows, tokens, 2 * states], Cut(2)),
            gate: numbers.tensor(x, layout) * times,
            ad,
            ring: numbers.float32([rows, states, slots, channels]),
            positions: Positions::new((0..rows).map(row).collect(), numbers.device()),
        }
    }

    fn case(self) -> Case<SelectiveScan> {
        let Self { states, times, .. } = self;
        let case = Case::new(self, move |numbers| self.inputs(numbers));
        let case = case.without(move |path, _| {
            [crate::runtime::choice::Implementation::Wgsl, crate::runtime::choice::Implementation::Cube]
                .contains(&path)
                && states > 64
        });
        // A step keeps exp(-0.2 Δ) of a state or less, and adds Δ times two numbers. With Δ = 2 times at
        // most, that is a sum of numbers that each fall by a third: a state is no larger than that, and its
        // error is a few roundings of it for each of the exponential, its argument and the sum. Then follow a
        // sum over the state, and the gate.
        let delta = LARGEST * times + 1.0;
        let state = 3.0 * delta * LARGEST * LARGEST;
        let gated = LARGEST * times;
        case.within(move |want, Rounding { single, ulp, .. }| {
            let sum = states as f64 * state * LARGEST * gated;
            single * (24.0 + (states as f64).sqrt()) * sum.max(state) + want.abs() * ulp
        })
    }
}
