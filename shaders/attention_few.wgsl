// The functions that attention_decode and attention_packed share. Both take a few rows over all keys, 256 at
// a time.

const LANES = 256u;
const ROWS = 4u * FOURS;
// Number of lanes that read the vector of a key together.
const TOGETHER = 4u;
// Number of keys whose sums are added up between two barriers.
const STEP = 128u / FOURS;

var<workgroup> shared_part: Part;
// Elements of the rows per dimension. There are at most 256 dimensions, or 128 with 8 rows.
var<workgroup> rows: array<vec4<f32>, ROOM>;
// Sums of lanes, then scores, then weights of keys.
var<workgroup> memory: array<vec4<f32>, 512>;
var<workgroup> results: array<vec4<f32>, 16u * FOURS>;

// Parts begin at multiples of info.chunk, and blocks of keys at multiples of LANES. The result of a row
// therefore does not depend on what other rows of its workgroup see: keys that the row does not see change
// nothing. The last part has all remaining keys.
fn part_of(place: Place, begin: i32, end: i32, columns: u32) -> Part {
    let from_position = (begin / info.chunk + i32(place.split)) * info.chunk;
    let until = select(min(from_position + info.chunk, end), end, place.split + 1u == info.splits);
    return Part(max(from_position, begin), until, info.head_dim, columns, u32(info.softcap != 0.0));
}

// Loads four rows and multiplies them by the scale.
fn load_rows(place: Place, count: u32, lane: u32, dim: u32) {
    for (var i = lane; i < count; i += LANES) {
        let d = i / FOURS;
        var numbers = vec4(0.0);
        for (var r = 0u; r < 4u; r++) {
            let row = place.first_row + i % FOURS * 4u + r;
            if row <= place.last_row && d < dim {
                numbers[r] = f32(q[query_of(place, row) + d * info.q_strides.w]) * info.scale;
            }
        }
        rows[i] = numbers;
    }
}

// Reduces the values that all lanes left in memory to their maximum, in the first elements of results.
fn largest_of_lanes(lane: u32) {
    workgroupBarrier();
    if lane < 16u * FOURS {
        let i = lane / FOURS * 16u * FOURS + lane % FOURS;
        var most = memory[i];
        for (var k = 1u; k < 16u; k++) {
            most = max(most, memory[i + k * FOURS]);
        }
        results[lane] = most;
    }
    workgroupBarrier();
    if lane < FOURS {
        var most = results[lane];
        for (var k = 1u; k < 16u; k++) {
            most = max(most, results[k * FOURS + lane]);
        }
        results[lane] = most;
    }
    workgroupBarrier();
}

// Reduces the values that all lanes left in memory to their sum.
fn sum_of_lanes(lane: u32) {
    workgroupBarrier();
    if lane < 16u * FOURS {
        let i = lane / FOURS * 16u * FOURS + lane % FOURS;
        var sum = memory[i];
        for (var k = 1u; k < 16u; k++) {
            sum += memory[i + k * FOURS];
        }
        results[lane] = sum;
    }
    workgroupBarrier();
    if lane < FOURS {
        var sum = results[lane];
        for (var k = 1u; k < 16u; k++) {
            sum += results[k * FOURS + lane];
        }
        results[lane] = sum;
    }
    workgroupBarrier();
}

// Advances the online softmax by one key per lane (https://arxiv.org/abs/1805.02867): leaves the weights in
// memory, and returns the factor for everything summed so far. Hidden keys have the lowest score.
fn weigh(
    scores: ptr<function, array<vec4<f32>, FOURS>>,
    largest: ptr<function, array<vec4<f32>, FOURS>>,
    sums: ptr<function, array<vec4<f32>, FOURS>>,
    lane: u32,
) -> array<vec4<f32>, FOURS> {
    var shrunk: array<vec4<f32>, FOURS>;
    for (var j = 0u; j < FOURS; j++) {
        memory[lane * FOURS + j] = (*scores)[j];
    }
    largest_of_lanes(lane);
    for (var j = 0u; j < FOURS; j++) {
        let most = max((*largest)[j], results[j]);
        let weight = select(exp((*scores)[j] - most), vec4(0.0), (*scores)[j] == vec4(LOWEST));
        shrunk[j] = exp((*largest)[j] - most);
        (*largest)[j] = most;
        (*sums)[j] = (*sums)[j] * shrunk[j] + weight;
        memory[lane * FOURS + j] = weight;
    }
    workgroupBarrier();
    return shrunk;
}
