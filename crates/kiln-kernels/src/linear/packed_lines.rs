//! The lines of shaders that read packed weights, for each format.

use kiln_weights::Format;

use crate::runtime::shader::Lines;

/// The formats that `weights_packed.wgsl` reads, in the order of [`FORMATS`].
pub(crate) const READ: [Format; 20] = [
    Format::Bf16,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2K,
    Format::Q3K,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::Iq4Nl,
    Format::Iq4Xs,
    Format::Mxfp4,
    Format::Nf4,
    Format::Fp4,
    Format::Int4In32,
    Format::Int4In64,
    Format::Int4In128,
    Format::Int8,
];

/// What the shader is to know of each format.
#[rustfmt::skip]
pub(crate) const FORMATS: Lines = &[
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 16u; const HIGH = 0u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 8.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 1u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 16.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 1u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 8u; const HIGH = 0u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 128.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 16u; const LOW = 2u; const HIGH = 0u; const SCALES = NIBBLES; const SCALE = F16; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 16u; const LOW = 2u; const HIGH = 1u; const SCALES = SIGNED; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 4.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = BYTES; const SCALE = F16; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 32u; const LOW = 4u; const HIGH = 1u; const SCALES = BYTES; const SCALE = F16; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 16u; const LOW = 4u; const HIGH = 2u; const SCALES = SIGNED; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 32.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = NON_LINEAR;",
    "const BLOCK = 256u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = SIGNED; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = NON_LINEAR;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const SCALE = BF16; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = E2M1;",
    "const BLOCK = 64u; const GROUP = 64u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const SCALE = F32; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = NF4;",
    "const BLOCK = 64u; const GROUP = 64u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const SCALE = F32; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = FP4;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ZEROS; const SCALE = F32; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 64u; const GROUP = 64u; const LOW = 4u; const HIGH = 0u; const SCALES = ZEROS; const SCALE = F32; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 128u; const GROUP = 128u; const LOW = 4u; const HIGH = 0u; const SCALES = ZEROS; const SCALE = F32; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 8u; const HIGH = 0u; const SCALES = ZEROS; const SCALE = F32; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;",
];

/// The number of a format's lines, if the shader reads it.
pub(crate) fn pick(format: Format) -> Option<usize> {
    READ.iter().position(|read| *read == format)
}

#[cfg(test)]
mod tests {
    use kiln_weights::streams::{GroupScales, ScaleType, Table};

    use super::*;

    #[test]
    fn lines_say_what_streams_are() {
        assert_eq!(READ.len(), FORMATS.len());
        for (format, lines) in READ.iter().zip(FORMATS) {
            let Some(streams) = format.streams() else { continue };
            let scales = match streams.groups {
                GroupScales::One => "ONE",
                GroupScales::Signed => "SIGNED",
                GroupScales::Bytes => "BYTES",
                GroupScales::Nibbles => "NIBBLES",
                GroupScales::Zeros => "ZEROS",
            };
            let scale = match streams.scale {
                ScaleType::F16 => "F16",
                ScaleType::Bf16 => "BF16",
                ScaleType::F32 => "F32",
            };
            let table = match streams.table {
                None => "PLAIN",
                Some(Table::NonLinear) => "NON_LINEAR",
                Some(Table::E2M1) => "E2M1",
                Some(Table::Nf4) => "NF4",
                Some(Table::Fp4) => "FP4",
            };
            let want = format!(
                "const BLOCK = {}u; const GROUP = {}u; const LOW = {}u; const HIGH = {}u; const SCALES = {scales}; \
                 const SCALE = {scale}; const HAS_MINIMUM = {}; const OFFSET = {:?}; const TABLE = {table};",
                streams.block,
                streams.group,
                streams.low,
                streams.high,
                streams.has_minimum,
                f32::from(streams.offset),
            );
            assert_eq!(*lines, want, "{format}");
        }
        assert_eq!(READ.iter().filter(|format| format.streams().is_some()).count(), Format::ALL.len() - 3);
    }

    #[test]
    fn tables_are_in_the_shader() {
        let shader = include_str!("../../../../shaders/weights_packed.wgsl");
        for table in [Table::NonLinear, Table::E2M1, Table::Nf4, Table::Fp4].map(Table::numbers) {
            let line = |(i, row): (usize, &[f32])| {
                let row = row.iter().map(|number| format!("{number:?}")).collect::<Vec<_>>().join(", ");
                format!("sums[{i}] = vec4({row});")
            };
            let lines: Vec<_> = table.chunks(4).enumerate().map(line).collect();
            let text = lines.join("\n            ");
            assert!(shader.contains(&text), "{text}");
        }
    }
}
