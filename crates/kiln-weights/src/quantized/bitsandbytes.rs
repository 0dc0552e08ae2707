//! bitsandbytes: NF4, FP4 and LLM.int8().
//!
//! Sources: T. Dettmers et al., "QLoRA", <https://arxiv.org/abs/2305.14314>, and "LLM.int8()",
//! <https://arxiv.org/abs/2208.07339>;
//! `dequantize_4bit` and `int8_vectorwise_dequant` of bitsandbytes.

use super::{Quantized, check, codes::Codes, scaling::Scaling, wrong};
use crate::Error;

/// The scales of blocks of numbers (`absmax`).
#[derive(Clone, Debug)]
pub enum Blocks<'a> {
    Plain(Vec<f32>),
    /// The scales are quantized as well (`double_quant`).
    Nested(Nested<'a>),
}

/// Scales in bytes: `table[code] * scale + offset`, with a scale per block of codes.
#[derive(Clone, Copy, Debug)]
pub struct Nested<'a> {
    pub codes: &'a [u8],
    /// 256 values (`nested_quant_map`).
    pub table: &'a [f32],
    /// Scales of the codes (`nested_absmax`).
    pub scales: &'a [f32],
    /// Codes per block.
    pub block: usize,
    pub offset: f32,
}

impl Nested<'_> {
    fn unpack(&self) -> Result<Vec<f32>, Error> {
        let Self { codes, table, scales, block, offset } = *self;
        let table: &[f32; 256] = table.try_into().map_err(|_| {
            wrong("values of the nested table", format!("are {} where 256 are needed", table.len()))
        })?;
        if block == 0 {
            return Err(wrong("nested blocks", "have no codes".to_owned()));
        }
        check("nested scales", scales.len(), codes.len().div_ceil(block))?;
        let blocks = codes.chunks(block).zip(scales);
        let scaled = |(codes, scale): (&[u8], f32)| -> Vec<f32> {
            codes.iter().map(|code| table[usize::from(*code)] * scale + offset).collect()
        };
        Ok(blocks.flat_map(|(codes, scale)| scaled((codes, *scale))).collect())
    }
}

impl Quantized {
    /// Creates an NF4 or FP4 matrix. Codes are `[rows * columns / 2]` bytes, `table` has their 16 values
    /// (`quant_map`), and each `block` numbers share a scale.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths contradict each other.
    pub fn four_bits(
        rows: usize,
        columns: usize,
        table: &[f32],
        block: usize,
        scales: Blocks<'_>,
    ) -> Result<Self, Error> {
        let table = table
            .try_into()
            .map_err(|_| wrong("values of the table", format!("are {} where 16 are needed", table.len())))?;
        if block == 0 {
            return Err(wrong("blocks", "have no numbers".to_owned()));
        }
        let scales = match scales {
            Blocks::Plain(scales) => scales,
            Blocks::Nested(nested) => nested.unpack()?,
        };
        let numbers = super::product("numbers", rows, columns)?;
        check("scales", scales.len(), numbers.div_ceil(block))?;
        Self::new(rows, columns, Codes::Table(table), Scaling::Blocks { scales, block })
    }

    /// Creates an LLM.int8() matrix. Codes are `[rows, columns]` signed bytes, and each row has a scale
    /// (`SCB`): its largest absolute value.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths contradict each other.
    pub fn llm_int8(rows: usize, columns: usize, scales: Vec<f32>) -> Result<Self, Error> {
        check("scales", scales.len(), rows)?;
        Self::new(rows, columns, Codes::Int8, Scaling::Rows { scales, factor: 1.0 / 127.0 })
    }
}
