//! Batch invariance: the result for a row or a token does not depend on what is computed beside it.

use burn::tensor::TensorData;
use kiln_core::{Result, read_back};

use crate::{
    runtime::{choice::Implementation, kernel::INVARIANT_UP_TO, kernels::Kernels},
    testing::{case::Read, checked::Checked, cut::Extent},
};

/// Runs `kernel` whole and in parts, and reports the first part that differs from the whole in its bits.
/// Returns `None` if none does, or if there are more rows and tokens than the law covers.
///
/// # Errors
/// Returns errors of the device.
pub(crate) async fn violation<K: Checked>(kernel: K, kernels: &Kernels) -> Result<Option<String>> {
    let kernel = kernel.checked();
    let [rows, tokens] = kernel.extent();
    let most = match kernels.implementation_of::<K>() {
        Implementation::Cube => kernel.cube_is_invariant_up_to(),
        _ => INVARIANT_UP_TO,
    };
    if !(2..=most).contains(&(rows * tokens)) {
        return Ok(None);
    }
    // The first, one in the middle and the last, each alone, and all except the last together.
    let some = |n: usize| [0, n / 2, n - 1];
    let one = |(row, token)| [row..row + 1, token..token + 1];
    let mut parts: Vec<Extent> = some(rows).into_iter().zip(some(tokens)).map(one).collect();
    parts.extend([[0..rows, 0..(tokens - 1).max(1)], [0..(rows - 1).max(1), 0..tokens]]);
    parts.sort_by_key(|[rows, tokens]| [rows.start, rows.end, tokens.start, tokens.end]);
    parts.dedup();
    let whole = kernels.run(kernel.clone());
    for part in parts {
        let want = read_back::all(K::part_of(whole.clone(), part.clone()).read()).await?;
        let got = read_back::all(kernels.run(kernel.clone().part(part.clone())).read()).await?;
        if let Some(why) = differ(&got, &want) {
            let [row, token] = part;
            return Ok(Some(format!("rows {row:?} and tokens {token:?} of {rows} and {tokens}: {why}")));
        }
    }
    Ok(None)
}

/// Describes the first bits that differ in a sentence.
fn differ(got: &[TensorData], want: &[TensorData]) -> Option<String> {
    got.iter().zip(want).find_map(|(got, want)| {
        let numbers = got.iter::<f64>().zip(want.iter::<f64>()).enumerate();
        let (i, (alone, beside)) = numbers.into_iter().find(|(_, (a, b))| a.to_bits() != b.to_bits())?;
        Some(format!("element {i} is {alone} alone and {beside} beside the others"))
    })
}
