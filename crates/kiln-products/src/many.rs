//! Products of many vectors with a float32 matrix: those of the crate `gemm`, which first arranges the matrix
//! anew and keeps more sums in registers than dot products can. That pays from [`MANY`] vectors on.

use std::ops::Range;

use gemm::Parallelism;

/// Number of vectors from which on [`products_of_many`] is faster than dot products.
pub const MANY: usize = 128;

/// Least number of rows. Below, the library uses other functions, whose bits depend on the number of vectors.
pub const LEAST_ROWS: usize = 32;

/// Vectors and rows of a block, so that results fit in the L2 cache.
const MOST_IN_A_BLOCK: usize = 512;

/// Whether to use [`products_of_many`] for these numbers of vectors and rows. Its library chooses the
/// instructions itself, so not if [`kiln_simd::limit`] forbids the best ones; and it has none for browsers.
pub fn is_for_many([vectors, rows]: [usize; 2]) -> bool {
    vectors >= MANY && rows >= LEAST_ROWS && !kiln_simd::is_limited() && !cfg!(target_family = "wasm")
}

/// Divides the products of this many vectors and rows into blocks, about as many as `pieces`. None has fewer
/// than [`MANY`] vectors.
pub fn blocks_of_many([vectors, rows]: [usize; 2], pieces: usize) -> [Vec<Range<usize>>; 2] {
    let mut sizes = [MOST_IN_A_BLOCK; 2];
    loop {
        let [first, second] = sizes;
        let counts = [(vectors / first).max(1), (rows / second).max(1)];
        let larger = usize::from(second >= first);
        if counts[0] * counts[1] >= pieces || sizes[larger] <= MANY {
            let parts =
                |len, count| (0..count).map(move |i| i * len / count..(i + 1) * len / count).collect();
            return [parts(vectors, counts[0]), parts(rows, counts[1])];
        }
        sizes[larger] /= 2;
    }
}

/// Computes `x w'` into y `[vectors, rows]` for x `[vectors, columns]` and w `[rows, columns]`, on this
/// thread. For [`MANY`] vectors and [`LEAST_ROWS`] rows or more, the bits of a result depend only on its own
/// vector and row.
///
/// # Panics
/// If the lengths do not match.
#[expect(unsafe_code, reason = "the library takes pointers")]
pub fn products_of_many(x: &[f32], w: &[f32], columns: usize, y: &mut [f32]) {
    let [vectors, rows] = [x, w].map(|numbers| numbers.len() / columns.max(1));
    let lengths = [x.len(), w.len(), y.len()];
    assert_eq!(lengths, [vectors * columns, rows * columns, vectors * rows], "lengths of a product");
    // No slice is longer than this, so each stride fits.
    let [row, result] = [columns, rows].map(|stride| stride.cast_signed());
    let (to, w, x) = (y.as_mut_ptr(), w.as_ptr(), x.as_ptr());
    // SAFETY: with these strides, each index is within the lengths that were just compared. `y` is not read,
    // and borrowed by this function alone.
    unsafe {
        gemm::gemm(
            rows,
            vectors,
            columns,
            to,
            result,
            1,
            false,
            w,
            1,
            row,
            x,
            row,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
