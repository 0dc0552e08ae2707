//! Checks that blocks unpack to the numbers of their matrix.

use safetensors::SafeTensors;

use super::*;
use crate::streams::Table;

/// Returns the numbers that the blocks of a matrix unpack to, if it has a format: all rows at once, and in
/// parts.
fn through_blocks(matrix: &Quantized, codes: &[u8]) -> Option<Vec<f32>> {
    let format = matrix.format()?;
    let (rows, row) = (matrix.rows(), format.bytes_of(matrix.columns()).unwrap());
    let mut blocks = vec![0; rows * row];
    matrix.pack(0..rows, codes, &mut blocks).unwrap();
    for first in (0..rows).step_by(3) {
        let own = first..(first + 3).min(rows);
        let mut part = vec![0; own.len() * row];
        matrix.pack(own.clone(), &codes[matrix.codes_of(own.clone())], &mut part).unwrap();
        assert_eq!(part, blocks[own.start * row..own.end * row], "{own:?}");
    }
    let mut numbers = vec![0.0; rows * matrix.columns()];
    format.unpack(&blocks, &mut numbers).unwrap();
    Some(numbers)
}

/// Compares with a tolerance. LLM.int8() multiplies by the scale of a row and by 1 / 127; a single scale is
/// rounded in another order.
fn assert_close(got: &[f32], want: &[f32], what: &str) {
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got == want || got.is_nan() && want.is_nan();
        // Subnormal numbers have a constant distance.
        let close = (got - want).abs() <= (want.abs() * f32::EPSILON * 2.0).max(2e-44);
        assert!(same || close, "{what}: number {at} is {got:e}, and {want:e} was recorded");
    }
}

#[test]
fn packed_blocks_unpack_to_the_recorded_numbers() {
    let file = SafeTensors::deserialize(RECORDED).unwrap();
    let mut formats = Vec::new();
    for module in modules(&file) {
        let (matrix, codes) = module.read();
        let Some(numbers) = through_blocks(&matrix, codes) else { continue };
        formats.extend(matrix.format());
        match module.bytes("SCB") {
            Some(_) => assert_close(&numbers, &module.floats("numbers"), &module.name),
            None => assert_same(&numbers, &module.floats("numbers"), &module.name),
        }
    }
    for format in [Format::Int4In32, Format::Int4In64, Format::Int8] {
        assert!(formats.contains(&format), "{format} among {formats:?}");
    }
}

