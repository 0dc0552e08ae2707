//! Comparison of quantized matrices with recordings of the libraries that produce them
//! (`tools/quantized_cases.py`).
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod blocks;

use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::*;
use crate::Format;

static RECORDED: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/weights/quantized.safetensors"));

/// The recorded tensors of one module.
struct Module<'a> {
    file: &'a SafeTensors<'a>,
    name: String,
    config: Value,
}

impl Module<'_> {
    fn bytes(&self, part: &str) -> Option<&[u8]> {
        Some(self.file.tensor(&format!("{}.{part}", self.name)).ok()?.data())
    }

    fn floats(&self, part: &str) -> Vec<f32> {
        let tensor = self.file.tensor(&format!("{}.{part}", self.name)).unwrap();
        let format = match tensor.dtype() {
            Dtype::F32 => Format::F32,
            Dtype::F16 => Format::F16,
            Dtype::BF16 => Format::Bf16,
            Dtype::I8 => return tensor.data().iter().map(|&byte| byte.cast_signed().into()).collect(),
            other => panic!("{part} has {other:?}"),
        };
        let mut numbers = vec![0.0; tensor.shape().iter().product()];
        format.unpack(tensor.data(), &mut numbers).unwrap();
        numbers
    }

    fn words(&self, part: &str) -> Vec<u32> {
        self.bytes(part).unwrap().as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    fn indices(&self, part: &str) -> Option<Vec<i32>> {
        self.bytes(part)
            .map(|bytes| bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect())
    }

    /// Returns the matrix and its codes.
    fn read(&self) -> (Quantized, &[u8]) {
        let shape = self.file.tensor(&format!("{}.numbers", self.name)).unwrap().shape().to_vec();
        let [rows, columns] = shape[..] else { panic!("{shape:?}") };
        let setting = |key: &str| self.config[key].as_i64().unwrap();
        let group = || usize::try_from(setting("group_size")).unwrap_or(columns);
        match self.config["quant_method"].as_str().unwrap() {
            "bitsandbytes" => (self.bitsandbytes(rows, columns), self.bytes("weight").unwrap()),
            "gptq" => {
                let is_v1 = self.config["checkpoint_format"] == "gptq";
                let matrix = Gptq {
                    rows,
                    columns,
                    bits: setting("bits") as usize,
                    scales: &self.floats("scales"),
                    zeros: &self.words("qzeros"),
                    stored_zeros: if is_v1 { Zeros::LessOne } else { Zeros::Plain },
                    group: group(),
                    columns_in_groups: Some(&self.indices("g_idx").unwrap()),
                };
                let listed = matrix.quantized().unwrap();
                if self.config["desc_act"] == false {
                    let in_order = Gptq { columns_in_groups: None, ..matrix }.quantized().unwrap();
                    let codes = self.bytes("qweight").unwrap();
                    assert_same(&unpacked(&in_order, codes), &unpacked(&listed, codes), "in order");
                }
                (listed, self.bytes("qweight").unwrap())
            }
            "awq" => {
                let (scales, zeros) = (self.floats("scales"), self.words("qzeros"));
                let matrix = Quantized::awq(rows, columns, &scales, &zeros, group()).unwrap();
                (matrix, self.bytes("qweight").unwrap())
            }
            _ => self.compressed(rows, columns),
        }
    }

    fn bitsandbytes(&self, rows: usize, columns: usize) -> Quantized {
        if self.bytes("SCB").is_some() {
            return Quantized::llm_int8(rows, columns, self.floats("SCB")).unwrap();
        }
        let kinds = ["nf4", "fp4"].map(|kind| format!("weight.quant_state.bitsandbytes__{kind}"));
        let state = kinds.iter().find_map(|name| self.bytes(name)).unwrap();
        let state: Value = serde_json::from_slice(state).unwrap();
        assert_eq!(state["shape"], serde_json::json!([rows, columns]));
        let size = |key: &str| state[key].as_u64().unwrap() as usize;
        let table = self.floats("weight.quant_map");
        if self.bytes("weight.nested_absmax").is_none() {
            let blocks = Blocks::Plain(self.floats("weight.absmax"));
            return Quantized::four_bits(rows, columns, &table, size("blocksize"), blocks).unwrap();
        }
        let nested = Nested {
            codes: self.bytes("weight.absmax").unwrap(),
            table: &self.floats("weight.nested_quant_map"),
            scales: &self.floats("weight.nested_absmax"),
            block: size("nested_blocksize"),
            offset: state["nested_offset"].as_f64().unwrap() as f32,
        };
        Quantized::four_bits(rows, columns, &table, size("blocksize"), Blocks::Nested(nested)).unwrap()
    }

    fn compressed(&self, rows: usize, columns: usize) -> (Quantized, &[u8]) {
        let scales = self.floats("weight_scale");
        let bits =
            self.config["config_groups"]["group_0"]["weights"]["num_bits"].as_u64().unwrap_or(8) as usize;
        let (codes, kind) = match self.bytes("weight_packed") {
            Some(codes) => (codes, CodeType::Packed { bits }),
            None => {
                let weight = self.file.tensor(&format!("{}.weight", self.name)).unwrap();
                let kind = if weight.dtype() == Dtype::I8 { CodeType::Int8 } else { CodeType::Float8 };
                (weight.data(), kind)
            }
        };
        let zeros = self.bytes("weight_zero_point").map(|_| match kind {
            CodeType::Packed { bits } => {
                let groups = scales.len() / rows;
                Quantized::packed_zeros(rows, groups, bits, &self.words("weight_zero_point")).unwrap()
            }
            _ => self.floats("weight_zero_point"),
        });
        let matrix = |listed: Option<&[i32]>| {
            Quantized::compressed(rows, columns, kind, &scales, zeros.as_deref(), listed).unwrap()
        };
        let groups = (scales.len() / rows).max(1);
        let listed: Vec<_> = (0..columns).map(|column| (column * groups / columns) as i32).collect();
        let in_order = matrix(None);
        assert_same(&unpacked(&in_order, codes), &unpacked(&matrix(Some(&listed)), codes), &self.name);
        (in_order, codes)
    }
}

