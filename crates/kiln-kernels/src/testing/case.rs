//! Inputs for comparing the implementations of a kernel, used by tests and by the self-test of a device.

use std::fmt;

use burn::tensor::{DType, Device, Tensor, TensorData, kind::Basic};
use kiln_core::{
    packed::PackedBuffer,
    read_back::{self, ReadBack},
};
use kiln_weights::{Format, streams::Arithmetic};

use crate::{runtime::choice::Implementation, testing::numbers::Numbers};

/// Makes the inputs of a kernel.
pub(crate) type Inputs<K> = Box<dyn Fn(&mut Numbers) -> K>;

/// Whether a kernel lacks an implementation.
pub(crate) type Lacks = Box<dyn Fn(Implementation, DType, &Device) -> bool>;

/// The allowed difference between a result and the expected one.
pub(crate) type Tolerance = Box<dyn Fn(f64, Rounding) -> f64>;

/// Inputs of one kernel, and the allowed difference between the results of two implementations.
pub struct Case<K> {
    pub(crate) name: String,
    pub(crate) inputs: Inputs<K>,
    /// Whether the kernel lacks an implementation for these inputs.
    pub(crate) lacks: Lacks,
    pub(crate) tolerance: Tolerance,
    pub(crate) is_probed: bool,
    pub(crate) packed: Option<(Format, Arithmetic)>,
}

impl<K> Case<K> {
    /// Creates a case with inputs that are equal on every device. Results must be equal, unless
    /// [`within`](Self::within) allows a difference.
    pub fn new(name: impl fmt::Debug, inputs: impl Fn(&mut Numbers) -> K + 'static) -> Self {
        Self {
            name: format!("{name:?}"),
            inputs: Box::new(inputs),
            lacks: Box::new(|_, _, _| false),
            tolerance: Box::new(|_, _| 0.0),
            is_probed: false,
            packed: None,
        }
    }

    /// Allows a difference of `tolerance(want, rounding)` between a result and `want`, the result of the
    /// reference.
    pub fn within(self, tolerance: impl Fn(f64, Rounding) -> f64 + 'static) -> Self {
        Self { tolerance: Box::new(tolerance), ..self }
    }

    /// Declares the implementations and types for which the reference runs instead.
    pub fn without(self, lacks: impl Fn(Implementation, DType) -> bool + 'static) -> Self {
        self.without_on(move |path, dtype, _| lacks(path, dtype))
    }

    /// Like [`without`](Self::without), if it depends on the device.
    pub fn without_on(self, lacks: impl Fn(Implementation, DType, &Device) -> bool + 'static) -> Self {
        Self { lacks: Box::new(lacks), ..self }
    }

    /// Declares that the kernel has no native code for the CPU.
    pub fn without_native(self) -> Self {
        self.without(|path, _| path == Implementation::Native)
    }

    /// Declares that quick self-tests run the case, because its shader differs from that of common inputs.
    pub fn probed(self) -> Self {
        Self { is_probed: true, ..self }
    }

    /// Declares the format of packed weights and the arithmetic of their products: quick self-tests of models
    /// with these run the case.
    pub fn of_format(self, format: impl Into<Option<Format>>, arithmetic: Arithmetic) -> Self {
        Self { packed: format.into().map(|format| (format, arithmetic)), ..self }
    }

    /// Generates the inputs on a device, in type `dtype`.
    pub fn inputs(&self, device: &Device, dtype: DType) -> K {
        (self.inputs)(&mut Numbers::new(device, dtype))
    }

    /// Describes in a sentence the element that differs most, if it differs too much.
    pub fn difference(&self, dtype: DType, got: &TensorData, want: &TensorData) -> Option<String> {
        difference(&*self.tolerance, dtype, got, want)
    }
}

impl<K> fmt::Debug for Case<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Describes in a sentence the element that differs most, if it differs too much.
pub(crate) fn difference(
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
    // NaN is the worst.
    let (i, got, want, times) = wrong.max_by(|a, b| a.3.total_cmp(&b.3))?;
    let fits = times <= 1.0;
    (!fits).then(|| format!("element {i} is {got}, not {want}: {times} times what is allowed"))
}

/// Outputs of a kernel that can be read back.
pub trait Read {
    /// Starts reading every tensor of the output, in a fixed order.
    fn read(self) -> Vec<ReadBack>;
}

impl<const D: usize, K: Basic + 'static> Read for Tensor<D, K> {
    fn read(self) -> Vec<ReadBack> {
        vec![read_back::start(self)]
    }
}

impl<T: Read, const N: usize> Read for [T; N] {
    fn read(self) -> Vec<ReadBack> {
        self.into_iter().flat_map(T::read).collect()
    }
}

impl<T: Read, U: Read> Read for (T, U) {
    fn read(self) -> Vec<ReadBack> {
        self.0.read().into_iter().chain(self.1.read()).collect()
    }
}

impl Read for PackedBuffer {
    fn read(self) -> Vec<ReadBack> {
        [self.codes, self.scales].read()
    }
}

/// The rounding of numbers of a type.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Distance between float32 neighbours near 1.
    pub single: f64,
    /// Distance between neighbours near 1 in the type of the result; 0 for float32, which `single` accounts
    /// for. If float32 results straddle the midpoint of two neighbours, devices round to different ones: that
    /// is one `ulp` for each rounding.
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

/// Largest absolute value of the inputs.
pub(crate) const LARGEST: f64 = 2.0;

/// Factor of weights that makes float16 scales subnormal in every format, but not 0.
pub(crate) const SUBNORMAL_SCALES: f32 = 1.0 / 4096.0;
