//! The lines of shaders that read packed weights, for each format.

use kiln_weights::Format;

use crate::shader::Lines;

/// The formats that `weights_packed.wgsl` reads, in the order of [`FORMATS`].
pub(crate) const READ: [Format; 14] = [
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
];

/// What the shader is to know of each format.
#[rustfmt::skip]
pub(crate) const FORMATS: Lines = &[
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 16u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 8.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 1u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 16.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 1u; const SCALES = ONE; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 8u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 128.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 16u; const LOW = 2u; const HIGH = 0u; const SCALES = NIBBLES; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 16u; const LOW = 2u; const HIGH = 1u; const SCALES = SIGNED; const HAS_MINIMUM = false; const OFFSET = 4.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = BYTES; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 32u; const LOW = 4u; const HIGH = 1u; const SCALES = BYTES; const HAS_MINIMUM = true; const OFFSET = 0.0; const TABLE = PLAIN;",
    "const BLOCK = 256u; const GROUP = 16u; const LOW = 4u; const HIGH = 2u; const SCALES = SIGNED; const HAS_MINIMUM = false; const OFFSET = 32.0; const TABLE = PLAIN;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = NON_LINEAR;",
    "const BLOCK = 256u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = SIGNED; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = NON_LINEAR;",
    "const BLOCK = 32u; const GROUP = 32u; const LOW = 4u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = E2M1;",
];

/// The number of a format's lines, if the shader reads it.
pub(crate) fn pick(format: Format) -> Option<usize> {
    READ.iter().position(|read| *read == format)
}

#[cfg(test)]
mod tests {
    use kiln_weights::streams::GroupScales;

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
            };
            let table = match (streams.table, streams.is_bf16) {
                (None, _) => "PLAIN",
                (Some(_), false) => "NON_LINEAR",
                (Some(_), true) => "E2M1",
            };
            let want = format!(
                "const BLOCK = {}u; const GROUP = {}u; const LOW = {}u; const HIGH = {}u; const SCALES = {scales}; \
                 const HAS_MINIMUM = {}; const OFFSET = {:?}; const TABLE = {table};",
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
}
