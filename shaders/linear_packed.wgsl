// A lane's partial sums for linear.wgsl with packed weights: reads half a run of each row at once. The
// product of a group is the product of its codes times its scale, plus the sum of x times the offset of the
// codes: scales and offsets are applied once per group. With weights_packed.wgsl.

// Whether sums of x are needed.
const SHIFTS = HAS_MINIMUM || OFFSET != 0.0 || SCALES == ZEROS;

// Four elements of x. A row of bfloat16 may end within a run.
fn four_at(at: u32, c: u32) -> vec4<f32> {
    if LOW == 16u {
        let fours = info.input / 4u;
        return select(vec4(0.0), x_at(at, min(c, fours - 1u), 1u), c < fours);
    }
    return x_at(at, c, 1u);
}

fn four_scales_at(c: u32) -> vec4<f32> {
    return scales_at(min(c, info.input / 4u - 1u));
}

// Adds the products of a pair of vec4s of half a run.
fn multiply_pair(half: u32, pair: u32, codes: Codes, group: Group) {
    let c = half / 2u * 8u + half % 2u * 2u + pair * 4u;
    let columns = columns_of_pair(codes);
    let shift = group.minimum - group.offset * group.scale;
    var scale = vec4(1.0);
    var next_scale = vec4(1.0);
    if NORMED {
        scale = four_scales_at(c);
        next_scale = four_scales_at(c + 1u);
    }
    for (var r = 0u; r < ROWS; r++) {
        var numbers = four_at(vectors[r], c);
        var next = four_at(vectors[r], c + 1u);
        var sum = dot(numbers + next, vec4(1.0));
        if NORMED {
            squares[r] += dot(numbers, numbers) + dot(next, next);
            sum = dot(numbers, scale) + dot(next, next_scale);
            numbers *= scale;
            next *= next_scale;
        }
        if LOW == 16u {
            products[r] = add_products(add_products(products[r], numbers, columns.first), next, columns.second);
        } else {
            let product = add_products(add_products(vec4(0.0), numbers, columns.first), next, columns.second);
            products[r] = fma(group.scale, product, products[r]);
            if SHIFTS {
                products[r] = fma(shift, vec4(sum), products[r]);
            }
        }
    }
}

// Multiplies this lane's share of the rows of the weight that begin at the offsets `weights`.
fn multiply(weights: vec4<u32>, lane: u32) {
    write_table(lane);
    let halves = (info.input + 31u) / 32u * 2u;
    for (var half = lane % TOGETHER; half < halves; half += TOGETHER) {
        // Everything is read before it is used, so that x occupies few registers.
        let codes = codes_of_half(weights, half);
        let first = group_at(weights, half, 0u);
        var second = first;
        if GROUP == 16u {
            second = group_at(weights, half, 1u);
        }
        multiply_pair(half, 0u, codes.first, first);
        multiply_pair(half, 1u, codes.second, second);
    }
    if TABLE != PLAIN {
        // All lanes have read the table.
        workgroupBarrier();
    }
}
