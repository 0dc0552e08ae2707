//! Every kernel: the definition on the CPU agrees with every implementation on every device.

use std::fmt;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln::{
    Error, Result,
    kernels::{Choice, Kernels, NormOrder, Path, Ran, shaders},
    read_back,
};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Plain,
    /// A view with these two dimensions exchanged.
    Swapped(usize, usize),
    /// A view from the second element of this dimension on.
    Cut(usize),
}
use Layout::{Cut, Plain, Swapped};

/// One row of the table: a kernel, what it is given, and where it has no custom implementation.
#[derive(Clone, Copy, Debug)]
enum Case {
    RmsNorm { x: [usize; 3], layout: Layout, order: NormOrder },
    Rotary { x: [usize; 4], layout: Layout, rotated: usize, tables: usize },
    KvAppend { buffer: [usize; 4], layout: Layout, n: usize, new: Layout, position: usize },
    Linear { x: [usize; 3], layout: Layout, output: usize, bias: bool },
}
use Case::{KvAppend, Linear, RmsNorm, Rotary};

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

fn table() -> Vec<Case> {
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
            // The first slot, one in the middle, the last, and one from where not all fit.
            for position in [0, 4, capacity - n, capacity - n + 1] {
                cases.push(KvAppend { buffer, layout: Plain, n, new: Plain, position });
            }
            cases.push(KvAppend { buffer, layout: Plain, n, new: Swapped(1, 2), position: 3 });
        }
    }
    cases.push(KvAppend { buffer: [3, 2, 11, 12], layout: Swapped(1, 2), n: 5, new: Plain, position: 3 });
    cases.push(KvAppend { buffer: [3, 2, 11, 12], layout: Plain, n: 5, new: Swapped(2, 3), position: 3 });
    cases.push(KvAppend { buffer: [3, 2, 11, 12], layout: Cut(2), n: 5, new: Cut(2), position: 3 });

    for (rows, tokens) in [(1, 1), (2, 1), (1, 3), (2, 2), (1, 5), (2, 16)] {
        for (input, output) in [(1, 1), (7, 3), (80, 96), (257, 300), (1024, 70), (1030, 41)] {
            let bias = output % 2 == 0;
            cases.push(Linear { x: [rows, tokens, input], layout: Plain, output, bias });
        }
        cases.push(Linear { x: [rows, tokens, 96], layout: Swapped(0, 1), output: 7, bias: true });
        cases.push(Linear { x: [rows, tokens, 96], layout: Swapped(1, 2), output: 7, bias: true });
    }
    cases
}

impl Case {
    fn kernel(&self) -> &'static str {
        match self {
            RmsNorm { .. } => "rms_norm",
            Rotary { .. } => "rotary",
            KvAppend { .. } => "kv_append",
            Linear { .. } => "linear",
        }
    }

    /// What `kernels` makes of it. The numbers are the same on every device.
    fn run(&self, kernels: &Kernels, device: &Device, dtype: DType) -> Result<TensorData> {
        let mut numbers = Numbers { device: device.clone(), dtype, seed: 1 };
        let result = match *self {
            RmsNorm { x, layout, order } => {
                let weight = numbers.tensor([x[2]], Plain);
                kernels.rms_norm(numbers.tensor(x, layout), weight, 0.01, order).reshape([-1])
            }
            Rotary { x, layout, rotated, tables } => {
                let mut table = || numbers.float32([tables, x[2], rotated / 2], Plain, |x| x / 2.0);
                let (cos, sin) = (table(), table());
                kernels.rotary(numbers.tensor(x, layout), cos, sin).reshape([-1])
            }
            KvAppend { buffer, layout, n, new, position } => {
                let [batch, heads, _, dim] = buffer;
                let position = Tensor::<1, Int>::from_data([position as i32], device);
                let buffer = numbers.tensor(buffer, layout);
                kernels.kv_append(buffer, numbers.tensor([batch, heads, n, dim], new), position).reshape([-1])
            }
            Linear { x, layout, output, bias } => {
                let weight = numbers.tensor([output, x[2]], Plain);
                let bias = bias.then(|| numbers.tensor([output], Plain));
                kernels.linear(numbers.tensor(x, layout), weight, bias).reshape([-1])
            }
        };
        let result: Tensor<1> = result;
        assert_eq!(result.dtype(), dtype, "{self}");
        read_back::read(result)
    }

    /// What has to have run.
    fn path(&self, choice: Choice, device: &str, dtype: DType) -> Path {
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
            (Linear { .. }, _, _) => Path::Definition,
            (_, Choice::Wgsl, _) | (_, Choice::Auto, "wgpu") => Path::Wgsl,
            (_, Choice::Cube, _) | (_, Choice::Auto, "cuda") => Path::Cube,
            (KvAppend { .. }, Choice::Auto, _) => Path::Native,
            (_, Choice::Auto, _) => Path::Definition,
        }
    }

    /// How far an element may be from what is wanted, `want`.
    ///
    /// `ulp` is the largest distance of neighbours of 1 in the type. Where float32 results straddle the middle of two
    /// neighbours, roundings take different ones: that is one `ulp` for each rounding.
    fn tolerance(&self, dtype: DType, want: f64) -> f64 {
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
                // Sums of n products in another order, some devices' in the type itself.
                Linear { x: [_, _, n], .. } => {
                    let n = n as f64;
                    LARGEST * LARGEST * (n.sqrt() + 1.0) * n.sqrt() * single.max(ulp) + want.abs() * ulp
                }
            }
    }
}

