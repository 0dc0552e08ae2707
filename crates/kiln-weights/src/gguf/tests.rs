//! Recorded, written and damaged GGUF files.

mod damage;

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::Format;

/// A file written by gguf (`tools/weights_cases.py`).
static RECORDED: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/weights/formats.gguf"));

fn read(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::read(&mut Cursor::new(bytes), bytes.len() as u64)
}

/// Writes a file with the data of each tensor.
fn written(metadata: &Metadata, tensors: &[(NewTensor, Vec<u8>)]) -> Vec<u8> {
    let table: Vec<NewTensor> = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
    let mut writer = GgufWriter::new(Vec::new(), metadata, &table).expect("a possible file");
    for (_, bytes) in tensors {
        for part in bytes.chunks(100) {
            writer.write(part).expect("bytes of the tensor");
        }
    }
    writer.finish().expect("complete tensors")
}

fn new_tensor(name: &str, shape: &[usize], format: Format) -> NewTensor {
    NewTensor { name: name.to_owned(), shape: shape.to_vec(), format }
}

#[test]
fn values_of_each_type_are_read() {
    let gguf = read(RECORDED).expect("the recorded file");
    let strings = ["", "a", "ä"].map(str::to_owned).to_vec();
    let expected = [
        ("general.architecture", Value::String("none".to_owned())),
        ("type.u8", Value::U8(200)),
        ("type.i8", Value::I8(-100)),
        ("type.u16", Value::U16(60000)),
        ("type.i16", Value::I16(-30000)),
        ("type.u32", Value::U32(4_000_000_000)),
        ("type.i32", Value::I32(-2_000_000_000)),
        ("type.f32", Value::F32(0.1)),
        ("type.bool", Value::Bool(true)),
        ("type.string", Value::String("häßlich 🐍".to_owned())),
        ("type.strings", Value::Array(Array::String(strings))),
        ("type.i32s", Value::Array(Array::I32(vec![1, -2, 3]))),
        ("type.f32s", Value::Array(Array::F32(vec![0.5, -1.5]))),
        ("type.bools", Value::Array(Array::Bool(vec![true, false]))),
        ("type.u64", Value::U64(u64::MAX)),
        ("type.i64", Value::I64(i64::MIN)),
        ("type.f64", Value::F64(0.1)),
    ];
    assert_eq!(*gguf.metadata(), expected.into_iter().collect());
}

#[test]
fn values_are_converted_to_the_requested_type() {
    let entries = [
        ("small", Value::I8(-3)),
        ("large", Value::U64(u64::MAX)),
        ("float", Value::F32(0.5)),
        ("text", Value::String("a".to_owned())),
        ("yes", Value::Bool(true)),
        ("integers", Value::Array(Array::I16(vec![1, 2]))),
        ("signed", Value::Array(Array::I16(vec![1, -2]))),
        ("floats", Value::Array(Array::F64(vec![0.25]))),
    ];
    let metadata = Metadata::from_iter(entries);
    assert_eq!(metadata.unsigned("large").expect("an integer"), Some(u64::MAX));
    assert_eq!(metadata.number("small").expect("a number"), Some(-3.0));
    assert_eq!(metadata.number("float").expect("a number"), Some(0.5));
    assert_eq!(metadata.text("text").expect("a text"), Some("a"));
    assert_eq!(metadata.boolean("yes").expect("a truth value"), Some(true));
    assert_eq!(metadata.integers("integers").expect("integers"), Some(vec![1, 2]));
    assert_eq!(metadata.numbers("floats").expect("floats"), Some(vec![0.25]));
    assert_eq!(metadata.strings("missing").expect("no entry"), None);
    let error = metadata.unsigned("small").expect_err("negative").to_string();
    assert_eq!(error, "GGUF metadata `small` must be an integer that is not negative");
    assert!(metadata.integers("signed").is_err() && metadata.strings("text").is_err());
    assert!(metadata.boolean("small").is_err() && metadata.numbers("integers").is_err());

    let mut metadata = metadata;
    assert_eq!(metadata.insert("small", Value::I8(4)), Some(Value::I8(-3)));
    assert_eq!(metadata.iter().next(), Some(("small", &Value::I8(4))));
}