fn modules<'a>(file: &'a SafeTensors<'a>) -> Vec<Module<'a>> {
    let (_, metadata) = SafeTensors::read_metadata(RECORDED).unwrap();
    let configs = metadata.metadata().clone().unwrap();
    let named = file.names().into_iter().filter_map(|name| name.strip_suffix(".numbers"));
    let module = |name: &str| {
        let (case, _) = name.split_once('/').unwrap();
        Module { file, name: name.to_owned(), config: serde_json::from_str(&configs[case]).unwrap() }
    };
    named.map(module).collect()
}

fn unpacked(matrix: &Quantized, codes: &[u8]) -> Vec<f32> {
    let mut numbers = vec![0.0; matrix.rows() * matrix.columns()];
    matrix.unpack(0..matrix.rows(), codes, &mut numbers).unwrap();
    numbers
}

#[track_caller]
fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        assert!(same, "{what}: number {at} is {got:e}, and {want:e} was recorded");
    }
}

#[test]
fn unpacking_equals_the_libraries_to_the_bit() {
    let file = SafeTensors::deserialize(RECORDED).unwrap();
    let modules = modules(&file);
    assert!(modules.len() > 30);
    for module in modules {
        let (matrix, codes) = module.read();
        assert_eq!(matrix.code_bytes(), codes.len(), "{}", module.name);
        assert_same(&unpacked(&matrix, codes), &module.floats("numbers"), &module.name);
    }
}