/// Numbers are not larger.
const LARGEST: f64 = 2.0;

/// Numbers that are the same on every device.
struct Numbers {
    device: Device,
    dtype: DType,
    seed: u32,
}

impl Numbers {
    /// Rounded here: devices may round the last digit as they like.
    fn tensor<const D: usize>(&mut self, shape: [usize; D], layout: Layout) -> Tensor<D> {
        let round = match self.dtype {
            DType::F32 => |x| x,
            DType::F16 => |x| half::f16::from_f32(x).to_f32(),
            _ => |x| half::bf16::from_f32(x).to_f32(),
        };
        self.float32(shape, layout, round).cast(self.dtype)
    }

    fn float32<const D: usize>(
        &mut self,
        mut shape: [usize; D],
        layout: Layout,
        round: fn(f32) -> f32,
    ) -> Tensor<D> {
        match layout {
            Plain => {}
            Swapped(a, b) => shape.swap(a, b),
            Cut(dim) => shape[dim] += 1,
        }
        let mut next = || {
            self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // 24 bits, from -2 to 2
            round((self.seed >> 8) as f32 / (1 << 22) as f32 - 2.0)
        };
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        let tensor = Tensor::<D>::from_data(TensorData::new(numbers, shape), (&self.device, DType::F32));
        match layout {
            Plain => tensor,
            Swapped(a, b) => tensor.swap_dims(a, b),
            Cut(dim) => {
                let kept = shape[dim] - 1;
                tensor.narrow(dim, 1, kept)
            }
        }
    }
}

/// The choices a device takes, in a test that fails where it takes others.
fn choices(name: &str, device: &Device) -> Vec<(Choice, Kernels)> {
    let takes: &[Choice] = match name {
        "cpu" => &[Choice::Auto, Choice::Definition],
        "wgpu" => &[Choice::Auto, Choice::Definition, Choice::Wgsl, Choice::Cube],
        "cuda" => &[Choice::Auto, Choice::Definition, Choice::Cube],
        _ => panic!("no kernels are known for {name}"),
    };
    let mut kernels = Vec::new();
    for choice in Choice::ALL {
        match Kernels::new(choice, device) {
            Ok(_) if !takes.contains(&choice) => panic!("{name} takes {choice}"),
            Err(Error::Setting { name: "--kernels", .. }) if !takes.contains(&choice) => {}
            made => kernels.push((choice, made.unwrap())),
        }
    }
    kernels
}

