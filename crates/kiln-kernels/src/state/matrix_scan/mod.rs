//! The scan of a mixer whose state is a matrix: the gated delta rule (Yang et al., 2024,
//! <https://arxiv.org/abs/2412.06464>) and Mamba-2 (Dao and Gu, 2024, <https://arxiv.org/abs/2405.21060>).
//!
//! Each head of a row has a state `S` of `[keys, values]`. A token has a query and a key of `keys` numbers,
//! which some heads share, a value of `values` numbers, and a decay `a` between 0 and 1. Token by token,
//! `S ← a S + k wᵀ`, and the result is `Sᵀ q`, where `w` is
//!
//! - for the delta rule `b (v - a Sᵀ k)`: what the value adds to what the state has for the key. Queries and
//!   keys are divided by their lengths, and queries by the root of `keys`;
//! - for Mamba-2 `Δ v`. Here `d v` is added to the result.
//!
//! All states and intermediate numbers are float32; the result is rounded once. Tokens follow one after the
//! other, so a token has the same bits however tokens are divided into passes.
//! (`torch_recurrent_gated_delta_rule` and `Mamba2Mixer` of transformers)
//!
//! States are too large to keep one for each of several tokens. So that some tokens can be taken back, the
//! state that is kept is an older one, and a journal has what the tokens after it brought along. Each scan
//! begins with these tokens again.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{Bool, DType, Tensor, activation::sigmoid};
use kiln_core::layer::{Positions, RowPosition};

