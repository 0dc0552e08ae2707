//! Matrix products are as exact as their type: float32 is not rounded to fewer bits internally.

use burn::tensor::{DType, Tensor, TensorData};
use kiln::expert::kernels::product;

/// Returns numbers whose last bits matter.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 8191) as f32 / 4096.0 - 1.0).collect()
}

#[test]
fn float32_products_have_the_precision_of_float32() {
    for (name, device) in &kiln_testkit::devices() {
        for ([batch, other], m, k, n) in [
            ([1, 1], 64, 96, 80),
            ([1, 1], 33, 257, 5),
            ([1, 1], 1, 64, 7),
            ([2, 2], 20, 40, 24),
            ([3, 1], 17, 64, 16),
        ] {
            let (a, b) = (numbers(batch * m * k, 1), numbers(other * k * n, 2));
            let tensor = |data: &[f32], shape: [usize; 3]| {
                Tensor::<3>::from_data(TensorData::new(data.to_vec(), shape), (device, DType::F32))
            };
            let [left, right] = [tensor(&a, [batch, m, k]), tensor(&b, [other, k, n])];
            // Once contiguous in memory, and once as a transposed view.
            let across = tensor(&a, [batch, m, k]).transpose().clone() * 1.0;
            for left in [left, across.transpose()] {
                let got: Vec<f32> = product(left, right.clone()).into_data().iter().collect();
                let mut i = 0;
                for row in 0..batch * m {
                    for column in 0..n {
                        let b = &b[row / m % other * k * n..];
                        let terms = (0..k).map(|j| f64::from(a[row * k + j]) * f64::from(b[j * n + column]));
                        let want: f64 = terms.sum();
                        // TF32, with 10 bits, would be off by a thousandth of a term.
                        let most = 1e-6 * (k as f64).sqrt() * 2.0;
                        let off = (f64::from(got[i]) - want).abs();
                        assert!(off < most, "{m}x{k}x{n} on {name}: off by {off}, {row} {column}");
                        i += 1;
                    }
                }
                assert_eq!(i, got.len());
            }
        }
    }
}