#[test]
fn kernels_agree_with_their_definitions() {
    let devices = kiln_testkit::devices();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("definitions run on the CPU");
    let definition = Kernels::new(Choice::Definition, cpu).unwrap();
    let mut failures = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let wanted: Vec<TensorData> =
            table().iter().map(|case| case.run(&definition, cpu, dtype).unwrap()).collect();
        for (name, device) in &devices {
            if !device.supports_dtype(dtype) {
                eprintln!("{name} has no {dtype:?}");
                continue;
            }
            for (choice, _) in choices(name, device) {
                for (case, want) in table().iter().zip(&wanted) {
                    let kernels = Kernels::new(choice, device).unwrap();
                    let got = case.run(&kernels, device, dtype);
                    let path = case.path(choice, name, dtype);
                    let what = format!("{choice} on {name}, {dtype:?}: {case}");
                    assert_eq!(kernels.ran(), [Ran { kernel: case.kernel(), path, count: 1 }], "{what}");
                    let wrong = match got {
                        Ok(got) => difference(case, dtype, &got, want),
                        Err(error) => Some(error.to_string()),
                    };
                    failures.extend(wrong.map(|why| format!("{what}: {why}")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// The worst element, if it is too far off.
fn difference(case: &Case, dtype: DType, got: &TensorData, want: &TensorData) -> Option<String> {
    assert_eq!(got.shape(), want.shape(), "{case}");
    let pairs = got.iter::<f64>().zip(want.iter::<f64>()).enumerate();
    let wrong =
        pairs.map(|(i, (got, want))| (i, got, want, (got - want).abs() / case.tolerance(dtype, want)));
    // Not a number is the worst.
    let (i, got, want, times) = wrong.max_by(|a, b| a.3.total_cmp(&b.3))?;
    let fits = got == want || times <= 1.0;
    (!fits).then(|| format!("element {i} is {got}, not {want}: {times} times what is allowed"))
}

#[test]
fn kv_append_writes_in_place_where_nothing_else_holds_the_buffer() {
    for (name, device) in kiln_testkit::devices() {
        for (choice, kernels) in choices(&name, &device) {
            if choice == Choice::Definition {
                continue;
            }
            let new = || Tensor::<4>::ones([1, 2, 1, 8], (&device, DType::F32));
            let position = Tensor::<1, Int>::from_data([3], &device);
            let buffer = Tensor::<4>::zeros([1, 2, 16, 8], (&device, DType::F32));
            let (buffer, before) = address(buffer, &name);
            let (buffer, after) = address(kernels.kv_append(buffer, new(), position.clone()), &name);
            assert_eq!(before, after, "{choice} on {name} copies a buffer that is its own");
            assert_eq!(sum(buffer.clone()), 16.0, "{choice} on {name}");

            let (appended, copy) = address(kernels.kv_append(buffer.clone(), new(), position + 1), &name);
            assert_ne!(copy, after, "{choice} on {name} writes into a buffer that is held elsewhere");
            assert_eq!([sum(buffer), sum(appended)], [16.0, 32.0], "{choice} on {name}");
        }
    }
}

fn sum(tensor: Tensor<4>) -> f32 {
    read_back::read(tensor.sum()).unwrap().iter::<f32>().sum()
}

/// The tensor, and what tells its memory from others'.
fn address(tensor: Tensor<4>, device: &str) -> (Tensor<4>, usize) {
    match device {
        #[cfg(feature = "cpu")]
        "cpu" => {
            use burn::backend::Flex;
            let tensor = tensor.try_into_primitive::<Flex>().unwrap();
            let address = tensor.bytes().as_ptr().addr();
            (Tensor::from_primitive::<Flex>(tensor), address)
        }
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        _ => {
            use burn::backend::Cube;
            let tensor = tensor.try_into_primitive::<Cube>().unwrap();
            let address = tensor.handle.clone().binding().memory.id().value;
            (Tensor::from_primitive::<Cube>(tensor), address)
        }
    }
}

#[test]
fn shaders_are_valid_and_keep_to_what_every_device_has() {
    let shaders = shaders();
    assert!(!shaders.is_empty());
    for (name, text) in shaders {
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));
        // f16 is the only thing that a permutation may ask for, and says so.
        let wanted =
            if text.contains("enable f16;") { Capabilities::SHADER_FLOAT16 } else { Capabilities::empty() };
        Validator::new(ValidationFlags::all(), wanted)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));

        let [entry] = &module.entry_points[..] else { panic!("{name} has several entry points") };
        assert_eq!(entry.name, "main", "{name}");
        assert!(entry.workgroup_size.iter().product::<u32>() <= 256, "{name}");
        let bytes_in = |space: naga::AddressSpace| -> u32 {
            let of_space = module.global_variables.iter().filter(|(_, variable)| variable.space == space);
            of_space.map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx())).sum()
        };
        assert!(bytes_in(naga::AddressSpace::WorkGroup) <= 16 << 10, "{name}");
        let storage = module
            .global_variables
            .iter()
            .filter(|(_, variable)| matches!(variable.space, naga::AddressSpace::Storage { .. }));
        assert!(storage.count() <= 8, "{name}");
    }
}

#[test]
fn choices_are_read_as_they_are_written() {
    for choice in Choice::ALL {
        assert_eq!(choice.to_string().parse(), Ok(choice));
    }
    let error = "fast".parse::<Choice>().unwrap_err().to_string();
    assert_eq!(error, "unknown kernel choice `fast`; known: auto, definition, wgsl, cube");
}
