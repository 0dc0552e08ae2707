//! The table of cases.

use std::fmt;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln::{
    Result,
    kernels::{Activation, Choice, Kernels, Matrix, NormOrder, Path},
    memory::{Positions, RowPosition},
    read_back,
};

use super::{
    attention,
    numbers::{Cut, LARGEST, Layout, Numbers, Plain, Swapped},
};

/// One row of the table: a kernel, what it is given, and where it has no custom implementation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Case {
    RmsNorm {
        x: [usize; 3],
        layout: Layout,
        order: NormOrder,
    },
    Rotary {
        x: [usize; 4],
        layout: Layout,
        rotated: usize,
        tables: usize,
    },
    KvAppend {
        buffer: [usize; 4],
        layout: Layout,
        n: usize,
        new: Layout,
        position: usize,
        origin: usize,
        /// Row `b` stands `apart · b` behind the first.
        apart: usize,
    },
    Linear {
        x: [usize; 3],
        layout: Layout,
        output: usize,
        bias: bool,
        residual: bool,
    },
    /// The gate is `times` times as large as other numbers are.
    Gated {
        gate: [usize; 3],
        layout: Layout,
        activation: Activation,
        times: f64,
    },
    Attention(attention::Given),
}
use Case::{Attention, Gated, KvAppend, Linear, RmsNorm, Rotary};

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

pub(super) fn table() -> Vec<Case> {
    let mut cases = Vec::new();
    for order in [NormOrder::CastThenScale, NormOrder::ScaleThenCast] {
        for hidden in [1, 7, 80, 96, 257, 4096] {
            cases.push(RmsNorm { x: [1, 1, hidden], layout: Plain, order });
            cases.push(RmsNorm { x: [3, 5, hidden], layout: Plain, order });
        }
        cases.push(RmsNorm { x: [3, 5, 80], layout: Swapped(0, 1), order });
        cases.push(RmsNorm { x: [3, 5, 80], layout: Swapped(1, 2), order });
        cases.push(RmsNorm { x: [3, 5, 80], layout: Cut(1), order });
        cases.push(RmsNorm { x: [1, 0, 8], layout: Plain, order });
    }
    // More rows than workgroups along one axis.
    cases.push(RmsNorm { x: [3, 30_000, 2], layout: Plain, order: NormOrder::CastThenScale });

    for (head_dim, rotated) in
        [(8, 8), (12, 12), (12, 2), (64, 64), (80, 32), (80, 80), (96, 96), (128, 64), (256, 256)]
    {
        for (batch, heads, tokens) in [(1, 1, 1), (1, 8, 1), (3, 2, 5)] {
            cases.push(Rotary { x: [batch, heads, tokens, head_dim], layout: Plain, rotated, tables: batch });
            cases.push(Rotary {
                x: [batch, heads, tokens, head_dim],
                layout: Swapped(1, 2),
                rotated,
                tables: 1,
            });
        }
    }
    cases.push(Rotary { x: [3, 2, 5, 12], layout: Cut(2), rotated: 8, tables: 3 });
    cases.push(Rotary { x: [3, 2, 5, 12], layout: Swapped(2, 3), rotated: 12, tables: 3 });

    let capacity = 11;
    for head_dim in [8, 12, 64, 80, 96, 128, 256] {
        for (batch, heads, n) in [(1, 1, 1), (3, 2, 1), (1, 8, 5), (3, 2, 5)] {
            let buffer = [batch, heads, capacity, head_dim];
            // The first slot, one in the middle, the last, one from where the rest is at the front, and one that is
            // later than there are slots.
            for position in [0, 4, capacity - n, capacity - n + 1, 3 * capacity - 1] {
                cases.push(KvAppend { buffer, layout: Plain, n, new: Plain, position, origin: 0, apart: 0 });
            }
            cases.push(KvAppend {
                buffer,
                layout: Plain,
                n,
                new: Swapped(1, 2),
                position: 3,
                origin: 0,
                apart: 0,
            });
            // Slots that begin at a later position, in the first turn and in another.
            for position in [40, 47, 60] {
                cases.push(KvAppend { buffer, layout: Plain, n, new: Plain, position, origin: 40, apart: 0 });
            }
            // Rows of different lengths.
            for apart in [1, 4, capacity + 3] {
                cases.push(KvAppend {
                    buffer,
                    layout: Plain,
                    n,
                    new: Plain,
                    position: 45,
                    origin: 40,
                    apart,
                });
            }
        }
    }
    // As many as there are slots.
    cases.push(KvAppend {
        buffer: [3, 2, 11, 12],
        layout: Plain,
        n: 11,
        new: Plain,
        position: 7,
        origin: 0,
        apart: 0,
    });
    cases.push(KvAppend {
        buffer: [3, 2, 11, 12],
        layout: Plain,
        n: 0,
        new: Plain,
        position: 7,
        origin: 0,
        apart: 0,
    });
    cases.push(KvAppend {
        buffer: [3, 2, 11, 12],
        layout: Swapped(1, 2),
        n: 5,
        new: Plain,
        position: 3,
        origin: 0,
        apart: 0,
    });
    cases.push(KvAppend {
        buffer: [3, 2, 11, 12],
        layout: Plain,
        n: 5,
        new: Swapped(2, 3),
        position: 3,
        origin: 0,
        apart: 0,
    });
    cases.push(KvAppend {
        buffer: [3, 2, 11, 12],
        layout: Cut(2),
        n: 5,
        new: Cut(2),
        position: 3,
        origin: 0,
        apart: 0,
    });

    for (rows, tokens) in [(1, 1), (2, 1), (1, 3), (2, 2), (1, 5), (2, 16)] {
        for (input, output) in
            [(1, 1), (7, 3), (80, 96), (257, 300), (1024, 70), (1030, 41), (1032, 40), (520, 258)]
        {
            let (bias, residual) = (output % 2 == 0, output % 3 == 0);
            cases.push(Linear { x: [rows, tokens, input], layout: Plain, output, bias, residual });
        }
        let swapped = |a, b, residual| {
            let (x, layout) = ([rows, tokens, 96], Swapped(a, b));
            Linear { x, layout, output: 7, bias: true, residual }
        };
        cases.extend([swapped(0, 1, false), swapped(1, 2, true)]);
    }
    // Rows that lie apart, by a number that four divides and by one that it does not.
    let cut = |dim, bias| Linear { x: [2, 2, 96], layout: Cut(dim), output: 70, bias, residual: !bias };
    cases.extend([cut(1, true), cut(2, false)]);

    for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
        for gate in [[1, 1, 1], [1, 1, 640], [3, 5, 257]] {
            for layout in [Plain, Cut(2), Swapped(0, 1), Swapped(1, 2)] {
                cases.push(Gated { gate, layout, activation, times: 1.0 });
            }
        }
        // Where exponentials are larger than any number.
        cases.push(Gated { gate: [1, 1, 640], layout: Plain, activation, times: 100.0 });
        cases.push(Gated { gate: [1, 0, 640], layout: Plain, activation, times: 1.0 });
    }
    cases.extend(attention::cases().into_iter().map(Attention));
    cases
}

