//! Inputs with which implementations of a kernel are compared. Tests use them, and so can a check of a device.

use std::{fmt, rc::Rc};

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, kind::Basic};
use kiln_core::{
    Result,
    packed::{PackedBuffer, Packing},
    read_back,
};
use kiln_weights::Format;

use crate::{Arithmetic, Kernel, Kernels, PackedLayout, PackedMatrix, Path, Use, invariance::violation};

/// Makes the inputs of a kernel.
type Inputs<K> = Box<dyn Fn(&mut Numbers) -> K>;

/// Runs a kernel, and reads its results.
type Run = Box<dyn Fn(&Kernels, DType) -> Result<Vec<TensorData>>>;

/// Runs a kernel whole and in parts, and says how they differ.
type Invariance = Box<dyn Fn(&Kernels, DType) -> Result<Option<String>>>;

/// Whether a kernel lacks an implementation.
type Lacks = Box<dyn Fn(Path, DType, &Device) -> bool>;

/// What a result may differ from the one that is wanted.
type Tolerance = Box<dyn Fn(f64, Rounding) -> f64>;

/// Inputs of one kernel, and how far the results of two implementations may differ.
pub struct Case<K> {
    name: String,
    inputs: Inputs<K>,
    /// Whether the kernel lacks an implementation for these inputs.
    lacks: Lacks,
    tolerance: Tolerance,
    is_probed: bool,
    format: Option<Format>,
}

impl<K> Case<K> {
    /// Inputs that are equal on every device. Results must be equal, unless [`within`](Self::within) allows a difference.
    pub fn new(name: impl fmt::Debug, inputs: impl Fn(&mut Numbers) -> K + 'static) -> Self {
        Self {
            name: format!("{name:?}"),
            inputs: Box::new(inputs),
            lacks: Box::new(|_, _, _| false),
            tolerance: Box::new(|_, _| 0.0),
            is_probed: false,
            format: None,
        }
    }

    /// Allows `tolerance(want, rounding)` between a result and `want`, that of the reference.
    pub fn within(self, tolerance: impl Fn(f64, Rounding) -> f64 + 'static) -> Self {
        Self { tolerance: Box::new(tolerance), ..self }
    }

    /// States for which implementations and types the reference runs instead.
    pub fn without(self, lacks: impl Fn(Path, DType) -> bool + 'static) -> Self {
        self.without_on(move |path, dtype, _| lacks(path, dtype))
    }

    /// As [`without`](Self::without), where it depends on the device.
    pub fn without_on(self, lacks: impl Fn(Path, DType, &Device) -> bool + 'static) -> Self {
        Self { lacks: Box::new(lacks), ..self }
    }

    /// States that the kernel has no code for the CPU.
    pub fn without_native(self) -> Self {
        self.without(|path, _| path == Path::Native)
    }

    /// States that quick self-tests run the case: its shader is another one than that of common inputs.
    pub fn probed(self) -> Self {
        Self { is_probed: true, ..self }
    }

    /// States the format of packed weights: quick self-tests of models that have it run the case.
    pub fn of_format(self, format: impl Into<Option<Format>>) -> Self {
        Self { format: format.into(), ..self }
    }

    /// The inputs on a device, of type `dtype`.
    pub fn inputs(&self, device: &Device, dtype: DType) -> K {
        (self.inputs)(&mut Numbers::new(device, dtype))
    }

    /// The element that differs most, if it differs too much; in a sentence.
    pub fn difference(&self, dtype: DType, got: &TensorData, want: &TensorData) -> Option<String> {
        difference(&*self.tolerance, dtype, got, want)
    }
}

impl<K> fmt::Debug for Case<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A case of any kernel.
pub struct AnyCase {
    kernel: &'static str,
    name: String,
    run: Run,
    invariance: Invariance,
    lacks: Lacks,
    tolerance: Tolerance,
    is_probed: bool,
    format: Option<Format>,
}