#[test]
fn recorded_edge_cases_include_nan_zero_and_negative_numbers() {
    let file = SafeTensors::deserialize(RECORDED).unwrap();
    for module in modules(&file).iter().filter(|module| module.name.starts_with("edges")) {
        let numbers = module.floats("numbers");
        // All nested scales share one scale, which therefore cannot be special in only a few.
        let has_nan = numbers.iter().any(|x| x.is_nan());
        assert_ne!(has_nan, module.name.contains("nested"), "{}", module.name);
        assert!(numbers.iter().any(|x| x.is_finite() && *x < 0.0), "{}", module.name);
        assert!(numbers.contains(&0.0), "{}", module.name);
    }
}

#[test]
fn unpacking_some_rows_equals_unpacking_all() {
    let file = SafeTensors::deserialize(RECORDED).unwrap();
    for module in modules(&file) {
        let (matrix, codes) = module.read();
        let whole = unpacked(&matrix, codes);
        for size in [1, 3, 7] {
            for first in (0..matrix.rows()).step_by(size) {
                let rows = first..(first + size).min(matrix.rows());
                let mut numbers = vec![0.0; rows.len() * matrix.columns()];
                matrix.unpack(rows.clone(), &codes[matrix.codes_of(rows.clone())], &mut numbers).unwrap();
                let want = &whole[rows.start * matrix.columns()..rows.end * matrix.columns()];
                assert_same(&numbers, want, &format!("{} {rows:?}", module.name));
            }
        }
    }
}

/// Returns a GPTQ matrix with 32 rows, 32 columns and 2 groups.
fn gptq<'a>(scales: &'a [f32], zeros: &'a [u32], columns: Option<&'a [i32]>) -> Gptq<'a> {
    Gptq {
        rows: 32,
        columns: 32,
        bits: 4,
        scales,
        zeros,
        stored_zeros: Zeros::LessOne,
        group: 16,
        columns_in_groups: columns,
    }
}

#[test]
fn contradictory_parts_are_errors() {
    let says = |result: Result<Quantized, Error>, said: &str| {
        let error = result.unwrap_err().to_string();
        assert_eq!(error, format!("its {said}; get the folder again"));
    };
    let (scales, zeros) = ([1.0; 64], [0; 8]);
    assert!(gptq(&scales, &zeros, None).quantized().is_ok());
    says(gptq(&scales[1..], &zeros, None).quantized(), "words of zero points are 8 where 4 are needed");
    says(gptq(&scales[..32], &zeros[..4], None).quantized(), "groups of columns are 1 where 2 are needed");
    says(gptq(&scales, &zeros[1..], None).quantized(), "words of zero points are 7 where 8 are needed");
    says(gptq(&scales, &zeros, Some(&[0; 31])).quantized(), "columns in groups are 31 where 32 are needed");
    for group in [2, -1, i32::MAX] {
        let said = format!("columns in groups name group {group}, and there are 2 groups");
        says(gptq(&scales, &zeros, Some(&[group; 32])).quantized(), &said);
    }
    for bits in [0, 3, 5, 16, 64] {
        let said = format!("codes have {bits} bits; 2, 4 and 8 are read");
        says(Gptq { bits, ..gptq(&scales, &zeros, None) }.quantized(), &said);
    }
    says(Gptq { group: 0, ..gptq(&scales, &zeros, None) }.quantized(), "groups have 0 columns");
    says(
        Gptq { columns: 31, group: 31, ..gptq(&scales[..32], &zeros[..4], None) }.quantized(),
        "codes do not fit a matrix of 32 rows and 31 columns",
    );
    says(Quantized::awq(12, 8, &[1.0; 12], &[0], 8), "rows are 12, no multiple of 8");
    says(Quantized::llm_int8(2, 2, vec![1.0]), "scales are 1 where 2 are needed");
    let blocks = || Blocks::Plain(vec![1.0; 2]);
    says(
        Quantized::four_bits(8, 8, &[0.0; 15], 32, blocks()),
        "values of the table are 15 where 16 are needed",
    );
    says(Quantized::four_bits(8, 9, &[0.0; 16], 32, blocks()), "scales are 2 where 3 are needed");
    says(Quantized::four_bits(8, 8, &[0.0; 16], 0, blocks()), "blocks have no numbers");
    says(
        Quantized::four_bits(1 << 40, 1 << 40, &[0.0; 16], 32, blocks()),
        &format!("numbers would be {} times {}", 1_u64 << 40, 1_u64 << 40),
    );
    let packed = CodeType::Packed { bits: 4 };
    says(
        Quantized::compressed(2, 8, packed, &[1.0; 6], None, None),
        "scales divide a row of 8 columns into 3 groups",
    );
    says(Quantized::compressed(2, 8, packed, &[1.0; 3], None, None), "scales are 3 where 2 are needed");
}

