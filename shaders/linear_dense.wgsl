// A lane's partial sums for linear.wgsl with dense weights: reads eight neighbors of each row at once. With
// weights_dense.wgsl.

// The number of elements that are read at once: four, if the layout of x and w allows it.
alias pack = vec4<elem>;
const WIDTH = 4u;

// Multiplies this lane's share of the rows of the weight that begin at the offsets `weights`.
fn multiply(weights: vec4<u32>, lane: u32) {
    let columns = (info.input + 3u) / 4u;
    var c = lane % TOGETHER * 2u;
    for (; c + 1u < columns; c += TOGETHER * 2u) {
        let w_here = columns_at(weights, c / 2u, 0u, info.w_strides.y);
        let w_next = columns_at(weights, c / 2u, 1u, info.w_strides.y);
        var scale = vec4(1.0);
        var next_scale = vec4(1.0);
        if NORMED {
            scale = scales_at(c);
            next_scale = scales_at(c + 1u);
        }
        for (var r = 0u; r < ROWS; r++) {
            var numbers = x_at(vectors[r], c, info.x_strides.z);
            var next = x_at(vectors[r], c + 1u, info.x_strides.z);
            if NORMED {
                squares[r] += dot(numbers, numbers) + dot(next, next);
                numbers *= scale;
                next *= next_scale;
            }
            products[r] = add_products(add_products(products[r], numbers, w_here), next, w_next);
        }
    }
    // The last vec4, if their number is odd.
    if c < columns {
        let w_here = columns_at(weights, c / 2u, 0u, info.w_strides.y);
        var scale = vec4(1.0);
        if NORMED {
            scale = scales_at(c);
        }
        for (var r = 0u; r < ROWS; r++) {
            var numbers = x_at(vectors[r], c, info.x_strides.z);
            if NORMED {
                squares[r] += dot(numbers, numbers);
                numbers *= scale;
            }
            products[r] = add_products(products[r], numbers, w_here);
        }
    }
}