impl AnyCase {
    pub(crate) fn of<K: Kernel>(Case { name, inputs, lacks, tolerance, is_probed, format }: Case<K>) -> Self {
        let inputs = Rc::new(inputs);
        let again = Rc::clone(&inputs);
        let run = move |kernels: &Kernels, dtype| {
            let inputs = inputs(&mut Numbers::new(kernels.device(), dtype));
            kernels.run(inputs).read()
        };
        let invariance = move |kernels: &Kernels, dtype| {
            violation(again(&mut Numbers::new(kernels.device(), dtype)), kernels)
        };
        let (run, invariance) = (Box::new(run), Box::new(invariance));
        Self { kernel: K::NAME, name, run, invariance, lacks, tolerance, is_probed, format }
    }

    /// Whether quick self-tests run it, whichever others they leave out.
    pub(crate) fn is_probed(&self) -> bool {
        self.is_probed
    }

    /// The format of its packed weights.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// The results on the device of `kernels`, for inputs of type `dtype`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn run(&self, kernels: &Kernels, dtype: DType) -> Result<Vec<TensorData>> {
        (self.run)(kernels, dtype)
    }

    /// How the result of a row or a token depends on those that are computed beside it, in a sentence; `None` if it does not.
    ///
    /// # Errors
    /// Those of the device.
    pub fn variance(&self, kernels: &Kernels, dtype: DType) -> Result<Option<String>> {
        (self.invariance)(kernels, dtype)
    }

    /// The implementation that runs on a device where `preferred` is selected.
    pub fn path(&self, preferred: Path, dtype: DType, device: &Device) -> Path {
        if (self.lacks)(preferred, dtype, device) { Path::Reference } else { preferred }
    }

    /// The element that differs most, if it differs too much; in a sentence.
    pub fn difference(&self, dtype: DType, got: &[TensorData], want: &[TensorData]) -> Option<String> {
        if got.len() != want.len() {
            return Some(format!("has {} results, not {}", got.len(), want.len()));
        }
        got.iter().zip(want).find_map(|(got, want)| difference(&*self.tolerance, dtype, got, want))
    }
}

impl fmt::Debug for AnyCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kernel, self.name)
    }
}

fn difference(
    tolerance: &dyn Fn(f64, Rounding) -> f64,
    dtype: DType,
    got: &TensorData,
    want: &TensorData,
) -> Option<String> {
    if got.shape() != want.shape() {
        return Some(format!("has the shape {:?}, not {:?}", got.shape(), want.shape()));
    }
    let rounding = Rounding::of(dtype);
    let pairs = got.iter::<f64>().zip(want.iter::<f64>()).enumerate();
    let wrong = pairs.map(|(i, (got, want))| {
        let times = (got - want).abs() / (tolerance(want, rounding) + rounding.smallest);
        (i, got, want, if got == want { 0.0 } else { times })
    });
    // Not a number is the worst.
    let (i, got, want, times) = wrong.max_by(|a, b| a.3.total_cmp(&b.3))?;
    let fits = times <= 1.0;
    (!fits).then(|| format!("element {i} is {got}, not {want}: {times} times what is allowed"))
}

/// Outputs of a kernel that can be read back.
pub trait Read {
    /// Every tensor of the output, in one order.
    ///
    /// # Errors
    /// Those of the device.
    fn read(self) -> Result<Vec<TensorData>>;
}

impl<const D: usize, K: Basic + 'static> Read for Tensor<D, K> {
    fn read(self) -> Result<Vec<TensorData>> {
        Ok(vec![read_back::read(self)?])
    }
}

impl<T: Read> Read for [T; 2] {
    fn read(self) -> Result<Vec<TensorData>> {
        self.into_iter().map(T::read).collect::<Result<Vec<_>>>().map(|all| all.concat())
    }
}

impl Read for (Tensor<3>, Tensor<4>) {
    fn read(self) -> Result<Vec<TensorData>> {
        Ok([self.0.read()?, self.1.read()?].concat())
    }
}

impl Read for PackedBuffer {
    fn read(self) -> Result<Vec<TensorData>> {
        [self.codes, self.scales].read()
    }
}