use crate::{
    cache::kv_append::written,
    runtime::{
        choice::Implementation,
        kernel::{Kernel, checked_positions},
        shader::Shader,
    },
    state::{causal_conv::ascending, functions::softplus},
    testing::{
        case::{Case, LARGEST, Rounding},
        checked::Checked,
        cut::{Extent, cut_positions, cut_rows},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Scans the tokens of each row, starting from a state and the tokens in a journal. Returns the result, and
/// state and journal after the scan.
///
/// State and journal are written in place if they are the only handles of their memory, and to copies
/// otherwise.
///
/// # Shapes
/// The result is `[rows, tokens, heads · values]`.
#[derive(Clone, Debug)]
pub struct MatrixScan {
    /// `[rows, tokens, 2 · key_heads · keys + heads · values]`: queries, keys and values, in the order of the
    /// rule
    pub x: Tensor<3>,
    /// `[rows, tokens, heads]`: the step size of each head, before softplus; preceded by `b` before its
    /// sigmoid, of the same size, for the delta rule. Cast to the type of x
    pub steps: Tensor<3>,
    /// `[3, heads]`, cast to float32: the rate of decay, which is negative; the bias of the step size; `d`,
    /// which the delta rule does not use
    pub heads: Tensor<2>,
    /// `[rows, heads · keys, 1, values]` in float32: the state before the tokens of the journal
    pub state: Tensor<4>,
    /// `[rows, 1, slots, numbers of x and steps]` in the type of x: what position `p` brought along is in
    /// slot `p mod slots`
    pub journal: Tensor<4>,
    /// Number of tokens that the state has not seen: before the scan, and after it. If there are some before,
    /// they and the tokens of the scan fit in the slots.
    pub journaled: [usize; 2],
    pub rule: MatrixRule,
    /// Number of heads of queries and keys; divides the number of heads.
    pub key_heads: usize,
    /// Whether head `h` has the keys `h mod key_heads`, and does not share them with the heads beside it
    pub alternates: bool,
    /// Positions of the tokens. Tokens at positions before `visible_from` are padding: they change nothing,
    /// and their results are 0.
    pub positions: Positions,
}

/// How a token changes a matrix state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixRule {
    /// The gated delta rule. `x` has queries, keys and values, in this order.
    GatedDelta,
    /// Mamba-2. `x` has values, keys and queries, in this order.
    Mamba2,
}

impl MatrixRule {
    /// Step sizes and gains per head.
    fn steps(self) -> usize {
        match self {
            Self::GatedDelta => 2,
            Self::Mamba2 => 1,
        }
    }

    /// Places of the first query, key and value in `x`.
    fn places(self, of_keys: usize, of_values: usize) -> [usize; 3] {
        match self {
            Self::GatedDelta => [0, of_keys, 2 * of_keys],
            Self::Mamba2 => [of_values + of_keys, of_values, 0],
        }
    }
}

/// Is added to the square of the length of queries and keys.
const EPS: f32 = 1e-6;

impl MatrixScan {
    /// Numbers of heads, keys and values.
    fn sizes(&self) -> [usize; 3] {
        let heads = self.heads.dims()[1];
        let [_, keys, _, values] = self.state.dims();
        [heads, keys / heads.max(1), values]
    }
}

impl Kernel for MatrixScan {
    const NAME: &'static str = "matrix_scan";
    type Output = (Tensor<3>, [Tensor<4>; 2]);

    fn checked(self) -> Self {
        let [rows, tokens, channels] = self.x.dims();
        let ([heads, keys, values], journaled, key_heads) = (self.sizes(), self.journaled, self.key_heads);
        let Self { x, steps, heads: of_heads, state, journal, rule, alternates, positions, .. } = self;
        assert!(heads * keys * values > 0, "matrix_scan: {heads} heads of {keys} and {values} numbers");
        assert!(
            key_heads > 0 && heads.is_multiple_of(key_heads),
            "matrix_scan: {key_heads} of {heads} heads"
        );
        assert_eq!(channels, 2 * key_heads * keys + heads * values, "matrix_scan: x and the state");
        let width = rule.steps() * heads;
        assert_eq!(steps.dims(), [rows, tokens, width], "matrix_scan: steps and x {:?}", x.dims());
        assert_eq!(of_heads.dims(), [3, heads], "matrix_scan: heads");
        assert_eq!(state.dims(), [rows, heads * keys, 1, values], "matrix_scan: state and x {:?}", x.dims());
        let slots = journal.dims()[2];
        assert!(slots > 0, "matrix_scan: a journal without slots");
        assert_eq!(journal.dims(), [rows, 1, slots, channels + width], "matrix_scan: journal and x");
        assert_eq!(state.dtype(), DType::F32, "matrix_scan: state");
        assert_eq!(journal.dtype(), x.dtype(), "matrix_scan: journal and x");
        let [before, after] = journaled;
        assert!(
            before == 0 || before + tokens <= slots,
            "matrix_scan: {before} and {tokens} in {slots} slots"
        );
        assert!(after <= (before + tokens).min(slots), "matrix_scan: {after} of {before} and {tokens} stay");
        let positions = checked_positions(positions, rows, Self::NAME);
        let (steps, of_heads) = (steps.cast(x.dtype()), of_heads.cast(DType::F32));
        Self { x, steps, heads: of_heads, state, journal, journaled, rule, key_heads, alternates, positions }
    }

    fn shape(&self) -> Vec<usize> {
        let [rows, tokens, _] = self.x.dims();
        let [heads, _, values] = self.sizes();
        [rows, tokens, heads * values].into()
    }

    /// Takes several launches per token, and never writes in place.
    fn reference(self) -> Self::Output {
        let [heads, keys, values] = self.sizes();
        let alternates = self.alternates;
        let Self { x, steps, heads: of_heads, state, journal, journaled, rule, key_heads, positions, .. } =
            self;
        let ([rows, tokens, channels], dtype) = (x.dims(), x.dtype());
        let ([before, after], [_, _, slots, width]) = (journaled, journal.dims());
        let y = Tensor::zeros([rows, tokens, heads * values], (&x.device(), dtype));
        let all = before + tokens;
        if all * rows == 0 {
            return (y, [state, journal]);
        }
        let first = positions.on_device.clone().narrow(0, 0, 1).transpose();
        let visible_from = positions.on_device.narrow(0, 1, 1).transpose();
        let new = Tensor::cat(vec![x, steps], 2);
        let mut inputs = Vec::new();
        if before > 0 {
            let places = (ascending(before, &first) + first.clone() - before as i64)
                .remainder_scalar(slots as i64)
                .reshape([rows, 1, before, 1])
                .expand([rows, 1, before, width]);
            inputs.push(journal.clone().gather(2, places).reshape([rows, before, width]));
        }
        if tokens > 0 {
            inputs.push(new.clone());
        }
        let inputs = Tensor::cat(inputs, 1).cast(DType::F32);
        let [q_at, k_at, v_at] = rule.places(key_heads * keys, heads * values);
        let of_keys = |at: usize| {
            let each = inputs.clone().narrow(2, at, key_heads * keys).reshape([rows, all, key_heads, keys]);
            let each = match rule {
                MatrixRule::GatedDelta => each.clone() / (each.square().sum_dim(3) + EPS).sqrt(),
                MatrixRule::Mamba2 => each,
            };
            let sharing = heads / key_heads;
            let shared = match alternates {
                true => each
                    .reshape([rows, all, 1, key_heads, keys])
                    .expand([rows, all, sharing, key_heads, keys]),
                false => each
                    .reshape([rows, all, key_heads, 1, keys])
                    .expand([rows, all, key_heads, sharing, keys]),
            };
            shared.reshape([rows, all, heads, keys])
        };
        let queries = of_keys(q_at);
        let queries = match rule {
            MatrixRule::GatedDelta => queries / (keys as f64).sqrt(),
            MatrixRule::Mamba2 => queries,
        };
        let of_keys = of_keys(k_at);
        let of_values = inputs.clone().narrow(2, v_at, heads * values).reshape([rows, all, heads, values]);
        let row_of = |row: usize| of_heads.clone().narrow(0, row, 1).reshape([1, 1, heads]);
        let step = inputs.clone().narrow(2, channels + (rule.steps() - 1) * heads, heads);
        let step = softplus(step + row_of(1));
        let decay = (step.clone() * row_of(0)).exp();
        let gain = match rule {
            MatrixRule::GatedDelta => sigmoid(inputs.narrow(2, channels, heads)),
            MatrixRule::Mamba2 => step,
        };
        let is_visible: Tensor<2, Bool> = (ascending(all, &first) + first.clone() - before as i64)
            .greater_equal(visible_from.expand([rows, all]));

        let mut s = state.clone().reshape([rows, heads, keys, values]);
        let mut kept = s.clone();
        let mut results = Vec::with_capacity(tokens);
        for t in 0..all {
            let at = |tensor: &Tensor<4>, shape: [usize; 4]| tensor.clone().narrow(1, t, 1).reshape(shape);
            let number = |tensor: &Tensor<3>| tensor.clone().narrow(1, t, 1).reshape([rows, heads, 1, 1]);
            let [q, k] = [&queries, &of_keys].map(|of| at(of, [rows, heads, keys, 1]));
            let v = at(&of_values, [rows, heads, 1, values]);
            let decayed = s.clone() * number(&decay);
            let w = match rule {
                MatrixRule::GatedDelta => v.clone() - (decayed.clone() * k.clone()).sum_dim(2),
                MatrixRule::Mamba2 => v.clone(),
            };
            let seen = is_visible.clone().narrow(1, t, 1).reshape([rows, 1, 1, 1]);
            let of = |shape: [usize; 4]| seen.clone().expand(shape);
            s = s.mask_where(of([rows, heads, keys, values]), decayed + k * (w * number(&gain)));
            if t + 1 + after == all {
                kept = s.clone();
            }
            if t >= before {
                let mut y = (s.clone() * q).sum_dim(2);
                if rule == MatrixRule::Mamba2 {
                    y = y + v * row_of(2).reshape([1, heads, 1, 1]);
                }
                let y = y.mask_fill(of([rows, heads, 1, values]).bool_not(), 0.0);
                results.push(y.reshape([rows, 1, heads * values]));
            }
        }
        let state = kept.reshape([rows, heads * keys, 1, values]);
        if tokens == 0 {
            return (y, [state, journal]);
        }
        let latest = tokens.min(slots);
        let entries = new.narrow(1, tokens - latest, latest).reshape([rows, 1, latest, width]);
        let journal = written(journal, entries, first + (tokens - latest) as i64);
        (Tensor::cat(results, 1).cast(dtype), [state, journal])
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Self::Output, Self> {
        native::scanned(self)
    }

    /// The `#[cube]` function, which compiles to WGSL, too.
    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Self::Output, Self> {
        cube::launch(self)
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Self::Output, Self> {
        cube::launch(self)
    }
}

impl Checked for MatrixScan {
    /// Rows only, because a token depends on the ones before it.
    fn extent(&self) -> [usize; 2] {
        [self.x.dims()[0], 1]
    }

    fn part(self, part: Extent) -> Self {
        let positions = cut_positions(&self.positions, &part, 0, usize::MAX);
        let [rows, _] = &part;
        let [x, steps] = [self.x, self.steps].map(|tensor| cut_rows(tensor, rows));
        let [state, journal] = [self.state, self.journal].map(|tensor| cut_rows(tensor, rows));
        Self { x, steps, state, journal, positions, ..self }
    }

    fn part_of((y, memory): Self::Output, [rows, _]: Extent) -> Self::Output {
        (cut_rows(y, &rows), memory.map(|tensor| cut_rows(tensor, &rows)))
    }

    fn shaders() -> &'static [Shader] {
        &[]
    }

    fn cases() -> Vec<Case<Self>> {
        let mut cases = Vec::new();
        for rule in [MatrixRule::GatedDelta, MatrixRule::Mamba2] {
            let given = Given { rule, ..GIVEN };
            for (rows, tokens, heads, key_heads, keys, values) in [
                (1, 1, 1, 1, 1, 1),
                (1, 1, 4, 2, 128, 128),
                (3, 1, 2, 2, 16, 40),
                (2, 5, 6, 3, 33, 17),
                (1, 37, 2, 1, 20, 8),
            ] {
                let base = Given { rows, tokens, heads, key_heads, keys, values, ..given };
                cases.extend([0, 6].map(|first| Given { first, ..base }));
                // Some of the tokens are journaled, before, after, or both.
                cases.push(Given { slots: 8, journaled: [0, tokens.min(4)], alternates: true, ..base });
                cases.push(Given { slots: 90, first: 50, journaled: [3, 0], ..base });
                cases.push(Given { slots: 90, first: 50, journaled: [40, 39], apart: 4, ..base });
                // Padding that ends before the tokens, among them, and after them.
                let padded = |padding| Given { padding, slots: 60, journaled: [3, 1], ..base };
                cases.extend([2, 5, 7, 60].map(padded));
            }
            cases.extend([2, 15, 48, 64, 100, 256, 300].map(|keys| Given { keys, ..given }));
            cases.extend([Cut(2), Swapped(0, 1), Swapped(1, 2)].map(|layout| Given { layout, ..given }));
            // With exponentials larger than any number, or NaN.
            cases.push(Given { times: 60.0, ..given });
            cases.push(Given { tokens: 0, ..given });
            cases.push(Given { tokens: 0, slots: 6, first: 7, journaled: [3, 1], ..given });
        }
        cases.into_iter().map(Given::case).collect()
    }
}

/// Rows of a state for each lane, for each variant of the kernel.
#[cfg(feature = "cube")]
const ROWS: [usize; 5] = [2, 4, 8, 16, 32];

/// Lanes that divide the rows of a state among themselves, and columns of a state per workgroup.
#[cfg(feature = "cube")]
const PARTS: usize = 8;
#[cfg(feature = "cube")]
const COLUMNS: usize = 16;

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    rule: MatrixRule,
    rows: usize,
    tokens: usize,
    heads: usize,
    key_heads: usize,
    keys: usize,
    values: usize,
    layout: Layout,
    slots: usize,
    journaled: [usize; 2],
    first: usize,
    /// Row `b` starts `apart · b` positions after the first row.
    apart: usize,
    /// Padding of the first row.
    padding: usize,
    /// Factor of the steps.
    times: f64,
    alternates: bool,
}

const GIVEN: Given = Given {
    rule: MatrixRule::GatedDelta,
    rows: 2,
    tokens: 5,
    heads: 4,
    key_heads: 2,
    keys: 16,
    values: 24,
    layout: Plain,
    slots: 1,
    journaled: [0, 0],
    first: 6,
    apart: 0,
    padding: 0,
    times: 1.0,
    alternates: false,
};

impl Given {
    fn inputs(&self, numbers: &mut Numbers) -> MatrixScan {
        let Self { rule, rows, tokens, heads, key_heads, keys, values, layout, .. } = *self;
        let row = |row| RowPosition {
            first: self.first + row * self.apart,
            visible_from: if row == 0 { self.padding } else { 0 },
            base: 0,
        };
        let (channels, steps) = (2 * key_heads * keys + heads * values, rule.steps() * heads);
        let rate = -(numbers.float32([1, heads]).abs() + 0.1);
        MatrixScan {
            x: numbers.tensor([rows, tokens, channels], layout),
            steps: numbers.tensor([rows, tokens, steps], layout) * self.times,
            heads: Tensor::cat(vec![rate, numbers.float32([2, heads])], 0),
            state: numbers.float32([rows, heads * keys, 1, values]),
            journal: numbers.tensor([rows, 1, self.slots, channels + steps], Plain),
            journaled: self.journaled,
            rule,
            key_heads,
            alternates: self.alternates,
            positions: Positions::new((0..rows).map(row).collect(), numbers.device()),
        }
    }

    fn case(self) -> Case<MatrixScan> {
        let Self { rule, tokens, keys, journaled, times, .. } = self;
        let case = Case::new(self, move |numbers| self.inputs(numbers));
        let case = case.without(move |path, _| {
            [Implementation::Wgsl, Implementation::Cube].contains(&path) && keys > 256
        });
        let all = (tokens + journaled[0]) as f64;
        let root = (keys as f64).sqrt();
        // The delta rule never makes a column of the state longer, except by the value; Mamba-2 adds a key
        // times a value times a step.
        let (column, query) = match rule {
            MatrixRule::GatedDelta => (root * LARGEST + all * LARGEST, 1.0 / root),
            MatrixRule::Mamba2 => {
                let step = LARGEST * (times + 1.0) + 1.0;
                (root * LARGEST * (1.0 + all * step * LARGEST), LARGEST * root)
            }
        };
        case.within(move |want, Rounding { single, ulp, .. }| {
            // States are compared, too: their numbers are no larger than the column.
            single * (24.0 + 2.0 * root) * (1.0 + all) * column * query.max(1.0) + want.abs() * ulp
        })
    }
}
