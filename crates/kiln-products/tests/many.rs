//! Tests that products of many vectors equal plain sums, and that their bits do not depend on the others.

use std::ops::Range;

use kiln_products::many::{LEAST_ROWS, MANY, blocks_of_many, products_of_many};

/// Numbers whose products and sums are rounded.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7919 % 1009) as f32 / 997.0 - 0.5).collect()
}

/// Vectors and rows are computed all together, and in blocks of any division.
#[test]
fn bits_do_not_depend_on_other_vectors_and_rows() {
    for (columns, rows) in [(1, 40), (33, 300), (700, LEAST_ROWS), (2500, 2 * MANY + 1)] {
        let vectors = 3 * MANY + 5;
        let (x, w) = (numbers(vectors * columns), numbers(rows * columns));
        let mut whole = vec![f32::NAN; vectors * rows];
        products_of_many(&x, &w, columns, &mut whole);
        let at = |v: usize, r: usize| -> f64 {
            let pairs = x[v * columns..][..columns].iter().zip(&w[r * columns..]);
            pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        assert!((f64::from(whole[5 * rows + 3]) - at(5, 3)).abs() < 1e-4);
        for pieces in [2, 6, 100] {
            let [of_vectors, of_rows] = blocks_of_many([vectors, rows], pieces);
            assert!(of_vectors.iter().all(|block| block.len() >= MANY));
            let blocks = of_vectors.iter().flat_map(|v| of_rows.iter().map(move |r| (v, r)));
            let mut computed = 0;
            for (v, r) in blocks {
                let mut y = vec![f32::NAN; v.len() * r.len()];
                let part = |of: &Range<usize>| of.start * columns..of.end * columns;
                products_of_many(&x[part(v)], &w[part(r)], columns, &mut y);
                for (y, v) in y.chunks(r.len()).zip(v.clone()) {
                    assert_eq!(y, &whole[v * rows..][r.clone()], "{columns} columns, {pieces} pieces");
                }
                computed += y.len();
            }
            assert_eq!(computed, whole.len());
        }
    }
}
