//! Searches for the scales of groups of numbers, like the quantizers of ggml.
//!
//! Each group has its own lane: `numbers[i][lane]` is number `i` of group `lane`. The compiler vectorises
//! over the lanes, while each sum adds its terms in the order of ggml. Therefore the scales equal those of
//! ggml bit for bit, if ggml is compiled without fused multiply-add.

/// Numbers in `G` groups of `N` numbers each.
pub(crate) type Groups<const N: usize, const G: usize> = [[f32; G]; N];

/// Groups whose largest absolute value is below this limit are treated as zeros (`GROUP_MAX_EPS` of ggml).
pub(crate) const ZERO: f32 = 1e-15;

/// Transposes consecutive groups into lanes.
pub(crate) fn groups<const N: usize, const G: usize>(numbers: &[f32]) -> Groups<N, G> {
    let mut groups = [[0.0; G]; N];
    for (lane, group) in numbers.chunks_exact(N).take(G).enumerate() {
        for (lanes, &x) in groups.iter_mut().zip(group) {
            lanes[lane] = x;
        }
    }
    groups
}

/// Returns the nearest integer from `low` to `high`; halves are rounded to even. NaN stays NaN.
pub(crate) fn nearest(x: f32, low: f32, high: f32) -> f32 {
    // A float32 of this magnitude has no fraction (`nearest_int` of ggml).
    const INTEGERS: f32 = 12_582_912.0;
    // Each line is one instruction, unlike `clamp`, which checks its bounds.
    let x = if x < low { low } else { x };
    let x = if x > high { high } else { x };
    x + INTEGERS - INTEGERS
}

/// Returns the first number with the largest absolute value in each lane, or 0.
pub(crate) fn largest<const N: usize, const G: usize>(numbers: &Groups<N, G>) -> [f32; G] {
    let mut largest = [0.0_f32; G];
    for x in numbers {
        for lane in 0..G {
            let larger = x[lane].abs() > largest[lane].abs();
            largest[lane] = if larger { x[lane] } else { largest[lane] };
        }
    }
    largest
}

/// The inverse scales that [`affine`] tries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tries {
    /// The largest code.
    pub(crate) max: f32,
    /// Amount by which the first inverse scale stretches the range, in codes. Each further one adds 0.1.
    pub(crate) first: f32,
    /// Number of inverse scales to try.
    pub(crate) count: u8,
    /// Whether the error is the absolute difference instead of its square.
    pub(crate) absolute: bool,
}

