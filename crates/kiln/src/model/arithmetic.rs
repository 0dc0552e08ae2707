//! The arithmetic of products with packed weights on the devices of a model.

use std::{fmt, str::FromStr, time::Duration};

use burn::tensor::{DType, Int, Tensor};
use kiln_core::{Error, Result, device_state::DeviceState};
use kiln_kernels::{
    Arithmetic, Kernels, Linear, Matrix, PackedLayout, PackedMatrix, Use,
    device::{DeviceClass, Opened},
};
use kiln_weights::Format;
use web_time::Instant;

use super::ModelBuilder;

/// The arithmetic of products with packed weights.
///
/// In integers, activations are rounded to 8 bits, with one scale per 32 numbers. `docs/weight-loss.md` has
/// the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArithmeticChoice {
    /// Integers on the CPU, floats on GPUs
    #[default]
    Auto,
    /// Floats on every device
    Floats,
    /// Integers on every device. On wgpu, products of up to 16 rows of tokens are computed in integers;
    /// longer prompts and experts stay in floats. CUDA, which multiplies floats with tensor cores, refuses
    /// it.
    Integers,
    /// As [`Integers`](Self::Integers) on a device where these products take less time than in floats, as
    /// measured when the model is loaded; else as [`Auto`](Self::Auto)
    Fastest,
}

impl FromStr for ArithmeticChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "floats" => Self::Floats,
            "integers" => Self::Integers,
            "fastest" => Self::Fastest,
            _ => {
                let known = ["auto", "floats", "integers", "fastest"].map(str::to_owned).into();
                return Err(Error::Unknown { what: "arithmetic", name: text.to_owned(), known });
            }
        })
    }
}

impl fmt::Display for ArithmeticChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Floats => "floats",
            Self::Integers => "integers",
            Self::Fastest => "fastest",
        })
    }
}

impl ArithmeticChoice {
    /// The arithmetic on the CPU.
    pub(super) fn on_cpu(self) -> Arithmetic {
        if self == Self::Floats { Arithmetic::Floats } else { Arithmetic::Integers }
    }

    /// Every arithmetic that products with weights of these formats may have on a device.
    pub(super) fn possible(self, class: DeviceClass, formats: &[Format]) -> Vec<(Format, Arithmetic)> {
        let integers = Some(Arithmetic::Integers).filter(|_| self.may_be_integers_on(class));
        let of_format = |format: &Format| {
            let format = *format;
            [Some(Arithmetic::Floats), integers].into_iter().flatten().map(move |own| (format, own))
        };
        formats.iter().flat_map(of_format).collect()
    }

    /// Whether products may be computed in integers on a device.
    pub(crate) fn may_be_integers_on(self, class: DeviceClass) -> bool {
        match self {
            Self::Auto => class == DeviceClass::Cpu,
            Self::Floats => false,
            Self::Integers | Self::Fastest => true,
        }
    }

    /// Checks that random weights, which are not packed, have this arithmetic.
    ///
    /// # Errors
    /// [`Error::Setting`] if it is for packed weights.
    pub(super) fn check_unpacked(self) -> Result<()> {
        if !matches!(self, Self::Integers | Self::Fastest) {
            return Ok(());
        }
        let why = format!("is `{self}`, which is for packed weights, and random ones are not; leave it out");
        Err(Error::Setting { name: "arithmetic", why })
    }

    /// Checks that a device multiplies weights of these formats in this arithmetic.
    ///
    /// # Errors
    /// [`Error::Setting`] for integers if it does not.
    pub(super) fn check(self, kernels: &Kernels, device: &Opened, formats: &[Format]) -> Result<()> {
        if self != Self::Integers || device.info.class == DeviceClass::Cpu {
            return Ok(());
        }
        // Q4_0 stands for all formats.
        let why = if !kernels.multiplies_in_integers(Format::Q4_0) {
            format!(
                "is `integers`, and {} multiplies packed weights in floats alone; leave it out",
                device.info.name
            )
        } else if !formats.iter().any(|format| kernels.multiplies_in_integers(*format)) {
            "is `integers`, and the model has no weights with codes that are integers; pack them, such as with \
             --quant q4_0, or leave it out"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Setting { name: "arithmetic", why })
    }
}

impl ModelBuilder<'_> {
    /// The arithmetic on a device, for weights of these formats. `kernels`: those that are trusted.
    pub(super) async fn arithmetic_on(
        &self,
        kernels: &Kernels,
        device: &Opened,
        dtype: DType,
        formats: &[Format],
    ) -> Result<Arithmetic> {
        if device.info.class == DeviceClass::Cpu {
            return Ok(self.arithmetic.on_cpu());
        }
        let formats: Vec<_> =
            formats.iter().copied().filter(|format| kernels.multiplies_in_integers(*format)).collect();
        if formats.is_empty() || !self.arithmetic.may_be_integers_on(device.info.class) {
            return Ok(Arithmetic::Floats);
        }
        if self.arithmetic == ArithmeticChoice::Integers {
            return Ok(Arithmetic::Integers);
        }
        let [mut floats, mut integers] = [Duration::ZERO; 2];
        for format in formats {
            for (arithmetic, time) in
                [(Arithmetic::Floats, &mut floats), (Arithmetic::Integers, &mut integers)]
            {
                *time += time_of_products(kernels, format, Use { dtype, arithmetic }, device).await?;
            }
        }
        tracing::info!(target: "kiln", ?floats, ?integers, "products with packed weights on {}", device.info.name);
        Ok(if integers < floats { Arithmetic::Integers } else { Arithmetic::Floats })
    }
}

/// The time of products of one row, and of eight, with many weights packed in one format: the least of a few
/// measurements.
async fn time_of_products(
    kernels: &Kernels,
    format: Format,
    use_as: Use,
    device: &Opened,
) -> Result<Duration> {
    /// Rows and columns of a weight, which are whole blocks of every format.
    const SHAPE: [usize; 2] = [4096; 2];
    /// Bytes of all weights, more than any cache holds.
    const BYTES: usize = 200 << 20;
    const REPEATS: usize = 5;

    let Some((layout, words)) = PackedLayout::for_matrix(kernels, format, use_as.dtype)
        .and_then(|layout| Some((layout, layout.words(SHAPE)?)))
    else {
        return Ok(Duration::ZERO);
    };
    // A software GPU is slow, and has the caches of the CPU.
    let bytes = if device.info.class == DeviceClass::Software { BYTES / 16 } else { BYTES };
    let state = DeviceState::of(&device.device);
    let weights: Vec<_> = (0..bytes.div_ceil(4 * words[0] * words[1]))
        .map(|_| {
            let words = Tensor::<2, Int>::zeros(words, (&device.device, DType::I32));
            Matrix::Packed(PackedMatrix::new(words, layout, SHAPE, use_as))
        })
        .collect();
    let xs = [1, 8].map(|rows| Tensor::<3>::ones([rows, 1, SHAPE[1]], (&device.device, use_as.dtype)));
    let mut least = Duration::MAX;
    for repeat in 0..=REPEATS {
        state.finished().await?;
        let start = Instant::now();
        for x in &xs {
            for weight in &weights {
                _ = kernels.run(Linear { x: x.clone(), weight: weight.clone(), bias: None, residual: None });
            }
        }
        state.finished().await?;
        // The first one compiles.
        if repeat > 0 {
            least = least.min(start.elapsed());
        }
    }
    drop(weights);
    state.give_back();
    Ok(least)
}