/// How numbers of a type are rounded.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Distance of float32 neighbours of 1.
    pub single: f64,
    /// Distance of neighbours of 1 in the type of the result; 0 for float32, which `single` accounts for. Where float32
    /// results straddle the middle of two neighbours, devices round to different ones: that is one `ulp` for each rounding.
    pub ulp: f64,
    /// The smallest normal number of the type. Devices may flush smaller ones to 0.
    pub smallest: f64,
}

impl Rounding {
    pub(crate) fn of(dtype: DType) -> Self {
        let (ulp, smallest) = match dtype {
            DType::F16 => (half::f16::EPSILON.to_f64(), half::f16::MIN_POSITIVE.to_f64()),
            DType::BF16 => (half::bf16::EPSILON.to_f64(), half::bf16::MIN_POSITIVE.to_f64()),
            _ => (0.0, f64::from(f32::MIN_POSITIVE)),
        };
        Self { single: f64::from(f32::EPSILON), ulp, smallest }
    }
}

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Plain,
    /// A view with these two dimensions exchanged.
    Swapped(usize, usize),
    /// A view from the second element of this dimension on.
    Cut(usize),
}
pub use Layout::{Cut, Plain, Swapped};

/// Numbers are not larger.
pub(crate) const LARGEST: f64 = 2.0;

/// What weights are multiplied by so that scales of float16 become subnormal in every format, and not 0.
pub(crate) const SUBNORMAL_SCALES: f32 = 1.0 / 4096.0;

/// Makes inputs that are equal on every device.
#[derive(Debug)]
pub struct Numbers {
    device: Device,
    dtype: DType,
    seed: u32,
}

impl Numbers {
    pub fn new(device: &Device, dtype: DType) -> Self {
        Self { device: device.clone(), dtype, seed: 1 }
    }

    /// From -2 to 2.
    pub fn tensor<const D: usize>(&mut self, shape: [usize; D], layout: Layout) -> Tensor<D> {
        self.tensor_where(shape, layout, |_| true)
    }

    /// Random codes and scales of a packed buffer `[batch, kv_heads, slots, head_dim]`, for numbers from -2 to 2. Bits that are
    /// no codes are 0, as in every packed buffer.
    pub fn packed(&mut self, shape: [usize; 4], packing: Packing) -> PackedBuffer {
        let (head_dim, each) = (shape[3], packing.codes_a_word());
        let (channels, words) = (packing.channels_together(head_dim), packing.words_together(head_dim));
        let codes = self.words(packing.codes_shape(shape), |at, number| {
            let (group, word) = (at / words, at % words);
            let in_group = channels.min(head_dim - group * channels);
            let bits = in_group.saturating_sub(word * each).min(each) * packing.bits();
            number.to_bits().wrapping_mul(0x9e37_79b1) & u32::MAX.checked_shr(32 - bits as u32).unwrap_or(0)
        });
        let largest = packing.largest() as f32;
        let scales = self.words(packing.scales_shape(shape), |_, number| {
            let offset = half::f16::from_f32(-number.abs());
            let scale = half::f16::from_f32((2.0 + offset.to_f32()) / largest);
            u32::from(scale.to_bits()) | u32::from(offset.to_bits()) << 16
        });
        PackedBuffer { codes, scales }
    }

    /// A packed weight `[rows, columns]` of numbers from -2 to 2, for vectors of the type of the inputs.
    ///
    /// # Panics
    /// If a row is no whole number of blocks.
    pub fn packed_matrix(
        &mut self,
        shape: [usize; 2],
        layout: PackedLayout,
        arithmetic: Arithmetic,
    ) -> PackedMatrix {
        self.packed_matrix_times(1.0, shape, layout, arithmetic)
    }