/// Finds scales and minimums (which are not positive) of groups, such that `code · scale + minimum` is close
/// to the numbers.
///
/// For each of several inverse scales, the codes are rounded, and the best scale and minimum for them are
/// computed by weighted least squares. The pair with the smallest weighted error is kept (`make_qkx2_quants`
/// of ggml).
pub(crate) fn affine<const N: usize, const G: usize>(
    numbers: &Groups<N, G>,
    weights: &Groups<N, G>,
    tries: Tries,
) -> ([f32; G], [f32; G]) {
    let (mut minimums, mut high) = ([0.0_f32; G], [f32::MIN; G]);
    let (mut sum_w, mut sum_x) = ([0.0; G], [0.0; G]);
    for (x, w) in numbers.iter().zip(weights) {
        for lane in 0..G {
            minimums[lane] = minimums[lane].min(x[lane]);
            high[lane] = high[lane].max(x[lane]);
            sum_w[lane] += w[lane];
            sum_x[lane] += w[lane] * x[lane];
        }
    }
    let inverses = |stretched: f32, minimums: &[f32; G]| {
        std::array::from_fn(|lane| stretched / (high[lane] - minimums[lane]))
    };
    // If all numbers of a group are equal and not positive, this is infinite, the scale is 0, and no attempt
    // is better.
    let inverse = inverses(tries.max, &minimums);
    let mut scales = inverse.map(f32::recip);
    let codes = affine_codes(numbers, &minimums, &inverse, tries.max);
    let mut smallest = affine_error(numbers, weights, &codes, &scales, &minimums, tries.absolute);
    for attempt in 0..tries.count {
        // The range begins at the best minimum so far.
        let inverse = inverses(tries.first + 0.1 * f32::from(attempt) + tries.max, &minimums);
        let codes = affine_codes(numbers, &minimums, &inverse, tries.max);
        let (mut sum_l, mut sum_l2, mut sum_xl) = ([0.0; G], [0.0; G], [0.0; G]);
        for ((l, x), w) in codes.iter().zip(numbers).zip(weights) {
            for lane in 0..G {
                let wl = w[lane] * l[lane];
                sum_l[lane] += wl;
                sum_l2[lane] += wl * l[lane];
                sum_xl[lane] += wl * x[lane];
            }
        }
        let (mut scale, mut minimum, mut solvable) = ([0.0; G], [0.0; G], [false; G]);
        for lane in 0..G {
            let determinant = sum_w[lane] * sum_l2[lane] - sum_l[lane] * sum_l[lane];
            solvable[lane] = determinant > 0.0;
            scale[lane] = (sum_w[lane] * sum_xl[lane] - sum_x[lane] * sum_l[lane]) / determinant;
            minimum[lane] = (sum_l2[lane] * sum_x[lane] - sum_l[lane] * sum_xl[lane]) / determinant;
            if minimum[lane] > 0.0 {
                (scale[lane], minimum[lane]) = (sum_xl[lane] / sum_l2[lane], 0.0);
            }
        }
        let errors = affine_error(numbers, weights, &codes, &scale, &minimum, tries.absolute);
        for lane in 0..G {
            if solvable[lane] && errors[lane] < smallest[lane] {
                (smallest[lane], scales[lane], minimums[lane]) = (errors[lane], scale[lane], minimum[lane]);
            }
        }
    }
    (scales, minimums)
}

fn affine_codes<const N: usize, const G: usize>(
    numbers: &Groups<N, G>,
    minimums: &[f32; G],
    inverse: &[f32; G],
    max: f32,
) -> Groups<N, G> {
    let mut codes = [[0.0; G]; N];
    for (codes, x) in codes.iter_mut().zip(numbers) {
        for lane in 0..G {
            codes[lane] = nearest(inverse[lane] * (x[lane] - minimums[lane]), 0.0, max);
        }
    }
    codes
}

/// Returns the weighted sum of the errors of each group, absolute or squared.
fn affine_error<const N: usize, const G: usize>(
    numbers: &Groups<N, G>,
    weights: &Groups<N, G>,
    codes: &Groups<N, G>,
    scales: &[f32; G],
    minimums: &[f32; G],
    absolute: bool,
) -> [f32; G] {
    let mut sums = [0.0; G];
    for ((x, w), l) in numbers.iter().zip(weights).zip(codes) {
        for lane in 0..G {
            let error = scales[lane] * l[lane] + minimums[lane] - x[lane];
            sums[lane] += w[lane] * if absolute { error.abs() } else { error * error };
        }
    }
    sums
}

/// Finds scales of groups, such that `code · scale` is close to the numbers, for codes from `-half` to `half
/// - 1`: the best of 19 inverse scales (`make_qx_quants` of ggml).
pub(crate) fn symmetric<const N: usize, const G: usize>(numbers: &Groups<N, G>, half: f32) -> [f32; G] {
    const STRETCHES: [i8; 19] = [0, -9, -8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9];
    let inverses = STRETCHES.into_iter().map(|n| move |largest: f32| -(half + 0.1 * f32::from(n)) / largest);
    let nearest = |x| nearest(x, -half, half - 1.0);
    best_fit(numbers, inverses, nearest, |weight, x, code| weight * x * code)
}

