// A lane's partial sums for linear.wgsl with packed weights and x in bytes (rows_in_bytes.wgsl): reads a run
// of 32 elements of each of four rows. The product of a group is an integer, which is multiplied by the
// scales of the group and of the run of x. With weights_packed.wgsl.

// A run of x is two vectors. The vector of its scale and its sums is in `scales`.
alias pack = vec4<u32>;
const WIDTH = 4u;

// Codes of eight bits become signed bytes.
const SIGN = select(0u, 0x80808080u, LOW + HIGH == 8u);
const BYTE_OFFSET = select(0.0, 128.0, LOW + HIGH == 8u);

// Whether sums of x are needed.
const SHIFTS = HAS_MINIMUM || OFFSET != BYTE_OFFSET || SCALES == ZEROS;

// The products of four codes of each row with a word of x.
fn products_of(codes: vec4<u32>, word: u32) -> vec4<i32> {
    let bytes = codes ^ vec4(SIGN);
    return vec4(
        dot4I8Packed(bytes.x, word),
        dot4I8Packed(bytes.y, word),
        dot4I8Packed(bytes.z, word),
        dot4I8Packed(bytes.w, word),
    );
}

// Adds the product of a group's codes with a row of x, whose elements add up to `of_x`.
fn add_group(r: u32, of_codes: vec4<i32>, scale: f32, of_x: f32, group: Group) {
    products[r] = fma(group.scale * scale, vec4<f32>(of_codes), products[r]);
    if SHIFTS {
        let shift = group.minimum - (group.offset - BYTE_OFFSET) * group.scale;
        products[r] = fma(shift, vec4(of_x), products[r]);
    }
}

// Multiplies this lane's share of the rows of the weight that begin at the offsets `weights`.
fn multiply(weights: vec4<u32>, lane: u32) {
    let runs = info.input / 32u;
    for (var run = lane % TOGETHER; run < runs; run += TOGETHER) {
        let even = codes_of_half(weights, run, 0u);
        let odd = codes_of_half(weights, run, 1u);
        let first = group_at(weights, run, 0u);
        var second = first;
        if GROUP == 16u {
            second = group_at(weights, run, 1u);
        }
        for (var r = 0u; r < ROWS; r++) {
            let at = vectors[r] + 2u * run;
            let low = x[at];
            let high = x[at + 1u];
            let of_run = bitcast<vec4<f32>>(scales[at / 2u]);
            let of_low = products_of(even.first.first, low.x) + products_of(even.first.second, low.y)
                + products_of(odd.first.first, low.z) + products_of(odd.first.second, low.w);
            let of_high = products_of(even.second.first, high.x) + products_of(even.second.second, high.y)
                + products_of(odd.second.first, high.z) + products_of(odd.second.second, high.w);
            if GROUP == 16u {
                add_group(r, of_low, of_run.x, of_run.y, first);
                add_group(r, of_high, of_run.x, of_run.z, second);
            } else {
                add_group(r, of_low + of_high, of_run.x, of_run.y + of_run.z, first);
            }
        }
    }
}