impl Case {
    pub(super) fn kernel(&self) -> &'static str {
        match self {
            RmsNorm { .. } => "rms_norm",
            Rotary { .. } => "rotary",
            KvAppend { .. } => "kv_append",
            Linear { .. } => "linear",
            Gated { .. } => "gated",
            Attention(_) => "attention",
        }
    }

    /// What `kernels` makes of it. The numbers are the same on every device.
    pub(super) fn run(&self, kernels: &Kernels, device: &Device, dtype: DType) -> Result<TensorData> {
        let mut numbers = Numbers::new(device, dtype);
        let result = match *self {
            RmsNorm { x, layout, order } => {
                let weight = numbers.tensor([x[2]], Plain);
                kernels.rms_norm(numbers.tensor(x, layout), weight, 0.01, order).reshape([-1])
            }
            Rotary { x, layout, rotated, tables } => {
                let mut table = || numbers.float32([tables, x[2], rotated / 2]);
                let (cos, sin) = (table(), table());
                kernels.rotary(numbers.tensor(x, layout), cos, sin).reshape([-1])
            }
            KvAppend { buffer, layout, n, new, position, origin, apart } => {
                let [batch, heads, _, dim] = buffer;
                let row = |row| RowPosition { first: position + row * apart, visible_from: 0 };
                let positions = Positions::new((0..batch).map(row).collect(), device);
                // Values lie as others' keys do.
                let buffers = [numbers.tensor(buffer, layout), numbers.tensor(buffer, Plain)];
                let mut tokens = |layout| numbers.tensor([batch, heads, n, dim], layout);
                let new = [tokens(new), tokens(Swapped(0, 3))];
                Tensor::cat(kernels.kv_append(buffers, new, &positions, origin).into(), 0).reshape([-1])
            }
            Linear { x, layout, output, bias, residual } => {
                let weight = Matrix::Dense(numbers.tensor([output, x[2]], Plain));
                let bias = bias.then(|| numbers.tensor([output], Plain));
                let residual = residual.then(|| numbers.tensor([x[0], x[1], output], Cut(2)));
                kernels.linear(numbers.tensor(x, layout), &weight, bias, residual).reshape([-1])
            }
            Gated { gate, layout, activation, times } => {
                let up = numbers.tensor(gate, Plain);
                kernels.gated(numbers.tensor(gate, layout) * times, up, activation).reshape([-1])
            }
            Attention(given) => given.run(kernels, device, dtype).reshape([-1]),
        };
        let result: Tensor<1> = result;
        assert_eq!(result.dtype(), dtype, "{self}");
        read_back::read(result)
    }

    /// What has to have run.
    pub(super) fn path(&self, choice: Choice, device: &str, dtype: DType) -> Path {
        match (self, choice, device) {
            (_, Choice::Definition, _) => Path::Definition,
            (Linear { x, layout, .. }, Choice::Auto, "cpu") => {
                // A dimension of length 1 can be exchanged with its neighbour without moving anything.
                let plain = match *layout {
                    Swapped(a, b) => x[a] == 1 || x[b] == 1,
                    layout => layout == Plain,
                };
                if dtype == DType::F32 && plain { Path::Native } else { Path::Definition }
            }
            (Linear { x: [rows, tokens, _], .. }, _, _) if rows * tokens > 4 => Path::Definition,
            (Attention(given), _, device) if !given.has_kernel(device) => Path::Definition,
            (_, Choice::Wgsl, _) | (_, Choice::Auto, "wgpu") => Path::Wgsl,
            (_, Choice::Cube, _) | (_, Choice::Auto, "cuda") => Path::Cube,
            (KvAppend { .. } | Attention(_), Choice::Auto, _) => Path::Native,
            (_, Choice::Auto, _) => Path::Definition,
        }
    }

    /// How far an element may be from what is wanted, `want`.
    ///
    /// `ulp` is the largest distance of neighbours of 1 in the type. Where float32 results straddle the middle of two
    /// neighbours, roundings take different ones: that is one `ulp` for each rounding.
    pub(super) fn tolerance(&self, dtype: DType, want: f64) -> f64 {
        let single = f64::from(f32::EPSILON);
        let (ulp, smallest) = match dtype {
            DType::F32 => (0.0, f64::from(f32::MIN_POSITIVE)),
            DType::F16 => (f64::from(half::f16::EPSILON), f64::from(half::f16::MIN_POSITIVE)),
            _ => (f64::from(half::bf16::EPSILON), f64::from(half::bf16::MIN_POSITIVE)),
        };
        // Devices may flush what is smaller than the smallest normal number.
        smallest
            + match *self {
                // A sum of n squares in another order is off by sqrt(n) roundings; the square root, the quotient and
                // the products by a few, since a GPU's are not the nearest ones.
                RmsNorm { x: [_, _, n], order, .. } => {
                    let roundings = if order == NormOrder::CastThenScale { 2.0 } else { 1.0 };
                    want.abs() * (single * ((n as f64).sqrt() + 8.0) + ulp * roundings)
                }
                // Two products of at most LARGEST / 2 by LARGEST, after one factor was rounded, and their sum.
                Rotary { .. } => LARGEST * LARGEST * (2.0 * single + ulp) + want.abs() * ulp,
                KvAppend { .. } => 0.0,
                // Sums of n products in another order, some devices' in the type itself; they are rounded before a
                // residual is added, or only then.
                Linear { x: [_, _, n], .. } => {
                    let n = n as f64;
                    LARGEST * LARGEST * (n.sqrt() + 1.0) * n.sqrt() * single.max(ulp) + want.abs() * ulp
                }
                // The activation is off by a few roundings of its argument, and by the error of an approximation of the
                // normal distribution, and rounded; then multiplied by at most LARGEST, and rounded.
                Gated { times, .. } => {
                    let x = LARGEST * times;
                    let off = x * (16.0 * single + 2e-7);
                    LARGEST * off + want.abs() * 2.0 * ulp
                }
                Attention(given) => given.tolerance() + want.abs() * ulp,
            }
    }
}

/// The worst element, if it is too far off.
pub(super) fn difference(case: &Case, dtype: DType, got: &TensorData, want: &TensorData) -> Option<String> {
    assert_eq!(got.shape(), want.shape(), "{case}");
    let pairs = got.iter::<f64>().zip(want.iter::<f64>()).enumerate();
    let wrong =
        pairs.map(|(i, (got, want))| (i, got, want, (got - want).abs() / case.tolerance(dtype, want)));
    // Not a number is the worst.
    let (i, got, want, times) = wrong.max_by(|a, b| a.3.total_cmp(&b.3))?;
    let fits = got == want || times <= 1.0;
    (!fits).then(|| format!("element {i} is {got}, not {want}: {times} times what is allowed"))
}
