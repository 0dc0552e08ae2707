//! Number formats of packed weights: names, sizes, packing and unpacking.

use crate::Error;
use crate::formats::{Layout, blocks_of_32, k_quants, plain, pytorch, tables};

/// A number format of weights. The variants state their bits per number. Numbers are packed in blocks; a row
/// of a matrix is a whole number of blocks. GGUF files have all formats except those whose blocks have a
/// float32 scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// float32
    F32,
    /// float16
    F16,
    /// bfloat16: float32 with 16 fewer bits of fraction
    Bf16,
    /// 4.5 bits: blocks of 32 with a scale
    Q4_0,
    /// 5 bits: blocks of 32 with a scale and a minimum
    Q4_1,
    /// 5.5 bits: blocks of 32 with a scale
    Q5_0,
    /// 6 bits: blocks of 32 with a scale and a minimum
    Q5_1,
    /// 8.5 bits: blocks of 32 with a scale
    Q8_0,
    /// 2.625 bits: blocks of 256, in groups of 16 with a scale and a minimum
    Q2K,
    /// 3.4375 bits: blocks of 256, in groups of 16 with a scale
    Q3K,
    /// 4.5 bits: blocks of 256, in groups of 32 with a scale and a minimum
    Q4K,
    /// 5.5 bits: blocks of 256, in groups of 32 with a scale and a minimum
    Q5K,
    /// 6.5625 bits: blocks of 256, in groups of 16 with a scale
    Q6K,
    /// 4.5 bits: blocks of 32 with a scale, and a table of 16 values
    Iq4Nl,
    /// 4.25 bits: blocks of 256, in groups of 32 with a scale, and a table of 16 values
    Iq4Xs,
    /// 4.25 bits: blocks of 32 with a power of two as scale, and floats of 4 bits
    Mxfp4,
    /// 4.5 bits: blocks of 64 with a scale in float32, and a table of 16 quantiles of a normal distribution
    /// (bitsandbytes)
    Nf4,
    /// 4.5 bits: blocks of 64 with a scale in float32, and floats of 4 bits (bitsandbytes)
    Fp4,
    /// 5.25 bits: blocks of 32 with a scale in float32 and a zero point (GPTQ, AWQ, compressed-tensors)
    Int4In32,
    /// 4.625 bits: blocks of 64 with a scale in float32 and a zero point
    Int4In64,
    /// 4.3125 bits: blocks of 128 with a scale in float32 and a zero point
    Int4In128,
    /// 9.25 bits: blocks of 32 with a scale in float32 and a zero point
    Int8,
}

