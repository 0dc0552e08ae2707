// The functions of ACTIVATION, which gated and activate share.

// 1 / (1 + exp(-x)). On some GPUs exp(100) is not a number.
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-x, 80.0)));
}

// (1 + erf(x / sqrt(2))) / 2, by formula 7.1.26 of Abramowitz and Stegun, with an error of at most 1.5e-7.
fn normal(x: f32) -> f32 {
    let z = abs(x) * 0.70710678;
    let t = 1.0 / (1.0 + 0.3275911 * z);
    let sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    let tail = 0.5 * sum * exp(-min(z * z, 80.0));
    return select(tail, 1.0 - tail, x >= 0.0);
}

fn activated(x: f32) -> f32 {
    if ACTIVATION == 0u {
        return x * sigmoid(x);
    } else if ACTIVATION == 1u {
        return x * normal(x);
    } else if ACTIVATION == 2u {
        // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
        return x * sigmoid(2.0 * (x * x * 0.044715 + 1.0) * x * 0.7978845608);
    }
    return max(x, 0.0) * max(x, 0.0);
}
