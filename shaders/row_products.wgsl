// Products of vectors with rows of a weight: how numbers are read, and how sums of lanes are added up. With the names of the shader in front of it: pack,
// WIDTH, SPLITS, AT_ONCE, x, info.input.

const LANES = 256u;
// Lanes that share the sums of four rows of the weight.
const TOGETHER = 8u * SPLITS;
const OUTPUTS = LANES / TOGETHER * 4u;
// Sums of these lanes that are added up first, and how many sums of four rows are left then.
const FIRST = select(1u, 16u, TOGETHER > 16u);
const LEFT = TOGETHER / FIRST;

// Of each lane, for each row of x. Then of several lanes.
var<workgroup> sums: array<vec4<f32>, LANES * AT_ONCE>;

// Four numbers of a row: those from 4 c on. What is beyond its end is any of it.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.input - 1u)) * stride;
}

// Of x it is 0.
fn x_at(at: u32, c: u32, stride: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(x[at / 4u + c]));
    }
    let i = places(c, stride) + at;
    let numbers = vec4<f32>(vec4(vec4(x[i.x]).x, vec4(x[i.y]).x, vec4(x[i.z]).x, vec4(x[i.w]).x));
    return select(vec4(0.0), numbers, vec4(4u * c) + vec4(0u, 1u, 2u, 3u) < vec4(info.input));
}

// Adds the products of four numbers with the columns of four rows. Which product is joined with a sum is said here: compilers choose, and may
// choose another one in a kernel for more rows.
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
        // Neighbours read neighbours, which are in different banks.
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

// What was added up for the output of that number of the workgroup, in the row of that number.
fn added_up(row: u32, output: u32) -> f32 {
    let first = (row * OUTPUTS + output) / 4u * LEFT;
    var sum = 0.0;
    for (var j = 0u; j < LEFT; j++) {
        // Outputs begin at different lanes, which are in different banks.
        sum += sums[first + (j + output / 4u) % LEFT][output % 4u];
    }
    return sum;
}
