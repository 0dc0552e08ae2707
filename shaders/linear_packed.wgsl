// A lane's partial sums for linear.wgsl with packed weights: reads a run of 32 elements of each of four rows,
// or its halves one after the other. The product of a group is the product of its codes times its scale, plus
// the sum of x times the offset of the codes. In float16, scales and offsets are applied once per group. With
// weights_packed.wgsl.

// The number of elements that are read at once.
alias pack = vec4<elem>;
const WIDTH = 4u;

// Whether the arithmetic is that of float16, in which 2049 is rounded.
const IS_F16 = f32(elem(2049.0)) != 2049.0;

// Whether codes become numbers by way of float16: put into the mantissa of 1024, a code is 1024 more than it
// was, and a word holds two of them. Sums lose some bits by it that float32 should keep.
const BY_MANTISSA = IS_F16 && TABLE == PLAIN && LOW != 16u;
const ADDED = select(0.0, 1024.0, BY_MANTISSA);

// Whether all codes have four bits, which are cut out of their words without a step between.
const FOUR_BITS = BY_MANTISSA && LOW == 4u && HIGH == 0u;

// Whether sums of x are needed.
const SHIFTS = HAS_MINIMUM || OFFSET + ADDED != 0.0 || SCALES == ZEROS;

// Whether each pair is scaled by itself. In float32, there are no registers for sums of groups in eight rows,
// and the order of a sum must not depend on the number of rows.
const BY_PAIRS = !IS_F16;

// Whether a run has two groups that are added up.
const ENDS_WITHIN = GROUP == 16u && !BY_PAIRS;

// The products of a group's codes with each row of x, and the sum of its elements.
var<private> of_codes: array<vec4<f32>, ROWS>;
var<private> of_x: array<f32, ROWS>;

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

// The codes of half a run. If all have four bits, bytes have further bits above them.
fn half_at(weights: vec4<u32>, run: u32, part: u32) -> Half {
    if FOUR_BITS {
        let words = words_of_half(weights, LOW, run, part);
        let none = vec4(0u);
        return Half(
            Codes(words.first, words.second, none, none),
            Codes(words.first >> vec4(4u), words.second >> vec4(4u), none, none),
        );
    }
    return codes_of_half(weights, run, part);
}

// The numbers in the lower and in the upper half of a word of each row.
fn both_numbers_of(words: vec4<u32>) -> array<vec4<f32>, 2> {
    let codes = words & vec4(select(0x00ff00ffu, 0x000f000fu, FOUR_BITS));
    let numbers = codes | vec4(0x64006400u);
    let x = unpack2x16float(numbers.x);
    let y = unpack2x16float(numbers.y);
    let z = unpack2x16float(numbers.z);
    let w = unpack2x16float(numbers.w);
    return array(vec4(x.x, y.x, z.x, w.x), vec4(x.y, y.y, z.y, w.y));
}

// The columns of four codes of each row, with what was added to them.
fn added_columns_of(bytes: vec4<u32>) -> mat4x4<f32> {
    let even = both_numbers_of(bytes);
    let odd = both_numbers_of(bytes >> vec4(8u));
    return mat4x4(even[0], odd[0], even[1], odd[1]);
}

// Adds the product of a group's codes with row r of x, and the sum of its elements.
fn add_group(r: u32, of_codes: vec4<f32>, of_x: f32, group: Group) {
    products[r] = fma(group.scale, of_codes, products[r]);
    if SHIFTS {
        let shift = group.minimum - (group.offset + ADDED) * group.scale;
        products[r] = fma(shift, vec4(of_x), products[r]);
    }
}

// Adds the products of a pair of vec4s from element 4 c on.
fn add_pair(c: u32, codes: Codes, group: Group) {
    var columns: Columns;
    if BY_MANTISSA {
        columns = Columns(added_columns_of(codes.first), added_columns_of(codes.second));
    } else {
        columns = columns_of_pair(codes);
    }
    var scale = vec4(1.0);
    var next_scale = vec4(1.0);
    if NORMED {
        scale = four_scales_at(c);
        next_scale = four_scales_at(c + 1u);
    }
    for (var r = 0u; r < ROWS; r++) {
        var numbers = four_at(vectors[r], c);
        var next = four_at(vectors[r], c + 1u);
        if NORMED {
            squares[r] += dot(numbers, numbers) + dot(next, next);
            numbers *= scale;
            next *= next_scale;
        }
        if LOW == 16u {
            products[r] = add_products(add_products(products[r], numbers, columns.first), next, columns.second);
            continue;
        }
        let before = select(of_codes[r], vec4(0.0), BY_PAIRS);
        let product = add_products(add_products(before, numbers, columns.first), next, columns.second);
        let sum = dot(numbers + next, vec4(1.0));
        if BY_PAIRS {
            add_group(r, product, sum, group);
        } else {
            of_codes[r] = product;
            of_x[r] += sum;
        }
    }
}

// Adds what the pairs of a group gave.
fn end_group(group: Group) {
    if LOW == 16u || BY_PAIRS {
        return;
    }
    for (var r = 0u; r < ROWS; r++) {
        add_group(r, of_codes[r], of_x[r], group);
        of_codes[r] = vec4(0.0);
        of_x[r] = 0.0;
    }
}

// Adds the products of half a run, the pairs of which begin at elements 4 c and 4 c + 16.
fn add_half(c: u32, half: Half, first: Group, second: Group) {
    add_pair(c, half.first, first);
    add_pair(c + 4u, half.second, second);
}

// Turns of the loop for a run: a turn for each half leaves registers for more rows.
const TURNS = select(1u, 2u, ROWS > 4u && !ENDS_WITHIN);

// Multiplies this lane's share of the rows of the weight that begin at the offsets `weights`.
fn multiply(weights: vec4<u32>, lane: u32) {
    write_table(lane);
    let runs = (info.input + 31u) / 32u;
    for (var turn = 0u; lane % TOGETHER + turn / TURNS * TOGETHER < runs; turn++) {
        let run = lane % TOGETHER + turn / TURNS * TOGETHER;
        let part = turn % 2u;
        let c = 8u * run;
        if TURNS == 2u && !BY_PAIRS {
            var none: Group;
            add_half(c + 2u * part, half_at(weights, run, part), none, none);
            if part == 1u {
                end_group(group_at(weights, run, 0u));
            }
            continue;
        }
        let first = group_at(weights, run, 0u);
        var second = first;
        if GROUP == 16u {
            second = group_at(weights, run, 1u);
        }
        if TURNS == 2u {
            add_half(c + 2u * part, half_at(weights, run, part), first, second);
            continue;
        }
        // Everything is read before it is used, so that x occupies few registers.
        let even = half_at(weights, run, 0u);
        let odd = half_at(weights, run, 1u);
        if ENDS_WITHIN {
            add_pair(c, even.first, first);
            add_pair(c + 2u, odd.first, first);
            end_group(first);
            add_pair(c + 4u, even.second, second);
            add_pair(c + 6u, odd.second, second);
        } else {
            add_half(c, even, first, second);
            add_half(c + 2u, odd, first, second);
        }
        end_group(second);
    }
    if TABLE != PLAIN {
        // All lanes have read the table.
        workgroupBarrier();
    }
}
