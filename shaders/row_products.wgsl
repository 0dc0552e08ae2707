// Products of vectors with rows of a weight: reads elements and adds up the sums of lanes. The shader that
// includes this text defines pack, WIDTH, SPLITS, AT_ONCE, x and info.input.

const LANES = 256u;
// Number of lanes that share the sums of four rows of the weight.
const TOGETHER = 8u * SPLITS;
const OUTPUTS = LANES / TOGETHER * 4u;
// Number of these lanes' sums that are added up first, and number of sums of four rows that are left then.
const FIRST = select(1u, 16u, TOGETHER > 16u);
const LEFT = TOGETHER / FIRST;

// Sums of each lane for each row of x, then sums of several lanes.
var<workgroup> sums: array<vec4<f32>, LANES * AT_ONCE>;

// The offsets of elements 4 c to 4 c + 3 of a row. Past its end, they point at any of its elements.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.input - 1u)) * stride;
}

// Four elements of x, with 0 past the end of the row.
fn x_at(at: u32, c: u32, stride: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(x[at / 4u + c]));
    }
    let i = places(c, stride) + at;
    let numbers = vec4<f32>(vec4(vec4(x[i.x]).x, vec4(x[i.y]).x, vec4(x[i.z]).x, vec4(x[i.w]).x));
    return select(vec4(0.0), numbers, vec4(4u * c) + vec4(0u, 1u, 2u, 3u) < vec4(info.input));
}

// Adds the products of four elements with the columns of four rows. The order of fused multiplications and
// additions is fixed here: a compiler would choose it, and might choose another one for a kernel with more
// rows.
fn add_products(sums: vec4<f32>, numbers: vec4<f32>, columns: mat4x4<f32>) -> vec4<f32> {
    var sum = fma(columns[0], vec4(numbers.x), sums);
    sum = fma(columns[1], vec4(numbers.y), sum);
    sum = fma(columns[2], vec4(numbers.z), sum);
    return fma(columns[3], vec4(numbers.w), sum);
}

// Adds up the sums that all lanes have written.
fn add_up(lane: u32) {
    workgroupBarrier();
    if FIRST > 1u {
        // Neighboring lanes read neighboring sums, which are in different banks.
        let first = lane / LEFT * TOGETHER + lane % LEFT;
        var sum = vec4(0.0);
        if lane < LANES / FIRST * AT_ONCE {
            for (var j = 0u; j < FIRST; j++) {
                sum += sums[first + j * LEFT];
            }
        }
        workgroupBarrier();
        if lane < LANES / FIRST * AT_ONCE {
            sums[lane] = sum;
        }
        workgroupBarrier();
    }
}

// The sum for one of the workgroup's outputs, in one of its rows.
fn added_up(row: u32, output: u32) -> f32 {
    let first = (row * OUTPUTS + output) / 4u * LEFT;
    var sum = 0.0;
    for (var j = 0u; j < LEFT; j++) {
        // Outputs begin at different lanes, which are in different banks.
        sum += sums[first + (j + output / 4u) % LEFT][output % 4u];
    }
    return sum;
}
