//! The lines of shaders that read packed weights, for each format.

use std::sync::LazyLock;

use kiln_weights::{
    Format,
    streams::{GroupScales, ScaleType, Streams, Table},
};

use crate::runtime::shader::Lines;

/// The lines of each format that `weights_packed.wgsl` reads.
pub(crate) const FORMATS: Lines = || {
    static LINES: LazyLock<Vec<&str>> =
        LazyLock::new(|| formats().map(|(_, streams)| &*line_of(streams).leak()).collect());
    &LINES
};

/// Index of the lines for a format, if the shader reads it.
pub(crate) fn pick(format: Format) -> Option<usize> {
    formats().position(|(read, _)| read == format)
}

/// The lines of [`FORMATS`] for formats whose codes are multiplied in integers. The first is that of the
/// file, which no launch picks.
#[cfg(feature = "wgpu")]
pub(crate) const OF_BYTES: Lines = || {
    static LINES: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let own = formats().zip(FORMATS()).filter(|((format, _), _)| has_bytes(*format));
        FORMATS().iter().take(1).chain(own.map(|(_, line)| line)).copied().collect()
    });
    &LINES
};

/// Index of the line of [`OF_BYTES`] for a format, if it has one.
#[cfg(feature = "wgpu")]
pub(crate) fn pick_of_bytes(format: Format) -> Option<usize> {
    let mut own = formats().filter(|(format, _)| has_bytes(*format));
    own.position(|(read, _)| read == format).map(|place| place + 1)
}

/// Whether the codes of a format are integers of at most eight bits: the others have tables, or are floats.
pub(crate) fn has_bytes(format: Format) -> bool {
    format.streams().is_some_and(|streams| streams.table.is_none())
}

/// Bfloat16, and all formats that are stored as streams.
fn formats() -> impl Iterator<Item = (Format, Streams)> {
    /// 16-bit numbers are read like codes.
    const BF16: Streams = Streams {
        block: 32,
        low: 16,
        high: 0,
        group: 32,
        groups: GroupScales::One,
        has_minimum: false,
        scale: ScaleType::F16,
        table: None,
        offset: 0,
    };
    let streams = |format: Format| if format == Format::Bf16 { Some(BF16) } else { format.streams() };
    Format::ALL.into_iter().filter_map(move |format| Some((format, streams(format)?)))
}

fn line_of(streams: Streams) -> String {
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
    format!(
        "const BLOCK = {}u; const GROUP = {}u; const LOW = {}u; const HIGH = {}u; const SCALES = {scales}; \
         const SCALE = {scale}; const HAS_MINIMUM = {}; const OFFSET = {:?}; const TABLE = {table};",
        streams.block,
        streams.group,
        streams.low,
        streams.high,
        streams.has_minimum,
        f32::from(streams.offset),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_tables_are_in_the_shader() {
        let shader = include_str!("../../../../shaders/weights_packed.wgsl");
        // The line that the others replace.
        assert!(shader.contains(FORMATS()[0]), "{}", FORMATS()[0]);
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