#[test]
fn tensors_are_found_by_name() {
    let gguf = read(RECORDED).expect("the recorded file");
    assert_eq!(gguf.tensors().len(), 1 + 3 * Format::in_gguf().count());
    let tensor = gguf.tensor("q6_k.packed").expect("a tensor of the file");
    assert_eq!((tensor.shape.as_slice(), tensor.format), ([16, 256].as_slice(), Format::Q6K));
    assert_eq!(tensor.range.end - tensor.range.start, 16 * 210);
    assert_eq!(gguf.tensor("q6_k"), None);
}

#[test]
fn a_file_written_again_has_the_same_bytes() {
    let gguf = read(RECORDED).expect("the recorded file");
    let tensors: Vec<(NewTensor, Vec<u8>)> = gguf
        .tensors()
        .iter()
        .map(|TensorInfo { name, shape, format, range }| {
            let data = RECORDED[range.start as usize..range.end as usize].to_vec();
            (new_tensor(name, shape, *format), data)
        })
        .collect();
    assert!(written(gguf.metadata(), &tensors) == RECORDED, "other bytes");
}

#[test]
fn parts_of_a_split_file_name_all_parts() {
    let names = part_names("a-b-00002-of-00003.gguf").expect("the name of a part");
    assert_eq!(names, ["a-b-00001-of-00003.gguf", "a-b-00002-of-00003.gguf", "a-b-00003-of-00003.gguf"]);
    let others = [
        "a.gguf",
        "a-00004-of-00003.gguf",
        "a-00000-of-00003.gguf",
        "a-1-of-3.gguf",
        "a-00001-of-00003.bin",
        "a-+0001-of-00003.gguf",
        "-of-.gguf",
    ];
    for name in others {
        assert_eq!(part_names(name), None, "{name}");
    }

    let parts = |entries: &[(&str, Value)]| {
        let metadata = entries.iter().cloned().collect();
        read(&written(&metadata, &[])).expect("a file").parts()
    };
    assert_eq!(parts(&[]).expect("a whole model"), None);
    let (count, tensors) = (("split.count", Value::U16(3)), ("split.tensors.count", Value::I32(7)));
    let second = [count.clone(), ("split.no", Value::U16(1)), tensors.clone()];
    assert_eq!(parts(&second).expect("a part"), Some(Parts { part: 1, count: 3, tensors: 7 }));
    let error = parts(&[count.clone(), ("split.no", Value::U16(3)), tensors]).expect_err("too many");
    assert_eq!(error.to_string(), "GGUF metadata `split.no` is 3, and there are 3 parts, from 0 on");
    let error = parts(&[count]).expect_err("incomplete").to_string();
    assert_eq!(error, "GGUF metadata `split.no` is missing");
}

#[test]
fn impossible_tensors_and_incomplete_data_are_errors_when_writing() {
    let refused = |tensors: &[NewTensor]| {
        let writer = GgufWriter::new(Vec::new(), &Metadata::new(), tensors);
        writer.expect_err("an impossible file").to_string()
    };
    let twice = refused(&[new_tensor("a", &[1], Format::F32), new_tensor("a", &[2], Format::F32)]);
    assert_eq!(twice, "the GGUF file cannot be written: tensor `a` is there twice");
    let long = refused(&[new_tensor(&"a".repeat(64), &[1], Format::F32)]);
    assert!(long.ends_with("has a name of more than 63 bytes"), "{long}");
    let other = refused(&[new_tensor("a", &[64], Format::Nf4)]);
    assert!(other.ends_with("tensor `a` is in nf4, which GGUF files do not have"), "{other}");
    let part = refused(&[new_tensor("a", &[2, 48], Format::Q8_0)]);
    assert!(part.ends_with("tensor `a` has 48 columns; q8_0 needs a multiple of 32"), "{part}");
    let huge = refused(&[new_tensor("a", &[usize::MAX, 32], Format::F32)]);
    assert!(huge.ends_with("which is too large"), "{huge}");

    let alignment = Metadata::from_iter([("general.alignment", Value::U32(48))]);
    assert!(GgufWriter::new(Vec::new(), &alignment, &[]).is_err());

    let table = [new_tensor("a", &[2], Format::F16)];
    let mut writer = GgufWriter::new(Vec::new(), &Metadata::new(), &table).expect("a possible file");
    writer.write(&[1, 2, 3]).expect("a part of the tensor");
    let error = writer.write(&[4, 5]).expect_err("a byte too many").to_string();
    assert!(error.ends_with("2 bytes are given, and the tensor has only 1 more"), "{error}");
    assert!(
        writer.finish().expect_err("a byte is missing").to_string().contains("1 tensors are not complete")
    );
}