#[test]
fn rows_out_of_range_are_errors_and_nothing_is_written() {
    let matrix = Quantized::llm_int8(2, 4, vec![127.0; 2]).unwrap();
    let mut numbers = [7.0; 4];
    for (rows, codes) in [(0..3, 12), (2..3, 4), (1..2, 3), (0..2, 8)] {
        assert!(matrix.unpack(rows, &vec![1; codes], &mut numbers).is_err());
    }
    #[expect(clippy::reversed_empty_ranges, reason = "what a caller may get wrong")]
    let reversed = matrix.unpack(2..1, &[], &mut numbers);
    assert!(reversed.is_err());
    assert_eq!(numbers, [7.0; 4]);
    matrix.unpack(1..2, &[1; 4], &mut numbers).unwrap();
    assert_eq!(numbers, [1.0; 4]);
}

proptest! {
    /// Checks that no sizes and no numbers cause a panic.
    #[test]
    fn any_parts_are_a_matrix_or_an_error(
        [rows, columns, bits, group] in prop::array::uniform4(0..40_usize),
        scales in prop::collection::vec(-1.0..1.0_f32, 0..80),
        zeros in prop::collection::vec(any::<u32>(), 0..80),
        columns_in_groups in prop::option::of(prop::collection::vec(-1..4_i32, 0..40)),
        codes in prop::collection::vec(any::<u8>(), 1600),
    ) {
        let listed = columns_in_groups.as_deref();
        let bits = [2, 4, 8, bits][bits % 4];
        let gptq = Gptq {
            rows,
            columns,
            bits,
            scales: &scales,
            zeros: &zeros,
            stored_zeros: Zeros::LessOne,
            group,
            columns_in_groups: listed,
        };
        let table = [0.5; 256];
        let nested =
            Nested { codes: &codes[..group], table: &table, scales: &scales, block: bits, offset: 1.0 };
        let packed = Quantized::packed_zeros(rows, scales.len() / rows.max(1), bits, &zeros);
        let (words, packed) = (CodeType::Packed { bits }, packed.ok());
        let one = &scales[..scales.len().min(1)];
        let matrices = [
            gptq.quantized(),
            Quantized::awq(rows, columns, &scales, &zeros, group),
            Quantized::compressed(rows, columns, words, &scales, packed.as_deref(), listed),
            Quantized::compressed(rows, columns, CodeType::Float8, one, None, listed),
            Quantized::llm_int8(rows, columns, scales.clone()),
            Quantized::four_bits(rows, columns, &[0.5; 16], group, Blocks::Plain(scales.clone())),
            Quantized::four_bits(rows, columns, &[0.5; 16], group, Blocks::Nested(nested)),
        ];
        for matrix in matrices.into_iter().flatten() {
            let codes = &codes[..matrix.code_bytes()];
            prop_assert_eq!(unpacked(&matrix, codes).len(), rows * columns);
            if let Some(bytes) = matrix.format().and_then(|format| format.bytes_of(rows * columns)) {
                let mut blocks = vec![0; bytes];
                // A zero point may not be one of the codes.
                let _ = matrix.pack(0..rows, codes, &mut blocks);
            }
        }
    }
}