#[test]
fn blocks_of_every_method_unpack_to_its_numbers() {
    let mut state = 7u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let mut formats = Vec::new();
    for (rows, columns, group) in
        [(16, 128, 32), (32, 192, 64), (16, 384, 128), (16, 256, 256), (16, 512, 192)]
    {
        let groups = usize::div_ceil(columns, group);
        let mut scales = |count: usize| -> Vec<f32> {
            (0..count).map(|_| (random() as f32 / 8e6 - 1.0) * 2f32.powi(random() as i32 % 40 - 20)).collect()
        };
        let (in_rows, in_blocks, of_rows) =
            (scales(rows * groups), scales(rows * columns / 32), scales(rows));
        let mut words =
            |count: usize| -> Vec<u32> { (0..count).map(|_| random() << 16 ^ random()).collect() };
        let codes: Vec<u8> = words(rows * columns / 4).iter().flat_map(|word| word.to_le_bytes()).collect();
        let listed: Vec<i32> = (0..columns).map(|column| (column / group) as i32).collect();
        let mut matrices = Vec::new();
        for bits in [2, 4, 8] {
            let zeros = words(groups * rows * bits / 32);
            for listed in [None, Some(&listed[..])] {
                let matrix = Gptq {
                    rows,
                    columns,
                    bits,
                    scales: &in_rows,
                    zeros: &zeros,
                    stored_zeros: Zeros::LessOne,
                    group,
                    columns_in_groups: listed,
                };
                matrices.push((matrix.quantized(), Format::of_integers(bits, group, columns)));
            }
            // Groups of compressed-tensors divide a row.
            if columns.is_multiple_of(group) {
                let zeros = words(rows.div_ceil(32 / bits) * groups);
                let zeros = Quantized::packed_zeros(rows, groups, bits, &zeros).unwrap();
                let kind = CodeType::Packed { bits };
                let matrix =
                    Quantized::compressed(rows, columns, kind, &in_rows, Some(&zeros), Some(&listed));
                matrices.push((matrix, Format::of_integers(bits, group, columns)));
                let matrix = Quantized::compressed(rows, columns, CodeType::Int8, &in_rows, None, None);
                matrices.push((matrix, Some(Format::Int8)));
            }
        }
        let zeros = words(groups * rows / 8);
        let matrix = Quantized::awq(rows, columns, &in_rows, &zeros, group);
        matrices.push((matrix, Format::of_integers(4, group, columns)));
        for (table, format) in [(Table::Nf4, Format::Nf4), (Table::Fp4, Format::Fp4)] {
            for block in [64, 128, 32] {
                let blocks = (rows * columns).div_ceil(block);
                let scales = Blocks::Plain(in_blocks[..blocks].to_vec());
                let matrix = Quantized::four_bits(rows, columns, &table.numbers(), block, scales);
                matrices.push((matrix, Some(format).filter(|_| block > 32)));
            }
        }
        for (matrix, format) in matrices {
            let matrix = matrix.unwrap();
            assert_eq!(matrix.format(), format, "{matrix:?}");
            let codes = &codes[..matrix.code_bytes()];
            let numbers = through_blocks(&matrix, codes);
            assert_eq!(numbers.is_some(), format.is_some());
            if let Some(numbers) = numbers {
                assert_same(
                    &numbers,
                    &unpacked(&matrix, codes),
                    &format!("{format:?} {rows} {columns} {group}"),
                );
            }
            formats.extend(format);
        }
        let matrix = Quantized::llm_int8(rows, columns, of_rows).unwrap();
        let codes = &codes[..matrix.code_bytes()];
        assert_close(&through_blocks(&matrix, codes).unwrap(), &unpacked(&matrix, codes), "LLM.int8");
    }
    for format in Format::ALL.into_iter().filter(|format| format.ggml_type().is_none()) {
        assert!(formats.contains(&format), "{format}");
    }
}

#[test]
fn matrices_that_do_not_fit_blocks_have_no_format() {
    let (scales, zeros) = ([1.0; 64], [0; 8]);
    let groups_of_16 = gptq(&scales, &zeros, None).quantized().unwrap();
    assert_eq!(groups_of_16.format(), None);
    let mut blocks = [0; 37];
    assert!(groups_of_16.pack(0..1, &[0; 512], &mut blocks).is_err());
    // Columns in another order than their groups.
    let order: Vec<i32> = (0..64).map(|column| column % 2).collect();
    let matrix = Gptq { columns: 64, group: 32, ..gptq(&scales, &zeros, Some(&order)) };
    assert_eq!(matrix.quantized().unwrap().format(), None);
    let mut other = Table::Nf4.numbers();
    other[3] = -0.4;
    assert_eq!(Format::of_table(&other, 64, 64), None);
    assert_eq!(Format::of_integers(4, 0, 64), None);
    assert_eq!(Format::of_integers(3, 32, 64), None);
    // A zero point that is not one of the codes.
    let kind = CodeType::Packed { bits: 4 };
    for zero in [-9.0, 248.0, 0.5, f32::NAN] {
        let matrix = Quantized::compressed(1, 32, kind, &[1.0], Some(&[zero]), None).unwrap();
        let error = matrix.pack(0..1, &[0; 16], &mut [0; 21]).unwrap_err().to_string();
        assert!(error.starts_with("its zero points have"), "{error}");
    }
    let matrix = Quantized::compressed(1, 32, kind, &[1.0], Some(&[-8.0]), None).unwrap();
    assert!(matrix.pack(0..1, &[0; 16], &mut [0; 20]).is_err());
    assert!(matrix.pack(0..2, &[0; 16], &mut [0; 42]).is_err());
    assert!(matrix.pack(0..1, &[0; 16], &mut [0; 21]).is_ok());
}