    /// [`packed_matrix`](Self::packed_matrix) of numbers that are multiplied by `factor`.
    ///
    /// # Panics
    /// If a row is no whole number of blocks.
    pub fn packed_matrix_times(
        &mut self,
        factor: f32,
        shape: [usize; 2],
        layout: PackedLayout,
        arithmetic: Arithmetic,
    ) -> PackedMatrix {
        let numbers: Vec<f32> = (0..shape[0] * shape[1]).map(|_| self.next() * factor).collect();
        let of_words = layout.words(shape).expect("rows are whole blocks");
        let mut bytes = vec![0; layout.format.bytes_of(numbers.len()).expect("rows are whole blocks")];
        let mut words = vec![0i32; of_words.iter().product()];
        let packed = layout.format.pack(&numbers, &mut bytes).and_then(|()| {
            layout.format.arrange(layout.order, shape[1], &bytes, bytemuck::cast_slice_mut(&mut words))
        });
        packed.expect("bytes and words are those of the numbers");
        let words = Tensor::from_data(TensorData::new(words, of_words), (&self.device, DType::I32));
        PackedMatrix::new(words, layout, shape, Use { dtype: self.dtype, arithmetic })
    }

    /// What `word` makes of a place in a row and a number from -2 to 2.
    fn words(&mut self, shape: [usize; 4], word: impl Fn(usize, f32) -> u32) -> Tensor<4, Int> {
        let place = |i| i % shape[3].max(1);
        let words: Vec<i32> =
            (0..shape.iter().product()).map(|i| word(place(i), self.next()) as i32).collect();
        Tensor::from_data(TensorData::new(words, shape), (&self.device, DType::I32))
    }

    /// The device of the inputs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The type of the inputs.
    pub fn float_dtype(&self) -> FloatDType {
        match self.dtype {
            DType::F16 => FloatDType::F16,
            DType::BF16 => FloatDType::BF16,
            _ => FloatDType::F32,
        }
    }

    /// From -2 to 2, in 24 bits.
    fn next(&mut self) -> f32 {
        self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.seed >> 8) as f32 / (1 << 22) as f32 - 2.0
    }

    /// From -1 to 1, in float32.
    pub fn float32<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.laid_out(shape, Plain, DType::F32, |number, _| number / 2.0)
    }

    /// Not a number where `used` says no.
    pub fn tensor_where<const D: usize>(
        &mut self,
        shape: [usize; D],
        layout: Layout,
        used: impl Fn([usize; D]) -> bool,
    ) -> Tensor<D> {
        // Rounded here: devices may round the last digit as they like.
        let round = match self.dtype {
            DType::F32 => |x| x,
            DType::F16 => |x| half::f16::from_f32(x).to_f32(),
            _ => |x| half::bf16::from_f32(x).to_f32(),
        };
        self.laid_out(shape, layout, self.dtype, |x, index| if used(index) { round(x) } else { f32::NAN })
    }

    /// What `number` makes of a number from -2 to 2, for each index.
    fn laid_out<const D: usize>(
        &mut self,
        shape: [usize; D],
        layout: Layout,
        dtype: DType,
        number: impl Fn(f32, [usize; D]) -> f32,
    ) -> Tensor<D> {
        let mut stored = shape;
        match layout {
            Plain => {}
            Swapped(a, b) => stored.swap(a, b),
            Cut(dim) => stored[dim] += 1,
        }
        let next = |place: usize| {
            let mut rest = place;
            let mut index = [0; D];
            for dim in (0..D).rev() {
                (rest, index[dim]) = (rest / stored[dim], rest % stored[dim]);
            }
            match layout {
                Plain => {}
                Swapped(a, b) => index.swap(a, b),
                Cut(dim) => index[dim] = index[dim].saturating_sub(1),
            }
            number(self.next(), index)
        };
        let numbers: Vec<f32> = (0..stored.iter().product()).map(next).collect();
        let data = TensorData::new(numbers, stored);
        let tensor = Tensor::<D>::from_data(data, (&self.device, DType::F32)).cast(dtype);
        match layout {
            Plain => tensor,
            Swapped(a, b) => tensor.swap_dims(a, b),
            Cut(dim) => tensor.narrow(dim, 1, shape[dim]),
        }
    }
}