fn values() -> impl Strategy<Value = Value> {
    /// Generates floats other than NaN, which equal themselves.
    fn floats() -> impl Strategy<Value = f64> + Clone {
        prop::num::f64::ANY.prop_filter("NaN", |x| !x.is_nan())
    }
    fn floats32() -> impl Strategy<Value = f32> + Clone {
        prop::num::f32::ANY.prop_filter("NaN", |x| !x.is_nan())
    }
    use prop::collection::vec;
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<bool>().prop_map(Value::Bool),
        floats32().prop_map(Value::F32),
        floats().prop_map(Value::F64),
        any::<String>().prop_map(Value::String),
        vec(any::<u8>(), 0..5).prop_map(|v| Value::Array(Array::U8(v))),
        vec(any::<i8>(), 0..5).prop_map(|v| Value::Array(Array::I8(v))),
        vec(any::<u16>(), 0..5).prop_map(|v| Value::Array(Array::U16(v))),
        vec(any::<i16>(), 0..5).prop_map(|v| Value::Array(Array::I16(v))),
        vec(any::<u32>(), 0..5).prop_map(|v| Value::Array(Array::U32(v))),
        vec(any::<i32>(), 0..5).prop_map(|v| Value::Array(Array::I32(v))),
        vec(any::<u64>(), 0..5).prop_map(|v| Value::Array(Array::U64(v))),
        vec(any::<i64>(), 0..5).prop_map(|v| Value::Array(Array::I64(v))),
        vec(any::<bool>(), 0..5).prop_map(|v| Value::Array(Array::Bool(v))),
        vec(floats32(), 0..5).prop_map(|v| Value::Array(Array::F32(v))),
        vec(floats(), 0..5).prop_map(|v| Value::Array(Array::F64(v))),
        vec(any::<String>(), 0..5).prop_map(|v| Value::Array(Array::String(v))),
    ]
}

/// Generates a tensor without a name, and its data.
fn tensors() -> impl Strategy<Value = (Format, Vec<usize>, Vec<u8>)> {
    let sizes = prop::collection::vec(1..4_usize, 0..4);
    (prop::sample::select(Format::in_gguf().collect::<Vec<_>>()), sizes, any::<u8>()).prop_map(
        |(format, mut shape, fill)| {
            shape.push(2 * format.block());
            let numbers = shape.iter().product();
            let bytes = format.bytes_of(numbers).expect("whole blocks");
            (format, shape, (0..bytes).map(|at| fill.wrapping_add(at as u8)).collect())
        },
    )
}

/// Generates the contents of a file.
fn files() -> impl Strategy<Value = (Metadata, Vec<(NewTensor, Vec<u8>)>)> {
    let entries = prop::collection::hash_map("[a-z._]{1,20}", values(), 0..8);
    let alignment = prop::option::of((0..9_u32).prop_map(|bits| 1 << bits));
    let tensors = prop::collection::hash_map("[a-z.0-9]{0,63}", tensors(), 0..5);
    (entries, alignment, tensors).prop_map(|(mut entries, alignment, tensors)| {
        entries.remove("general.alignment");
        let alignment = alignment.map(|n| ("general.alignment".to_owned(), Value::U32(n)));
        let tensors = tensors
            .into_iter()
            .map(|(name, (format, shape, bytes))| (NewTensor { name, shape, format }, bytes));
        (entries.into_iter().chain(alignment).collect(), tensors.collect())
    })
}

proptest! {
    #[test]
    fn written_files_are_read_back_unchanged((metadata, tensors) in files()) {
        let bytes = written(&metadata, &tensors);
        let gguf = read(&bytes).expect("what was written");
        prop_assert_eq!(gguf.metadata(), &metadata);
        prop_assert!(gguf.metadata().iter().eq(metadata.iter()), "another order");
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for (info, (tensor, data)) in gguf.tensors().iter().zip(&tensors) {
            prop_assert_eq!((&info.name, &info.shape, info.format), (&tensor.name, &tensor.shape, tensor.format));
            prop_assert_eq!(&bytes[info.range.start as usize..info.range.end as usize], data.as_slice());
        }
    }
}