impl Format {
    pub const ALL: [Self; 22] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
        Self::Nf4,
        Self::Fp4,
        Self::Int4In32,
        Self::Int4In64,
        Self::Int4In128,
        Self::Int8,
    ];

    pub(crate) const fn layout(self) -> &'static Layout {
        match self {
            Self::F32 => &plain::F32,
            Self::F16 => &plain::F16,
            Self::Bf16 => &plain::BF16,
            Self::Q4_0 => &blocks_of_32::Q4_0,
            Self::Q4_1 => &blocks_of_32::Q4_1,
            Self::Q5_0 => &blocks_of_32::Q5_0,
            Self::Q5_1 => &blocks_of_32::Q5_1,
            Self::Q8_0 => &blocks_of_32::Q8_0,
            Self::Q2K => &k_quants::Q2_K,
            Self::Q3K => &k_quants::Q3_K,
            Self::Q4K => &k_quants::Q4_K,
            Self::Q5K => &k_quants::Q5_K,
            Self::Q6K => &k_quants::Q6_K,
            Self::Iq4Nl => &tables::IQ4_NL,
            Self::Iq4Xs => &tables::IQ4_XS,
            Self::Mxfp4 => &tables::MXFP4,
            Self::Nf4 => &pytorch::NF4,
            Self::Fp4 => &pytorch::FP4,
            Self::Int4In32 => &pytorch::INT4_32,
            Self::Int4In64 => &pytorch::INT4_64,
            Self::Int4In128 => &pytorch::INT4_128,
            Self::Int8 => &pytorch::INT8,
        }
    }

    /// Returns the name in lower case, such as `q4_k`.
    pub fn name(self) -> &'static str {
        self.layout().name
    }

    /// Returns the format with this name, in upper or lower case.
    ///
    /// # Errors
    /// [`Error::UnknownFormat`] if there is none.
    pub fn parse(name: &str) -> Result<Self, Error> {
        let mut formats = Self::ALL.into_iter();
        let found = formats.find(|format| format.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| Error::UnknownFormat { name: name.to_owned() })
    }

    /// Returns the number of this type in ggml's `enum ggml_type`, which GGUF files hold; `None` for a format
    /// that GGUF does not have.
    pub fn ggml_type(self) -> Option<u32> {
        self.layout().ggml_type
    }

    /// Returns the formats that GGUF files have.
    pub fn in_gguf() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|format| format.ggml_type().is_some())
    }

    /// Returns the format with this number in `enum ggml_type`, if it is supported.
    pub fn of_ggml_type(ggml_type: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.ggml_type() == Some(ggml_type))
    }

    /// Number of numbers in a block.
    pub fn block(self) -> usize {
        self.layout().block
    }

    /// Number of bytes in a block.
    pub fn block_bytes(self) -> usize {
        self.layout().block_bytes
    }

    /// Returns the size of `numbers` numbers in bytes. `None` if they are not whole blocks, or if the size
    /// overflows.
    pub fn bytes_of(self, numbers: usize) -> Option<usize> {
        match numbers % self.block() {
            0 => (numbers / self.block()).checked_mul(self.block_bytes()),
            _ => None,
        }
    }

    /// Unpacks whole blocks. For formats in GGUF files, the numbers equal those of `gguf.quants.dequantize`
    /// (PyPI `gguf`) bit for bit, except that a NaN may have other bits.
    ///
    /// # Errors
    /// [`Error::Length`] if `bytes` and `numbers` do not have matching lengths. Nothing is written in that
    /// case.
    pub fn unpack(self, bytes: &[u8], numbers: &mut [f32]) -> Result<(), Error> {
        self.check_lengths(bytes.len(), numbers.len())?;
        (self.layout().unpack)(bytes, numbers);
        Ok(())
    }

    /// Packs whole blocks like ggml without an importance matrix, or like bitsandbytes. Integers with a zero
    /// point span the range from the smallest to the largest number of a block.
    ///
    /// # Errors
    /// [`Error::Length`] if `bytes` and `numbers` do not have matching lengths, and [`Error::Unpackable`] if
    /// a number is not finite or too large. Nothing is written in that case. The float formats take every
    /// number.
    pub fn pack(self, numbers: &[f32], bytes: &mut [u8]) -> Result<(), Error> {
        self.check_lengths(bytes.len(), numbers.len())?;
        self.check_numbers(numbers)?;
        (self.layout().pack)(numbers, bytes);
        Ok(())
    }

    fn check_lengths(self, bytes: usize, numbers: usize) -> Result<(), Error> {
        match self.bytes_of(numbers) == Some(bytes) {
            true => Ok(()),
            false => Err(Error::Length { format: self, bytes, numbers }),
        }
    }

    fn check_numbers(self, numbers: &[f32]) -> Result<(), Error> {
        let Some(largest) = self.layout().largest else { return Ok(()) };
        // False for NaN.
        let fits = |number: f32| number.abs() <= largest;
        // Without an early exit, the compiler vectorises the loop.
        if numbers.iter().fold(true, |all, &number| all & fits(number)) {
            return Ok(());
        }
        match numbers.iter().enumerate().find(|&(_, &number)| !fits(number)) {
            Some((at, &value)) => Err(Error::Unpackable { format: self, at, value, largest }),
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
