//! Mutations of safetensors files: of the header as JSON, of its strings, and of tensors, with a matching
//! header.

use serde_json::{Map, Value, json};

use super::{
    Random, bytes,
    json::{Values, mutate, written},
};

const DTYPES: [(&str, usize); 13] = [
    ("F32", 4),
    ("F16", 2),
    ("BF16", 2),
    ("I32", 4),
    ("F64", 8),
    ("I64", 8),
    ("U8", 1),
    ("I8", 1),
    ("U16", 2),
    ("BOOL", 1),
    ("U64", 8),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
];

const FLOATS: [f32; 8] =
    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 0.0, -0.0, 1e-40];

struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Splits a file into its header and data.
pub(crate) fn parts(file: &[u8]) -> Option<(Map<String, Value>, &[u8])> {
    let (len, rest) = file.split_first_chunk()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    Some((serde_json::from_slice(header).ok()?, data))
}

pub(super) fn header(file: &[u8]) -> Option<Value> {
    parts(file).map(|(header, _)| Value::Object(header))
}

pub(crate) fn joined(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

pub(super) fn mutated(file: &[u8], values: &Values, random: &mut Random) -> Vec<u8> {
    let Some((mut header, data)) = parts(file) else { return bytes::mutated(file, &[], random) };
    let metadata = header.contains_key("__metadata__");
    match random.below(3) {
        0 if metadata => {
            mutate(&mut header["__metadata__"], values, random);
            joined(&written(&Value::Object(header)), data)
        }
        0 | 1 => {
            let mut header = Value::Object(header);
            mutate(&mut header, values, random);
            let mut file = joined(&written(&header), data);
            if random.one_in(8) {
                let lie = [0, 1, file.len() as u64, u64::MAX, 1 << 63, 100_000_000][random.below(6)];
                file[..8].copy_from_slice(&lie.to_le_bytes());
            }
            file
        }
        _ => {
            let mut tensors = tensors(&header, data);
            for _ in 0..random.rounds() {
                change(&mut tensors, random);
            }
            if metadata && random.one_in(3) {
                mutate(&mut header["__metadata__"], values, random);
            }
            whole(header.remove("__metadata__"), &tensors)
        }
    }
}

fn tensors(header: &Map<String, Value>, data: &[u8]) -> Vec<Tensor> {
    let tensor = |(name, info): (&String, &Value)| {
        let number = |value: &Value| value.as_u64().map(|n| n as usize);
        let (start, end) = (number(&info["data_offsets"][0])?, number(&info["data_offsets"][1])?);
        Some(Tensor {
            name: name.clone(),
            dtype: info["dtype"].as_str()?.to_owned(),
            shape: info["shape"].as_array()?.iter().filter_map(number).collect(),
            bytes: data.get(start..end)?.to_vec(),
        })
    };
    header.iter().filter(|(name, _)| *name != "__metadata__").filter_map(tensor).collect()
}

fn whole(metadata: Option<Value>, tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    header.extend(metadata.map(|metadata| ("__metadata__".to_owned(), metadata)));
    for Tensor { name, dtype, shape, bytes } in tensors {
        let start = data.len();
        data.extend(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    joined(&written(&Value::Object(header)), &data)
}

fn change(tensors: &mut Vec<Tensor>, random: &mut Random) {
    let (at, other) = (random.below(tensors.len()), random.below(tensors.len()));
    if at >= tensors.len() {
        return;
    }
    match random.below(9) {
        // Another type with the same number of elements.
        0 => {
            let (dtype, _) = DTYPES[random.below(DTYPES.len())];
            tensors[at].dtype = dtype.to_owned();
            resize(&mut tensors[at]);
        }
        1 => {
            let shape = &mut tensors[at].shape;
            let (from, to) = (random.below(shape.len()), random.below(shape.len()));
            if from < shape.len() {
                shape.swap(from, to);
            }
        }
        2 => {
            let shape = &mut tensors[at].shape;
            let axis = random.below(shape.len());
            if let Some(len) = shape.get_mut(axis) {
                *len = [0, 1, *len + 1, len.saturating_sub(1), 2 * *len, 3, 64][random.below(7)];
            }
            resize(&mut tensors[at]);
        }
        3 => {
            let axis = random.below(tensors[at].shape.len() + 1);
            match random.one_in(2) {
                true => tensors[at].shape.insert(axis, 1 + random.below(2)),
                false => drop((axis < tensors[at].shape.len()).then(|| tensors[at].shape.remove(axis))),
            }
            resize(&mut tensors[at]);
        }
        4 => drop(tensors.remove(at)),
        5 => {
            let names = (tensors[at].name.clone(), tensors[other].name.clone());
            (tensors[at].name, tensors[other].name) = (names.1, names.0);
        }
        // The same change in every tensor, so that they remain consistent.
        6 => {
            let (dtype, _) = DTYPES[random.below(DTYPES.len())];
            let (axis, more) = (random.below(5), random.below(3));
            for tensor in tensors {
                if more == 0 {
                    tensor.dtype = dtype.to_owned();
                } else if let Some(len) = tensor.shape.get_mut(axis) {
                    *len = if more == 1 { *len + 1 } else { len.saturating_sub(1) };
                }
                resize(tensor);
            }
        }
        7 => {
            let float = FLOATS[random.below(FLOATS.len())].to_le_bytes();
            let (start, many) = (random.below(tensors[at].bytes.len() / 4 + 1), random.one_in(3));
            let floats = tensors[at].bytes.chunks_exact_mut(4).skip(start);
            floats.take(if many { usize::MAX } else { 1 }).for_each(|bytes| bytes.copy_from_slice(&float));
        }
        _ => {
            let (len, some) = (tensors[at].bytes.len(), tensors[at].bytes.clone());
            let mut changed = bytes::mutated(&some, &[], random);
            changed.resize(len, 0);
            tensors[at].bytes = changed;
        }
    }
}

/// Resizes the data of a tensor to match its type and shape.
fn resize(tensor: &mut Tensor) {
    let size = DTYPES.iter().find(|(name, _)| *name == tensor.dtype).map_or(4, |(_, size)| *size);
    let len =
        tensor.shape.iter().try_fold(size, |len, &dim| len.checked_mul(dim)).filter(|&len| len < 1 << 22);
    tensor.bytes.resize(len.unwrap_or(0), 0x3C);
}