/// Finds the inverse scale whose rounded codes fit the numbers best, and returns the scale that fits these
/// codes best by least squares. A number is weighted with its square. Groups of zeros get 0.
///
/// Each of `inverses` computes an inverse scale from the number with the largest absolute value in a group.
/// `round` returns the value of the nearest code. `product` multiplies a weight, a number and the value of
/// its code, in the order that ggml uses there.
pub(crate) fn best_fit<const N: usize, const G: usize>(
    numbers: &Groups<N, G>,
    inverses: impl Iterator<Item = impl Fn(f32) -> f32>,
    round: impl Fn(f32) -> f32,
    product: impl Fn(f32, f32, f32) -> f32,
) -> [f32; G] {
    let largest = largest(numbers);
    let (mut scales, mut best) = ([0.0; G], [f32::NEG_INFINITY; G]);
    for inverse in inverses {
        let inverse = largest.map(inverse);
        let (mut sum_xl, mut sum_l2) = ([0.0; G], [0.0; G]);
        for x in numbers {
            for lane in 0..G {
                let l = round(inverse[lane] * x[lane]);
                let weight = x[lane] * x[lane];
                sum_xl[lane] += product(weight, x[lane], l);
                sum_l2[lane] += weight * l * l;
            }
        }
        for lane in 0..G {
            // The error is a constant minus `sum_xl² / sum_l2`.
            if sum_l2[lane] > 0.0 && sum_xl[lane] * sum_xl[lane] > best[lane] * sum_l2[lane] {
                scales[lane] = sum_xl[lane] / sum_l2[lane];
                best[lane] = scales[lane] * sum_xl[lane];
            }
        }
    }
    std::array::from_fn(|lane| if largest[lane].abs() < ZERO { 0.0 } else { scales[lane] })
}

/// Finds scales like [`symmetric`], but by changing one code at a time (`make_q3_quants` of ggml). With few
/// codes, each code matters more than the first inverse scale.
pub(crate) fn symmetric_descent<const N: usize, const G: usize>(
    numbers: &Groups<N, G>,
    half: f32,
) -> [f32; G] {
    const PASSES: usize = 5;

    let largest = largest(numbers);
    let inverse = largest.map(|x| -half / x);
    let mut codes = [[0.0; G]; N];
    let (mut sum_xl, mut sum_l2) = ([0.0; G], [0.0; G]);
    for (x, l) in numbers.iter().zip(&mut codes) {
        for lane in 0..G {
            let weight = x[lane] * x[lane];
            l[lane] = nearest(inverse[lane] * x[lane], -half, half - 1.0);
            sum_xl[lane] += weight * x[lane] * l[lane];
            sum_l2[lane] += weight * l[lane] * l[lane];
        }
    }
    for _ in 0..PASSES {
        let mut changed = [false; G];
        for (x, l) in numbers.iter().zip(&mut codes) {
            for lane in 0..G {
                let weight = x[lane] * x[lane];
                let others_xl = sum_xl[lane] - weight * x[lane] * l[lane];
                let others_l2 = sum_l2[lane] - weight * l[lane] * l[lane];
                let code = nearest(x[lane] * others_l2 / others_xl, -half, half - 1.0);
                let new_xl = others_xl + weight * x[lane] * code;
                let new_l2 = others_l2 + weight * code * code;
                // Without `&&`, the lanes need no branches.
                let better = (others_xl > 0.0)
                    & (code != l[lane])
                    & (new_l2 > 0.0)
                    & (new_xl * new_xl * sum_l2[lane] > sum_xl[lane] * sum_xl[lane] * new_l2);
                changed[lane] |= better;
                l[lane] = if better { code } else { l[lane] };
                sum_xl[lane] = if better { new_xl } else { sum_xl[lane] };
                sum_l2[lane] = if better { new_l2 } else { sum_l2[lane] };
            }
        }
        if !changed.contains(&true) {
            break;
        }
    }
    std::array::from_fn(|lane| match largest[lane].abs() >= ZERO && sum_l2[lane] > 0.0 {
        true => sum_xl[lane] / sum_l2[lane],
        false => 0.0,
    })
}
