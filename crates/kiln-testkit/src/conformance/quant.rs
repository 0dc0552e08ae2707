//! `quant/*`: a tensor that was packed with transformers' formats.

use burn::tensor::{DType, Tensor, TensorData};
use kiln::expert::{
    quantizers::{self, Optimizer, Recipe},
    read_back,
};

use super::{
    Folder, Mismatch, Setup,
    case::{Case, Quantized},
};

/// The recorded input, `[batch, kv_heads, tokens, head_dim]`.
const INPUT: &str = "quant.x";

/// Checks that codes are identical, and that scales, zero points and numbers agree within rounding errors of
/// their type. Returns the largest difference of a number for float32, and 0 for other types.
pub(super) async fn run(folder: &Folder, case: &Case, setup: &Setup) -> Result<f64, Mismatch> {
    let wanted = case.quantized.as_ref().ok_or_else(|| Mismatch::new("fields of the case are missing"))?;
    let format = quantizers::format(&wanted.backend)?;
    let backend = format.backend;
    let backend = backend.ok_or_else(|| Mismatch::new(format!("{} is no backend", wanted.backend)))?;
    let axis = format.axes.iter().find(|(axis, _)| *axis == wanted.axis);
    let &(_, grouping) = axis.ok_or_else(|| Mismatch::new(format!("axis {} is unknown", wanted.axis)))?;
    let optimizer = if folder.is_4_47() { Optimizer::Off } else { Optimizer::On };
    let (dtype, rounding) = match case.case.ends_with("float16") {
        true => (DType::F16, 2f64.powi(-10)),
        false => (DType::F32, 2f64.powi(-22)),
    };
    let recipe = Recipe { bits: wanted.nbits, optimizer, dtype };

    let (shape, numbers) = folder.tensor(INPUT)?;
    let shape: [usize; 4] =
        shape.try_into().map_err(|_| Mismatch::new(format!("`{INPUT}` has not four dimensions")))?;
    let device = &setup.device.device;
    let x = Tensor::<4>::from_data(TensorData::new(numbers, shape), (device, DType::F32));
    let x = grouping.split(quantizers::rounded(x, dtype), wanted.group);
    let groups = x.dims()[0];
    let quantized = backend.quantize(x, &recipe);
    let again = grouping.join(backend.dequantize(&quantized, &recipe), shape);

    let codes: Vec<u32> = read_back::start(quantized.codes).finish().await?.iter::<u32>().collect();
    check_codes(&codes, &codes_of(folder, wanted, groups)?)?;
    let zero = wanted.shift.as_ref().or(wanted.zero.as_ref());
    let zero = zero.ok_or_else(|| Mismatch::new("the zero point is missing"))?;
    // The sums of a solver add one rounding error per number of a group.
    let solved =
        if wanted.backend == "hqq" && optimizer == Optimizer::On { wanted.group as f64 } else { 1.0 };
    near(&values(quantized.scale).await?, &folder.tensor(&wanted.scale)?.1, rounding, "scale")?;
    near(&values(quantized.zero).await?, &folder.tensor(zero)?.1, rounding * solved, "zero point")?;
    let largest = near(
        &values(again).await?,
        &folder.tensor(&wanted.dequantized)?.1,
        4.0 * rounding * solved,
        "number",
    )?;
    Ok(if dtype == DType::F32 { largest } else { 0.0 })
}

async fn values<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, Mismatch> {
    Ok(read_back::start(tensor).finish().await?.iter::<f32>().collect())
}

/// Returns the recorded codes, `[groups, group]`.
fn codes_of(folder: &Folder, wanted: &Quantized, groups: usize) -> Result<Vec<u32>, Mismatch> {
    let (shape, bytes) = folder.tensor(&wanted.packed)?;
    let &[rows, columns] = &shape[..] else { return Err(Mismatch::new("packed codes are not a matrix")) };
    let (bits, each) = (wanted.nbits, 8 / wanted.nbits.clamp(1, 8));
    let mask = (1u32 << bits) - 1;
    // A byte holds one code from each part of the rows. The first part is in the low bits in quanto, and in
    // the high bits in HQQ.
    let place = |part: usize| bits * if wanted.backend == "hqq" { each - 1 - part } else { part };
    let matrix: Vec<u32> =
        (0..each).flat_map(|part| bytes.iter().map(move |&byte| byte as u32 >> place(part) & mask)).collect();
    let rows = rows * each;
    let by_column = rows == wanted.group && columns == groups;
    let by_row = rows >= groups && columns == wanted.group;
    match (by_column, by_row) {
        (true, false) => Ok((0..columns)
            .flat_map(|c| (0..rows).map(move |r| (r, c)))
            .map(|(r, c)| matrix[r * columns + c])
            .collect()),
        (false, true) => Ok(matrix[..groups * columns].to_vec()),
        _ => Err(Mismatch::new(format!(
            "{rows} times {columns} codes are not {groups} groups of {}",
            wanted.group
        ))),
    }
}

fn check_codes(got: &[u32], want: &[u32]) -> Result<(), Mismatch> {
    match got.iter().zip(want).position(|(got, want)| got != want) {
        None if got.len() == want.len() => Ok(()),
        None => Err(Mismatch::new(format!("{} codes, {} were recorded", got.len(), want.len()))),
        Some(at) => Err(Mismatch::new(format!("code {at} is {}, {} was recorded", got[at], want[at]))),
    }
}

/// Returns the largest difference, or an error if it exceeds `rounding` times the largest number.
fn near(got: &[f32], want: &[f32], rounding: f64, what: &str) -> Result<f64, Mismatch> {
    let size = want.iter().map(|want| f64::from(want.abs())).fold(0.0, f64::max);
    let difference = super::difference(got, want)?;
    match difference <= rounding * size {
        true => Ok(difference),
        false => Err(Mismatch::new(format!("a {what} differs by {difference:e}"))),
    }
}
